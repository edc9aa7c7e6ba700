# SPDX-License-Identifier: Apache-2.0
"""Does batching pay, and does nobody pay for it? Served answers against the same texts one at a time, without a server.

    python -m perf batching-wins

On the mixed sample with its long tail, 64 in flight: throughput over the same graph in-process, one text at a time at
its exact length, and over the graph that torch.onnx makes of the Hugging Face model, likewise. With one client: what a
request costs more than the same call in-process. And with 2 % of long texts among short ones: throughput over what the
long ones' own work predicts, and the short ones' 99th percentile over what it is without them.

All in one run and in turn, so that a busy machine slows them alike; medians of the rounds. Every answer is checked.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track
from rich.table import Table

from ensemble.arguments import positive
from ensemble.artifacts import checked
from ensemble.handlers.onnx_classifier import OnnxClassifier
from ensemble.handlers.packing import Ids
from ensemble.handlers.tokenization import TextTokenizer
from ensemble.samples import load_samples, long_samples, short_samples
from ensemble.serve import open_server
from perf import record, terminal
from perf.hugging_face_graph import HuggingFaceGraph
from perf.in_process import classifier, rows_of
from perf.text_load import same, send

IN_FLIGHT = 64
# Texts of the round with one client; short texts of the tail's round, and how many of them have a long one among them.
ALONE_TEXTS, SHORT_TEXTS, A_LONG_ONE_EVERY = 60, 392, 49
# Of a logit. FP32 sums in another order in another batch, and in another graph.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Goal:
    """One figure: what it is, and what it should be at least, or at most."""

    what: str
    bound: float
    least: bool
    unit: str = ""

    def met(self, value: float) -> bool:
        """Whether it is."""
        return value >= self.bound if self.least else value <= self.bound

    def __str__(self) -> str:
        return f"{'at least' if self.least else 'at most'} {self.bound:g}{self.unit}"


GOALS = {
    "over_one_at_a_time": Goal("mixed texts: served over the same graph, one at a time", 1.15, True),
    "over_hugging_face": Goal("mixed texts: served over the Hugging Face graph, one at a time", 1.4, True),
    "one_client_ms": Goal("one client: p50 over the in-process call's", 3.0, False, " ms"),
    "tail_throughput": Goal("2 % long texts: throughput over what their own work predicts", 0.8, True),
    "tail_p99": Goal("2 % long texts: the short ones' p99 over that without them", 2.0, False),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The measurement's own arguments."""
    parser.add_argument("--rounds", type=positive(int), default=5, help="the median is taken (default: %(default)s)")
    parser.add_argument(
        "--model", type=Path, default=Path("build/default_model"), help="the Hugging Face folder that was exported"
    )
    parser.add_argument("--texts", type=positive(int), help="of the mixed sample, at most (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures of all rounds there")


def run(args: argparse.Namespace) -> None:
    """Measure and print. Raises PipelineError if an answer is wrong."""
    classify = classifier(args.repository)
    with tempfile.TemporaryDirectory(prefix="batching-wins-") as scratch:
        # With the very options of the served graph's session.
        exported = HuggingFaceGraph(args.model, Path(scratch), classify.options)
        server, _ = open_server(args.repository, "onnx")
        try:
            server.start()
            subject = Subject(server.url, args.repository, classify, exported)
            rounds = [measured(subject, args.texts) for _ in track(range(args.rounds + 1), "measuring", transient=True)]
        finally:
            server.kill()  # nobody waits for an answer, and an orderly end takes some seconds
    figures = {name: [one[name] for one in rounds[1:]] for name in GOALS}  # the first was there to warm up
    table = Table("", "goal", "median", "all rounds")
    for name, goal in GOALS.items():
        value = statistics.median(figures[name])
        shown = f"{value:.2f}{goal.unit}{'' if goal.met(value) else ' (missed)'}"
        table.add_row(goal.what, str(goal), shown, ", ".join(f"{one:.2f}" for one in figures[name]))
    terminal.console().print(table)
    if args.json:
        record.write(args.json, {"kind": "batching-wins", "figures": figures})


class Subject:
    """A running server, and the same model without one."""

    def __init__(self, url: str, repository: Path, classify: OnnxClassifier, exported: HuggingFaceGraph) -> None:
        self.url, self.repository, self.classify, self.exported = url, repository, classify, exported
        self._tokenize = TextTokenizer(checked(repository / "tokenizer/1/tokenizer.json")[0])

    def call(self, text: str) -> Any:
        """What one request asks for, in this process."""
        (row,) = self._tokenize([text])
        return self.classify([np.array(row.ids, dtype=np.int64)]).logits


def measured(subject: Subject, most: int | None = None) -> dict[str, float]:
    """One round of all figures."""
    mixed = [sample.text for sample in load_samples()[:most]]
    return {**_one_at_a_time(subject, mixed), **_one_client(subject, mixed[:ALONE_TEXTS]), **_tail(subject, most)}


def _one_at_a_time(subject: Subject, texts: Sequence[str]) -> dict[str, float]:
    rows = rows_of(subject.repository, texts)
    served = send(subject.url, texts, IN_FLIGHT)
    alone, expected = _timed(lambda: np.concatenate([subject.classify([row]).logits for row in rows]))
    exported, theirs = _timed(lambda: subject.exported(rows))
    same(served.logits, expected, TOLERANCE, "served logits")
    same(theirs, expected, TOLERANCE, f"the Hugging Face model's logits (is it the one of {subject.repository}?)")
    return {"over_one_at_a_time": alone / served.seconds, "over_hugging_face": exported / served.seconds}


def _one_client(subject: Subject, texts: Sequence[str]) -> dict[str, float]:
    served = send(subject.url, texts, 1)
    called = [_timed(lambda text=text: subject.call(text)) for text in texts]  # type: ignore[misc]
    same(served.logits, np.concatenate([logits for _, logits in called]), TOLERANCE, "served logits")
    inside = statistics.median(seconds for seconds, _ in called)
    return {"one_client_ms": (float(np.median(served.latencies)) - inside) * 1e3}


def _tail(subject: Subject, most: int | None) -> dict[str, float]:
    """The long texts' own work is what they take served, all of them and nothing else."""
    short = [sample.text for sample in short_samples()]
    short = (short * -(-SHORT_TEXTS // len(short)))[: most or SHORT_TEXTS]
    parts = [short[start : start + A_LONG_ONE_EVERY] for start in range(0, len(short), A_LONG_ONE_EVERY)]
    long = [sample.text for _, sample in zip(parts, cycle(long_samples()), strict=False)]
    mix = [text for part, one in zip(parts, long, strict=True) for text in _around(part, one)]
    is_short = np.array([text not in set(long) for text in mix])

    without, by_itself, together = (send(subject.url, texts, IN_FLIGHT) for texts in (short, long, mix))
    rows = rows_of(subject.repository, mix)
    same(together.logits, _batched(subject.classify, rows), TOLERANCE, "served logits")
    p99 = [float(np.percentile(one, 99)) for one in (together.latencies[is_short], without.latencies)]
    return {
        "tail_throughput": (without.seconds + by_itself.seconds) / together.seconds,
        "tail_p99": p99[0] / p99[1],
    }


def _around(part: Sequence[str], one: str) -> list[str]:
    half = len(part) // 2
    return [*part[:half], one, *part[half:]]


def _batched(classify: OnnxClassifier, rows: Sequence[Ids]) -> Any:
    batches = (rows[start : start + IN_FLIGHT] for start in range(0, len(rows), IN_FLIGHT))
    return np.concatenate([classify(batch).logits for batch in batches])


def _timed(run: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = run()
    return time.perf_counter() - started, result
