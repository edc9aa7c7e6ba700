# SPDX-License-Identifier: Apache-2.0
"""The bounded load: what is sent, in which order, and what the server counted for each part of it.

Four phases, in several rounds so that a disturbance of the machine falls on all of them:

    alone   one request in flight, always the same short one
    rows    one request an instance in flight, of as many rows as batches had in `alike`
    alike   many in flight, all the same short request
    mixed   many in flight, of realistic lengths

`alike` and `rows` give the model the same work in the same size of batch. If they differ, the handler does more for
requests than for rows. `alike` and `mixed` differ only in the shapes. Instances that run side by side slow each other
down, which is no fault of a handler: so they do in both.

Knows nothing of verdicts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import tritonclient.grpc as triton

from ensemble.errors import PipelineError, ServerError
from perf.doctor import counts as counting
from perf.doctor.counts import GPU_INTERVAL_SECONDS, Counts, Metrics
from perf.doctor.input_data import FileInputs
from perf.doctor.inputs import InputMaker
from perf.doctor.load import Load, drive
from perf.doctor.seen import PHASES, Examination, Limits, Phase
from perf.doctor.target import Target, connect, lost

ROUNDS = 3
# More than two of the intervals of Triton's GPU metrics: what those say at the end of a shorter phase is of several.
GPU_SECONDS = 2.25 * GPU_INTERVAL_SECONDS
# Between two readings of the counters; and how long they must not move to count as settled, rows missing or not.
PAUSE_SECONDS, QUIET_SECONDS = 0.02, 1.0
# Of the requests of one phase, encoded before it starts.
MOST_BYTES = 64_000_000


def examine(target: Target, inputs: InputMaker | FileInputs, limits: Limits, metrics: Metrics) -> Examination:
    """Send the load. Raises PipelineError if the model refuses what it is sent, ServerError if the server goes away."""
    with reading(target) as client:
        found = Examination(target, limits)
        before = read(client, target)
        fit(target, inputs)
        _settled(client, target, before, 1)
        metrics.check(client, list(target.leaves)[-1])
        for number in range(ROUNDS):
            for name in PHASES:
                last = number == ROUNDS - 1 and name == PHASES[-1]
                _phase(found, inputs, client, metrics, name, steady=last and _steady(found))
        return found


@contextmanager
def reading(target: Target) -> Iterator[Any]:
    """A client for the server's statistics. Raises ServerError, in its place, if the server goes away."""
    try:
        with connect(target.url) as client:
            yield client
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
    return drive(target.url, [inputs.make(index).message(target.model)], 1, 0, 1, streamed=target.streamed)


def _steady(found: Examination) -> bool:
    """Whether the last phase shall be long enough for the GPUs' utilization in it: there are some, and it fits."""
    gpus = any(leaf.on_gpu for leaf in found.target.leaves.values())
    return gpus and found.limits.seconds >= 2 * GPU_SECONDS


def _phase(
    found: Examination, inputs: InputMaker | FileInputs, client: Any, metrics: Metrics, name: str, *, steady: bool
) -> None:
    target, limits = found.target, found.limits
    rows = _rows(found) if name == "rows" else 1
    if name == "rows" and (rows < 2 or found.rows_failure):
        return
    in_flight = {"alone": 1, "rows": min(limits.clients, target.instances)}.get(name, limits.clients)
    # One after the other, each a request of its own.
    one = inputs.make(inputs.alike(), rows).message(target.model)
    most = min(len(inputs), max(8, MOST_BYTES // one.ByteSize()))
    messages = [inputs.make(index).message(target.model) for index in range(most)] if name == "mixed" else [one]
    before, text = read(client, target), metrics.read()
    parts = ROUNDS * len(PHASES)
    seconds, requests = limits.seconds / parts, limits.requests // parts
    if steady:
        seconds, requests = GPU_SECONDS, limits.requests - sum(phase.load.sent for phase in found.phases)
    elif _steady(found):
        seconds = (limits.seconds - GPU_SECONDS) / (parts - 1)
    load = drive(target.url, messages, in_flight, seconds, requests, streamed=target.streamed)
    utilization = counting.utilization(metrics.read()) if load.seconds >= GPU_SECONDS else None
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
            calls(text, metrics.read(), target),
            utilization,
        )
    )


def _rows(found: Examination) -> int:
    """As many rows as batches had in `alike`, in the leaf where most were formed."""
    limit = int(found.target.config.max_batch_size)
    alike = found.named("alike")[-1]
    sizes = [infer[0] for counts in alike.counts.values() if (infer := counts.infer(least=2))]
    return min(limit, round(max(sizes, default=1)))


def calls(before: str, after: str, target: Target) -> dict[str, float]:
    """By model, those that handlers reported between two readings of the metrics."""
    found = {}
    for model in target.leaves:
        now = counting.calls(after, model)
        if now is not None:
            found[model] = now - (counting.calls(before, model) or 0)
    return found


def read(client: Any, target: Target) -> dict[str, Counts]:
    """What each of the models has counted so far."""
    return {model: Counts.read(client, model) for model in target.leaves}


def _settled(client: Any, target: Target, before: Mapping[str, Counts], rows: int) -> dict[str, Counts]:
    """The counters once so many rows are in all of them, or once they stand still.

    They follow the answers: a handler may answer before its execute() returns, and is counted after.
    """
    moved = time.monotonic()
    now = read(client, target)
    while True:
        time.sleep(PAUSE_SECONDS)
        last, now = now, read(client, target)
        moved = moved if now == last else time.monotonic()
        still = time.monotonic() - moved
        complete = all(now[model].rows - before[model].rows >= rows for model in now)
        if (complete and now == last) or still > QUIET_SECONDS:
            return now
