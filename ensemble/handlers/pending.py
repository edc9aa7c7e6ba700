# SPDX-License-Identifier: Apache-2.0
"""How many requests wait in front of each model, from the metrics page of the server that this process belongs to.

The only place where Triton says so for every backend: a TensorRT engine has no handler that could count. Runs inside a
stub, and finds the page by the command line of the server that started it. Knows nothing of what is done about it.
"""

from __future__ import annotations

import argparse
import http.client
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

SERVER = "tritonserver"
# Between a stub and its server there is a shell at most.
GENERATIONS = 3

PENDING = re.compile(rb'^nv_inference_pending_request_count\{model="([^"]+)"[^}]*\} (\d+)', re.MULTILINE)

# A page takes a millisecond. After one that did not come, nothing is asked for a while: whoever asks, callers wait for.
TIMEOUT_SECONDS = 0.25
PAUSE_SECONDS = 1.0


class PendingRequests:
    """The server's count, read anew at each call."""

    def __init__(self, address: tuple[str, int] | None) -> None:
        self._page = http.client.HTTPConnection(*address, timeout=TIMEOUT_SECONDS) if address else None
        self._not_before = 0.0
        self._was_read = False

    def close(self) -> None:
        """Hang up."""
        if self._page is not None:
            self._page.close()

    def __call__(self) -> dict[str, int] | None:
        """Requests that wait, by model, those in a batch that no instance has begun among them.

        {} where there never was a page to read, None while one that was read before cannot be.
        """
        if self._page is not None and time.monotonic() >= self._not_before:
            try:
                text = self._read(self._page)
            except (OSError, http.client.HTTPException):
                self._page.close()  # the next request connects again
                self._not_before = time.monotonic() + PAUSE_SECONDS
            else:
                self._was_read = True
                return {name.decode(): int(count) for name, count in PENDING.findall(text)}
        return None if self._was_read else {}

    def _read(self, page: http.client.HTTPConnection) -> bytes:
        idle = page.sock is not None
        try:
            page.request("GET", "/metrics")
            response = page.getresponse()
        except ConnectionError:
            if not idle:
                raise
            page.close()  # hung up on while idle, which is no failure: once more, on a new connection
            return self._read(page)
        text = response.read()
        if response.status != http.client.OK:
            raise http.client.HTTPException(f"status {response.status}")
        return text


def metrics_address(process: int | None = None) -> tuple[str, int] | None:
    """Host and port of the metrics page of the tritonserver above a process, this one by default.

    None if there is no such server, or it has no metrics.
    """
    pid = os.getpid() if process is None else process
    with suppress(OSError, ValueError, IndexError):
        for _ in range(GENERATIONS):
            # "pid (name) state parent ...", and a name may hold spaces and brackets.
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            executable, *arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode().rstrip("\0").split("\0")
            if Path(executable).name == SERVER:
                return page_of(arguments)
    return None


def page_of(arguments: Sequence[str]) -> tuple[str, int] | None:
    """The same by the server's arguments, with the defaults of 24.10."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name, default in (
        ("allow-metrics", "true"),
        ("metrics-address", ""),
        ("http-address", ""),
        ("metrics-port", "8002"),
    ):
        parser.add_argument(f"--{name}", default=default)
    options, _ = parser.parse_known_args(arguments)
    if options.allow_metrics.lower() in ("false", "0"):
        return None
    address = options.metrics_address or options.http_address
    # What listens everywhere listens here too.
    return "127.0.0.1" if address in ("", "0.0.0.0") else address, int(options.metrics_port)  # noqa: S104
