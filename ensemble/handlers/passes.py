# SPDX-License-Identifier: Apache-2.0
"""How to cut the rows of one batch into forward passes; knows only lengths, nothing of tokens, models or Triton.

The packed graph does its linear work once per token, but attention needs a rectangle: rows x longest row squared. One
row of 512 tokens among 63 of 25 would make all 64 pay for 512 x 512 scores. So the rows are sorted by length and cut
into the few passes that cost least under

    cost(pass) = tokens + attention_cost * rows * longest^2 + pass_cost        (unit: one token's linear work)

which gives one pass when lengths are alike, a handful when there is a long tail, and never one a request as a habit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class CostModel:
    """What a forward pass costs, in units of one token's linear work.

    attention_cost: one attention score per row (all heads and layers together).
    pass_cost:      what a pass costs before it does any work; keeps the number of passes small.

    Both are machine dependent and flat around the optimum; python -m perf cost-model measures them.
    """

    attention_cost: float
    pass_cost: float

    def __post_init__(self) -> None:
        if not (self.attention_cost >= 0 and self.pass_cost >= 0):
            raise ValueError(f"attention_cost and pass_cost must be at least 0, not {self}")


def plan(lengths: Sequence[int], cost: CostModel) -> list[list[int]]:
    """Cut rows into passes of least total cost.

    lengths: tokens in each row, each at least 1.
    Returns the passes, shortest rows first: each a list of indices into `lengths`, every index exactly once.

    Exact for the cost model: among all ways to group rows, one of the cheapest groups neighbours in sorted order, and
    the dynamic programme tries all cuts between neighbours, O(n^2) for n rows.
    """
    order = np.argsort(np.asarray(lengths), kind="stable")
    longest = np.asarray(lengths, dtype=np.float64)[order]
    n = len(order)
    rows = np.arange(n, 0, -1)  # rows[i]: rows of a pass from i to n, so rows[n - end:] fits a pass ending at `end`
    best = np.zeros(n + 1)  # best[end]: the least cost of the first `end` rows; their linear work is the same for all
    start = np.zeros(n + 1, dtype=np.int64)
    for end in range(1, n + 1):
        total = best[:end] + cost.attention_cost * rows[n - end :] * longest[end - 1] ** 2 + cost.pass_cost
        start[end] = int(total.argmin())
        best[end] = total[start[end]]
    passes: list[list[int]] = []
    end = n
    while end:
        passes.append(order[start[end] : end].tolist())
        end = int(start[end])
    return passes[::-1]
