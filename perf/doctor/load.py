# SPDX-License-Identifier: Apache-2.0
"""A short closed-loop load that ends by time or by count, whichever is first. Failures are counted, not raised.

Beside perf/closed_loop.py, which measures our own ensemble and gives no figure once a request fails.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from ensemble.errors import ServerError
from perf import closed_loop
from perf.closed_loop import REQUEST_SECONDS, reason

# Answers may be of any size.
CHANNEL = [*closed_loop.CHANNEL, ("grpc.max_receive_message_length", -1)]

# Not the server's fault but its choice: it was told to refuse when its queue is full.
QUEUE_FULL = "Exceeds maximum queue size"


@dataclass(frozen=True)
class Load:
    """What was sent and what came back.

    seconds:   from the first request to the last answer
    latencies: seconds, one entry an answered request
    refused:   by a full queue
    failures:  the first line of each other failure
    """

    seconds: float
    latencies: tuple[float, ...]
    refused: int
    failures: tuple[str, ...]

    @property
    def sent(self) -> int:
        """All requests."""
        return len(self.latencies) + self.refused + len(self.failures)


def drive(
    url: str, messages: Sequence[service_pb2.ModelInferRequest], in_flight: int, seconds: float, most: int
) -> Load:
    """Send the messages in turn until the time is up or `most` are sent; each client sends at least one.

    Raises ServerError if the server goes away.
    """
    return asyncio.run(_drive(url, messages, in_flight, seconds, most))


async def _drive(
    url: str, messages: Sequence[service_pb2.ModelInferRequest], in_flight: int, seconds: float, most: int
) -> Load:
    latencies: list[float] = []
    failures: list[str] = []
    refused = sent = 0

    async def client(stub: service_pb2_grpc.GRPCInferenceServiceStub, end: float) -> None:
        nonlocal refused, sent
        first = True
        while (first or time.monotonic() < end) and sent < most:
            first = False
            message = messages[sent % len(messages)]
            sent += 1
            started = time.monotonic()
            try:
                await stub.ModelInfer(message, timeout=REQUEST_SECONDS)
            except grpc.aio.AioRpcError as error:
                if QUEUE_FULL in str(error.details()):
                    refused += 1
                    continue
                failures.append(reason(error))
                if error.code() == grpc.StatusCode.UNAVAILABLE:
                    return  # the next would fail as well, at once and thousands of times
            else:
                latencies.append(time.monotonic() - started)

    async with grpc.aio.insecure_channel(url, options=CHANNEL) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        started = time.monotonic()
        await asyncio.gather(*(client(stub, started + seconds) for _ in range(in_flight)))
        ended = time.monotonic()
        if failures and not await _lives(stub):
            raise ServerError(f"the server at {url} went away under load ({failures[-1]}): see its log")
    return Load(ended - started, tuple(latencies), refused, tuple(failures))


async def _lives(stub: service_pb2_grpc.GRPCInferenceServiceStub) -> bool:
    try:
        return bool((await stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=5)).live)
    except grpc.aio.AioRpcError:
        return False
