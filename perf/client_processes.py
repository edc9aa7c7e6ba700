# SPDX-License-Identifier: Apache-2.0
"""The closed-loop load from several processes at once: one Python process cannot keep a fast GPU busy.

Knows how to start them and add up what they did, nothing of servers.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import TracebackType

import numpy as np

from ensemble.errors import ServerError
from perf import closed_loop
from perf.closed_loop import Load

# Until all processes have their task and a connection.
HEAD_START_SECONDS = 0.3


def default_count() -> int:
    """A quarter of the cores, for the server needs the others; at most 8."""
    return max(1, min(8, len(os.sched_getaffinity(0)) // 4))


class Clients:
    """So many client processes, kept from one load to the next. With one, the load runs in this process."""

    def __init__(self, processes: int) -> None:
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []
        context = multiprocessing.get_context("spawn")  # gRPC does not live through a fork
        for _ in range(processes if processes > 1 else 0):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def __enter__(self) -> Clients:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.terminate()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            pipe.close()

    def load(self, url: str, texts: Sequence[str], in_flight: int, seconds: float) -> Load:
        """closed_loop.timed() with `in_flight` shared out. Raises ServerError if a request fails."""
        if not self._pipes:
            try:
                return closed_loop.timed(url, texts, in_flight, seconds)
            except Exception as error:
                raise ServerError(f"a request failed under load: {closed_loop.reason(error)}") from error
        pipes = self._pipes[:in_flight]
        start = time.monotonic() + HEAD_START_SECONDS
        for number, pipe in enumerate(pipes):
            share = in_flight // len(pipes) + (number < in_flight % len(pipes))
            # Each begins elsewhere in the texts, or all would send the same ones at once.
            first = number * len(texts) // len(pipes)
            pipe.send((url, [*texts[first:], *texts[:first]], share, seconds, start))
        answers = [pipe.recv() for pipe in pipes]
        for answer in answers:
            if isinstance(answer, str):
                raise ServerError(f"a request failed under load: {answer}")
        return _together(answers, len(texts))


def _together(loads: Sequence[Load], texts: int) -> Load:
    answered = [np.roll(load.answered, number * texts // len(loads)) for number, load in enumerate(loads)]
    return Load(
        started=min(load.started for load in loads),
        ended=max(load.ended for load in loads),
        latencies=np.concatenate([load.latencies for load in loads]),
        answered=np.sum(answered, axis=0),
        busy=max(load.busy for load in loads),
    )


def _serve(pipe: Connection) -> None:
    """A client process: tasks in, what they did out, until the other end is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    try:
        while True:
            task = pipe.recv()
            try:
                pipe.send(closed_loop.timed(*task))
            except Exception as error:
                pipe.send(closed_loop.reason(error))
    except (EOFError, BrokenPipeError):
        return
