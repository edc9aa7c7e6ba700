# SPDX-License-Identifier: Apache-2.0
"""Texts that can be told apart by their answers, what each is answered alone, and whether an answer is its own.

Computed in-process from the installed files. Knows nothing of servers, and of answers only what they say.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from ensemble.artifacts import checked
from ensemble.errors import PipelineError
from ensemble.handlers.packing import Ids
from ensemble.samples import load_samples
from perf.in_process import classifier
from perf.load_point import TOLERANCES as PRECISIONS

Floats = npt.NDArray[np.float32]

# Of a logit, or of the text's largest one where that is over 1. FP32 sums in another order in another batch.
TOLERANCES = {"onnx": 1e-4, "baseline": 1e-4, "tensorrt": PRECISIONS["fp16"]}
# Classification strings are cut to six decimals.
STRING_TOLERANCE = 1e-5
# Share of the texts with so many words at least and at most: most are short, some reach past any model's positions.
LENGTHS = ((0.70, 0, 16), (0.24, 16, 64), (0.06, 64, 700))
# Candidates for a text, before it is given up that there are so many that can be told apart.
MOST_CANDIDATES = 10


@dataclass(frozen=True)
class Answer:
    """What a server answered to the rows of one request.

    logits:        FP32 [rows, labels]
    probabilities: the same, or None where strings were asked for
    strings:       `value:index:label`, likeliest first, a list a row; None where numbers were asked for
    num_tokens:    a row's whole text
    truncated:     whether the model saw less
    """

    logits: Floats
    probabilities: Floats | None
    strings: list[list[str]] | None
    num_tokens: Sequence[int]
    truncated: Sequence[bool]


@dataclass(frozen=True)
class Reference:
    """Texts and their answers, each computed alone.

    dropped: candidates that were left out because their logits are those of another text, within twice the tolerance
    """

    texts: list[str]
    labels: list[str]
    logits: Floats
    probabilities: Floats
    num_tokens: list[int]
    truncated: list[bool]
    tolerance: float
    dropped: int

    def faults(self, rows: Sequence[int], answer: Answer) -> list[str]:
        """What is wrong with the answer to these texts, a line a row; "crossed: ..." if it is another text's.

        rows: indices of the texts that were sent.
        """
        if not len(answer.logits) == len(answer.num_tokens) == len(answer.truncated) == len(rows):
            return [f"wrong: {len(answer.logits)} rows came back for {len(rows)} texts"]
        found = (self._fault(text, row, answer) for row, text in enumerate(rows))
        return [fault for fault in found if fault]

    def _fault(self, text: int, row: int, answer: Answer) -> str:
        wrong = [
            name
            for name, sound in (
                ("logits", self._near(answer.logits[row], self.logits[text])),
                ("probabilities", self._probable(text, row, answer)),
                ("num_tokens", answer.num_tokens[row] == self.num_tokens[text]),
                ("truncated", answer.truncated[row] == self.truncated[text]),
            )
            if not sound
        ]
        if not wrong:
            return ""
        whose = [other for other in range(len(self.texts)) if self._near(answer.logits[row], self.logits[other])]
        others = [other for other in whose if other != text]
        return f"crossed: text {text} got text {others[0]}'s answer" if others else f"wrong: text {text}: {wrong}"

    def _near(self, given: Floats, expected: Floats) -> bool:
        return given.shape == expected.shape and _distance(given, expected) <= self.tolerance

    def _probable(self, text: int, row: int, answer: Answer) -> bool:
        expected = self.probabilities[text]
        if answer.probabilities is not None:
            return self._near(answer.probabilities[row], expected)
        parts = [string.split(":", 2) for string in (answer.strings or [[]] * (row + 1))[row]]
        values, indices = [float(part[0]) for part in parts], [int(part[1]) for part in parts]
        return (
            sorted(indices) == list(range(len(self.labels)))
            and values == sorted(values, reverse=True)
            and all(part[2:] == [self.labels[index]] for part, index in zip(parts, indices, strict=True))
            and bool(np.abs(values - expected[indices]).max() <= self.tolerance + STRING_TOLERANCE)
        )


class Oracle:
    """What the installed files make of one text alone: its tokens, and FP32 [labels] of logits and of probabilities."""

    def __init__(self, repository: Path) -> None:
        """Raises ConfigError if no model is installed."""
        file, self.manifest = checked(repository / "tokenizer/1/tokenizer.json")
        self._tokenizer = Tokenizer.from_file(str(file))
        self._tokenizer.no_truncation()  # cut here instead, so that the served cut is held against another one
        self._classify = classifier(repository)

    def __call__(self, text: str) -> tuple[int, Floats, Floats]:
        """The tokens of the whole text, and the scores of what the model reads of it."""
        ids = self._tokenizer.encode(text).ids
        scores = self._classify([_cut(ids, self.manifest.max_length)])
        return len(ids), scores.logits[0], scores.probabilities[0]

    def reference(
        self, texts: Sequence[str], answers: Sequence[tuple[int, Floats, Floats]], tolerance: float, dropped: int = 0
    ) -> Reference:
        """Of these texts and what was answered to each."""
        num_tokens, logits, probabilities = zip(*answers, strict=True)
        truncated = [tokens > self.manifest.max_length for tokens in num_tokens]
        labels = self.manifest.labels
        return Reference(
            list(texts),
            labels,
            np.stack(logits),
            np.stack(probabilities),
            list(num_tokens),
            truncated,
            tolerance,
            dropped,
        )


def of_texts(repository: Path, texts: Sequence[str], served_by: str) -> Reference:
    """Of any texts, whether or not they can be told apart. served_by: one of TOLERANCES."""
    oracle = Oracle(repository)
    return oracle.reference(texts, [oracle(text) for text in texts], TOLERANCES[served_by])


def build(
    repository: Path, count: int, seed: int, served_by: str, progress: Callable[[int], None] = lambda done: None
) -> Reference:
    """So many texts of 0 to 700 words that can be told apart. served_by: one of TOLERANCES.

    progress: told the number of texts so far. Raises ConfigError if no model is installed, PipelineError if its answers
    are too alike.
    """
    oracle, rng, tolerance = Oracle(repository), random.Random(seed), TOLERANCES[served_by]  # noqa: S311
    words = [word for sample in load_samples() for word in sample.text.split()]
    texts: list[str] = []
    answers: list[tuple[int, Floats, Floats]] = []
    logits = np.empty((count, len(oracle.manifest.labels)), dtype=np.float32)
    candidates = 0
    while len(texts) < count:
        if candidates == MOST_CANDIDATES * count:
            raise PipelineError(
                f"only {len(texts)} of {candidates} texts can be told apart by their logits, {count} are wanted: "
                "ask for fewer texts"
            )
        candidates += 1
        text = _text(words, len(texts) / max(1, count - 1), rng)
        answer = oracle(text)
        if not texts or _distances(logits[: len(texts)], answer[1]).min() > 2 * tolerance:
            logits[len(texts)] = answer[1]
            texts.append(text)
            answers.append(answer)
            progress(len(texts))
    return oracle.reference(texts, answers, tolerance, candidates - count)


def described(reference: Reference) -> dict[str, Any]:
    """For the record."""
    return {
        "texts": len(reference.texts),
        "mean_tokens": float(np.mean(reference.num_tokens)),
        "shortest": min(reference.num_tokens),
        "longest": max(reference.num_tokens),
        "truncated": sum(reference.truncated),
        "candidates_dropped_as_too_alike": reference.dropped,
        "tolerance": reference.tolerance,
    }


def _text(words: Sequence[str], place: float, rng: random.Random) -> str:
    """Real words, out of their order but for runs of a few.

    place: 0 to 1, which of LENGTHS it falls into; 0 is the shortest of all and 1 the longest
    """
    ends = list(accumulate(share for share, _, _ in LENGTHS[:-1]))
    _, shortest, longest = LENGTHS[bisect_right(ends, place)]
    count = {0.0: shortest, 1.0: longest}.get(place, rng.randint(shortest, longest))
    text: list[str] = []
    while len(text) < count:
        start = rng.randrange(len(words))
        text += words[start : start + min(rng.randint(1, 12), count - len(text))]
    return " ".join(text)


def _cut(ids: list[int], longest: int) -> Ids:
    """As Hugging Face cuts: [SEP] stays the last."""
    return np.array(ids if len(ids) <= longest else [*ids[: longest - 1], ids[-1]], dtype=np.int64)


def _distance(given: Floats, expected: Floats) -> float:
    """The largest difference; NaN, which is within no tolerance, if any is."""
    return float(_distances(given[None], expected)[0])


def _distances(given: Floats, expected: Floats) -> npt.NDArray[np.float64]:
    """Of each of given, [n, labels], from expected, [labels]."""
    furthest: npt.NDArray[np.float64] = np.abs(given.astype(np.float64) - expected).max(axis=1)
    return furthest / max(1.0, float(np.abs(expected).max()))
