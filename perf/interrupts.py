# SPDX-License-Identifier: Apache-2.0
"""SIGINT and SIGTERM end a measurement that keeps what it has. Knows nothing of what is measured."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """What either signal raises. exit_code: as shells have it, 130 or 143."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


def kept(measure: Callable[[], None]) -> int:
    """Run it; returns 0, or the exit code of the signal that ended it.

    Only the first signal counts: `timeout make perf` sends two, and the second must not disturb the writing of what was
    measured. SIGINT counts too where a shell had it ignored, as it does for what it starts in the background.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(number)

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        measure()
    except Interrupted as interrupted:
        return interrupted.exit_code
    finally:
        for number, old in before.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)
    return 0
