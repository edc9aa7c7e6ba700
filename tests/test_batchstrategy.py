# SPDX-License-Identifier: Apache-2.0
"""The batching library without a server, called as Triton's batcher calls it.

Every order of calls that decides something, and every config that it might misread. That Triton does call it so, and
batches stay within their budget, is for test_bounded_batches.py.
"""

from __future__ import annotations

import ctypes
import json
import re
import time
from collections.abc import Iterator

import pytest
from batching_library import ENGINE_BATCHING, Batcher, Request
from hypothesis import given
from hypothesis import strategies as st


class BudgetBatcher(Batcher):
    """The classifier's."""

    @property
    def budget(self) -> int:
        """The first field of what is kept for a model."""
        return ctypes.c_uint64.from_address(self.batcher.value).value

    def first_walk(self, *requests: Request) -> list[bool]:
        """A new batch: its first request is refused once, and asked about again."""
        self.new_batch()
        assert self.walk(*requests) == [False]
        return self.walk(*requests)


@pytest.fixture
def batcher() -> Iterator[BudgetBatcher]:
    batcher = BudgetBatcher(ENGINE_BATCHING)
    assert batcher.load(config_with("1000")) is None
    yield batcher
    batcher.unload()


def config_with(budget: str) -> bytes:
    return json.dumps({"name": "classifier", "parameters": {"attention_budget": {"string_value": budget}}}).encode()


def test_a_batch_ends_where_the_product_would_pass_the_budget(batcher: BudgetBatcher) -> None:
    """9 rows of 10 and one of 10 are 1000, the budget; an eleventh row is one too many."""
    assert batcher.first_walk(Request.of(9, 10), Request.of(1, 10), Request.of(1, 3)) == [True, True, False]


def test_a_longer_row_counts_for_all_rows(batcher: BudgetBatcher) -> None:
    """10 rows of 2 are 40; with one of 10 they would be 1100."""
    assert batcher.first_walk(Request.of(10, 2), Request.of(1, 9), Request.of(1, 10)) == [True, True, False]


def test_an_extended_batch_keeps_its_count(batcher: BudgetBatcher) -> None:
    """What a batch took in earlier walks counts, however many walks there are."""
    requests = [Request.of(2, 10) for _ in range(6)]

    assert batcher.first_walk(requests[0]) == [True]
    assert [batcher.walk(request) for request in requests[1:]] == [[True]] * 4 + [[False]]


def test_a_repeated_walk_is_not_counted_twice(batcher: BudgetBatcher) -> None:
    """The same queue, walked again and again until the delay is over, and longer each time."""
    requests = [Request.of(2, 10) for _ in range(6)]

    assert batcher.first_walk(*requests[:3]) == [True] * 3
    assert batcher.walk(*requests[:4]) == [True] * 4
    assert batcher.walk(*requests) == [True] * 5 + [False]


def test_a_repeated_extension_still_knows_what_the_batch_holds(batcher: BudgetBatcher) -> None:
    """One row of 20, and one of 5 walked twice: a third of any length would be over."""
    assert batcher.first_walk(Request.of(1, 20)) == [True]
    extension = Request.of(1, 5)

    assert batcher.walk(extension) == [True]
    assert batcher.walk(extension, Request.of(1, 5)) == [True, False]


def test_a_request_cancelled_between_two_walks_is_not_counted(batcher: BudgetBatcher) -> None:
    """One of 20 tokens, gone before the batcher took it, leaves room for rows of 10."""
    head = Request.of(1, 10)

    assert batcher.first_walk(head, Request.of(1, 20)) == [True, True]
    assert batcher.walk(head, Request.of(9, 10)) == [True, True]


def test_a_new_batch_begins_with_nothing(batcher: BudgetBatcher) -> None:
    """A full batch, and the next one as full."""
    for _ in range(3):
        assert batcher.first_walk(Request.of(10, 10), Request.of(1, 1)) == [True, False]


def test_the_first_request_of_a_batch_runs_whatever_it_costs(batcher: BudgetBatcher) -> None:
    """Over the budget by itself, and by more than 64 bits hold: let in, with nothing behind it."""
    for shape in ((64, 512), (2**32 - 1, 2**32 - 1), (2**63 - 1, 2**63 - 1)):
        assert batcher.first_walk(Request.of(*shape))[0]


def test_two_batches_on_end_are_not_refused_for_nothing(batcher: BudgetBatcher) -> None:
    """Were every walk a batch of its own, the first request would still be let in at the second."""
    request = Request.of(1, 10)
    answers = []
    for _ in range(4):
        batcher.new_batch()
        answers += batcher.walk(request)

    assert answers == [False, True, False, True]


def test_no_request_waits_for_longer_than_patience_lasts(batcher: BudgetBatcher) -> None:
    """Refused by a batch that never runs, it is let in in the end."""
    assert batcher.first_walk(Request.of(10, 10)) == [True]
    late = Request.of(1, 20)

    assert batcher.walk(late) == [False]
    deadline = time.monotonic() + 30
    while batcher.walk(late) == [False]:
        assert time.monotonic() < deadline
    assert batcher.walk(Request.of(1, 1)) == [False]


@pytest.mark.parametrize(
    "request_",
    [
        Request.of(1, 10, error=b"no such input"),
        Request.of(10),
        Request.of(1, 10, 10),
        Request.of(-1, 10),
        Request.of(1, -1),
        Request.of(2**40, 10),
        Request.of(0, 0),
    ],
    ids=["no input", "one dim", "three dims", "negative rows", "negative length", "many rows", "nothing"],
)
def test_what_cannot_be_measured_is_left_to_the_backend(batcher: BudgetBatcher, request_: Request) -> None:
    """Let in, and counted as nothing."""
    assert batcher.first_walk(request_, Request.of(10, 10), request_, Request.of(1, 1)) == [True, True, True, False]


def test_zero_is_no_bound(batcher: BudgetBatcher) -> None:
    """Everything is let in, at the first time of asking."""
    batcher.unload()
    assert batcher.load(config_with("0")) is None
    batcher.new_batch()

    assert batcher.walk(Request.of(64, 512), Request.of(64, 512)) == [True, True]


def test_a_batch_without_a_model_or_a_count_is_not_bounded(batcher: BudgetBatcher) -> None:
    """Triton clears userp between walks, and the model's pointer when it unloads: neither is followed."""
    bounded, batcher.batcher = batcher.batcher, ctypes.c_void_p()

    batcher.new_batch()
    assert batcher.walk(Request.of(64, 512), Request.of(64, 512)) == [True, True]

    batcher.batcher = bounded


KEYS = (
    st.sampled_from(["parameters", "attention_budget", "string_value", '"', "\\", '{"attention_budget":']) | st.text()
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
BUDGETS = st.from_regex("[0-9]{1,20}", fullmatch=True) | st.text() | st.sampled_from(["", "-1", "7 ", '"1"', "\\u0031"])


@given(
    config=st.dictionaries(KEYS, JSON, max_size=4),
    parameters=st.dictionaries(KEYS, st.fixed_dictionaries({"string_value": st.text()}), max_size=4),
    budget=st.none() | BUDGETS,
    indent=st.none() | st.just(1),
)
def test_the_budget_is_found_in_any_config(config: dict, parameters: dict, budget, indent) -> None:
    """As Python's json finds it, whatever is beside it, above it and in the strings around it."""
    parameters.pop("attention_budget", None)
    if budget is not None:
        parameters["attention_budget"] = {"string_value": budget}
    text = json.dumps({**config, "parameters": parameters, "~": config}, indent=indent)
    batcher = BudgetBatcher(ENGINE_BATCHING)

    reason = batcher.load(text.encode())

    if budget is not None and re.fullmatch("[0-9]{1,18}", budget):
        assert reason is None and batcher.budget == int(budget)
        batcher.unload()
    else:
        assert reason.startswith(
            "parameter attention_budget is missing: " if budget is None else 'parameter attention_budget is "'
        )


GARBAGE = st.text(alphabet='{}[]",:\\ 1parmetsonibudg_lvu').map(str.encode) | st.binary()
CUT = st.integers(0, len(config_with("4194304"))).map(lambda size: config_with("4194304")[:size])


@given(text=GARBAGE | CUT)
def test_no_text_harms_the_server(text: bytes) -> None:
    """Garbage, and a config cut anywhere, are refused with the same line."""
    batcher = BudgetBatcher(ENGINE_BATCHING)

    reason = batcher.load(text)

    if reason is None:
        batcher.unload()
    else:
        assert reason.startswith("parameter attention_budget is ")
