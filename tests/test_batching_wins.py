# SPDX-License-Identifier: Apache-2.0
"""Whether batching pays: the measurements run, check what they measure, and say where a goal is missed. No timings."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import BertForSequenceClassification

from ensemble.errors import ConfigError, PipelineError
from ensemble.handlers.onnx_classifier import OnnxClassifier
from ensemble.handlers.packing import Ids
from ensemble.launcher.server import Server
from perf import batching_wins, losing_mix
from perf.hugging_face_graph import HuggingFaceGraph
from perf.in_process import classifier


def parsed(module: object, *given: str) -> object:
    parser = ArgumentParser()
    parser.add_argument("--repository", type=Path)
    module.add_arguments(parser)
    return parser.parse_args(given)


@pytest.fixture(scope="module")
def classify(repository: Path) -> OnnxClassifier:
    return classifier(repository)


def test_the_hugging_face_graph_answers_as_the_model_does(small_model: Callable[..., Path], tmp_path: Path) -> None:
    """A row at a time, whatever its length."""
    folder = small_model()
    rows = [np.arange(1000, 1000 + length) for length in (1, 7, 64)]

    found = HuggingFaceGraph(folder, tmp_path, None)(rows)

    model = BertForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        expected = np.concatenate([model(torch.from_numpy(row)[None]).logits.numpy() for row in rows])
    assert np.abs(found - expected).max() < 1e-4


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    """With the folder's name."""
    with pytest.raises(ConfigError, match="is no Hugging Face model"):
        HuggingFaceGraph(tmp_path / "none", tmp_path, None)


def test_a_round_has_every_figure(server: Server, repository: Path, classify: OnnxClassifier) -> None:
    """Of a real server, with the served graph in the place of the Hugging Face one."""
    exported = lambda rows: np.concatenate([classify([row]).logits for row in rows])  # noqa: E731
    subject = batching_wins.Subject(server.url, repository, classify, exported)

    figures = batching_wins.measured(subject, 8)

    assert figures.keys() == batching_wins.GOALS.keys()
    assert all(np.isfinite(value) for value in figures.values())
    assert all(figures[name] > 0 for name in figures if name != "one_client_ms")


def test_another_models_answers_get_no_speed(server: Server, repository: Path, classify: OnnxClassifier) -> None:
    """A folder that is not what was exported into the repository would be a wrong comparison."""
    exported = lambda rows: np.ones((len(rows), 2), dtype=np.float32)  # noqa: E731

    with pytest.raises(PipelineError, match=r"the Hugging Face model's logits .* no speed is reported"):
        batching_wins.measured(batching_wins.Subject(server.url, repository, classify, exported), 8)


def test_missed_goals_are_called_that(
    server: Server, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """The median of the rounds counts, without the first, which warms up; all rounds are told and recorded."""
    rounds = iter([9.0, 1.0, 3.0, 2.0])
    running = SimpleNamespace(url=server.url, start=lambda: None, kill=lambda: None)
    monkeypatch.setattr(batching_wins, "open_server", lambda *args: (running, None))
    monkeypatch.setattr(batching_wins, "HuggingFaceGraph", lambda *args: None)
    monkeypatch.setattr(batching_wins, "measured", lambda *args: dict.fromkeys(batching_wins.GOALS, next(rounds)))

    given = ("--repository", str(repository), "--rounds", "3", "--json", str(tmp_path / "wins.json"))
    batching_wins.run(parsed(batching_wins, *given))

    printed = capsys.readouterr().out
    assert printed.count("2.00") == 10 and printed.count("(missed)") == 0 and "1.00, 3.00, 2.00" in printed
    rounds = iter([9.0, 0.5, 0.5, 0.5])
    batching_wins.run(parsed(batching_wins, *given))
    assert capsys.readouterr().out.count("0.50 (missed)") == 3
    assert json.loads((tmp_path / "wins.json").read_text())["figures"]["tail_p99"] == [0.5, 0.5, 0.5]


class Sleeper:
    """A classifier that takes its time by the tokens, and more than it should for some batches; and the clock of that."""

    def __init__(self, dear: Callable[[Sequence[Ids]], bool]) -> None:
        self._dear, self._now = dear, 0.0

    def clock(self) -> float:
        return self._now

    def __call__(self, rows: Sequence[Ids]) -> SimpleNamespace:
        tokens = sum(map(len, rows))
        self._now += 2e-4 + tokens * 4e-6 * (3 if self._dear(rows) else 1)
        return SimpleNamespace(logits=np.zeros((len(rows), 2), dtype=np.float32))


@pytest.mark.parametrize(
    ("dear", "says"),
    [
        (lambda rows: False, "none found that loses"),
        (lambda rows: len(rows) > 1 and len(rows[-1]) > 300, "below the floor"),
    ],
    ids=["sound", "dear"],
)
def test_the_search_finds_a_mix_that_loses_and_none_where_there_is_none(
    dear: Callable[[Sequence[Ids]], bool], says: str, skeleton: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    """Its worst mixes are measured again, and told with their lengths."""
    sleeper = Sleeper(dear)
    monkeypatch.setattr(losing_mix, "classifier", lambda repository: sleeper)
    monkeypatch.setattr(losing_mix, "time", SimpleNamespace(monotonic=sleeper.clock, perf_counter=sleeper.clock))
    monkeypatch.setattr(losing_mix, "ROUNDS", 1)
    monkeypatch.setattr(losing_mix, "LOOKS", 1)

    given = ("--repository", str(skeleton), "--seconds", "0.5", "--json", str(tmp_path / "mix.json"))
    losing_mix.run(parsed(losing_mix, *given))

    assert says in " ".join(capsys.readouterr().out.split())
    worst = json.loads((tmp_path / "mix.json").read_text())["worst"]
    assert (min(one["ratio"] for one in worst) < 0.95) is (says == "below the floor")


def test_a_batch_that_answers_otherwise_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then its speed is of no interest."""
    search = losing_mix.Search(Sleeper(lambda rows: False), np.random.default_rng(1), 512)
    wrong = lambda rows: SimpleNamespace(logits=np.full((len(rows), 2), len(rows), dtype=np.float32))  # noqa: E731
    monkeypatch.setattr(search, "_classify", wrong)

    with pytest.raises(PipelineError, match="a batch's logits differ"):
        search.in_turn((8, 16))


def test_mixes_stay_within_what_a_batch_may_hold() -> None:
    """Two rows at least, 64 at most, and no more tokens than asked for."""
    search = losing_mix.Search(Sleeper(lambda rows: False), np.random.default_rng(1), 600)

    for _ in range(200):
        mix = search._within(np.random.default_rng().uniform(0, 800, 80))
        assert 2 <= len(mix) <= 64 and min(mix) >= 1 and max(mix) <= 512
        assert sum(mix) <= 600 or len(mix) == 2
