# SPDX-License-Identifier: Apache-2.0
"""Prometheus for tests: its binaries, where this machine has them, and the names that an expression asks for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

RULES = ROOT / "deploy/prometheus"
# Where `make build/prometheus` unpacks Debian's package.
UNPACKED = ROOT / "build/prometheus/usr/bin"

# With a GPU only. https://github.com/triton-inference-server/server/blob/r24.10/docs/user_guide/metrics.md#gpu-metrics
GPU_METRICS = {
    "nv_gpu_power_usage",
    "nv_gpu_power_limit",
    "nv_energy_consumption",
    "nv_gpu_utilization",
    "nv_gpu_memory_total_bytes",
    "nv_gpu_memory_used_bytes",
}


def binary(name: str) -> str:
    """The path of prometheus or promtool; skips the test where there is none."""
    found = shutil.which(name, path=os.pathsep.join([str(UNPACKED), os.environ.get("PATH", "")]))
    return found or pytest.skip("needs Prometheus: make build/prometheus, which takes it from Debian's packages")


def promtool(*arguments: str | Path) -> None:
    """Run it where the rules are; what it says against them is the test's failure."""
    command = [binary("promtool"), *map(str, arguments)]
    result = subprocess.run(command, cwd=RULES, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr


def rules(file: str) -> list[dict]:
    """All rules of a file."""
    return [rule for group in yaml.safe_load((RULES / file).read_text())["groups"] for rule in group["rules"]]


def recorded() -> set[str]:
    """The names that recording.yml makes."""
    return {rule["record"] for rule in rules("recording.yml")}


def names(expression: str) -> set[str]:
    """Of the metrics in it, ours and Triton's."""
    return set(re.findall(r"\b(?:nv|onepass)[_:][a-z0-9_:]+", expression))
