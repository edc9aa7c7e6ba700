# SPDX-License-Identifier: Apache-2.0
"""What a BERT forward pass costs on paper: FLOPs, bytes, and the time a card needs for them. Pure arithmetic.

FLOPs count a multiplication and an addition as two, and matrix products only: embeddings, LayerNorm, softmax, GELU,
pooler and classifier together are under 1 % of them. Bytes are FP16 tensors that one operator writes to memory and
the next reads back. Bias and GELU are fused into the product before them, a residual into its LayerNorm; weights are
read once a pass. Attention's scores go to memory and back twice (product, softmax, product) unless it is fused into
one kernel: which of the two an engine does, its builder decides. A card's caches are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from perf.paper.cards import Card

FP16_BYTES = 2


@dataclass(frozen=True)
class BertShape:
    """The numbers of a BERT that its cost depends on; BERT-base by default."""

    layers: int = 12
    hidden: int = 768
    intermediate: int = 3072
    heads: int = 12

    @property
    def attention_weights(self) -> int:
        """Of one projection of one layer: query, key, value and output have as many each."""
        return self.hidden**2

    @property
    def layer_weights(self) -> int:
        """Of the linear layers of one encoder layer, biases left out."""
        return 4 * self.attention_weights + 2 * self.hidden * self.intermediate


@dataclass(frozen=True)
class Work:
    """What one or several passes do. FLOPs and bytes."""

    linear_flops: float = 0.0
    attention_flops: float = 0.0
    weight_bytes: float = 0.0
    activation_bytes: float = 0.0
    score_bytes: float = 0.0

    @property
    def flops(self) -> float:
        """All of them."""
        return self.linear_flops + self.attention_flops

    @property
    def bytes(self) -> float:
        """All of them."""
        return self.weight_bytes + self.activation_bytes + self.score_bytes

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes

    @property
    def fused(self) -> Work:
        """The same with attention fused: the scores never leave the chip."""
        return replace(self, score_bytes=0.0)

    def __add__(self, other: Work) -> Work:
        return Work(
            self.linear_flops + other.linear_flops,
            self.attention_flops + other.attention_flops,
            self.weight_bytes + other.weight_bytes,
            self.activation_bytes + other.activation_bytes,
            self.score_bytes + other.score_bytes,
        )


def packed(shape: BertShape, lengths: Sequence[int], *, cls_only: bool = True) -> Work:
    """One pass over packed rows: linear layers per token, attention in a rectangle of rows x longest^2.

    lengths: tokens of each row.
    cls_only: the last layer's query, output projection and FFN for the [CLS] rows only, as the packed graph has it.
    """
    tokens, rows, longest = sum(lengths), len(lengths), max(lengths)
    full = shape.layers - cls_only
    work = _layers(shape, full, tokens, rows, longest, gathered=True)
    return work + (_last_layer(shape, tokens, rows, longest) if cls_only else Work())


def padded(shape: BertShape, rows: int, longest: int) -> Work:
    """One pass over rows padded to `longest`: every layer for every cell, padding included."""
    return _layers(shape, shape.layers, rows * longest, rows, longest, gathered=False)


def useful_flops(shape: BertShape, lengths: Sequence[int]) -> float:
    """What the texts need, each alone at its own length and every layer whole: the measure that layouts share.

    A packed pass does less (its last layer), a padded one more.
    """
    counts = np.asarray(lengths, dtype=np.float64)
    per_token = 2.0 * shape.layers * shape.layer_weights
    return float(per_token * counts.sum() + 4.0 * shape.layers * shape.hidden * (counts**2).sum())


def seconds(work: Work, card: Card, share: float = 1.0) -> float:
    """The roofline of one pass: as long as the slower of computing, at `share` of the card's peak, and moving bytes."""
    return max(work.flops / (share * card.flops), work.bytes / card.bandwidth)


def bound(work: Work, card: Card, share: float = 1.0) -> str:
    """Which of the two it is."""
    return "compute" if work.flops / (share * card.flops) >= work.bytes / card.bandwidth else "memory"


@dataclass(frozen=True)
class Setting:
    """What the paper is written for.

    rows:  of a full batch
    share: of the card's peak that is reached
    fused: whether attention is one kernel
    """

    shape: BertShape
    card: Card
    rows: int = 64
    share: float = 0.6
    fused: bool = False

    def seconds(self, work: Work) -> float:
        """Of one pass."""
        return seconds(work.fused if self.fused else work, self.card, self.share)


def _layers(shape: BertShape, count: int, tokens: int, rows: int, longest: int, *, gathered: bool) -> Work:
    """`count` whole encoder layers. tokens: what the linear layers see; gathered: to the rectangle and back."""
    cells, state = rows * longest, tokens * shape.hidden
    rectangle = cells * shape.hidden
    # Projections (read 1, write 3); output (2), add and norm (3), FFN up (1 + f), FFN down (f + 1), add and norm (3).
    elements = 14 * state + 2 * tokens * shape.intermediate
    # Query, key and value read, context written; with it 3 tensors read and written into it and 1 out of it.
    elements += 4 * rectangle + (6 * rectangle + 2 * state if gathered else 0)
    return Work(
        linear_flops=2.0 * count * tokens * shape.layer_weights,
        attention_flops=4.0 * count * rows * longest**2 * shape.hidden,
        weight_bytes=FP16_BYTES * count * shape.layer_weights,
        activation_bytes=FP16_BYTES * count * elements,
        score_bytes=FP16_BYTES * 4.0 * count * shape.heads * rows * longest**2,
    )


def _last_layer(shape: BertShape, tokens: int, rows: int, longest: int) -> Work:
    """The last layer where only the [CLS] rows go on: key and value of all tokens, all else of `rows`."""
    state, rectangle, first = tokens * shape.hidden, rows * longest * shape.hidden, rows * shape.hidden
    # Key and value: read 1, write 2, gathered (2 + 2), read (2). Of the [CLS] rows: gathered (2), query (2), read and
    # context written (2), and what follows attention as in _layers (10 and twice f).
    elements = 3 * state + 6 * rectangle + 16 * first + 2 * rows * shape.intermediate
    rest = shape.layer_weights - 2 * shape.attention_weights
    return Work(
        linear_flops=2.0 * (tokens * 2 * shape.attention_weights + rows * rest),
        attention_flops=4.0 * rows * longest * shape.hidden,
        weight_bytes=FP16_BYTES * shape.layer_weights,
        activation_bytes=FP16_BYTES * elements,
        score_bytes=FP16_BYTES * 4.0 * shape.heads * rows * longest,
    )
