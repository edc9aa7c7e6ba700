# SPDX-License-Identifier: Apache-2.0
"""The experiment: the case study's loop, its stacked tensors, and the ensemble, under one load, side by side.

    python -m perf experiment [--quick]

perf_analyzer against the real server, closed loop, at several numbers of clients, for texts that fill the model's
longest row, short ones and a mixed sample with its long tail; then Poisson arrivals for the ensemble at shares of its
measured capacity. looped and baseline get the tokenizer's ids padded to the longest row, as in the case study. No speed
is told of a deployment of which any answer is wrong. Writes experiment.json, and what `python -m perf report` renders
from it. Ctrl-C or SIGTERM ends it and keeps what was measured.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from ensemble.artifacts import CURRENT, FOLDER, Manifest
from ensemble.contract import ENSEMBLE
from ensemble.errors import PipelineError, ServerError
from ensemble.launcher.gpu import Gpus, visible_gpus
from ensemble.launcher.server import Server
from perf import arithmetic, closed_loop, in_process, interrupts, record, terminal
from perf.deployments import DEPLOYMENTS, Deployment, open_deployment
from perf.experiment import caveats as experiment_caveats
from perf.experiment import perf_analyzer
from perf.experiment import point as experiment_point
from perf.experiment import result as results
from perf.experiment.perf_analyzer import WINDOWS, PerfAnalyzer
from perf.experiment.point import Target
from perf.experiment.settings import NO_TIME, NOT_QUICK, ORDER, add_arguments, left_out, settings
from perf.experiment.workloads import Workload, workload
from perf.load_point import right
from perf.paper.cards import card_of

__all__ = ["add_arguments", "run"]

# perf_analyzer's own start and end, the settling of the counters, and what a busy machine adds to a point.
POINT_SECONDS = 5.0
# Sent all at once before a deployment's first point of a workload, checked, and thrown away; and in turn, to size it.
WARM_UP_TEXTS, SIZING_TEXTS = 16, 6


def run(args: argparse.Namespace) -> int:
    """Measure, write and print; returns 0, or 130 or 143 if a signal ended it.

    Raises PipelineError, once all is written, if a deployment failed that should run.
    """
    return interrupts.kept(lambda: _run(args))


def _run(args: argparse.Namespace) -> None:
    from perf.experiment import report  # here, because it draws, and only this and the report's own command need that

    with perf_analyzer.found(args.perf_analyzer) as analyzer:
        experiment = Experiment(args, visible_gpus(), analyzer)
        try:
            experiment.measure()
        except KeyboardInterrupt:
            experiment.result["complete"] = False
            experiment.result["skipped"].append({"what": "the rest", "reason": "interrupted"})
            raise
        finally:
            experiment.result["advice"] = experiment_caveats.raised(experiment.result)
            file = args.output / results.JSON
            record.write(file, experiment.result)
            report.render(file, args.output)
            report.show(file, args.output)
    if experiment.result["failed"]:
        raise PipelineError("; ".join(f"{one['what']}: {one['reason']}" for one in experiment.result["failed"]))


class Experiment:
    """One run of the command. result: what is known so far, as it is written."""

    def __init__(self, args: argparse.Namespace, gpus: Gpus, analyzer: PerfAnalyzer) -> None:
        """Raises ConfigError if no model is installed or the file of texts has none."""
        self._args, self._gpus, self._analyzer = args, gpus, analyzer
        self._settings, self._begun = settings(args), time.monotonic()
        manifest = Manifest.read(args.repository / FOLDER / CURRENT)
        self._shape = in_process.shape(args.repository)
        self._workloads = [
            workload(args.repository, name, self._shape, manifest.max_length, manifest.pad_token_id, args.texts)
            for name in self._settings.workloads
        ]
        self._classifier = "tensorrt" if gpus.devices and manifest.engine else "onnx"
        self._progress: Callable[[str], None] = lambda what: None
        self._share = math.inf  # when the deployment under way has used up its share of the time
        self.result = results.new(
            seed=args.seed,
            gpus=[asdict(gpu) for gpu in gpus.devices],
            why_no_gpu=gpus.why_none or None,
            peak_flops=_peak(gpus),
            model={
                "source": manifest.source,
                "layout": manifest.layout,
                "classifier": self._classifier,
                "max_length": manifest.max_length,
                **asdict(self._shape),
            },
            load={"perf_analyzer": perf_analyzer.VERSION, "windows": WINDOWS, **asdict(self._settings)},
            workloads={work.name: work.described() for work in self._workloads},
            deployments={name: self._deployment(name).what for name in args.deployments},
            caveats=experiment_caveats.general(gpus.why_none or None, self._classifier, args.note),
        )
        if left := left_out(args):
            self.result["skipped"].append({"what": ", ".join(left), "reason": NOT_QUICK})

    def measure(self) -> None:
        """All deployments in turn, into the result."""
        names = [name for name in ORDER if name in self._args.deployments]
        total = len(names) * len(self._settings.clients) * len(self._workloads)
        minutes = self._settings.most_minutes
        deadline = math.inf if minutes is None else self._begun + minutes * 60
        columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} points")
        with terminal.progress(*columns, TimeElapsedColumn()) as progress:
            task = progress.add_task("", total=total)
            self._progress = lambda what: progress.update(task, description=what, completed=len(self.result["rows"]))
            self._progress("the machine's own ceiling")
            self.result["ceiling"] = arithmetic.ceiling(self._shape, self._gpus)
            for left, name in zip(range(len(names), 0, -1), names, strict=True):
                now = time.monotonic()
                self._share = now + (deadline - now) / left
                self._measure_deployment(self._deployment(name))
            if not self.result["rows"] and not self.result["failed"]:
                self._fail("experiment", "nothing was measured: see what was skipped")
            self._progress("the machine's own ceiling, once more")
            again = arithmetic.ceiling(self._shape, self._gpus)
            self.result["ceiling"] = max(self.result["ceiling"], again, key=lambda one: float(one["flops"]))

    def _deployment(self, name: str) -> Deployment:
        found = DEPLOYMENTS[name]
        if name == ENSEMBLE and self._classifier == "onnx":
            return replace(found, precision="fp32", what="tokenizer, and packed rows on ONNX Runtime")
        return replace(found, what=found.what.replace("the TensorRT", "tokenizer, and the TensorRT"))

    def _measure_deployment(self, deployment: Deployment) -> None:
        """Its points; or its name among what was skipped, where it cannot run here, or failed, where it should."""
        self._progress(f"{deployment.name}: starting")
        with ExitStack() as stack:
            view, scratch = (
                Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="experiment-"))) for _ in range(2)
            )
            try:
                server = open_deployment(deployment, self._args.repository, view, self._classifier)
            except PipelineError as error:
                self.result["skipped"].append({"what": deployment.name, "reason": str(error)})
                return
            try:
                server.start()
            except PipelineError as error:
                self._fail(deployment.name, str(error))
                return
            try:
                self._load(self._target(server, deployment), scratch)
            finally:
                server.kill()  # nobody waits for an answer, and an orderly end takes some seconds
        if deployment.name == ENSEMBLE and self._classifier == "onnx":
            self._in_process()

    def _load(self, target: Target, scratch: Path) -> None:
        """All loads on a running server; what goes wrong ends them, and is listed."""
        what = name = target.deployment.name
        try:
            for work in self._workloads:
                what = f"{name}, {work.name}"
                self._closed(target, work, scratch)
            if name == ENSEMBLE:
                what = f"{name}, open loop"
                self._open(target)
        except PipelineError as error:
            self._fail(what, f"{'' if target.server.pid else 'the server ended in mid-run: '}{error}")

    def _target(self, server: Server, deployment: Deployment) -> Target:
        planned = self._classifier == "onnx"
        packed = planned or self.result["model"]["layout"] == "packed"
        return Target(server, deployment, self._shape, self._args.repository, packed=packed, planned=planned)

    def _late(self, what: str, seconds: float) -> bool:
        """Whether what takes so long would end after this deployment's share of the time, which is then said."""
        if time.monotonic() + seconds + POINT_SECONDS <= self._share:
            return False
        self.result["skipped"].append({"what": what, "reason": NO_TIME})
        return True

    def _fail(self, what: str, reason: str) -> None:
        self.result["failed"].append({"what": what, "reason": reason})

    def _closed(self, target: Target, work: Workload, scratch: Path) -> None:
        name, chosen = target.deployment.name, self._settings
        self._progress(f"{name}, {work.name}: checking answers, warming up")
        rate = self._warm_up(target, work)
        for clients in chosen.clients:
            self._progress(f"{name}, {work.name}, {clients} clients")
            least = chosen.least and max(chosen.least, len(work.rows) if target.called == ENSEMBLE else 0)
            wanted = min(max(least, rate * chosen.seconds), rate * chosen.most_seconds)
            window = max(clients, math.ceil(wanted / WINDOWS))
            expected = WINDOWS * window / rate
            if self._late(f"{name}, {work.name}, {clients} clients", expected):
                continue
            row = experiment_point.closed(target, work, clients, window, expected, self._analyzer, scratch)
            rate = row["requests_per_second"]
            self.result["rows"].append(row)

    def _warm_up(self, target: Target, work: Workload) -> float:
        """Right answers first, all at once, so that they share batches. Returns requests/s with the fewest clients."""
        every = max(1, len(work.rows) // WARM_UP_TEXTS)
        messages = work.messages(target.called, every)
        try:
            _, logits = closed_loop.answers(target.server.url, messages, in_flight=len(messages))
            checked = right(logits, work.logits[::every], target.deployment.precision)
            first = min(self._settings.clients)
            seconds, _ = closed_loop.answers(target.server.url, messages[:SIZING_TEXTS], in_flight=first)
        except PipelineError:
            raise
        except Exception as error:
            raise ServerError(f"a request failed: {closed_loop.reason(error)}") from error
        self.result["answers"].append({"deployment": target.deployment.name, "workload": work.name, **checked})
        return len(messages[:SIZING_TEXTS]) / seconds

    def _open(self, target: Target) -> None:
        """At shares of the capacity: the most that the closed loop reached on the last workload."""
        work = self._workloads[-1]
        rows = results.rows(self.result, ENSEMBLE, work.name)
        capacity = max((row["requests_per_second"] for row in rows), default=0.0)
        for load in self._settings.loads if capacity else ():
            self._progress(f"{ENSEMBLE}, {work.name}, open loop, {load:.0%} of {capacity:.0f} requests/s")
            seconds, seed = self._settings.open_seconds, self._args.seed
            if self._late(f"{ENSEMBLE}, {work.name}, open loop at {load:.0%}", seconds):
                continue
            row = experiment_point.opened(target, work, load, load * capacity, seconds, seed)
            self.result["open_loop"].append(row)

    def _in_process(self) -> None:
        for work in self._workloads:
            self._progress(f"in-process, {work.name}")
            rates = in_process.rates(self._args.repository, work.rows, rounds=self._settings.rounds)
            self.result["in_process"][work.name] = rates


def _peak(gpus: Gpus) -> float | None:
    """FLOP/s on paper of all GPUs, for the server puts an instance on each."""
    cards = [card_of(gpu.name) for gpu in gpus.devices]
    return sum(card.flops for card in cards if card) if cards and all(cards) else None
