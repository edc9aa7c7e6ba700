# SPDX-License-Identifier: Apache-2.0
"""What a bound on rows x longest^2 does to the batches of a packed engine, on paper. Pure; knows nothing of Triton.

The bound is the TensorRT classifier's parameter attention_budget. Batches are formed as Triton's batcher forms them
when its queue is never empty: in order of arrival, each ended by the row that no longer fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ensemble.handlers.passes import CostModel, plan
from perf.paper.roofline_model import FP16_BYTES, Setting, packed


@dataclass(frozen=True)
class Outcome:
    """What a way to form passes comes to.

    passes:  how many
    compute: seconds of all of them, but for what each costs whatever it holds
    longest: seconds of the longest of them, likewise
    scores:  bytes of the largest pass's attention scores in one layer, FP16
    """

    texts: int
    passes: int
    compute: float
    longest: float
    scores: float

    @property
    def rows(self) -> float:
        """Mean rows of a pass."""
        return self.texts / self.passes

    def per_second(self, pass_seconds: float) -> float:
        """Texts a second where every pass costs pass_seconds beside its work."""
        return self.texts / (self.compute + self.passes * pass_seconds)


def budgeted(setting: Setting, lengths: Sequence[int], budget: int | None) -> Outcome:
    """Batches in order of arrival, within a budget, a pass each."""
    return _outcome(setting, in_order_of_arrival(lengths, budget, setting.rows))


def planned(setting: Setting, lengths: Sequence[int], pass_seconds: float) -> Outcome:
    """What sorting leaves to gain: full batches, cut into the passes that cost least, as the Python handler does."""
    shape = setting.shape
    token = 2.0 * shape.layers * shape.layer_weights / (setting.share * setting.card.flops)
    cost = CostModel(attention_cost=2.0 * shape.hidden / shape.layer_weights, pass_cost=pass_seconds / token)
    passes = []
    for batch in in_order_of_arrival(lengths, None, setting.rows):
        passes += [[batch[index] for index in members] for members in plan(batch, cost)]
    return _outcome(setting, passes)


def in_order_of_arrival(lengths: Sequence[int], budget: int | None, max_rows: int) -> list[list[int]]:
    """Cut rows, as they come, into batches of at most max_rows whose rows x longest^2 is within budget.

    budget: None for no bound. A row that is over it alone is a batch of its own.
    """
    batches: list[list[int]] = []
    longest = 0
    for length in lengths:
        longest = max(longest, length)
        open_ = bool(batches) and len(batches[-1]) < max_rows
        if open_ and (budget is None or (len(batches[-1]) + 1) * longest**2 <= budget):
            batches[-1].append(length)
        else:
            batches.append([length])
            longest = length
    return batches


def shuffled(lengths: Sequence[int], rounds: int, seed: int) -> list[int]:
    """All lengths `rounds` times over, each time in another order; the same for the same seed."""
    generator = np.random.default_rng(seed)
    return [int(length) for _ in range(rounds) for length in generator.permutation(np.asarray(lengths))]


def _outcome(setting: Setting, passes: list[list[int]]) -> Outcome:
    times = [setting.seconds(packed(setting.shape, rows)) for rows in passes]
    return Outcome(
        texts=sum(map(len, passes)),
        passes=len(passes),
        compute=sum(times),
        longest=max(times),
        scores=FP16_BYTES * setting.shape.heads * max(len(rows) * max(rows) ** 2 for rows in passes),
    )
