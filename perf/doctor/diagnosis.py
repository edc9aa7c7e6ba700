# SPDX-License-Identifier: Apache-2.0
"""From all that was seen to the verdicts, in the order in which to act on them. Sends nothing."""

from __future__ import annotations

from collections.abc import Mapping

from perf.doctor import batching, handlers, padding, waiting
from perf.doctor.counts import Counts
from perf.doctor.examination import Examination
from perf.doctor.padding import Sample
from perf.doctor.probe import Probe
from perf.doctor.verdict import (
    CANNOT_TELL,
    COMPUTE_BOUND,
    FAULT,
    HEALTHY,
    LIKELY,
    NOT_BATCHING,
    NOTE,
    POSSIBLE,
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
# Requests before the doctor came, for a word on the clients that sent them.
HISTORY = 100


def diagnose(seen: Examination, sample: Sample, probes: Mapping[str, Probe]) -> list[Verdict]:
    """At least one verdict."""
    found = [verdict for probe in probes.values() for verdict in handlers.verdicts(probe)]
    if (verdict := padding.verdict(sample)) and not any(verdict.name == one.name for one in found):
        found.append(verdict)
    if (trouble := _trouble(seen)) is not None:
        return [*found, trouble]
    found = [*_of_the_load(seen, sample, probes, found), *found]
    if not any(verdict.kind in (FAULT, UNKNOWN) for verdict in found):
        found.append(_health(seen, probes))
    known = {verdict.model for verdict in found if verdict.kind == FAULT}
    rest = [name for name in seen.target.leaves if name not in known]
    found += [note for name in rest if (note := _one_at_a_time(name, seen.history[name]))]
    return sorted(found, key=lambda verdict: (FAULT, UNKNOWN, HEALTHY, NOTE).index(verdict.kind))


def _trouble(seen: Examination) -> Verdict | None:
    """What makes the counts worthless."""
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


def _of_the_load(
    seen: Examination, sample: Sample, probes: Mapping[str, Probe], proved: list[Verdict]
) -> list[Verdict]:
    found: list[Verdict] = []
    # The others idle behind it, and its own growth is that of tokenizing.
    if (tokenizer := waiting.tokenizer_bound(seen)) is not None:
        found.append(tokenizer)
    apart = {verdict.model for verdict in proved if verdict.name == TAKEN_APART and verdict.kind == FAULT}
    busiest = max(seen.busy("mixed", name) for name in seen.target.leaves)
    for name, leaf in seen.target.leaves.items():
        if (late := waiting.delay_too_long(seen, leaf)) is not None:
            found.append(late)
            continue
        verdict = batching.not_batching(seen, leaf, sample.breaks())
        if verdict is None and name not in apart:
            stays = batching.taken_apart(seen, leaf, probed=_whole(probes, name))
            verdict = stays if isinstance(stays, Verdict) else None
        if verdict is None and name not in apart and not (tokenizer and tokenizer.model == name):
            grown = batching.growth(seen, leaf)
            verdict = waiting.overloaded(seen, leaf, flat=grown.share <= batching.FLAT if grown else None)
        if verdict and (verdict.kind == FAULT or seen.busy("mixed", name) >= MATTERS * busiest):
            found.append(verdict)
    # What cannot be told matters only where nothing was found.
    if any(verdict.kind == FAULT for verdict in [*found, *proved]):
        found = [verdict for verdict in found if verdict.kind == FAULT]
    return found


def _health(seen: Examination, probes: Mapping[str, Probe]) -> Verdict:
    """Of the busiest step that the batching is for: that behind the texts, in an ensemble."""
    leaves = seen.target.leaves
    behind = [name for name, leaf in leaves.items() if not leaf.takes_text] or list(leaves)
    name = max(behind, key=lambda name: seen.busy("mixed", name))
    mixed, busy, waits = seen.counts("mixed", name), seen.busy("mixed", name), seen.queued("mixed", name)
    lines = (
        f"{mixed.rows} rows in {mixed.executions} executions, {mixed.mean_batch:.1f} a batch "
        f"({seen.limits.clients} in flight)",
        f"instances were busy {busy:.0%} of the time, {waits:.1f} requests waited on the mean",
    )
    if mixed.mean_batch < batching.ALONE:
        fix = "try again with more --clients" if seen.limits.clients > 1 else "give more --clients than 1"
        return Verdict(TOO_LITTLE, UNKNOWN, name, LIKELY, lines, fix)
    stays = batching.taken_apart(seen, leaves[name], probed=_whole(probes, name))
    if not isinstance(stays, tuple):
        why = "too few batches of 3 rows and more formed to see whether they stay whole"
        fix = "try again with more --clients or --seconds, or with --repository"
        return Verdict(TOO_LITTLE, UNKNOWN, name, LIKELY, (*lines, why), fix)
    return Verdict(COMPUTE_BOUND if busy >= waiting.BUSY else SOUND, HEALTHY, name, LIKELY, (*lines, *stays))


def _one_at_a_time(model: str, history: Counts) -> Verdict | None:
    """What the server had counted before: whether anybody ever gave it two requests at once."""
    infer = history.infer()
    alone = history.executions >= HISTORY and history.mean_batch < 1.05
    if not infer or not alone or history.wait > 0.1 * infer[1]:
        return None
    line = (
        f"before the doctor came, {history.rows} rows ran in {history.executions} executions and hardly waited: its "
        "clients send one at a time, or rarely"
    )
    return Verdict(NOT_BATCHING, NOTE, model, POSSIBLE, (line,), "have clients send without waiting for each answer")


def _whole(probes: Mapping[str, Probe], name: str) -> bool | None:
    return handlers.whole(probes[name]) if name in probes else None
