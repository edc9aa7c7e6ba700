# SPDX-License-Identifier: Apache-2.0
"""What was seen of a model: phases, and the figures that rules go by. Reads nothing itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from perf.doctor import counts as counting
from perf.doctor.counts import Counts
from perf.doctor.load import Load
from perf.doctor.target import Target

# Of a load of ours, in this order (examination.py says what they are); of the user's own clients.
PHASES = ("alone", "alike", "rows", "mixed")
WATCHED = "watched"


@dataclass(frozen=True)
class Limits:
    """What the load may come to: sending ends after so many seconds or requests; at most `clients` are in flight.

    Without a load, requests and clients are 0.
    """

    seconds: float
    requests: int
    clients: int


@dataclass(frozen=True)
class Phase:
    """One part of a round.

    in_flight: 0 where the user's own clients send
    rows:      of each request; 0 as well
    counts:    by model, what its server counted meanwhile
    calls:     by model, forward passes or tokenizer calls, where the handler reports them
    gpu:       utilization, 0 to 1, at the end of a phase that was long enough for it
    """

    name: str
    in_flight: int
    rows: int
    load: Load
    counts: Mapping[str, Counts]
    calls: Mapping[str, float]
    gpu: float | None

    @property
    def crowded(self) -> bool:
        """Whether requests may have had company."""
        return self.in_flight != 1 and self.rows < 2


@dataclass
class Examination:
    """All that was seen."""

    target: Target
    limits: Limits
    phases: list[Phase] = field(default_factory=list)
    rows_failure: str = ""

    @property
    def watched(self) -> bool:
        """Whether nothing was sent."""
        return bool(self.named(WATCHED))

    @property
    def main(self) -> str:
        """The phase that is most like real traffic."""
        return WATCHED if self.watched else "mixed"

    @property
    def crowd(self) -> str:
        """Who sent in it, for a reader."""
        return "your clients' own traffic" if self.watched else f"{self.limits.clients} in flight"

    def named(self, name: str) -> list[Phase]:
        """The phases of that name, one a round."""
        return [phase for phase in self.phases if phase.name == name]

    def counts(self, name: str, model: str) -> Counts:
        """Of all rounds together."""
        return counting.total(phase.counts[model] for phase in self.named(name))

    def seconds(self, name: str) -> float:
        """Of all rounds together."""
        return sum(phase.load.seconds for phase in self.named(name))

    def queued(self, name: str, model: str) -> float:
        """Requests that waited at any moment, on the mean (Little's law)."""
        return self.counts(name, model).queue / 1e9 / self.seconds(name)

    def busy(self, name: str, model: str) -> float:
        """Share of its time in which an instance was at work, on the mean."""
        return self.counts(name, model).busy / self.seconds(name) / self.target.leaves[model].instances

    def calls(self, model: str) -> tuple[float, int, int] | None:
        """Calls that the handler reported with many in flight, and the executions and rows of those phases."""
        phases = [phase for phase in self.phases if phase.crowded and model in phase.calls]
        if not phases:
            return None
        together = counting.total(phase.counts[model] for phase in phases)
        return sum(phase.calls[model] for phase in phases), together.executions, together.rows
