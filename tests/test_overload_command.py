# SPDX-License-Identifier: Apache-2.0
"""`python -m perf overload`, short, on the session's server; and its verdict on made-up figures."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import grpc
import numpy as np
import pytest

from ensemble.contract import Contract
from ensemble.errors import ConfigError, ServerError
from perf.__main__ import main
from perf.endurance import flood, overload
from perf.endurance.cores import apart
from perf.endurance.flood import ERROR, HUNG, WRONG, End, Sender
from perf.endurance.overload import Overload, add_arguments
from perf.endurance.overload_verdict import FLOOD, UNLOADED, Found, waiting_rows
from perf.endurance.questions import QUEUE_FULL, RIGHT
from perf.endurance.reference import Reference
from perf.endurance.server_processes import Held, Sample
from perf.endurance.tally import Tally

# A flood that fills the queue of any machine within seconds, and limits that no machine exceeds.
SHORT = ("--seconds", "4", "--times", "30", "--rows", "64")
LOOSE = ("--wait-allowance", "1000", "--refused-within-ms", "60000", "--memory-mb", "10000", "--recovered-within", "60")


@pytest.fixture
def command(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The command on the session's model; its exit code and its record."""
    monkeypatch.setattr(overload, "UNLOADED_SECONDS", 1.0)
    monkeypatch.setattr(overload, "CAPACITY_SECONDS", 3.0)

    def run(*arguments: str) -> tuple[int, dict]:
        file = tmp_path / "overload.json"
        code = main(["overload", "--repository", str(repository), "--output", str(file), *arguments])
        return code, json.loads(file.read_text())

    return run


@pytest.mark.usefixtures("on_the_sessions_server")
def test_those_let_in_are_answered_rightly_and_the_others_refused(command, capsys: pytest.CaptureFixture[str]) -> None:
    """No request is lost: each is an answer, compared with its reference, or a refusal because the queue is full."""
    code, result = command(*SHORT, *LOOSE)

    counts = result["counts"]
    assert (result["failed"], counts["wrong"], counts["faults"], result["complete"]) == ([], 0, [], True)
    assert code == {"holds": 0, "cannot tell": 2}[result["verdict"]]
    assert all("client" in line for line in result["unsure"])
    assert counts["outcomes"][FLOOD].keys() == {RIGHT, QUEUE_FULL}
    assert result["let_in_ms"]["n"] == counts["outcomes"][FLOOD][RIGHT]
    assert result["refused_ms"]["n"] == counts["outcomes"][FLOOD][QUEUE_FULL]
    assert result["recovered_after_seconds"] is not None and result["after_ms"]["n"] > 0
    assert result["waiting_rows"] == 512 + 128 + 64
    assert "refused from sent" in capsys.readouterr().out


@pytest.mark.usefixtures("on_the_sessions_server")
def test_a_signal_keeps_what_was_measured(command, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM in the flood: exit code 143, and a record with what had come by then."""
    real = Sender.when_due

    async def interrupted(*arguments) -> None:
        threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
        await real(*arguments)

    monkeypatch.setattr(Sender, "when_due", interrupted)

    code, result = command("--seconds", "600", "--rows", "64", *LOOSE)

    assert code == 143 and not result["complete"]
    assert result["capacity_per_second"] > 0 and result["counts"]["outcomes"][UNLOADED][RIGHT] > 0
    assert "the run did not come to its end" in result["unsure"]


@pytest.mark.usefixtures("on_the_sessions_server")
def test_a_server_that_ends_is_told(command, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line, and it fails; nothing is measured on."""
    real, looks = overload.sample, iter(range(10))

    def dying(server):
        if next(looks) > 1:
            raise ServerError("the server has ended: see its log")
        return real(server)

    monkeypatch.setattr(overload, "sample", dying)

    code, result = command(*SHORT)

    assert (code, result["failed"][0]) == (1, "the server has ended: see its log")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_client_and_server_have_cores_of_their_own() -> None:
    """What is started first gets the others; all threads of the client get its own, and in the end all get all."""
    all_cores, ended = os.sched_getaffinity(0), threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        with apart(1) as part:
            says = [sys.executable, "-c", "import os; print(*os.sched_getaffinity(0))"]
            server = set(map(int, subprocess.run(says, capture_output=True, text=True, check=True).stdout.split()))
            part()
            client = os.sched_getaffinity(0)
            assert (len(client), client | server, client & server) == (1, all_cores, set())
            assert os.sched_getaffinity(thread.native_id or 0) == client
        assert os.sched_getaffinity(0) == os.sched_getaffinity(thread.native_id or 0) == all_cores
    finally:
        ended.set()


def test_a_client_leaves_the_server_a_core() -> None:
    """An error that says how many there are."""
    count = len(os.sched_getaffinity(0))
    with pytest.raises(ConfigError, match=f"--client-cores {count}: there are {count}"), apart(count):
        pass


def test_nobody_there_is_no_refusal() -> None:
    """A server that is gone is UNAVAILABLE as a full queue is; it is an error, also in the loops before and after."""
    tally, ends = Tally(), flood.ends()
    texts = Reference(["a"], ["no"], np.zeros((1, 1)), np.zeros((1, 1)), [3], [False], 1e-4, 0)
    began = time.monotonic()

    async def ask() -> float:
        async with flood.channel("127.0.0.1:1") as channel:
            sender = Sender(channel, texts, 1, tally, ends)
            assert await sender.in_turn("unloaded", 2, 0.3) == 0
            await sender.when_due(FLOOD, np.array([0.0, 0.01]), [])
            return await sender.until_usual("recovery", 1.0, 0.5)

    assert asyncio.run(ask()) == float("inf") and time.monotonic() - began < 30
    assert {end.outcome for phase in ends.values() for end in phase} == {ERROR}
    assert tally.faults[0].startswith("unloaded: UNAVAILABLE: ")
    assert len(ends["recovery"]) <= 6  # with a pause after each


@pytest.mark.parametrize(
    ("code", "details", "outcome"),
    [
        ("UNAVAILABLE", "Exceeds maximum queue size: 512 rows (max_waiting_rows) wait already", QUEUE_FULL),
        ("UNAVAILABLE", "failed to connect to all addresses", ERROR),
        ("INTERNAL", "internal error (KeyError)", ERROR),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", HUNG),
    ],
)
def test_errors_are_told_apart(code: str, details: str, outcome: str) -> None:
    """A refusal says that the queue is full; a deadline that passes is a request that hung."""
    error = SimpleNamespace(code=lambda: grpc.StatusCode[code], details=lambda: details)

    assert flood.outcome_of(error) == outcome


def held(megabytes: int, pid: int = 1) -> Sample:
    return Sample({"tritonserver": Held(pid, 0, megabytes * 10**6, 0, 0)}, 0)


def good() -> Found:
    """100 requests of a row a second, 704 rows that may wait: 7 s, and with the allowance 14."""
    found = Found(capacity=100.0, offered=400.0, waiting_rows=704, lag=[0.001] * 100, busy=0.3, began=10.0)
    found.ends[UNLOADED] = [End(RIGHT, 0.01, 0.01)] * 100
    found.ends[FLOOD] = [End(RIGHT, 13.0, 13.0)] * 100 + [End(QUEUE_FULL, 0.3, 0.09)] * 300
    found.samples = [(1.0, held(10)), (9.0, held(100)), (15.0, held(160)), (60.0, held(120))]
    found.recovered = 9.0
    return found


def judged(found: Found) -> Overload:
    """A run of the command that has found this."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    run = Overload(parser.parse_args([]))
    run.found = found
    return run


def one(outcome: str) -> Callable[[Found], None]:
    return lambda found: found.ends[FLOOD].append(End(outcome, 1.0, 1.0))


def test_a_server_that_holds() -> None:
    """Nothing to say, and all of it in the record."""
    run = judged(good())

    verdict = run.verdict()

    assert (verdict.failed, verdict.unsure, verdict.exit_code) == ([], [], 0)
    assert run.result["wait_seconds"] == {"longest_wait": 7.04, "most_wait": 14.08}
    assert (run.result["memory_growth_mb"], run.result["recovered_after_seconds"]) == (60, 9)
    assert json.dumps(run.result, allow_nan=False)


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        (one(HUNG), "1 requests had no outcome within 60 s"),
        (one(WRONG), "1 requests were answered wrongly"),
        (one(ERROR), "1 requests ended with an error that is no full queue"),
        (lambda found: found.ends["after"].append(End(ERROR, 1.0, 1.0)), "1 requests ended with an error that is"),
        (lambda found: found.ends[FLOOD].extend([End(RIGHT, 15.0, 15.0)] * 9), "the p99 of those let in is 15,000 ms, 14,080"),
        (lambda found: found.ends[FLOOD].extend([End(QUEUE_FULL, 0.3, 0.2)] * 999), "refusals took 200 ms (median), 100 ms"),
        (lambda found: found.samples.append((61.0, held(165))), "memory grew by 65 MB, 64 MB is the most"),
        (lambda found: found.samples.append((61.0, held(100, pid=2))), "tritonserver ended or was replaced"),
        (lambda found: setattr(found, "recovered", 10.5), "the server was as before after 10.5 s, 10 s is the most"),
        (lambda found: setattr(found, "recovered", float("inf")), "the server was not as before in the end, 10 s is"),
        (lambda found: found.ended.append("the server has ended"), "the server has ended"),
    ],
    ids=["hung", "wrong", "error", "error after", "waits", "refusals", "memory", "process", "late", "never", "ended"],
)  # fmt: skip
def test_what_does_not_hold(change: Callable[[Found], None], failed: str) -> None:
    """Each by itself, in a line that says how much of it may be."""
    found = good()
    change(found)

    run = judged(found)
    verdict = run.verdict()

    (line,) = verdict.failed
    assert line.startswith(failed) and verdict.exit_code == 1
    assert json.dumps(run.result, allow_nan=False)


@pytest.mark.parametrize(
    ("change", "unsure"),
    [
        (lambda found: found.ends[FLOOD].__delitem__(slice(100, None)), "nothing was refused"),
        (lambda found: setattr(found, "busy", 0.9), "the client was at its limit"),
        (lambda found: found.lag.extend([0.3] * 9), "the client was at its limit"),
        (lambda found: setattr(found, "recovered", None), "the run did not come to its end"),
    ],
    ids=["nothing refused", "busy client", "late client", "broken off"],
)
def test_what_cannot_be_told(change: Callable[[Found], None], unsure: str) -> None:
    """A flood that was none, a client that measures itself, a run without its end."""
    found = good()
    change(found)

    verdict = judged(found).verdict()

    (line,) = verdict.unsure
    assert line.startswith(unsure) and verdict.exit_code == 2


def test_a_client_at_its_limit_proves_nothing_slow() -> None:
    """The waits may be its own; a wrong answer is not."""
    found = good()
    found.busy, found.recovered = 0.9, 60.0
    verdict = judged(found).verdict()
    assert (verdict.failed, len(verdict.unsure)) == ([], 2)

    one(WRONG)(found)

    assert judged(found).verdict().exit_code == 1


def test_a_run_that_found_nothing_has_a_record() -> None:
    """Broken off before there was a server."""
    run = judged(Found())

    assert run.verdict().exit_code == 2 and json.dumps(run.result, allow_nan=False)


def test_the_longest_wait_is_that_of_the_tokenizers_config(skeleton: Path) -> None:
    """max_waiting_rows + ahead_rows + 64, as its comment says."""
    assert waiting_rows(Contract.read(skeleton, "cpu")) == 512 + 128 + 64
