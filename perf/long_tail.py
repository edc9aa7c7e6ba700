# SPDX-License-Identifier: Apache-2.0
"""One long text among short ones: does the batch cost more than its parts? In-process, no server.

    python -m perf long-tail

Prints the time of 63 short texts and one of 512 tokens in one batch over the sum of the two parts alone, with the plan
of forward passes and without it. Ratios of one run: all are timed in turn, so that a busy machine slows them alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

from rich.progress import track
from rich.table import Table

from ensemble.samples import long_samples, short_samples
from perf import terminal
from perf.in_process import classifier, rows_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The measurement's own arguments."""
    parser.add_argument("--rounds", type=int, default=7, help="the median of so many is taken (default: %(default)s)")


def run(args: argparse.Namespace) -> None:
    """Measure and print."""
    classify = classifier(args.repository)
    short = rows_of(args.repository, [sample.text for sample in short_samples()[:63]])
    long = rows_of(args.repository, [long_samples()[0].text])
    seconds = medians(
        {
            "63 short texts": lambda: classify(short),
            "one of 512 tokens": lambda: classify(long),
            "all 64, planned": lambda: classify(short + long),
            "all 64, one pass": lambda: classify.one_pass(short + long),
        },
        args.rounds,
    )
    parts = seconds["63 short texts"] + seconds["one of 512 tokens"]
    table = Table("batch", "seconds", "over the sum of its parts")
    for name, value in seconds.items():
        table.add_row(name, f"{value:.3f}", f"{value / parts:.2f}" if name.startswith("all") else "")
    terminal.console().print(f"short texts: mean {sum(map(len, short)) / len(short):.0f} tokens", table)


def medians(what: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each, all of them run in turn `rounds` times after one warm-up."""
    times: dict[str, list[float]] = {name: [] for name in what}
    for round_ in track(range(rounds + 1), "measuring", transient=True):
        for name, run in what.items():
            started = time.perf_counter()
            run()
            if round_:
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in times.items()}
