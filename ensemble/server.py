# SPDX-License-Identifier: Apache-2.0
"""Triton Inference Server as a child process.

Knows the server's command line and life cycle; nothing of where it comes from (runtime.py) or of requests.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import tritonclient.grpc as triton

from ensemble.errors import ServerError
from ensemble.runtime import Runtime, find_runtime

# A healthy server is ready after 2 to 4 s on two cores; loading a large model from a cold disk takes longer.
START_SECONDS = 120.0
# Given to requests in flight when the server is told to stop.
EXIT_TIMEOUT_SECONDS = 10
# tritonserver itself needs some seconds beyond that to take its backends down.
STOP_SECONDS = EXIT_TIMEOUT_SECONDS + 20.0

# The link to the repository in the server's working folder.
REPOSITORY = "repository"

# Where Linux keeps POSIX shared memory; the Python backend's regions are files there.
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108


# What every start without a GPU says; never why one failed.
GPU_NOISE = re.compile(
    r"CudaDriverHelper|pinned|unable to create stream|CUDA driver|NVML|DCGM|unable to get.*device count"
)


@dataclass(frozen=True)
class ServerOptions:
    """What to serve, and where.

    repository:  the model repository
    config_name: which <model>/configs/*.pbtxt to prefer over config.pbtxt
    models:      loaded, with the steps an ensemble needs; nothing else is
    address:     to listen on; 127.0.0.1 keeps it to this machine
    *_port:      0 picks a free one
    """

    repository: Path
    config_name: str | None = None
    models: tuple[str, ...] = ("text_classifier",)
    address: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002


class Server:
    """One running server. Use it as a context manager, or call start() and stop()."""

    def __init__(
        self,
        options: ServerOptions,
        runtime: Runtime | None = None,
        *,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        """runtime: which server to start; by default what this machine has.

        log: told what the server writes once it is ready, line by line, from a thread of its own. What it writes before
        is kept for the message of a start that fails. On a machine without a GPU most of it is about the GPU.
        """
        self.options = options
        self._runtime = runtime
        self.http_port, self.grpc_port, self.metrics_port = _free_ports(options)
        self.url = f"{options.address}:{self.grpc_port}"
        self._log = log
        self._ready = threading.Event()
        self._tail: deque[str] = deque(maxlen=400)
        # Its own prefix, so that what it leaves in /dev/shm can be told from another server's.
        self._shm_prefix = f"text_classifier_{uuid.uuid4().hex[:12]}_"
        self._folder: Path | None = None
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def pid(self) -> int | None:
        """The server's process id, or None if it does not run."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self) -> None:
        """Start the server and wait until every model answers. Raises ServerError with the server's own reason."""
        try:
            self._folder = _working_folder(self.options.repository)
            runtime = (self._runtime or find_runtime()).laid_out(self._folder)
            self._process = subprocess.Popen(
                self._command(runtime, self._folder / REPOSITORY),
                # Elsewhere than the project: the stub puts this folder first on sys.path, and a package that is not
                # installed would still be found.
                cwd=self._folder,
                env={**runtime.environment, "TMPDIR": str(self._folder)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                # A group of its own: Ctrl-C reaches only this process, which then stops the server in order.
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
            self._reader = threading.Thread(target=self._read_log, args=(self._process,), daemon=True)
            self._reader.start()
            self._await_ready(self._process)
        except OSError as error:
            self.kill()
            raise ServerError(
                f"the server cannot be set up ({error}): set TMPDIR to a folder of 50 MB that programs may run from"
            ) from error
        except BaseException:
            self.kill()
            raise

    def wait(self) -> None:
        """Block until the server ends by itself, which it does not in health. Raises ServerError then."""
        if self._process:
            code = self._process.wait()
            if self._reader:
                self._reader.join(timeout=5)
            raise ServerError(f"the server ended by itself (exit code {code}): {self._reason()}")

    def stop(self) -> None:
        """Let requests in flight finish, then end the server and whatever it started."""
        if self._process and self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End the server at once and clear away what it leaves: processes, shared memory, its working folder."""
        if self._process:
            self.end_processes()
            self._process.wait()
        if self._reader:
            self._reader.join(timeout=5)
        if self._process and self._process.stdout:
            self._process.stdout.close()
        for region in SHARED_MEMORY.glob(f"{self._shm_prefix}*"):
            region.unlink(missing_ok=True)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def end_processes(self) -> None:
        """SIGKILL to the server and its stubs. Safe in a signal handler: it waits for nothing."""
        if self._process:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _command(self, runtime: Runtime, repository: Path) -> list[str]:
        options = self.options
        return [
            str(runtime.executable),
            f"--model-repository={repository}",
            f"--backend-directory={runtime.backends}",
            *([f"--model-config-name={options.config_name}"] if options.config_name else []),
            "--model-control-mode=explicit",
            *(f"--load-model={model}" for model in options.models),
            # What is served is what the files say, not what the server would add to them.
            "--disable-auto-complete-config",
            "--exit-on-error=true",
            f"--exit-timeout-secs={EXIT_TIMEOUT_SECONDS}",
            f"--backend-config=python,shm-region-prefix-name={self._shm_prefix}",
            *(f"--{protocol}-address={options.address}" for protocol in ("http", "grpc", "metrics")),
            f"--http-port={self.http_port}",
            f"--grpc-port={self.grpc_port}",
            f"--metrics-port={self.metrics_port}",
            "--allow-gpu-metrics=true",
            "--log-info=false",
        ]

    def _read_log(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._tail.append(line.rstrip("\n"))
            if self._ready.is_set():
                # Whatever becomes of the log, the pipe must be drained: a server that cannot write to it stands still.
                with suppress(Exception):
                    self._log(line.rstrip("\n"))

    def _await_ready(self, process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + START_SECONDS
        # A proxy that the environment names is not for a server of this machine.
        with triton.InferenceServerClient(self.url, channel_args=[("grpc.enable_http_proxy", 0)]) as client:
            while time.monotonic() < deadline:
                if process.poll() is not None:
                    if self._reader:
                        self._reader.join(timeout=5)
                    raise ServerError(f"the server did not start: {self._reason()}")
                try:
                    if all(client.is_model_ready(model, client_timeout=5) for model in self.options.models):
                        self._tail.clear()
                        self._ready.set()
                        return
                except triton.InferenceServerException:
                    pass  # not listening yet
                time.sleep(0.05)
        raise ServerError(f"the server was not ready within {START_SECONDS:.0f} s: {self._reason()}")

    def _reason(self) -> str:
        """The line of the server's log that says why, as far as one can be told."""
        lines = [line for line in self._tail if line.strip() and not GPU_NOISE.search(line)]
        for line in lines:
            # What a model's Python raised. The log escapes quotes, and writes the traceback behind it on the same line.
            if found := re.search(r"\b\w+(?:Error|Exception): (.+)", line):
                message = found[1] if "ConfigError" in found[0] else found[0]
                return message.split(r"\n")[0].replace(r"\"", '"')
        errors = [re.sub(r"^[EF]\d{4} \S+ \d+ \S+\] ", "", line) for line in lines if re.match(r"[EF]\d{4} ", line)]
        if errors:
            return errors[0].strip('"').split(r"\n")[0].replace(r"\"", '"')
        return " / ".join(lines[-5:]) or "it wrote nothing"


def _working_folder(repository: Path) -> Path:
    """A temporary folder with a link to the repository in it.

    The server starts its stubs through a shell and does not quote their arguments: a repository in "My Projects" would
    never be ready. So it is handed a path of plain characters.
    """
    root = tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix="tritonserver-", dir=root if re.fullmatch(r"[\w./+-]+", root) else "/tmp"))  # noqa: S108
    (folder / REPOSITORY).symlink_to(repository.resolve())
    return folder


def _end_with_parent() -> None:
    """In the child: have the kernel send SIGTERM when the parent is gone, even if that was killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1: PR_SET_PDEATHSIG, linux/prctl.h


def _free_ports(options: ServerOptions) -> tuple[int, int, int]:
    """The three ports, once they are known to be free and different; a free one for each 0.

    Raises ServerError naming the setting.
    """
    named = {"HTTP_PORT": options.http_port, "GRPC_PORT": options.grpc_port, "METRICS_PORT": options.metrics_port}
    ports = []
    with ExitStack() as held:  # all at once, or two of them could get the same free port
        for name, port in named.items():
            probe = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            # As the server does: a port whose last connections linger in TIME_WAIT is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((options.address, port))
                probe.listen()  # bound alone, two sockets may share a port
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise ServerError(f"{options.address}:{port} is taken: set another {name}") from None
                raise ServerError(
                    f"{options.address}:{port} cannot be listened on ({error.strerror}): set ADDRESS to an IPv4 "
                    f"address of this machine, and {name} to a port you may use"
                ) from None
            ports.append(probe.getsockname()[1])
    return ports[0], ports[1], ports[2]
