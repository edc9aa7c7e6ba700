# SPDX-License-Identifier: Apache-2.0
"""Measure what ensemble/handlers/passes.py assumes: the cost of a forward pass on this machine. In-process, no server.

    python -m perf cost-model

Times passes of many shapes (rows x length) and fits tokens + attention_cost * rows * length^2 + pass_cost to them. The
values belong into classifier/configs/cpu.pbtxt; plans are flat around the optimum, so a factor of two matters little.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from rich.progress import track
from rich.table import Table

from ensemble.handlers.onnx_classifier import OnnxClassifier
from perf import terminal
from perf.in_process import classifier, cost_model

# From one short row to as much as a batch may hold; each shape costs about the same range of time.
SHAPES = [
    (1, 8),
    (8, 8),
    (64, 8),
    (1, 32),
    (8, 32),
    (64, 32),
    (1, 128),
    (8, 128),
    (24, 128),
    (1, 512),
    (2, 512),
    (6, 512),
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The measurement's own arguments."""
    parser.add_argument("--rounds", type=int, default=7, help="the least of so many is taken (default: %(default)s)")


def run(args: argparse.Namespace) -> None:
    """Measure and print."""
    classify = classifier(args.repository)
    seconds = _least_seconds(classify, args.rounds)
    attention_cost, pass_cost, per_token = fit(seconds)
    table = Table("rows x length", "measured ms", "fitted ms")
    for (rows, length), value in zip(SHAPES, seconds, strict=True):
        fitted = per_token * (rows * length + attention_cost * rows * length**2 + pass_cost)
        table.add_row(f"{rows} x {length}", f"{value * 1e3:.1f}", f"{fitted * 1e3:.1f}")
    served = cost_model(args.repository)
    terminal.console().print(
        table,
        f"attention_cost {attention_cost:.4f} (served with {served.attention_cost}), pass_cost {pass_cost:.0f} (served "
        f"with {served.pass_cost:.0f}), {1 / per_token:,.0f} tokens/s of linear work",
    )


def fit(seconds: list[float]) -> tuple[float, float, float]:
    """attention_cost, pass_cost and seconds per token, by least squares on relative errors.

    Relative, because the plan weighs passes of 5 ms against passes of 500 ms.
    """
    work = np.array([[rows * length, rows * length**2, 1.0] for rows, length in SHAPES])
    measured = np.array(seconds)[:, None]
    per_token, per_score, per_pass = np.linalg.lstsq(work / measured, np.ones(len(SHAPES)), rcond=None)[0]
    return float(per_score / per_token), float(per_pass / per_token), float(per_token)


def _least_seconds(classify: OnnxClassifier, rounds: int) -> list[float]:
    """The shortest of `rounds` passes of each shape: what else the machine does only ever adds."""
    least = [float("inf")] * len(SHAPES)
    for _ in track(range(rounds + 1), "measuring", transient=True):
        for index, (rows, length) in enumerate(SHAPES):
            batch = [np.full(length, 2000) for _ in range(rows)]
            started = time.perf_counter()
            classify.one_pass(batch)
            least[index] = min(least[index], time.perf_counter() - started)
    return least
