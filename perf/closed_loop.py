# SPDX-License-Identifier: Apache-2.0
"""A closed-loop load over gRPC: so many requests in flight, each followed by the next. Knows nothing of what it loads.

Requests are encoded before the load starts, because the client shares the machine's cores with the server: what it
spends on encoding, the server does not have.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import grpc
import numpy as np
import numpy.typing as npt
from tritonclient.grpc import InferResult, service_pb2, service_pb2_grpc

# A proxy that the environment names is not for a server of this machine.
CHANNEL = [("grpc.enable_http_proxy", 0)]
# For one request of a timed load: one that takes longer has no place in a figure.
REQUEST_SECONDS = 60.0


def run(url: str, texts: Sequence[str], in_flight: int) -> tuple[float, npt.NDArray[np.float32]]:
    """Send every text as a request of its own; returns the seconds it took and the logits, FP32 [texts, labels]."""
    return answers(url, [message_of(text) for text in texts], in_flight)


def answers(
    url: str, messages: Sequence[service_pb2.ModelInferRequest], in_flight: int
) -> tuple[float, npt.NDArray[np.float32]]:
    """The same for requests that are made already, each of one row."""
    return asyncio.run(_load(url, messages, in_flight))


@dataclass(frozen=True)
class Load:
    """What a timed load did.

    started:   by time.monotonic(), which all processes of a machine share
    ended:     when the last answer was there
    latencies: seconds from sending to answer, one entry a request
    answered:  INT64 [texts], how often each text was
    busy:      seconds of CPU time the client took, over the seconds it ran: near 1 it had no time to send more
    """

    started: float
    ended: float
    latencies: npt.NDArray[np.float64]
    answered: npt.NDArray[np.int64]
    busy: float

    @property
    def seconds(self) -> float:
        """From the first request to the last answer."""
        return self.ended - self.started


def timed(url: str, texts: Sequence[str], in_flight: int, seconds: float, start: float = 0.0) -> Load:
    """Send the texts in turn, over and over, for so many seconds, then wait for what is in flight.

    start: not before this time.monotonic(), so that several processes begin together. Raises grpc.aio.AioRpcError if
    any request fails.
    """
    messages = [message_of(text) for text in texts]
    return asyncio.run(_timed(url, messages, in_flight, seconds, start))


def reason(error: Exception) -> str:
    """One line. The string of a gRPC error has many, and details() is the one that says why."""
    details = getattr(error, "details", None)
    return str(details() if callable(details) else f"{type(error).__name__}: {error}").splitlines()[0]


def message_of(text: str) -> service_pb2.ModelInferRequest:
    """One text for the ensemble, as it goes over the wire."""
    message = service_pb2.ModelInferRequest(model_name="text_classifier")
    message.inputs.add(name="text", datatype="BYTES").shape.extend([1, 1])
    message.outputs.add(name="logits")
    encoded = text.encode()
    message.raw_input_contents.append(len(encoded).to_bytes(4, "little") + encoded)
    return message


async def _load(
    url: str, messages: Sequence[service_pb2.ModelInferRequest], in_flight: int
) -> tuple[float, npt.NDArray[np.float32]]:
    answers: list[service_pb2.ModelInferResponse] = [None] * len(messages)
    waiting = iter(enumerate(messages))

    async def worker(stub: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
        for index, message in waiting:
            answers[index] = await stub.ModelInfer(message)

    async with grpc.aio.insecure_channel(url, options=CHANNEL) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        started = time.perf_counter()
        await asyncio.gather(*(worker(stub) for _ in range(in_flight)))
        seconds = time.perf_counter() - started
    return seconds, np.concatenate([InferResult(answer).as_numpy("logits") for answer in answers])


async def _timed(
    url: str, messages: list[service_pb2.ModelInferRequest], in_flight: int, seconds: float, start: float
) -> Load:
    latencies: list[float] = []
    answered = np.zeros(len(messages), dtype=np.int64)
    turn = count()

    async def worker(stub: service_pb2_grpc.GRPCInferenceServiceStub, end: float) -> None:
        while (sent := time.monotonic()) < end:
            index = next(turn) % len(messages)
            await stub.ModelInfer(messages[index], timeout=REQUEST_SECONDS)
            latencies.append(time.monotonic() - sent)
            answered[index] += 1

    async with grpc.aio.insecure_channel(url, options=CHANNEL) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        await asyncio.wait_for(channel.channel_ready(), REQUEST_SECONDS)
        await asyncio.sleep(max(0.0, start - time.monotonic()))
        started, cpu = time.monotonic(), time.process_time()
        await asyncio.gather(*(worker(stub, started + seconds) for _ in range(in_flight)))
        ended = time.monotonic()
        busy = (time.process_time() - cpu) / (ended - started)
    return Load(started, ended, np.array(latencies), answered, busy)
