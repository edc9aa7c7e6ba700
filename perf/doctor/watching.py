# SPDX-License-Identifier: Apache-2.0
"""What the user's own clients send, counted for a while: nothing is sent, and the model is left as it is."""

from __future__ import annotations

import time

from perf.doctor import counts as counting
from perf.doctor.counts import GPU_INTERVAL_SECONDS, Metrics
from perf.doctor.examination import calls, read, reading
from perf.doctor.load import Load
from perf.doctor.seen import WATCHED, Examination, Limits, Phase
from perf.doctor.target import Target


def watch(target: Target, seconds: float, metrics: Metrics) -> Examination:
    """Send nothing, and count what others send. Raises ServerError if the server goes away."""
    with reading(target) as client:
        metrics.check(client, list(target.leaves)[-1])
        before, text, started = read(client, target), metrics.read(), time.monotonic()
        used = []
        while (left := started + seconds - time.monotonic()) > 0:
            time.sleep(min(left, GPU_INTERVAL_SECONDS))
            used.append(counting.utilization(metrics.read()))
        after, took = read(client, target), time.monotonic() - started
        phase = Phase(
            WATCHED,
            in_flight=0,
            rows=0,
            load=Load(took, (), 0, ()),
            counts={model: after[model].plus(before[model], -1) for model in after},
            calls=calls(text, metrics.read(), target),
            gpu=max((percent for percent in used[1:] if percent is not None), default=None),
        )
        return Examination(target, Limits(seconds, 0, 0), [phase])
