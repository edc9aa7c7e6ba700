# SPDX-License-Identifier: Apache-2.0
"""The parity gate of the FP16 graph and of the engine built from it: the same texts, fed as Triton will feed them.

Knows nothing of what runs a graph: on a CPU that is ONNX Runtime (export/fp16_on_cpu.py), on a GPU TensorRT.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ensemble.handlers.packing import Ids, length_carrier, padded
from ensemble.handlers.scores import Scores
from export import gate
from export.backend_inputs import engine_inputs
from export.parity import Parity, compare

Tensors = dict[str, npt.NDArray[Any]]
Run = Callable[[Mapping[str, npt.NDArray[Any]]], Scores]


@dataclass(frozen=True)
class Checked:
    """A graph that passed: its scores of each text alone, and the verdicts."""

    scores: Scores
    verdicts: list[Parity]


def check(
    what: str,
    graph: Run,
    config: Any,
    pad_token_id: int,
    expected: gate.Reference,
    *,
    built_from: Checked | None = None,
) -> Checked:
    """Run all texts. Raises ExportError naming the worst text if a verdict did not pass.

    graph:      engine inputs by name (export/backend_inputs.py) -> scores of all rows
    config:     the classifier's, as parsed; it says how requests become inputs
    built_from: what the same texts gave on the graph that this engine was built from
    """
    ragged = any(tensor.allow_ragged_batch for tensor in config.input)

    def classify(rows: Sequence[Ids]) -> Scores:
        # Without ragged inputs Triton batches rows of one length only: here, one request. With them, one request of
        # two rows among others, whose shorter row ends in [PAD].
        groups = [rows[:1], rows[1:3], rows[3:]] if ragged else [rows]
        return graph(engine_inputs(config, [request(group, pad_token_id) for group in groups if len(group)]))

    alone = gate.run(classify, expected.rows, 1, f"{what}, alone")
    batched = gate.run(classify, expected.rows, gate.BATCH, f"{what}, batched")
    verdicts = [
        *expected.compare(f"{what} alone", "fp16", alone),
        *expected.compare(f"{what} batched", "fp16", batched),
        compare(
            f"{what} batched against alone",
            alone.logits,
            batched.logits,
            multi_label=expected.multi_label,
            precision="fp16",
        ),
    ]
    if built_from is not None:
        verdicts.append(
            compare(
                f"{what} against the graph it was built from",
                built_from.scores.logits,
                alone.logits,
                multi_label=expected.multi_label,
                precision="fp16",
            )
        )
    expected.require(verdicts)
    return Checked(alone, verdicts)


def request(rows: Sequence[Ids], pad_token_id: int) -> Tensors:
    """The tensors the tokenizer makes of one request's rows, INT64 [length] each (model_repository/tokenizer)."""
    ids = padded(rows, pad_token_id)
    return {
        "input_ids": ids,
        "attention_mask": padded([np.ones_like(row) for row in rows], 0),
        "token_type_ids": np.zeros_like(ids),
        "length_carrier": length_carrier(*ids.shape),
    }
