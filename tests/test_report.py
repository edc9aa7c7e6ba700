# SPDX-License-Identifier: Apache-2.0
"""The report of an experiment: from the record alone, the same bytes each time; what is no record is refused."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from conftest import ROOT

from perf.__main__ import main
from perf.experiment import report, report_charts, report_sections
from perf.experiment import result as results

COMMITTED = sorted((ROOT / "perf/results").glob("*/experiment.json"))
# A coordinate, as matplotlib writes it: a hundredth of a pixel has six digits behind it, and instruction sets differ there.
PLACE = re.compile(r"\b\d+\.\d{6}\b")


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    """A committed one."""
    return results.read(COMMITTED[0])


def rendered(record: dict[str, Any], folder: Path) -> str:
    """Its Markdown."""
    folder.mkdir(exist_ok=True)
    (folder / "experiment.json").write_text(json.dumps(record))
    report.render(folder / "experiment.json", folder)
    return (folder / "report.md").read_text()


@pytest.fixture
def no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what is about words: drawing takes most of a report's time."""
    monkeypatch.setattr(report_charts, "svg", lambda name, result: f"<svg><text>{name}</text></svg>")


@pytest.mark.parametrize("file", COMMITTED, ids=lambda file: file.parent.name)
def test_a_committed_report_is_what_its_record_renders_to(file: Path, tmp_path: Path) -> None:
    """Every file and no file more; byte for byte, but for the last digit of a place in a chart, which is the CPU's."""
    assert main(["report", str(file), "--output", str(tmp_path)]) == 0

    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    committed = {path.name: path.read_text() for path in file.parent.iterdir() if path.name != "experiment.json"}
    assert made.keys() == committed.keys()
    for name in made:
        assert PLACE.sub("", made[name]) == PLACE.sub("", committed[name]), name
        here, there = (np.array(PLACE.findall(text), dtype=np.float64) for text in (made[name], committed[name]))
        np.testing.assert_allclose(here, there, rtol=0, atol=2e-6, err_msg=name)


def test_there_is_a_committed_record() -> None:
    """Complete, of a full run: all three deployments, all clients, and the open loop."""
    found = [results.read(file) for file in COMMITTED]

    assert any(
        record["complete"]
        and {(row["deployment"], row["clients"]) for row in record["rows"]}
        >= {(name, clients) for name in ("looped", "baseline", "text_classifier") for clients in (1, 8, 32, 64)}
        and len(record["open_loop"]) == 5
        for record in found
    )


def test_a_committed_record_names_no_machine() -> None:
    """No paths and no addresses of where it was made."""
    for file in COMMITTED:
        assert not re.search(r"/(?:tmp|home|root|work)/|\d+\.\d+\.\d+\.\d+:\d+", file.read_text())


def test_a_users_own_style_changes_nothing(record: dict[str, Any]) -> None:
    """Of matplotlib."""
    before = report_charts.svg("throughput", record)

    with matplotlib.rc_context({"font.size": 20, "svg.hashsalt": "other", "lines.linewidth": 7}):
        assert report_charts.svg("throughput", record) == before


@pytest.mark.parametrize("name", list(report_charts.CHARTS))
def test_a_chart_is_an_svg_with_its_words_as_text(name: str, record: dict[str, Any]) -> None:
    """Well-formed, its fonts not turned into outlines, without a date."""
    text = report_charts.svg(name, record)

    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert "<text" in text and "dc:date" not in text


def test_the_html_needs_nothing_else(record: dict[str, Any], tmp_path: Path) -> None:
    """One file: no script, and nothing is loaded from anywhere; every chart is in it."""
    rendered(record, tmp_path)

    html = (tmp_path / "report.html").read_text()
    assert html.count("<svg") == len(report_charts.CHARTS)
    assert not re.search(r"<script|<link|<img|src=|@import|url\((?!#)", html)


def test_what_a_record_says_cannot_break_the_page(record: dict[str, Any], no_charts: None, tmp_path: Path) -> None:
    """Names come from folders and files."""
    changed = copy.deepcopy(record)
    changed["model"]["source"]["name"] = "<script>alert(1)</script>"
    changed["workloads"]["mixed"]["what"] = "a | b"

    markdown = rendered(changed, tmp_path)

    assert "<script" not in (tmp_path / "report.html").read_text() and "a / b" in markdown


def test_tables_are_laid_out_like_the_case_studys(record: dict[str, Any], no_charts: None, tmp_path: Path) -> None:
    """Utilization by clients; throughput and p99 side by side, with ratios."""
    markdown = rendered(record, tmp_path)

    assert "| clients, mixed texts | looped | baseline | text_classifier |" in markdown
    assert re.search(
        r"^\| requests/s \| [\d.,]+ \| [\d.,]+ \| [\d.,]+ \| [\d.]+x \| [\d.]+x \|$", markdown, re.MULTILINE
    )
    assert "p99 latency, ms" in markdown and "\n\n\n" not in markdown


def test_every_caveat_is_shown_with_its_advice(record: dict[str, Any], no_charts: None, tmp_path: Path) -> None:
    """None is left out."""
    markdown = rendered(record, tmp_path)

    for row in [*record["rows"], *record["open_loop"]]:
        for caveat in row["caveats"]:
            assert caveat["detail"] in markdown and record["advice"][caveat["name"]] in markdown
    assert all(line in markdown for line in record["caveats"])


def test_an_interrupted_record_says_so_and_renders(record: dict[str, Any], no_charts: None, tmp_path: Path) -> None:
    """Even before the first point, and with points of one deployment only."""
    changed = {**record, "complete": False, "rows": record["rows"][:1], "open_loop": [], "in_process": {}}
    assert "Interrupted: not all points are here." in rendered(changed, tmp_path / "one")

    changed["rows"], changed["ceiling"] = [], {}
    assert "Interrupted" in rendered(changed, tmp_path / "none")
    assert [section.title for section in report_sections.sections(changed)] == ["What was compared", "To read it right"]


def test_deployments_are_compared_at_clients_that_all_of_them_have(
    record: dict[str, Any], no_charts: None, tmp_path: Path
) -> None:
    """A quick run, or an interrupted one, may have measured fewer of the slow ones."""
    changed = copy.deepcopy(record)
    changed["rows"] = [row for row in changed["rows"] if row["deployment"] == "text_classifier" or row["clients"] <= 8]

    assert "At 8 clients" in rendered(changed, tmp_path)


def test_what_is_unknown_is_never_a_number(record: dict[str, Any], no_charts: None, tmp_path: Path) -> None:
    """No p99, no utilization, no passes: n/a."""
    changed = copy.deepcopy(record)
    for row in changed["rows"]:
        row["latency_ms"]["p99"] = row["cpu_percent"] = row["forward_passes"] = None

    markdown = rendered(changed, tmp_path)

    assert "| p99 latency, ms | n/a | n/a | n/a | n/a | n/a |" in markdown


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "is missing: make perf writes one"),
        ("{", "cannot be read"),
        ("[]", "is not an experiment's record"),
        ('{"rows": []}', "is not an experiment's record"),
        ('{"kind": "experiment", "schema": 0}', "is of schema 0, and this version reads 1: run make perf again"),
        ('{"kind": "experiment"}', "is of schema None"),
        ('{"kind": "experiment", "schema": 1, "command": ""}', "created is missing or not a str"),
    ],
)
def test_what_is_no_record_of_this_version_is_refused(
    content: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1, the file by its name, and what to do; nothing is written."""
    file = tmp_path / "experiment.json"
    if content is not None:
        file.write_text(content)

    assert main(["report", str(file), "--output", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert words in error and str(file) in error and not (tmp_path / "out").exists()
