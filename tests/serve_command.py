# SPDX-License-Identifier: Apache-2.0
"""What `python -m ensemble serve`, started by the fixture `serve`, says first."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable

Serve = Callable[..., subprocess.Popen]


def ready_line(process: subprocess.Popen) -> str:
    """The line on stdout that says where it listens, behind the one that says what is served."""
    choice_line(process)
    line = process.stdout.readline()
    assert line.startswith("ready: "), process.stderr.read()
    return line


def choice_line(process: subprocess.Popen) -> str:
    """The first line on stdout: what is served, and why."""
    line = process.stdout.readline()
    assert re.match(r"onnx: |baseline: ", line), process.stderr.read()
    return line
