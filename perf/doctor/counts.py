# SPDX-License-Identifier: Apache-2.0
"""What the server counted for one model between two readings, by Triton's statistics extension; and its metrics.

Ratios of times that one server measured, and mean numbers by Little's law, say the same on a fast machine and on a slow
one; nothing here is compared with a clock of ours but for the length of the phase itself.
"""

from __future__ import annotations

import math
import re
import urllib.request
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

ASK_SECONDS = 5.0
# Of Triton's GPU metrics, unless its --metrics-interval-ms says otherwise.
GPU_INTERVAL_SECONDS = 2.0


@dataclass(frozen=True)
class Batches:
    """Executions of one batch size, and the nanoseconds of all of them together."""

    count: int = 0
    input: int = 0
    infer: int = 0
    output: int = 0

    def plus(self, other: Batches, sign: int = 1) -> Batches:
        """The sum, or with sign -1 the difference."""
        return Batches(
            self.count + sign * other.count,
            self.input + sign * other.input,
            self.infer + sign * other.infer,
            self.output + sign * other.output,
        )


@dataclass(frozen=True)
class Counts:
    """Of one model. queue: nanoseconds of all requests together; sizes: by rows of a batch."""

    requests: int = 0
    failures: int = 0
    rows: int = 0
    executions: int = 0
    queue: int = 0
    cached: int = 0
    sizes: Mapping[int, Batches] = field(default_factory=dict)

    @classmethod
    def read(cls, client: Any, model: str) -> Counts:
        """As they are now, all versions together."""
        total = cls()
        for stats in client.get_inference_statistics(model, client_timeout=ASK_SECONDS).model_stats:
            by_request = stats.inference_stats
            sizes = {
                int(entry.batch_size): Batches(
                    int(entry.compute_infer.count),
                    int(entry.compute_input.ns),
                    int(entry.compute_infer.ns),
                    int(entry.compute_output.ns),
                )
                for entry in stats.batch_stats
            }
            one = cls(
                int(by_request.success.count),
                int(by_request.fail.count),
                int(stats.inference_count),
                int(stats.execution_count),
                int(by_request.queue.ns),
                int(by_request.cache_hit.count),
                sizes,
            )
            total = total.plus(one)
        return total

    def plus(self, other: Counts, sign: int = 1) -> Counts:
        """The sum, or with sign -1 the difference."""
        sizes = {
            size: self.sizes.get(size, Batches()).plus(other.sizes.get(size, Batches()), sign)
            for size in sorted({*self.sizes, *other.sizes})
        }
        return Counts(
            self.requests + sign * other.requests,
            self.failures + sign * other.failures,
            self.rows + sign * other.rows,
            self.executions + sign * other.executions,
            self.queue + sign * other.queue,
            self.cached + sign * other.cached,
            {size: batches for size, batches in sizes.items() if batches.count},
        )

    @property
    def mean_batch(self) -> float:
        """Rows of an execution; 0.0 if there was none."""
        return self.rows / self.executions if self.executions else 0.0

    @property
    def busy(self) -> float:
        """Seconds in which an instance was at work, all instances together."""
        return sum(batches.input + batches.infer + batches.output for batches in self.sizes.values()) / 1e9

    @property
    def wait(self) -> float:
        """Seconds that a request waited in the queue, on the mean."""
        return self.queue / self.requests / 1e9 if self.requests else 0.0

    def infer(self, least: int = 1, most: float = math.inf) -> tuple[float, float] | None:
        """Mean rows and mean seconds of compute of the batches with so many rows; None without any."""
        found = [(size, batches) for size, batches in self.sizes.items() if least <= size <= most]
        executions = sum(batches.count for _, batches in found)
        if not executions:
            return None
        rows = sum(size * batches.count for size, batches in found)
        return rows / executions, sum(batches.infer for _, batches in found) / executions / 1e9

    def handing_over(self) -> float:
        """Seconds a batch spent on its way into the backend and out again, on the mean."""
        moved = sum(batches.input + batches.output for batches in self.sizes.values())
        return moved / self.executions / 1e9 if self.executions else 0.0


def total(counts: Iterable[Counts]) -> Counts:
    """All of them together."""
    result = Counts()
    for one in counts:
        result = result.plus(one)
    return result


class Metrics:
    """Triton's Prometheus endpoint, where it can be reached and is that of the same server."""

    def __init__(self, url: str | None) -> None:
        self.url = url
        self.why = "" if url else "not asked for"

    def read(self) -> str:
        """The text of it; "" if it cannot be had, and then why says so."""
        if self.url is None:
            return ""
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
                self.url, timeout=ASK_SECONDS
            ) as got:
                return str(got.read().decode())
        except (OSError, ValueError) as error:
            self.why = f"{self.url}: {error}"
            self.url = None
            return ""

    def check(self, client: Any, model: str) -> None:
        """Leave an endpoint alone that counts otherwise than the statistics: it is another server's."""
        least, text = Counts.read(client, model).executions, self.read()
        counted = _sum(text, "nv_inference_exec_count", model)
        if text and not least <= (counted or 0) <= Counts.read(client, model).executions:
            self.why = f"{self.url} counts otherwise than the statistics of {model}: another server's?"
            self.url = None


def calls(text: str, model: str) -> float | None:
    """Forward passes or tokenizer calls, for handlers that report them as this project's do."""
    return _sum(text, "onepass_model_calls_total", model)


def utilization(text: str) -> float | None:
    """Of the busiest GPU, 0 to 1, over Triton's last interval of 2 s; None where there is none."""
    values = [float(value) for value in re.findall(r"^nv_gpu_utilization\{[^}]*\} (\S+)$", text, re.MULTILINE)]
    return max(values) if values else None


def _sum(text: str, metric: str, model: str) -> float | None:
    values = []
    for labels, value in re.findall(rf"^{metric}\{{([^}}]*)\}} (\S+)$", text, re.MULTILINE):
        if f'model="{model}"' in labels:
            with suppress(ValueError):
                values.append(float(value))
    return sum(values) if values else None
