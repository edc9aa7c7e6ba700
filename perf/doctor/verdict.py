# SPDX-License-Identifier: Apache-2.0
"""What the doctor says: a verdict with its evidence and what to do. Knows nothing of how it was come by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

FAULT: Final = "fault"
HEALTHY: Final = "healthy"
UNKNOWN: Final = "unknown"
NOTE: Final = "note"
PROVED: Final = "proved"
LIKELY: Final = "likely"
POSSIBLE: Final = "possible"

NOT_BATCHING = "not batching"
TAKEN_APART = "batches taken apart"
ONE_BY_ONE = "tokenizes one by one"
PADDING = "padding waste"
TOKENIZER_BOUND = "tokenizer-bound"
QUEUE_BOUND = "queue-bound"
RESPONSES = "responses do not match requests"
COMPUTE_BOUND = "compute-bound and healthy"
SOUND = "healthy"
TOO_LITTLE = "too little load to tell"
CANNOT_TELL = "cannot tell"


@dataclass(frozen=True)
class Verdict:
    """One finding about one model.

    kind:      fault, healthy, unknown or note; only a note leaves the exit code alone
    certainty: proved (counted, or written in the config), likely (an experiment says so) or possible
    evidence:  lines with the numbers
    fix:       what to do; "" where there is nothing to do
    """

    name: str
    kind: Literal["fault", "healthy", "unknown", "note"]
    model: str
    certainty: Literal["proved", "likely", "possible"]
    evidence: tuple[str, ...]
    fix: str = ""

    def as_json(self) -> dict[str, Any]:
        """For the result's file."""
        return {**asdict(self), "evidence": list(self.evidence)}


def exit_code(verdicts: Iterable[Verdict]) -> int:
    """1 if a fault was found, else 2 if something could not be told (or nothing was said at all), else 0."""
    kinds = {verdict.kind for verdict in verdicts}
    return 1 if FAULT in kinds else 2 if UNKNOWN in kinds or HEALTHY not in kinds else 0
