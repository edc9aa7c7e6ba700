# SPDX-License-Identifier: Apache-2.0
"""Sample texts of mixed length, for tests and measurements: what README.md beside this file describes.

Read by perf and the tests. It knows nothing of tokenizers, models or servers, and needs only the standard library.
"""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

__all__ = ["Sample", "load_samples", "long_samples", "short_samples"]


@dataclass(frozen=True)
class Sample:
    """One text and its length."""

    id: str
    """Where it is in the corpus: domain, document and, for a single sentence of one, its number."""
    domain: str
    """movie, newspaper, product or tweet."""
    text: str
    tokens: int
    """Word pieces of bert-base-uncased with [CLS] and [SEP], not truncated."""


def load_samples() -> list[Sample]:
    """All 300 texts in their committed, shuffled order; 12 % are long, the longest past 512 tokens."""
    return list(_read())


def short_samples() -> list[Sample]:
    """The texts of at most 64 tokens: single sentences, mean 24 tokens."""
    return [sample for sample in _read() if sample.tokens <= 64]


def long_samples() -> list[Sample]:
    """The texts of at least 512 tokens: the most a BERT model takes, and more."""
    return [sample for sample in _read() if sample.tokens >= 512]


@cache
def _read() -> tuple[Sample, ...]:
    lines = files(__name__).joinpath("mixed.jsonl").read_text(encoding="utf-8").split("\n")
    return tuple(Sample(**json.loads(line)) for line in lines if line)
