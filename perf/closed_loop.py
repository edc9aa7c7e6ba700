# SPDX-License-Identifier: Apache-2.0
"""A closed-loop load over gRPC: so many requests in flight, each followed by the next. Knows nothing of what it loads.

Requests are encoded before the load starts, because the client shares the machine's cores with the server: what it
spends on encoding, the server does not have.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import grpc
import numpy as np
import numpy.typing as npt
from tritonclient.grpc import InferResult, service_pb2, service_pb2_grpc


def run(url: str, texts: Sequence[str], in_flight: int) -> tuple[float, npt.NDArray[np.float32]]:
    """Send every text as a request of its own; returns the seconds it took and the logits, FP32 [texts, labels]."""
    messages = [message_of(text) for text in texts]
    return asyncio.run(_load(url, messages, in_flight))


def message_of(text: str) -> service_pb2.ModelInferRequest:
    """One text for the ensemble, as it goes over the wire."""
    message = service_pb2.ModelInferRequest(model_name="text_classifier")
    message.inputs.add(name="text", datatype="BYTES").shape.extend([1, 1])
    message.outputs.add(name="logits")
    encoded = text.encode()
    message.raw_input_contents.append(len(encoded).to_bytes(4, "little") + encoded)
    return message


async def _load(
    url: str, messages: list[service_pb2.ModelInferRequest], in_flight: int
) -> tuple[float, npt.NDArray[np.float32]]:
    answers: list[service_pb2.ModelInferResponse] = [None] * len(messages)
    waiting = iter(enumerate(messages))

    async def worker(stub: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
        for index, message in waiting:
            answers[index] = await stub.ModelInfer(message)

    async with grpc.aio.insecure_channel(url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        started = time.perf_counter()
        await asyncio.gather(*(worker(stub) for _ in range(in_flight)))
        seconds = time.perf_counter() - started
    return seconds, np.concatenate([InferResult(answer).as_numpy("logits") for answer in answers])
