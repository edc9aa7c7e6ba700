# SPDX-License-Identifier: Apache-2.0
"""The doctor on the real server: it names the fault of each small deployment and finds none in sound ones. No timings."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path

import pytest
from conftest import serving
from doctor_deployments import IDS, RAGGED, STACK, config, handler, write, write_all

from ensemble.launcher.options import ServerOptions
from ensemble.launcher.server import Server
from perf.__main__ import main
from perf.doctor import examination
from perf.doctor.inputs import InputMaker, built_in_texts
from perf.doctor.load import drive
from perf.doctor.target import find

# Enough for a few batches of every kind.
SECONDS = "0.6"


@dataclass(frozen=True)
class Diagnosis:
    """What the command returned, wrote and printed."""

    code: int
    result: dict
    printed: str

    @property
    def faults(self) -> set[tuple[str, str]]:
        """(name, model) of each fault."""
        return {(one["name"], one["model"]) for one in self.result["verdicts"] if one["kind"] == "fault"}

    @property
    def names(self) -> list[str]:
        return [one["name"] for one in self.result["verdicts"]]

    def evidence(self, name: str) -> str:
        return "\n".join(line for one in self.result["verdicts"] if one["name"] == name for line in one["evidence"])


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """All the small deployments on one server."""
    repository = tmp_path_factory.mktemp("doctor") / "repository"
    repository.mkdir()
    names = write_all(repository)
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            # As others run theirs: what it serves is no secret.
            patch.setattr("ensemble.launcher.options.RESTRICTED", ("trace",))
            options = ServerOptions(repository, models=names, http_port=0, grpc_port=0, metrics_port=0)
            server = stack.enter_context(serving(options))
        yield server


@pytest.fixture(scope="module")
def examine(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Diagnosis]:
    """Runs the command, once for the same arguments."""

    @cache
    def run(server: Server, model: str, *options: str) -> Diagnosis:
        file = tmp_path_factory.mktemp("result") / "result.json"
        metrics = f"http://127.0.0.1:{server.metrics_port}/metrics"
        given = ["--url", server.url, "--model", model, "--metrics-url", metrics, "--seconds", SECONDS]
        printed = StringIO()
        with redirect_stdout(printed):
            code = main(["doctor", *given, "--json", str(file), *options])
        return Diagnosis(code, json.loads(file.read_text()), printed.getvalue())

    return run


@pytest.mark.parametrize(
    ("model", "name", "at_fault"),
    [
        ("looped", "batches taken apart", "looped"),
        ("looped_fixed", "batches taken apart", "looped_fixed"),
        ("no_dynamic_batching", "not batching", "no_dynamic_batching"),
        ("no_batch_dimension", "not batching", "no_batch_dimension"),
        ("rigid", "not batching", "rigid"),
        ("late", "queue-bound", "late"),
        ("overloaded", "queue-bound", "overloaded"),
        ("padded", "padding waste", "padded"),
        ("slow_text", "tokenizer-bound", "slow_tokenizer"),
        ("streamed", "not batching", "streamed"),
    ],
)
def test_names_the_fault_and_no_other(deployed: Server, examine, model: str, name: str, at_fault: str) -> None:
    """One fault in the deployment, one in the verdict, on the step that has it."""
    found = examine(deployed, model)

    assert found.faults == {(name, at_fault)}, found.printed
    assert found.code == 1 == found.result["exit_code"]
    assert f"fault: {name} ({at_fault}" in found.printed


@pytest.mark.parametrize("model", ["stacked", "classify", "quick_text", "side_by_side"])
def test_finds_none_in_a_sound_deployment(deployed: Server, examine, model: str) -> None:
    """Batches form and stay whole: exit code 0."""
    found = examine(deployed, model)

    assert found.faults == set(), found.printed
    assert found.code == 0, found.printed


def test_finds_the_projects_own_ensemble_healthy(server: Server, examine) -> None:
    """Its classifier's work grows with the batch on a CPU; that it is one pass or a few is counted by its metric."""
    found = examine(server, "text_classifier")

    assert found.code == 0, found.printed
    assert "onepass_model_calls_total" in found.evidence(found.names[0])


def test_the_handler_probe_finds_the_projects_own_handlers_sound(server: Server, examine) -> None:
    """One tokenizer call an execute(), and a pass or the few that a mix of lengths needs."""
    found = examine(server, "text_classifier", "--repository", str(server.options.repository))

    calls = {run["requests"]: run["tokenizer_calls"] for run in found.result["probes"]["tokenizer"]["runs"]}
    passes = {run["requests"]: run["passes"] for run in found.result["probes"]["classifier"]["runs"]}
    assert set(calls.values()) == {1}
    assert passes[1] == 1 <= passes[16] <= 8
    assert found.code == 0, found.printed


def test_says_at_which_lengths_a_batch_breaks(deployed: Server, examine) -> None:
    """The lengths that were sent, with a bar where one differs from the one before."""
    evidence = examine(deployed, "rigid").evidence("not batching")

    assert "a bar where a batch breaks: 19 | 6 | 37" in evidence
    assert "input_ids may differ in shape, without allow_ragged_batch" in evidence


def test_one_request_at_a_time_is_too_little_to_tell(deployed: Server, examine) -> None:
    """No batch can form, whatever the deployment: exit code 2."""
    found = examine(deployed, "stacked", "--clients", "1")

    assert (found.code, found.names) == (2, ["too little load to tell"])
    assert "--clients" in found.printed


@contextmanager
def traffic(server: Server, model: str, clients: int) -> Iterator[None]:
    """The user's own: so many clients, each waiting for its answer before it sends again."""
    target = find(server.url, model)
    inputs = InputMaker(target.config, built_in_texts())
    messages = [inputs.make(index).message(model) for index in range(16)]
    with ThreadPoolExecutor(1) as thread:
        # Until the watching is over: the last request of each is waited for.
        done = threading.Event()
        while_watched = thread.submit(_send, server.url, messages, clients, done) if clients else None
        yield
        done.set()
        if while_watched:
            assert while_watched.result() > 0


def _send(url: str, messages: list, clients: int, done: threading.Event) -> int:
    sent = 0
    while not done.is_set():
        sent += len(drive(url, messages, clients, 0.5, 10_000).latencies)
    return sent


WATCH = ("--watch-seconds", "1.5")


def test_a_client_that_sends_one_at_a_time_is_told_from_the_server(deployed: Server, examine) -> None:
    """Batches would form; it is the client that gives none the chance. Nothing is sent by the doctor itself."""
    with traffic(deployed, "stacked", 1):
        found = examine(deployed, "stacked", *WATCH)

    assert found.faults == {("not batching", "stacked")} and found.code == 1, found.printed
    assert "it is the client, not the server" in found.printed and "Nothing is sent" in found.printed
    assert [phase["name"] for phase in found.result["phases"]] == ["watched"]


def test_good_traffic_is_found_healthy(server: Server, examine) -> None:
    """Many clients and whole batches, by the handler's own count; and it is said what only a load would show."""
    with traffic(server, "text_classifier", 12):
        found = examine(server, "text_classifier", *WATCH)

    assert found.faults == set() and found.code == 0, found.printed
    assert "padding in the requests" in found.evidence("cannot tell")


def test_what_only_a_load_would_show_is_not_claimed_of_traffic(deployed: Server, examine) -> None:
    """A loop behind batches of one size looks like a machine at its ceiling: cannot tell, and how to find out."""
    with traffic(deployed, "looped_fixed", 8):
        found = examine(deployed, "looped_fixed", *WATCH)

    assert (found.code, found.faults) == (2, set()), found.printed
    assert "leave --watch-seconds out" in found.printed


def test_a_server_that_does_not_batch_is_found_by_its_traffic(deployed: Server, examine) -> None:
    """Requests wait, and each runs alone, because of the config."""
    with traffic(deployed, "no_dynamic_batching", 6):
        found = examine(deployed, "no_dynamic_batching", *WATCH)

    assert found.faults == {("not batching", "no_dynamic_batching")}, found.printed
    assert "the config has no dynamic_batching" in found.printed


def test_without_traffic_there_is_too_little_to_tell(deployed: Server, examine) -> None:
    """And what is needed to tell."""
    found = examine(deployed, "late", "--watch-seconds", "0.2")

    assert (found.code, found.names[0]) == (2, "too little load to tell")
    assert "watch while the clients send" in found.printed


def test_a_decoupled_model_is_loaded_over_streams(deployed: Server, examine) -> None:
    """Requests are counted and none fails; that its batches stay whole cannot be told by its times, and is not."""
    found = examine(deployed, "streamed_batches")

    assert (found.code, found.faults) == (2, set()), found.printed
    assert all(phase["failures"] == 0 < phase["answered"] for phase in found.result["phases"])
    assert "it is decoupled" in found.printed and "--repository" in found.printed


def test_the_handler_probe_turns_a_hint_into_proof(deployed: Server, examine) -> None:
    """With --repository: passes are counted, and the verdict is proved."""
    found = examine(deployed, "looped", "--repository", str(deployed.options.repository))

    (verdict,) = [one for one in found.result["verdicts"] if one["kind"] == "fault" and one["name"] != "padding waste"]
    assert (verdict["name"], verdict["certainty"]) == ("batches taken apart", "proved")
    assert "1: 1, 2: 2, 8: 8, 16: 16" in verdict["evidence"][0]
    assert "Running" in found.printed


def test_says_what_it_will_send_before_it_sends(deployed: Server, examine) -> None:
    """Seconds, requests, clients and the one host."""
    found = examine(deployed, "classify", "--clients", "8", "--requests", "96")

    assert found.printed.startswith(
        f"Sending to {deployed.url}, model classify, and to no other host: for at most {SECONDS} s"
    )
    assert "96 requests and 8 in flight" in " ".join(found.printed.split())
    assert sum(phase["answered"] for phase in found.result["phases"]) <= 96


def test_takes_requests_in_perf_analyzers_layout(deployed: Server, examine, tmp_path: Path, capsys) -> None:
    """A model that refuses made-up inputs is examined with the user's own."""
    refused = main(["doctor", "--url", deployed.url, "--model", "picky", "--seconds", "1"])
    error = capsys.readouterr().err
    file = tmp_path / "requests.json"
    file.write_text(json.dumps({"data": [{"input_ids": {"content": [42] * n, "shape": [n]}} for n in (4, 9, 6)]}))

    found = examine(deployed, "picky", "--input-data", str(file))

    assert refused == 2
    assert "picky refuses what the doctor sends" in error and "only 42 will do" in error and "--input-data" in error
    assert found.code == 0, found.printed


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_no_server_a_wrong_port_and_an_unknown_model_are_said_plainly(deployed: Server, server: Server, capsys) -> None:
    """Exit code 2 and a line that says what to do."""
    for url, model, says in (
        (f"127.0.0.1:{_free_port()}", "looped", "no Triton server answers over gRPC"),
        (f"127.0.0.1:{deployed.http_port}", "looped", "8000 is HTTP and 8002 metrics"),
        (deployed.url, "lopped", "has no model 'lopped' ready"),
        (deployed.url, "lopped", "it serves classify, late, looped"),
        (server.url, "lopped", "see what it serves"),  # which the project's own keeps to itself
        ("nonsense", "looped", "nonsense"),
    ):
        assert main(["doctor", "--url", url, "--model", model]) == 2
        assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--seconds", "0"], "--seconds 0: give more than 0"),
        (["--clients", "0"], "--clients 0: give 1 to 1024"),
        (["--requests", "10"], "--requests 10: give at least"),
        (["--texts", "absent.txt"], "absent.txt cannot be read"),
        (["--texts", "empty.txt"], "empty.txt has no text: give one text a line"),
        (["--texts", "latin.txt"], "latin.txt cannot be read"),
        (["--input-data", "empty.txt"], "empty.txt is no input data"),
        (["--input-data", "bare.json"], "bare.json has no requests"),
        (["--input-data", "other.json"], "a request has no input_ids"),
        (["--repository", "absent"], "--repository absent is no folder"),
        (["--watch-seconds", "-1"], "--watch-seconds -1: give more than 0"),
        (["--watch-seconds", "5", "--input-data", "bare.json"], "sends nothing: leave --input-data out"),
    ],
)
def test_what_makes_no_sense_is_refused(deployed: Server, options, says, tmp_path, monkeypatch, capsys) -> None:
    """Before any load: exit code 2 and the option's name."""
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("\n \n")
    Path("latin.txt").write_bytes(b"caf\xe9")
    Path("bare.json").write_text('{"data": []}')
    Path("other.json").write_text('{"data": [{"text": ["a"]}]}')

    assert main(["doctor", "--url", deployed.url, "--model", "looped", *options]) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert "Sending" not in captured.out


def test_a_server_that_dies_under_load_is_said_plainly(tmp_path: Path, monkeypatch, capsys) -> None:
    """Exit code 2, no traceback, no verdict."""
    write(tmp_path / "repository", "classify", config("classify", IDS % ("-1", RAGGED)), handler(STACK))
    options = ServerOptions(tmp_path / "repository", models=("classify",), http_port=0, grpc_port=0, metrics_port=0)
    with serving(options) as server:
        load = examination.drive

        def drive(*given, **more):
            if given[2] > 1:
                threading.Timer(0.3, server.end_processes).start()
            return load(*given, **more)

        monkeypatch.setattr(examination, "drive", drive)
        code = main(["doctor", "--url", server.url, "--model", "classify", "--seconds", "60"])

    captured = capsys.readouterr()
    assert code == 2
    assert f"the server at {server.url} went away" in captured.err
    assert "fault" not in captured.out


def test_a_result_that_cannot_be_written_is_said(deployed: Server, tmp_path: Path, capsys) -> None:
    """Exit code 2, not a traceback."""
    (tmp_path / "file").write_text("")
    options = ["--seconds", "0.2", "--clients", "4", "--json", str(tmp_path / "file" / "result.json")]

    assert main(["doctor", "--url", deployed.url, "--model", "classify", *options]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err
