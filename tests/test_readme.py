# SPDX-License-Identifier: Apache-2.0
"""README's commands, run in order in the checkout, and its claims about the tree and the commands."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(sh|python)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
PORTS = (8000, 8001, 8002)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project as git has it, so that what is exported into the real checkout stays as it is.

    Shares what takes minutes to get and never changes: the environment and the download.
    """
    copy = tmp_path_factory.mktemp("readme") / "checkout"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    environment = Path(sys.prefix)
    (copy / ".venv").symlink_to(environment)
    if not (environment / "installed").exists():
        pytest.skip("needs the environment that make makes: run make test")
    (copy / "build").mkdir()
    (copy / "build/download").symlink_to(ROOT / "build/download")
    return copy


@pytest.fixture
def background() -> Iterator[list[subprocess.Popen]]:
    """Servers that a block starts; stopped as a person would, by Ctrl-C."""
    for port in PORTS:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                pytest.skip(f"README's commands use port {port}, which something else on this machine has")
    started: list[subprocess.Popen] = []
    yield started
    for process in started:
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=60)


def test_every_block_runs(checkout: Path, background: list[subprocess.Popen]) -> None:
    """Shell and Python blocks in order; `make serve` in the background; `make test` is what runs this."""
    assert len(BLOCKS) >= 6
    for language, block in BLOCKS:
        if block == "make test\n":
            continue
        if block == "make serve\n":
            server = subprocess.Popen(
                ["make", "serve"], cwd=checkout, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
            background.append(server)
            while not (line := server.stdout.readline()).startswith("ready: "):
                assert line, "make serve ended"
            continue
        command = ["bash", "-euo", "pipefail", "-c", block] if language == "sh" else [sys.executable, "-c", block]
        result = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=600)
        assert result.returncode == 0, f"{block}\n{result.stdout}\n{result.stderr}"
        found = ("an engine of",) if block == "make compile-check\n" else ("positive", "negative")
        assert any(word in result.stdout + result.stderr for word in found)


def test_the_demo_prints_a_table_of_answers(checkout: Path) -> None:
    """A text of one's own, quotes and all: text, label, probability, tokens and latency."""
    text = """It's "quite" good; $HOME `pwd` [b]really[/b]."""

    result = subprocess.run(
        ["make", "demo", f"TEXT={text.replace('$', '$$')}"],
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "COLUMNS": "120"},
    )

    assert result.returncode == 0, result.stderr
    assert text in result.stdout
    for word in ("label", "probability", "tokens", "latency", "positive", " ms"):
        assert word in result.stdout


def test_the_demos_exit_code_is_right_when_it_cannot_start(tmp_path: Path) -> None:
    """A repository that is none: one line, exit code 1."""
    result = subprocess.run(
        [sys.executable, "-m", "ensemble", "demo", "--repository", str(tmp_path)], capture_output=True, text=True
    )

    assert result.returncode == 1
    assert result.stderr == f"error: {tmp_path}/text_classifier/config.pbtxt is missing: restore it from the project\n"


def test_the_tree_names_what_exists() -> None:
    """Every file in README's tree is in the checkout."""
    tree = README.split("## The tree")[1].split("## Limits")[0]
    folder = ""
    for line in tree.splitlines():
        if not line.strip():
            continue
        names = line.split("  ")[2 if line.startswith("    ") and not line.startswith("      ") else 3]
        for name in names.split(", "):
            if not line.startswith("      "):
                folder = name if name.endswith("/") else ""
            path = name if not line.startswith("      ") else folder + name
            assert list(ROOT.glob(path)), path


def test_make_lists_its_commands() -> None:
    """`make` alone is help, and names every command README does."""
    result = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True)

    assert result.returncode == 0
    for command in ("demo", "test", "check", "export", "serve", "clean"):
        assert f"make {command} " in result.stdout


def test_no_figure_is_left_open() -> None:
    """The table of measurements holds numbers, not names of numbers to come."""
    table = README.split("## Measured")[1].split("## The tree")[0]

    assert not re.search(r"\| [A-Z]+ \|", table)
