# SPDX-License-Identifier: Apache-2.0
"""A thread that looks at something again and again while something else runs. Knows nothing of what it looks at."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import TracebackType
from typing import TypeVar

INTERVAL_SECONDS = 0.1

Watcher = TypeVar("Watcher", bound="Sampler")


class Sampler:
    """`with` it, sample() runs in a thread, which is waited for at the end."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._thread = threading.Thread(target=self.sample, daemon=True)

    def __enter__(self: Watcher) -> Watcher:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def sample(self) -> None:
        """In the thread; to be brought by what looks, and over when ticks() are."""
        raise NotImplementedError

    def ticks(self) -> Iterator[None]:
        """One every INTERVAL_SECONDS, until the `with` ends."""
        while not self._done.wait(INTERVAL_SECONDS):
            yield
