# SPDX-License-Identifier: Apache-2.0
"""So many threads that work until they are done or told to stop, watched from the thread that started them.

Knows nothing of what they do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager

# Tells whether to go on waiting: after so many seconds, or at once if the work is done. Raises what a worker raised.
Watch = Callable[[float], bool]


@contextmanager
def workers(count: int, work: Callable[[int, threading.Event], None]) -> Iterator[Watch]:
    """`with workers(8, work) as busy: while busy(1.0): ...`; they are told to stop at the end of the block.

    Its end waits for them; see perf/interrupts.py of what ends that waiting.
    work: given its number and the event that tells it to stop.
    """
    stop, pool = threading.Event(), ThreadPoolExecutor(count)
    running = {pool.submit(work, number, stop) for number in range(count)}

    def busy(seconds: float) -> bool:
        done, left = wait(running, seconds, FIRST_EXCEPTION)
        for one in done:
            one.result()
        return bool(left)

    try:
        yield busy
    finally:
        stop.set()
        pool.shutdown()
    busy(0)
