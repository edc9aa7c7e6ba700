# SPDX-License-Identifier: Apache-2.0
"""An experiment's record as tables of cells as they are shown. Knows nothing of files or formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ensemble.contract import ENSEMBLE
from perf.experiment import result as results
from perf.experiment.stages import STAGES

UNKNOWN = "n/a"


@dataclass(frozen=True)
class Table:
    """Cells as they are shown. The first column names the rows."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def most_clients(result: dict[str, Any]) -> int:
    """For which every measured deployment has a row, so that they compare; of any row if none; 0 without rows."""
    rows = result["rows"]
    each = [{int(row["clients"]) for row in rows if row["deployment"] == name} for name in deployments(result)]
    together = set.intersection(*each) if each else set()
    return max(together or set().union(*each), default=0)


def deployments(result: dict[str, Any]) -> list[str]:
    """Those with a row, in the order of the record."""
    return [name for name in result["deployments"] if any(row["deployment"] == name for row in result["rows"])]


def utilization(result: dict[str, Any], workload: str) -> Table:
    """How busy the GPUs or the cores were, for each number of clients."""
    names = deployments(result)
    counts = sorted({int(row["clients"]) for row in result["rows"] if row["workload"] == workload})
    return Table(
        (f"clients, {workload} texts", *names),
        [
            (str(clients), *(_percent(_busy(results.row(result, name, workload, clients), result)) for name in names))
            for clients in counts
        ],
    )


def ratios(result: dict[str, Any], workload: str, clients: int) -> Table:
    """Throughput and p99 side by side, and what the ensemble is over the others."""
    names = deployments(result)
    found = [results.row(result, name, workload, clients) for name in names]
    over = [name for name in names if name != ENSEMBLE]
    last = results.row(result, ENSEMBLE, workload, clients)
    lines = []
    for title, spec in (("requests/s", ",.1f"), ("p99 latency, ms", ",.0f")):
        values = [_value(row, title) for row in found]
        ratios = [_ratio(_value(last, title), values[names.index(name)]) for name in over]
        lines.append((title, *(_number(one, spec) for one in values), *ratios))
    return Table((f"{workload} texts", *names, *(f"{ENSEMBLE} over {name}" for name in over)), lines)


def _value(row: dict[str, Any] | None, title: str) -> float | None:
    if row is None:
        return None
    found = row["requests_per_second"] if title == "requests/s" else row["latency_ms"]["p99"]
    return None if found is None else float(found)


def points(result: dict[str, Any], workload: str) -> Table:
    """All that is known of each closed loop."""
    head = (
        f"{workload} texts", "clients", "requests/s", "tokens/s", "p50 ms", "p90 ms", "p95 ms", "p99 ms", "errors",
        "mean batch", "batches", "passes", "requests", "GPU" if result["gpus"] else "CPU", "client CPU", "padding",
        "GFLOP/s", "of ceiling", "executing",
    )  # fmt: skip
    names = deployments(result)
    return Table(head, [_point(result, row) for name in names for row in results.rows(result, name, workload)])


def _point(result: dict[str, Any], row: dict[str, Any]) -> list[str]:
    ceiling, cpu = result["ceiling"].get("flops"), row["cpu_percent"]
    return [
        row["deployment"],
        str(row["clients"]),
        f"{row['requests_per_second']:,.1f}",
        f"{row['tokens_per_second']:,.0f}",
        *(_number(row["latency_ms"][name], ",.0f") for name in ("p50", "p90", "p95", "p99")),
        str(row["errors"]),
        f"{row['mean_batch']:.1f}",
        f"{row['executions']:,}",
        _number(row["forward_passes"], ","),
        f"{row['served_requests']:,}",
        _percent(_busy(row, result)),
        _percent(cpu["client"] if cpu else None),
        _percent(100 * row["padding_share"]),
        f"{row['flops'] / 1e9:,.1f}",
        _percent(_share(row["flops"], ceiling)),
        _percent(_share(row["flops_executing"], ceiling)),
    ]


def time(result: dict[str, Any], clients: int) -> Table:
    """Milliseconds a request spent in each stage."""
    rows = [row for row in result["rows"] if row["clients"] == clients]
    return Table(
        ("deployment, texts", *STAGES),
        [
            (f"{row['deployment']}, {row['workload']}", *(f"{row['stages_ms'][stage]:,.1f}" for stage in STAGES))
            for row in rows
        ],
    )


def open_loop(result: dict[str, Any]) -> Table:
    """Each open loop."""
    names = ("p50", "p90", "p95", "p99")
    return Table(
        (
            "load",
            "offered/s",
            "answered/s",
            *(f"{name} ms" for name in names),
            "errors",
            "mean batch",
            "sent late, p99 ms",
        ),
        [
            (
                f"{row['load']:.0%}",
                f"{row['offered_per_second']:,.1f}",
                f"{row['requests_per_second']:,.1f}",
                *(_number(row["latency_ms"][name], ",.0f") for name in names),
                str(row["errors"]),
                f"{row['mean_batch']:.1f}",
                f"{row['lag_p99_ms']:.1f}",
            )
            for row in result["open_loop"]
        ],
    )


def machine(result: dict[str, Any], clients: int) -> Table:
    """What the machine can do, and what the served figures are of it."""
    ceiling = result["ceiling"]
    kind = f"matrix product, {ceiling['precision'].upper()}, GFLOP/s"
    lines = [(kind, f"{ceiling['flops'] / 1e9:,.1f} ({ceiling['by']})")]
    if result.get("peak_flops"):
        lines.append(("the cards' peak on paper, FP16, GFLOP/s", f"{result['peak_flops'] / 1e9:,.0f}"))
    for workload, rates in result["in_process"].items():
        row = results.row(result, ENSEMBLE, workload, clients)
        served = row["requests_per_second"] if row else None
        for name, rate in (("batches of 64", rates["batched_per_second"]), ("one by one", rates["alone_per_second"])):
            lines.append((f"{workload} texts: in-process, {name}, texts/s", f"{rate:,.1f}"))
            lines.append((f"{workload} texts: served at {clients} clients over that", _ratio(served, rate)))
    return Table(("", "measured here"), lines)


def any_row(result: dict[str, Any], workload: str) -> bool:
    """Whether the workload was measured at all."""
    return any(row["workload"] == workload for row in result["rows"])


def _busy(row: dict[str, Any] | None, result: dict[str, Any]) -> float | None:
    if row is None:
        return None
    found = row["gpu_percent"] if result["gpus"] else (row["cpu_percent"] or {}).get("server")
    return None if found is None else float(found)


def _share(value: float | None, whole: float | None) -> float | None:
    return None if value is None or not whole else 100 * value / whole


def _ratio(value: float | None, other: float | None) -> str:
    return UNKNOWN if value is None or not other else f"{value / other:.2f}x"


def _number(value: float | None, spec: str) -> str:
    return UNKNOWN if value is None else format(value, spec)


def _percent(value: float | None) -> str:
    return _number(value, ".0f") + ("" if value is None else " %")
