# SPDX-License-Identifier: Apache-2.0
"""The soak, short, through the session's server; and what decides whether memory grows."""

from __future__ import annotations

import json
import mmap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ensemble.errors import ServerError
from ensemble.launcher.options import SHM_BYTES, ServerOptions
from ensemble.launcher.server import Server
from perf.__main__ import main
from perf.endurance import server_processes
from perf.endurance import trial as endurance
from perf.endurance.server_processes import Held, Sample
from perf.endurance.soak import LIMIT
from perf.endurance.soak_traffic import SHARES
from perf.endurance.tally import Tally
from perf.endurance.trend import CANNOT_TELL, FLAT, GROWS, trend
from perf.endurance.workers import workers

PYTHON_MODELS = ("tokenizer", "classifier", "baseline")
HOURS = np.linspace(0, 1 / 3, 240)
NOISE = np.random.default_rng(3).normal(0, 0.1, len(HOURS))


@pytest.mark.usefixtures("on_the_sessions_server")
def test_a_short_soak_is_answered_rightly_and_recorded_in_full(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every kind of traffic came, no answer is wrong, each process has its samples; growth is not judged in seconds."""
    file = tmp_path / "soak.json"

    code = main(
        ["soak", "--repository", str(repository), "--output", str(file), "--minutes", "0.1", "--warm-up", "0.03",
         "--interval", "0.25", "--prime", "2", "--distinct", "30", "--clients", "6"]
    )  # fmt: skip

    result, printed = json.loads(file.read_text()), capsys.readouterr().out
    assert result["complete"] and code == {"holds": 0, "fails": 1, "cannot tell": 2}[result["verdict"]]
    counts = result["counts"]
    assert (counts["wrong"], counts["crossed"], counts["faults"]) == (0, 0, [])
    assert counts["outcomes"].keys() == SHARES.keys() and counts["texts_compared"] >= 6
    assert counts["requests"] == sum(sum(outcomes.values()) for outcomes in counts["outcomes"].values())
    assert result["reference"]["truncated"] >= 1 and result["reference"]["shortest"] <= 3
    assert [line for line in result["failed"] if " grows by " not in line] == []
    assert len(result["samples"]) > 10 and len(result["idle"]) == 2
    for sample in result["samples"]:
        assert sample["processes"].keys() == {"tritonserver", *PYTHON_MODELS}
        assert sample["shm"] == pytest.approx(len(PYTHON_MODELS) * SHM_BYTES, abs=len(PYTHON_MODELS) * mmap.PAGESIZE)
        assert all(0 < held["own"] <= held["rss"] and held["threads"] > 0 for held in sample["processes"].values())
    assert (tmp_path / "soak.svg").read_text().startswith("<?xml") and "tritonserver" in printed


@pytest.mark.parametrize(
    ("memory", "verdict"),
    [
        (np.full(len(HOURS), 100.0), FLAT),
        (100 + NOISE, FLAT),
        (100 - 5 * HOURS, FLAT),
        (100 + 5 * HOURS + NOISE, GROWS),
        (100 + 3 * np.floor(20 * HOURS) / 20, GROWS),
        (100 + 10 * NOISE, CANNOT_TELL),
        (100 + 0.7 * (HOURS > 1 / 6), CANNOT_TELL),
        (100 + 2.0 * (HOURS > 0.25), CANNOT_TELL),
    ],
    ids=["constant", "noise", "shrinks", "leak", "leak in steps", "restless", "one step", "late step"],
)
def test_growth_is_told_from_noise_and_doubt_is_not_a_pass(memory: np.ndarray, verdict: str) -> None:
    """20 minutes: a leak of 5 % an hour is found, noise is flat, and a step or wild noise is neither."""
    found = trend(HOURS, memory)

    assert found.verdict(LIMIT) == verdict
    assert found.low <= found.slope <= found.high


def test_a_few_samples_have_no_trend() -> None:
    """Nothing is said of too little."""
    assert trend(HOURS[:10], NOISE[:10]) is None


def idle_with(**changes: int) -> Sample:
    return Sample(
        {"tritonserver": replace(Held(7, 10, 5, 40, 30), **changes), "tokenizer": Held(8, 5, 5, 9, 9)}, shm=100
    )


@pytest.mark.parametrize(
    ("after", "says"),
    [
        (idle_with(descriptors=45), []),
        (idle_with(descriptors=99), ["tritonserver holds 99 file descriptors when idle, 40 before"]),
        (idle_with(threads=99), ["tritonserver holds 99 threads when idle, 30 before"]),
        (idle_with(pid=9), ["process tritonserver ended or was replaced"]),
        (Sample({"tritonserver": Held(7, 10, 5, 40, 30)}, shm=100), ["process tokenizer ended or was replaced"]),
        (replace(idle_with(), shm=101), ["101 bytes of shared memory are held when idle, 100 before"]),
    ],
)  # fmt: skip
def test_what_an_idle_server_lost_or_kept_is_told(after: Sample, says: list[str]) -> None:
    """A few descriptors more are a pool that breathes; many, a new process or more shared memory are named."""
    assert endurance.leaks(idle_with(), after) == says


def test_a_server_that_has_ended_has_no_sample(repository: Path) -> None:
    """An error that says so."""
    with pytest.raises(ServerError, match="the server has ended"):
        server_processes.sample(Server(ServerOptions(repository, http_port=0, grpc_port=0, metrics_port=0)))


def test_a_fault_of_a_request_fails_the_run() -> None:
    """One wrong answer among a thousand is a failure; crossed ones are counted apart."""
    tally = Tally()
    for _ in range(999):
        tally.add("kept", "right", 1)
    assert endurance.wrongs(tally) == []

    tally.fault("kept", "wrong", ["crossed: text 1 got text 2's answer"], 1)

    assert endurance.wrongs(tally) == ["1 wrong of 1000, 1 of them crossed"]
    assert tally.described()["faults"] == ["kept: crossed: text 1 got text 2's answer"]


def test_a_client_that_breaks_ends_the_run() -> None:
    """What a worker raises reaches the caller, and the others are told to stop."""
    stopped = []

    def work(number: int, stop) -> None:
        if number == 0:
            raise RuntimeError("broken")
        stop.wait(30)
        stopped.append(stop.is_set())

    def watch() -> None:
        with workers(3, work) as busy:
            while busy(5):
                pass

    with pytest.raises(RuntimeError, match="broken"):
        watch()
    assert stopped == [True, True]


@pytest.mark.parametrize("measurement", ["soak", "correctness", "hostile", "kills"])
def test_without_a_model_there_is_one_line_and_no_record(
    measurement: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file that is missing, exit code 1."""
    assert main([measurement, "--repository", str(tmp_path), "--output", str(tmp_path / "record.json")]) == 1

    assert "is missing" in capsys.readouterr().err and not (tmp_path / "record.json").exists()
