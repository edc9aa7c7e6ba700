# SPDX-License-Identifier: Apache-2.0
"""What soak, correctness, overload, hostile and kills share: their own server, what became of it, verdict, record.

Knows nothing of what is sent.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from ensemble.arguments import positive
from ensemble.launcher.server import Server
from ensemble.serve import add_classifier, open_server
from perf import interrupts, record, terminal
from perf.endurance import reference
from perf.endurance.reference import Reference
from perf.endurance.server_processes import Sample, replaced, sample
from perf.endurance.tally import Tally

# What an idle server may hold more than an earlier time, of file descriptors and of threads: its pools breathe. Callers
# that leak show in hundreds.
SLACK = 16
# Until what closed connections held is given back.
SETTLE_SECONDS, SETTLE_STEP_SECONDS = 10.0, 0.5

HOLDS, FAILS, CANNOT_TELL = "holds", "fails", "cannot tell"


@dataclass
class Verdict:
    """failed: what does not hold. unsure: what this run was too short or too disturbed to say."""

    failed: list[str] = field(default_factory=list)
    unsure: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0 it holds, 1 it fails, 2 cannot tell."""
        return 1 if self.failed else 2 if self.unsure else 0

    def described(self) -> dict[str, Any]:
        """For a record."""
        return {"verdict": (HOLDS, FAILS, CANNOT_TELL)[self.exit_code], **asdict(self)}


def add_arguments(parser: argparse.ArgumentParser, name: str, *, clients: int, texts: int) -> None:
    """The arguments of those with clients that draw from texts. clients, texts: the defaults."""
    parser.add_argument("--clients", type=positive(int), default=clients, help="at work at once (default: %(default)s)")
    parser.add_argument(
        "--distinct", type=positive(int), default=texts, help="texts that requests draw from (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    add_output(parser, name)


def add_output(parser: argparse.ArgumentParser, name: str) -> None:
    """The arguments that all take."""
    parser.add_argument("--output", type=Path, default=Path(f"build/{name}.json"), help="default: %(default)s")
    add_classifier(parser)


@contextmanager
def started(repository: Path, asked: str, beside: Sequence[str] = ()) -> Iterator[tuple[Server, str]]:
    """A server of the measurement's own, and which of CLASSIFIERS it serves. beside: more models to load.

    Raises ConfigError or ServerError.
    """
    server, choice = open_server(repository, asked)
    if beside:
        server = Server(replace(server.options, models=(*server.options.models, *beside)))
    with interrupts.ended_by(server.end_processes):
        try:
            server.start()
            yield server, choice.classifier
        finally:
            server.stop()


def run(
    args: argparse.Namespace,
    result: dict[str, Any],
    measure: Callable[[Progress], None],
    verdict: Callable[[], Verdict],
) -> int:
    """Measure into `result`, judge, write and print; the verdict's exit code, or that of the signal that ended it."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with terminal.progress(*columns, TimeElapsedColumn(), TimeRemainingColumn()) as bar:
        code = interrupts.kept(lambda: measure(bar))
    found = verdict()
    result |= {"complete": code == 0, **found.described()}
    record.write(args.output, result)
    return code or found.exit_code


def prepared(args: argparse.Namespace, served_by: str, bar: Progress) -> Reference:
    """The texts and their answers, with progress."""
    task = bar.add_task("computing the reference", total=args.distinct)
    built = reference.build(
        args.repository, args.distinct, args.seed, served_by, lambda done: bar.update(task, completed=done)
    )
    bar.remove_task(task)
    return built


def idle(server: Server) -> Sample:
    """What the server holds once nobody asks it for anything: as soon as it gives nothing more back."""
    deadline, now = time.monotonic() + SETTLE_SECONDS, sample(server)
    while True:
        time.sleep(SETTLE_STEP_SECONDS)
        before, now = now, sample(server)
        settled = all(_open(now, name) == _open(before, name) for name in now.processes)
        if settled or time.monotonic() > deadline:
            return now


def leaks(before: Sample, after: Sample) -> list[str]:
    """What an idle server has lost or holds more of than when it was idle before, a line each."""
    lost = [f"process {name} ended or was replaced" for name in replaced(before, after)]
    more = [
        f"{name} holds {now} {what} when idle, {was} before"
        for name in before.processes.keys() & after.processes.keys()
        for what, was, now in zip(("file descriptors", "threads"), _open(before, name), _open(after, name), strict=True)
        if now > was + SLACK
    ]
    if after.shm > before.shm:
        more.append(f"{after.shm:,} bytes of shared memory are held when idle, {before.shm:,} before")
    return lost + more


def wrongs(tally: Tally) -> list[str]:
    """The tally's part of a verdict."""
    found = tally.described()
    return (
        [f"{found['wrong']} wrong of {found['requests']}, {found['crossed']} of them crossed"] if found["wrong"] else []
    )


def show(result: dict[str, Any], table: Table | None = None) -> None:
    """The counts, the table if there is one, the faults and the verdict."""
    console, counts = terminal.console(), Table("requests", "came to", "count")
    for kind, outcomes in result["counts"]["outcomes"].items():
        for outcome, count in outcomes.items():
            counts.add_row(kind, outcome, f"{count:,}")
    console.print(counts)
    if table:
        console.print(table)
    for fault in result["counts"]["faults"][:10]:
        console.print(f"fault: {fault}", markup=False)
    for line in [*result["failed"], *result["unsure"]]:
        console.print(f"- {line}", markup=False)
    console.print(f"{result['verdict']}: {result['counts']['texts_compared']:,} answers compared", markup=False)


def _open(found: Sample, name: str) -> tuple[int, int]:
    held = found.processes[name]
    return held.descriptors, held.threads
