# SPDX-License-Identifier: Apache-2.0
"""Processes, and the shared memory of a server, as Linux shows them."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from pathlib import Path


def descendants(pid: int) -> set[int]:
    """Process ids below one."""
    children = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has just ended
            children |= {int(child) for child in (task / "children").read_text().split()}
    return children | {below for child in children for below in descendants(child)}


def all_end(pids: set[int]) -> bool:
    """Whether these processes end within half a minute; one that only waits for its parent to notice has ended."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        states = []
        for pid in pids:
            with suppress(FileNotFoundError):
                states.append(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0])
        if all(state == "Z" for state in states):
            return True
        time.sleep(0.05)
    return False


def region_prefix(processes: set[int]) -> str:
    """How the regions of this server in /dev/shm are named; other servers on this machine come and go."""
    commands = " ".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in processes)
    return re.search(r"shm-region-prefix-name=(\w+)", commands)[1]


def regions(prefix: str) -> set[str]:
    return {path.name for path in Path("/dev/shm").glob(f"{prefix}*")}
