# SPDX-License-Identifier: Apache-2.0
"""Do batches form, and does a batch stay one? Rules over counts; every threshold is a ratio or a mean number."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from perf.doctor.counts import Counts
from perf.doctor.seen import Examination
from perf.doctor.target import Leaf
from perf.doctor.verdict import CANNOT_TELL, FAULT, LIKELY, NOT_BATCHING, PROVED, TAKEN_APART, UNKNOWN, Verdict

# Below it, nearly every request ran alone.
ALONE = 1.5
# So many wait on the mean: there was company to be had.
COMPANY = 1.0
# Executions that a request waits for, on the mean, beyond which two clients' taking turns does not explain it.
TURNS = 1.5
# Rows of a request, on the mean, that count as one.
ONE_ROW = 1.05
# Equal requests in batches so many times larger: it is the shapes.
SHAPES = 2.0

# (time of a batch / time of one - 1) / (rows - 1): 0 where a batch costs what one does, 1 where it costs as many times.
IN_STEP, FLAT = 0.6, 0.4
# A batch of n requests over one request of n rows: the same work for the model.
MORE_FOR_REQUESTS = 2.0
# Compute of one request over the time to hand it over, below which the former drowns in the latter.
DISCERNIBLE = 3.0
# Rows that a batch must have for its time to say anything.
ROWS = 3.0
# A GPU that is busier than this may be at its ceiling.
GPU_IDLE = 0.5


def not_batching(seen: Examination, leaf: Leaf, lengths: str) -> Verdict | None:
    """Requests wait, and yet each runs alone. lengths: of what was sent, for a reader."""
    counts, waiting = seen.counts(seen.main, leaf.name), seen.queued(seen.main, leaf.name)
    if waiting < COMPANY or not counts.executions:
        return None
    line = (
        f"{counts.rows} rows in {counts.executions} executions, {counts.mean_batch:.1f} a batch, while {waiting:.1f} "
        f"requests waited on the mean ({seen.crowd})"
    )

    def fault(why: str, fix: str, *more: str) -> Verdict:
        return Verdict(NOT_BATCHING, FAULT, leaf.name, PROVED, (line, why, *more), fix)

    if leaf.max_batch == 0:
        fix = "give it a batch dimension: take that out of dims, set max_batch_size, and add dynamic_batching { }"
        return fault(
            "max_batch_size is 0: the model has no batch dimension, and no two requests ever share a batch", fix
        )
    if leaf.max_batch == 1:
        return fault("max_batch_size is 1", "raise max_batch_size, and add dynamic_batching { } if it is missing")
    if not leaf.config.HasField("dynamic_batching") and counts.mean_batch < ALONE:
        return fault("the config has no dynamic_batching", "add dynamic_batching { } to its config.pbtxt")
    if seen.watched:
        return _watched_alone(leaf, counts, line)
    alike = seen.counts("alike", leaf.name)
    compared = f"requests of equal shape, otherwise the same load: {alike.mean_batch:.1f} a batch"
    if leaf.rigid and alike.mean_batch >= SHAPES * counts.mean_batch:
        return fault(
            f"{', '.join(leaf.rigid)} may differ in shape, without allow_ragged_batch: a batch ends where it changes",
            "set allow_ragged_batch: true on them and join the rows in the model or handler; or pad to a few lengths",
            compared,
            lengths,
        )
    if counts.mean_batch < ALONE:
        return Verdict(
            CANNOT_TELL, UNKNOWN, leaf.name, LIKELY, (line, compared, "why no batch forms is not to be seen")
        )
    return None


def _watched_alone(leaf: Leaf, counts: Counts, line: str) -> Verdict | None:
    """Of watched traffic. Two clients take turns and never share a batch: each waits for one execution."""
    if counts.mean_batch >= ALONE or counts.wait <= TURNS * counts.busy / counts.executions:
        return None
    why = (
        f"{', '.join(leaf.rigid)} may differ in shape, without allow_ragged_batch: a batch would end where it changes"
        if leaf.rigid
        else "why no batch forms is not to be seen"
    )
    fix = "send requests of one shape for comparison: leave --watch-seconds out"
    return Verdict(CANNOT_TELL, UNKNOWN, leaf.name, LIKELY, (line, why), fix)


@dataclass(frozen=True)
class Growth:
    """How the time of a batch grows, in the median of the rounds.

    rows:     of a batch in `alike`
    share:    see IN_STEP
    requests: see MORE_FOR_REQUESTS; None where no request of several rows was sent
    handing:  see DISCERNIBLE
    """

    rows: float
    share: float
    requests: float | None
    handing: float

    @property
    def line(self) -> str:
        """For a reader."""
        return f"a batch of {self.rows:.0f} took {1 + self.share * (self.rows - 1):.1f} times as long as one request"


def growth(seen: Examination, leaf: Leaf) -> Growth | None:
    """Measure it; None where too few batches formed to tell."""
    if seen.watched:
        return _watched_growth(seen.counts(seen.main, leaf.name))
    rows, shares, over_rows, handing = [], [], [], []
    by_rows = seen.named("rows")
    for index, (alone, alike) in enumerate(zip(seen.named("alone"), seen.named("alike"), strict=True)):
        one, many = alone.counts[leaf.name], alike.counts[leaf.name].infer(least=2)
        single = one.infer()
        if not single or not many or not single[1] or many[0] < ROWS:
            continue
        rows.append(many[0])
        shares.append((many[1] / single[1] - 1) / (many[0] - 1))
        handing.append(single[1] / one.handing_over() if one.handing_over() else float("inf"))
        if index < len(by_rows) and (whole := by_rows[index].counts[leaf.name].infer(least=2)):
            # In the same number of rows: the part over one row grows with them.
            scaled = single[1] + (whole[1] - single[1]) * (many[0] - 1) / (whole[0] - 1)
            over_rows.append(many[1] / max(scaled, single[1] / 2))
    if not rows:
        return None
    median = statistics.median
    return Growth(median(rows), median(shares), median(over_rows) if over_rows else None, median(handing))


def _watched_growth(counts: Counts) -> Growth | None:
    """By the sizes of batches that formed: of requests of one row, or a batch may have been a single request."""
    small = min(counts.sizes, default=0)
    less, more = counts.infer(most=small), counts.infer(least=max(2 * small, round(ROWS)))
    if not less or not more or counts.rows > counts.requests * ONE_ROW:
        return None
    a_row = (more[1] - less[1]) / (more[0] - less[0])
    one = less[1] - a_row * (less[0] - 1)
    if one <= 0:
        return None
    handing = one / counts.handing_over() if counts.handing_over() else float("inf")
    return Growth(more[0], a_row / one, None, handing)


def reported(seen: Examination, leaf: Leaf) -> tuple[bool, str] | None:
    """Whether batches stay whole by the handler's own count of its calls, and the line that says so."""
    found = seen.calls(leaf.name)
    if found is None or not found[1] or found[2] / found[1] < ALONE:
        return None
    calls, executions, rows = found
    line = f"onepass_model_calls_total: {calls:.0f} calls in {executions} executions of {rows} rows"
    return calls < (executions + rows) / 2, line


def taken_apart(seen: Examination, leaf: Leaf, *, probed: bool | None) -> Verdict | tuple[str, ...] | None:
    """The verdict if it is a fault or unknown; lines of evidence if batches stay whole; None where nothing can be said.

    probed: what the handler probe has proved, if it ran: True that batches stay whole.
    """
    grown = growth(seen, leaf)
    lines = (grown.line,) if grown else ()
    if probed is not None:
        return (*lines, "by the handler probe, a batch is one pass or a few") if probed else None
    if (said := reported(seen, leaf)) is not None:
        stays, line = said
        if stays:
            return (line, *lines)
        fix = "run the model once for all requests of an execute()"
        return Verdict(TAKEN_APART, FAULT, leaf.name, PROVED, (line, *lines), fix)
    if leaf.whole_batches:
        return (*lines, f"the {leaf.backend} backend runs a batch as one")
    if leaf.decoupled:
        line = "it is decoupled: its execute() may end before its answers are made, so times say nothing of batches"
        return Verdict(CANNOT_TELL, UNKNOWN, leaf.name, PROVED, (line,), "run with --repository, which counts passes")
    if grown is None or (leaf.takes_text and len(seen.target.leaves) > 1):
        return None
    return _by_times(seen, leaf, grown)


def _by_times(seen: Examination, leaf: Leaf, grown: Growth) -> Verdict | tuple[str, ...]:
    lines = [grown.line]
    if grown.share <= FLAT:
        return tuple(lines)
    fix = "look at the handler with --repository; it should run the model once for all requests of an execute()"
    if grown.handing < DISCERNIBLE:
        lines.append("its compute is no more than what handing a request over costs, so a loop would not show")
        return Verdict(CANNOT_TELL, UNKNOWN, leaf.name, LIKELY, tuple(lines), fix)
    if grown.requests is not None:
        lines.append(
            f"{grown.rows:.0f} requests of one row took {grown.requests:.1f} times as long as one request of "
            f"{grown.rows:.0f} rows: the same work for the model"
        )
        if grown.requests >= MORE_FOR_REQUESTS and grown.share >= FLAT:
            return Verdict(TAKEN_APART, FAULT, leaf.name, LIKELY, tuple(lines), fix)
    used = [phase.gpu for phase in seen.phases if phase.crowded and phase.gpu is not None]
    if leaf.on_gpu and used and max(used) < GPU_IDLE and grown.share >= IN_STEP:
        lines.append(f"GPU utilization was at most {max(used):.0%}")
        return Verdict(TAKEN_APART, FAULT, leaf.name, LIKELY, tuple(lines), fix)
    lines.append("either taken apart or compute-bound: the statistics look the same for both")
    if seen.rows_failure:
        lines.append(f"no comparison with {seen.rows_failure}")
    return Verdict(CANNOT_TELL, UNKNOWN, leaf.name, LIKELY, tuple(lines), "run with --repository, which counts passes")
