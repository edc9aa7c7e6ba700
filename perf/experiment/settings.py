# SPDX-License-Identifier: Apache-2.0
"""How much an experiment measures: the command's arguments, the quick run and the full one. Measures nothing."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from ensemble.arguments import positive
from ensemble.contract import ENSEMBLE
from perf.experiment.workloads import FROM_FILE, WORKLOADS
from perf.load_point import LEAST_FOR_P99

ORDER = ("looped", "baseline", ENSEMBLE)


@dataclass(frozen=True)
class Settings:
    """How much is measured.

    seconds: of each closed loop, at least; long enough for `least` requests, and for the ensemble, whose work depends
             on it, to send each text, as far as most_seconds go; and for `clients` requests a window, however long
    loads:   of the open loop, as shares of the capacity
    most_minutes: since the start, for all deployments, in equal shares; a point that would not end in time is skipped,
             and said to be. None is no limit
    rounds:  of the graph alone, in-process, of which the best counts
    """

    clients: tuple[int, ...] = (1, 8, 32, 64)
    workloads: tuple[str, ...] = tuple(WORKLOADS)
    seconds: float = 6.0
    least: int = LEAST_FOR_P99
    most_seconds: float = 30.0
    loads: tuple[float, ...] = (0.5, 0.7, 0.8, 0.9, 0.95)
    open_seconds: float = 15.0
    most_minutes: float | None = None
    rounds: int = 3


# With the graph alone and the report, which follow, 3 minutes at most.
QUICK = Settings(
    (1, 8, 32), ("mixed",), seconds=3.0, least=0, loads=(0.5, 0.8, 0.95), open_seconds=5.0, most_minutes=2.0, rounds=1
)
NOT_QUICK = "not part of a quick run: make perf measures it"
NO_TIME = "no time left in a quick run: make perf measures it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    number = positive(float)
    parser.add_argument("--output", type=Path, default=Path("build/experiment"), help="default: %(default)s")
    parser.add_argument(
        "--quick", action="store_true", help="fewer points, shorter ones, in 3 minutes at most; says what it left out"
    )
    parser.add_argument("--deployments", nargs="+", choices=ORDER, default=list(ORDER), metavar="NAME")
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), help="default: all; with --quick mixed")
    parser.add_argument("--texts", type=Path, metavar="FILE", help="texts of yours, a text a line, instead of those")
    parser.add_argument("--clients", nargs="+", type=positive(int), metavar="N", help="default: 1 8 32 64")
    parser.add_argument("--seconds", type=number, help="of each closed loop, at least (default: 6)")
    parser.add_argument("--loads", nargs="*", type=number, metavar="SHARE", help="default: 0.5 0.7 0.8 0.9 0.95")
    parser.add_argument("--open-seconds", type=number, help="of each open loop (default: 15)")
    parser.add_argument("--seed", type=int, default=1, help="of the arrivals (default: %(default)s)")
    parser.add_argument("--note", help="what a reader should know of this run, such as what else the machine did")
    parser.add_argument("--perf-analyzer", metavar="FILE", help="the program (default: beside this Python, or on PATH)")


def settings(args: argparse.Namespace) -> Settings:
    """What was asked for, on top of --quick or the full run."""
    known = QUICK if args.quick else Settings()
    return replace(
        known,
        clients=tuple(sorted(set(args.clients))) if args.clients else known.clients,
        workloads=(FROM_FILE,) if args.texts else tuple(args.workloads or known.workloads),
        seconds=args.seconds or known.seconds,
        loads=known.loads if args.loads is None else tuple(args.loads),
        open_seconds=args.open_seconds or known.open_seconds,
    )


def left_out(args: argparse.Namespace) -> list[str]:
    """What a full run has and this one does not, for being quick."""
    chosen, full = settings(args), Settings()
    if not args.quick:
        return []
    clients = () if args.clients else sorted({*full.clients} - {*chosen.clients})
    workloads = (
        () if args.texts or args.workloads else [name for name in full.workloads if name not in chosen.workloads]
    )
    loads = () if args.loads is not None else sorted({*full.loads} - {*chosen.loads})
    return [
        *(f"{number} clients" for number in clients),
        *(f"{name} texts" for name in workloads),
        *(f"open loop at {load:.0%}" for load in loads),
    ]
