# SPDX-License-Identifier: Apache-2.0
"""Right answers under concurrency, short, through the session's server; and that a wrong one would be seen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from ensemble.errors import PipelineError
from ensemble.launcher.server import Server
from perf import interrupts
from perf.__main__ import main
from perf.endurance import exchange, reference, trial
from perf.endurance.reference import Answer, Reference
from perf.endurance.workers import workers

KNOWN = Reference(
    texts=["a", "b", "c"],
    labels=["no", "yes"],
    logits=np.array([[2, -2], [0, 0.5], [-1, 1]], dtype=np.float32),
    probabilities=np.array([[0.9, 0.1], [0.4, 0.6], [0.2, 0.8]], dtype=np.float32),
    num_tokens=[3, 700, 5],
    truncated=[False, True, False],
    tolerance=1e-4,
    dropped=0,
)
RIGHT = Answer(KNOWN.logits[[2, 0]], KNOWN.probabilities[[2, 0]], None, [5, 3], [False, False])
STRINGS = replace(
    RIGHT, probabilities=None, strings=[["0.800000:1:yes", "0.200000:0:no"], ["0.900000:0:no", "0.100000:1:yes"]]
)


@pytest.fixture
def command(repository: Path, tmp_path: Path):
    """The command on the session's model; its exit code and its record."""

    def run(*arguments: str) -> tuple[int, dict]:
        file = tmp_path / "correctness.json"
        code = main(["correctness", "--repository", str(repository), "--output", str(file), *arguments])
        return code, json.loads(file.read_text())

    return run


@pytest.mark.usefixtures("on_the_sessions_server")
def test_a_few_hundred_texts_are_answered_as_alone(command) -> None:
    """None wrong, none crossed, every text counted, single rows and many, short texts and cut ones.

    With this seed the clients' first requests are of every kind.
    """
    code, result = command("--texts", "300", "--distinct", "40", "--clients", "8", "--seed", "5")

    assert code == 0 and result["verdict"] == "holds" and result["complete"]
    counts = result["counts"]
    assert (counts["texts_compared"], counts["wrong"], counts["crossed"]) == (300, 0, 0)
    assert counts["outcomes"].keys() == {"1 rows", "2 to 8 rows", "9 to 64 rows"}
    assert result["reference"]["texts"] == 40 and result["reference"]["truncated"] >= 1


@pytest.mark.usefixtures("on_the_sessions_server")
def test_rows_that_change_places_are_crossed(command, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the server gave each row the next one's answer, the command would say so and fail."""
    real = exchange._answer

    def shifted(tensors) -> Answer:
        return real({name: np.roll(tensor, 1, axis=0) for name, tensor in tensors.items()})

    monkeypatch.setattr(exchange, "_answer", shifted)

    code, result = command("--texts", "60", "--distinct", "20", "--clients", "4")

    assert code == 1 and result["verdict"] == "fails"
    assert 0 < result["counts"]["crossed"] == result["counts"]["wrong"]
    assert "crossed: text " in result["counts"]["faults"][0]


@pytest.mark.usefixtures("on_the_sessions_server")
def test_an_interrupt_keeps_what_was_compared(command) -> None:
    """Ctrl-C in mid-run: exit code 130, and a record that says it is not complete."""
    threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT)).start()

    code, result = command("--texts", "1000000", "--distinct", "10", "--clients", "4")

    assert code == 130 and not result["complete"] and result["verdict"] == "cannot tell"
    assert result["counts"]["wrong"] == 0


def test_a_second_signal_ends_the_waiting_for_a_server_that_hangs() -> None:
    """Not one that comes with the first, as timeout(1) sends two; the exit code is that of the first."""
    process, ended, began = subprocess.Popen(["sleep", "60"]), [], time.monotonic()

    def end() -> None:
        ended.append(time.monotonic() - began)
        process.kill()

    def measure() -> None:
        with interrupts.ended_by(end), workers(1, lambda number, stop: process.wait()) as busy:
            for seconds, number in ((0.2, signal.SIGTERM), (0.3, signal.SIGINT), (1.5, signal.SIGINT)):
                threading.Timer(seconds, os.kill, (os.getpid(), number)).start()
            while busy(60):
                pass

    assert interrupts.kept(measure) == 143
    assert len(ended) == 1 and ended[0] > 1 and time.monotonic() - began < 30


def test_a_second_signal_kills_the_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """While it runs, and while it is stopped, which a server that hangs draws out."""
    server, known = Mock(), []
    server.stop.side_effect = lambda: known.append(list(interrupts._at_once))
    monkeypatch.setattr(trial, "open_server", lambda *arguments: (server, Mock()))

    with trial.started(tmp_path, "onnx"):
        known.append(list(interrupts._at_once))

    assert known == [[server.end_processes]] * 2 and interrupts._at_once == []


def test_the_right_answer_has_no_fault() -> None:
    """As numbers and as label strings."""
    assert KNOWN.faults([2, 0], RIGHT) == [] == KNOWN.faults([2, 0], STRINGS)


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (replace(RIGHT, logits=RIGHT.logits[::-1]), "crossed: text 2 got text 0's answer"),
        (replace(RIGHT, logits=RIGHT.logits + np.float32(0.01)), "wrong: text 2: ['logits']"),
        (replace(RIGHT, logits=RIGHT.logits * np.float32("nan")), "wrong: text 2: ['logits']"),
        (replace(RIGHT, logits=RIGHT.logits[:, :1]), "wrong: text 2: ['logits']"),
        (replace(RIGHT, probabilities=RIGHT.probabilities[:, ::-1]), "wrong: text 2: ['probabilities']"),
        (replace(RIGHT, num_tokens=[6, 3]), "wrong: text 2: ['num_tokens']"),
        (replace(RIGHT, truncated=[True, False]), "wrong: text 2: ['truncated']"),
        (replace(RIGHT, logits=RIGHT.logits[:1]), "wrong: 1 rows came back for 2 texts"),
        (replace(STRINGS, strings=[["0.800000:1:no", "0.200000:0:yes"], STRINGS.strings[1]]), "wrong: text 2: ['probabilities']"),
        (replace(STRINGS, strings=[["0.200000:0:no", "0.800000:1:yes"], STRINGS.strings[1]]), "wrong: text 2: ['probabilities']"),
        (replace(STRINGS, strings=[["0.800000:1:yes"], STRINGS.strings[1]]), "wrong: text 2: ['probabilities']"),
        (replace(STRINGS, strings=[["0.700000:1:yes", "0.200000:0:no"], STRINGS.strings[1]]), "wrong: text 2: ['probabilities']"),
    ],
    ids=["crossed", "logits", "NaN", "too few labels", "probabilities", "num_tokens", "truncated", "too few rows",
         "label names", "label order", "a label missing", "label values"],
)  # fmt: skip
def test_each_part_of_an_answer_is_compared(answer: Answer, fault: str) -> None:
    """A fault names the text and what differs; what is another text's is crossed."""
    assert KNOWN.faults([2, 0], answer)[0] == fault


def test_only_texts_that_can_be_told_apart_are_sent(repository: Path) -> None:
    """Any two differ by more than twice the tolerance, the same seed gives the same ones, and lengths reach past the cut."""
    built, again = (reference.build(repository, 25, 7, "onnx") for _ in range(2))

    apart = np.abs(built.logits[:, None] - built.logits[None]).max(axis=2)
    assert (apart[~np.eye(25, dtype=bool)] > 2 * built.tolerance).all()
    assert built.texts == again.texts and min(built.num_tokens) <= 6 < 64 < max(built.num_tokens)


def test_a_model_that_answers_all_texts_alike_is_refused(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a crossed answer could not be seen, nothing is claimed."""
    monkeypatch.setattr(reference.Oracle, "__call__", lambda self, text: (3, *np.zeros((2, 2), dtype=np.float32)))

    with pytest.raises(PipelineError, match="only 1 of 50 texts can be told apart .* ask for fewer texts"):
        reference.build(repository, 5, 1, "onnx")


@pytest.mark.parametrize("strings", [False, True])
@pytest.mark.parametrize("transport", exchange.TRANSPORTS)
def test_all_transports_give_the_same_answer(server: Server, repository: Path, transport: str, strings: bool) -> None:
    """gRPC, JSON and binary tensors over HTTP; numbers and label strings."""
    texts = ["a good film", "", "not at all \N{PILE OF POO}"]
    expected = reference.of_texts(repository, texts, "onnx")

    with exchange.Caller(server) as caller:
        answer = caller.ask(transport, texts, strings=strings, seconds=60)

    assert expected.faults([0, 1, 2], answer) == [] and (answer.strings is not None) == strings
