# SPDX-License-Identifier: Apache-2.0
"""What a report of an experiment says, in its order: headings, remarks, tables, charts. Knows nothing of formats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ensemble.contract import ENSEMBLE
from perf.experiment import report_tables as tables
from perf.experiment.report_tables import Table, most_clients


@dataclass(frozen=True)
class Section:
    """What stands under one heading. charts: names of report_charts.CHARTS."""

    title: str
    text: str = ""
    tables: Sequence[Table] = ()
    charts: Sequence[str] = ()
    points: Sequence[str] = ()


def sections(result: dict[str, Any]) -> list[Section]:
    """The whole report. What was not measured has no section."""
    return [section for section in _sections(result) if section.tables or section.points or section.charts]


def headline(result: dict[str, Any]) -> str:
    """On what, with what, when."""
    machine, model, load = result["machine"], result["model"], result["load"]
    where = ", ".join(gpu["name"] for gpu in result["gpus"]) or f"{machine['cores']} cores of {machine['cpu']}, no GPU"
    most = f"{load['seconds']:g} s or {max(load['least'], 1)} requests a point"
    return (
        f"{where}. {model['source'].get('name', 'The installed model')}: {model['layers']} layers, hidden "
        f"{model['hidden']}; classifier: {model['classifier']}. perf_analyzer {load['perf_analyzer']}, "
        f"{load['windows']} windows, at least {most}; {result['created']}. Made by `{result['command']}`, "
        f"seed {result['seed']}.{'' if result['complete'] else ' Interrupted: not all points are here.'}"
    )


def _sections(result: dict[str, Any]) -> Iterator[Section]:
    yield Section(
        "What was compared",
        points=[f"{name}: {what}" for name, what in result["deployments"].items()],
        tables=[
            Table(
                ("workload", "texts", "mean tokens", "longest", "what"),
                [
                    (name, str(one["texts"]), f"{one['mean_tokens']:.1f}", str(one["longest"]), one["what"])
                    for name, one in result["workloads"].items()
                ],
            )
        ],
    )
    measured, most = [name for name in result["workloads"] if tables.any_row(result, name)], most_clients(result)
    yield Section(
        f"{'GPU' if result['gpus'] else 'CPU'} utilization by clients",
        text="Of all GPUs, by NVIDIA's driver." if result["gpus"] else "The server's processes, of all cores.",
        tables=[tables.utilization(result, name) for name in measured],
    )
    yield Section(
        f"At {most} clients",
        tables=[tables.ratios(result, name, most) for name in measured],
        charts=["throughput", "p99"] if measured else [],
    )
    yield Section(
        "Every point",
        text="Closed loop. Padding and FLOP/s: of matrix products. `executing`: within the classifier's executions.",
        tables=[tables.points(result, name) for name in measured],
        charts=["batches"] if measured else [],
    )
    yield Section(
        "Where the time goes",
        text=f"Milliseconds a request, on average, at {most} clients.",
        tables=[tables.time(result, most)] if any(row["clients"] == most for row in result["rows"]) else [],
        charts=["stages"] if measured else [],
    )
    if result["open_loop"]:
        yield Section(
            "Open loop",
            text=f"Poisson arrivals for {ENSEMBLE}, {result['open_loop'][0]['workload']} texts; load is the share of "
            "its closed-loop throughput; latency from when a request was due.",
            tables=[tables.open_loop(result)],
            charts=["open_loop"],
        )
    yield Section("Against the machine", tables=[tables.machine(result, most)] if result["ceiling"] else [])
    yield from _remarks(result)


def _remarks(result: dict[str, Any]) -> Iterator[Section]:
    for title in ("skipped", "failed"):
        yield Section(title.capitalize(), points=[f"{one['what']}: {one['reason']}" for one in result[title]])
    named: dict[str, list[str]] = {}
    for row in [*result["rows"], *result["open_loop"]]:
        load = f"{row['clients']} clients" if "clients" in row else f"open loop at {row['load']:.0%}"
        for one in row["caveats"]:
            where = f"{row['deployment']}, {row['workload']}, {load}"
            named.setdefault(one["name"], []).append(f"{where}: {one['detail']}")
    for name, lines in named.items():
        yield Section(f"Caveat: {name}", text=result["advice"].get(name, ""), points=lines)
    yield Section("To read it right", points=result["caveats"])
