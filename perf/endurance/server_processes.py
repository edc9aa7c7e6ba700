# SPDX-License-Identifier: Apache-2.0
"""What each process of a running server holds: memory, file descriptors, threads. Knows nothing of loads."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ensemble.errors import ServerError
from ensemble.launcher.server import Server
from ensemble.launcher.working_folder import SHARED_MEMORY


@dataclass(frozen=True)
class Held:
    """By one process. rss and own in bytes; own is rss without pages of files and of shared memory."""

    pid: int
    rss: int
    own: int
    descriptors: int
    threads: int


@dataclass(frozen=True)
class Sample:
    """All of a server at one moment.

    processes: by "tritonserver", or for a Python model's stub by the model's name
    shm:       bytes of the shared memory they have mapped, each region once
    """

    processes: dict[str, Held]
    shm: int

    @property
    def pids(self) -> dict[str, int]:
        """Which process each is."""
        return {name: held.pid for name, held in self.processes.items()}

    @property
    def memory(self) -> int:
        """Bytes that all together have asked for, each page once; none of files, which others may have open too."""
        return sum(held.own for held in self.processes.values()) + self.shm

    def described(self) -> dict[str, Any]:
        """For a record."""
        return asdict(self)


def sample(server: Server) -> Sample:
    """The server's processes as they are now. Raises ServerError if it has ended."""
    import psutil  # here, because other measurements do without it

    processes, regions = {}, dict[str, int]()
    try:
        root = psutil.Process(server.pid or -1)
        for process in [root, *root.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess, FileNotFoundError):  # it ended between two looks
                memory = process.memory_info()
                own = memory.rss - memory.shared
                held = Held(process.pid, memory.rss, own, process.num_fds(), process.num_threads())
                processes[_name(process.cmdline(), process.name())] = held
                regions |= _regions(process.pid)
    except (psutil.Error, ValueError):
        raise ServerError("the server has ended: see its log") from None
    return Sample(processes, sum(regions.values()))


def replaced(before: Sample, after: Sample) -> list[str]:
    """What a server that lives has none of: processes that are gone, or new."""
    names = before.pids.keys() | after.pids.keys()
    return sorted(name for name in names if before.pids.get(name) != after.pids.get(name))


def _name(command: list[str], name: str) -> str:
    """A stub is started with the path of its model.py."""
    found = re.search(r"/([^/]+)/\d+/model\.py", " ".join(command))
    return found[1] if found else name


def _regions(pid: int) -> dict[str, int]:
    """Files of shared memory that a process has mapped, and the bytes each takes."""
    sizes = {}
    for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and Path(fields[5]).parent == SHARED_MEMORY:
            with suppress(OSError):  # unlinked, though still mapped
                sizes[fields[5]] = Path(fields[5]).stat().st_blocks * 512
    return sizes
