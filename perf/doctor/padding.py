# SPDX-License-Identifier: Apache-2.0
"""How much of what a model is sent is padding, and how long texts are once they are token ids.

From the shapes that the doctor's own inputs had to be padded to, and, in an ensemble, from what the step that takes the
texts makes of them, asked directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import grpc
from tritonclient.grpc import InferResult, service_pb2_grpc

from ensemble.errors import PipelineError
from perf.closed_loop import REQUEST_SECONDS
from perf.doctor.handlers import WASTE
from perf.doctor.input_data import FileInputs
from perf.doctor.inputs import InputMaker
from perf.doctor.load import CHANNEL
from perf.doctor.target import Leaf, Target
from perf.doctor.verdict import FAULT, LIKELY, PADDING, PROVED, Verdict

# Asked one at a time, before the load.
TEXTS = 64


@dataclass(frozen=True)
class Sample:
    """Rows of token ids.

    source:  where they are from, for a reader
    model:   that gets them
    lengths: of each row without padding, in the order sent
    slots:   of all rows together, with padding
    """

    source: str
    model: str
    lengths: Sequence[int]
    slots: int

    @property
    def assumed(self) -> bool:
        """Whether the lengths are ours, padded to what the model takes, and not what its own tokenizer makes."""
        return self.source == "the requests"

    @property
    def share(self) -> float:
        """Of padding, 0 to 1."""
        return 1 - sum(self.lengths) / self.slots if self.slots else 0.0

    def breaks(self, most: int = 12) -> str:
        """The first lengths, with a bar wherever one differs from the one before: there a rigid batch ends."""
        shown = list(self.lengths[:most])
        parts = [str(shown[0])] if shown else []
        for before, now in pairwise(shown):
            parts += ["|", str(now)] if now != before else [str(now)]
        return f"lengths as sent ({self.source}), a bar where a batch breaks: {' '.join(parts)}"


def sample(target: Target, inputs: InputMaker | FileInputs) -> Sample:
    """From the step behind the texts where there is one, else from the requests themselves."""
    if target.is_ensemble and isinstance(inputs, InputMaker):
        for leaf in target.leaves.values():
            # A step may be closed to callers, or need more than texts: then the requests have to do.
            with suppress(grpc.RpcError, PipelineError):
                if leaf.takes_text and (found := _asked(target, leaf, inputs)):
                    return found
    made = [inputs.make(index) for index in range(len(inputs))]
    counted = isinstance(inputs, InputMaker) and not any(text.tokens == 0 for text in inputs.texts())
    source = "the requests" if counted else "the file's requests"
    return Sample(source, target.model, [one.length for one in made], sum(one.slots for one in made))


def verdict(found: Sample) -> Verdict | None:
    """A fault where half of the tokens or more are padding."""
    if found.share < WASTE:
        return None
    rows = len(found.lengths)
    line = (
        f"{found.share:.0%} of {found.slots} tokens are padding: {rows} rows of {found.slots / rows:.0f}, with "
        f"{sum(found.lengths) / rows:.0f} tokens in them on the mean ({found.source})"
    )
    fix = (
        "let dims be [-1] and send each text at its own length, ragged and packed, or padded to the longest of a batch"
    )
    return Verdict(PADDING, FAULT, found.model, LIKELY if found.assumed else PROVED, (line,), fix)


def _asked(target: Target, leaf: Leaf, inputs: InputMaker) -> Sample | None:
    maker = InputMaker(leaf.config, inputs.texts())
    lengths: list[int] = []
    slots = 0
    with grpc.insecure_channel(target.url, options=CHANNEL) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for index in range(min(TEXTS, len(maker))):
            answer = InferResult(stub.ModelInfer(maker.make(index).message(leaf.name), timeout=REQUEST_SECONDS))
            row = _row(answer, leaf)
            if row is None:
                return None
            lengths.append(row[0])
            slots += row[1]
    behind = [name for name in target.leaves if name != leaf.name]
    return Sample(f"what {leaf.name} makes of the texts", behind[-1] if behind else leaf.name, lengths, slots)


def _row(answer: Any, leaf: Leaf) -> tuple[int, int] | None:
    """Tokens and slots of the one row: by its mask, else by the ids without the zeros at their end."""
    names = [field.name for field in leaf.config.output]
    for name in sorted(names, key=lambda name: "mask" not in name.lower()):
        array = answer.as_numpy(name)
        if array is None or array.dtype.kind not in "iu" or array.ndim < 1 or not array.size:
            continue
        if "mask" in name.lower():
            return int((array != 0).sum()), int(array.size)
        if "id" in name.lower() and "type" not in name.lower():
            filled = array.ravel().nonzero()[0]
            return (int(filled[-1]) + 1 if len(filled) else 0), int(array.size)
    return None
