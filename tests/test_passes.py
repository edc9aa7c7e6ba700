# SPDX-License-Identifier: Apache-2.0
"""The plan of forward passes."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble.handlers.passes import CostModel, plan
from ensemble.samples import load_samples

# The committed values of classifier/configs/cpu.pbtxt.
COST = CostModel(attention_cost=0.002, pass_cost=25)


def cost_of(passes: list[list[int]], lengths: list[int]) -> float:
    return sum(
        COST.attention_cost * len(members) * max(lengths[i] for i in members) ** 2 + COST.pass_cost
        for members in passes
    )


def test_rows_of_like_length_are_one_pass() -> None:
    """64 rows of 20 to 30 tokens run in one forward pass."""
    passes = plan([20 + index % 11 for index in range(64)], COST)

    assert len(passes) == 1


def test_one_long_row_gets_a_pass_of_its_own() -> None:
    """63 rows of 25 tokens and one of 512 run in two passes, the long one alone."""
    passes = plan([25] * 40 + [512] + [25] * 23, COST)

    assert [len(members) for members in passes] == [63, 1]
    assert passes[1] == [40]


def test_a_long_tail_takes_a_handful_of_passes() -> None:
    """Batches of 64 real texts, from tweets to past 512 tokens, run in 2 to 10 passes each."""
    lengths = [min(sample.tokens, 512) for sample in load_samples()]

    passes = [len(plan(lengths[start : start + 64], COST)) for start in range(0, 256, 64)]

    assert all(2 <= count <= 10 for count in passes)


@given(st.lists(st.integers(1, 512), min_size=1, max_size=64))
def test_every_row_is_in_exactly_one_pass(lengths: list[int]) -> None:
    """A plan is a partition of the rows."""
    passes = plan(lengths, COST)

    assert sorted(index for members in passes for index in members) == list(range(len(lengths)))


@given(st.lists(st.integers(1, 512), min_size=1, max_size=7))
def test_no_other_cut_costs_less(lengths: list[int]) -> None:
    """The plan is as cheap as the best of all cuts between neighbours in sorted order."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    cuts = (cut for count in range(len(lengths)) for cut in combinations(range(1, len(lengths)), count))
    best = min(
        cost_of([order[a:b] for a, b in zip((0, *cut), (*cut, len(order)), strict=True)], lengths) for cut in cuts
    )

    assert cost_of(plan(lengths, COST), lengths) == pytest.approx(best)


def test_free_attention_and_dear_passes_mean_one_pass() -> None:
    """With nothing to gain from a cut there is none."""
    assert plan([1, 512, 3], CostModel(attention_cost=0, pass_cost=1)) == [[0, 2, 1]]


def test_a_negative_cost_is_refused() -> None:
    """A cost model that would reward passes is an error."""
    with pytest.raises(ValueError, match="at least 0"):
        CostModel(attention_cost=-1, pass_cost=0)


@given(st.lists(st.integers(1, 512), min_size=1, max_size=64), st.floats(0, 1), st.floats(0, 1e6))
def test_any_cost_model_gives_a_partition_in_order_of_length(
    lengths: list[int], attention_cost: float, pass_cost: float
) -> None:
    """Free passes or dear ones, free attention or dear: each row once, and no pass has a row shorter than the last's."""
    passes = plan(lengths, CostModel(attention_cost, pass_cost))

    assert sorted(index for members in passes for index in members) == list(range(len(lengths)))
    in_order = [lengths[index] for members in passes for index in members]
    assert in_order == sorted(lengths) and all(passes)
