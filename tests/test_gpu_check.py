# SPDX-License-Identifier: Apache-2.0
"""The load half of a GPU check, run for real on the CPU: what it counts, what it leaves out, and what it says of both."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from small_repository import small_repository

from ensemble.errors import ConfigError, PipelineError, ServerError
from ensemble.launcher.gpu import VISIBLE
from ensemble.launcher.server import Server
from ensemble.samples import short_samples
from perf import gpu_check, gpu_check_report, load_point
from perf.__main__ import main
from perf.client_processes import Clients
from perf.counters import settled
from perf.deployments import Deployment, view_with_looped
from perf.in_process import shape
from perf.utilization import Utilization

ENGINE = {"tensorrt": "10.5.0", "parity": [{"what": "logits", "max_abs": 0.0021}], "profiles": [1, 2]}
TINY = ["--clients", "1", "4", "--seconds", "0.4", "--warm-up", "0.1", "--texts", "mixed"]


@pytest.fixture(scope="module")
def without_gpu() -> Iterator[None]:
    """Whatever machine runs the tests: neither we nor the server see a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VISIBLE, "")
        yield


@pytest.fixture(scope="module")
def small(without_gpu: None, small_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a small model."""
    return small_repository(small_model, tmp_path_factory)


@pytest.fixture(scope="module")
def checked(small: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """One small run, with two client processes, in a folder where an engine check has left its result."""
    folder = tmp_path_factory.mktemp("gpu-check")
    (folder / "engine.json").write_text(json.dumps(ENGINE))
    printed = StringIO()
    with redirect_stdout(printed):
        code = main(
            ["gpu-check", "--repository", str(small), "--output", str(folder), "--client-processes", "2", *TINY]
        )
    return SimpleNamespace(
        code=code,
        result=json.loads((folder / "gpu-check.json").read_text()),
        markdown=(folder / "gpu-check.md").read_text(),
        printed=printed.getvalue(),
    )


def test_every_deployment_that_can_run_here_has_a_row_a_point(checked: SimpleNamespace) -> None:
    """Two TorchScript deployments, two client counts; the run is complete and the command succeeds."""
    rows = checked.result["rows"]

    assert checked.code == 0 and checked.result["complete"] and not checked.result["failed"]
    points = [(row["deployment"], row["texts"], row["clients"]) for row in rows]
    assert points == [(name, "mixed", clients) for name in ("baseline", "looped") for clients in (1, 4)]
    assert all(row["requests"] == pytest.approx(row["requests_per_second"] * row["seconds"]) for row in rows)
    assert all(row["p50_ms"] > 0 and row["tokens_per_second"] > 0 and row["tflops"] > 0 for row in rows)


def test_a_loop_makes_a_pass_a_request_and_a_stack_a_pass_a_batch(checked: SimpleNamespace) -> None:
    """The fault and its fix, by the counters."""
    for row in checked.result["rows"]:
        wanted = row["requests"] if row["deployment"] == "looped" else row["batches"]
        assert row["forward_passes"] == wanted
        assert row["mean_batch"] == row["requests"] / row["batches"]


def test_what_cannot_run_is_listed_with_its_reason(checked: SimpleNamespace) -> None:
    """The engine needs a GPU; both the files and the terminal say so."""
    (skipped,) = checked.result["skipped"]

    assert skipped["what"] == "text_classifier" and "needs a GPU" in skipped["reason"]
    assert skipped["reason"] in checked.printed and skipped["reason"] in checked.markdown


def test_what_is_unknown_is_never_a_number(checked: SimpleNamespace) -> None:
    """No GPU: no utilization and no share of a peak; and no p99 of a few requests."""
    for row in checked.result["rows"]:
        assert row["gpu_percent"] is None and row["share_of_peak"] is None
        assert (row["p99_ms"] is None) == (row["requests"] < 100)
    assert checked.result["gpus"] == [] and checked.result["peak_tflops"] is None
    table = [line for line in checked.markdown.splitlines() if line.startswith(("| baseline", "| looped"))]
    assert len(table) == 4 and all(line.count(" n/a ") >= 2 for line in table)


def test_cpu_numbers_are_called_that(checked: SimpleNamespace) -> None:
    """At the top of both, and among the caveats."""
    assert checked.printed.lstrip().startswith("CPU numbers: no GPU here")
    assert "\nCPU numbers: no GPU here" in checked.markdown
    assert "say nothing of any GPU" in checked.result["caveats"][0]


def test_answers_are_right_before_a_speed_is_told(checked: SimpleNamespace) -> None:
    """Within the tolerance of FP32, for every deployment that was measured."""
    assert checked.result["answers"].keys() == {"baseline", "looped"}
    assert all(one["largest_difference"] <= one["tolerance"] == 1e-3 for one in checked.result["answers"].values())


def test_the_record_says_where_it_comes_from(checked: SimpleNamespace) -> None:
    """Command, time, machine, versions, model and load."""
    result = checked.result
    assert result["command"].startswith("python -m perf") and result["created"].endswith("Z")
    assert result["machine"]["cores"] >= 1 and {"python", "torch", "tritonclient"} <= result["versions"].keys()
    assert (result["model"]["layers"], result["model"]["hidden"], result["model"]["intermediate"]) == (2, 32, 64)
    assert result["load"]["mean_tokens"]["mixed"] == pytest.approx(57.1, abs=0.1)


def test_an_engine_checks_result_is_taken_in(checked: SimpleNamespace) -> None:
    """Whole in the JSON; its values by name in the tables."""
    assert checked.result["engine"] == ENGINE
    for text in (checked.printed, checked.markdown):
        assert all(words in text for words in ("parity.0.max_abs", "0.0021", "10.5.0", "1, 2"))


def options(repository: Path, output: Path, *more: str) -> list[str]:
    return [
        "gpu-check",
        "--repository",
        str(repository),
        "--output",
        str(output),
        *TINY,
        "--client-processes",
        "1",
        *more,
    ]


@pytest.fixture
def killed(server: Server, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The session's server in place of each deployment's own; what the command does to end it is noted instead."""
    done: list[str] = []
    running = SimpleNamespace(
        url=server.url,
        options=server.options,
        metrics_port=server.metrics_port,
        start=lambda: None,
        kill=lambda: done.append("killed"),
    )
    deployments = {name: Deployment(name, "classifier", "fp32", "") for name in ("baseline", "looped")}
    monkeypatch.setattr(gpu_check, "DEPLOYMENTS", deployments)
    monkeypatch.setattr(gpu_check, "open_deployment", lambda *args: running)
    return done


def test_an_interrupted_run_keeps_what_it_measured(
    repository: Path, killed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM at the second point: exit code 143, the first point is in the file, and the server is ended."""
    measure, points = load_point.measure, []

    def interrupted(*args: object) -> dict[str, object]:
        points.append(args)
        if len(points) > 1:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)  # cut short
        return measure(*args)

    monkeypatch.setattr(load_point, "measure", interrupted)

    assert main(options(repository, tmp_path, "--deployments", "looped")) == 143
    result = json.loads((tmp_path / "gpu-check.json").read_text())
    assert not result["complete"] and [row["clients"] for row in result["rows"]] == [1]
    assert {"what": "the rest", "reason": "interrupted"} in result["skipped"]
    assert "Interrupted" in (tmp_path / "gpu-check.md").read_text()
    assert killed == ["killed"]


def test_wrong_answers_get_no_speed(
    repository: Path,
    killed: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit code 1, no row, and the deployment is among those that failed; the next one is tried all the same."""
    right = load_point.reference(repository)
    wrong = load_point.Reference(right.texts, right.logits + 1)
    monkeypatch.setattr(load_point, "reference", lambda repository: wrong)

    assert main(options(repository, tmp_path, "--deployments", "baseline", "looped")) == 1
    result = json.loads((tmp_path / "gpu-check.json").read_text())
    assert result["rows"] == [] and [one["what"] for one in result["failed"]] == ["baseline", "looped"]
    assert "served logits differ" in capsys.readouterr().err
    assert killed == ["killed", "killed"]


def test_an_engine_that_preflight_refuses_is_a_failure(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could run here but for what is installed: that is mended, not skipped."""

    def refused(*_: object) -> None:
        raise ConfigError("model.plan was built with TensorRT 10.5.0, the server has 11.0.0")

    monkeypatch.setattr("perf.gpu_check.open_deployment", refused)

    assert main(options(small, tmp_path, "--deployments", "text_classifier")) == 1
    (failed,) = json.loads((tmp_path / "gpu-check.json").read_text())["failed"]
    assert failed["what"] == "text_classifier" and "the server has 11.0.0" in failed["reason"]


def test_nothing_measured_is_a_failure(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No time for anything: all is skipped, and the exit code is 1. An engine.json that is none is said too."""
    (tmp_path / "engine.json").write_text("{")

    assert main(options(small, tmp_path, "--minutes", "1e-9")) == 1
    result = json.loads((tmp_path / "gpu-check.json").read_text())
    assert [one["what"] for one in result["skipped"]] == ["text_classifier", "baseline", "looped"]
    assert all("no time left" in one["reason"] for one in result["skipped"])
    assert "nothing was measured" in capsys.readouterr().err
    assert [one["what"] for one in result["failed"]] == ["gpu-check", "engine check"]


@pytest.mark.parametrize(
    ("left", "reason"), [(None, "is not in the output folder"), ('{"skipped": "no TensorRT"}', "no TensorRT")]
)
def test_an_engine_check_that_could_not_be_made_is_skipped(left: str | None, reason: str, tmp_path: Path) -> None:
    """With its own reason, if it left one."""
    if left is not None:
        (tmp_path / "engine.json").write_text(left)
    result = {
        "gpus": [], "why_no_gpu": "none", "rows": [], "skipped": [], "failed": [], "deployments": {}, "caveats": [],
        "complete": True, "model": {"source": {}, "layers": 12, "hidden": 768},
        "load": {"model": "closed loop", "seconds_a_point": 1, "client_processes": 1, "mean_tokens": {}},
    }  # fmt: skip

    gpu_check_report.write(tmp_path, result)

    (skipped,) = json.loads((tmp_path / "gpu-check.json").read_text())["skipped"]
    assert skipped["what"] == "engine check" and reason in skipped["reason"]


def test_without_a_model_nothing_is_started_or_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1 and what to run."""
    assert main(["gpu-check", "--repository", str(tmp_path), "--output", str(tmp_path / "out")]) == 1

    assert "run make export" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("wrong", [["--clients", "0"], ["--seconds", "nan"], ["--seconds", "-1"], ["--minutes", "x"]])
def test_a_senseless_argument_is_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """By argparse, with the argument's name."""
    with pytest.raises(SystemExit, match="2"):
        main(["gpu-check", *wrong])

    assert wrong[0] in capsys.readouterr().err


def test_the_looped_view_leaves_the_repository_as_it_is(repository: Path, tmp_path: Path) -> None:
    """Everything new is in the view; nothing of it is served from the repository."""
    before = sorted(repository.rglob("*"))

    view = view_with_looped(repository, tmp_path)

    assert sorted(repository.rglob("*")) == before
    assert sorted(path.name for path in view.iterdir()) == ["looped", "text_classifier", "tokenizer"]
    assert 'model_name: "looped"' in (view / "text_classifier/config.pbtxt").read_text()


def test_loads_of_several_processes_add_up(server: Server) -> None:
    """Every request of every process is counted, on the server as here, and none more."""
    texts = [sample.text for sample in short_samples()[:7]]
    with Clients(2) as clients:
        clients.load(server.url, texts, 3, 0.2)
        before = settled(server, "classifier")
        load = clients.load(server.url, texts, 3, 0.5)

    counts = settled(server, "classifier", before.rows + len(load.latencies)).since(before)
    assert counts.rows == len(load.latencies) == load.answered.sum() >= 3
    assert load.seconds >= 0.5 and len(load.answered) == 7
    assert counts.calls is not None and counts.calls >= counts.executions


@pytest.mark.parametrize("processes", [1, 2])
def test_a_request_that_fails_under_load_ends_it(processes: int, server: Server) -> None:
    """With the server's reason: a point of which some requests failed is no figure."""
    too_long = "x" * 200_000

    with Clients(processes) as clients, pytest.raises(ServerError, match="under load: .*text: row 0"):
        clients.load(server.url, [too_long], 2, 0.2)


def test_the_shape_of_the_installed_model_is_read_off_its_weights(repository: Path) -> None:
    """all-MiniLM-L6."""
    found = shape(repository)

    assert (found.layers, found.hidden, found.intermediate) == (6, 384, 1536)


class FakeNvml:
    """A driver of two GPUs, 30 % and 50 % busy; `broken`: one that does not say."""

    class NVMLError(Exception):
        pass

    def __init__(self, broken: bool = False) -> None:
        self.broken, self.ended = broken, False

    def nvmlInit(self) -> None:
        pass

    def nvmlShutdown(self) -> None:
        self.ended = True

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return {"GPU-a": 0, "GPU-b": 1}[uuid]

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        if self.broken:
            raise self.NVMLError
        return SimpleNamespace(gpu=(30, 50)[handle])


@pytest.mark.parametrize(("visible", "percent"), [(None, 40), ("1", 50), ("GPU-a", 30), ("", None)])
def test_utilization_is_the_mean_of_the_visible_gpus(
    visible: str | None, percent: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of CUDA_VISIBLE_DEVICES, or all."""
    driver = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.delenv(VISIBLE, raising=False)
    if visible is not None:
        monkeypatch.setenv(VISIBLE, visible)

    with Utilization() as used:
        time.sleep(0.25)

    assert used.percent == percent and driver.ended


def test_a_driver_that_does_not_say_is_no_utilization(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with parts of a GPU (MIG): unknown, not 0."""
    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(broken=True))

    with Utilization() as used:
        time.sleep(0.25)

    assert used.percent is None


def test_on_a_known_card_the_report_gives_the_share_of_its_peak() -> None:
    """And of a card that is not in the table, none, and says why."""
    row = {
        "deployment": "text_classifier", "texts": "full", "clients": 64, "seconds": 4.0, "requests": 8000, "texts_sent": 7,
        "texts_of": 7, "requests_per_second": 2000.0, "tokens_per_second": 1024000.0, "p50_ms": 31.0, "p99_ms": 40.0,
        "batches": 500, "mean_batch": 16.0, "forward_passes": None, "gpu_percent": 97.0, "tflops": 193.3,
        "client_busy": 0.99, "share_of_peak": 193.3 / 312,
    }  # fmt: skip
    result = {
        "gpus": [{"name": "NVIDIA A100-SXM4-80GB"}], "peak_tflops": 312.0, "rows": [row], "skipped": [], "failed": [],
        "deployments": {}, "caveats": [], "engine": None,
    }  # fmt: skip
    console = Console(file=StringIO(), width=250)

    gpu_check_report.show(console, Path("folder"), result)

    printed = console.file.getvalue()
    assert "NVIDIA A100-SXM4-80GB; peak 312 TFLOP/s FP16." in printed
    assert "97 %" in printed and "193" in printed and "62.0 %" in printed and "n/a" in printed
    assert "perhaps limited by the clients" in printed
    unknown = gpu_check_report.caveats(SimpleNamespace(devices=[object()], why_none=""), peak=None)
    assert "peak is unknown" in unknown[0]


def test_defaults_are_smaller_without_a_gpu() -> None:
    """And a whole run with one takes under ten minutes: every point, its warm-up, and three starts."""
    clients, seconds, warm = gpu_check.WITH_GPU
    points = 3 * 2 * len(clients)

    assert gpu_check.ON_CPU[0] < clients and gpu_check.ON_CPU[1] < seconds
    assert points * (seconds + warm + 1) + 3 * (2 * gpu_check.FIRST_WARM_UP_FACTOR * warm + 60) < 600


def test_a_difference_that_is_no_number_is_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN compares as nothing."""
    expected = load_point.Reference(["a"], np.zeros((1, 2), dtype=np.float32))
    monkeypatch.setattr(
        "perf.closed_loop.run", lambda *args, **kwargs: (1.0, np.full((1, 2), np.nan, dtype=np.float32))
    )

    with pytest.raises(PipelineError, match="no speed"):
        load_point.check_answers(Namespace(url=""), "fp16", expected)
