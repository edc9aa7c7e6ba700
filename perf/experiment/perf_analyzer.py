# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's perf_analyzer as a child process: a closed loop over gRPC, and its raw records. Knows nothing of models.

perf_analyzer's own summary is not used: a measurement that it finds unstable has none, and no raw records either. So it
is told to find everything stable (LOOSE), and stability is judged here, from the same three windows, and reported.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ensemble.errors import ServerError

VERSION = "2.51.0"
GET_IT = f"it comes with the wheel of tritonclient {VERSION}: pip install 'tritonclient[grpc]=={VERSION}'"
# It is stable after three windows if they differ by less than this many per cent: always.
LOOSE, WINDOWS = "1000000", 3
# Linked to, and found in nvidia-pytriton's wheel under names with a hash in them.
LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}
# Its own start and end, and the last answers that it waits for.
PATIENCE_SECONDS = 60.0


@dataclass(frozen=True)
class Records:
    """What was measured, one entry a request, in the order of their ends.

    sent, ended: seconds since 1970
    inputs:      the request's first input, by name as asked for
    logits:      what was answered, FP32 [requests, labels]
    windows:     the four boundaries of the three windows
    """

    sent: npt.NDArray[np.float64]
    ended: npt.NDArray[np.float64]
    inputs: list[Any]
    logits: npt.NDArray[np.float32]
    windows: npt.NDArray[np.float64]

    @property
    def seconds(self) -> float:
        """From the first request to the last answer."""
        return float(self.ended.max() - self.sent.min())

    @property
    def latencies(self) -> npt.NDArray[np.float64]:
        """Seconds from sending to answer."""
        return self.ended - self.sent


class PerfAnalyzer:
    """The program, found and known to be the right version."""

    def __init__(self, program: Path, environment: dict[str, str]) -> None:
        self._program, self._environment = program, environment

    def load(
        self,
        url: str,
        model: str,
        data: Path,
        shapes: dict[str, int],
        clients: int,
        window: int,
        seconds: float,
        running: Callable[[int], None] = lambda pid: None,
    ) -> Records:
        """Three windows of at least `window` requests each, `clients` in flight; returns their records.

        data:    the inputs, as its --input-data wants them
        shapes:  of each input, one dimension, the batch's left out
        seconds: that should do; it is given a multiple of them
        running: told its process id

        Raises ServerError if any request fails, or no end is in sight.
        """
        with tempfile.TemporaryDirectory(prefix="perf-analyzer-") as folder:
            export = Path(folder, "records.json")
            command = [
                *(str(self._program), "-m", model, "-i", "grpc", "-u", url, "-a", "--input-data", str(data)),
                *(option for name, size in shapes.items() for option in ("--shape", f"{name}:{size}")),
                # A thread for each client: those that share a thread would send the same texts at the same time.
                *("--concurrency-range", str(clients), "--max-threads", str(clients)),
                *("--measurement-mode", "count_windows", "--measurement-request-count", str(window)),
                *("--max-trials", str(WINDOWS), "--stability-percentage", LOOSE, "--percentile", "99"),
                *("--profile-export-file", str(export)),
            ]
            log = self._run(command, 5 * seconds + PATIENCE_SECONDS, running)
            return _records(export, next(iter(shapes)), log)

    def _run(self, command: Sequence[str], timeout: float, running: Callable[[int], None]) -> str:
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
            # A group of its own: Ctrl-C reaches only this process, which then ends it.
            process = subprocess.Popen(
                command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
            try:
                running(process.pid)
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                raise ServerError(
                    f"perf_analyzer had no end in sight after {timeout:.0f} s: is the server stuck?"
                ) from None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            log.seek(0)
            text = log.read()
        if code:
            raise ServerError(f"perf_analyzer failed (exit code {code}): {_reason(text)}")
        return text


@contextmanager
def found(program: str | None = None) -> Iterator[PerfAnalyzer]:
    """The program beside this Python or on the PATH, with the libraries it needs, for as long as this is open.

    Raises ServerError if there is none, it does not run, or is another version than the one that was tried.
    """
    beside = Path(sys.executable).parent / "perf_analyzer"
    path = program or (str(beside) if beside.is_file() else shutil.which("perf_analyzer"))
    if path is None or not Path(path).is_file():
        raise ServerError(f"perf_analyzer is missing{f' at {program}' if program else ''}: {GET_IT}")
    with tempfile.TemporaryDirectory(prefix="perf-analyzer-libraries-") as folder:
        _link_libraries(Path(folder))
        libraries = os.pathsep.join([folder, os.environ.get("LD_LIBRARY_PATH", "")]).rstrip(os.pathsep)
        environment = {**os.environ, "LD_LIBRARY_PATH": libraries}
        # A proxy that the environment names is not for a server of this machine.
        environment |= {"no_grpc_proxy": "*", "NO_PROXY": "*", "no_proxy": "*"}
        version = _version(path, environment)
        if version != VERSION:
            raise ServerError(f"{path} is version {version}, and {VERSION} is wanted: {GET_IT}")
        yield PerfAnalyzer(Path(path), environment)


def _link_libraries(folder: Path) -> None:
    """Under the names that the program asks for. What the system itself has needs none of it."""
    package = find_spec("pytriton")
    if package is None or package.origin is None:
        return
    for name, pattern in LIBRARIES.items():
        for library in Path(package.origin).parent.parent.joinpath("nvidia_pytriton.libs").glob(pattern):
            (folder / name).symlink_to(library)
            break


def _version(path: str, environment: dict[str, str]) -> str:
    try:
        asked = subprocess.run([path, "--version"], env=environment, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServerError(f"{path} does not run ({error}): {GET_IT}") from error
    version = re.search(r"Perf Analyzer Version (\S+)", asked.stdout + asked.stderr)
    if version is None:
        raise ServerError(f"{path} does not say its version ({_reason(asked.stdout + asked.stderr)}): {GET_IT}")
    return version[1]


def _records(export: Path, name: str, log: str) -> Records:
    try:
        (experiment,) = json.loads(export.read_text(encoding="utf-8"))["experiments"]
    except (OSError, ValueError, KeyError) as error:
        raise ServerError(f"perf_analyzer left no records ({error}): {_reason(log)}") from error
    requests = sorted(experiment["requests"], key=lambda request: request["response_timestamps"][-1])
    if not requests:
        raise ServerError(f"perf_analyzer recorded no request: {_reason(log)}")
    return Records(
        sent=np.array([request["timestamp"] for request in requests]) / 1e9,
        ended=np.array([request["response_timestamps"][-1] for request in requests]) / 1e9,
        inputs=[request["request_inputs"][name] for request in requests],
        logits=np.array([request["response_outputs"][-1]["logits"] for request in requests], dtype=np.float32),
        windows=np.array(experiment["window_boundaries"]) / 1e9,
    )


def _reason(log: str) -> str:
    """The last lines that are not part of its report."""
    lines = [line.strip() for line in log.splitlines() if line.strip() and not line.startswith((" ", "***", "Request"))]
    return " / ".join(lines[-3:]) or "it wrote nothing"
