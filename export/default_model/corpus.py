# SPDX-License-Identifier: Apache-2.0
"""Corpus archive -> labelled sentences: the human ratings inside the vaderSentiment 3.3.2 source archive.

Feeds training and the sample texts. The archive is read in memory: nothing is unpacked to disk and none of its code
is run. It knows nothing of any model or tokenizer.
"""

import hashlib
import html
import io
import re
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ensemble.errors import ExportError
from export.default_model.base import check_file

CORPUS_SHA256 = "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9"
CORPUS_ADVICE = (
    "get the source archive of vaderSentiment 3.3.2: "
    "pip download --no-deps --require-hashes -r export/default_model/corpus.txt -d build/download"
)
# Chosen before any training: its test part holds seven reviews past 512 word pieces, near the 6.4 to be expected.
SPLIT_SEED = 6
LABEL_FROM = 0.5
"""A mean rating past this, on either side, is a label; what lies between is called neutral."""
_INNER = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
_FILES = {
    "movie": "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt",
    "newspaper": "hutto_ICWSM_2014/nytEditorialSnippets_GroundTruth.txt",
    "product": "hutto_ICWSM_2014/amazonReviewSnippets_GroundTruth.txt",
    "tweet": "hutto_ICWSM_2014/tweets_GroundTruth.txt",
}
_DEV, _TEST = 0.1, 0.2


@dataclass(frozen=True)
class Sentence:
    """One rated sentence."""

    domain: str
    """movie, newspaper, product or tweet."""
    row: str
    """The archive's id: `document_sentence` for reviews and editorials; movie snippets and tweets have one number."""
    text: str
    rating: float
    """Mean over at least 14 raters, -4 (negative) to 4 (positive)."""

    @property
    def document(self) -> str:
        """The review, editorial, movie snippet or tweet that the sentence is from, unique over all domains."""
        return f"{self.domain}-{self.row.partition('_')[0]}"


@dataclass(frozen=True)
class Split:
    """Three sets of sentences that share no document and no text."""

    train: list[Sentence]
    dev: list[Sentence]
    test: list[Sentence]


def read_corpus(archive: Path) -> list[Sentence]:
    """All sentences in the archive's order, repeats included. Raises ExportError if it is missing or another file."""
    check_file(archive, CORPUS_SHA256, CORPUS_ADVICE)
    with tarfile.open(archive) as outer, tarfile.open(fileobj=io.BytesIO(_member(outer, _INNER))) as inner:
        return [
            _sentence(domain, line)
            for domain, name in _FILES.items()
            for line in _member(inner, name).decode("utf-8").split("\r\n")
            if line
        ]


def deduplicate(sentences: Iterable[Sentence]) -> list[Sentence]:
    """The first of all sentences with the same words, so that no text is in two parts of a split."""
    first: dict[str, Sentence] = {}
    for sentence in sentences:
        words = " ".join(re.findall(r"\w+", sentence.text.lower()))
        first.setdefault(words or sentence.text, sentence)
    return list(first.values())


def split_by_document(sentences: Iterable[Sentence], seed: int = SPLIT_SEED) -> Split:
    """70 % train, 10 % dev, 20 % test of each domain's documents; a document is never divided."""
    by_domain: dict[str, dict[str, list[Sentence]]] = {}
    for sentence in sentences:
        by_domain.setdefault(sentence.domain, {}).setdefault(sentence.document, []).append(sentence)
    split = Split([], [], [])
    for documents in by_domain.values():
        # Sorted by hash, not shuffled: the order is the same on every Python.
        order = sorted(documents, key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest())
        dev, test = round(len(order) * _DEV), round(len(order) * _TEST)
        for part, names in (
            (split.dev, order[:dev]),
            (split.test, order[dev : dev + test]),
            (split.train, order[dev + test :]),
        ):
            part.extend(sentence for name in names for sentence in documents[name])
    return split


def labelled(sentences: Iterable[Sentence]) -> list[Sentence]:
    """The sentences whose rating is a label: all but the neutral ones."""
    return [sentence for sentence in sentences if abs(sentence.rating) > LABEL_FROM]


def whole_documents(sentences: Iterable[Sentence]) -> list[Sentence]:
    """Each document as one text, its sentences joined in their order, rated by their mean."""
    parts: dict[str, list[Sentence]] = {}
    for sentence in sentences:
        parts.setdefault(sentence.document, []).append(sentence)
    return [
        Sentence(
            domain=some[0].domain,
            row=some[0].row.partition("_")[0],
            text=" ".join(sentence.text for sentence in some),
            rating=sum(sentence.rating for sentence in some) / len(some),
        )
        for some in parts.values()
    ]


def count(sentences: Sequence[Sentence]) -> dict[str, dict[str, int]]:
    """Documents, sentences and labelled sentences of each domain."""
    counts = {}
    for domain in sorted({sentence.domain for sentence in sentences}):
        own = [sentence for sentence in sentences if sentence.domain == domain]
        documents = len({sentence.document for sentence in own})
        counts[domain] = {"documents": documents, "sentences": len(own), "labelled": len(labelled(own))}
    return counts


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    if file is None:
        raise ExportError(f"{name}: not a file in the corpus archive; {CORPUS_ADVICE}")
    return file.read()


def _sentence(domain: str, line: str) -> Sentence:
    row, rating, text = line.split("\t")
    # The tweets and reviews carry HTML entities from where they were collected.
    return Sentence(domain, row, html.unescape(text).strip(), float(rating))
