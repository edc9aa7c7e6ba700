# SPDX-License-Identifier: Apache-2.0
"""Is it the clients? Rules over the counts of traffic that was watched: a load of ours says nothing of theirs."""

from __future__ import annotations

from perf.doctor.batching import ALONE
from perf.doctor.seen import Examination
from perf.doctor.target import Leaf
from perf.doctor.verdict import FAULT, LIKELY, NOT_BATCHING, Verdict

# Requests, below which counts are chance.
FEW = 30
# Executions that requests would wait for on the mean, if they came independently of each other, for it to be missed.
MISSED = 0.1
# Of that, and requests that wait at any moment: less is hardly any waiting.
LESS, HARDLY = 0.5, 0.25


def one_at_a_time(seen: Examination) -> Verdict | None:
    """No two requests ever meet, in any step, though a busy model would have made some of them wait."""
    leaves = seen.target.leaves.values()
    if not all(_alone(seen, leaf) for leaf in leaves):
        return None
    busiest = max(leaves, key=lambda leaf: seen.busy(seen.main, leaf.name))
    counts, busy = seen.counts(seen.main, busiest.name), seen.busy(seen.main, busiest.name)
    would = _independent(busy * busiest.instances, busiest.instances)
    waited = _wait(seen, busiest) / (counts.busy / counts.executions)
    if would < MISSED or waited > LESS * would:
        return None
    lines = (
        f"requests come one at a time: {counts.requests} in {counts.executions} executions of {counts.mean_batch:.1f} "
        f"rows in {seen.seconds(seen.main):.0f} s",
        f"{busiest.instances} instance(s) were busy {busy:.0%} of the time. Requests that come independently of each "
        f"other would have waited {would:.2g} executions on the mean; these waited {waited:.2g}",
    )
    fix = (
        "it is the client, not the server: have it send without waiting for each answer (several threads, or "
        "asynchronous calls), or put several rows into a request"
    )
    return Verdict(NOT_BATCHING, FAULT, seen.target.model, LIKELY, lines, fix)


def _alone(seen: Examination, leaf: Leaf) -> bool:
    counts = seen.counts(seen.main, leaf.name)
    waiting = _wait(seen, leaf) * counts.requests / seen.seconds(seen.main)
    return counts.executions > 0.95 * counts.requests and counts.mean_batch < ALONE and waiting < HARDLY


def _wait(seen: Examination, leaf: Leaf) -> float:
    """Seconds for which a request waited for others, on the mean: not for company that did not come."""
    return max(0.0, seen.counts(seen.main, leaf.name).wait - leaf.delay)


def _independent(load: float, instances: int) -> float:
    """Executions that a request waits for on the mean, if requests come at random and executions take equally long.

    load: instances at work on the mean. Erlang's formula for the share that waits; half of what it says for random
    times.
    """
    load = min(load, 0.98 * instances)
    refused = 1.0
    for number in range(1, instances + 1):
        refused = load * refused / (number + load * refused)
    waits = refused / (1 - load / instances * (1 - refused))
    return waits / (2 * (instances - load))
