# SPDX-License-Identifier: Apache-2.0
"""What a server counted for one model: Triton's statistics, and the forward passes that our handlers report."""

from __future__ import annotations

import re
import time
import urllib.request
from dataclasses import dataclass

import tritonclient.grpc as triton

from ensemble.launcher.server import Server

# How long counters must not move to count as settled, and how long that may take.
QUIET_SECONDS = 0.1
SETTLE_SECONDS = 5.0


@dataclass(frozen=True)
class Counts:
    """Of one model, since its server started or between two readings.

    rows:       classified
    executions: batches that the handler or backend was handed
    calls:      forward passes; None for a model that does not report them
    """

    rows: int
    executions: int
    calls: int | None

    @classmethod
    def read(cls, server: Server, model: str) -> Counts:
        """The counters as they are now."""
        with triton.InferenceServerClient(server.url, channel_args=[("grpc.enable_http_proxy", 0)]) as client:
            stats = client.get_inference_statistics(model).model_stats[0]
        return cls(int(stats.inference_count), int(stats.execution_count), _calls(server, model))

    def since(self, before: Counts) -> Counts:
        """What was counted after `before`."""
        calls = None if self.calls is None or before.calls is None else self.calls - before.calls
        return Counts(self.rows - before.rows, self.executions - before.executions, calls)


def settled(server: Server, model: str, rows: int = 0) -> Counts:
    """The counters once they stand still: they follow the answers by some milliseconds.

    rows: wait until so many have been counted, or will not come any more.
    """
    deadline = time.monotonic() + SETTLE_SECONDS
    counts = Counts.read(server, model)
    while True:
        time.sleep(QUIET_SECONDS)
        before, counts = counts, Counts.read(server, model)
        if (counts == before and counts.rows >= rows) or time.monotonic() > deadline:
            return counts


def _calls(server: Server, model: str) -> int | None:
    url = f"http://{server.options.address}:{server.metrics_port}/metrics"
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=10) as response:
        text = response.read().decode()
    found = re.search(
        rf'^onepass_model_calls_total\{{[^}}]*model="{re.escape(model)}"[^}}]*\}} (\S+)$', text, re.MULTILINE
    )
    return int(float(found[1])) if found else None
