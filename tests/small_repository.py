# SPDX-License-Identifier: Apache-2.0
"""A model repository with a model of two small layers, so that 512 tokens take milliseconds; one for all test files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import copy_of_repository

from ensemble.samples import load_samples
from export.pipeline import export

_made: list[Path] = []


def small_repository(small_model: Callable[..., Path], folders: pytest.TempPathFactory) -> Path:
    """Made on first use. small_model: the fixture of that name."""
    if not _made:
        repository = copy_of_repository(folders.mktemp("small") / "model_repository")
        export(str(small_model()), repository, texts=[sample.text for sample in load_samples()[:8]])
        _made.append(repository)
    return _made[0]
