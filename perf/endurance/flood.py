# SPDX-License-Identifier: Apache-2.0
"""Requests one after the other, and requests that come whatever becomes of those before them; what came of each.

Latency counts from the time a request was due (see open_loop.py). Knows nothing of a server's processes, and nothing of
what the figures should be.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
from tritonclient.grpc import service_pb2_grpc

from perf.closed_loop import CHANNEL, REQUEST_SECONDS
from perf.endurance import exchange
from perf.endurance.questions import FULL_QUEUE, QUEUE_FULL, RIGHT
from perf.endurance.reference import Reference
from perf.endurance.tally import Tally

WRONG, HUNG, ERROR = "wrong", "hung", "error"
# What gRPC may take longer to tell that a deadline has passed.
SLACK_SECONDS = 5.0
# After a request that was not answered, as callers do.
BACK_OFF_SECONDS = 0.1
# Latencies as before, so many in a row: the server has recovered.
RECOVERED = 5
# Between looks whether to stop.
TICK_SECONDS = 0.1


@dataclass(frozen=True)
class End:
    """What came of one request: RIGHT, WRONG, QUEUE_FULL, HUNG or ERROR. Seconds from when it was due, and sent."""

    outcome: str
    seconds: float
    from_sent: float


class Sender:
    """Asks for the texts of a reference, some rows a request; tallies, and keeps in `ends` by phase what came of each.

    deadline: of a request from now on, seconds
    """

    def __init__(
        self, channel: grpc.aio.Channel, reference: Reference, rows: int, tally: Tally, ends: dict[str, list[End]]
    ) -> None:
        self._stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        self._reference, self._tally, self._ends = reference, tally, ends
        count = len(reference.texts)
        self._rows = [[(first + row) % count for row in range(rows)] for first in range(count)]
        self._messages = [
            exchange.message([reference.texts[text].encode() for text in request]) for request in self._rows
        ]
        self.deadline = REQUEST_SECONDS

    async def ask(self, phase: str, number: int, late: float = 0.0) -> End:
        """One request, sent now, `late` seconds after it was due."""
        place, sent = number % len(self._messages), time.monotonic()
        answer, outcome, faults = None, RIGHT, list[str]()
        try:
            call = self._stub.ModelInfer(self._messages[place], timeout=self.deadline)
            answer = await asyncio.wait_for(call, self.deadline + SLACK_SECONDS)
        except asyncio.TimeoutError:
            outcome, faults = HUNG, [f"nothing came within {self.deadline:g} s, not even its deadline"]
        except grpc.aio.AioRpcError as error:
            outcome = outcome_of(error)
            faults = [] if outcome == QUEUE_FULL else [str(exchange.refused(error))]
        seconds = time.monotonic() - sent
        if answer is not None and (faults := self._reference.faults(self._rows[place], exchange.from_message(answer))):
            outcome = WRONG
        texts = len(self._rows[place]) if answer is not None else 0
        if faults:
            self._tally.fault(phase, outcome, faults, texts)
        else:
            self._tally.add(phase, outcome, texts)
        end = End(outcome, late + seconds, seconds)
        self._ends[phase].append(end)
        return end

    async def in_turn(self, phase: str, in_flight: int, seconds: float) -> float:
        """So many in flight for so long, each followed by the next; returns the answers a second."""
        began, answered = time.monotonic(), 0

        async def client(number: int) -> None:
            nonlocal answered
            while time.monotonic() < began + seconds:
                if (await self.ask(phase, number)).outcome in (RIGHT, WRONG):
                    answered += 1
                else:
                    await asyncio.sleep(BACK_OFF_SECONDS)
                number += in_flight

        await asyncio.gather(*(client(number) for number in range(in_flight)))
        return answered / (time.monotonic() - began)

    async def when_due(self, phase: str, due: npt.NDArray[np.float64], lag: list[float]) -> None:
        """Send each when it is due and wait for them all. lag: told how late each was sent, seconds."""
        start, tasks = time.monotonic(), []

        async def one(number: int) -> None:
            late = time.monotonic() - start - float(due[number])
            lag.append(late)
            await self.ask(phase, number, late)

        for number, when in enumerate(due):
            if (wait := start + when - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(one(number)))
        await asyncio.gather(*tasks)

    async def until_usual(self, phase: str, usual: float, seconds: float) -> float:
        """Seconds until single requests take no longer than usual; infinite if that is not within `seconds`."""
        began, in_a_row, number = time.monotonic(), 0, 0
        while time.monotonic() - began < seconds:
            end = await self.ask(phase, number)
            in_a_row = in_a_row + 1 if end.outcome == RIGHT and end.seconds <= usual else 0
            if in_a_row == RECOVERED:
                return time.monotonic() - began
            if end.outcome != RIGHT:
                await asyncio.sleep(BACK_OFF_SECONDS)
            number += 1
        return float("inf")


def outcome_of(error: grpc.RpcError) -> str:
    """A refusal is only what says that the queue is full: a server that is gone is UNAVAILABLE too."""
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        return HUNG
    return QUEUE_FULL if FULL_QUEUE in str(error.details()) else ERROR


def run(work: Coroutine[Any, Any, None], stop: threading.Event) -> None:
    """Run it in an event loop of this thread until it is done or told to stop. Raises what it raised."""

    async def watched() -> None:
        task = asyncio.ensure_future(work)
        while not (await asyncio.wait({task}, timeout=TICK_SECONDS))[0]:
            if stop.is_set():
                task.cancel()
        if not task.cancelled():
            task.result()

    asyncio.run(watched())


def channel(url: str) -> grpc.aio.Channel:
    """To a server of this machine."""
    return grpc.aio.insecure_channel(url, options=CHANNEL)


def ends() -> dict[str, list[End]]:
    """Of no request yet."""
    return defaultdict(list)


def answered(found: Sequence[End]) -> list[float]:
    """Seconds from due to answer, of those that were answered."""
    return [end.seconds for end in found if end.outcome in (RIGHT, WRONG)]
