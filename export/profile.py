# SPDX-License-Identifier: Apache-2.0
"""The optimization profile of an engine: the sizes it takes, and the one it is tuned for. Knows nothing of TensorRT.

The limits are what the classifier's config can produce; nobody types them. The optimum is a typical batch of texts like
those given to export: rows in the order of the texts, a batch as Triton forms it under full load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ensemble.errors import ExportError
from export.backend_inputs import engine_inputs, input_bounds
from export.gate_fp16 import request

Shape = tuple[int, ...]


class Range(NamedTuple):
    """The shapes of one input: the smallest, the one to tune for, the largest."""

    min: Shape
    opt: Shape
    max: Shape


Profile = Mapping[str, Range]


def profile_of(config: Any, max_length: int, lengths: Sequence[int]) -> Profile:
    """The profile for a classifier's config, for rows of up to max_length, tuned for rows of such lengths as these."""
    typical = typical_batch(lengths, int(config.max_batch_size), attention_budget(config))
    rows = [np.ones(length, dtype=np.int64) for length in typical]
    ragged = any(tensor.allow_ragged_batch for tensor in config.input)
    requests = [request([row], 0) for row in rows] if ragged else [request(rows, 0)]
    shapes = engine_inputs(config, requests)
    profile = {
        name: Range(tuple(least for least, _ in sizes), shapes[name].shape, tuple(most for _, most in sizes))
        for name, sizes in input_bounds(config, max_length).items()
    }
    check(profile)
    return profile


def check(profile: Profile) -> None:
    """Raise ExportError naming each input whose min, opt and max do not fit together."""
    wrong = [
        f"{name}: min {list(shapes.min)}, opt {list(shapes.opt)}, max {list(shapes.max)}"
        for name, shapes in profile.items()
        if not len(shapes.min) == len(shapes.opt) == len(shapes.max)
        or not all(1 <= low <= best <= high for low, best, high in zip(*shapes, strict=True))
    ]
    if wrong:
        raise ExportError(
            "the optimization profile needs 1 <= min <= opt <= max in every dimension, but has " + "; ".join(wrong)
        )


def as_dict(profile: Profile) -> dict[str, dict[str, list[int]]]:
    """As model.json has it: input -> min, opt, max -> shape."""
    return {name: {bound: list(shape) for bound, shape in shapes._asdict().items()} for name, shapes in profile.items()}


def typical_batch(lengths: Sequence[int], max_rows: int, budget: int) -> list[int]:
    """The lengths in the batch of median size, when rows of these lengths all wait, in this order.

    A batch ends at max_rows, or before rows x longest^2 passes the budget, if there is one (0 is none); see
    model_repository/classifier/batchstrategy.c.
    """
    batches: list[list[int]] = [[]]
    for length in lengths:
        batch = [*batches[-1], length]
        over = len(batch) > max_rows or 0 < budget < len(batch) * max(batch) ** 2
        if over and batches[-1]:
            batches.append([length])
        else:
            batches[-1] = batch
    batches.sort(key=sum)
    return batches[len(batches) // 2]


def attention_budget(config: Any) -> int:
    """The classifier's parameter attention_budget, in rows x longest^2; 0 is no bound. The contract has checked it."""
    return int(config.parameters["attention_budget"].string_value)
