# SPDX-License-Identifier: Apache-2.0
"""Sick models are healed and busy ones are left alone: what is decided, with a server that only pretends to be one.

The real server's stubs are killed in tests/test_faults.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import copy_of_repository
from fake_engine import install_export

from ensemble.contract import Contract
from ensemble.errors import ServerError
from ensemble.launcher import supervisor as module
from ensemble.launcher.pipeline_question import PipelineQuestion
from ensemble.launcher.server_api import NoAnswer, Refused, Tensor
from ensemble.launcher.stubs import stubs_of
from ensemble.launcher.supervisor import Patience, Supervisor

DEAD = "Failed to process the request(s) for model instance '{}_0_0', message: Stub process '{}_0_0' is not healthy."


class PretendedServer:
    """A server and its API. Ends by itself after so many looks, which is how a test gets out of run().

    errors: what the next inferences of a model end in; a callable is asked each time
    """

    def __init__(self, repository: Path, looks: int = 12) -> None:
        self.options = SimpleNamespace(repository=repository)
        self.api = self
        self.pid = 1
        self.looks = looks
        self.pauses: list[float] = []
        self.calls: list[str] = []
        self.errors: dict[str, list[Exception]] = {}
        self.alive = {"tokenizer": {11}, "classifier": {12}}
        self.index = {"tokenizer": "READY", "classifier": "READY", "text_classifier": "READY"}
        self.ended = {"tokenizer": 0, "classifier": 0}
        self.load_errors: list[Exception] = []
        self.copies: dict[str, int] = {}
        self.revives = True

    def wait(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.looks -= 1
        if self.looks < 0:
            raise ServerError("the server ended by itself")
        time.sleep(min(seconds, 0.01))

    def infer(self, model: str, inputs: list[Tensor], seconds: float) -> list[Tensor]:
        if self.errors.get(model):
            raise self.errors[model].pop(0)
        names = {"tokenizer": ("input_ids", "length_carrier", "num_tokens", "truncated")}
        return [
            {"name": name, "shape": [1, 2], "datatype": "INT64", "data": [1, 2]}
            for name in names.get(model, ("logits", "probabilities"))
        ]

    def executions(self, model: str) -> int:
        return self.ended[model]

    def states(self) -> dict[str, str]:
        return self.index

    def unload(self, model: str) -> None:
        self.calls.append(f"unload {model}")

    def load(self, model: str, seconds: float) -> None:
        self.calls.append(f"load {model}")
        if self.load_errors:
            raise self.load_errors.pop(0)
        if self.revives:
            self.alive[model] = set(range(100, 100 + self.copies.get(model, 1)))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    install_export(repository := copy_of_repository(tmp_path / "model_repository"))
    return repository


@pytest.fixture
def server(repository: Path, monkeypatch: pytest.MonkeyPatch) -> PretendedServer:
    server = PretendedServer(repository)
    killed = server.calls
    monkeypatch.setattr(module, "stubs_of", lambda pid: {name: pids for name, pids in server.alive.items() if pids})
    monkeypatch.setattr(module.os, "kill", lambda pid, number: killed.append(f"kill {pid}"))
    return server


@pytest.fixture
def watched(server: PretendedServer) -> Callable[..., str]:
    """Runs the supervisor until it raises; the message. What it logged is in its `log`."""

    def run(**patience: float) -> str:
        supervisor = Supervisor(server, Contract.read(server.options.repository, "cpu"), run.log.append)
        supervisor.patience = Patience(**{"look_seconds": 0.001, "ask_seconds": 0.0, **patience})
        run.begun()
        with pytest.raises(ServerError) as caught:
            supervisor.run()
        return str(caught.value)

    run.log = []
    run.begun = lambda: None
    return run


def test_a_server_in_health_is_left_alone(server: PretendedServer, watched) -> None:
    """Nothing is unloaded, nothing logged; when it ends by itself, that is what is said."""
    assert watched() == "the server ended by itself"
    assert (server.calls, watched.log) == ([], [])


def test_a_model_whose_process_is_gone_is_healed(server: PretendedServer, watched) -> None:
    """Without waiting for an inference to fail; one line says so."""
    watched.begun = lambda: server.alive.update(tokenizer=set())

    watched()

    assert server.calls == ["unload tokenizer", "load tokenizer"]
    (line,) = watched.log
    assert line.startswith("healed tokenizer in 0.") and line.endswith("(its process died); 1 since the server started")


def test_two_models_that_die_at_once_are_both_healed(server: PretendedServer, watched) -> None:
    """One after the other."""
    watched.begun = lambda: server.alive.update(tokenizer=set(), classifier=set())

    watched()

    assert server.calls == ["unload tokenizer", "load tokenizer", "unload classifier", "load classifier"]


def test_a_model_of_several_processes_is_healed_if_one_is_gone(server: PretendedServer, watched) -> None:
    """What is left of it is ended first: it could still answer for the old one."""
    server.alive["classifier"] = {12, 13}
    server.copies["classifier"] = 2
    watched.begun = lambda: server.alive.update(classifier={13})

    watched()

    assert server.calls == ["kill 13", "unload classifier", "load classifier"]


@pytest.mark.parametrize("state", ["UNAVAILABLE", "UNLOADING", "LOADING"])
def test_a_model_that_somebody_unloaded_is_left_alone(server: PretendedServer, watched, state: str) -> None:
    """Whoever has the key has a reason."""
    watched.begun = lambda: server.alive.update(tokenizer=set())
    server.index["tokenizer"] = state

    watched()

    assert server.calls == []


@pytest.mark.parametrize("model", ["tokenizer", "classifier"])
def test_a_model_that_the_server_calls_unhealthy_is_healed_at_once(
    server: PretendedServer, watched, model: str
) -> None:
    """Its process may be there and stand still; the error of the ensemble names the model."""
    server.errors["text_classifier"] = [Refused(DEAD.format(model, model))]
    (stub,) = server.alive[model]

    watched()

    assert server.calls == [f"kill {stub}", f"unload {model}", f"load {model}"]


def test_an_error_heals_the_step_that_gives_it_when_it_comes_again(server: PretendedServer, watched) -> None:
    """Once may be chance. The steps are asked one by one, so it is known which."""
    internal = "internal error (RuntimeError); see the server's log"
    server.errors["text_classifier"] = [Refused(internal)]
    server.errors["classifier"] = [Refused(internal)]
    watched()
    assert server.calls == []

    server.looks = 12
    server.errors["text_classifier"] = [Refused(internal), Refused(internal)]
    server.errors["classifier"] = [Refused(internal), Refused(internal)]
    watched()
    assert server.calls == ["kill 12", "unload classifier", "load classifier"]


@pytest.mark.parametrize(
    "refusal",
    [
        "Request timeout expired",
        "Request for unknown model: 'tokenizer' has no available versions",
    ],
)
def test_a_refusal_is_no_fault(server: PretendedServer, watched, refusal: str) -> None:
    """However often it comes."""
    server.errors["text_classifier"] = [Refused(refusal)] * 100

    watched()

    assert (server.calls, watched.log) == ([], [])


SLOW = pytest.mark.parametrize(
    "error",
    [NoAnswer("no answer within 5 s"), Refused("Exceeds maximum queue size: 512 rows (max_waiting_rows) wait already")],
    ids=["no answer", "a full queue"],
)


@SLOW
def test_a_slow_answer_is_no_fault_while_batches_end(server: PretendedServer, watched, error: Exception) -> None:
    """A queue of minutes is load, and so is one that is full."""
    server.errors["text_classifier"] = [error] * 100
    server.looks = 40
    counting = server.executions
    server.executions = lambda model: server.ended.update({model: counting(model) + 1}) or counting(model)

    watched(stuck_seconds=0.02)

    assert server.calls == []


@SLOW
def test_a_model_that_ends_no_batch_is_ended_and_healed(server: PretendedServer, watched, error: Exception) -> None:
    """It hangs: its process is there, and the server calls it healthy. The first of the steps holds up the others.

    The tokenizer in front of it goes on, and ends batches by refusing them.
    """
    server.errors["text_classifier"] = [error] * 30
    server.looks = 40
    server.executions = lambda model: (
        server.ended.update(tokenizer=server.ended["tokenizer"] + 1) or server.ended[model]
    )

    watched(stuck_seconds=0.03, held_seconds=0.0, heals=100)

    assert server.calls[:3] == ["kill 12", "unload classifier", "load classifier"]
    assert "no answer and no batch ended for 0 s" in watched.log[0]


def test_a_model_that_cannot_be_loaded_is_tried_again_and_then_given_up(server: PretendedServer, watched) -> None:
    """With longer and longer pauses, a line for each; the end is one line with the server's reason."""
    watched.begun = lambda: server.alive.update(tokenizer=set())
    server.load_errors = [Refused("failed to load 'tokenizer', model.onnx is missing")] * 100
    server.looks = 100

    message = watched()

    assert message == (
        "giving up: tokenizer was loaded anew 6 times within 300 s and is sick again (it could not be loaded anew: "
        "failed to load 'tokenizer', model.onnx is missing): see the log above, then start the server again"
    )
    assert server.calls == ["unload tokenizer", "load tokenizer"] * 6
    assert [pause for pause in server.pauses if pause > 0.001] == [1.0, 2.0, 4.0, 8.0, 8.0]
    assert [line.split(":")[0] for line in watched.log] == ["tokenizer is still sick"] * 6


def test_a_load_that_failed_once_is_made_good(server: PretendedServer, watched) -> None:
    """After a pause of a second."""
    watched.begun = lambda: server.alive.update(tokenizer=set())
    server.load_errors = [Refused("no memory")]

    watched()

    assert server.calls == ["unload tokenizer", "load tokenizer"] * 2
    assert [line.split(" in ")[0] for line in watched.log] == [
        "tokenizer is still sick: it could not be loaded anew: no memory",
        "healed tokenizer",
    ]


def test_a_model_that_dies_again_and_again_is_given_up(server: PretendedServer, watched) -> None:
    """Though it could be loaded each time: something kills it."""
    watched.begun = lambda: server.alive.update(tokenizer=set())
    server.revives = False
    server.looks = 1000

    assert watched(held_seconds=0.0, heals=3) == (
        "giving up: tokenizer was loaded anew 3 times within 300 s and is sick again (its process died): see the log "
        "above, then start the server again"
    )
    assert [line.split(" in ")[0] for line in watched.log] == ["healed tokenizer"] * 3


def test_an_ensemble_that_fails_though_its_steps_answer_is_given_up(server: PretendedServer, watched) -> None:
    """There is nothing to heal, and it would fail for ever."""
    server.errors["text_classifier"] = [Refused("in ensemble 'text_classifier', unexpected shape")] * 100

    assert watched() == (
        "giving up: text_classifier fails, though its steps answer (in ensemble 'text_classifier', unexpected shape): "
        "start the server again"
    )


def _append(file: Path, text: str) -> None:
    file.write_text(file.read_text() + text)


@pytest.mark.parametrize("change", ["another export", "an edited config", "an edited handler", "nothing is left"])
def test_a_model_is_not_healed_from_other_files(
    server: PretendedServer, watched, repository: Path, change: str
) -> None:
    """It would not fit the models that still run: the server ends, and whoever starts it again gets all of the new."""

    def meanwhile() -> None:
        artifacts = repository / "text_classifier/artifacts"
        if change == "another export":
            (artifacts / "20270101T000000-00000000").mkdir()
            (artifacts / "current").unlink()
            (artifacts / "current").symlink_to("20270101T000000-00000000")
        elif change == "an edited config":
            _append(repository / "tokenizer/config.pbtxt", "# edited\n")
        elif change == "an edited handler":
            _append(repository / "classifier/1/model.py", "# edited\n")
        else:
            (artifacts / "current").unlink()
        server.alive["tokenizer"] = set()

    watched.begun = meanwhile

    assert watched() == (
        "giving up: tokenizer is sick (its process died), and the repository no longer holds what this server was "
        "started with: start it again"
    )
    assert server.calls == []


def test_a_server_that_ends_while_a_model_is_healed_is_what_is_said(server: PretendedServer, watched) -> None:
    """Not that the model could not be loaded."""
    watched.begun = lambda: server.alive.update(tokenizer=set())

    def gone(model: str, seconds: float) -> None:
        server.looks = 0
        raise NoAnswer("no answer within 120 s")

    server.load = gone

    assert watched() == "the server ended by itself"


def test_the_first_answer_is_held_against_the_labels(server: PretendedServer, repository: Path) -> None:
    """A server that would give no labels, or none at all, never says that it is ready."""
    question = PipelineQuestion(server, Contract.read(repository, "cpu"))

    question.check_answer(2, 1.0)
    with pytest.raises(ServerError, match="answers with 2 probabilities, labels.txt has 3 labels: run make export"):
        question.check_answer(3, 1.0)
    server.errors["text_classifier"] = [Refused("out of memory")]
    with pytest.raises(ServerError, match=r"is ready and does not classify \(out of memory\): see its log above"):
        question.check_answer(2, 1.0)


def test_a_process_without_stubs_has_none() -> None:
    """Nor has one that does not exist."""
    assert stubs_of(os.getpid()) == {}
    assert stubs_of(2**22 - 1) == {}
