# SPDX-License-Identifier: Apache-2.0
"""The bounded load: what is sent, in which order, and what the server counted for each part of it.

Four phases, in several rounds so that a disturbance of the machine falls on all of them:

    alone   one request in flight, always the same short one
    rows    one request in flight, of as many rows as batches had in `alike`
    alike   many in flight, all the same short request
    mixed   many in flight, of realistic lengths

`alike` and `rows` give the model the same work in the same size of batch. If they differ, the handler does more for
requests than for rows. `alike` and `mixed` differ only in the shapes. Knows nothing of verdicts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import tritonclient.grpc as triton

from ensemble.errors import PipelineError, ServerError
from perf.doctor import counts as counting
from perf.doctor.counts import Counts, Metrics
from perf.doctor.input_data import FileInputs
from perf.doctor.inputs import InputMaker
from perf.doctor.load import Load, drive
from perf.doctor.target import Target, connect, lost

ROUNDS = 3
PHASES = ("alone", "alike", "rows", "mixed")
# Between two readings of the counters; and how long they must not move to count as settled, rows missing or not.
PAUSE_SECONDS, QUIET_SECONDS = 0.02, 1.0
# Of the requests of one phase, encoded before it starts.
MOST_BYTES = 64_000_000


@dataclass(frozen=True)
class Limits:
    """What the load may come to: sending ends after so many seconds or requests; at most `clients` are in flight."""

    seconds: float
    requests: int
    clients: int


@dataclass(frozen=True)
class Phase:
    """One part of a round.

    rows:   of each request
    counts: by model, what its server counted meanwhile
    calls:  by model, forward passes or tokenizer calls, where the handler reports them
    """

    name: str
    in_flight: int
    rows: int
    load: Load
    counts: Mapping[str, Counts]
    calls: Mapping[str, float]
    gpu: float | None


@dataclass
class Examination:
    """All that was seen. history: by model, what had been counted before anything was sent."""

    target: Target
    limits: Limits
    inputs: InputMaker | FileInputs
    history: Mapping[str, Counts]
    phases: list[Phase] = field(default_factory=list)
    rows_failure: str = ""

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
        phases = [phase for phase in self.phases if phase.in_flight > 1 and model in phase.calls]
        if not phases:
            return None
        together = counting.total(phase.counts[model] for phase in phases)
        return sum(phase.calls[model] for phase in phases), together.executions, together.rows


def examine(target: Target, inputs: InputMaker | FileInputs, limits: Limits, metrics: Metrics) -> Examination:
    """Send the load. Raises PipelineError if the model refuses what it is sent, ServerError if the server goes away."""
    try:
        with connect(target.url) as client:
            found = Examination(target, limits, inputs, _read(client, target))
            fit(target, inputs)
            busiest = list(target.leaves)[-1]
            metrics.check(busiest, _settled(client, target, found.history, 1)[busiest].executions)
            for _ in range(ROUNDS):
                for name in PHASES:
                    _phase(found, client, metrics, name)
            return found
    except triton.InferenceServerException as error:
        raise ServerError(lost(target.url, error)) from None


def fit(target: Target, inputs: InputMaker | FileInputs) -> None:
    """One request of each end of the lengths; shorter ones, then smaller ids, where the model takes no such.

    Raises PipelineError with the model's own words.
    """
    while True:
        load = _send(target, inputs, inputs.longest())
        if not load.failures:
            return
        short = isinstance(inputs, FileInputs) or inputs.cap <= 16
        if short and not (isinstance(inputs, InputMaker) and inputs.smaller_ids()):
            raise PipelineError(
                f"{target.model} refuses what the doctor sends ({load.failures[0]}): give requests that it takes with "
                "--input-data"
            )
        if not short:
            inputs.cap //= 2


def _send(target: Target, inputs: InputMaker | FileInputs, index: int) -> Load:
    return drive(target.url, [inputs.make(index).message(target.model)], 1, 0, 1)


def _phase(found: Examination, client: Any, metrics: Metrics, name: str) -> None:
    target, limits, inputs = found.target, found.limits, found.inputs
    rows = _rows(found) if name == "rows" else 1
    if name == "rows" and (rows < 2 or found.rows_failure):
        return
    in_flight = 1 if name in ("alone", "rows") else limits.clients
    # One after the other, each a request of its own.
    one = inputs.make(inputs.alike(), rows).message(target.model)
    most = min(len(inputs), max(8, MOST_BYTES // one.ByteSize()))
    messages = [inputs.make(index).message(target.model) for index in range(most)] if name == "mixed" else [one]
    before, text = _read(client, target), metrics.read()
    parts = ROUNDS * len(PHASES)
    load = drive(target.url, messages, in_flight, limits.seconds / parts, limits.requests // parts)
    utilization = counting.utilization(metrics.read())
    after = _settled(client, target, before, len(load.latencies) * rows)
    if name == "rows" and load.failures:
        found.rows_failure = f"a request of {rows} rows: {load.failures[0]}"
        return
    found.phases.append(
        Phase(
            name,
            in_flight,
            rows,
            load,
            {model: after[model].plus(before[model], -1) for model in after},
            _calls(text, metrics.read(), target),
            utilization,
        )
    )


def _rows(found: Examination) -> int:
    """As many rows as batches had in `alike`, in the leaf where most were formed."""
    limit = int(found.target.config.max_batch_size)
    alike = found.named("alike")[-1]
    sizes = [infer[0] for counts in alike.counts.values() if (infer := counts.infer(least=2))]
    return min(limit, round(max(sizes, default=1)))


def _calls(before: str, after: str, target: Target) -> dict[str, float]:
    found = {}
    for model in target.leaves:
        now = counting.calls(after, model)
        if now is not None:
            found[model] = now - (counting.calls(before, model) or 0)
    return found


def _read(client: Any, target: Target) -> dict[str, Counts]:
    return {model: Counts.read(client, model) for model in target.leaves}


def _settled(client: Any, target: Target, before: Mapping[str, Counts], rows: int) -> dict[str, Counts]:
    """The counters once so many rows are in all of them, or once they stand still.

    They follow the answers: a handler may answer before its execute() returns, and is counted after.
    """
    moved = time.monotonic()
    now = _read(client, target)
    while True:
        time.sleep(PAUSE_SECONDS)
        last, now = now, _read(client, target)
        moved = moved if now == last else time.monotonic()
        still = time.monotonic() - moved
        complete = all(now[model].rows - before[model].rows >= rows for model in now)
        if (complete and now == last) or still > QUIET_SECONDS:
            return now
