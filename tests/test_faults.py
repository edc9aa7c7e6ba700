# SPDX-License-Identifier: Apache-2.0
"""`python -m ensemble serve` under load: stubs are killed, then it is told to stop. One real server for all of it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpc
from checked_load import DEADLINE_SECONDS, CheckedLoad
from conftest import Reference
from processes import all_end
from triton_requests import in_flight_together, tensor_input, texts_input

from ensemble.__main__ import main
from ensemble.errors import RequestFailed
from ensemble.launcher.stubs import stubs_of
from ensemble.samples import load_samples

# What a caller is told who comes when the door is shut. "Not at ready state" is not among it: Triton says so of an answer
# whose model was unloaded under it.
REFUSED = re.compile(
    "the server is stopping: ask another one|has no available versions|Server is stopping|Connection refused|"
    "Connection reset by peer|Socket closed|was cancelled"
)


@dataclass(frozen=True)
class Launched:
    """The command as a process. pid: of its tritonserver; folder: its TMPDIR; files: the repository before the start."""

    process: subprocess.Popen
    url: str
    pid: int
    folder: Path
    repository: Path
    files: dict[str, int]

    @property
    def log(self) -> list[str]:
        """What it wrote to stderr so far."""
        return (self.folder.parent / "stderr").read_text().splitlines()


def files_of(repository: Path) -> dict[str, int]:
    """Every file and folder, and when it was last written."""
    return {str(path): path.lstat().st_mtime_ns for path in repository.rglob("*")}


def child_of(pid: int) -> int:
    """The one child of a process, whichever of its threads started it."""
    (child,) = {pid for task in Path(f"/proc/{pid}/task").glob("*/children") for pid in task.read_text().split()}
    return int(child)


@pytest.fixture(scope="module")
def launched(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    folder = tmp_path_factory.mktemp("launched") / "tmp"
    folder.mkdir()
    # Where Python cannot keep the bytecode of the handlers, as in a repository that is read-only.
    repository = Path(shutil.copytree(repository, folder.parent / "repository", symlinks=True, copy_function=os.link))
    for model in ("tokenizer", "classifier"):
        shutil.rmtree(repository / model / "1/__pycache__", ignore_errors=True)
        (repository / model / "1/__pycache__").touch()
    files = files_of(repository)
    command = [sys.executable, "-m", "ensemble", "serve", "--repository", str(repository), "--classifier", "onnx"]
    with (folder.parent / "stderr").open("w") as stderr:
        process = subprocess.Popen(
            [*command, *(argument for name in ("http", "grpc", "metrics") for argument in (f"--{name}-port", "0"))],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "TMPDIR": str(folder)},
        )
    process.stdout.readline()
    url = re.search(r"ready: .* at grpc ([^,]+),", process.stdout.readline())[1]
    yield Launched(process, url, child_of(process.pid), folder, repository, files)
    if process.poll() is None:
        process.kill()
    process.communicate()


@pytest.fixture
def load(launched: Launched, reference: Reference) -> Iterator[CheckedLoad]:
    """Eight callers who hold every answer against the Hugging Face model's."""
    texts = [sample.text for sample in load_samples()[:24]]
    with CheckedLoad(launched.url, texts, reference(texts)) as load:
        load.await_answers(20)
        yield load


def test_killed_stubs_are_healed(launched: Launched, load: CheckedLoad) -> None:
    """kill -9 on the tokenizer's, the classifier's and both: service is back, no answer is wrong, nobody waits for ever."""
    rounds = [["tokenizer"], ["classifier"], ["tokenizer", "classifier"]]

    for victims in rounds:
        stubs = stubs_of(launched.pid)
        killed = time.monotonic()
        for victim in victims:
            (stub,) = stubs[victim]
            os.kill(stub, signal.SIGKILL)
        load.await_answers(20, sent_after=killed + 1.5)  # past what was in a batch, and past the seconds of errors
        assert stubs_of(launched.pid).keys() == {"tokenizer", "classifier"}

    outcomes = load.end()
    assert sum(outcome.wrong for outcome in outcomes) == 0
    assert all(isinstance(outcome.error, RequestFailed | None) for outcome in outcomes)
    assert max(outcome.ended - outcome.sent for outcome in outcomes) < DEADLINE_SECONDS + 10
    healed = [line.split()[1] for line in launched.log if line.startswith("healed ")]
    assert sorted(healed) == ["classifier"] * 2 + ["tokenizer"] * 2
    assert main(["probe", "--url", launched.url, "--deadline-seconds", "30"]) == 0


def test_the_repository_is_not_written_to(launched: Launched) -> None:
    """Neither by the server nor by its stubs, healed ones included: it may be read-only."""
    assert stubs_of(launched.pid)
    assert files_of(launched.repository) == launched.files


def test_the_log_is_a_line_an_event_and_never_a_text(launched: Launched, load: CheckedLoad) -> None:
    """Of the launcher and of the server: texts that are answered, cut, invalid, too long, or refused for lack of room."""
    load.end()
    with grpc.InferenceServerClient(launched.url) as client:
        requests = {
            "answered": texts_input(["Piece1 of a secret"]),
            "cut": texts_input(["Piece2 of a secret " * 200]),
            "not UTF-8": texts_input([b"Piece3 of a secret \xff"]),
            "too long": texts_input(["Piece4 of a secret " * 2000]),
            "too much": texts_input(["Piece5 of a secret " * 300] * 64),
            "wrong shape": tensor_input("text", np.array([["Piece6 of a secret", "and Piece7"]], dtype=object)),
            "wrong name": tensor_input("Piece8", np.array([["a secret"]], dtype=object)),
        }
        results = in_flight_together(client, "text_classifier", [[request] for request in requests.values()])
        fates = {
            name: getattr(result, "status", lambda: "OK")() for name, result in zip(requests, results, strict=True)
        }
        flood = in_flight_together(client, "text_classifier", [[texts_input(["Piece9 secret"] * 64)]] * 100)

    refused = [result for result in flood if isinstance(result, grpc.InferenceServerException)]
    assert {name for name, fate in fates.items() if fate == "OK"} == {"answered", "cut"}
    assert {fate for fate in fates.values() if fate != "OK"} == {"StatusCode.INVALID_ARGUMENT"}
    assert refused and {result.status() for result in refused} == {"StatusCode.UNAVAILABLE"}
    wait_until(lambda: "requests are refused, queue full" in "\n".join(launched.log))
    log = "\n".join(launched.log)
    assert log.count("requests are refused, queue full") < len(refused)
    assert not [sample.text for sample in load_samples()[:24] if sample.text in log]
    assert re.findall(r"(?i)piece\s?\d|secret", log) == []
    assert "Traceback" not in log


def wait_until(condition: Callable[[], bool]) -> None:
    """The server's log arrives by two pipes."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_sigterm_under_load_loses_nothing(launched: Launched, load: CheckedLoad) -> None:
    """What was accepted is answered, what comes is refused, exit code 0, and nothing is left."""
    regions = {path for path in Path("/dev/shm").iterdir() if path.name.startswith("onepass_server_")}
    prefix = re.search(r"shm-region-prefix-name=(\w+)", Path(f"/proc/{launched.pid}/cmdline").read_text())[1]
    assert {path for path in regions if path.name.startswith(prefix)}
    stubs = set().union(*stubs_of(launched.pid).values())

    told = time.monotonic()
    launched.process.send_signal(signal.SIGTERM)
    code = launched.process.wait(timeout=60)
    outcomes = load.end()

    assert code == 0
    in_flight = [outcome for outcome in outcomes if outcome.sent < told < outcome.ended]
    errors = [str(outcome.error) for outcome in in_flight if outcome.error]
    assert len(errors) < len(in_flight)
    # One that was sent in the last moment may have come when the door was shut.
    assert [error for error in errors if "the server is stopping: ask another one" not in error] == []
    late = [str(outcome.error) for outcome in outcomes if outcome.sent > told and outcome.error]
    assert [error for error in late if not REFUSED.search(error)] == []
    assert sum(outcome.wrong for outcome in outcomes) == 0
    assert [line for line in launched.log if line.startswith("stop")] == [
        "stopping: answering what is in flight; a second signal ends at once",
        "stopped",
    ]
    assert list(launched.folder.iterdir()) == []
    assert not list(Path("/dev/shm").glob(f"{prefix}*"))
    assert all_end({launched.pid, *stubs})
