# SPDX-License-Identifier: Apache-2.0
"""Triton Inference Server as a child process.

Knows the server's life cycle; nothing of where it comes from (runtime.py), of its command line (options.py), of
requests, or of whether its models are well (supervisor.py).
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress

from ensemble.errors import ServerError
from ensemble.launcher.admin_key import hide
from ensemble.launcher.closed_door import drain
from ensemble.launcher.options import EXIT_TIMEOUT_SECONDS, ServerOptions
from ensemble.launcher.ports import free_ports
from ensemble.launcher.runtime import Runtime, find_runtime
from ensemble.launcher.server_api import NoAnswer, Refused, ServerApi
from ensemble.launcher.server_log import crash, reason
from ensemble.launcher.tls_files import why_untrusted
from ensemble.launcher.working_folder import WorkingFolder

# A healthy server is ready after 2 to 4 s on two cores; loading a large model from a cold disk takes longer.
START_SECONDS = 120.0
# Given to requests in flight when the server is told to stop, by this launcher: nothing should be left then. The server
# itself waits for EXIT_TIMEOUT_SECONDS more.
DRAIN_SECONDS = 10.0
# tritonserver itself needs some seconds beyond that to take its backends down.
STOP_SECONDS = DRAIN_SECONDS + EXIT_TIMEOUT_SECONDS + 15.0


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
        self.http_address = options.http_address
        self.http_port, self.grpc_port, self.metrics_port = free_ports(
            {
                "HTTP_PORT": (options.http_address, options.http_port),
                "GRPC_PORT": (options.address, options.grpc_port),
                "METRICS_PORT": (options.address, options.metrics_port),
            }
        )
        self.url = f"{options.address}:{self.grpc_port}"
        self.api = ServerApi(self.http_address, self.http_port, options.admin_key)
        self._log = log
        self._ready = threading.Event()
        self._tail: deque[str] = deque(maxlen=400)
        self._folder: WorkingFolder | None = None
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
        if self.options.tls:
            self.options.tls.check()
        try:
            self._folder = WorkingFolder(self.options.repository)
            runtime = (self._runtime or find_runtime()).laid_out(self._folder.path)
            ports = {"http": self.http_port, "grpc": self.grpc_port, "metrics": self.metrics_port}
            command = [str(runtime.executable), *self.options.arguments(runtime.backends, self._folder, ports)]
            self._await_ready(self._spawned(command, runtime.environment, self._folder))
            # Once more: the stubs of a server that was killed just now have noticed by now.
            self._folder.clear_leftovers()
        except OSError as error:
            self.kill()
            raise ServerError(
                f"the server cannot be set up ({error}): set TMPDIR to a folder of 50 MB that programs may run from"
            ) from error
        except BaseException:
            self.kill()
            raise

    def wait(self, seconds: float | None = None) -> None:
        """Block until the server ends by itself, which it does not in health, or `seconds` have passed.

        Raises ServerError if it has ended.
        """
        if self._process:
            try:
                code = self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                return
            if self._reader:
                self._reader.join(timeout=5)
            why = crash(self._tail) or reason(self._tail)
            raise ServerError(f"the server ended by itself (exit code {code}): {why}")

    def stop(self) -> bool:
        """Refuse new requests, let those in flight finish, then end the server and whatever it started.

        False if some of those in flight may be lost: they were not done DRAIN_SECONDS after the door was shut.
        """
        drained = True
        if self._process and self._process.poll() is None:
            deadline = time.monotonic() + STOP_SECONDS
            if self._ready.is_set():
                drained = False
                with suppress(NoAnswer, Refused):  # it does not answer: it is told to stop all the same
                    drained = drain(self.api, lambda: self.pid, self.options.models, DRAIN_SECONDS)
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(max(1.0, deadline - time.monotonic()))
        self.kill()
        return drained

    def kill(self) -> None:
        """End the server at once and clear away what it leaves: processes, shared memory, its working folder."""
        if self._process:
            self.end_processes()
            self._process.wait()
        if self._reader:
            self._reader.join(timeout=5)
        if self._process and self._process.stdout:
            self._process.stdout.close()
        if self._folder:
            self._folder.remove()
            self._folder = None

    def end_processes(self) -> None:
        """SIGKILL to the server and its stubs. Safe in a signal handler: it waits for nothing."""
        if self._process:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _spawned(
        self, command: list[str], environment: Mapping[str, str], folder: WorkingFolder
    ) -> subprocess.Popen[str]:
        """The server, started by the thread that then reads its log: the kernel takes that one for its parent."""
        spawned: Future[subprocess.Popen[str]] = Future()

        def run() -> None:
            try:
                process = subprocess.Popen(
                    command,
                    # Elsewhere than the project: the stub puts this folder first on sys.path, and a package that is
                    # not installed would still be found.
                    cwd=folder.path,
                    env={**environment, "TMPDIR": str(folder.path)},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    pass_fds=[folder.lock],
                    # A group of its own: Ctrl-C reaches only this process, which then stops the server in order.
                    start_new_session=True,
                    preexec_fn=_end_with_parent,
                )
            except BaseException as error:
                spawned.set_exception(error)
            else:
                spawned.set_result(process)
                self._read_log(process)

        self._reader = threading.Thread(target=run, daemon=True)
        self._reader.start()
        try:
            self._process = spawned.result()
        except BaseException:
            # A signal, perhaps: what was about to start is then known to kill().
            with suppress(Exception):
                self._process = spawned.result()
            raise
        return self._process

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
        hidden = False
        while time.monotonic() < deadline:
            if process.poll() is not None:
                if self._reader:
                    self._reader.join(timeout=5)
                raise ServerError(f"the server did not start: {reason(self._tail)}")
            if not hidden and self._tail:  # it has written something, so it has read its arguments
                hidden = hide(process.pid, self.options.admin_key)
            try:
                if all(self.api.is_ready(model) for model in self.options.models) and self._serves_metrics():
                    self._check_doors(process, hidden)
                    self._tail.clear()
                    self._ready.set()
                    return
            except NoAnswer:
                pass  # not listening yet
            time.sleep(0.05)
        raise ServerError(f"the server was not ready within {START_SECONDS:.0f} s: {reason(self._tail)}")

    def _serves_metrics(self) -> bool:
        """Whether the port that the server opens last is open."""
        with suppress(OSError), socket.create_connection((self.options.address, self.metrics_port), timeout=5):
            return True
        return False

    def _check_doors(self, process: subprocess.Popen[str], hidden: bool) -> None:
        """The launcher's key opens, nobody else can read it, and TLS is what callers will accept."""
        try:
            self.api.states()
        except Refused as error:
            raise ServerError(f"the server does not take its own key ({error}): report this") from error
        if not hidden and not hide(process.pid, self.options.admin_key):
            self._log("warning: the admin key stands in the process list, for every user of this machine to read")
        tls = self.options.tls
        if tls and (why := why_untrusted(self.options.address, self.grpc_port, tls.certificate)):
            raise ServerError(
                f"callers would not trust --tls-certificate {tls.certificate} ({why}): give one that is valid now"
            )


def _end_with_parent() -> None:
    """In the child: have the kernel kill it when the parent is gone, so that the ports are free for the next start."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG, linux/prctl.h
