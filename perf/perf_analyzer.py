# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's perf_analyzer, the binary inside the tritonclient wheel, made to run. Knows nothing of what is measured."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ensemble.errors import PipelineError

# What the binary looks for -> how the nvidia-pytriton wheel, which carries them, has mangled their names.
LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}


def write_texts(texts: Sequence[str], file: Path) -> None:
    """Write perf_analyzer's --input-data for the ensemble: it sends the texts in turn, one a request.

    An empty text is left out: perf_analyzer drops zero-length inputs from the request.
    """
    data = [{"text": [text]} for text in texts if text]
    file.write_text(json.dumps({"data": data}, ensure_ascii=False), encoding="utf-8")


def run(arguments: Sequence[str], *, timeout_seconds: float) -> subprocess.CompletedProcess[str]:
    """Run perf_analyzer with these arguments; its exit code and output are the caller's to judge.

    Raises PipelineError if the binary or its libraries are not installed, or if it does not end in time.
    """
    binary = Path(sysconfig.get_path("scripts"), "perf_analyzer")
    if not binary.is_file():
        raise PipelineError(f"{binary} is missing: it comes with the wheel of tritonclient 2.51.0 for Linux x86-64")
    with tempfile.TemporaryDirectory(prefix="perf_analyzer-") as folder:
        for name, pattern in LIBRARIES.items():
            Path(folder, name).symlink_to(_library(pattern))
        environment = {**os.environ, "LD_LIBRARY_PATH": f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}"}
        try:
            return subprocess.run(
                [binary, *arguments], env=environment, capture_output=True, text=True, timeout=timeout_seconds
            )
        except subprocess.TimeoutExpired:
            raise PipelineError(f"perf_analyzer did not end within {timeout_seconds:.0f} s") from None


def _library(pattern: str) -> Path:
    spec = importlib.util.find_spec("pytriton")
    found = (
        list((Path(spec.origin).parent.parent / "nvidia_pytriton.libs").glob(pattern)) if spec and spec.origin else []
    )
    if not found:
        raise PipelineError(f"no {pattern}: it comes with nvidia-pytriton; pip install '.[server]'")
    return found[0]
