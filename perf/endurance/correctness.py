# SPDX-License-Identifier: Apache-2.0
"""Right answers under concurrency: many texts from many clients at once, each answer held against its own text's.

    python -m perf correctness --texts 100000

Requests of 1 to 64 rows, texts from none to far more words than the model reads, over gRPC and over HTTP with JSON
and with binary tensors, some asking for label strings. Logits, probabilities, labels and their order, num_tokens and
truncated are compared with what the text gets alone, in-process. Only texts whose logits can be told apart are sent,
so an answer that went to the wrong caller is seen: it is "crossed". Exit code 0: every answer was right. 1: not so.
Writes a record, JSON. Ctrl-C keeps what was compared.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from typing import Any

from rich.progress import Progress

from ensemble.arguments import positive
from perf.endurance import reference
from perf.endurance import trial as endurance
from perf.endurance.exchange import Caller
from perf.endurance.questions import Asker
from perf.endurance.tally import Tally
from perf.endurance.trial import Verdict
from perf.endurance.workers import workers

MOST_ROWS = 64
# A request of 64 long texts behind as many as there are clients, on a slow machine.
SECONDS = 600.0
# A client connects anew after so many requests.
REQUESTS_OF_A_CONNECTION = 20
# After a refusal because the queue is full.
BACK_OFF_SECONDS = 0.1
# Of the progress bar.
TICK_SECONDS = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The measurement's own arguments."""
    endurance.add_arguments(parser, "correctness", clients=16, texts=2000)
    parser.add_argument(
        "--texts", type=positive(int), default=100_000, help="answers to compare, at least (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Compare, write and print; returns the exit code."""
    correctness = Correctness(args)
    code = endurance.run(args, correctness.result, correctness.measure, correctness.verdict)
    endurance.show(correctness.result)
    return code


class Correctness:
    """One run of the command. result: what is known so far, as it is written."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._tally = args, Tally()
        self._left: int = args.texts
        self._lock = threading.Lock()
        self.result: dict[str, Any] = {
            "what": "correctness",
            "settings": {name: getattr(args, name) for name in ("texts", "distinct", "clients", "seed")},
        }

    def measure(self, bar: Progress) -> None:
        """Send, compare and count."""
        args = self._args
        with endurance.started(args.repository, args.classifier) as (server, served_by):
            expected = endurance.prepared(args, served_by, bar)
            self.result |= {"classifier": served_by, "reference": reference.described(expected)}

            asker = Asker(expected, self._tally)

            def work(number: int, stop: threading.Event) -> None:
                rng = random.Random(f"{args.seed}:{number}")  # noqa: S311
                while not stop.is_set():
                    with Caller(server) as caller:
                        for _ in range(REQUESTS_OF_A_CONNECTION):
                            count = self._taken(round(MOST_ROWS ** rng.random()))
                            if not count or stop.is_set():
                                return
                            rows = [rng.randrange(args.distinct) for _ in range(count)]
                            while not asker.ask(caller, f"{_size(count)} rows", rows, rng, SECONDS):
                                stop.wait(BACK_OFF_SECONDS)

            task, started = bar.add_task("comparing", total=args.texts), time.monotonic()
            with workers(args.clients, work) as busy:
                while busy(TICK_SECONDS):
                    bar.update(task, description=f"comparing, {self._tally.faulty} wrong", completed=self._tally.texts)
            self.result["seconds"] = time.monotonic() - started

    def verdict(self) -> Verdict:
        """Of what there is; fills the result too."""
        self.result["counts"] = self._tally.described()
        short = self._args.texts - self._tally.texts
        return Verdict(
            failed=endurance.wrongs(self._tally),
            unsure=[f"{short:,} of the texts were not compared"] if short > 0 and not self._tally.faulty else [],
        )

    def _taken(self, wanted: int) -> int:
        """So many of the texts that are left to be sent, 0 if there are none."""
        with self._lock:
            count = min(wanted, self._left)
            self._left -= count
            return count


def _size(rows: int) -> str:
    return "1" if rows == 1 else "2 to 8" if rows <= 8 else f"9 to {MOST_ROWS}"
