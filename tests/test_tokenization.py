# SPDX-License-Identifier: Apache-2.0
"""The exported tokenizer against the Hugging Face tokenizer it came from."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from ensemble.errors import ConfigError, InvalidRequest
from ensemble.handlers.tokenization import TextTokenizer, decode
from ensemble.samples import load_samples


@pytest.fixture(scope="module")
def tokenizer(repository: Path) -> TextTokenizer:
    return TextTokenizer(repository / "tokenizer/1/tokenizer.json")


@pytest.fixture(scope="module")
def hugging_face(default_model: Path):
    return AutoTokenizer.from_pretrained(default_model)


def test_real_texts_get_the_same_ids(tokenizer, hugging_face) -> None:
    """Every sample, short or past 512 tokens, tokenizes as Hugging Face does it."""
    texts = [sample.text for sample in load_samples()]

    expected = hugging_face(texts, truncation=True, max_length=512)["input_ids"]

    assert [row.ids for row in tokenizer(texts)] == expected


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=200), min_size=1, max_size=4))
@settings(max_examples=300, deadline=None)
def test_any_text_gets_the_same_ids(tokenizer, hugging_face, texts: list[str]) -> None:
    """Controls, combining marks, every script, NUL: no text panics, all tokenize as Hugging Face does it."""
    expected = hugging_face(texts, truncation=True, max_length=512)["input_ids"]

    assert [row.ids for row in tokenizer(texts)] == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \t\n",
        "\x00",
        "a\x00b",
        "\u200d" * 500,
        "e" + "\u0301" * 10_000,
        "👍🏽👩‍👩‍👧",
        "مرحبا שלום",
        "[SEP] [PAD] [MASK]",
    ],
)
def test_odd_texts_get_the_same_ids(tokenizer, hugging_face, text: str) -> None:
    """Named oddities of real traffic tokenize as Hugging Face does it."""
    assert tokenizer([text])[0].ids == hugging_face(text, truncation=True, max_length=512)["input_ids"]


@pytest.mark.parametrize(("pieces", "truncated"), [(509, False), (510, False), (511, True), (1500, True)])
def test_what_is_cut_is_told(tokenizer, pieces: int, truncated: bool) -> None:
    """num_tokens counts the whole text with [CLS] and [SEP]; the row keeps [SEP] as its last token."""
    (row,) = tokenizer(["hello " * pieces])

    assert row.num_tokens == pieces + 2
    assert row.truncated is truncated
    assert len(row.ids) == min(pieces + 2, 512)
    assert row.ids[0] == 101 and row.ids[-1] == 102


def test_one_tokenizer_serves_many_threads(tokenizer) -> None:
    """Eight threads share a tokenizer: its settings never change, so it is never "already borrowed"."""
    texts = [sample.text for sample in load_samples()[:40]]
    expected = [row.ids for row in tokenizer(texts)]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: [row.ids for row in tokenizer(texts)], range(32)))

    assert answers == [expected] * 32


def test_a_missing_or_foreign_tokenizer_is_refused(tmp_path: Path, repository: Path) -> None:
    """Not there, not a tokenizer, or with padding baked in: each message says so and what to do."""
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing: run make export"):
        TextTokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is not a tokenizer .* run make export"):
        TextTokenizer(tmp_path / "broken.json")
    padded = Tokenizer.from_file(str(repository / "tokenizer/1/tokenizer.json"))
    padded.enable_padding(length=128)
    padded.save(str(tmp_path / "padded.json"))
    with pytest.raises(ConfigError, match="must have truncation and no padding"):
        TextTokenizer(tmp_path / "padded.json")


@pytest.mark.parametrize("text", [b"\xff", b"caf\xe9", b"\xed\xa0\x80"])
def test_text_that_is_not_utf8_is_refused(text: bytes) -> None:
    """Latin-1 and encoded surrogates are the caller's fault; the message names the row, not the text."""
    with pytest.raises(InvalidRequest, match=r"text: row 3 is not valid UTF-8 \(byte \d"):
        decode(text, row=3, max_bytes=100)


def test_a_text_over_the_limit_is_refused() -> None:
    """The limit is in bytes, and a text of exactly that many passes."""
    assert decode("é".encode() * 5, row=0, max_bytes=10) == "ééééé"
    with pytest.raises(InvalidRequest, match="row 0 has 11 bytes, more than the 10"):
        decode(b"a" * 11, row=0, max_bytes=10)


@given(st.binary(max_size=40), st.integers(0, 40))
def test_any_bytes_are_a_text_or_refused(text: bytes, most: int) -> None:
    """What is decoded is what was sent; the limit comes first, and both refusals name the row."""
    if len(text) > most:
        with pytest.raises(InvalidRequest, match=r"row 2 .*max_text_bytes"):
            decode(text, row=2, max_bytes=most)
    elif text.decode(errors="ignore").encode() != text:
        with pytest.raises(InvalidRequest, match="row 2 is not valid UTF-8"):
            decode(text, row=2, max_bytes=most)
    else:
        assert decode(text, row=2, max_bytes=most).encode() == text


@given(st.text(st.characters(categories=["Cs"]), min_size=1, max_size=3))
def test_encoded_surrogates_are_refused(surrogates: str) -> None:
    """Lone or paired: neither is UTF-8."""
    with pytest.raises(InvalidRequest, match="is not valid UTF-8"):
        decode(surrogates.encode("utf-8", "surrogatepass"), row=0, max_bytes=100)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=2000), min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_a_row_is_a_whole_text_or_its_beginning(tokenizer, texts: list[str]) -> None:
    """[CLS] first, [SEP] last, never over the limit, and cut exactly where num_tokens says more was there."""
    for row in tokenizer(texts):
        assert (row.ids[0], row.ids[-1]) == (101, 102)
        assert len(row.ids) == min(row.num_tokens, tokenizer.max_length)
