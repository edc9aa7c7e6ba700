# SPDX-License-Identifier: Apache-2.0
"""An open-loop load over gRPC: Poisson arrivals, whatever the server makes of them. Knows nothing of what it loads.

Latency counts from the time a request was due, not from when it was sent: a client that falls behind would otherwise
hide the very waiting it causes. perf_analyzer has Poisson arrivals too, but counts from sending (and only marks a
request as delayed), so it is not used here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import numpy as np
import numpy.typing as npt
from tritonclient.grpc import service_pb2, service_pb2_grpc

from perf.closed_loop import CHANNEL, REQUEST_SECONDS


@dataclass(frozen=True)
class Arrivals:
    """What an open loop did, one entry a request. Seconds; `due` since the loop began.

    began:     by time.time()
    lag:       from due to sent
    latencies: from due to answer, NaN for a request that failed
    answers:   None for a request that failed
    """

    began: float
    due: npt.NDArray[np.float64]
    lag: npt.NDArray[np.float64]
    latencies: npt.NDArray[np.float64]
    answers: list[service_pb2.ModelInferResponse | None]

    @property
    def seconds(self) -> float:
        """From the beginning to the last answer."""
        return float(np.nanmax(self.due + self.latencies)) if not np.isnan(self.latencies).all() else 0.0


def poisson(rate: float, seconds: float, seed: int) -> npt.NDArray[np.float64]:
    """When requests are due: at random, `rate` a second on average."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, size=max(1, round(rate * seconds)))
    return np.asarray(np.cumsum(gaps), dtype=np.float64)


def run(url: str, messages: Sequence[service_pb2.ModelInferRequest], due: npt.NDArray[np.float64]) -> Arrivals:
    """Send the messages in turn, each when it is due, and wait for all answers."""
    return asyncio.run(_run(url, messages, due))


async def _run(url: str, messages: Sequence[service_pb2.ModelInferRequest], due: npt.NDArray[np.float64]) -> Arrivals:
    lag, latencies = np.zeros(len(due)), np.full(len(due), np.nan)
    answers: list[service_pb2.ModelInferResponse | None] = [None] * len(due)

    async with grpc.aio.insecure_channel(url, options=CHANNEL) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        await asyncio.wait_for(channel.channel_ready(), REQUEST_SECONDS)
        began, start = time.time(), time.monotonic()

        async def send(index: int) -> None:
            lag[index] = time.monotonic() - start - due[index]
            try:
                answers[index] = await stub.ModelInfer(messages[index % len(messages)], timeout=REQUEST_SECONDS)
            except grpc.aio.AioRpcError:
                return
            latencies[index] = time.monotonic() - start - due[index]

        tasks = []
        for index, when in enumerate(due):
            if (wait := start + when - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(send(index)))
        await asyncio.gather(*tasks)
    return Arrivals(began, due, lag, latencies, answers)
