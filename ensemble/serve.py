# SPDX-License-Identifier: Apache-2.0
"""Run the embedded Triton server in the foreground, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from ensemble.artifacts import verify
from ensemble.contract import Contract
from ensemble.errors import ConfigError
from ensemble.server import Server, ServerOptions

# What the ensemble's second step is -> the config files that say so (see model_repository/*/configs).
CONFIG_NAMES = {"classifier": "cpu", "baseline": "baseline"}


class Stop(BaseException):
    """A signal asked for an orderly end."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "--repository", type=Path, default=Path("model_repository"), help="what to serve (default: %(default)s)"
    )
    parser.add_argument(
        "--classifier",
        choices=sorted(CONFIG_NAMES),
        default="classifier",
        help="classifier: the packed graph on ONNX Runtime; baseline: the stacked TorchScript handler, on the CPU or "
        "on every GPU Triton sees (default: %(default)s)",
    )
    parser.add_argument("--address", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    for protocol, port in (("http", 8000), ("grpc", 8001), ("metrics", 8002)):
        parser.add_argument(f"--{protocol}-port", type=_port, default=port, help="default: %(default)s; 0: any")


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop: 0, or 1 if a second signal cut that short.

    A start that fails, or a server that ends by itself, raises ServerError.
    """
    server = open_server(
        args.repository,
        args.classifier,
        args.address,
        args.http_port,
        args.grpc_port,
        args.metrics_port,
        log=_to_stderr,
    )
    signals = _Signals(server)
    try:
        server.start()
        print(
            f"ready: text_classifier ({args.classifier}) at grpc {server.url}, http {args.address}:{server.http_port}, "
            f"metrics {args.address}:{server.metrics_port}/metrics; Ctrl-C stops it",
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
    classifier: str,
    address: str = "127.0.0.1",
    http: int = 0,
    grpc: int = 0,
    metrics: int = 0,
    *,
    log: Callable[[str], None] = lambda line: None,
) -> Server:
    """A server, not yet started, once the repository is known to be sound. Raises ConfigError or ServerError."""
    contract = Contract.read(repository, CONFIG_NAMES[classifier])
    manifest = verify(repository, contract.models)
    if manifest.max_length > contract.max_sequence_length:
        raise ConfigError(
            f"{repository}: exported for {manifest.max_length} tokens, max_sequence_length in tokenizer/config.pbtxt "
            f"is {contract.max_sequence_length}: run make export again"
        )
    options = ServerOptions(
        repository,
        CONFIG_NAMES[classifier],
        address=address,
        http_port=http,
        grpc_port=grpc,
        metrics_port=metrics,
    )
    return Server(options, log=log)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


def _port(text: str) -> int:
    port = int(text) if text.isdigit() else -1
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: give 0 to 65535")
    return port
