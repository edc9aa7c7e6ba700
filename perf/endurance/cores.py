# SPDX-License-Identifier: Apache-2.0
"""Cores that client and server do not share, so that the one does not take what the other was measured with.

A process has the cores of the thread that started it: sched_setaffinity(2), Linux. Knows nothing of servers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ensemble.errors import ConfigError


@contextmanager
def apart(own: int) -> Iterator[Callable[[], None]]:
    """What is started in here has all cores but `own`; call what it gives, and this process has those instead.

    own: 0 leaves everything as it is. Raises ConfigError if no core would be left.
    """
    cores = sorted(os.sched_getaffinity(0))
    if own >= len(cores):
        raise ConfigError(f"--client-cores {own}: there are {len(cores)}, and the server needs at least one")
    _move(cores[own:])
    try:
        yield lambda: _move(cores[:own] or cores)
    finally:
        _move(cores)


def _move(cores: list[int]) -> None:
    """All threads of this process; new ones go where the one goes that starts them."""
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread.name), cores)
