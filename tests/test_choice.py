# SPDX-License-Identifier: Apache-2.0
"""Every row of the table in ensemble/launcher/choice.py, with made-up facts."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import copy_of_repository
from fake_engine import A100, L4, install_engine, install_export

from ensemble.artifacts import CURRENT, FOLDER, Manifest
from ensemble.errors import ConfigError, ServerError
from ensemble.launcher.choice import Choice, choose
from ensemble.launcher.gpu import Gpus
from ensemble.launcher.runtime import Runtime

NONE = Gpus((), "NVIDIA's driver: Driver Not Loaded")
ONE = Gpus((A100,))
FOUR = Gpus((A100, A100, L4, L4))


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """A repository without an engine."""
    install_export(repository := copy_of_repository(tmp_path / "model_repository"))
    return repository


@pytest.fixture
def without_engine(exported: Path) -> Manifest:
    return Manifest.read(exported / FOLDER / CURRENT)


@pytest.fixture
def with_engine(exported: Path) -> Manifest:
    install_engine(exported)
    return Manifest.read(exported / FOLDER / CURRENT)


@pytest.fixture
def embedded(tmp_path: Path) -> Runtime:
    (tmp_path / "embedded/python").mkdir(parents=True)
    return Runtime(
        "the embedded server",
        tmp_path / "tritonserver",
        tmp_path / "embedded",
        {},
        why_unknown="the embedded server has no TensorRT backend",
    )


@pytest.fixture
def installed(tmp_path: Path) -> Runtime:
    (tmp_path / "backends/tensorrt").mkdir(parents=True)
    return Runtime("the server in /opt", tmp_path / "tritonserver", tmp_path / "backends", {}, "10.5.0")


def test_auto_without_a_gpu_is_onnx(with_engine: Manifest, installed: Runtime) -> None:
    """Whatever else is there; the line says why there is none."""
    assert choose("auto", NONE, with_engine, installed) == Choice(
        "onnx", "cpu",
        "onnx: ONNX Runtime on the CPU, because no GPU can be used here (NVIDIA's driver: Driver Not Loaded)",
    )  # fmt: skip


def test_auto_with_a_gpu_and_no_engine_is_the_baseline(
    without_engine: Manifest, installed: Runtime, embedded: Runtime
) -> None:
    """With either server; the line says how to get the engine."""
    for runtime in (installed, embedded):
        assert choose("auto", ONE, without_engine, runtime) == Choice(
            "baseline", "baseline",
            "baseline: TorchScript on NVIDIA A100-SXM4-80GB, because no engine is installed; make export "
            "TARGET=tensorrt builds one",
        )  # fmt: skip


def test_auto_with_all_three_is_tensorrt(with_engine: Manifest, installed: Runtime) -> None:
    """By config.pbtxt itself; every kind of GPU is named."""
    assert choose("auto", ONE, with_engine, installed) == Choice(
        "tensorrt", None, "tensorrt: the packed engine on NVIDIA A100-SXM4-80GB"
    )
    assert choose("auto", FOUR, with_engine, installed) == Choice(
        "tensorrt", None, "tensorrt: the packed engine on NVIDIA A100-SXM4-80GB and NVIDIA L4"
    )


def test_a_padded_engine_has_a_config_of_its_own(exported: Path, installed: Runtime) -> None:
    """The layout stands in model.json."""
    install_engine(exported, layout="padded")

    choice = choose("auto", ONE, Manifest.read(exported / FOLDER / CURRENT), installed)

    assert choice == Choice("tensorrt", "padded", "tensorrt: the padded engine on NVIDIA A100-SXM4-80GB")


def test_a_layout_of_another_version_is_refused(exported: Path, installed: Runtime) -> None:
    """With the layouts there are."""
    install_engine(exported, layout="sparse")

    with pytest.raises(ConfigError) as caught:
        choose("auto", ONE, Manifest.read(exported / FOLDER / CURRENT), installed)

    assert str(caught.value) == "model.json has layout 'sparse', not one of packed, padded: run make export"


@pytest.mark.parametrize("asked", ["auto", "tensorrt"])
def test_an_engine_that_the_server_cannot_load_is_refused(with_engine: Manifest, embedded: Runtime, asked: str) -> None:
    """Not replaced by something slower: whoever built it wants it served."""
    with pytest.raises(ServerError) as caught:
        choose(asked, ONE, with_engine, embedded)

    assert str(caught.value) == (
        "the engine cannot be served, the embedded server has no TensorRT backend: make serve RUNTIME=docker, or ask "
        "for CLASSIFIER=baseline or CLASSIFIER=onnx"
    )


def test_a_version_that_cannot_be_read_is_said(with_engine: Manifest, installed: Runtime, tmp_path: Path) -> None:
    """The server may still know better, so it is not refused."""
    runtime = Runtime("the server in /opt", tmp_path, installed.backends, {}, None, "libnvinfer.so.10: not found")

    assert choose("auto", ONE, with_engine, runtime).why == (
        "tensorrt: the packed engine on NVIDIA A100-SXM4-80GB; its TensorRT version is not checked "
        "(libnvinfer.so.10: not found)"
    )


def test_tensorrt_as_asked_is_served(with_engine: Manifest, installed: Runtime) -> None:
    """The same as auto finds."""
    assert choose("tensorrt", ONE, with_engine, installed) == choose("auto", ONE, with_engine, installed)


def test_tensorrt_without_a_gpu_is_refused(with_engine: Manifest, installed: Runtime) -> None:
    """With why there is none, and what does without."""
    with pytest.raises(ServerError) as caught:
        choose("tensorrt", NONE, with_engine, installed)

    assert str(caught.value) == (
        "tensorrt needs a GPU, and none can be used here (NVIDIA's driver: Driver Not Loaded): make serve "
        "CLASSIFIER=onnx"
    )


def test_tensorrt_without_an_engine_is_refused(without_engine: Manifest, installed: Runtime) -> None:
    """Whether something else was exported or nothing was."""
    for manifest in (without_engine, None):
        with pytest.raises(ServerError) as caught:
            choose("tensorrt", ONE, manifest, installed)

        assert str(caught.value) == "tensorrt needs an engine, and none is installed: run make export TARGET=tensorrt"


def test_onnx_and_the_baseline_are_served_as_asked(with_engine: Manifest, embedded: Runtime) -> None:
    """Whatever else could be; a line each."""
    for gpus in (NONE, ONE):
        assert choose("onnx", gpus, with_engine, embedded) == Choice(
            "onnx", "cpu", "onnx: ONNX Runtime on the CPU, as asked"
        )
    assert choose("baseline", ONE, with_engine, embedded) == Choice(
        "baseline", "baseline", "baseline: TorchScript on NVIDIA A100-SXM4-80GB, as asked"
    )
    assert choose("baseline", NONE, None, embedded) == Choice(
        "baseline", "baseline",
        "baseline: TorchScript on the CPU (NVIDIA's driver: Driver Not Loaded), as asked",
    )  # fmt: skip
