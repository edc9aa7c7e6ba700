# SPDX-License-Identifier: Apache-2.0
"""A soak's record as a chart, SVG, and as a table. Knows nothing of how it was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from rich.table import Table

from perf.experiment.report_charts import STYLE

MIB = 2**20
PANELS = {
    "own": ("RSS without files and shared memory, MiB", MIB),
    "descriptors": ("file descriptors", 1),
    "threads": ("threads", 1),
}


def draw(result: dict[str, Any], file: Path) -> None:
    """Memory, descriptors and threads of each process, and shared memory, against time."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        figure = Figure(figsize=(9, 6), layout="constrained")
        panels = list(figure.subplots(2, 2, sharex=True).flat)
        samples = result["samples"]
        minutes = [one["seconds"] / 60 for one in samples]
        for axes, (what, (title, unit)) in zip(panels, PANELS.items(), strict=False):
            for name in _names(result):
                values = [one["processes"].get(name, {}).get(what, float("nan")) / unit for one in samples]
                axes.plot(minutes, values, label=name)
            axes.set(title=title)
        panels[-1].plot(minutes, [one["shm"] / MIB for one in samples], color="black")
        panels[-1].set(title="shared memory, MiB")
        for axes in panels:
            axes.axvspan(0, result["warm_up_seconds"] / 60, color="black", alpha=0.06, linewidth=0)
            axes.set_ylim(bottom=0)
        for axes in panels[2:]:
            axes.set(xlabel="minutes (grey: warm-up)")
        if samples:
            panels[0].legend()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})


def table(result: dict[str, Any]) -> Table:
    """A row a process: what it held at the end of the warm-up and at the end, idle, and the trend between."""
    found = Table("process", "RSS, MiB", "its own, MiB", "descriptors", "threads", "growth an hour, 95 %")
    idle = result["idle"]
    for name in _names(result):
        held = [one["processes"][name] for one in idle if name in one["processes"]]
        trend = result["percent_an_hour"].get(name)
        found.add_row(
            name,
            *(" -> ".join(f"{one[what] / unit:.1f}" for one in held) for what, unit in (("rss", MIB), ("own", MIB))),
            *(" -> ".join(str(one[what]) for one in held) for what in ("descriptors", "threads")),
            f"{trend['slope']:+.2f} % ({trend['low']:+.2f} to {trend['high']:+.2f})" if trend else "-",
        )
    found.add_row("shared memory", " -> ".join(f"{one['shm'] / MIB:.1f}" for one in idle))
    return found


def _names(result: dict[str, Any]) -> list[str]:
    return sorted({name for one in result["samples"] for name in one["processes"]})
