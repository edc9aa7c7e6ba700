# SPDX-License-Identifier: Apache-2.0
"""deploy/RUNBOOK.md names things that exist: commands, options, panels, settings, lines of the log, links."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from ensemble.launcher.server import Server

DEPLOY = ROOT / "deploy"
RUNBOOK = (DEPLOY / "RUNBOOK.md").read_text(encoding="utf-8")
ENTRIES = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", RUNBOOK, re.MULTILINE | re.DOTALL))
QUESTIONS = [line.split("  #")[0] for line in RUNBOOK.split("```sh\n")[2].split("```")[0].splitlines()]
COMMANDS = sorted({line.strip() for line in re.findall(r"\.venv/bin/python -m ([^`#\n]+)", RUNBOOK)})


def anchor(heading: str) -> str:
    return heading.lower().replace(" ", "-")


@pytest.mark.parametrize("heading", ENTRIES)
def test_every_entry_says_where_to_look_and_what_to_do(heading: str) -> None:
    """A symptom in words, then both."""
    entry = ENTRIES[heading]

    assert re.match(r"\n[`\w]", entry)
    assert "- **Look at** " in entry and "- **Do**" in entry


def test_every_link_leads_somewhere() -> None:
    """Files, and headings of this one."""
    links = re.findall(r"\]\(([^)]+)\)", RUNBOOK)

    assert links
    for link in links:
        file, _, heading = link.partition("#")
        assert (DEPLOY / file).exists(), link
        assert not heading or heading in map(anchor, ENTRIES), link


def test_every_panel_that_is_named_is_on_the_dashboard() -> None:
    """What stands in quotation marks after "Look at" with a capital, and no sentence of a log."""
    titles = {panel["title"] for panel in json.loads((DEPLOY / "grafana/onepass.json").read_text())["panels"]}
    named = set(re.findall(r'"([A-Z][a-z]+(?: [a-z]+)*)"', RUNBOOK)) - {"Exceeds maximum queue size"}

    assert len(named) > 5
    assert named <= titles


@pytest.mark.parametrize(
    "line", ["failed and runs one by one", "healed ", "is still sick", "MB free", "Exceeds maximum queue size"]
)
def test_lines_of_the_log_are_those_that_are_written(line: str) -> None:
    """Each is in the runbook, and in the code that writes it."""
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "ensemble").rglob("*.py"))

    assert line.strip() in RUNBOOK
    assert line in code


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_ours_takes_these_options(command: str) -> None:
    """Its --help knows each of them."""
    package, name, *arguments = shlex.split(command.replace("$", ""))
    result = subprocess.run([sys.executable, "-m", package, name, "--help"], capture_output=True, text=True)

    assert result.returncode == 0, result.stderr
    for option in (argument for argument in arguments if argument.startswith("--")):
        assert option in result.stdout, option


def test_every_make_target_and_setting_exists() -> None:
    """`make doctor URL=... MODEL_NAME=...` and its like."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"(?:^|`)make ([a-z-]+)((?: [A-Z_]+=[^\s`]+)*)", RUNBOOK, re.MULTILINE)

    assert targets
    for target, settings in targets:
        assert re.search(rf"^{target}:.*##", makefile, re.MULTILINE), target
        for setting in re.findall(r"([A-Z_]+)=", settings):
            # RELEASE and its like are compose.yaml's.
            assert re.search(rf"\b{setting}\b", makefile + (ROOT / "compose.yaml").read_text()), setting


def test_the_first_questions_can_be_asked(server: Server) -> None:
    """All but the doctor's, whose load has tests of its own, as they stand in the runbook."""
    addresses = f"HTTP=127.0.0.1:{server.http_port} GRPC={server.url} METRICS=127.0.0.1:{server.metrics_port}\n"
    probe, metrics, stats, doctor = QUESTIONS
    assert doctor.startswith("make doctor ")

    def ask(question: str) -> str:
        script = addresses + question.replace(".venv/bin/python", shlex.quote(sys.executable))
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
        ).stdout

    ask(probe)
    assert 'onepass_model_start_time_seconds{model="tokenizer"}' in ask(metrics)
    assert {model["name"] for model in json.loads(ask(stats))["model_stats"]} >= {"tokenizer", "classifier"}


def test_what_readme_lists_is_there() -> None:
    """Every name at the left of deploy/README.md's tree, and every folder of deploy/ in it."""
    readme = (DEPLOY / "README.md").read_text(encoding="utf-8")
    tree = re.findall(r"^    ( *)(\S+)  ", readme, re.MULTILINE)
    folder = Path()
    for indent, name in tree:
        folder = folder if indent else Path(name)
        assert (DEPLOY / (folder / name if indent else name)).exists(), name

    assert {f"{path.name}/" for path in DEPLOY.iterdir() if path.is_dir()} <= {name for _, name in tree}
