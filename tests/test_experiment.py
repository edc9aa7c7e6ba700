# SPDX-License-Identifier: Apache-2.0
"""The experiment, run for real and small: perf_analyzer, three deployments, real counters. No speed is asserted."""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import copy_of_repository

from ensemble.errors import ConfigError, ServerError
from ensemble.gpu import VISIBLE
from ensemble.passes import CostModel
from ensemble.samples import load_samples, short_samples
from ensemble.server import Server
from export.pipeline import export
from perf import arithmetic, closed_loop, experiment, experiment_caveats, experiment_point, open_loop, perf_analyzer
from perf import experiment_result as results
from perf.__main__ import main
from perf.machine_load import MachineLoad, Shares
from perf.perf_analyzer import PerfAnalyzer, Records
from perf.roofline_model import BertShape
from perf.workloads import read_texts

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
    """A repository with a model of two small layers, so that 512 tokens take milliseconds; and no GPU to be seen."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VISIBLE, "")
        repository = copy_of_repository(tmp_path_factory.mktemp("experiment") / "model_repository")
        export(str(small_model()), repository, texts=[sample.text for sample in load_samples()[:8]])
        yield repository


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
        experiment.in_process, "rates", lambda *args: {"batched_per_second": 1.0, "alone_per_second": 1.0}
    )
    return running


def options(repository: Path, output: Path) -> list[str]:
    """Of a run of the ensemble on short texts."""
    shared = ["--repository", str(repository), "--output", str(output), "--deployments", "text_classifier"]
    return ["experiment", *shared, "--quick", "--workloads", "short", "--seconds", "0.3", "--loads"]


def test_an_interrupted_run_keeps_what_it_measured(
    repository: Path, standing: SimpleNamespace, ran: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C at the second point: exit code 130, the first is in a file that says it is not complete."""
    points: list[object] = []

    def interrupted(*args: object) -> dict:
        points.append(args)
        if len(points) > 1:
            raise KeyboardInterrupt
        return row(ran, "text_classifier")

    monkeypatch.setattr(experiment_point, "closed", interrupted)

    assert main(options(repository, tmp_path)) == 130
    result = results.read(tmp_path / "experiment.json")
    assert not result["complete"] and len(result["rows"]) == 1 and standing.ended == 1
    assert {"what": "the rest", "reason": "interrupted"} in result["skipped"]
    assert "Interrupted" in (tmp_path / "report.md").read_text()


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


@pytest.mark.parametrize(
    ("says", "words"),
    [
        ("echo Perf Analyzer Version 2.40.0", "is version 2.40.0, and 2.51.0 is wanted: it comes with"),
        ("echo libb64.so.0d: cannot open; exit 127", "does not say its version (libb64.so.0d: cannot open)"),
    ],
)
def test_another_perf_analyzer_is_refused(says: str, words: str, tmp_path: Path) -> None:
    """Another version's records may be others; one that does not run says why."""
    program = tmp_path / "perf_analyzer"
    program.write_text(f"#!/bin/sh\n{says}\n")
    program.chmod(0o755)

    with pytest.raises(ServerError) as raised, perf_analyzer.found(str(program)):
        pass

    assert words in str(raised.value) and "pip install" in str(raised.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read (No such file or directory)"),
        (b"", "has no text"),
        (b"\n \n", "has no text"),
        (b"fine\nnot \xff fine\n", "is not UTF-8 (line 2)"),
        (b"\x00\x01", "holds NUL characters"),
    ],
)
def test_a_broken_file_of_texts_is_refused(content: bytes | None, words: str, tmp_path: Path) -> None:
    """By its name, and with what to give instead."""
    file = tmp_path / "texts.txt"
    if content is not None:
        file.write_bytes(content)

    with pytest.raises(ConfigError) as raised:
        read_texts(file)

    assert words in str(raised.value) and str(file) in str(raised.value)


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


def test_texts_of_a_file_are_its_lines_each_once(tmp_path: Path) -> None:
    """Windows' line ends and blank lines are no texts."""
    (tmp_path / "texts.txt").write_bytes("one\r\n\r\ntwö\none\n".encode())

    assert read_texts(tmp_path / "texts.txt") == ["one", "twö"]


def test_quick_and_full_differ_in_points_and_length() -> None:
    """And what is given beats both."""
    parser = ArgumentParser()
    experiment.add_arguments(parser)

    full, quick = experiment.settings(parser.parse_args([])), experiment.settings(parser.parse_args(["--quick"]))
    given = experiment.settings(parser.parse_args(["--quick", "--clients", "8", "2", "--texts", "mine.txt"]))

    assert full.clients == (1, 8, 32, 64) and full.workloads == ("full", "short", "mixed") and full.loads[-1] == 0.95
    assert quick.workloads == ("mixed",) and quick.seconds < full.seconds
    assert given.clients == (2, 8) and given.workloads == ("file",)


def test_an_open_loop_counts_from_the_due_time(server: Server) -> None:
    """A request that was due a second before it could be sent has waited that second."""
    messages = [closed_loop.message_of(sample.text) for sample in short_samples()[:2]]

    arrivals = open_loop.run(server.url, messages, np.array([-1.0, 0.0, 0.1]))

    assert arrivals.lag[0] >= 1 and arrivals.latencies[0] > 1 and all(arrivals.answers)
    assert (arrivals.latencies > arrivals.lag).all()


def test_a_request_of_an_open_loop_that_fails_is_counted(server: Server) -> None:
    """It has no latency and no answer, and the others have theirs."""
    messages = [closed_loop.message_of(text) for text in ("fine", "x" * 200_000)]

    arrivals = open_loop.run(server.url, messages, np.array([0.0, 0.0]))

    assert np.isnan(arrivals.latencies).tolist() == [False, True] and arrivals.answers[1] is None


def test_arrivals_are_the_seeds() -> None:
    """The same for the same seed, at the rate asked for on average."""
    due = open_loop.poisson(50, 100, seed=3)

    assert np.array_equal(due, open_loop.poisson(50, 100, seed=3)) and not np.array_equal(
        due, open_loop.poisson(50, 100, 4)
    )
    assert len(due) == 5000 and due[-1] == pytest.approx(100, rel=0.1) and (np.diff(due) > 0).all()


def names(caveats: list[dict[str, str]]) -> list[str]:
    return [one["name"] for one in caveats]


def windows(*rates: float) -> list[dict[str, float]]:
    return [{"requests_per_second": rate, "mean_ms": 10.0} for rate in rates]


def test_each_caveat_has_its_reason() -> None:
    """At its threshold, with the figure in it."""
    of = experiment_caveats
    assert names(of.of_windows(windows(100, 105, 109))) == [] and names(of.of_windows(windows(100, 120, 100))) == [
        "unstable"
    ]
    assert "100 / 120 / 100 requests/s" in of.of_windows(windows(100, 120, 100))[0]["detail"]
    assert names(of.of_windows(windows(0, 0, 0))) == ["unstable"]
    assert names(of.of_requests(99, 0)) == ["too few for a p99"] and names(of.of_requests(100, 1)) == ["errors"]
    assert names(of.of_texts(299, 300)) == ["not every text"] and of.of_texts(300, 300) == []
    assert (
        names(of.of_clients(7.1, 8)) == ["client saturated"] and of.of_clients(7.9, 8) == of.of_clients(None, 8) == []
    )
    assert names(of.of_machine(Shares(server=30, client=60, other=11))) == ["client saturated", "machine busy"]
    assert of.of_machine(Shares(90, 5, 5)) == [] and names(of.of_machine(None)) == ["utilization unknown"]
    assert names(of.of_arrivals(3.0, 20.0, 100, 90)) == ["client saturated", "cannot keep up"]
    assert of.of_arrivals(1.0, 20.0, 100, 99) == []


def test_a_reader_is_told_what_ran_where() -> None:
    """CPU figures are called that; so is an ensemble on the CPU beside handlers on a GPU; a note stands first."""
    of = experiment_caveats.general
    assert "say nothing of any GPU" in of("no driver", "onnx", None)[0]
    assert "ran on the CPU, and the others on the GPU" in of(None, "onnx", None)[0]
    assert of(None, "tensorrt", "builds ran")[0] == "builds ran" and of(None, "tensorrt", None) == list(
        experiment_caveats.GENERAL
    )


def test_padding_is_what_no_text_needs() -> None:
    """None alone; nearly all of a short row padded to 512; a little of a batch of mixed lengths."""
    shape, lengths = BertShape(6, 384, 1536), [10, 20, 30, 200]

    assert arithmetic.padded_rows(shape, [512], 512)[1] == 0 and arithmetic.padded_rows(shape, [10], 512)[1] > 0.97
    alone, no_padding = arithmetic.packed_rows(shape, lengths, 1, None)
    together, some = arithmetic.packed_rows(shape, lengths, 4, None)
    planned, less = arithmetic.packed_rows(shape, lengths, 4, CostModel(0.002, 40))
    assert no_padding == 0 < less < some < 0.5 and alone < planned < together


def test_other_processes_are_told_from_the_server(server: Server) -> None:
    """This process works, the server rests: what is used is not the server's."""
    with MachineLoad(server.pid) as used:
        began = ended = time.time()
        # However long the first look at all processes takes on a busy machine.
        while ended - began < 0.6 or (used.between(began, ended) is None and ended - began < 60):
            sum(range(10_000))
            ended = time.time()

    shares = used.between(began, ended)
    assert shares is not None and shares.server < shares.other and shares.client == 0
    assert used.between(began - 10, began - 9) is None
