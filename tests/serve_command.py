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
    assert line.startswith("ready: "), _instead(process, line)
    return line


def choice_line(process: subprocess.Popen) -> str:
    """The first line on stdout: what is served, and why."""
    line = process.stdout.readline()
    assert re.match(r"onnx: |baseline: ", line), _instead(process, line)
    return line


def _instead(process: subprocess.Popen, line: str) -> str:
    """What it said: another line, or its errors once it has ended, for while it runs they have no end."""
    return line or process.stderr.read()
