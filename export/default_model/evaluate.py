# SPDX-License-Identifier: Apache-2.0
"""Logits + ratings -> figures: what the model card says about the default model, as plain numbers.

Called by train.py. It knows nothing of models, files or how the logits were made. Accuracy is over the labelled
sentences where nothing else is said.
"""

import re
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from export.default_model.corpus import LABEL_FROM, Sentence

LENGTH_BOUNDS = (16, 32, 64, 128, 256, 512)
NEGATION = re.compile(r"\b(not|no|never|nothing|nor|neither|cannot|without)\b|n't\b", re.IGNORECASE)


def labels_of(sentences: Sequence[Sentence]) -> Tensor:
    """INT64 [n]: 1 for a positive rating, 0 for a negative one."""
    return torch.tensor([int(sentence.rating > 0) for sentence in sentences])


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """The T for which softmax(logits / T) has the lowest cross entropy, to 1 %. Logits are [n, 2]."""
    candidates = [0.5 * 1.01**step for step in range(280)]
    losses = [torch.nn.functional.cross_entropy(logits / t, labels).item() for t in candidates]
    return candidates[losses.index(min(losses))]


def figures(sentences: Sequence[Sentence], lengths: Sequence[int], logits: Tensor) -> dict[str, Any]:
    """All figures for one set of texts: `lengths` in word pieces, `logits` [n, 2], in the order of `sentences`."""
    rows = list(zip(sentences, lengths, logits.softmax(-1)[:, 1].tolist(), strict=True))
    sure = [row for row in rows if abs(row[0].rating) > LABEL_FROM]
    return {
        **_accuracy(sure),
        "per_domain": _per_group(sure, lambda row: row[0].domain),
        "per_length": _per_length(sure),
        "negation": _per_group(sure, lambda row: "with" if NEGATION.search(row[0].text) else "without"),
        "all_ratings_but_zero": _accuracy([row for row in rows if row[0].rating != 0]),
        "per_strength": _per_group([r for r in rows if r[0].rating != 0], lambda row: _strength(row[0].rating)),
        "confusion": _confusion(sure),
        "calibration": _calibration(sure),
        "neutral": _confidence([row for row in rows if abs(row[0].rating) <= LABEL_FROM]),
    }


_Row = tuple[Sentence, int, float]
"""A sentence, its length in word pieces and the model's probability that it is positive."""


def _right(row: _Row) -> bool:
    return (row[2] > 0.5) == (row[0].rating > 0)


def _sureness(row: _Row) -> float:
    return max(row[2], 1 - row[2])


def _accuracy(rows: Sequence[_Row]) -> dict[str, float | int | None]:
    accuracy = round(sum(map(_right, rows)) / len(rows), 4) if rows else None
    return {"accuracy": accuracy, "count": len(rows)}


def _per_group(rows: Sequence[_Row], key: Callable[[_Row], str]) -> dict[str, Any]:
    groups: dict[str, list[_Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return {name: _accuracy(groups[name]) for name in sorted(groups)}


def _per_length(rows: Sequence[_Row]) -> dict[str, Any]:
    table = {}
    for low, high in pairwise((0, *LENGTH_BOUNDS, sys.maxsize)):
        inside = [row for row in rows if low < row[1] <= high]
        if inside:
            table[f"{low + 1} or more" if high == sys.maxsize else f"{low + 1}-{high}"] = _accuracy(inside)
    return table


def _strength(rating: float) -> str:
    size = abs(rating)
    return "0-0.5" if size <= LABEL_FROM else "0.5-1" if size <= 1 else "1-2" if size <= 2 else "2-4"


def _confusion(rows: Sequence[_Row]) -> dict[str, int]:
    counts = dict.fromkeys(
        (f"{truth}_as_{answer}" for truth in ("negative", "positive") for answer in ("negative", "positive")), 0
    )
    for sentence, _, positive in rows:
        truth, answer = ("positive" if yes else "negative" for yes in (sentence.rating > 0, positive > 0.5))
        counts[f"{truth}_as_{answer}"] += 1
    return counts


def _calibration(rows: Sequence[_Row], bins: int = 5) -> dict[str, Any]:
    # Confidence of the answer given runs from 0.5 to 1; ECE is the mean gap to accuracy, weighted by the bins' counts.
    table, error = [], 0.0
    for index in range(bins):
        low, high = 0.5 + index / (2 * bins), 0.5 + (index + 1) / (2 * bins)
        inside = [row for row in rows if low <= _sureness(row) < high or _sureness(row) == high == 1]
        if not inside:
            continue
        confidence = sum(map(_sureness, inside)) / len(inside)
        accuracy = sum(map(_right, inside)) / len(inside)
        error += abs(confidence - accuracy) * len(inside) / len(rows)
        entry = {"from": low, "to": high, "count": len(inside), "confidence": confidence, "accuracy": accuracy}
        table.append({name: round(value, 4) for name, value in entry.items()})
    return {"expected_calibration_error": round(error, 4), "bins": table}


def _confidence(rows: Sequence[_Row]) -> dict[str, float | int]:
    sizes = [_sureness(row) for row in rows]
    above = sum(size > 0.9 for size in sizes)
    return {"count": len(rows), "mean": round(sum(sizes) / len(rows), 4), "above_0.9": round(above / len(rows), 4)}
