# SPDX-License-Identifier: Apache-2.0
"""Whether a model repository still holds what a running server was started with. Knows nothing of servers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from ensemble.artifacts import CURRENT, FOLDER


def fingerprint(repository: Path, models: Iterable[str]) -> str:
    """Changes with the installed export and with every config and handler of these models. Raises OSError.

    What an export installs is not read: every handler holds its own file against model.json.
    """
    digest = hashlib.sha256(str((repository / FOLDER / CURRENT).resolve(strict=True)).encode())
    for model in sorted(models):
        folder = repository / model
        for file in sorted([*folder.glob("*.pbtxt"), *folder.glob("configs/*.pbtxt"), *folder.glob("*/*.py")]):
            digest.update(f"\0{file}\0".encode() + file.read_bytes())
    return digest.hexdigest()
