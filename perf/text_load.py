# SPDX-License-Identifier: Apache-2.0
"""A closed loop that sends every text once and keeps the latency and the answer of each, by its place in the list."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
from tritonclient.grpc import InferResult, service_pb2_grpc

from ensemble.errors import PipelineError, ServerError
from perf.closed_loop import CHANNEL, REQUEST_SECONDS, message_of, reason


@dataclass(frozen=True)
class Answers:
    """What came back, one entry a text.

    seconds:   from the first request to the last answer
    latencies: seconds from sending to answer
    logits:    FP32 [texts, labels]
    """

    seconds: float
    latencies: npt.NDArray[np.float64]
    logits: npt.NDArray[np.float32]


def send(url: str, texts: Sequence[str], in_flight: int) -> Answers:
    """Send all, in their order. Raises ServerError if a request fails."""
    try:
        return asyncio.run(_send(url, texts, in_flight))
    except grpc.aio.AioRpcError as error:
        raise ServerError(f"a request failed under load: {reason(error)}") from None


def same(found: npt.NDArray[np.float32], expected: npt.NDArray[np.float32], tolerance: float, what: str) -> None:
    """Raise PipelineError if logits, FP32 [texts, labels] both, differ: nothing is said of a speed then."""
    difference = float(np.abs(found - expected).max())
    if not difference <= tolerance:  # NaN too
        raise PipelineError(f"{what} differ from the in-process ones by {difference:.1e}: no speed is reported")


async def _send(url: str, texts: Sequence[str], in_flight: int) -> Answers:
    messages = [message_of(text) for text in texts]
    latencies = np.zeros(len(texts))
    answers: list[Any] = [None] * len(texts)
    waiting = iter(enumerate(messages))

    async def worker(stub: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
        for index, message in waiting:
            sent = time.perf_counter()
            answer = await stub.ModelInfer(message, timeout=REQUEST_SECONDS)
            latencies[index] = time.perf_counter() - sent
            answers[index] = answer

    async with grpc.aio.insecure_channel(url, options=CHANNEL) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        await asyncio.wait_for(channel.channel_ready(), REQUEST_SECONDS)
        started = time.perf_counter()
        await asyncio.gather(*(worker(stub) for _ in range(in_flight)))
        seconds = time.perf_counter() - started
    return Answers(seconds, latencies, np.concatenate([InferResult(answer).as_numpy("logits") for answer in answers]))
