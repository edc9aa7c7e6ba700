# SPDX-License-Identifier: Apache-2.0
"""How the commands of export tell what they do: on standard error, so that standard output is free, and in files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from ensemble.errors import ExportError

console = Console(stderr=True, highlight=False, soft_wrap=True)


def write_json(file: Path, found: dict[str, Any]) -> None:
    """Write what a command found. Raises ExportError if the file cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ExportError(f"{file} cannot be written ({error.strerror}): name another file") from error
