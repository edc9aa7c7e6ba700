# SPDX-License-Identifier: Apache-2.0
"""Start the real server on free ports, classify a few texts over gRPC, print the answers, stop the server."""

from __future__ import annotations

import argparse
from pathlib import Path

from ensemble.classify import table
from ensemble.client.client import Client
from ensemble.serve import add_classifier, open_server

TEXTS = (
    "An absorbing film: I forgot the time, and I would watch it again tomorrow.",
    "The battery died after two days and nobody answered my e-mails.",
    "Delivery was quick, the box was dented, the phone itself works like a charm.",
    "Not bad at all!",
    "Das ist kein Englisch 🙂",
    "The committee will meet on Thursday. " * 90,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="texts to classify (default: a few built-in ones)")
    parser.add_argument(
        "--repository", type=Path, default=Path("model_repository"), help="what to serve (default: %(default)s)"
    )
    add_classifier(parser)


def run(args: argparse.Namespace) -> int:
    """Print the table; 0. A server that does not start raises ServerError."""
    from rich.console import Console  # here, so that the other commands do not wait for it

    console = Console()
    server, choice = open_server(args.repository, args.classifier)
    console.print(choice.why, highlight=False, markup=False, soft_wrap=True)
    try:
        with console.status("starting the server"):
            server.start()
        with Client(server.url) as client:
            # The first request pays for memory that later ones reuse; it would be the only thing the latencies show.
            client.classify("warm up")
            # One by one, so that each latency is its own.
            answers = [client.classify(text)[0] for text in args.texts or TEXTS]
    finally:
        with console.status("stopping the server"):
            server.stop()
    console.print(table(answers))
    return 0
