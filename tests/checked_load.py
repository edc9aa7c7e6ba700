# SPDX-License-Identifier: Apache-2.0
"""Callers who never stop asking, and who hold every answer against the reference."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ensemble import Client, PipelineError

DEADLINE_SECONDS = 20.0
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Outcome:
    """Of one call: when it was sent and when it ended, and the error if there was one."""

    sent: float
    ended: float
    error: PipelineError | None
    wrong: int = 0


class CheckedLoad:
    """Some clients in a closed loop, each call a few of the texts; use it as a context manager.

    logits: the reference's, [texts, labels]. A client that is refused waits a little, as any caller does.
    """

    def __init__(self, url: str, texts: Sequence[str], logits: np.ndarray, clients: int = 8) -> None:
        self._url, self._texts, self._logits = url, texts, logits
        self._ending = threading.Event()
        self._outcomes: list[Outcome] = []
        self._threads = [threading.Thread(target=self._call, args=(number,)) for number in range(clients)]

    def __enter__(self) -> CheckedLoad:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    def end(self) -> list[Outcome]:
        """All calls, once each has its answer or its error."""
        self._ending.set()
        for thread in self._threads:
            thread.join()
        return self.outcomes

    @property
    def outcomes(self) -> list[Outcome]:
        """The calls that have ended, in that order."""
        return list(self._outcomes)

    def await_answers(self, count: int, sent_after: float = 0.0, seconds: float = 60.0) -> float:
        """Wait until so many calls that were sent after a moment were answered; when the first of them was."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            answered = [o.ended for o in self.outcomes if o.error is None and o.sent > sent_after]
            if len(answered) >= count:
                return min(answered)
            time.sleep(0.02)
        raise AssertionError(f"no {count} answers within {seconds:.0f} s: {self.outcomes[-5:]}")

    def _call(self, seed: int) -> None:
        chance = random.Random(seed)
        with Client(self._url, timeout_seconds=DEADLINE_SECONDS, retries=0) as client:
            while not self._ending.is_set():
                chosen = chance.sample(range(len(self._texts)), chance.randint(1, 4))
                sent = time.monotonic()
                try:
                    answers = client.classify([self._texts[index] for index in chosen])
                except PipelineError as error:
                    self._outcomes.append(Outcome(sent, time.monotonic(), error))
                    time.sleep(0.05)
                    continue
                got = np.array([answer.logits for answer in answers])
                wrong = int((np.abs(got - self._logits[chosen]) > TOLERANCE).any(axis=1).sum())
                self._outcomes.append(Outcome(sent, time.monotonic(), None, wrong))
