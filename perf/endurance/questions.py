# SPDX-License-Identifier: Apache-2.0
"""Asks a server for texts that have a reference, and tallies whether the answers are right. Knows nothing of loads."""

from __future__ import annotations

import http.client
import random
from collections.abc import Sequence

from perf.endurance.exchange import TRANSPORTS, Caller, Refused
from perf.endurance.reference import Answer, Reference
from perf.endurance.tally import Tally

# What a server that is asked for more than it has promised to keep waiting answers, over gRPC and HTTP.
FULL_QUEUE = "maximum queue size"
RIGHT, QUEUE_FULL = "right", "queue full"


class Asker:
    """Tallies under a kind of request what comes of asking for texts of the reference."""

    def __init__(self, reference: Reference, tally: Tally) -> None:
        self.reference, self.tally = reference, tally

    def ask(self, caller: Caller, kind: str, rows: Sequence[int], rng: random.Random, seconds: float) -> bool:
        """These texts as one request over any transport. False if it was not taken and may be sent again."""
        transport, strings = rng.choice(TRANSPORTS), rng.random() < 0.5
        texts = [self.reference.texts[row] for row in rows]
        try:
            answer = caller.ask(transport, texts, strings=strings, seconds=seconds)
        except (Refused, OSError, http.client.HTTPException) as error:
            return not self.unanswered(kind, error, f"{len(rows)} rows over {transport}")
        self.judge(kind, rows, answer)
        return True

    def unanswered(self, kind: str, error: Exception, what: str) -> bool:
        """Tally a request without an answer; True if that is no fault and it may be sent again."""
        if FULL_QUEUE in str(error):
            self.tally.add(kind, QUEUE_FULL)
            return True
        self.tally.fault(kind, "no answer", [f"{what}: {type(error).__name__}: {error}"])
        return False

    def judge(self, kind: str, rows: Sequence[int], answer: Answer) -> None:
        """Tally an answer."""
        if faults := self.reference.faults(rows, answer):
            self.tally.fault(kind, "wrong", faults, len(rows))
        else:
            self.tally.add(kind, RIGHT, len(rows))
