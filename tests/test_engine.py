# SPDX-License-Identifier: Apache-2.0
"""TARGET=tensorrt: an engine built, checked and installed. TensorRT and the GPU's run are stand-ins."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import fake_tensorrt
import numpy as np
import pytest
from conftest import ROOT
from fake_engine import A100

from ensemble.artifacts import CURRENT, FOLDER, FP16_ONNX, PLAN, Manifest, sha256_of
from ensemble.contract import read_config
from ensemble.errors import ExportError
from ensemble.launcher.engine_preflight import engine_problems
from ensemble.launcher.gpu import Gpus
from ensemble.launcher.preflight import sound
from ensemble.samples import load_samples
from export import engine, engine_from_onnx
from export.__main__ import main
from export.engine_from_onnx import Settings
from export.pipeline import export
from export.profile import profile_of

PACKED = read_config(ROOT / "model_repository/classifier/config.pbtxt")


@pytest.fixture
def gpu_machine(monkeypatch: pytest.MonkeyPatch) -> type[fake_tensorrt.Builder]:
    """A machine with an A100 and TensorRT, as far as this process can tell."""
    monkeypatch.setattr("export.engine.visible_gpus", lambda: Gpus((A100,)))
    monkeypatch.setattr("export.engine_from_onnx.load", lambda name: fake_tensorrt)
    monkeypatch.setattr("export.engine.cuda_is_available", lambda: True)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setattr("export.engine_runner.DEVICE", "cpu")
    stream = SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None, cuda_stream=0)
    monkeypatch.setattr("torch.cuda.Stream", lambda: stream)
    monkeypatch.setattr("torch.cuda.current_stream", lambda: stream)
    monkeypatch.setattr(fake_tensorrt.Builder, "built", [])
    monkeypatch.setattr(fake_tensorrt.Builder, "fail", None)
    return fake_tensorrt.Builder


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_target_tensorrt_builds_checks_and_installs_an_engine(
    small_model: Callable[..., Path],
    skeleton: Path,
    tmp_path: Path,
    gpu_machine: type[fake_tensorrt.Builder],
    layout: str,
) -> None:
    """Strongly typed, one profile, the plan held against the texts, all of it in model.json; preflight finds it sound."""
    (skeleton / "classifier/batchstrategy.so").write_bytes(b"")
    settings = Settings(workspace=1 << 30, timing_cache=tmp_path / "build/cache")
    texts = [sample.text for sample in load_samples()[:6]]
    said: list[str] = []

    manifest = export(str(small_model()), skeleton, texts=texts, target="tensorrt", layout=layout,
                      engine_settings=settings, report=said.append)  # fmt: skip

    [(network, config)] = gpu_machine.built
    assert network.flags == 1 << 1  # STRONGLY_TYPED alone
    assert config.pools == {fake_tensorrt.MemoryPoolType.WORKSPACE: 1 << 30} and len(config.profiles) == 1
    assert not config.flags  # no TF32
    assert manifest.engine is not None and manifest.layout == layout
    assert (manifest.engine.tensorrt, manifest.engine.compute_capability) == ("10.5.0", "8.0")
    assert manifest.engine.gpu == "NVIDIA A100-SXM4-80GB"
    assert [verdict["comparison"] for verdict in manifest.parity if "TensorRT" in verdict["comparison"]] == [
        "TensorRT alone against PyTorch", "TensorRT alone: probabilities", "TensorRT batched against PyTorch",
        "TensorRT batched: probabilities", "TensorRT batched against alone",
        "TensorRT against the graph it was built from",
    ]  # fmt: skip
    assert "  TensorRT: Unused Input: length_carrier" in said
    plan = skeleton / "classifier/1" / PLAN
    assert plan.is_symlink() and manifest.sha256[PLAN] == sha256_of(plan)
    contract, read = sound(skeleton, "padded" if layout == "padded" else None)
    assert read == manifest and not engine_problems(skeleton, contract, manifest, "10.5.0", [A100])


def test_a_later_export_without_an_engine_leaves_none(
    small_model: Callable[..., Path], skeleton: Path, tmp_path: Path, gpu_machine: type[fake_tensorrt.Builder]
) -> None:
    """The old plan is not served with the new model's labels."""
    model, settings = str(small_model()), Settings(timing_cache=tmp_path / "cache")
    export(model, skeleton, texts=["good"], target="tensorrt", engine_settings=settings)

    export(model, skeleton, texts=["good"])

    assert not (skeleton / "classifier/1" / PLAN).is_symlink()
    assert Manifest.read(skeleton / FOLDER / CURRENT).engine is None


def test_the_timings_of_one_build_speed_the_next(repository: Path, tmp_path: Path) -> None:
    """The timing cache is written after a build and read before the next."""
    graph, settings = repository / FOLDER / CURRENT / FP16_ONNX, Settings(timing_cache=tmp_path / "build/cache")

    for _ in range(2):
        engine_from_onnx.build(fake_tensorrt, graph, profile_of(PACKED, 8, [8]), settings)

    assert (tmp_path / "build/cache").read_bytes() == b"cache of two builds"


def test_a_timing_cache_that_is_of_no_use_costs_no_engine(repository: Path, tmp_path: Path) -> None:
    """One of another GPU is begun anew; one that cannot be written is told, and the engine is there all the same."""
    graph, shapes = repository / FOLDER / CURRENT / FP16_ONNX, profile_of(PACKED, 8, [8])
    (tmp_path / "cache").write_bytes(b"of another GPU")
    said: list[str] = []

    engine_from_onnx.build(fake_tensorrt, graph, shapes, Settings(timing_cache=tmp_path / "cache"))
    (tmp_path / "folder").mkdir()
    built = engine_from_onnx.build(
        fake_tensorrt, graph, shapes, Settings(timing_cache=tmp_path / "folder"), report=said.append
    )

    assert (tmp_path / "cache").read_bytes() == b"cache"
    assert built.plan and "cannot be written (Is a directory): the next build begins anew" in said[0]


def test_an_engine_that_is_not_built_or_not_as_asked_is_told(
    repository: Path, gpu_machine: type[fake_tensorrt.Builder], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """TensorRT's last error, and a profile that is not the one that was asked for."""
    graph, profile = repository / FOLDER / CURRENT / FP16_ONNX, profile_of(PACKED, 8, [8])
    engine_from_onnx.build(fake_tensorrt, graph, profile_of(PACKED, 16, [8]), Settings())

    with pytest.raises(ExportError, match="the engine has the profile .*, not .*: report this"):
        engine.check(engine.find_target(), graph, profile, PACKED, 0, None, None)  # type: ignore[arg-type]
    monkeypatch.setattr(gpu_machine, "fail", "could not find any implementation for node {ForeignNode}")
    with pytest.raises(ExportError, match=r"built no engine of model\.fp16\.onnx: could not find any implementation"):
        engine_from_onnx.build(fake_tensorrt, graph, profile, Settings())


def test_an_engine_that_answers_wrongly_is_not_installed(
    small_model: Callable[..., Path],
    skeleton: Path,
    tmp_path: Path,
    gpu_machine: type[fake_tensorrt.Builder],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gate runs the plan itself, and the repository stays as it was."""
    monkeypatch.setattr(fake_tensorrt.Context, "execute_async_v3", lambda *_: True)  # leaves the memory as it was
    settings = Settings(timing_cache=tmp_path / "cache")

    with pytest.raises(ExportError, match="the parity gate failed, nothing is installed. TensorRT"):
        export(str(small_model()), skeleton, texts=["good"], target="tensorrt", engine_settings=settings)
    assert not (skeleton / FOLDER / CURRENT).exists()


def test_an_engine_refuses_a_plan_of_another_version_and_shapes_outside_its_profile(
    repository: Path, gpu_machine: type[fake_tensorrt.Builder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything runs; so is a GPU that is full."""
    graph = repository / FOLDER / CURRENT / FP16_ONNX
    built = engine_from_onnx.build(fake_tensorrt, graph, profile_of(PACKED, 8, [8]), Settings())
    runner = engine.TensorRtEngine(fake_tensorrt, built.plan)
    inputs = {name: np.ones(9 * 64, dtype=np.int32) for name in runner.inputs}

    with pytest.raises(ExportError, match=r"input_ids: shape \[576\] is outside the profile"):
        runner(inputs)
    monkeypatch.setattr(fake_tensorrt.Engine, "create_execution_context", lambda self: None)
    with pytest.raises(ExportError, match="the GPU has no memory for the engine: end what else runs on it"):
        engine.TensorRtEngine(fake_tensorrt, built.plan)
    with pytest.raises(ExportError, match=r"TensorRT 10\.5\.0 does not load the plan: build it on this machine"):
        engine.TensorRtEngine(fake_tensorrt, b"of another version")


def test_target_tensorrt_without_a_gpu_says_so_at_once(
    small_model: Callable[..., Path],
    skeleton: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exit code 1 before anything is loaded; with a GPU and no TensorRT, where to get it."""
    command = ["convert", str(small_model()), "--repository", str(skeleton), "--target", "tensorrt"]

    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setattr("export.engine.visible_gpus", lambda: Gpus(why_none="NVIDIA's driver reports none"))
    assert main(command) == 1
    message = capsys.readouterr().err
    assert (
        "an engine is built on the GPU it is for, and none can be used here (NVIDIA's driver reports none)" in message
    )
    assert "loading" not in message
    monkeypatch.setattr("export.engine.visible_gpus", lambda: Gpus((A100,)))
    assert main(command) == 1
    assert (
        "cannot use the NVIDIA A100-SXM4-80GB, and the engine's answers are checked with it" in capsys.readouterr().err
    )
    monkeypatch.setattr("export.engine.cuda_is_available", lambda: True)
    assert main(command) == 1
    assert "tensorrt is not installed: run make export TARGET=tensorrt RUNTIME=docker" in capsys.readouterr().err


def test_a_tensorrt_that_cannot_start_says_why(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bindings make a TypeError of it, as where the driver is missing."""

    def builder(log: fake_tensorrt.ILogger) -> None:
        log.log(fake_tensorrt.ILogger.ERROR, "CUDA initialization failure with error: 35")
        raise TypeError("pybind11::init(): factory function returned nullptr")

    monkeypatch.setattr(fake_tensorrt, "Builder", builder)

    with pytest.raises(ExportError, match=r"TensorRT cannot start \(CUDA initialization failure with error: 35\)"):
        engine_from_onnx.build(
            fake_tensorrt, repository / FOLDER / CURRENT / FP16_ONNX, profile_of(PACKED, 8, [8]), Settings()
        )


def test_an_engine_too_short_for_the_warm_up_is_refused(
    small_model: Callable[..., Path], skeleton: Path, gpu_machine: type[fake_tensorrt.Builder]
) -> None:
    """Triton would not load it; the message has the sample and what to do. Without an engine, 16 tokens are fine."""
    model = str(small_model())

    with pytest.raises(ExportError, match="model_warmup '32 x 32' is 32 rows of 32 tokens, the model takes 64 of 16"):
        export(model, skeleton, texts=["good"], target="tensorrt", max_length=16)
    assert export(model, skeleton, texts=["good"], max_length=16).max_length == 16


def test_engine_check_writes_down_what_it_skipped_and_what_it_found(
    small_model: Callable[..., Path],
    skeleton: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """The first half of gpu-check: no GPU is no failure; with one, engine and parity are in engine.json."""
    texts = tmp_path / "texts"
    texts.write_text("good\nbad\n")
    command = ["engine-check", str(small_model()), "--repository", str(skeleton), "--output", str(tmp_path / "out"),
               "--texts", str(texts), "--timing-cache", str(tmp_path / "cache")]  # fmt: skip
    monkeypatch.setattr("export.engine.visible_gpus", lambda: Gpus(why_none="no driver"))

    assert main(command) == 0
    assert "none can be used here (no driver)" in json.loads((tmp_path / "out/engine.json").read_text())["skipped"]
    request.getfixturevalue("gpu_machine")
    assert main(command) == 0

    found = json.loads((tmp_path / "out/engine.json").read_text())
    monkeypatch.setattr(fake_tensorrt.Builder, "fail", "no kernel")
    assert main(command) == 1
    assert "no kernel" in json.loads((tmp_path / "out/engine.json").read_text())["failed"]
    assert found["engine"]["gpu"] == "NVIDIA A100-SXM4-80GB" and found["bytes"] > 1e6
    assert any(verdict["comparison"].startswith("TensorRT") for verdict in found["parity"])
