# SPDX-License-Identifier: Apache-2.0
"""What the handler probe's counts mean. Proof: nothing here is inferred from a time but the tokenizer's share of it."""

from __future__ import annotations

from collections.abc import Iterator

from perf.doctor.probe import Probe
from perf.doctor.verdict import (
    CANNOT_TELL,
    FAULT,
    NOTE,
    ONE_BY_ONE,
    PADDING,
    POSSIBLE,
    PROVED,
    RESPONSES,
    TAKEN_APART,
    TOKENIZER_BOUND,
    UNKNOWN,
    Verdict,
)

# Half of the work, or more, is for nothing.
WASTE = 0.5
# Beyond it the tokenizer is more of the handler's time than the model.
TOKENIZER_SHARE = 0.6

STACK = (
    "stack the requests' tensors into one batch, run the model once, and cut the result by each request's own rows "
    "(ensemble/handlers/execution.py and model_repository/baseline do)"
)


def verdicts(probe: Probe) -> Iterator[Verdict]:
    """All that one handler's counts prove."""
    if probe.error:
        fix = "run the doctor with the Python that the server's handlers run in" if "No module" in probe.error else ""
        yield Verdict(
            CANNOT_TELL, UNKNOWN, probe.model, PROVED, (f"the handler could not be probed: {probe.error}",), fix
        )
    yield from _responses(probe)
    yield from _passes(probe)
    yield from _tokenizer(probe)
    share = probe.padding()
    if share is not None and share >= WASTE:
        shapes = next(run["shapes"] for run in reversed(probe.runs) if not run["alike"])
        line = f"{share:.0%} of the tokens in its forward passes were padding, by their masks; shapes {shapes}"
        fix = "pad to the longest of a batch, sort by length, or take ragged input and pack the rows"
        yield Verdict(PADDING, FAULT, probe.model, PROVED, (line,), fix)


def whole(probe: Probe) -> bool | None:
    """True: a batch is one pass or a few, whatever the lengths. False: it is taken apart. None: not seen."""
    looped = probe.looped("passes")
    return None if looped is None else not looped


def counted(probe: Probe, key: str, *, alike: bool = False) -> str:
    """`1 request: 1, 2 requests: 2, ...`."""
    return ", ".join(f"{requests}: {calls}" for requests, calls in probe.of(key, alike=alike).items())


def _responses(probe: Probe) -> Iterator[Verdict]:
    for run in probe.runs:
        wrong_list = run["listed"] is not None and run["listed"] not in (run["requests"], 0)
        if wrong_list or run["answered"] < run["requests"]:
            returned = "nothing" if run["listed"] is None else f"a list of {run['listed']}"
            line = (
                f"execute() was handed {run['requests']} requests, returned {returned} and answered {run['answered']}"
            )
            fix = (
                "return one response for each request, in order; an InferenceResponse with a TritonError for a failure"
            )
            yield Verdict(RESPONSES, FAULT, probe.model, PROVED, (line,), fix)
            return
        if run["errors"]:
            line = f"{run['errors']} of {run['requests']} requests were answered with an error: {run['first_error']}"
            yield Verdict(CANNOT_TELL, UNKNOWN, probe.model, PROVED, (line,), "see whether it takes such inputs")
            return


def _passes(probe: Probe) -> Iterator[Verdict]:
    lines = [f"forward passes of an execute(), by requests handed over: {counted(probe, 'passes')}"]
    shapes = [run["shapes"] for run in probe.runs if not run["alike"]]
    if shapes and shapes[-1]:
        lines.append(f"shapes of the first of them: {', '.join(map(str, shapes[-1]))}")
    together = max((run["asked_together"] for run in probe.runs), default=0)
    if not probe.looped("passes"):
        return
    if together > 1:
        lines.append(
            f"up to {together} requests to another model were under way together, so its batcher may join them"
        )
        yield Verdict(TAKEN_APART, NOTE, probe.model, POSSIBLE, tuple(lines))
        return
    if probe.looped("passes", alike=True) is False:
        lines.append(f"with requests of one length: {counted(probe, 'passes', alike=True)}")
        fix = "it runs requests together only if their lengths are equal: pad or pack them"
        yield Verdict(TAKEN_APART, FAULT, probe.model, PROVED, tuple(lines), fix)
        return
    yield Verdict(TAKEN_APART, FAULT, probe.model, PROVED, tuple(lines), STACK)


def _tokenizer(probe: Probe) -> Iterator[Verdict]:
    line = f"tokenizer calls of an execute(), by requests handed over: {counted(probe, 'tokenizer_calls')}"
    fix = "collect the texts of all requests and call a fast tokenizer once with the list"
    if probe.looped("tokenizer_calls"):
        yield Verdict(ONE_BY_ONE, FAULT, probe.model, PROVED, (line,), fix)
    spent = sum(run["tokenizer_seconds"] for run in probe.runs)
    passed = sum(run["pass_seconds"] for run in probe.runs)
    if passed and spent / (spent + passed) >= TOKENIZER_SHARE:
        share = f"the tokenizer took {spent / (spent + passed):.0%} of the time of tokenizer and model together"
        fix = f"{fix}; or give it a model of its own in an ensemble, with instances of its own"
        yield Verdict(TOKENIZER_BOUND, FAULT, probe.model, PROVED, (share, line), fix)
