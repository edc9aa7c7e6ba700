# SPDX-License-Identifier: Apache-2.0
"""The processes in which a server runs its Python models, from what Linux says of its children."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from ensemble.launcher.runtime import STUB


def stubs_of(server: int) -> dict[str, set[int]]:
    """Model name -> process ids of its stubs that live; server: tritonserver's process id."""
    found: dict[str, set[int]] = defaultdict(set)
    for pid in _children(server):
        with suppress(OSError, IndexError):  # it has just ended
            # A process that has ended, and that its parent has not asked about, has an empty command line.
            command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
            if Path(command[0]).name == STUB:
                found[Path(command[1]).parts[-3]].add(pid)  # <model>/<version>/model.py
    return dict(found)


def end_orphans(repository: Path) -> None:
    """End the stubs that serve this repository after their server was killed: one may wait for ever for a lock of it.

    repository: by the path that the server was started with, which no other server has.
    """
    orphans = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            command = (process / "cmdline").read_text(errors="replace").split("\0")
            if f"--model-repository={repository}" in command:
                return
            if Path(command[0]).name == STUB and command[1].startswith(f"{repository}/"):
                orphans.add(int(process.name))
    for pid in orphans:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _children(pid: int) -> set[int]:
    children: set[int] = set()
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # a thread that has just ended
                children.update(map(int, (task / "children").read_text().split()))
    return children
