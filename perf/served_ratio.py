# SPDX-License-Identifier: Apache-2.0
"""What serving costs: throughput of the ensemble at 64 in flight over the same graph driven in-process.

    python -m perf served-ratio

Both in one run and in turn, on the same texts, 64 rows a batch in-process. The client shares the cores with the server,
so the ratio counts its work as a cost of serving too. Answers are compared before a figure is printed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import numpy as np
from rich.progress import track
from rich.table import Table

from ensemble.errors import PipelineError
from ensemble.handlers.onnx_classifier import OnnxClassifier
from ensemble.handlers.packing import Ids
from ensemble.samples import load_samples, short_samples
from ensemble.serve import open_server
from perf import closed_loop, terminal
from perf.in_process import classifier, rows_of

BATCH = 64
# Of a logit. FP32 sums in another order in another batch; 1e-6 is usual.
TOLERANCE = 1e-4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The measurement's own arguments."""
    parser.add_argument("--rounds", type=int, default=5, help="the median of so many is taken (default: %(default)s)")
    parser.add_argument("--texts", type=int, default=512, help="texts of a round (default: %(default)s)")


def run(args: argparse.Namespace) -> None:
    """Measure and print."""
    classify = classifier(args.repository)
    table = Table("texts", "in-process/s", "served/s", "served over in-process, median (all rounds)")
    server, _ = open_server(args.repository, "onnx")
    try:
        server.start()
        for name, samples in (("short", short_samples()), ("mixed", load_samples())):
            texts = [samples[index % len(samples)].text for index in range(args.texts)]
            rows = rows_of(args.repository, texts)
            pairs = [_pair(server.url, classify, texts, rows) for _ in track(range(args.rounds), name, transient=True)]
            ratios = [inside / served for inside, served in pairs]
            table.add_row(
                f"{name}: mean {np.mean([len(row) for row in rows]):.0f} tokens",
                *(f"{args.texts / statistics.median(times):.0f}" for times in zip(*pairs, strict=True)),
                f"{statistics.median(ratios):.2f} ({', '.join(f'{ratio:.2f}' for ratio in ratios)})",
            )
    finally:
        server.stop()
    terminal.console().print(table)


def _pair(url: str, classify: OnnxClassifier, texts: Sequence[str], rows: Sequence[Ids]) -> tuple[float, float]:
    """Seconds in-process and served, in turn, once both have given the same answers."""
    started = time.perf_counter()
    parts = [classify(rows[start : start + BATCH]).logits for start in range(0, len(rows), BATCH)]
    inside = time.perf_counter() - started
    served, logits = closed_loop.run(url, texts, in_flight=BATCH)
    difference = float(np.abs(logits - np.concatenate(parts)).max())
    if not difference <= TOLERANCE:  # NaN too
        raise PipelineError(f"served logits differ from the in-process ones by {difference:.1e}: no speed is reported")
    return inside, served
