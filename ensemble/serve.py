# SPDX-License-Identifier: Apache-2.0
"""Run the Triton server in the foreground, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from ensemble.artifacts import CURRENT, FOLDER, MANIFEST, Manifest
from ensemble.choice import CLASSIFIERS, Choice, choose
from ensemble.errors import ConfigError
from ensemble.gpu import visible_gpus
from ensemble.preflight import engine_problems, sound
from ensemble.runtime import find_runtime
from ensemble.server import Server, ServerOptions


class Stop(BaseException):
    """A signal asked for an orderly end."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "--repository", type=Path, default=Path("model_repository"), help="what to serve (default: %(default)s)"
    )
    add_classifier(parser)
    parser.add_argument("--address", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    for protocol, port in (("http", 8000), ("grpc", 8001), ("metrics", 8002)):
        parser.add_argument(f"--{protocol}-port", type=_port, default=port, help="default: %(default)s; 0: any")


def add_classifier(parser: argparse.ArgumentParser) -> None:
    """The argument of every command that starts a server."""
    parser.add_argument(
        "--classifier",
        choices=CLASSIFIERS,
        default="auto",
        help="tensorrt: the engine, on the GPU; onnx: the packed graph on ONNX Runtime, on the CPU; baseline: the "
        "stacked TorchScript handler, on every GPU Triton sees or else the CPU; auto: tensorrt with a GPU and an "
        "engine, baseline with a GPU alone, onnx without (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop: 0, or 1 if a second signal cut that short.

    A start that fails, or a server that ends by itself, raises ServerError.
    """
    server, choice = open_server(
        args.repository,
        args.classifier,
        args.address,
        args.http_port,
        args.grpc_port,
        args.metrics_port,
        log=_to_stderr,
    )
    print(choice.why, flush=True)
    signals = _Signals(server)
    try:
        server.start()
        print(
            f"ready: text_classifier ({choice.classifier}) at grpc {server.url}, "
            f"http {args.address}:{server.http_port}, metrics {args.address}:{server.metrics_port}/metrics; "
            "Ctrl-C stops it",
            flush=True,
        )
        server.wait()
    except Stop:
        print("stopping: answering what is in flight; a second signal ends at once", file=sys.stderr, flush=True)
        server.stop()
    finally:
        server.kill()
    return 1 if signals.second else 0


class _Signals:
    """The first SIGINT, SIGTERM or SIGHUP (the terminal is gone) raises Stop; later ones end the server at once."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.first = self.second = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.first:
            self.first = True
            raise Stop
        self.second = True
        self.server.end_processes()


def open_server(
    repository: Path,
    asked: str,
    address: str = "127.0.0.1",
    http: int = 0,
    grpc: int = 0,
    metrics: int = 0,
    *,
    log: Callable[[str], None] = lambda line: None,
) -> tuple[Server, Choice]:
    """A server, not yet started, and what it will serve, once the repository is known to be sound.

    asked: one of CLASSIFIERS. Raises ConfigError or ServerError.
    """
    runtime, gpus = find_runtime(), visible_gpus()
    choice = choose(asked, gpus, _installed(repository), runtime)
    contract, manifest = sound(repository, choice.config_name)
    if choice.classifier == "tensorrt" and (
        problems := engine_problems(repository, contract, manifest, runtime.tensorrt, gpus.devices)
    ):
        raise ConfigError("\n".join(problems))
    options = ServerOptions(
        repository,
        choice.config_name,
        address=address,
        http_port=http,
        grpc_port=grpc,
        metrics_port=metrics,
    )
    return Server(options, runtime, log=log), choice


def _installed(repository: Path) -> Manifest | None:
    """The manifest of what was exported; None if nothing was, which sound() tells in full."""
    folder = repository / FOLDER / CURRENT
    return Manifest.read(folder) if (folder / MANIFEST).is_file() else None


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


def _port(text: str) -> int:
    port = int(text) if text.isdigit() else -1
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: give 0 to 65535")
    return port
