# SPDX-License-Identifier: Apache-2.0
"""What this machine's GPU makes of the ways to serve one model: throughput, latency, batches, utilization, TFLOP/s.

    python -m perf gpu-check

Starts a server for each deployment that can run here, in turn: the TensorRT engine, the stacked TorchScript handler
(baseline) and the same handler looping over its requests (looped, the case study's fault). No speed is told of one that
answers a few texts wrongly. What cannot run is listed with its reason. Without a GPU all of it runs on the CPU,
smaller, and says so. Writes gpu-check.json and gpu-check.md; takes in what an engine check left there (engine.json).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ensemble.arguments import positive
from ensemble.artifacts import CURRENT, FOLDER, Manifest
from ensemble.errors import ConfigError, PipelineError, ServerError
from ensemble.launcher.gpu import Gpus, visible_gpus
from ensemble.launcher.server import Server
from perf import gpu_check_report, interrupts, load_point, terminal
from perf.client_processes import Clients, default_count
from perf.deployments import DEPLOYMENTS, Deployment, open_deployment
from perf.in_process import shape
from perf.load_point import Texts, texts_of
from perf.paper.cards import card_of

# With a GPU, and without: points (clients), seconds of each and of the warm-up before it.
WITH_GPU = ((1, 8, 32, 64), 4.0, 1.0)
ON_CPU = ((1, 8), 2.0, 0.5)
# Before a deployment's first point: TorchScript compiles what it sees, and libraries choose their kernels.
FIRST_WARM_UP_FACTOR = 3.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    texts = ("mixed", "full")
    parser.add_argument("--output", type=Path, default=Path("build/gpu-check"), help="default: %(default)s")
    parser.add_argument("--deployments", nargs="+", choices=DEPLOYMENTS, default=list(DEPLOYMENTS), metavar="NAME")
    parser.add_argument(
        "--texts", nargs="+", choices=texts, default=list(texts), help="mixed lengths, or the model's full length"
    )
    parser.add_argument(
        "--clients",
        nargs="+",
        type=positive(int),
        metavar="N",
        help="requests in flight (default: 1 8 32 64; 1 8 on a CPU)",
    )
    parser.add_argument("--seconds", type=positive(float), help="of each point (default: 4; 2 on a CPU)")
    parser.add_argument(
        "--warm-up", type=positive(float), metavar="SECONDS", help="before each (default: 1; 0.5 on a CPU)"
    )
    parser.add_argument(
        "--client-processes", type=positive(int), default=default_count(), help="that send (default here: %(default)s)"
    )
    parser.add_argument(
        "--minutes", type=positive(float), default=9.0, help="start no point after so many (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, write and print; returns 0, or 130 or 143 if a signal ended it.

    Raises PipelineError, once all is written, if a deployment failed that should run.
    """
    return interrupts.kept(lambda: _run(args))


def _run(args: argparse.Namespace) -> None:
    check = GpuCheck(args, visible_gpus())
    try:
        check.measure()
    except KeyboardInterrupt:
        check.result["complete"] = False
        check.skip("the rest", "interrupted")
        raise
    finally:
        gpu_check_report.write(args.output, check.result)
        gpu_check_report.show(terminal.console(), args.output, check.result)
    if check.result["failed"]:
        raise PipelineError("; ".join(f"{one['what']}: {one['reason']}" for one in check.result["failed"]))


class GpuCheck:
    """One run of the command. result: what is known so far, as it is written."""

    def __init__(self, args: argparse.Namespace, gpus: Gpus) -> None:
        """Raises ConfigError if no model is installed."""
        self._args = args
        clients, seconds, warm = WITH_GPU if gpus.devices else ON_CPU
        self._clients = args.clients or list(clients)
        self._seconds, self._warm = args.seconds or seconds, args.warm_up or warm
        self._deadline = time.monotonic() + args.minutes * 60
        cards = [card_of(gpu.name) for gpu in gpus.devices]
        # The server puts an instance on every GPU, so they count together.
        self._peak = sum(card.flops for card in cards if card) / 1e12 if cards and all(cards) else None
        manifest = Manifest.read(args.repository / FOLDER / CURRENT)
        model = shape(args.repository)
        self._texts = [texts_of(args.repository, name, model) for name in args.texts]
        self._expected = load_point.reference(args.repository)
        self.result: dict[str, Any] = {
            "complete": True,
            "gpus": [asdict(gpu) for gpu in gpus.devices],
            "why_no_gpu": gpus.why_none or None,
            "peak_tflops": self._peak,
            "model": {
                "source": manifest.source,
                "layout": manifest.layout,
                **{name: value for name, value in asdict(model).items() if name != "heads"},
            },
            "load": {
                "model": "closed loop, one text a request",
                "mean_tokens": {texts.name: float(texts.tokens.mean()) for texts in self._texts},
                "seconds_a_point": self._seconds,
                "warm_up_seconds": self._warm,
                "client_processes": args.client_processes,
            },
            "caveats": gpu_check_report.caveats(gpus, self._peak),
            "deployments": {name: DEPLOYMENTS[name].what for name in args.deployments},
            "answers": {},
            "rows": [],
            "skipped": [],
            "failed": [],
        }

    def skip(self, what: str, reason: str) -> None:
        """Say what is missing, and why."""
        self.result["skipped"].append({"what": what, "reason": reason})

    def measure(self) -> None:
        """All deployments, one server after another."""
        names = self._args.deployments
        points = len(self._texts) * len(self._clients)
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
        with (
            Clients(self._args.client_processes) as clients,
            terminal.progress(*columns, TimeElapsedColumn()) as progress,
        ):
            task = progress.add_task("", total=points * len(names))
            for done, name in enumerate(names, start=1):
                with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
                    self._deployment(DEPLOYMENTS[name], Path(scratch), clients, progress, task)
                progress.update(task, completed=points * done)
        if not self.result["rows"] and not self.result["failed"]:
            self.result["failed"].append({"what": "gpu-check", "reason": "nothing was measured: see what was skipped"})

    def _deployment(
        self, deployment: Deployment, scratch: Path, clients: Clients, progress: Progress, task: TaskID
    ) -> None:
        """Its points; or its name among what was skipped, where it cannot run here, or failed, where it should."""
        progress.update(task, description=f"{deployment.name}: starting")
        if self._late(deployment.name):
            return
        try:
            server = open_deployment(deployment, self._args.repository, scratch)
        except ServerError as error:  # it cannot run on this machine
            self.skip(deployment.name, str(error))
            return
        except ConfigError as error:  # it could, but for what is installed
            self.result["failed"].append({"what": deployment.name, "reason": str(error)})
            return
        try:
            server.start()
            answers = load_point.check_answers(server, deployment.precision, self._expected)
            self.result["answers"][deployment.name] = answers
            for texts in self._texts:
                self._points(server, deployment, texts, clients, progress, task)
        except PipelineError as error:
            self.result["failed"].append({"what": deployment.name, "reason": str(error)})
        finally:
            server.kill()  # nobody waits for an answer, and an orderly end takes some seconds

    def _points(
        self,
        server: Server,
        deployment: Deployment,
        texts: Texts,
        clients: Clients,
        progress: Progress,
        task: TaskID,
    ) -> None:
        progress.update(task, description=f"{deployment.name}: warming up")
        clients.load(server.url, texts.texts, max(self._clients), FIRST_WARM_UP_FACTOR * self._warm)
        for in_flight in self._clients:
            what = f"{deployment.name}, {texts.name}, {in_flight} clients"
            progress.update(task, description=what)
            if not self._late(what):
                row = load_point.measure(server, deployment, texts, clients, in_flight, self._seconds, self._warm)
                row["share_of_peak"] = row["tflops"] / self._peak if self._peak else None
                self.result["rows"].append(row)
            progress.advance(task)

    def _late(self, what: str) -> bool:
        """Whether there is no time left, which is then said."""
        if time.monotonic() <= self._deadline:
            return False
        self.skip(what, f"no time left: give more than --minutes {self._args.minutes:g}")
        return True
