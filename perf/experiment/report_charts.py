# SPDX-License-Identifier: Apache-2.0
"""An experiment's record as charts, SVG: the same bytes for the same record. Knows nothing of reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator, StrMethodFormatter

from ensemble.contract import ENSEMBLE
from perf.experiment import result as results
from perf.experiment.report_tables import deployments, most_clients
from perf.experiment.stages import STAGES

STYLE = {
    # Ids and fonts that depend on neither the time nor the machine.
    "svg.hashsalt": "onepass",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "figure.dpi": 100,
}
# Told apart without colours too.
LOOKS = {"looped": ("#c44e52", "s"), "baseline": ("#dd8452", "^"), ENSEMBLE: ("#2f5fa7", "o")}
STAGE_COLOURS = dict(zip(STAGES, ("#b0b0b0", "#e3b23c", "#6a9f58", "#85c0c9", "#2f5fa7", "#8d6a9f"), strict=True))
WIDTH, HEIGHT = 3.2, 2.9


def svg(name: str, result: dict[str, Any]) -> str:
    """One of CHARTS."""
    with _style():
        figure = CHARTS[name](result)
        text = StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    # Line ends in blanks, which a version control system complains of.
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


@contextmanager
def _style() -> Iterator[None]:
    """STYLE on top of matplotlib's own defaults, whatever a user's file of settings says."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def _throughput(result: dict[str, Any]) -> Figure:
    return _by_clients(result, "requests/s", lambda row: row["requests_per_second"])


def _p99(result: dict[str, Any]) -> Figure:
    return _by_clients(result, "p99 latency, ms", lambda row: row["latency_ms"]["p99"])


def _by_clients(result: dict[str, Any], title: str, value: Callable[[dict[str, Any]], float | None]) -> Figure:
    names = [name for name in result["workloads"] if any(row["workload"] == name for row in result["rows"])]
    figure, panels = _panels(len(names), 1.6 if len(names) == 1 else 1.0)
    for axes, workload in zip(panels, names, strict=True):
        for name in deployments(result):
            points = [(row["clients"], value(row)) for row in results.rows(result, name, workload)]
            known = [(clients, found) for clients, found in points if found is not None]
            colour, marker = LOOKS[name]
            axes.plot(*zip(*known, strict=True), color=colour, marker=marker, label=name) if known else None
        axes.set(title=f"{workload} texts", xlabel="clients", ylabel=title, xscale="log", yscale="log")
        _ticks(axes, sorted({row["clients"] for row in result["rows"]}))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    _legend(figure, panels)
    return figure


def _open_loop(result: dict[str, Any]) -> Figure:
    figure, (axes,) = _panels(1, 1.6)
    rows = sorted(result["open_loop"], key=lambda row: float(row["offered_per_second"]))
    for name, marker, colour in (("p50", "o", "#2f5fa7"), ("p95", "^", "#dd8452"), ("p99", "s", "#c44e52")):
        known = [(row["offered_per_second"], row["latency_ms"][name]) for row in rows if row["latency_ms"][name]]
        axes.plot(*zip(*known, strict=True), color=colour, marker=marker, label=name) if known else None
    axes.set(xlabel="offered requests/s", ylabel="latency from due time, ms")
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure


def _batches(result: dict[str, Any]) -> Figure:
    """At the most clients, on the last workload: the share of executions of each batch size."""
    most, workload = most_clients(result), result["rows"][-1]["workload"]
    rows = [results.row(result, name, workload, most) for name in deployments(result)]
    found = [row for row in rows if row is not None]
    figure, panels = _panels(len(found), shared=False)
    for axes, row in zip(panels, found, strict=True):
        sizes = {int(size): count for size, count in row["batch_sizes"].items()}
        total = sum(sizes.values())
        axes.bar(list(sizes), [100 * count / total for count in sizes.values()], color=LOOKS[row["deployment"]][0])
        axes.set(title=row["deployment"], xlabel="rows in a batch", ylabel="% of batches", xlim=(0, max(8, *sizes) + 1))
    figure.suptitle(f"{workload} texts, {most} clients")
    return figure


def _stages(result: dict[str, Any]) -> Figure:
    """At the most clients: the share of a request's time in each stage."""
    most = most_clients(result)
    rows = [row for row in result["rows"] if row["clients"] == most][::-1]
    figure, (axes,) = _panels(1, 2.2, 0.32 * len(rows) + 1.4)
    left = np.zeros(len(rows))
    for stage in STAGES:
        shares = np.array([100 * row["stages_ms"][stage] / sum(row["stages_ms"].values()) for row in rows])
        axes.barh(range(len(rows)), shares, left=left, color=STAGE_COLOURS[stage], label=stage)
        left += shares
    axes.set_yticks(range(len(rows)), [f"{row['deployment']}, {row['workload']}" for row in rows])
    axes.set(xlabel=f"% of a request's time, {most} clients", xlim=(0, 100))
    axes.grid(visible=False)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(STAGES), columnspacing=1, handlelength=1)
    return figure


def _panels(count: int, wide: float = 1.0, height: float = HEIGHT, *, shared: bool = True) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(WIDTH * wide * count, height), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False, sharey=shared)[0])


def _ticks(axes: Axes, values: list[int]) -> None:
    axes.xaxis.set_major_locator(FixedLocator(values))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


def _legend(figure: Figure, panels: list[Axes]) -> None:
    """One for all panels: what is in any of them."""
    found = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if found:
        figure.legend(list(found.values()), list(found), loc="outside lower center", ncols=len(found))


CHARTS: dict[str, Callable[[dict[str, Any]], Figure]] = {
    "throughput": _throughput,
    "p99": _p99,
    "open_loop": _open_loop,
    "batches": _batches,
    "stages": _stages,
}
TITLES = {
    "throughput": "Throughput against clients",
    "p99": "99th percentile of latency against clients",
    "open_loop": "Latency against offered rate",
    "batches": "Batch sizes",
    "stages": "Where the time goes",
}
