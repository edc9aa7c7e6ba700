# SPDX-License-Identifier: Apache-2.0
"""Whose the machine's CPU time is while something runs: the server's, the client's, or somebody else's.

Sampled in a thread, so that any part of the time can be asked for afterwards. Knows nothing of what runs.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from perf.sampling import INTERVAL_SECONDS, Sampler


@dataclass(frozen=True)
class Shares:
    """Per cent of all the machine's cores. other: neither server nor client, what a hypervisor took away included."""

    server: float
    client: float
    other: float


@dataclass(frozen=True)
class _Sample:
    """CPU seconds since each began."""

    at: float
    server: float
    client: float
    busy: float


class MachineLoad(Sampler):
    """`with MachineLoad(server_pid) as used: used.client(pid); ...`; then used.between(start, end)."""

    def __init__(self, server: int | None, client: int | None = None) -> None:
        """server, client: process ids; the server counts with the processes it has started."""
        import psutil  # here, because other measurements do without it

        super().__init__()
        self._psutil: Any = psutil
        self._server, self._client = server, client
        self._processes: dict[int, list[Any]] = {}
        self._seen: dict[int, float] = {}
        self._samples: list[_Sample] = []

    def client(self, pid: int) -> None:
        """From now on it is the client."""
        self._client = pid

    def between(self, start: float, end: float) -> Shares | None:
        """start, end: by time.time(). None if it was too short to be seen."""
        inside = [sample for sample in self._samples if start - INTERVAL_SECONDS <= sample.at <= end + INTERVAL_SECONDS]
        if len(inside) < 2:
            return None
        first, last = inside[0], inside[-1]
        whole = (last.at - first.at) * (self._psutil.cpu_count() or 1) / 100
        server, client = (last.server - first.server) / whole, (last.client - first.client) / whole
        return Shares(server, client, max(0.0, (last.busy - first.busy) / whole - server - client))

    def sample(self) -> None:
        """At the beginning, and at every tick."""
        self._look()
        for _ in self.ticks():
            self._look()

    def _look(self) -> None:
        times = self._psutil.cpu_times()
        busy = times.user + times.nice + times.system + times.irq + times.softirq + getattr(times, "steal", 0.0)
        server, client = self._seconds(self._server, whole=True), self._seconds(self._client, whole=False)
        self._samples.append(_Sample(time.time(), server, client, busy))

    def _seconds(self, pid: int | None, *, whole: bool) -> float:
        """CPU seconds of a process, or of it and its descendants; of one that has ended, what it was last seen with."""
        if pid is None:
            return 0.0
        if pid not in self._processes:
            self._processes[pid] = self._found(pid, whole)
        for process in self._processes[pid]:
            with suppress(self._psutil.Error):
                times = process.cpu_times()
                self._seen[process.pid] = float(times.user + times.system)
        return sum(self._seen.get(process.pid, 0.0) for process in self._processes[pid])

    def _found(self, pid: int, whole: bool) -> list[Any]:
        """Once, because it takes long: a server's stubs are there before it is ready."""
        with suppress(self._psutil.Error):
            root = self._psutil.Process(pid)
            return [root, *(root.children(recursive=True) if whole else [])]
        return []
