# SPDX-License-Identifier: Apache-2.0
"""Which Triton Inference Server this machine has: one that is installed, else the one inside the nvidia-pytriton wheel.

Knows where their files are, nothing of how a server is run (server.py does). Only the wheel's binaries are used, none
of its Python.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ensemble.errors import ServerError

# Where NVIDIA's images have it.
INSTALLED = Path("/opt/tritonserver")

STUB = "triton_python_backend_stub"
TENSORRT = "tensorrt"

# Run by another process, so that a library of a gigabyte does not stay in this one.
ASK_VERSION = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).getInferLibVersion())"


@dataclass(frozen=True)
class Runtime:
    """A server that can be started.

    name:        as messages call it
    executable:  tritonserver
    backends:    the folder of its backends
    environment: to start it in
    tensorrt:    version of the TensorRT library that its TensorRT backend loads, "10.5.0"; None where it has no such
                 backend or the version cannot be read, and then why_unknown says which
    stub:        of its Python backend, for the running Python, where it is not in the backend's folder
    """

    name: str
    executable: Path
    backends: Path
    environment: Mapping[str, str]
    tensorrt: str | None = None
    why_unknown: str = ""
    stub: Path | None = None

    @property
    def has_tensorrt_backend(self) -> bool:
        """Whether it can load a plan at all."""
        return (self.backends / TENSORRT).is_dir()

    def laid_out(self, folder: Path) -> Runtime:
        """The same, as the server wants its files. The wheel's are neither executable nor all in one place: copied."""
        if self.stub is None:
            return self
        backends, executable = folder / "backends", folder / "tritonserver"
        shutil.copytree(self.backends / "python", backends / "python")
        for source, target in ((self.stub, backends / "python" / STUB), (self.executable, executable)):
            shutil.copyfile(source, target)
            target.chmod(0o755)
        return replace(self, executable=executable, backends=backends, stub=None)


def find_runtime() -> Runtime:
    """The server to start. Raises ServerError if there is none."""
    return _installed() if (INSTALLED / "bin/tritonserver").exists() else _embedded()


def _installed() -> Runtime:
    """A server with backends of its own; in NVIDIA's image, this package runs under the image's own Python."""
    name, environment, backends = f"the server in {INSTALLED}", _environment(), INSTALLED / "backends"
    tensorrt, why = None, f"{name} has no TensorRT backend"
    if (backends / TENSORRT).is_dir():
        tensorrt, why = _tensorrt_version(backends / TENSORRT / "libtriton_tensorrt.so", environment)
    return Runtime(name, INSTALLED / "bin/tritonserver", backends, environment, tensorrt, why_unknown=why)


def _embedded() -> Runtime:
    """The server in the wheel, which has the Python backend only."""
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise ServerError("the embedded server is not installed: pip install '.[server]', or use Triton's container")
    wheel = Path(spec.origin).parent / "tritonserver"
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = wheel / "python_backend_stubs" / python / STUB
    if not stub.is_file():
        raise ServerError(f"nvidia-pytriton has no Python backend for Python {python}: use Python 3.10 to 3.12")
    environment = _environment()
    libraries = [wheel.parents[1] / "nvidia_pytriton.libs", sysconfig.get_config_var("LIBDIR")]
    environment |= {
        # The wheel's libraries for the server, and this interpreter for its stubs.
        "LD_LIBRARY_PATH": os.pathsep.join([*map(str, libraries), environment.get("LD_LIBRARY_PATH", "")]).rstrip(":"),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")]),
    }
    return Runtime(
        "the embedded server",
        wheel / "bin/tritonserver",
        wheel / "backends",
        environment,
        why_unknown="the embedded server has no TensorRT backend",
        stub=stub,
    )


def _environment() -> dict[str, str]:
    """This process's own, and what it leaves unsaid."""
    return {
        # The GPUs of CUDA_VISIBLE_DEVICES are numbered as nvidia-smi and gpu.py number them.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        # glibc gives large blocks back once they are freed. Unsaid, it raises both bounds with the largest block it
        # ever freed, to 32 and 64 MB (man 3 mallopt): a request of `python -m perf hostile` then left 1.4 to 1.9 kB,
        # with these 0.7 kB. At 128 kB 0.4 kB, but the TorchScript baseline answered 18 % fewer single requests.
        "MALLOC_MMAP_THRESHOLD_": str(2 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(4 << 20),
        **os.environ,
    }


def _tensorrt_version(backend: Path, environment: Mapping[str, str]) -> tuple[str | None, str]:
    """The version of the library that the TensorRT backend is linked to, or None and the reason."""
    if not backend.is_file():
        return None, f"{backend} is missing"
    linked = re.search(rb"libnvinfer\.so\.\d+", backend.read_bytes())
    if linked is None:
        return None, f"{backend} is not linked to libnvinfer"
    command = [sys.executable, "-I", "-c", ASK_VERSION, linked[0].decode()]
    try:
        asked = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    if asked.returncode:
        return None, (asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[-1]
    return _version(int(asked.stdout)), ""


def _version(encoded: int) -> str:
    """100500 -> "10.5.0". Before TensorRT 10 the major version was worth 1000: 8601 -> "8.6.1"."""
    major, rest = divmod(encoded, 10_000 if encoded >= 100_000 else 1_000)
    return f"{major}.{rest // 100}.{rest % 100}"
