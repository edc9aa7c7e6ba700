# SPDX-License-Identifier: Apache-2.0
"""Python processes of the server killed under load: how soon it serves again, and whether an answer is ever wrong.

    python -m perf kills --times 10

Starts `python -m ensemble serve`, once for each step of the ensemble, and kills that step's processes (SIGKILL) again
and again while clients ask over gRPC and HTTP. Every answer is compared with its text's reference. Exit code 0: each
time there was a process to kill, the service was back within --within seconds, no answer was wrong, and every request
had an answer or an error within its deadline. 1: not so. Writes a record, JSON. Ctrl-C keeps what was measured.
"""

from __future__ import annotations

import argparse
import http.client
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import Progress
from rich.table import Table

from ensemble.arguments import positive
from ensemble.contract import Contract
from ensemble.errors import ServerError
from ensemble.launcher.stubs import stubs_of
from ensemble.launcher.supervisor import Patience
from ensemble.serve import open_server
from perf import interrupts
from perf.endurance import reference
from perf.endurance import trial as endurance
from perf.endurance.exchange import TRANSPORTS, Caller, Refused
from perf.endurance.questions import Asker
from perf.endurance.tally import Tally
from perf.endurance.trial import Verdict
from perf.endurance.workers import Watch, workers

MOST_ROWS = 4
# Of a request, and what a client may take longer to notice.
DEADLINE_SECONDS, SLACK_SECONDS = 20.0, 5.0
# After an error, as callers do.
BACK_OFF_SECONDS = 0.05
# The service is back once so many requests in a row were answered, and is waited for no longer than this.
ANSWERS, WAIT_SECONDS = 20, 60.0
# Between two kills. A model that is sick again sooner was not healed, says the launcher, and takes longer each time.
PAUSE = (Patience().held_seconds + 0.5, Patience().held_seconds + 2.0)
TICK_SECONDS = 0.05
# Of the log, of a server that did not come back.
LAST_LINES = 20
# The launcher gives a server up that needs more heals than that within minutes, as it should.
MOST_TIMES = Patience().heals


class End(NamedTuple):
    """Of a request: when it was sent and ended (seconds, monotonic), and whether with an answer."""

    sent: float
    ended: float
    answered: bool


@dataclass(frozen=True)
class Kill:
    """Of one step's processes. back: seconds until the service was back; None if it was not. killed: how many."""

    step: str
    back: float | None
    killed: int


@dataclass(frozen=True)
class Launched:
    """A server behind its launcher. pid: of tritonserver; log: the file that both write to."""

    pid: int
    url: str
    http_address: str
    http_port: int
    log: Path

    def last_words(self) -> list[str]:
        """The last lines of the log."""
        return self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The measurement's own arguments."""
    endurance.add_arguments(parser, "kills", clients=8, texts=200)
    parser.add_argument(
        "--times", type=int, choices=range(1, MOST_TIMES + 1), default=MOST_TIMES, metavar="N",
        help=f"kills of each step, at most {MOST_TIMES}: after more the launcher gives up (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--within", type=positive(float), default=10.0, metavar="SECONDS", help="default: %(default)s")


def run(args: argparse.Namespace) -> int:
    """Measure, write and print; returns the exit code."""
    kills = Kills(args)
    code = endurance.run(args, kills.result, kills.measure, kills.verdict)
    endurance.show(kills.result, _table(kills.kills))
    return code


class Kills:
    """One run of the command. result: what is known so far, as it is written."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._tally = args, Tally()
        self._ends: list[End] = []
        self.kills: list[Kill] = []
        self.result: dict[str, Any] = {
            "what": "kills",
            "settings": {name: getattr(args, name) for name in ("times", "within", "clients", "distinct", "seed")},
        }

    def measure(self, bar: Progress) -> None:
        """Kill, and wait until it serves again."""
        args = self._args
        server, choice = open_server(args.repository, args.classifier)  # to be told what would be served
        contract = Contract.read(args.repository, server.options.config_name)
        steps = [name for name, model in contract.models.items() if model.backend == "python"]
        expected = endurance.prepared(args, choice.classifier, bar)
        self.result |= {"classifier": choice.classifier, "reference": reference.described(expected)}
        asker, rng = Asker(expected, self._tally), random.Random(args.seed)  # noqa: S311
        task = bar.add_task("", total=args.times * len(steps))
        for step in steps:
            bar.update(task, description=f"starting a server to kill the {step} of")
            with (
                launched(args.repository, choice.classifier) as launched_server,
                workers(args.clients, partial(self._load, launched_server, asker)) as busy,
            ):
                if self._await(busy, time.monotonic()) is None:
                    raise ServerError(f"the server does not answer under load: {self._tally.described()['outcomes']}")
                for times in range(1, args.times + 1):
                    if times > 1:
                        _wait(busy, rng.uniform(*PAUSE))
                    killed = time.monotonic()
                    pids = stubs_of(launched_server.pid).get(step, ())
                    for pid in pids:
                        os.kill(pid, signal.SIGKILL)
                    self.kills.append(kill := Kill(step, self._await(busy, killed), len(pids)))
                    says = f"{step} killed {times} times, {self._tally.faulty} faults"
                    bar.update(task, description=says, advance=1)
                    if kill.back is None:
                        self.result["log"] = launched_server.last_words()
                        break  # there may be nothing left to kill

    def verdict(self) -> Verdict:
        """Of what there is; fills the result too."""
        within, longest = self._args.within, max((end.ended - end.sent for end in self._ends), default=0.0)
        self.result |= {
            "counts": self._tally.described(),
            "kills": [asdict(kill) for kill in self.kills],
            "longest_seconds": longest,
        }
        verdict = Verdict(failed=endurance.wrongs(self._tally))
        verdict.failed += [
            f"{kill.step}, kill {number}: the step has no process that could be killed"
            for number, kill in enumerate(self.kills, 1)
            if not kill.killed
        ]
        verdict.failed += [
            f"{kill.step}, kill {number}: " + ("not back" if kill.back is None else f"back after {kill.back:.1f} s")
            for number, kill in enumerate(self.kills, 1)
            if kill.back is None or kill.back > within
        ]
        if longest > DEADLINE_SECONDS + SLACK_SECONDS:
            verdict.failed.append(f"a request took {longest:.1f} s, its deadline is {DEADLINE_SECONDS:g} s")
        if not self.kills:
            verdict.unsure.append("nothing was killed")
        return verdict

    def _load(self, server: Launched, asker: Asker, number: int, stop: threading.Event) -> None:
        """One client in a closed loop; an error is no fault here, a wrong answer is."""
        rng = random.Random(f"{self._args.seed}:{number}")  # noqa: S311
        with Caller(server) as caller:
            while not stop.is_set():
                rows = [rng.randrange(self._args.distinct) for _ in range(rng.randint(1, MOST_ROWS))]
                texts = [asker.reference.texts[row] for row in rows]
                transport, strings, sent = rng.choice(TRANSPORTS), rng.random() < 0.5, time.monotonic()
                try:
                    answer = caller.ask(transport, texts, strings=strings, seconds=DEADLINE_SECONDS)
                except (Refused, OSError, http.client.HTTPException):
                    self._ends.append(End(sent, time.monotonic(), answered=False))
                    self._tally.add(transport, "error")
                    stop.wait(BACK_OFF_SECONDS)
                else:
                    self._ends.append(End(sent, time.monotonic(), answered=True))
                    asker.judge(transport, rows, answer)

    def _await(self, busy: Watch, since: float) -> float | None:
        """Wait until the service is back; see back_after()."""
        first = len(self._ends)
        while time.monotonic() - since < WAIT_SECONDS and busy(TICK_SECONDS):
            if (back := back_after(self._ends[first:], since)) is not None:
                return back
        return None


def back_after(ends: Sequence[End], since: float) -> float | None:
    """Seconds from `since` to the first answer behind which there are only answers, to what was sent after it.

    ends: of the requests that ended after `since`. None while there are fewer than ANSWERS such answers. What was
    underway is left out: it may wait in a dead process until its deadline.
    """
    after = [end for end in ends if end.sent > since]
    last_failed = max((end.sent for end in after if not end.answered), default=since)
    answers = [end.ended for end in after if end.sent > last_failed]
    return min(answers) - since if len(answers) >= ANSWERS else None


@contextmanager
def launched(repository: Path, classifier: str) -> Iterator[Launched]:
    """`python -m ensemble serve` on free ports. Raises ServerError with what it said if it does not start."""
    import psutil  # here, because other measurements do without it

    ports = [argument for name in ("http", "grpc", "metrics") for argument in (f"--{name}-port", "0")]
    command = [sys.executable, "-m", "ensemble", "serve", "--repository", str(repository), "--classifier", classifier]
    with (
        tempfile.NamedTemporaryFile("w+") as log,
        subprocess.Popen([*command, *ports], stdout=subprocess.PIPE, stderr=log, text=True) as process,
        interrupts.ended_by(process.kill),  # its server ends with it
    ):
        try:
            said = [process.stdout.readline() for _ in range(2)] if process.stdout else []  # what is served, and where
            found = re.match(r"ready: .* at grpc ([^\s,]+), http (\S+):(\d+)", said[-1])
            if found is None:
                process.wait()
                log.seek(0)
                raise ServerError(f"the server did not start: {log.read().strip().rpartition(chr(10))[2]}")
            (server,) = psutil.Process(process.pid).children()
            yield Launched(server.pid, found[1], found[2], int(found[3]), Path(log.name))
        finally:
            process.terminate()


def _wait(busy: Watch, seconds: float) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 and busy(left):
        pass


def _table(kills: Sequence[Kill]) -> Table:
    table = Table("killed", "times", "back after, s: least", "median", "most")
    for step in dict.fromkeys(kill.step for kill in kills):
        back = sorted(kill.back for kill in kills if kill.step == step and kill.back is not None)
        figures = (f"{back[place]:.1f}" for place in (0, len(back) // 2, -1)) if back else ("-",) * 3
        table.add_row(step, str(sum(kill.step == step for kill in kills)), *figures)
    return table
