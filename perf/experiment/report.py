# SPDX-License-Identifier: Apache-2.0
"""The report of an experiment, rendered from its JSON and nothing else: Markdown, SVG charts, and one HTML file.

    python -m perf report RESULT.json [--output DIR]

The same bytes for the same record, whenever and wherever it is rendered.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.table import Table as Printed

from perf import terminal
from perf.experiment import report_sections
from perf.experiment import result as results

MARKDOWN, HTML = "report.md", "report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument("result", type=Path, metavar="RESULT.json", help="what `make perf` wrote")
    parser.add_argument("--output", type=Path, metavar="DIR", help="default: where the result is")


def run(args: argparse.Namespace) -> None:
    """Render and say where."""
    files = render(args.result, args.output or args.result.parent)
    terminal.console().print("written:", *map(str, files), highlight=False, markup=False, soft_wrap=True)


def render(file: Path, folder: Path) -> list[Path]:
    """All files of the report. Raises ConfigError if `file` is no record of this version."""
    from perf.experiment import (
        report_charts,  # here, because it takes a second, and other commands do without matplotlib
    )

    result = results.read(file)
    sections = report_sections.sections(result)
    charts = {name: report_charts.svg(name, result) for section in sections for name in section.charts}
    known = {
        "headline": report_sections.headline(result),
        "sections": sections,
        "charts": {name: _inline(text) for name, text in charts.items()},
        "titles": report_charts.TITLES,
    }
    written = {f"{name}.svg": text for name, text in charts.items()}
    written |= {MARKDOWN: _template("report.md.j2", known), HTML: _template("report.html.j2", known)}
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in written.items():
        (folder / name).write_text(text, encoding="utf-8", newline="\n")
    return [folder / name for name in written]


def show(file: Path, folder: Path) -> None:
    """The short tables on a terminal, and where the rest is."""
    result, console = results.read(file), terminal.console()
    console.print(report_sections.headline(result), highlight=False, markup=False, soft_wrap=True)
    for section in report_sections.sections(result):
        if section.title in ("To read it right", "What was compared") or "stages" in section.charts:
            continue
        console.print(f"\n{section.title}", style="bold", highlight=False, markup=False)
        for line in filter(None, [section.text, *section.points]):
            console.print(f"  {line}", highlight=False, markup=False)
        for table in section.tables:
            printed = Printed(table.head[0])
            for name in table.head[1:]:
                printed.add_column(name, justify="right")
            for row in table.rows:
                printed.add_row(*row)
            console.print(printed)
    console.print(
        f"written: {file}, {folder / MARKDOWN}, {folder / HTML}", highlight=False, markup=False, soft_wrap=True
    )


def _template(name: str, known: dict[str, Any]) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("perf.experiment"),
        autoescape=jinja2.select_autoescape(enabled_extensions=("html.j2",), default=False),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["cell"] = lambda text: str(text).replace("|", "/").replace("\n", " ")
    return environment.get_template(name).render(known)


def _inline(text: str) -> str:
    """An SVG as it stands inside HTML: without what comes before its root."""
    return text[text.index("<svg") :]
