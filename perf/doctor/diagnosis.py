# SPDX-License-Identifier: Apache-2.0
"""From all that was seen to the verdicts, in the order in which to act on them. Sends nothing."""

from __future__ import annotations

from collections.abc import Mapping

from perf.doctor import batching, clients, handlers, padding, waiting
from perf.doctor.padding import Sample
from perf.doctor.probe import Probe
from perf.doctor.seen import Examination
from perf.doctor.verdict import (
    CANNOT_TELL,
    COMPUTE_BOUND,
    FAULT,
    HEALTHY,
    LIKELY,
    NOTE,
    PROVED,
    SOUND,
    TAKEN_APART,
    TOO_LITTLE,
    UNKNOWN,
    Verdict,
)

# Of the requests; beyond it the counts are of something else than what was meant.
FAILURES = 0.05
# A step that is less busy than this part of the busiest one does not decide anything.
MATTERS = 0.5

# What a watched traffic leaves open.
UNSEEN = (
    "nothing was sent, so these are not to be seen: padding in the requests; whether lengths that differ keep batches "
    "from forming; what a request waits that is alone; whether a batch that takes longer is taken apart"
)


def diagnose(seen: Examination, sample: Sample | None, probes: Mapping[str, Probe]) -> list[Verdict]:
    """At least one verdict. sample: None where nothing was sent."""
    found = [verdict for probe in probes.values() for verdict in handlers.verdicts(probe)]
    if sample and (verdict := padding.verdict(sample)) and not any(verdict.name == one.name for one in found):
        found.append(verdict)
    if (trouble := _trouble(seen)) is not None:
        return [*found, trouble]
    if seen.watched:
        found.append(Verdict(CANNOT_TELL, NOTE, seen.target.model, PROVED, (UNSEEN,), "leave --watch-seconds out"))
    found = [*_of_the_load(seen, sample.breaks() if sample else "", probes, found), *found]
    if not any(verdict.kind in (FAULT, UNKNOWN) for verdict in found):
        found.append(_health(seen, probes))
    return sorted(found, key=lambda verdict: (FAULT, UNKNOWN, HEALTHY, NOTE).index(verdict.kind))


def _trouble(seen: Examination) -> Verdict | None:
    """What makes the counts worthless."""
    if seen.watched:
        return _trouble_of_others(seen)
    sent = sum(phase.load.sent for phase in seen.phases)
    failures = [failure for phase in seen.phases for failure in phase.load.failures]
    if len(failures) > FAILURES * sent:
        line = f"{len(failures)} of {sent} requests failed: {failures[0]}"
        return Verdict(CANNOT_TELL, UNKNOWN, seen.target.model, PROVED, (line,), "see the server's log")
    cached = sum(counts.cached for phase in seen.phases for counts in phase.counts.values())
    if cached:
        line = f"the response cache answered {cached} of {sent} requests"
        return Verdict(
            CANNOT_TELL, UNKNOWN, seen.target.model, PROVED, (line,), "turn response_cache off and try again"
        )
    return None


def _trouble_of_others(seen: Examination) -> Verdict | None:
    """The same of traffic that was watched: none of it, or most of it failed."""
    model, counts = seen.target.model, [seen.counts(seen.main, name) for name in seen.target.leaves]
    failures = sum(one.failures for one in counts)
    if failures > FAILURES * sum(one.requests + one.failures for one in counts):
        line = f"{failures} requests failed while it was watched"
        return Verdict(CANNOT_TELL, UNKNOWN, model, PROVED, (line,), "see the server's log")
    requests = min(one.requests for one in counts)
    if requests < clients.FEW:
        line = f"{requests} requests in {seen.seconds(seen.main):.0f} s of watching"
        fix = "watch while the clients send, or for longer; or leave --watch-seconds out, and a load is sent"
        return Verdict(TOO_LITTLE, UNKNOWN, model, PROVED, (line,), fix)
    return None


def _of_the_load(seen: Examination, lengths: str, probes: Mapping[str, Probe], proved: list[Verdict]) -> list[Verdict]:
    found: list[Verdict] = []
    if seen.watched and (alone := clients.one_at_a_time(seen)) is not None:
        return [alone, *filter(None, (waiting.delay_too_long(seen, leaf) for leaf in seen.target.leaves.values()))]
    # The others idle behind it, and its own growth is that of tokenizing.
    if (tokenizer := waiting.tokenizer_bound(seen)) is not None:
        found.append(tokenizer)
    apart = {verdict.model for verdict in proved if verdict.name == TAKEN_APART and verdict.kind == FAULT}
    busiest = max(seen.busy(seen.main, name) for name in seen.target.leaves)
    for name, leaf in seen.target.leaves.items():
        if (late := waiting.delay_too_long(seen, leaf)) is not None:
            found.append(late)
            continue
        verdict = batching.not_batching(seen, leaf, lengths)
        if verdict is None and name not in apart:
            stays = batching.taken_apart(seen, leaf, probed=_whole(probes, name))
            verdict = stays if isinstance(stays, Verdict) else None
        settled = (verdict and verdict.kind == FAULT) or name in apart or (tokenizer and tokenizer.model == name)
        if not settled:
            grown = batching.growth(seen, leaf)
            flat = grown.share <= batching.FLAT if grown else None
            verdict = waiting.overloaded(seen, leaf, flat=flat) or verdict
        if verdict and (verdict.kind == FAULT or seen.busy(seen.main, name) >= MATTERS * busiest):
            found.append(verdict)
    # What cannot be told matters only where nothing was found.
    if any(verdict.kind == FAULT for verdict in [*found, *proved]):
        found = [verdict for verdict in found if verdict.kind == FAULT]
    return found


def _health(seen: Examination, probes: Mapping[str, Probe]) -> Verdict:
    """Of the busiest step that the batching is for: that behind the texts, in an ensemble."""
    leaves = seen.target.leaves
    behind = [name for name, leaf in leaves.items() if not leaf.takes_text] or list(leaves)
    name = max(behind, key=lambda name: seen.busy(seen.main, name))
    mixed, busy, waits = seen.counts(seen.main, name), seen.busy(seen.main, name), seen.queued(seen.main, name)
    lines = (
        f"{mixed.rows} rows in {mixed.executions} executions, {mixed.mean_batch:.1f} a batch ({seen.crowd})",
        f"instances were busy {busy:.0%} of the time, {waits:.1f} requests waited on the mean",
    )
    if mixed.mean_batch < batching.ALONE:
        fix = "try again with more --clients" if seen.limits.clients > 1 else "give more --clients than 1"
        if seen.watched:
            fix = "watch when more is sent; or leave --watch-seconds out, and a load is sent"
        return Verdict(TOO_LITTLE, UNKNOWN, name, LIKELY, lines, fix)
    stays = batching.taken_apart(seen, leaves[name], probed=_whole(probes, name))
    if not isinstance(stays, tuple):
        if seen.watched:
            why = "batches form; whether they stay whole is not to be seen, for their sizes hardly differed"
            fix = "leave --watch-seconds out, and a load is sent; or try --repository"
            return Verdict(CANNOT_TELL, UNKNOWN, name, LIKELY, (*lines, why), fix)
        why = "too few batches of 3 rows and more formed to see whether they stay whole"
        fix = "try again with more --clients or --seconds, or with --repository"
        return Verdict(TOO_LITTLE, UNKNOWN, name, LIKELY, (*lines, why), fix)
    return Verdict(COMPUTE_BOUND if busy >= waiting.BUSY else SOUND, HEALTHY, name, LIKELY, (*lines, *stays))


def _whole(probes: Mapping[str, Probe], name: str) -> bool | None:
    return handlers.whole(probes[name]) if name in probes else None
