# SPDX-License-Identifier: Apache-2.0
"""What was found, for people and as JSON. Knows no rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from perf.doctor.padding import Sample
from perf.doctor.probe import Probe
from perf.doctor.seen import PHASES, WATCHED, Examination
from perf.doctor.target import Target
from perf.doctor.verdict import Verdict, exit_code

COLOURS = {"fault": "red", "healthy": "green", "unknown": "yellow", "note": "blue"}


def show(console: Console, seen: Examination | None, verdicts: Sequence[Verdict]) -> None:
    """The counts, then the verdicts, what to act on first."""
    if seen is not None:
        console.print(_table(seen))
    for verdict in verdicts:
        lines = [Text(line) for line in verdict.evidence]
        if verdict.fix:
            lines.append(Text(f"-> {verdict.fix}", style="bold"))
        title = Text(f"{verdict.kind}: {verdict.name} ({verdict.model}, {verdict.certainty})")
        console.print(Panel(Group(*lines), title=title, title_align="left", border_style=COLOURS[verdict.kind]))


def as_json(
    target: Target,
    seen: Examination | None,
    sample: Sample | None,
    probes: Mapping[str, Probe],
    verdicts: Sequence[Verdict],
) -> dict[str, Any]:
    """Everything, the counts too."""
    return {
        "url": target.url,
        "model": target.model,
        "steps": list(target.leaves),
        "exit_code": exit_code(verdicts),
        "verdicts": [verdict.as_json() for verdict in verdicts],
        "limits": asdict(seen.limits) if seen else None,
        "padding": {"source": sample.source, "share": sample.share, "lengths": list(sample.lengths)}
        if sample
        else None,
        "phases": [_phase(phase) for phase in seen.phases] if seen else [],
        "probes": {name: asdict(probe) for name, probe in probes.items()},
    }


def _phase(phase: Any) -> dict[str, Any]:
    load = phase.load
    return {
        "name": phase.name,
        "in_flight": phase.in_flight,
        "rows_per_request": phase.rows,
        "seconds": load.seconds,
        "answered": len(load.latencies),
        "refused": load.refused,
        "failures": len(load.failures),
        "counts": {model: asdict(counts) for model, counts in phase.counts.items()},
        "calls": dict(phase.calls),
        "gpu": phase.gpu,
    }


def _table(seen: Examination) -> Table:
    table = Table("load", "model", title=f"{seen.target.model} on {seen.target.url}", title_justify="left")
    for name in ("in flight", "requests", "executions", "rows a batch", "waiting", "busy"):
        table.add_column(name, justify="right")
    for name in (*PHASES, WATCHED):
        phases = seen.named(name)
        if not phases:
            continue
        for model in seen.target.leaves:
            counts = seen.counts(name, model)
            table.add_row(
                f"{name} ({phases[-1].rows} rows each)" if name == "rows" else name,
                model,
                str(phases[-1].in_flight or ""),
                str(counts.requests),
                str(counts.executions),
                f"{counts.mean_batch:.1f}",
                f"{seen.queued(name, model):.1f}",
                f"{seen.busy(name, model):.0%}",
            )
    return table
