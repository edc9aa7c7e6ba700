# SPDX-License-Identifier: Apache-2.0
"""Overload: what becomes of those let in, and of those refused, when requests come at four times the capacity.

    python -m perf overload

Requests arrive at random, whatever becomes of those before them (an open loop), and latency counts from the time one
was due. Capacity and the latency of an unloaded server are measured first, on the same texts, and every answer is
compared with its text's reference. Exit code 0: each request was answered rightly, or refused because the queue is
full; those let in waited no longer than the tokenizer's config says, those refused heard of it soon, memory stayed
bounded, and the server was as before soon after. 1: not so. 2: nothing was refused, or the client, which shares the
cores with the server unless it gets its own (--client-cores), was too slow to tell. Writes a record, JSON. Ctrl-C keeps
what was measured.
"""

from __future__ import annotations

import argparse
import math
import threading
import time
from typing import Any

import numpy as np
from rich.progress import Progress

from ensemble.arguments import positive
from ensemble.contract import Contract
from ensemble.errors import ServerError
from ensemble.samples import load_samples, short_samples
from perf.closed_loop import REQUEST_SECONDS
from perf.endurance import flood, overload_verdict, reference
from perf.endurance import trial as endurance
from perf.endurance.cores import apart
from perf.endurance.flood import Sender
from perf.endurance.overload_verdict import AFTER, FLOOD, UNLOADED, Found
from perf.endurance.reference import Reference
from perf.endurance.server_processes import sample
from perf.endurance.tally import Tally
from perf.endurance.trial import Verdict
from perf.endurance.workers import workers
from perf.open_loop import poisson

SAMPLES = {"short": short_samples, "mixed": load_samples}
ROWS_IN_FLIGHT = 64
UNLOADED_SECONDS, WARM_UP_SECONDS, CAPACITY_SECONDS = 5.0, 2.0, 10.0
# Until it is given up that the server is as before.
RECOVERY_SECONDS = 60.0
# Between looks at the server's processes.
TICK_SECONDS = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The measurement's own arguments."""
    number = positive(float)
    parser.add_argument("--seconds", type=number, default=60.0, help="of overload (default: %(default)s)")
    parser.add_argument("--times", type=number, default=4.0, help="the capacity (default: %(default)s)")
    parser.add_argument(
        "--rows", type=int, choices=range(1, ROWS_IN_FLIGHT + 1), default=1, metavar="N",
        help=f"texts of a request, 1 to {ROWS_IN_FLIGHT} (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--client-cores", type=positive(int), default=0, metavar="N",
        help="cores for the client alone; the server has the others (default: both share all)",
    )  # fmt: skip
    parser.add_argument("--texts", choices=SAMPLES, default="short", help="default: %(default)s")
    overload_verdict.add_arguments(parser)
    endurance.add_output(parser, "overload")


def run(args: argparse.Namespace) -> int:
    """Measure, write and print; returns the exit code."""
    overload = Overload(args)
    code = endurance.run(args, overload.result, overload.measure, overload.verdict)
    endurance.show(overload.result, overload_verdict.table(overload.result))
    return code


class Overload:
    """One run of the command. result: what is known so far, as it is written."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._tally, self.found = args, Tally(), Found()
        self._phase, self._total = UNLOADED, 0
        self.result: dict[str, Any] = {
            "what": "overload",
            "settings": {
                name: getattr(args, name)
                for name in ("seconds", "times", "rows", "texts", "client_cores", *overload_verdict.LIMITS)
            },
        }

    def measure(self, bar: Progress) -> None:
        """Unloaded, at capacity, flooded, and after; the server's processes are looked at meanwhile."""
        args, found = self._args, self.found
        with (
            apart(args.client_cores) as part,
            endurance.started(args.repository, args.classifier) as (server, served_by),
        ):
            part()
            contract = Contract.read(args.repository, server.options.config_name)
            found.waiting_rows = overload_verdict.waiting_rows(contract)
            task = bar.add_task("computing the reference", total=None)
            texts = [sample.text for sample in SAMPLES[args.texts]()]
            expected = reference.of_texts(args.repository, texts, served_by)
            self.result |= {"classifier": served_by, "reference": reference.described(expected)}

            def work(number: int, stop: threading.Event) -> None:
                flood.run(self._phases(server.url, expected, contract.max_batch_size), stop)

            try:
                with workers(1, work) as busy:
                    found.samples.append((time.monotonic(), sample(server)))
                    while busy(TICK_SECONDS):
                        found.samples.append((time.monotonic(), sample(server)))
                        done = len(found.ends[FLOOD]) if self._phase == FLOOD else 0
                        bar.update(task, description=self._phase, total=self._total or None, completed=done)
                found.samples.append((time.monotonic(), sample(server)))
            except ServerError as error:
                found.ended = [str(error)]

    def verdict(self) -> Verdict:
        """Of what there is; fills the result too."""
        self.result |= {"counts": self._tally.described(), **overload_verdict.described(self.found, self._args)}
        return overload_verdict.verdict(self.found, self._args)

    async def _phases(self, url: str, expected: Reference, most_rows: int) -> None:
        """All that is asked of the server. Raises ServerError if it answers nothing before the flood."""
        args, found = self._args, self.found
        async with flood.channel(url) as channel:
            # A full batch: what a process takes for it once is no growth.
            longest_text = int(np.argmax(expected.num_tokens))
            await Sender(channel, expected, most_rows, self._tally, found.ends).ask("warm-up", longest_text)
            sender = Sender(channel, expected, args.rows, self._tally, found.ends)
            at_once = max(4, ROWS_IN_FLIGHT // args.rows)
            await sender.in_turn("warm-up", at_once, WARM_UP_SECONDS)
            await sender.in_turn(UNLOADED, 1, UNLOADED_SECONDS)
            self._phase = "capacity"
            found.capacity = await sender.in_turn(self._phase, at_once, CAPACITY_SECONDS)
            if not found.capacity or not (unloaded := flood.answered(found.ends[UNLOADED])):
                raise ServerError(f"the server answers nothing: {self._tally.described()['faults'][:1]}")
            due = poisson(args.times * found.capacity, args.seconds, seed=1)
            found.offered = len(due) / float(due[-1])
            # One who may wait so long has not hung.
            sender.deadline = max(REQUEST_SECONDS, math.ceil(found.most_wait(args)))
            found.deadline = sender.deadline
            self._phase, self._total = FLOOD, len(due)
            cpu, found.began = time.process_time(), time.monotonic()
            await sender.when_due(FLOOD, due, found.lag)
            found.busy = (time.process_time() - cpu) / (time.monotonic() - found.began)
            self._phase, self._total = "recovery", 0
            usual = float(np.percentile(unloaded, 99))
            longest = max(RECOVERY_SECONDS, args.recovered_within)
            found.recovered = await sender.until_usual(self._phase, usual, longest)
            self._phase = AFTER
            await sender.in_turn(self._phase, 1, UNLOADED_SECONDS)
