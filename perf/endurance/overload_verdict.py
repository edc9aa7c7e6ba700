# SPDX-License-Identifier: Apache-2.0
"""What a flood of requests may do to a server, and whether it did more. Knows nothing of how it was sent."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.table import Table

from ensemble.arguments import positive
from ensemble.contract import Contract
from perf.closed_loop import REQUEST_SECONDS
from perf.endurance import flood
from perf.endurance.flood import ERROR, HUNG, WRONG, End
from perf.endurance.questions import QUEUE_FULL
from perf.endurance.server_processes import Sample, replaced
from perf.endurance.trial import Verdict

UNLOADED, FLOOD, AFTER = "unloaded", "flood", "after"
LIMITS = ("wait_allowance", "refused_within_ms", "memory_mb", "recovered_within")
# Sent later than due by more, which is much even of waits of seconds, or busier, and the client measures itself.
MOST_LAG_SECONDS, MOST_BUSY = 0.2, 0.8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the verdict holds the figures against."""
    number = positive(float)
    # Measured 1.0 times, on two cores that the client and others load too: in the flood capacity differs from before.
    parser.add_argument(
        "--wait-allowance", type=number, default=2.0, metavar="TIMES",
        help="of the longest wait, (max_waiting_rows + ahead_rows + a batch) / rows a second, that the p99 of those "
        "let in may come to (default: %(default)s)",
    )  # fmt: skip
    # A refusal waits for the tokenizer call under way, 21 ms of English at most. Measured 5 ms on two cores that the
    # client shares, 66 ms where others load them too.
    parser.add_argument(
        "--refused-within-ms", type=number, default=100.0, metavar="MS",
        help="the median of those refused, from when they were sent (default: %(default)s)",
    )  # fmt: skip
    # What waits takes 30 MB, measured: twice that.
    parser.add_argument(
        "--memory-mb", type=number, default=64.0, metavar="MB",
        help="that all processes together may grow by from when the flood begins (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--recovered-within", type=number, default=10.0, metavar="SECONDS",
        help="from the flood's last answer until single requests are as fast as before it (default: %(default)s)",
    )  # fmt: skip


@dataclass
class Found:
    """What a run has found out so far.

    ends:         of all requests by phase
    capacity:     requests a second; 0 before it is known. offered: the flood's
    waiting_rows: that may be ahead of a request which is let in
    lag, busy:    of the client in the flood: seconds from due to sent, and CPU time over time
    samples:      of the server's processes, by time.monotonic(). began: the flood, by the same clock
    recovered:    seconds; None before it is known
    """

    ends: dict[str, list[End]] = field(default_factory=flood.ends)
    capacity: float = 0.0
    offered: float = 0.0
    waiting_rows: int = 0
    deadline: float = REQUEST_SECONDS
    lag: list[float] = field(default_factory=list)
    busy: float = 0.0
    samples: list[tuple[float, Sample]] = field(default_factory=list)
    began: float = float("inf")
    recovered: float | None = None
    ended: list[str] = field(default_factory=list)

    def longest_wait(self, rows: int) -> float:
        """Seconds, by the formula of the tokenizer's config. rows: of a request."""
        return self.waiting_rows / (self.capacity * rows)

    def most_wait(self, args: argparse.Namespace) -> float:
        """Seconds that those let in may have waited."""
        return float(self.longest_wait(args.rows) * args.wait_allowance)

    @property
    def refused(self) -> list[End]:
        """In the flood, because the queue was full."""
        return [end for end in self.ends[FLOOD] if end.outcome == QUEUE_FULL]

    @property
    def growth(self) -> float:
        """MB of all processes together, from when the flood began to their most since."""
        before = [held.memory for when, held in self.samples if when <= self.began]
        since = [held.memory for when, held in self.samples if when > self.began]
        return (max(since) - before[-1]) / 1e6 if before and since else 0.0


def waiting_rows(contract: Contract) -> int:
    """Rows that may be ahead of a request which is let in, with those that are being classified."""
    parameters = contract.models["tokenizer"].parameters
    kept, ahead = (int(parameters[key].string_value) for key in ("max_waiting_rows", "ahead_rows"))
    return kept + ahead + contract.max_batch_size


def verdict(found: Found, args: argparse.Namespace) -> Verdict:
    """Of what there is. What a client at its limit measures too slow may be its own doing, and is unsure."""
    result = Verdict(failed=[*found.ended, *_of_single_requests(found)])
    if len(found.samples) > 1 and (lost := replaced(found.samples[0][1], found.samples[-1][1])):
        result.failed.append(f"{', '.join(lost)} ended or was replaced")
    if found.growth > args.memory_mb:
        result.failed.append(f"memory grew by {found.growth:.0f} MB, {args.memory_mb:g} MB is the most")
    at_limit = _client_at_limit(found)
    (result.unsure if at_limit else result.failed).extend(_too_slow(found, args))
    result.unsure += at_limit
    if found.recovered is None:
        result.unsure.append("the run did not come to its end")
    elif not found.refused:
        result.unsure.append("nothing was refused: give more --seconds, or more --times")
    return result


def described(found: Found, args: argparse.Namespace) -> dict[str, Any]:
    """For a record."""
    recovered = found.recovered if found.recovered != float("inf") else None
    wait = {"longest_wait": found.longest_wait(args.rows), "most_wait": found.most_wait(args)} if found.capacity else {}
    return {
        "capacity_per_second": found.capacity,
        "offered_per_second": found.offered,
        "waiting_rows": found.waiting_rows,
        "wait_seconds": wait,
        "deadline_seconds": found.deadline,
        "unloaded_ms": _quantiles(flood.answered(found.ends[UNLOADED])),
        "let_in_ms": _quantiles(flood.answered(found.ends[FLOOD])),
        "refused_ms": _quantiles([end.seconds for end in found.refused]),
        "refused_from_sent_ms": _quantiles([end.from_sent for end in found.refused]),
        "after_ms": _quantiles(flood.answered(found.ends[AFTER])),
        "recovered_after_seconds": recovered,
        "memory_growth_mb": found.growth,
        "samples": [
            {"second": round(when - found.samples[0][0], 1), **held.described()} for when, held in found.samples
        ],
        "client_lag_ms": _quantiles(found.lag),
        "client_busy": found.busy,
    }


def table(result: dict[str, Any]) -> Table:
    """The latencies, and below them what they are to be read with."""
    wait, recovered = result["wait_seconds"].get("longest_wait"), result["recovered_after_seconds"]
    caption = [
        f"{result['settings']['rows']} rows a request, {result['settings']['texts']} texts; capacity "
        f"{result['capacity_per_second']:.1f} requests/s, offered {result['offered_per_second']:.1f}/s",
        f"longest wait by the config's formula: {'unknown' if wait is None else f'{wait:.1f} s'}; as before after "
        f"{'-' if recovered is None else f'{recovered:.1f}'} s; memory grew by {result['memory_growth_mb']:.0f} MB",
        f"client: {result['client_lag_ms'].get('p99', 0):.0f} ms behind at p99, {result['client_busy']:.0%} of a core",
    ]
    headings = ("", "requests", "p50 ms", "p99 ms", "longest ms", "p99 over unloaded")
    found = Table(*headings, caption="\n".join(caption), caption_justify="left")
    base = result["unloaded_ms"].get("p99")
    for name in ("unloaded", "let in", "refused", "refused from sent", "after"):
        if row := result[f"{name.replace(' ', '_')}_ms"]:
            times = f"{row['p99'] / base:.1f}x" if base and not name.startswith("refused") else ""
            found.add_row(name, f"{row['n']:,}", *(f"{row[key]:,.1f}" for key in ("p50", "p99", "max")), times)
    return found


def _of_single_requests(found: Found) -> list[str]:
    outcomes = [end.outcome for ends in found.ends.values() for end in ends]
    says = {
        WRONG: "were answered wrongly",
        HUNG: f"had no outcome within {found.deadline:g} s",
        ERROR: "ended with an error that is no full queue",
    }
    return [f"{outcomes.count(outcome)} requests {what}" for outcome, what in says.items() if outcome in outcomes]


def _too_slow(found: Found, args: argparse.Namespace) -> list[str]:
    slow, let_in = [], _quantiles(flood.answered(found.ends[FLOOD]))
    if let_in and let_in["p99"] > (most := found.most_wait(args) * 1e3):
        slow.append(f"the p99 of those let in is {let_in['p99']:,.0f} ms, {most:,.0f} ms is the most")
    refused = _quantiles([end.from_sent for end in found.refused])
    if refused and refused["p50"] > args.refused_within_ms:
        slow.append(f"refusals took {refused['p50']:.0f} ms (median), {args.refused_within_ms:g} ms is the most")
    if found.recovered is not None and found.recovered > args.recovered_within:
        says = (
            "not as before in the end"
            if found.recovered == float("inf")
            else f"as before after {found.recovered:.1f} s"
        )
        slow.append(f"the server was {says}, {args.recovered_within:g} s is the most")
    return slow


def _client_at_limit(found: Found) -> list[str]:
    lag = _quantiles(found.lag).get("p99", 0.0)
    if lag > MOST_LAG_SECONDS * 1e3 or found.busy > MOST_BUSY:
        return [f"the client was at its limit, {lag:.0f} ms behind at p99 and {found.busy:.0%} of a core busy"]
    return []


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    values = np.percentile(np.array(seconds) * 1e3, [50, 99, 100])
    return {"n": len(seconds), **dict(zip(("p50", "p99", "max"), map(float, values), strict=True))}
