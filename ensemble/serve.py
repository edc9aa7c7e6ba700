# SPDX-License-Identifier: Apache-2.0
"""Run the Triton server in the foreground, and heal its models, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TextIO

from ensemble.arguments import positive
from ensemble.artifacts import CURRENT, FOLDER, MANIFEST, Manifest
from ensemble.contract import Contract
from ensemble.errors import ConfigError
from ensemble.launcher.admin_key import GRPC_HEADER, HTTP_HEADER, new_key, read_key
from ensemble.launcher.choice import CLASSIFIERS, Choice, choose
from ensemble.launcher.engine_preflight import engine_problems
from ensemble.launcher.gpu import visible_gpus
from ensemble.launcher.options import ServerOptions, Trace
from ensemble.launcher.pipeline_question import PipelineQuestion
from ensemble.launcher.preflight import check_tokenizer, legible, sound, unguarded
from ensemble.launcher.room import check_shared_memory
from ensemble.launcher.runtime import find_runtime
from ensemble.launcher.server import DRAIN_SECONDS, Server
from ensemble.launcher.supervisor import Supervisor
from ensemble.launcher.tls_files import TlsFiles

# For the first classification, which a model may have to warm up for.
FIRST_ANSWER_SECONDS = 60.0


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
    parser.add_argument(
        "--admin-key-file",
        type=Path,
        metavar="FILE",
        help="holds the key that opens repository control, shared memory, trace and logging (headers "
        f"{GRPC_HEADER} and, on HTTP, {HTTP_HEADER}); default: a new one that only this process knows",
    )
    parser.add_argument(
        "--trace-url",
        metavar="URL",
        help="an OpenTelemetry collector, OTLP over HTTP, that gets traces (deploy/tracing/README.md); default: none",
    )
    parser.add_argument(
        "--trace-rate", type=positive(int), default=100, metavar="N", help="of one request in N (default: %(default)s)"
    )
    tls = parser.add_argument_group("TLS on the gRPC port (HTTP then listens on 127.0.0.1 only: it knows no TLS)")
    tls.add_argument("--tls-certificate", type=Path, metavar="FILE", help="of the server, PEM")
    tls.add_argument("--tls-key", type=Path, metavar="FILE", help="of the certificate, PEM, without a passphrase")
    tls.add_argument("--tls-client-ca", type=Path, metavar="FILE", help="let in only callers with a certificate of it")


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
    """Serve until told to stop: 0, or 1 if requests in flight were lost, to a second signal or for time.

    A start that fails, and a server that ends by itself or whose models cannot be healed, raise ServerError.
    """
    service = prepare(args.repository, args.classifier, _options(args), log=_to_stderr)
    server, choice = service.server, service.choice
    _say(choice.why)
    if warning := unguarded(args.repository):
        _to_stderr(warning)
    signals, lost = _Signals(server), False
    try:
        server.start()
        PipelineQuestion(server.api, service.contract).check_answer(len(service.manifest.labels), FIRST_ANSWER_SECONDS)
        supervisor = Supervisor(server, service.contract, _to_stderr)
        _say(
            f"ready: text_classifier ({choice.classifier}) at grpc {server.url}{' (TLS)' if args.tls_key else ''}, "
            f"http {server.http_address}:{server.http_port}, metrics {args.address}:{server.metrics_port}/metrics; "
            "Ctrl-C stops it"
        )
        supervisor.run()
    except Stop:
        _to_stderr("stopping: answering what is in flight; a second signal ends at once")
        lost = not server.stop() or signals.second
        if signals.second:
            _to_stderr("stopped at once: what was in flight is lost")
        elif lost:
            _to_stderr(f"stopped: what was not answered within {DRAIN_SECONDS:.0f} s may be lost")
        else:
            _to_stderr("stopped")
    finally:
        signals.first = True  # from here on there is nothing to stop in order
        server.kill()
    return int(lost)


class _Signals:
    """The first SIGINT, SIGTERM or SIGHUP (the terminal is gone) raises Stop; a later one ends the server at once.

    But for SIGHUP: for one terminal it comes twice, from the kernel and from the shell.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self.first = self.second = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.first:
            self.first = True
            raise Stop
        if number != signal.SIGHUP:
            self.second = True
            self.server.end_processes()


@dataclass(frozen=True)
class Service:
    """A server, not yet started, and what it will serve."""

    server: Server
    choice: Choice
    contract: Contract
    manifest: Manifest


@legible()
def prepare(
    repository: Path, asked: str, options: ServerOptions, *, log: Callable[[str], None] = lambda line: None
) -> Service:
    """All that can be known before a server starts, once it is known to be sound.

    asked: one of CLASSIFIERS. options: where to listen, and to whom; what to serve is filled in here.
    Raises ConfigError or ServerError.
    """
    runtime, gpus = find_runtime(), visible_gpus()
    choice = choose(asked, gpus, _installed(repository), runtime)
    contract, manifest = sound(repository, choice.config_name)
    check_tokenizer(repository, manifest)
    if choice.classifier == "tensorrt" and (
        problems := engine_problems(repository, contract, manifest, runtime.tensorrt, gpus.devices)
    ):
        raise ConfigError("\n".join(problems))
    check_shared_memory(contract, len(gpus.devices))
    options = replace(options, repository=repository, config_name=choice.config_name)
    return Service(Server(options, runtime, log=log), choice, contract, manifest)


def open_server(repository: Path, asked: str) -> tuple[Server, Choice]:
    """A server on free ports of 127.0.0.1, not yet started, and what it will serve.

    asked: one of CLASSIFIERS. Raises ConfigError or ServerError.
    """
    service = prepare(repository, asked, ServerOptions(repository, http_port=0, grpc_port=0, metrics_port=0))
    return service.server, service.choice


def _options(args: argparse.Namespace) -> ServerOptions:
    """Where the arguments say to listen, and to whom. Raises ConfigError for files that do not fit."""
    if (args.tls_certificate is None) != (args.tls_key is None):
        raise ConfigError("--tls-certificate and --tls-key go together: give both, or neither")
    if args.tls_client_ca and args.tls_key is None:
        raise ConfigError("--tls-client-ca needs --tls-certificate and --tls-key: give them, or leave it out")
    tls = TlsFiles(args.tls_certificate, args.tls_key, args.tls_client_ca) if args.tls_key else None
    key = read_key(args.admin_key_file) if args.admin_key_file else new_key()
    return ServerOptions(
        args.repository,
        address=args.address,
        http_port=args.http_port,
        grpc_port=args.grpc_port,
        metrics_port=args.metrics_port,
        admin_key=key,
        tls=tls,
        trace=Trace(args.trace_url, args.trace_rate) if args.trace_url else None,
    )


def _installed(repository: Path) -> Manifest | None:
    """The manifest of what was exported; None if nothing was, which sound() tells in full."""
    folder = repository / FOLDER / CURRENT
    return Manifest.read(folder) if (folder / MANIFEST).is_file() else None


def _say(line: str, stream: TextIO | None = None) -> None:
    """To stdout, or to `stream`. Whoever read it may be gone, a terminal or a pipe: that is no reason not to serve."""
    with suppress(OSError):
        print(line, file=stream, flush=True)


def _to_stderr(line: str) -> None:
    _say(line, sys.stderr)


def _port(text: str) -> int:
    port = int(text) if text.isdigit() else -1
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: give 0 to 65535")
    return port
