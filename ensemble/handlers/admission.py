# SPDX-License-Identifier: Apache-2.0
"""Which requests go on to the classifier at once, which wait, and which are refused. Knows nothing of Triton.

Triton's own bound, max_queue_size, is of no use here. The tokenizer is fast and the classifier slow, so all that waits,
waits before the classifier, with the tokenizer's work done already: a bound on the first step would never be reached.
On either it turns the batcher's prefetching off, and then nothing wakes the batcher when its model gets free: it sleeps
until the next request comes or half a second is over (24.10, dynamic_batch_scheduler.cc, WaitForPayloadSlotAvailable).

So the tokenizer keeps the queue. The classifier is sent a little more than keeps it busy; the rest is kept as it came,
in order; and what comes while enough is kept already is refused. It is good here, between the steps, for another reason
too: an ensemble looks whether its caller is still there only when it goes from one step to the next.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ensemble.errors import Overloaded

# While requests wait, whether the classifier has room is asked so often: in that time, a GPU at 10,000 rows a second
# does 50 of the rows that it was sent ahead.
POLL_SECONDS = 0.005
# What waits before the tokenizer itself is looked at so often, whether or not the classifier is busy.
GLANCE_SECONDS = 0.1
# While nobody can say what waits, which is likeliest under overload, whatever was sent counts as waiting still. So that
# a count that never comes back does not end the service, it counts as done after this time: ahead_rows go on in each.
# Longer than it takes to ask twice (pending.py).
BLIND_SECONDS = 2.0


@dataclass(frozen=True)
class Limits:
    """The parameters of the tokenizer's config; what each is for is said there."""

    max_waiting_rows: int
    max_request_bytes: int
    ahead_rows: int
    call_bytes: int
    max_batch_size: int


@dataclass(frozen=True)
class Pending:
    """Requests that wait: before this model, and before the one it feeds."""

    here: int = 0
    ahead: int = 0


@dataclass
class Job:
    """One request. `size` is its text in bytes; `expires` a time of the clock, None for never."""

    payload: Any
    rows: int
    size: int
    expires: float | None = None


class Line:
    """Jobs in the order in which they came, with the sums over them."""

    def __init__(self) -> None:
        self.jobs: deque[Job] = deque()
        self.rows = self.size = 0

    def append(self, job: Job) -> None:
        """At the end."""
        self.jobs.append(job)
        self.rows, self.size = self.rows + job.rows, self.size + job.size

    def take(self, rows: int, size: int) -> list[Job]:
        """From the beginning: the first in any case, and more while they are not too many."""
        taken: list[Job] = []
        while self.jobs and (not taken or (self.jobs[0].rows <= rows and self.jobs[0].size <= size)):
            job = self.jobs.popleft()
            rows, size = rows - job.rows, size - job.size
            self.rows, self.size = self.rows - job.rows, self.size - job.size
            taken.append(job)
        return taken

    def take_expired(self, now: float) -> list[Job]:
        """From anywhere."""
        late = [job for job in self.jobs if job.expires is not None and job.expires <= now]
        if late:
            still = [job for job in self.jobs if job.expires is None or job.expires > now]
            self.jobs.clear()
            self.rows = self.size = 0
            for job in still:
                self.append(job)
        return late


class Admission:
    """The queue between two models. Threads may share it."""

    def __init__(
        self, limits: Limits, pending: Callable[[], Pending | None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """pending: what waits, None where that cannot be told now."""
        self._limits, self._pending, self._clock = limits, pending, clock
        self._lock = threading.Lock()
        self._short, self._long = Line(), Line()
        self._long_is_next = False
        # Rows of the requests sent on, youngest last: what waits ahead are the last so many of them.
        self._sent: deque[int] = deque(maxlen=4096)
        self._ahead = 0  # rows at most: those that waited when last asked, and those sent since
        self._here = 0
        self._asked = float("-inf")
        self._blind_since: float | None = None

    @property
    def kept(self) -> int:
        """Rows that wait here."""
        return self._short.rows + self._long.rows

    def admit(self, jobs: list[Job]) -> list[bool | Overloaded]:
        """Of each, in order: True where it goes on now, False where it is kept until take() gives it out, or why not.

        What goes on now is at most call_bytes, so that nobody waits for a neighbour's long texts.
        """
        with self._lock:
            left = self._limits.call_bytes
            answers: list[bool | Overloaded] = []
            for job in jobs:
                answer = self._admit(job, left)
                if answer is True:
                    left -= job.size
                    self._count(job)
                answers.append(answer)
            return answers

    def take(self) -> tuple[list[Job], list[Job]]:
        """The next of those kept, as many as there is room for and as go into one call; and those whose time is up."""
        with self._lock:
            now = self._clock()
            late = self._short.take_expired(now) + self._long.take_expired(now)
            lines = [line for line in (self._short, self._long) if line.jobs]
            if not lines or not self._room():
                return [], late
            # In turn, where both wait: neither holds up the other for more than one call.
            line = lines[-1 if self._long_is_next else 0]
            self._long_is_next = line is self._short
            taken = line.take(self._limits.max_batch_size, self._limits.call_bytes)
            for job in taken:
                self._count(job)
            return taken, late

    def _admit(self, job: Job, left: int) -> bool | Overloaded:
        long = job.size > left
        if not long and not self._short.jobs and self._room():
            return True
        if self.kept + self._here >= self._limits.max_waiting_rows:
            self._look(POLL_SECONDS)  # the last look may be older than what it saw
        if self.kept + self._here >= self._limits.max_waiting_rows:
            return Overloaded(
                f"Exceeds maximum queue size: {self._limits.max_waiting_rows} rows (max_waiting_rows) wait already: "
                "send less at once, or try later"
            )
        if long and self._long.size >= self._limits.max_request_bytes:
            return Overloaded(
                f"Exceeds maximum queue size: {self._limits.max_request_bytes} bytes (max_request_bytes) of long texts "
                "wait already: send less text at once, or try later"
            )
        (self._long if long else self._short).append(job)
        return False

    def _room(self) -> bool:
        """Whether the next model may be sent more. Asks it often only where it may have no room."""
        self._look(POLL_SECONDS if self._ahead >= self._limits.ahead_rows else GLANCE_SECONDS)
        return self._ahead < self._limits.ahead_rows

    def _look(self, max_age: float) -> None:
        if self._clock() - self._asked < max_age:
            return
        pending = self._pending()
        self._asked = self._clock()
        if pending is None:
            if self._blind_since is None:
                self._blind_since = self._asked
            elif self._asked - self._blind_since >= BLIND_SECONDS:
                self._blind_since, self._ahead, self._here = self._asked, 0, 0
            return
        self._blind_since, self._here = None, pending.here
        unknown = max(0, pending.ahead - len(self._sent))  # sent by others: a row each, at least
        self._ahead = sum(islice(reversed(self._sent), pending.ahead)) + unknown

    def _count(self, job: Job) -> None:
        self._sent.append(job.rows)
        self._ahead += job.rows
