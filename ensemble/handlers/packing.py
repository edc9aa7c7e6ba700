# SPDX-License-Identifier: Apache-2.0
"""Rows of token ids: checked, freed of padding, packed or padded. Knows nothing of who sends or runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ensemble.errors import InvalidRequest

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Packed:
    """One forward pass without padding.

    input_ids    INT64 [T]: all rows end to end
    row_lengths  INT32 [B]: tokens in each row
    longest_row  INT32 [S]: only its shape is read, the padded length inside attention
    """

    input_ids: Ids
    row_lengths: npt.NDArray[np.int32]
    longest_row: npt.NDArray[np.int32]

    def feeds(self) -> dict[str, npt.NDArray[np.int64] | npt.NDArray[np.int32]]:
        """The arrays by the names the packed graph gives its inputs."""
        return {"input_ids": self.input_ids, "row_lengths": self.row_lengths, "longest_row": self.longest_row}


def pack(rows: Sequence[Ids]) -> Packed:
    """Lay rows end to end. rows: INT64 [length] each, every length at least 1."""
    lengths = np.fromiter((len(row) for row in rows), dtype=np.int32, count=len(rows))
    return Packed(np.concatenate(rows), lengths, np.zeros(int(lengths.max()), dtype=np.int32))


def padded(rows: Sequence[Sequence[int] | Ids], fill: int) -> Ids:
    """Rows of any lengths to one C-contiguous rectangle, INT64 [b, longest], filled up with `fill` at the right."""
    rectangle = np.full((len(rows), max(len(row) for row in rows)), fill, dtype=np.int64)
    for target, row in zip(rectangle, rows, strict=True):
        target[: len(row)] = row
    return rectangle


def length_carrier(rows: int, longest: int) -> npt.NDArray[np.int32]:
    """What tells the TensorRT classifier the padded length inside attention: zeros, [b, ceil(L / b)], for b rows of L.

    Triton sizes `longest_row` by the element count of a tensor, all rows of a request together; that of input_ids
    would be b times too much, this one's is L to L + b - 1.
    """
    return np.zeros((rows, -(-longest // rows)), dtype=np.int32)


def without_padding(input_ids: Ids, pad_token_id: int) -> list[Ids]:
    """The rows of one request, INT64 [b, L], without the padding that made a rectangle of them.

    Only what follows a row's last other token is padding: a text that spells out "[PAD]" has that id in its middle,
    where the Hugging Face model reads it like any other token. A row of nothing but padding comes back empty.
    """
    if input_ids.shape[1] == 0:
        return list(input_ids)
    real = input_ids != pad_token_id
    lengths = np.where(real.any(axis=1), input_ids.shape[1] - real[:, ::-1].argmax(axis=1), 0)
    return [row[:length] for row, length in zip(input_ids, lengths, strict=True)]


def check_ids(name: str, ids: Ids, below: int) -> None:
    """Refuse ids outside 0 .. below - 1: they index an embedding table, and one bad id would fail the whole batch."""
    if ids.size and not (ids.min() >= 0 and ids.max() < below):
        raise InvalidRequest(
            f"{name}: values run from {ids.min()} to {ids.max()}, the model knows 0 to {below - 1}: "
            "send what the tokenizer exported with it makes"
        )


def check_lengths(name: str, lengths: Sequence[int], max_length: int) -> None:
    """Refuse rows without any token and rows longer than the model's positions reach."""
    for row, length in enumerate(lengths):
        if length < 1:
            raise InvalidRequest(f"{name}: row {row} is empty: send at least [CLS] and [SEP]")
        if length > max_length:
            raise InvalidRequest(f"{name}: row {row} has {length} tokens, the model takes {max_length}: truncate it")
