# SPDX-License-Identifier: Apache-2.0
"""Rows of ids: checked, freed of padding, packed, padded."""

from __future__ import annotations

import numpy as np
import pytest

from ensemble.errors import InvalidRequest
from ensemble.packing import check_ids, check_lengths, pack, padded, without_padding


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
