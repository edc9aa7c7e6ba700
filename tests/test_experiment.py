# SPDX-License-Identifier: Apache-2.0
"""The experiment, run for real and small: perf_analyzer, three deployments, real counters. No speed is asserted."""

from __future__ import annotations

import json
import os
import signal
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_repository import small_repository

from ensemble.launcher.gpu import VISIBLE
from ensemble.launcher.server import Server
from perf import arithmetic, closed_loop
from perf.__main__ import main
from perf.experiment import command as experiment
from perf.experiment import perf_analyzer
from perf.experiment import point as experiment_point
from perf.experiment import result as results
from perf.experiment import settings as experiment_settings
from perf.experiment.command import Experiment
from perf.experiment.perf_analyzer import PerfAnalyzer, Records

TINY = [
    "--quick",
    "--clients",
    "3",
    "--workloads",
    "mixed",
    "--seconds",
    "0.5",
    "--loads",
    "0.5",
    "--open-seconds",
    "0.5",
]
NO_CEILING = {"flops": 1e9, "by": "nothing", "precision": "fp32", "all": {}}


@pytest.fixture(scope="module")
def small(small_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A repository with a small model; and no GPU to be seen."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VISIBLE, "")
        yield small_repository(small_model, tmp_path_factory)


@pytest.fixture(scope="module")
def ran(small: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """One whole run."""
    folder, printed = tmp_path_factory.mktemp("output"), StringIO()
    with redirect_stdout(printed):
        code = main(["experiment", "--repository", str(small), "--output", str(folder), *TINY])
    result = json.loads((folder / "experiment.json").read_text())
    return SimpleNamespace(code=code, folder=folder, result=result, printed=printed.getvalue())


def row(ran: SimpleNamespace, name: str) -> dict:
    """The one point of a deployment."""
    (found,) = [row for row in ran.result["rows"] if row["deployment"] == name]
    return found


def test_all_three_are_measured(ran: SimpleNamespace) -> None:
    """A row each and an open loop; the run is complete and the command succeeds."""
    assert ran.code == 0 and ran.result["complete"] and not ran.result["failed"] and not ran.result["skipped"]
    assert [row["deployment"] for row in ran.result["rows"]] == ["looped", "baseline", "text_classifier"]
    assert [row["load"] for row in ran.result["open_loop"]] == [0.5]


def test_a_loop_makes_a_pass_a_request(ran: SimpleNamespace) -> None:
    """The case study's fault: batches are formed, and a forward pass is made for every request all the same."""
    looped = row(ran, "looped")

    assert looped["forward_passes"] == looped["rows"] == looped["served_requests"] > looped["executions"]


def test_stacked_tensors_make_a_pass_a_batch(ran: SimpleNamespace) -> None:
    """Whatever the batch."""
    baseline = row(ran, "baseline")

    assert baseline["forward_passes"] == baseline["executions"] < baseline["rows"] == baseline["served_requests"]


def test_the_ensemble_classifies_a_row_a_request(ran: SimpleNamespace) -> None:
    """Texts in, and each is one row of some batch."""
    ensemble = row(ran, "text_classifier")

    assert ensemble["rows"] == ensemble["served_requests"] >= ensemble["requests"]
    assert ensemble["executions"] <= ensemble["forward_passes"] <= ensemble["rows"]


def test_batch_sizes_add_up(ran: SimpleNamespace) -> None:
    """To the executions, and weighted to the rows."""
    for one in [*ran.result["rows"], *ran.result["open_loop"]]:
        sizes = {int(size): count for size, count in one["batch_sizes"].items()}
        assert sum(sizes.values()) == one["executions"]
        assert sum(size * count for size, count in sizes.items()) == one["rows"]
        assert one["mean_batch"] == one["rows"] / one["executions"]


def test_every_point_says_all_that_a_reader_asks(ran: SimpleNamespace) -> None:
    """Throughput, percentiles, errors, utilization, stages, padding, arithmetic and caveats."""
    for one in ran.result["rows"]:
        latency = one["latency_ms"]
        assert 0 < latency["p50"] <= latency["p90"] <= latency["p95"] and (latency["p99"] is None) == (
            one["requests"] < 100
        )
        assert one["requests"] == pytest.approx(one["requests_per_second"] * one["seconds"])
        assert one["errors"] == 0 and one["gpu_percent"] is None and one["tokens_per_second"] > 0
        assert list(one["stages_ms"]) == ["client", "queue", "tokenize", "input", "infer", "output"]
        assert one["cpu_percent"] is None or one["cpu_percent"]["server"] > 0
        assert 0 <= one["padding_share"] < 1 and one["flops"] > 0 and one["flops_executing"] > 0
        assert len(one["windows"]) == 3 and isinstance(one["caveats"], list)


def test_only_padded_rows_are_mostly_padding(ran: SimpleNamespace) -> None:
    """Texts of 57 tokens on average, padded to 512, against packed ones; tokenizing costs the ensemble alone."""
    assert row(ran, "looped")["padding_share"] == row(ran, "baseline")["padding_share"] > 0.8
    assert row(ran, "text_classifier")["padding_share"] < 0.2
    assert row(ran, "looped")["stages_ms"]["tokenize"] == 0 < row(ran, "text_classifier")["stages_ms"]["tokenize"]


def test_all_answers_are_held_against_the_reference(ran: SimpleNamespace) -> None:
    """Before the first point, and each answer of every point."""
    assert [one["deployment"] for one in ran.result["answers"]] == ["looped", "baseline", "text_classifier"]
    for one in [*ran.result["rows"], *ran.result["open_loop"]]:
        assert one["answers"]["texts"] == one["requests"]
        assert one["answers"]["largest_difference"] <= one["answers"]["tolerance"]


def test_the_record_is_enough_to_repeat_it(ran: SimpleNamespace) -> None:
    """Command, seed, versions, machine, model, texts, load, ceiling."""
    result = ran.result
    assert result["schema"] == results.SCHEMA and result["seed"] == 1 and result["command"].startswith("python -m perf")
    assert result["load"]["perf_analyzer"] == perf_analyzer.VERSION and result["load"]["clients"] == [3]
    assert {"python", "torch", "onnxruntime"} <= result["versions"].keys() and result["machine"]["cores"] >= 1
    assert result["workloads"]["mixed"]["texts"] == 300 and len(result["workloads"]["mixed"]["sha256"]) == 64
    assert result["ceiling"]["flops"] == max(result["ceiling"]["all"].values()) and result["in_process"]["mixed"]


def test_the_report_is_written_and_printed(ran: SimpleNamespace) -> None:
    """Beside the record; and every caveat of a row has its advice."""
    names = {path.name for path in ran.folder.iterdir()}
    assert {
        "report.md",
        "report.html",
        "throughput.svg",
        "p99.svg",
        "batches.svg",
        "stages.svg",
        "open_loop.svg",
    } <= names
    assert "At 3 clients" in ran.printed and "written:" in ran.printed
    raised = {one["name"] for row in ran.result["rows"] for one in row["caveats"]}
    assert raised <= ran.result["advice"].keys()


@pytest.fixture
def standing(server: Server, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The session's server in place of a deployment's own; what the command does to end it is noted instead."""
    running = SimpleNamespace(
        url=server.url, pid=server.pid, options=server.options, metrics_port=server.metrics_port, ended=0,
        start=lambda: None,
    )  # fmt: skip
    running.kill = lambda: setattr(running, "ended", running.ended + 1)
    monkeypatch.setenv(VISIBLE, "")
    monkeypatch.setattr(experiment, "open_deployment", lambda *args: running)
    monkeypatch.setattr(arithmetic, "ceiling", lambda *args: NO_CEILING)
    monkeypatch.setattr(
        experiment.in_process, "rates", lambda *args, **settings: {"batched_per_second": 1.0, "alone_per_second": 1.0}
    )
    return running


def options(repository: Path, output: Path) -> list[str]:
    """Of a run of the ensemble on short texts."""
    shared = ["--repository", str(repository), "--output", str(output), "--deployments", "text_classifier"]
    return ["experiment", *shared, "--quick", "--workloads", "short", "--seconds", "0.3", "--loads"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_and_what_was_measured_is_kept(
    number: int,
    code: int,
    small: Path,
    standing: SimpleNamespace,
    ran: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C or SIGTERM at the second point, and again while it ends: the first point is in a whole report.

    SIGINT is ignored at the start, as it is in whatever a shell starts in the background.
    """
    points: list[object] = []

    def interrupted(*args: object) -> dict:
        points.append(args)
        if len(points) > 1:
            os.kill(os.getpid(), number)
            time.sleep(60)  # cut short
        return row(ran, "text_classifier")

    def ended() -> None:
        standing.ended += 1
        os.kill(os.getpid(), number)

    standing.kill = ended
    monkeypatch.setattr(experiment_point, "closed", interrupted)
    monkeypatch.setattr(Experiment, "_warm_up", lambda *args: 100.0)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert main(options(small, tmp_path)) == code
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)

    result = results.read(tmp_path / "experiment.json")
    assert not result["complete"] and len(result["rows"]) == 1 and standing.ended == 1
    assert {"what": "the rest", "reason": "interrupted"} in result["skipped"]
    assert "Interrupted" in (tmp_path / "report.md").read_text()


def test_a_quick_run_says_what_it_left_out(
    small: Path, standing: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """What only a full run has, and each point for which its time was too short; with no time at all, it fails."""
    monkeypatch.setattr(experiment_settings, "QUICK", replace(experiment_settings.QUICK, most_minutes=0.0))
    monkeypatch.setattr(Experiment, "_warm_up", lambda *args: 100.0)
    command = ["experiment", "--repository", str(small), "--output", str(tmp_path), "--deployments", "text_classifier"]

    assert main([*command, "--quick"]) == 1
    assert "nothing was measured" in capsys.readouterr().err
    skipped = {one["what"]: one["reason"] for one in results.read(tmp_path / "experiment.json")["skipped"]}
    assert skipped.pop("64 clients, full texts, short texts, open loop at 70%, open loop at 90%").startswith("not part")
    assert list(skipped) == [f"text_classifier, mixed, {clients} clients" for clients in (1, 8, 32)]
    assert all("no time left in a quick run" in reason for reason in skipped.values())
    assert "no time left" in (tmp_path / "report.md").read_text()


def test_wrong_answers_get_no_speed(
    repository: Path,
    standing: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit code 1, no row, and the reason in the record."""
    real = closed_loop.answers
    monkeypatch.setattr(closed_loop, "answers", lambda *args, **more: (1.0, real(*args, **more)[1] + 1))

    assert main(options(repository, tmp_path)) == 1
    assert "served logits differ" in capsys.readouterr().err
    result = results.read(tmp_path / "experiment.json")
    assert result["rows"] == [] and result["failed"][0]["what"] == "text_classifier, short" and standing.ended == 1


def test_a_server_that_dies_in_mid_run_is_said_to(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1, and it is listed; the record is whole."""
    load, servers, start = PerfAnalyzer.load, [], Server.start

    def started(server: Server) -> None:
        servers.append(server)
        start(server)

    def dying(self: PerfAnalyzer, *args: object) -> Records:
        return load(self, *args[:-1], lambda pid: servers[0].end_processes())

    monkeypatch.setattr(Server, "start", started)
    monkeypatch.setattr(PerfAnalyzer, "load", dying)
    monkeypatch.setattr(arithmetic, "ceiling", lambda *args: NO_CEILING)

    assert main(options(small, tmp_path)) == 1
    assert "the server ended in mid-run" in capsys.readouterr().err
    result = results.read(tmp_path / "experiment.json")
    assert result["rows"] == [] and "perf_analyzer failed" in result["failed"][0]["reason"]


def test_without_perf_analyzer_it_says_where_to_get_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1, and nothing is started or written."""
    assert main(["experiment", "--perf-analyzer", str(tmp_path / "none"), "--output", str(tmp_path / "out")]) == 1

    error = capsys.readouterr().err
    assert "perf_analyzer is missing" in error and "pip install 'tritonclient[grpc]==2.51.0'" in error
    assert not (tmp_path / "out").exists()


def test_a_broken_file_of_texts_ends_the_command(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1 before anything is started or written."""
    (tmp_path / "texts.txt").write_bytes(b"")

    assert (
        main(
            [
                "experiment",
                "--repository",
                str(repository),
                "--output",
                str(tmp_path / "out"),
                "--texts",
                str(tmp_path / "texts.txt"),
            ]
        )
        == 1
    )
    assert "has no text" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_quick_and_full_differ_in_points_and_length() -> None:
    """And what is given beats both."""
    parser = ArgumentParser()
    experiment.add_arguments(parser)

    full, quick = experiment.settings(parser.parse_args([])), experiment.settings(parser.parse_args(["--quick"]))
    given = experiment.settings(parser.parse_args(["--quick", "--clients", "8", "2", "--texts", "mine.txt"]))

    assert full.clients == (1, 8, 32, 64) and full.workloads == ("full", "short", "mixed") and full.loads[-1] == 0.95
    assert quick.workloads == ("mixed",) and quick.seconds < full.seconds
    assert given.clients == (2, 8) and given.workloads == ("file",)
