# SPDX-License-Identifier: Apache-2.0
"""Which server is started: one that is installed, as in NVIDIA's image, else the one in the wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import serving

from ensemble import Client
from ensemble.errors import ServerError
from ensemble.launcher import runtime
from ensemble.launcher.options import ServerOptions
from ensemble.launcher.runtime import STUB, find_runtime


@pytest.fixture
def opt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed server, as NVIDIA's images lay it out, with nothing in it yet."""
    opt = tmp_path / "opt/tritonserver"
    (opt / "bin").mkdir(parents=True)
    (opt / "bin/tritonserver").touch()
    (opt / "backends/python").mkdir(parents=True)
    monkeypatch.setattr(runtime, "INSTALLED", opt)
    return opt


@pytest.fixture
def none_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "INSTALLED", tmp_path / "nothing")


def link_tensorrt(opt: Path, libraries: Path, version: int, soname: str = "libnvinfer.so.10") -> None:
    """A TensorRT backend linked to a library of that soname, which tells that version."""
    if not shutil.which("cc"):
        pytest.skip("needs a C compiler: cc")
    libraries.mkdir(exist_ok=True)
    source = libraries / "nvinfer.c"
    source.write_text(f"int getInferLibVersion(void) {{ return {version}; }}\n")
    shared = ["cc", "-shared", "-fPIC"]
    subprocess.run([*shared, f"-Wl,-soname,{soname}", "-o", libraries / soname, source], check=True)
    (opt / "backends/tensorrt").mkdir(exist_ok=True)
    backend = opt / "backends/tensorrt/libtriton_tensorrt.so"
    source.write_text("int TRITONBACKEND_Initialize(void) { return 0; }\n")
    subprocess.run([*shared, "-Wl,--no-as-needed", "-o", backend, source, libraries / soname], check=True)


def test_the_wheels_server_has_no_tensorrt(none_installed: None) -> None:
    """It is found where nothing is installed, and says so."""
    found = find_runtime()

    assert found.name == "the embedded server"
    assert not found.has_tensorrt_backend
    assert (found.tensorrt, found.why_unknown) == (None, "the embedded server has no TensorRT backend")


def test_an_installed_server_is_preferred_and_used_as_it_is(opt: Path, tmp_path: Path) -> None:
    """Its own backends, and an environment without the wheel's libraries."""
    found = find_runtime()

    assert (found.name, found.executable, found.backends) == (
        f"the server in {opt}", opt / "bin/tritonserver", opt / "backends",
    )  # fmt: skip
    assert found.laid_out(tmp_path / "unused") == found
    for variable in ("LD_LIBRARY_PATH", "PATH"):
        assert found.environment.get(variable) == os.environ.get(variable)
    assert not found.has_tensorrt_backend
    assert (found.tensorrt, found.why_unknown) == (None, f"the server in {opt} has no TensorRT backend")


@pytest.mark.parametrize(
    ("encoded", "version", "soname"),
    [
        (100500, "10.5.0", "libnvinfer.so.10"),
        (101303, "10.13.3", "libnvinfer.so.10"),
        (110000, "11.0.0", "libnvinfer.so.11"),
        (8601, "8.6.1", "libnvinfer.so.8"),
    ],
)
def test_the_backends_own_library_is_asked_for_its_version(
    opt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoded: int, version: str, soname: str
) -> None:
    """The one it is linked to, whatever else lies about; this process does not load it."""
    link_tensorrt(opt, tmp_path / "libraries", 90300, "libnvinfer.so.9")
    link_tensorrt(opt, tmp_path / "libraries", encoded, soname)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "libraries"))

    found = find_runtime()

    assert found.has_tensorrt_backend
    assert (found.tensorrt, found.why_unknown) == (version, "")
    assert soname not in Path("/proc/self/maps").read_text()


def test_a_library_that_does_not_load_is_a_reason(opt: Path, tmp_path: Path) -> None:
    """Without a driver, say: the version is unknown, and the loader's own words say why."""
    link_tensorrt(opt, tmp_path / "libraries", 9990000, "libnvinfer.so.999")

    found = find_runtime()

    assert found.has_tensorrt_backend
    assert (found.tensorrt, found.why_unknown) == (
        None, "OSError: libnvinfer.so.999: cannot open shared object file: No such file or directory",
    )  # fmt: skip


def test_a_backend_that_is_none_is_a_reason(opt: Path) -> None:
    """The folder alone, and a file that is linked to nothing of TensorRT."""
    (opt / "backends/tensorrt").mkdir()
    backend = opt / "backends/tensorrt/libtriton_tensorrt.so"
    without = find_runtime()
    backend.write_bytes(b"libnvinfer_plugin.so.10")
    unlinked = find_runtime()

    assert (without.tensorrt, without.why_unknown) == (None, f"{backend} is missing")
    assert (unlinked.tensorrt, unlinked.why_unknown) == (None, f"{backend} is not linked to libnvinfer")


@pytest.mark.parametrize("own", [None, "theirs"])
@pytest.mark.parametrize(
    ("variable", "ours"),
    [
        ("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
        ("MALLOC_MMAP_THRESHOLD_", "2097152"),
        ("MALLOC_TRIM_THRESHOLD_", "4194304"),
    ],
)
def test_who_sets_a_variable_has_it_kept(
    none_installed: None, monkeypatch: pytest.MonkeyPatch, variable: str, ours: str, own: str | None
) -> None:
    """Unset, "1" in CUDA_VISIBLE_DEVICES could be another GPU than the one that was checked, and memory would stay."""
    if own:
        monkeypatch.setenv(variable, own)
    else:
        monkeypatch.delenv(variable, raising=False)

    assert find_runtime().environment[variable] == (own or ours)


def test_a_machine_without_any_server_is_told_what_to_do(none_installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed without the extra."""
    monkeypatch.setattr(runtime.importlib.util, "find_spec", lambda name: None)

    with pytest.raises(ServerError) as caught:
        find_runtime()

    assert str(caught.value) == (
        "the embedded server is not installed: pip install '.[server]', or use Triton's container"
    )


def test_an_installed_server_serves(
    repository: Path, opt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wheel's files, put where NVIDIA's image has them, run from there and find this package by themselves."""
    with monkeypatch.context() as patch:
        patch.setattr(runtime, "INSTALLED", tmp_path / "nothing")
        wheel = find_runtime()
    shutil.rmtree(opt)
    laid_out = wheel.laid_out(opt)
    (opt / "bin").mkdir()
    laid_out.executable.rename(opt / "bin/tritonserver")
    for variable in ("LD_LIBRARY_PATH", "PATH"):
        monkeypatch.setenv(variable, wheel.environment[variable])
    assert (opt / "backends/python" / STUB).exists()

    options = ServerOptions(repository, config_name="cpu", http_port=0, grpc_port=0, metrics_port=0)
    with serving(options) as server, Client(server.url) as client:
        running = Path(f"/proc/{server.pid}/exe").resolve()
        working_folder = {path.name for path in Path(f"/proc/{server.pid}/cwd").iterdir()} - {".ses"}
        answer = client.classify("good")[0]

    assert answer.label == "positive"
    assert running == opt / "bin/tritonserver"
    assert working_folder == {"repository"}
