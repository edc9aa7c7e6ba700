# SPDX-License-Identifier: Apache-2.0
"""Kills of the server's Python processes under load, short, through a server of their own; and when it is back."""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest

from perf.__main__ import main
from perf.endurance import kills as module
from perf.endurance.kills import ANSWERS, End, Kill, Kills, Launched, add_arguments, back_after


def test_every_step_is_killed_and_comes_back(repository: Path, tmp_path: Path, capsys) -> None:
    """One kill of each: the launcher heals it, no answer is wrong, no request outlives its deadline."""
    file = tmp_path / "kills.json"

    code = main(
        ["kills", "--repository", str(repository), "--output", str(file), "--times", "1", "--within", "60",
         "--distinct", "30", "--clients", "6"]
    )  # fmt: skip

    result = json.loads(file.read_text())
    assert (code, result["verdict"], result["failed"]) == (0, "holds", []), result.get("log")
    assert sorted((kill["step"], kill["killed"] > 0) for kill in result["kills"]) == [
        ("classifier", True),
        ("tokenizer", True),
    ]
    assert result["counts"]["wrong"] == 0 and result["counts"]["texts_compared"] >= 4 * ANSWERS
    assert "tokenizer" in capsys.readouterr().out


def answers(*sent: float) -> list[End]:
    return [End(at, at + 0.5, answered=True) for at in sent]


def test_back_is_the_first_answer_behind_the_last_error() -> None:
    """Also where an answer came in between; what was underway at the kill does not count."""
    underway = [End(9.0, 29.0, answered=False), End(9.9, 10.1, answered=True)]
    errors = [End(11.0, 11.1, answered=False), End(13.0, 13.1, answered=False)]
    after = answers(*range(14, 14 + ANSWERS))

    assert back_after([*underway, errors[0], *answers(12.0), errors[1], *after], since=10.0) == 4.5


def test_back_needs_enough_answers() -> None:
    """One fewer could be luck."""
    assert back_after(answers(*range(11, 10 + ANSWERS)), since=10.0) is None
    assert back_after([*answers(*range(11, 60)), End(70.0, 70.1, answered=False)], since=10.0) is None


@pytest.fixture
def kills() -> Kills:
    """A run with nothing in it yet."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repository")
    add_arguments(parser)
    return Kills(parser.parse_args([]))


@pytest.mark.parametrize(
    ("kill", "ends", "failed"),
    [
        (Kill("tokenizer", 9.9, 1), [End(0.0, 24.0, answered=False)], []),
        (Kill("tokenizer", 10.1, 2), [], ["tokenizer, kill 1: back after 10.1 s"]),
        (Kill("classifier", None, 1), [], ["classifier, kill 1: not back"]),
        (Kill("classifier", 0.1, 0), [], ["classifier, kill 1: the step has no process that could be killed"]),
        (Kill("classifier", 1.0, 1), [End(0.0, 26.0, answered=False)], ["a request took 26.0 s, its deadline is 20 s"]),
    ],
)
def test_what_does_not_hold(kills: Kills, kill: Kill, ends: list[End], failed: list[str]) -> None:
    """A service that is back too late or not at all, nothing to kill, and a caller who waits past the deadline."""
    kills.kills.append(kill)
    kills._ends.extend(ends)

    assert kills.verdict().failed == failed


def test_a_server_that_does_not_come_back_is_not_killed_again(kills: Kills, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step's other kills are left out, and the verdict says so of the first."""
    backs, dead = iter([0.0, None, 0.0, None]), []
    monkeypatch.setattr(kills, "_await", lambda busy, since: next(backs))
    monkeypatch.setattr(kills, "_load", lambda *arguments: None)
    monkeypatch.setattr(module, "launched", lambda *arguments: nullcontext(Launched(0, "", "", 0, Path("/dev/null"))))
    monkeypatch.setattr(module, "stubs_of", lambda pid: {"a": [11], "b": [21, 22]})
    monkeypatch.setattr(module.os, "kill", lambda pid, number: dead.append(pid))
    monkeypatch.setattr(module, "open_server", lambda *arguments: (Mock(), Mock(classifier="onnx")))
    monkeypatch.setattr(
        module.Contract, "read", lambda *arguments: Mock(models=dict.fromkeys("ab", Mock(backend="python")))
    )
    monkeypatch.setattr(module.endurance, "prepared", lambda *arguments: None)
    monkeypatch.setattr(module.reference, "described", lambda expected: {})

    kills.measure(Mock())

    assert dead == [11, 21, 22]
    assert kills.verdict().failed == ["a, kill 1: not back", "b, kill 2: not back"]


def test_nothing_killed_is_no_verdict(kills: Kills) -> None:
    """Of a run that was broken off."""
    assert kills.verdict().exit_code == 2
