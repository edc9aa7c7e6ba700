# SPDX-License-Identifier: Apache-2.0
"""One point of a load measurement: right answers first, then a warm-up that is thrown away, then the figures.

Knows a running server and what it should answer, nothing of which deployments there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ensemble.errors import PipelineError, ServerError
from ensemble.launcher.server import Server
from ensemble.samples import load_samples, long_samples, short_samples
from perf import closed_loop
from perf.client_processes import Clients
from perf.counters import settled
from perf.deployments import Deployment
from perf.in_process import classifier, rows_of
from perf.paper.roofline_model import BertShape, useful_flops
from perf.utilization import Utilization

# A 99th percentile of fewer is the slowest request by another name.
LEAST_FOR_P99 = 100
CHECKED_TEXTS = 12

# Of a logit, or of the text's largest one where that is over 1. FP32 sums in another order on another device; FP16
# keeps 11 bits through every layer.
TOLERANCES = {"fp32": 1e-3, "fp16": 5e-2}


@dataclass(frozen=True)
class Texts:
    """What is sent.

    tokens: of each text, as the model sees it
    flops:  of each text alone at its own length, every layer whole
    """

    name: str
    texts: list[str]
    tokens: npt.NDArray[np.int64]
    flops: npt.NDArray[np.float64]


@dataclass(frozen=True)
class Reference:
    """A few texts, and the logits of the FP32 graph for them, FP32 [texts, labels]."""

    texts: list[str]
    logits: npt.NDArray[np.float32]


def texts_of(repository: Path, name: str, shape: BertShape) -> Texts:
    """`mixed`: the built-in samples as they are; `short`: the short ones among them; `full`: those that are cut to the
    longest the model takes.
    """
    samples = {"mixed": load_samples, "short": short_samples, "full": long_samples}[name]()
    return measured_texts(repository, name, [sample.text for sample in samples], shape)


def measured_texts(repository: Path, name: str, texts: list[str], shape: BertShape) -> Texts:
    """Any texts, with what they need."""
    lengths = [len(row) for row in rows_of(repository, texts)]
    flops = [useful_flops(shape, [length]) for length in lengths]
    return Texts(name, texts, np.array(lengths, dtype=np.int64), np.array(flops))


def reference(repository: Path) -> Reference:
    """In-process, on the CPU. Short texts and long ones."""
    samples = load_samples()
    texts = [sample.text for sample in samples[:: len(samples) // CHECKED_TEXTS][:CHECKED_TEXTS]]
    texts += [sample.text for sample in long_samples()[:2]]
    return Reference(texts, classifier(repository)(rows_of(repository, texts)).logits)


def check_answers(server: Server, precision: str, expected: Reference) -> dict[str, Any]:
    """All at once, so that they share batches. Raises PipelineError if an answer is wrong."""
    try:
        _, logits = closed_loop.run(server.url, expected.texts, in_flight=len(expected.texts))
    except Exception as error:
        raise ServerError(f"a request failed: {closed_loop.reason(error)}") from error
    return right(logits, expected.logits, precision)


def right(logits: npt.NDArray[np.float32], expected: npt.NDArray[np.float32], precision: str) -> dict[str, Any]:
    """How far answers are from what is expected, both FP32 [texts, labels]. Raises PipelineError if too far."""
    scale = np.maximum(1.0, np.abs(expected).max(axis=1, keepdims=True))
    difference, tolerance = float((np.abs(logits - expected) / scale).max()), TOLERANCES[precision]
    if not difference <= tolerance:  # NaN too
        raise PipelineError(
            f"served logits differ from the in-process ones by {difference:.1e} of the text's largest, more than "
            f"{tolerance:g}: no speed is reported"
        )
    return {"texts": len(expected), "largest_difference": difference, "tolerance": tolerance}


def measure(
    server: Server, deployment: Deployment, texts: Texts, clients: Clients, in_flight: int, seconds: float, warm: float
) -> dict[str, Any]:
    """The figures of one point; None is what is not known here. Raises PipelineError if a request fails."""
    clients.load(server.url, texts.texts, in_flight, warm)
    before = settled(server, deployment.step)
    with Utilization() as used:
        load = clients.load(server.url, texts.texts, in_flight, seconds)
    requests = len(load.latencies)
    counts = settled(server, deployment.step, before.rows + requests).since(before)
    if counts.rows != requests:
        raise ServerError(
            f"{deployment.step} counted {counts.rows} rows for {requests} requests: is it used elsewhere?"
        )
    median, p99 = np.percentile(load.latencies, [50, 99]) * 1e3
    return {
        "deployment": deployment.name,
        "texts": texts.name,
        "clients": in_flight,
        "seconds": load.seconds,
        "requests": requests,
        "texts_sent": int((load.answered > 0).sum()),
        "texts_of": len(texts.texts),
        "requests_per_second": requests / load.seconds,
        "tokens_per_second": float(load.answered @ texts.tokens) / load.seconds,
        "p50_ms": float(median),
        "p99_ms": float(p99) if requests >= LEAST_FOR_P99 else None,
        "batches": counts.executions,
        "mean_batch": counts.rows / counts.executions,
        "forward_passes": counts.calls,
        "gpu_percent": used.percent,
        "tflops": float(load.answered @ texts.flops) / load.seconds / 1e12,
        "client_busy": load.busy,
    }
