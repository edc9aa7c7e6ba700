# SPDX-License-Identifier: Apache-2.0
"""How `python -m ensemble serve` ends: by a signal, by a second one, killed, or because its server died."""

from __future__ import annotations

import fcntl
import os
import pty
import queue
import re
import signal
import socket
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import tritonclient.grpc as grpc
from processes import all_end, descendants, region_prefix, regions
from serve_command import Serve, ready_line
from triton_requests import texts_input

from ensemble import Client
from ensemble.launcher.options import ServerOptions
from ensemble.launcher.server import Server


@pytest.mark.parametrize(
    ("number", "classifier"),
    [(signal.SIGINT, "onnx"), (signal.SIGTERM, "baseline"), (signal.SIGHUP, "onnx")],
    ids=["Ctrl-C", "SIGTERM", "SIGHUP"],
)
def test_a_signal_ends_it_and_leaves_nothing(
    serve: Serve, tmp_path: Path, number: signal.Signals, classifier: str
) -> None:
    """Exit code 0, no process, nothing in /dev/shm or the temporary folder, the port free."""
    process = serve("--classifier", classifier)
    line = ready_line(process)
    assert f"text_classifier ({classifier}) at grpc 127.0.0.1:" in line and "metrics 127.0.0.1:" in line
    url = re.search(r"grpc (\S+),", line)[1]
    with Client(url) as client:
        assert client.classify("good")[0].label == "positive"
    processes = descendants(process.pid)
    prefix = region_prefix(processes)
    assert len(processes) == 3 and regions(prefix)  # the server and the stubs of two Python models

    process.send_signal(number)

    assert process.wait(timeout=40) == 0
    assert all_end(processes)
    assert not regions(prefix)
    assert list(tmp_path.iterdir()) == []
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", int(url.split(":")[1])))


def test_a_closed_terminal_ends_it_in_order(repository: Path, tmp_path: Path) -> None:
    """It can say nothing any more, and answers what is in flight all the same: exit code 0, nothing left."""
    master, terminal = pty.openpty()
    ports = [argument for name in ("http", "grpc", "metrics") for argument in (f"--{name}-port", "0")]
    process = subprocess.Popen(
        [sys.executable, "-m", "ensemble", "serve", "--repository", str(repository), "--classifier", "onnx", *ports],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(terminal)
    try:
        said = b""
        while not (found := re.search(rb"ready: .* grpc (\S+),", said)):
            said += os.read(master, 4096)
        processes = descendants(process.pid)
        with grpc.InferenceServerClient(found[1].decode()) as client:
            answers: queue.Queue = queue.Queue()
            for _ in range(8):
                client.async_infer(
                    "text_classifier", [texts_input(["word " * 100])], lambda result, error: answers.put(error)
                )
            errors = [answers.get(timeout=60)]  # so the others are in

            os.close(master)

            errors += [answers.get(timeout=60) for _ in range(7)]
        assert errors == [None] * 8
        assert process.wait(timeout=40) == 0
        assert all_end(processes)
        assert list(tmp_path.iterdir()) == []
    finally:
        process.kill()
        process.wait()


def test_a_second_signal_ends_it_at_once(serve: Serve) -> None:
    """Whoever presses Ctrl-C twice does not wait: exit code 1, and still nothing is left."""
    process = serve()
    ready_line(process)
    processes = descendants(process.pid)
    prefix = region_prefix(processes)
    assert regions(prefix)

    process.send_signal(signal.SIGINT)
    while "a second signal ends at once" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)

    assert process.wait(timeout=40) == 1
    assert "Traceback" not in process.stderr.read()
    assert all_end(processes)
    assert not regions(prefix)


def test_a_launcher_that_was_killed_can_be_started_again_at_once(serve: Serve, tmp_path: Path) -> None:
    """kill -9 of the command, which can do nothing about it: the kernel ends its server, on whose ports another starts.

    That one clears away what the first has left in the temporary folder and in /dev/shm.
    """
    process = serve()
    ports = re.search(r"grpc \S+:(\d+), http \S+:(\d+), metrics \S+:(\d+)/", ready_line(process)).groups()
    processes = descendants(process.pid)
    prefix = region_prefix(processes)
    (left,) = tmp_path.iterdir()

    process.kill()
    process.wait()
    arguments = zip(("--grpc-port", "--http-port", "--metrics-port"), ports, strict=True)
    again = serve(*(argument for pair in arguments for argument in pair))

    assert f"127.0.0.1:{ports[0]}," in ready_line(again)
    assert all_end(processes)
    assert (left.exists(), regions(prefix)) == (False, set())


def test_a_log_that_cannot_be_written_does_not_stop_the_server(repository: Path, server: Server) -> None:
    """The server's output is read on whatever becomes of it, or its pipe would fill and it would stand still."""

    def broken(line: str) -> None:
        raise BrokenPipeError

    options = ServerOptions(repository, config_name="cpu", http_port=0, grpc_port=0, metrics_port=0)
    with Server(options, log=broken) as other:
        with grpc.InferenceServerClient(other.url) as client:
            client.infer("text_classifier", [texts_input(["the first request logs a warning"])])

        assert other._reader.is_alive()


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGKILL, "the server ended by itself (exit code -9)"),
        (signal.SIGSEGV, 'it crashed, "Signal (11) received.": deploy/RUNBOOK.md'),
    ],
)
def test_a_server_that_dies_ends_the_command(serve: Serve, number: int, said: str) -> None:
    """Exit code 1, a line that says so, and its stubs do not stay."""
    process = serve()
    ready_line(process)
    processes = descendants(process.pid)
    (server,) = [pid for pid in processes if descendants(pid)]

    os.kill(server, number)
    _, errors = process.communicate(timeout=60)

    assert process.returncode == 1
    assert "error: the server ended by itself" in errors
    assert said in errors
    assert all_end(processes)
