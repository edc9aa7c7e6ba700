# SPDX-License-Identifier: Apache-2.0
"""A short closed-loop load that ends by time or by count, whichever is first. Failures are counted, not raised.

Beside perf/closed_loop.py, which measures our own ensemble and gives no figure once a request fails.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
    url: str,
    messages: Sequence[service_pb2.ModelInferRequest],
    in_flight: int,
    seconds: float,
    most: int,
    *,
    streamed: bool = False,
) -> Load:
    """Send the messages in turn until the time is up or `most` are sent; each client sends at least one.

    streamed: each client over a stream of its own, and a request is answered with its last response: what a decoupled
    model needs. Raises ServerError if the server goes away.
    """
    return asyncio.run(_drive(url, messages, in_flight, seconds, most, streamed))


async def _drive(
    url: str,
    messages: Sequence[service_pb2.ModelInferRequest],
    in_flight: int,
    seconds: float,
    most: int,
    streamed: bool,
) -> Load:
    latencies: list[float] = []
    failures: list[str] = []
    refused = sent = 0
    if streamed:  # so that there is a last response, whatever the model does
        for message in messages:
            message.parameters["triton_enable_empty_final_response"].bool_param = True

    async def client(stub: service_pb2_grpc.GRPCInferenceServiceStub, end: float) -> None:
        nonlocal refused, sent
        asker = _Stream(stub) if streamed else _Calls(stub)
        first = True
        while (first or time.monotonic() < end) and sent < most:
            first = False
            message = messages[sent % len(messages)]
            sent += 1
            started = time.monotonic()
            try:
                await asker.ask(message)
            except _Failed as error:
                if QUEUE_FULL in str(error):
                    refused += 1
                    continue
                failures.append(str(error))
                if error.gone:
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


class _Failed(Exception):
    """One request was not answered. gone: nor will the next be."""

    def __init__(self, reason: str, *, gone: bool = False) -> None:
        super().__init__(reason)
        self.gone = gone


def _failed(error: grpc.aio.AioRpcError) -> _Failed:
    return _Failed(reason(error), gone=error.code() == grpc.StatusCode.UNAVAILABLE)


class _Calls:
    """Asks by a call for each request."""

    def __init__(self, stub: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
        self._stub = stub

    async def ask(self, message: service_pb2.ModelInferRequest) -> None:
        """Returns once it is answered."""
        try:
            await self._stub.ModelInfer(message, timeout=REQUEST_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise _failed(error) from None


class _Stream:
    """Asks over one stream, or another after a failure."""

    def __init__(self, stub: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
        self._stub = stub
        self._stream: Any = None

    async def ask(self, message: service_pb2.ModelInferRequest) -> None:
        """Returns with the last response."""
        stream, self._stream = self._stream or self._stub.ModelStreamInfer(), None
        try:
            await stream.write(message)
            while True:
                response = await asyncio.wait_for(stream.read(), REQUEST_SECONDS)
                if response is grpc.aio.EOF:
                    raise _Failed("the server ended the stream")
                if response.error_message:
                    raise _Failed(response.error_message.splitlines()[0])
                if response.infer_response.parameters["triton_final_response"].bool_param:
                    break
        except grpc.aio.AioRpcError as error:
            raise _failed(error) from None
        except asyncio.TimeoutError:
            raise _Failed(f"no last response after {REQUEST_SECONDS:g} s") from None
        except asyncio.InvalidStateError:
            # What write() raises on a stream that has ended; why, read() would have said.
            raise _Failed("the server ended the stream") from None
        self._stream = stream


async def _lives(stub: service_pb2_grpc.GRPCInferenceServiceStub) -> bool:
    try:
        return bool((await stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=5)).live)
    except grpc.aio.AioRpcError:
        return False
