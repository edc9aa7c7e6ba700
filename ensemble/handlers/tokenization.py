# SPDX-License-Identifier: Apache-2.0
"""Text to token ids with the exported tokenizer.json; knows nothing of Triton or of the model behind it."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from ensemble.errors import ConfigError, InvalidRequest


@dataclass(frozen=True)
class TokenizedText:
    """One text's row.

    ids:        what the model reads, [CLS] first and [SEP] last, at most max_length entries.
    num_tokens: tokens of the whole text, [CLS] and [SEP] included, before anything was cut off.
    """

    ids: list[int]
    num_tokens: int

    @property
    def truncated(self) -> bool:
        """Whether the model sees less than the whole text."""
        return self.num_tokens > len(self.ids)


class TextTokenizer:
    """The Hugging Face fast tokenizer, with its truncation fixed at load.

    No setting is ever changed afterwards: changing one while another thread encodes is the "Already borrowed" error.

    max_length: tokens of the longest row.
    calls:      made since it was loaded.
    """

    def __init__(self, file: Path, *, threads: int = 1) -> None:
        """Read tokenizer.json. Raises ConfigError if it is missing, broken, or was not written by export.

        threads: of one call; 1 leaves the machine's other cores to the model. The library reads its setting from the
        environment, so the first tokenizer of a process decides.
        """
        os.environ["TOKENIZERS_PARALLELISM"] = "false" if threads == 1 else "true"
        os.environ["RAYON_NUM_THREADS"] = str(threads)
        if not file.is_file():
            raise ConfigError(f"{file} is missing: run make export")
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{file} is not a tokenizer ({error}): run make export") from error
        truncation = self._tokenizer.truncation
        if truncation is None or self._tokenizer.padding is not None:
            raise ConfigError(f"{file} must have truncation and no padding, as export writes it: run make export")
        self.max_length: int = truncation["max_length"]
        self.calls = 0
        self._counting = threading.Lock()
        self._special_tokens: int = self._tokenizer.num_special_tokens_to_add(is_pair=False)

    def __call__(self, texts: Sequence[str]) -> list[TokenizedText]:
        """Tokenize all texts in one call of the library; one result per text, in order."""
        with self._counting:
            self.calls += 1
        encodings = self._tokenizer.encode_batch_fast(texts)
        return [
            TokenizedText(
                encoding.ids,
                len(encoding.ids) + sum(len(rest.ids) - self._special_tokens for rest in encoding.overflowing),
            )
            for encoding in encodings
        ]


def check_size(texts: Sequence[bytes], *, max_bytes: int) -> None:
    """Raises InvalidRequest if all texts of a request together are too long."""
    if (size := sum(map(len, texts))) > max_bytes:
        raise InvalidRequest(
            f"text: {len(texts)} rows have {size} bytes together, more than the {max_bytes} this server accepts in one "
            "request (max_request_bytes): send fewer rows, or the beginning of each"
        )


def decode(text: bytes, *, row: int, max_bytes: int) -> str:
    """One text off the wire to str. Raises InvalidRequest naming the row if it is too long or not UTF-8."""
    if len(text) > max_bytes:
        raise InvalidRequest(
            f"text: row {row} has {len(text)} bytes, more than the {max_bytes} this server accepts (max_text_bytes): "
            "send its beginning, the model reads no more"
        )
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"text: row {row} is not valid UTF-8 (byte {error.start}: {error.reason}): encode it as UTF-8"
        ) from None
