# SPDX-License-Identifier: Apache-2.0
"""A soak: hours of mixed traffic on the real server, and whether it still holds what it held at the start.

    python -m perf soak --minutes 60

Good requests of 1 to 32 rows over gRPC and HTTP, short texts and such as are cut, and among them bad ones, cancelled
ones, deadlines that are too short, callers that hang up, and new connections all the time (soak_traffic.py). The first
half of the warm-up is mostly these, so that what they leave in the allocators once is not taken for growth.

Every answer is compared with its text's reference. Exit code 0: every answer was right, memory of each process grows
by less than 1 % of its RSS an hour, and an idle server holds as many file descriptors and threads, and as much shared
memory, as before. 1: not so. 2: too short, or memory too restless, to tell. Writes a record, JSON, and a chart beside
it. Ctrl-C keeps what was measured.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
from rich.progress import Progress

from ensemble.arguments import positive
from ensemble.errors import ServerError
from ensemble.launcher.server import Server
from perf.endurance import exchange, reference
from perf.endurance import trial as endurance
from perf.endurance.exchange import Caller, Refused
from perf.endurance.reference import Reference
from perf.endurance.server_processes import Sample, sample
from perf.endurance.soak_traffic import STIRRING_ROWS, STIRRING_SHARES, Traffic
from perf.endurance.tally import Tally
from perf.endurance.trend import GROWS, Trend, trend
from perf.endurance.trial import Verdict
from perf.endurance.workers import workers

# Per cent of a process's memory an hour.
LIMIT = 1.0
# A warm-up, unless it is said: a share of the measured time, and at least so long. In twenty minutes under this
# traffic the server's 45 MB still grew by steps of 0.2 MB, after that by 0.02 MB in eight.
WARM_UP_SHARE, WARM_UP_MINUTES = 0.25, 20.0
# For the request that makes every process as large as it gets.
PRIME_SECONDS = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The measurement's own arguments."""
    endurance.add_arguments(parser, "soak", clients=8, texts=300)
    parser.add_argument(
        "--minutes", type=positive(float), default=60.0, help="after the warm-up (default: %(default)s)"
    )
    parser.add_argument(
        "--warm-up", type=positive(float), metavar="MINUTES", help="default: a quarter of --minutes, at least 20"
    )
    parser.add_argument("--interval", type=positive(float), default=5.0, help="seconds between samples (default: 5)")
    parser.add_argument(
        "--prime", type=int, default=64, metavar="ROWS", help="of one first request of the longest texts (default: 64)"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, write and print; returns the exit code."""
    from perf.endurance import soak_chart  # here, because only this draws

    soak = Soak(args)
    code = endurance.run(args, soak.result, soak.measure, soak.verdict)
    soak_chart.draw(soak.result, args.output.with_suffix(".svg"))
    endurance.show(soak.result, soak_chart.table(soak.result))
    return code


class Soak:
    """One run of the command. result: what is known so far, as it is written."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._tally = args, Tally()
        self._warm_up = 60 * (args.warm_up or max(args.minutes * WARM_UP_SHARE, WARM_UP_MINUTES))
        self._samples: list[tuple[float, Sample]] = []
        self._idle: list[Sample] = []
        self._ended: list[str] = []
        self.result: dict[str, Any] = {
            "what": "soak",
            "settings": {name: getattr(args, name) for name in ("minutes", "clients", "seed", "interval", "prime")},
            "warm_up_seconds": self._warm_up,
        }

    def measure(self, bar: Progress) -> None:
        """Warm up, measure, and look at the idle server after either."""
        args = self._args
        with endurance.started(args.repository, args.classifier) as (server, served_by):
            expected = endurance.prepared(args, served_by, bar)
            self.result |= {"classifier": served_by, "reference": reference.described(expected)}
            task = bar.add_task("warming up", total=round(self._warm_up + args.minutes * 60))
            _prime(server, expected, args.prime)
            common = server, args.repository, expected, self._tally, args.seed
            usual = Traffic(*common)
            started = time.monotonic()
            try:
                for name, traffic, seconds in (
                    ("stirring", Traffic(*common, STIRRING_SHARES, STIRRING_ROWS), self._warm_up / 2),
                    ("warming up", usual, self._warm_up / 2),
                    ("soaking", usual, args.minutes * 60),
                ):
                    with workers(args.clients, traffic) as busy:
                        end = time.monotonic() + seconds
                        while (left := end - time.monotonic()) > 0 and busy(min(args.interval, left)):
                            self._samples.append((time.monotonic() - started, sample(server)))
                            says = f"{name}, {self._tally.requests:,} requests, {self._tally.faulty} faults"
                            bar.update(task, description=says, completed=round(time.monotonic() - started))
                    if name != "stirring":
                        self._idle.append(endurance.idle(server))
            except ServerError as error:
                self._ended = [str(error)]

    def verdict(self) -> Verdict:
        """Of what there is; fills the result too."""
        trends = self._trends()
        self.result |= {
            "counts": self._tally.described(),
            "samples": [{"seconds": seconds, **found.described()} for seconds, found in self._samples],
            "idle": [found.described() for found in self._idle],
            "percent_an_hour": {name: found and vars(found) for name, found in trends.items()},
        }
        verdict = Verdict(failed=self._ended + endurance.wrongs(self._tally))
        if len(self._idle) == 2:
            verdict.failed += endurance.leaks(*self._idle)
        else:
            verdict.unsure.append("the run did not come to its end")
        for name, found in trends.items():
            if found is None:
                verdict.unsure.append(f"{name}: too few samples for a trend: give more --minutes")
            elif (says := found.verdict(LIMIT)) == GROWS:
                verdict.failed.append(f"{name} grows by {_interval(found)} an hour, {LIMIT:g} % is the most")
            elif says != "flat":
                verdict.unsure.append(
                    f"{name}: {_interval(found)} an hour, which {LIMIT:g} % is not clear of: give more --minutes"
                )
        return verdict

    def _trends(self) -> dict[str, Trend | None]:
        """Of each process's own memory after the warm-up, in per cent of its RSS an hour."""
        kept = [(seconds / 3600, found) for seconds, found in self._samples if seconds > self._warm_up]
        hours = np.array([at for at, _ in kept])
        trends = {}
        for name in kept[-1][1].processes if kept else ():
            held = [found.processes[name] for _, found in kept if name in found.processes]
            if len(held) == len(kept):
                # Shared memory is judged by itself, as each region is part of two processes.
                own, rss = np.array([[one.own, one.rss] for one in held], float).T
                trends[name] = trend(hours, 100 * own / np.median(rss))
        return trends


def _interval(found: Trend) -> str:
    return f"{found.slope:+.2f} % ({found.low:+.2f} to {found.high:+.2f})"


def _prime(server: Server, expected: Reference, rows: int) -> None:
    """One request of the longest texts: later ones need less, so that what grows after it is not a larger batch."""
    longest = sorted(range(len(expected.texts)), key=lambda text: -expected.num_tokens[text])
    chosen = [longest[row % len(longest)] for row in range(rows)]
    with Caller(server) as caller:
        try:
            texts = [expected.texts[text] for text in chosen]
            answer = caller.ask(exchange.GRPC, texts, strings=False, seconds=PRIME_SECONDS)
        except Refused as error:
            raise ServerError(f"the first request failed: {error}") from error
    if faults := expected.faults(chosen, answer):
        raise ServerError(f"the first request was answered wrongly: {faults[0]}")
