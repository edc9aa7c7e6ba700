# SPDX-License-Identifier: Apache-2.0
"""What every record of a measurement says of where it comes from. Knows nothing of what was measured."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# What a figure may depend on.
PACKAGES = ("onepass", "nvidia-pytriton", "tritonclient", "torch", "onnxruntime", "tokenizers", "tensorrt", "numpy")


def provenance() -> dict[str, Any]:
    """The command, when it ran, on what, and with which versions."""
    return {
        "command": shlex.join(["python", "-m", "perf", *sys.argv[1:]]),
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {
            "cpu": _cpu(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
            "system": platform.platform(),
        },
        "versions": {"python": platform.python_version(), **_versions()},
    }


def write(file: Path, result: dict[str, Any]) -> None:
    """As JSON, whole or not at all: a reader never finds half of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.part")
    part.write_text(json.dumps({**provenance(), **result}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(file)


def _cpu() -> str:
    names = re.findall(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return names[0] if names else platform.machine()


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
