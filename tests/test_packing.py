# SPDX-License-Identifier: Apache-2.0
"""Rows of ids: checked, freed of padding, packed, padded."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble.errors import InvalidRequest
from ensemble.handlers.packing import check_ids, check_lengths, length_carrier, pack, padded, without_padding

PAD = 0
INT64 = st.integers(-(2**63), 2**63 - 1)
ROWS = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=12), min_size=1, max_size=8)


def test_packed_rows_lie_end_to_end() -> None:
    """Three rows become one run of ids, their lengths, and a tensor as long as the longest."""
    packed = pack([np.array([1, 2]), np.array([3]), np.array([4, 5, 6])])

    assert packed.input_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert packed.row_lengths.tolist() == [2, 1, 3]
    assert packed.longest_row.shape == (3,)
    assert (packed.input_ids.dtype, packed.row_lengths.dtype, packed.longest_row.dtype) == ("int64", "int32", "int32")


def test_padding_is_what_follows_the_last_token() -> None:
    """A [PAD] that a text spells out stays; the padding behind it goes; a row of padding is empty."""
    rows = without_padding(np.array([[7, 0, 8, 0, 0], [7, 8, 8, 8, 8], [0, 0, 0, 0, 0]]), pad_token_id=0)

    assert [row.tolist() for row in rows] == [[7, 0, 8], [7, 8, 8, 8, 8], []]


def test_rows_of_no_ids_at_all_are_empty() -> None:
    """[2, 0] is two empty rows, which check_lengths then refuses."""
    assert [len(row) for row in without_padding(np.zeros((2, 0), dtype=np.int64), pad_token_id=0)] == [0, 0]


def test_padded_rows_and_their_slices_are_contiguous() -> None:
    """What goes to the next model is C-contiguous, so no backend can scramble it."""
    rectangle = padded([[1, 2, 3], [4]], fill=9)

    assert rectangle.tolist() == [[1, 2, 3], [4, 9, 9]]
    assert rectangle.flags.c_contiguous and rectangle.dtype == np.int64


@pytest.mark.parametrize("ids", [[[-1, 2]], [[3, 10]]])
def test_ids_outside_the_vocabulary_are_refused(ids: list[list[int]]) -> None:
    """An id the embedding table does not have is the caller's fault, and is said to be."""
    with pytest.raises(InvalidRequest, match="input_ids: values run from .* the model knows 0 to 9"):
        check_ids("input_ids", np.array(ids), below=10)


def test_rows_that_are_empty_or_too_long_are_refused() -> None:
    """The message names the row and the limit."""
    with pytest.raises(InvalidRequest, match="row 1 is empty"):
        check_lengths("input_ids", [3, 0], 512)
    with pytest.raises(InvalidRequest, match="row 0 has 513 tokens, the model takes 512"):
        check_lengths("input_ids", [513], 512)


@given(ROWS)
def test_packed_rows_can_be_taken_apart_again(rows: list[list[int]]) -> None:
    """Lengths and ids are all there is to a pass: cut at the lengths, the rows come back."""
    packed = pack([np.array(row) for row in rows])

    parts = np.split(packed.input_ids, np.cumsum(packed.row_lengths)[:-1])
    assert [part.tolist() for part in parts] == rows
    assert len(packed.longest_row) == max(map(len, rows))


@given(ROWS)
def test_padding_goes_as_it_came(rows: list[list[int]]) -> None:
    """What padded() adds, without_padding() takes away, and with it nothing but a row's own [PAD]s at its end."""
    freed = without_padding(padded(rows, PAD), PAD)

    ends = [max((place for place, token in enumerate(row, 1) if token != PAD), default=0) for row in rows]
    assert [row.tolist() for row in freed] == [row[:end] for row, end in zip(rows, ends, strict=True)]


@given(st.integers(1, 64), st.integers(1, 512))
def test_the_carrier_says_the_longest_row_and_at_most_a_row_more(rows: int, longest: int) -> None:
    """Its elements are what an engine pads attention to."""
    assert longest <= length_carrier(rows, longest).size <= longest + rows - 1


@given(st.lists(INT64, max_size=20), st.integers(1, 2**40))
def test_ids_are_refused_if_any_is_outside(ids: list[int], below: int) -> None:
    """The whole range of INT64: nothing wraps around."""
    array = np.array(ids, dtype=np.int64).reshape(1, -1)

    if all(0 <= token < below for token in ids):
        check_ids("input_ids", array, below)
    else:
        with pytest.raises(InvalidRequest, match="values run from"):
            check_ids("input_ids", array, below)


@given(st.lists(st.integers(0, 40), max_size=10), st.integers(1, 30))
def test_lengths_are_refused_if_any_is_outside(lengths: list[int], longest: int) -> None:
    """The first row at fault is the one that is named."""
    wrong = [row for row, length in enumerate(lengths) if not 1 <= length <= longest]

    if not wrong:
        check_lengths("input_ids", lengths, longest)
    else:
        with pytest.raises(InvalidRequest, match=f"row {wrong[0]} "):
            check_lengths("input_ids", lengths, longest)
