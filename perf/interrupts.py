# SPDX-License-Identifier: Apache-2.0
"""SIGINT and SIGTERM end a measurement that keeps what it has. Knows nothing of what is measured."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Signals that come closer together are one: `timeout make perf` sends two.
SAME_SECONDS = 0.5
_at_once: list[Callable[[], None]] = []


class Interrupted(KeyboardInterrupt):
    """What either signal raises. exit_code: as shells have it, 130 or 143."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


def kept(measure: Callable[[], None]) -> int:
    """Run it; returns 0, or the exit code of the signal that ended it.

    Only the first signal raises, so that none disturbs the writing of what was measured; a later one ends what ended_by
    was told of. SIGINT counts too where a shell had it ignored, as it does for what it starts in the background.
    """
    first: float | None = None

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if first is None:
            first = time.monotonic()
            raise Interrupted(number)
        if time.monotonic() - first > SAME_SECONDS:
            for end in _at_once:
                end()

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        measure()
    except Interrupted as interrupted:
        return interrupted.exit_code
    finally:
        for number, old in before.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)
    return 0


@contextmanager
def ended_by(end: Callable[[], None]) -> Iterator[None]:
    """In the block, a second signal calls this: whoever still waits for an answer then has an error instead.

    end: called in a signal handler, so it must wait for nothing.
    """
    _at_once.append(end)
    try:
        yield
    finally:
        _at_once.remove(end)
