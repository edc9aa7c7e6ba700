# SPDX-License-Identifier: Apache-2.0
"""Where requests wait though they need not. Rules over counts; a delay is compared with the model's compute only."""

from __future__ import annotations

import math

from perf.doctor.seen import Examination
from perf.doctor.target import Leaf
from perf.doctor.verdict import FAULT, LIKELY, PROVED, QUEUE_BOUND, TOKENIZER_BOUND, Verdict

# An instance that is at work for more of its time is what the others wait for.
BUSY, IDLE = 0.7, 0.5
# Of the delay, which a request spent waiting though it had no company to wait for.
WAITED = 0.5
# The delay over the compute of a batch.
TOO_LONG, FAR_TOO_LONG = 4.0, 10.0
# Of max_batch_size, at which a batch is full; and full batches that wait behind it.
FULL, BACKLOG = 0.9, 2.0
# Over every other step.
BUSIEST = 1.5


def delay_too_long(seen: Examination, leaf: Leaf) -> Verdict | None:
    """Instances idle while requests wait for company."""
    alone, mixed = seen.counts("alone", leaf.name), seen.counts(seen.main, leaf.name)
    if not leaf.delay or not mixed.executions:
        return None
    takes, busy = mixed.busy / mixed.executions, seen.busy(seen.main, leaf.name)
    longest = max(takes, alone.busy / alone.executions) if alone.executions else math.inf
    waits_alone = alone.wait >= WAITED * leaf.delay and leaf.delay >= FAR_TOO_LONG * longest
    waits_in_company = mixed.wait >= WAITED * leaf.delay and leaf.delay >= TOO_LONG * takes and busy < IDLE
    if not waits_alone and not waits_in_company:
        return None
    lines = [
        f"max_queue_delay_microseconds is {leaf.delay * 1e6:.0f}, {leaf.delay / takes:.0f} times what a batch takes "
        f"({mixed.mean_batch:.1f} rows)",
        f"each waited {mixed.wait / leaf.delay:.0%} of it ({seen.crowd}), while instances were busy {busy:.0%} of the "
        "time",
    ]
    if alone.executions:
        lines.append(f"one request alone waited {alone.wait / leaf.delay:.0%} of it")
    fix = "lower max_queue_delay_microseconds to a part of what a batch takes; 0, the default, batches whatever waits"
    return Verdict(QUEUE_BOUND, FAULT, leaf.name, PROVED, tuple(lines), fix)


def overloaded(seen: Examination, leaf: Leaf, *, flat: bool | None) -> Verdict | None:
    """Batches are full, and more of them wait. flat: a batch costs little more than one request; None unknown."""
    mixed, waiting, busy = (
        seen.counts(seen.main, leaf.name),
        seen.queued(seen.main, leaf.name),
        seen.busy(seen.main, leaf.name),
    )
    refused = sum(phase.load.refused for phase in seen.phases)
    full = leaf.max_batch > 1 and mixed.mean_batch >= FULL * leaf.max_batch
    if not refused and not (full and busy >= BUSY and waiting >= BACKLOG * leaf.max_batch):
        return None
    lines = [
        f"batches were full ({mixed.mean_batch:.1f} of {leaf.max_batch} rows) and {waiting:.1f} requests waited behind "
        f"them on the mean, while {leaf.instances} instance(s) were busy {busy:.0%} of the time",
    ]
    if refused:
        lines.append(f"{refused} requests were refused: the queue was full")
    larger = "raise max_batch_size, for a batch costs little more than one request; " if flat else ""
    fix = f"{larger}raise the count of its instance_group if the hardware has room, or send less"
    return Verdict(QUEUE_BOUND, FAULT, leaf.name, LIKELY, tuple(lines), fix)


def tokenizer_bound(seen: Examination) -> Verdict | None:
    """Of an ensemble: the step that takes the texts is busy, and those behind it wait for it."""
    leaves = seen.target.leaves
    shares = {name: seen.busy(seen.main, name) for name in leaves}
    slowest = max(shares, key=lambda name: shares[name])
    others = [share for name, share in shares.items() if name != slowest]
    if not others or not leaves[slowest].takes_text or shares[slowest] < BUSY:
        return None
    # Whether any wait is beside the point: all may be in one batch and wait for its end.
    if shares[slowest] < BUSIEST * max(others):
        return None
    mixed = seen.counts(seen.main, slowest)
    lines = (
        "instances at work: " + ", ".join(f"{name} {share:.0%} of the time" for name, share in shares.items()),
        f"{seen.queued('mixed', slowest):.1f} requests waited before {slowest} on the mean, in batches of "
        f"{mixed.mean_batch:.1f} rows",
    )
    fix = (
        "call a fast tokenizer once for all texts of an execute(), batch the step (dynamic_batching { }), or raise the "
        "count of its instance_group"
    )
    return Verdict(TOKENIZER_BOUND, FAULT, slowest, LIKELY, lines, fix)
