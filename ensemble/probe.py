# SPDX-License-Identifier: Apache-2.0
"""Ask a running server for one classification over gRPC, as its callers do: exit code 0 if the answer came, else 1.

A server whose models died goes on saying that it is ready. Runs every few seconds, so it imports gRPC and little else,
neither numpy nor tritonclient; a request that never changes needs neither. TLS files are checked as for `Client`.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from pathlib import Path

from ensemble.client.options import TLS_FILES, ClientOptions
from ensemble.errors import InvalidRequest, Unavailable

METHOD = "/inference.GRPCInferenceService/ModelInfer"
# A ModelInferRequest: `text`, BYTES [1, 1], for `probabilities` of text_classifier.
REQUEST = (
    b"\n\x0ftext_classifier*&\n\x04text\x12\x05BYTES\x1a\x02\x01\x01*\x13B\x11Is anybody there?2\x0f\n\rprobabilities"
)

# What the environment may say too.
TLS_SETTINGS = (*TLS_FILES, "server_name")

# A full queue is asked again after so long, while there is time.
PAUSE_SECONDS = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.epilog = "Exit code: 0 if an answer came, 1 if not, with one line that says why."
    parser.add_argument(
        "--url", default="127.0.0.1:8001", metavar="HOST:PORT", help="Triton's gRPC service (default: %(default)s)"
    )
    parser.add_argument(
        "--deadline-seconds", type=_seconds, default=5.0, metavar="S", help="for the answer (default: %(default)s)"
    )
    tls = parser.add_argument_group(
        "TLS (any of these turns it on; files are PEM)",
        "A container's probes can all take these from its environment: " + ", ".join(map(_variable, TLS_SETTINGS)),
    )
    tls.add_argument("--ssl", action="store_true", help="speak TLS, trusting the public authorities that gRPC knows")
    tls.add_argument("--root-certificates", type=Path, metavar="FILE", help="trust those who are in FILE instead")
    tls.add_argument("--certificate-chain", type=Path, metavar="FILE", help="the probe's certificate, for mutual TLS")
    tls.add_argument("--private-key", type=Path, metavar="FILE", help="and its key")
    tls.add_argument("--server-name", metavar="NAME", help="the name in the server's certificate, if --url has another")
    parser.set_defaults(**{name: os.environ.get(_variable(name)) or None for name in TLS_SETTINGS})


def run(args: argparse.Namespace) -> int:
    """0 once an answer came. Raises Unavailable if none did within the deadline."""
    if why := why_unhealthy(args):
        raise Unavailable(f"unhealthy: {why}")
    return 0


def why_unhealthy(args: argparse.Namespace) -> str | None:
    """None once an answer came within the deadline, else why none did."""
    import grpc

    # A proxy that the environment names is not for a server of this machine or this pod.
    options = [("grpc.enable_http_proxy", 0)]
    if args.server_name:
        options.append(("grpc.ssl_target_name_override", args.server_name))
    try:
        credentials = _credentials(args)
    except InvalidRequest as error:
        return str(error)
    if credentials is None:
        channel = grpc.insecure_channel(args.url, options)
    else:
        channel = grpc.secure_channel(args.url, credentials, options)
    deadline = time.monotonic() + args.deadline_seconds
    with channel:
        ask = channel.unary_unary(METHOD)
        while True:
            try:
                answer = ask(REQUEST, timeout=max(0.001, deadline - time.monotonic()))
            except grpc.RpcError as error:
                why = f"{args.url}: {error.code().name}: {_line(error.details() or '')}"
                if "maximum queue size" not in why or time.monotonic() + PAUSE_SECONDS > deadline:
                    return why
                time.sleep(PAUSE_SECONDS)
            else:
                return None if b"probabilities" in answer else f"{args.url} answers, but not with probabilities"


def _credentials(args: argparse.Namespace) -> object | None:
    """Of TLS; None where nothing asks for it. Raises InvalidRequest, as Client does: gRPC would end the process."""
    import grpc

    given = {name: getattr(args, name) for name in TLS_SETTINGS}
    if not (args.ssl or any(given.values())):
        return None
    ClientOptions(ssl=True, **given)
    files = (args.root_certificates, args.private_key, args.certificate_chain)
    credentials: object = grpc.ssl_channel_credentials(*(file and file.read_bytes() for file in files))
    return credentials


def _variable(setting: str) -> str:
    return f"PROBE_{setting.upper()}"


def _line(text: str) -> str:
    """A message as one line, without gRPC's own part of it."""
    return re.sub(r"\s+", " ", re.sub(r"failed to connect to all addresses; last error: (\w+: )?", "", text)).strip()


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0 and at most 3600")
    return seconds
