# SPDX-License-Identifier: Apache-2.0
"""Check, before a server starts, what every classifier needs: configs, files and tokenizer that fit each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ensemble.artifacts import MANIFEST, Manifest, verify
from ensemble.contract import Contract
from ensemble.errors import ConfigError

# What Triton loads to keep one malformed request from failing a batch.
TEXT_BATCHING = Path("tokenizer/batchstrategy.so")
TOKENIZER = Path("tokenizer/1/tokenizer.json")


@contextmanager
def legible() -> Iterator[None]:
    """Around what reads a repository: ConfigError in the place of OSError, with the file."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{error.filename} cannot be read ({error.strerror}): make it readable for the user who serves, or run "
            "make export again"
        ) from error


@legible()
def sound(repository: Path, config_name: str | None) -> tuple[Contract, Manifest]:
    """The configs and the manifest of what is installed, once they are known to fit each other: for every classifier.

    Raises ConfigError.
    """
    contract = Contract.read(repository, config_name)
    manifest = verify(repository, contract.models)
    if manifest.max_length > contract.max_sequence_length:
        raise ConfigError(
            f"{repository}: exported for {manifest.max_length} tokens, max_sequence_length in tokenizer/config.pbtxt "
            f"is {contract.max_sequence_length}: run make export again"
        )
    return contract, manifest


def check_tokenizer(repository: Path, manifest: Manifest) -> None:
    """Raises ConfigError if the tokenizer has more tokens than the model has embeddings, or cuts at another length."""
    from tokenizers import Tokenizer  # here, because checking an engine does without it

    file = repository / TOKENIZER
    tokenizer = Tokenizer.from_file(str(file))
    if tokenizer.get_vocab_size() > manifest.vocab_size:
        raise ConfigError(
            f"{file} has {tokenizer.get_vocab_size()} tokens, the model has vocab_size {manifest.vocab_size} in "
            f"{MANIFEST}: run make export again"
        )
    length = (tokenizer.truncation or {}).get("max_length")
    if length != manifest.max_length:
        raise ConfigError(
            f"{file} cuts at {length} tokens, the model has max_length {manifest.max_length} in {MANIFEST}: "
            "run make export again"
        )


def unguarded(repository: Path) -> str | None:
    """What to say of a repository in which one caller's request can fail others'; None if it cannot."""
    if (repository / TEXT_BATCHING).is_file():
        return None
    return (
        f"{repository / TEXT_BATCHING} is missing, so a request whose text is cut off fails those batched with it: run "
        f"make model_repository/{TEXT_BATCHING}, which needs a C compiler"
    )
