# SPDX-License-Identifier: Apache-2.0
"""What came of the requests of many threads. Knows nothing of what was asked."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

# Kept word for word; all are counted.
MOST_FAULTS = 100


class Tally:
    """Counts by kind of request and outcome, and the faults: what must not come of a request.

    requests, texts: so far; texts are those whose answers were compared
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()
        self.requests = self.texts = self.faulty = self.crossed = 0
        self.faults: list[str] = []

    def add(self, kind: str, outcome: str, texts: int = 0) -> None:
        """One request that came to something it may come to."""
        with self._lock:
            self.requests += 1
            self.texts += texts
            self._counts[kind, outcome] += 1

    def fault(self, kind: str, outcome: str, faults: Sequence[str], texts: int = 0) -> None:
        """One request that did not. faults: a line each; what is another text's answer begins with "crossed"."""
        self.add(kind, outcome, texts)
        with self._lock:
            self.faulty += len(faults)
            self.crossed += sum(fault.startswith("crossed") for fault in faults)
            room = MOST_FAULTS - len(self.faults)
            self.faults += [f"{kind}: {fault}" for fault in faults[: max(0, room)]]

    def described(self) -> dict[str, Any]:
        """For a record. wrong: answers that were, the crossed among them, and requests that ended as none may."""
        with self._lock:
            counts: dict[str, dict[str, int]] = {}
            for (kind, outcome), count in sorted(self._counts.items()):
                counts.setdefault(kind, {})[outcome] = count
            return {
                "requests": self.requests,
                "texts_compared": self.texts,
                "wrong": self.faulty,
                "crossed": self.crossed,
                "outcomes": counts,
                "faults": list(self.faults),
            }
