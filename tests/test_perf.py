# SPDX-License-Identifier: Apache-2.0
"""The measurements run, and say why when they cannot. What they measure is no test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_repository import small_repository

from ensemble.launcher.server import Server
from perf import closed_loop
from perf.__main__ import main
from perf.cost_model import SHAPES, fit


@pytest.fixture
def small(small_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is measured is no test, so a small model will do."""
    return small_repository(small_model, tmp_path_factory)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["long-tail", "--rounds", "1"], ["63 short texts", "all 64, planned", "over the sum"]),
        (["served-ratio", "--rounds", "1", "--texts", "64"], ["in-process/s", "served/s", "mixed: mean"]),
        (["cost-model", "--rounds", "1"], ["attention_cost", "pass_cost", "tokens/s"]),
    ],
)
def test_a_measurement_prints_its_table(
    small: Path, arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 0 and the figures by name."""
    assert main([*arguments, "--repository", str(small)]) == 0

    printed = capsys.readouterr().out
    assert all(word in printed for word in words)


@pytest.mark.parametrize("measurement", ["long-tail", "served-ratio", "cost-model"])
def test_a_repository_without_a_model_is_an_error(
    measurement: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that names the file, exit code 1."""
    assert main([measurement, "--repository", str(tmp_path)]) == 1

    assert "is missing" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [1.0, float("nan")])
def test_wrong_answers_get_no_speed(
    wrong: float,
    repository: Path,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A served answer that differs from the in-process one is an error instead of a figure."""
    running = SimpleNamespace(url=server.url, start=lambda: None, stop=lambda: None)
    monkeypatch.setattr("perf.served_ratio.open_server", lambda *_: (running, None))
    real = closed_loop.run
    monkeypatch.setattr(
        "perf.closed_loop.run",
        lambda *args, **kwargs: (lambda seconds, logits: (seconds, logits + wrong))(*real(*args, **kwargs)),
    )

    assert main(["served-ratio", "--rounds", "1", "--texts", "64", "--repository", str(repository)]) == 1
    printed = capsys.readouterr()
    assert "served logits differ" in printed.err and "served/s" not in printed.out


def test_the_fit_recovers_the_cost_model_it_is_given() -> None:
    """Times made from known costs give those costs back."""
    seconds = [1e-4 * (rows * length + 0.002 * rows * length**2 + 40) for rows, length in SHAPES]

    assert fit(seconds) == pytest.approx((0.002, 40, 1e-4))
