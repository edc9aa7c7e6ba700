# SPDX-License-Identifier: Apache-2.0
"""One point of the experiment: a load on a running server, and all that its client and its server say of it.

A row of figures is made only if every answer in it is right. Knows nothing of which points there are.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tritonclient.grpc import InferResult

from ensemble.contract import ENSEMBLE
from ensemble.errors import ServerError
from ensemble.launcher.server import Server
from perf import arithmetic, open_loop
from perf.counters import Counts, settled
from perf.deployments import Deployment
from perf.experiment import caveats, stages
from perf.experiment.perf_analyzer import WINDOWS, PerfAnalyzer, Records
from perf.experiment.workloads import Workload
from perf.in_process import cost_model
from perf.load_point import LEAST_FOR_P99, right
from perf.machine_load import MachineLoad, Shares
from perf.paper.roofline_model import BertShape
from perf.utilization import Utilization


@dataclass(frozen=True)
class Target:
    """What is loaded. packed: the ensemble's classifier packs its rows; planned: and plans its passes."""

    server: Server
    deployment: Deployment
    shape: BertShape
    repository: Path
    packed: bool
    planned: bool

    @property
    def called(self) -> str:
        """The model that requests go to: the ensemble, or the handler itself."""
        return ENSEMBLE if self.deployment.name == ENSEMBLE else self.deployment.step

    @property
    def models(self) -> tuple[str, ...]:
        """Those whose statistics count."""
        return (ENSEMBLE, stages.TOKENIZER, self.deployment.step) if self.called == ENSEMBLE else (self.called,)

    def counted(self, rows: int = 0) -> tuple[Counts, dict[str, stages.Spent]]:
        """Once the counters stand still, at `rows` or more of the step's."""
        counts = settled(self.server, self.deployment.step, rows)
        return counts, stages.read(self.server, self.models)


def closed(
    target: Target, work: Workload, clients: int, window: int, seconds: float, analyzer: PerfAnalyzer, scratch: Path
) -> dict[str, Any]:
    """The row of a closed loop of `clients`. Raises PipelineError if a request fails or an answer is wrong."""
    data = scratch / f"{target.called}-{work.name}.json"
    if not data.exists():
        work.write(target.called, data)
    before, spent_before = target.counted()
    with MachineLoad(target.server.pid) as used, Utilization() as gpu:
        records = analyzer.load(
            target.server.url, target.called, data, work.shapes(target.called), clients, window, seconds, used.client
        )
    after, spent = _since(target, before, spent_before, len(records.sent))
    which = work.indices(records.inputs)
    answers = right(records.logits, work.logits[which], target.deployment.precision)
    windows = _windows(records)
    shares = used.between(float(records.sent.min()), float(records.ended.max()))
    row = {
        "deployment": target.deployment.name,
        "workload": work.name,
        "clients": clients,
        "windows": windows,
        **_client_side(records.latencies, records.seconds, work, which),
        **_server_side(target, after, spent, float(records.latencies.mean()) * 1e3),
        **_utilization(shares, gpu.percent),
        "in_flight": _in_flight(records),
        "answers": answers,
    }
    row |= _arithmetic(target, work, row, spent)
    row["caveats"] = [
        *caveats.of_windows(windows),
        *caveats.of_requests(row["requests"], row["errors"]),
        *caveats.of_texts(row["texts_sent"], len(work.rows) if target.called == ENSEMBLE else 0),
        *caveats.of_clients(row["in_flight"], clients),
        *caveats.of_machine(shares),
    ]
    return row


def opened(target: Target, work: Workload, load: float, rate: float, seconds: float, seed: int) -> dict[str, Any]:
    """The row of an open loop of `rate` requests/s, `load` of the capacity. Raises as closed() does."""
    before, spent_before = target.counted()
    due = open_loop.poisson(rate, seconds, seed)
    with MachineLoad(target.server.pid, os.getpid()) as used, Utilization() as gpu:
        arrivals = open_loop.run(target.server.url, work.messages(target.called), due)
    answered = np.flatnonzero(~np.isnan(arrivals.latencies))
    if not len(answered):
        raise ServerError("no request of the open loop was answered: see the server's log")
    after, spent = _since(target, before, spent_before, len(answered))
    which = answered % len(work.rows)
    logits = np.concatenate([InferResult(arrivals.answers[index]).as_numpy("logits") for index in answered])
    answers = right(logits, work.logits[which], target.deployment.precision)
    latencies, shares = arrivals.latencies[answered], used.between(arrivals.began, arrivals.began + arrivals.seconds)
    lag, offered = float(np.percentile(arrivals.lag, 99)) * 1e3, len(due) / float(due[-1])
    row = {
        "deployment": target.deployment.name,
        "workload": work.name,
        "load": load,
        "offered_per_second": offered,
        "lag_p99_ms": lag,
        **_client_side(latencies, arrivals.seconds, work, which),
        **_server_side(target, after, spent, float(latencies.mean()) * 1e3),
        **_utilization(shares, gpu.percent),
        "answers": answers,
    }
    row["errors"] = len(due) - len(answered)
    row["caveats"] = [
        *caveats.of_requests(row["requests"], row["errors"]),
        *caveats.of_texts(row["texts_sent"], len(work.rows)),
        *caveats.of_arrivals(lag, row["latency_ms"]["p50"], offered, row["requests_per_second"]),
        *caveats.of_machine(shares),
    ]
    return row


def _since(
    target: Target, before: Counts, spent_before: dict[str, stages.Spent], requests: int
) -> tuple[Counts, dict[str, stages.Spent]]:
    after, spent = target.counted(before.rows + requests)
    return after.since(before), {model: spent[model].since(spent_before[model]) for model in target.models}


def _client_side(
    latencies: npt.NDArray[np.float64], seconds: float, work: Workload, which: npt.NDArray[np.int64]
) -> dict[str, Any]:
    p50, p90, p95, p99 = (float(value) for value in np.percentile(latencies, [50, 90, 95, 99]) * 1e3)
    return {
        "seconds": seconds,
        "requests": len(latencies),
        "texts_sent": len(np.unique(which)),
        "requests_per_second": len(latencies) / seconds,
        "tokens_per_second": float(work.texts.tokens[which].sum()) / seconds,
        "latency_ms": {
            "mean": float(latencies.mean()) * 1e3,
            "p50": p50,
            "p90": p90,
            "p95": p95,
            "p99": p99 if len(latencies) >= LEAST_FOR_P99 else None,
        },
    }


def _server_side(target: Target, counts: Counts, spent: dict[str, stages.Spent], client_ms: float) -> dict[str, Any]:
    """Counted from before the point's first request to after its last, those outside its windows included."""
    step = spent[target.deployment.step]
    if not counts.executions:
        raise ServerError(f"{target.deployment.step} counted no execution: is another server on this port?")
    return {
        "errors": spent[target.called].failed,
        "served_requests": spent[target.called].requests,
        "rows": counts.rows,
        "executions": counts.executions,
        "forward_passes": counts.calls,
        "mean_batch": counts.rows / counts.executions,
        "batch_sizes": {str(size): count for size, count in step.batches.items()},
        "stages_ms": stages.stages(spent, target.called, target.deployment.step, client_ms),
    }


def _utilization(shares: Shares | None, gpu: float | None) -> dict[str, Any]:
    percent = None if shares is None else {"server": shares.server, "client": shares.client, "other": shares.other}
    return {"cpu_percent": percent, "gpu_percent": gpu}


def _arithmetic(target: Target, work: Workload, row: dict[str, Any], spent: dict[str, stages.Spent]) -> dict[str, Any]:
    lengths = work.texts.tokens.tolist()
    if target.called == ENSEMBLE and target.packed:
        cost = cost_model(target.repository) if target.planned else None
        done, padding = arithmetic.packed_rows(target.shape, lengths, row["mean_batch"], cost)
    else:
        done, padding = arithmetic.padded_rows(target.shape, lengths, work.longest)
    executing = spent[target.deployment.step].batch_ns / 1e9
    return {
        "flops": done * row["requests_per_second"],
        "flops_executing": done * row["rows"] / executing if executing else None,
        "padding_share": padding,
    }


def _windows(records: Records) -> list[dict[str, float]]:
    found = []
    for number in range(WINDOWS):
        start, end = records.windows[number : number + 2]
        inside = records.latencies[(records.ended > start) & (records.ended <= end)]
        mean = float(inside.mean()) * 1e3 if len(inside) else 0.0
        found.append({"requests": len(inside), "requests_per_second": len(inside) / (end - start), "mean_ms": mean})
    return found


def _in_flight(records: Records) -> float | None:
    """On average, over the time for which every request in flight is among the records; None if there is none."""
    start, end = float(records.sent.min()), float(records.ended.max() - records.latencies.max())
    if end <= start:
        return None
    overlap = np.minimum(records.ended, end) - np.minimum(records.sent, end)
    return float(overlap.sum()) / (end - start)
