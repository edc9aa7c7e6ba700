# SPDX-License-Identifier: Apache-2.0

"""Classify texts from the command line or standard input on a running server; print a table or JSON lines."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from ensemble.client.client import Classification, Client, ClientOptions
from ensemble.client.options import DEFAULT_URL, TLS_FILES
from ensemble.errors import InvalidRequest, PipelineError, Unavailable

if TYPE_CHECKING:
    from rich.table import Table

# Texts held at a time: standard input may be endless. Each batch has the whole of --timeout-seconds.
BATCH = 256

# Characters of a text in the table.
_SHOWN = 60

_EPILOG = """\
One answer for every text, in order. A text that cannot be classified gets an error in its place and the others are
classified all the same. Exit status: 0 all classified, 1 some were not, 2 wrong usage or nobody answers,
130 interrupted."""


@dataclass(frozen=True)
class Failure:
    """The row of a text that has no answer."""

    text: str
    error: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `run` reads."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "texts", nargs="*", metavar="TEXT", help="a text; without any, every line of standard input (UTF-8) is one"
    )
    parser.add_argument(
        "--url", default=DEFAULT_URL, metavar="HOST:PORT",
        help="Triton's gRPC service; several servers: ADDRESS:PORT,ADDRESS:PORT (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--model", default=ClientOptions.model, help="the ensemble to ask (default: %(default)s)")
    parser.add_argument(
        "--timeout-seconds", type=float, default=ClientOptions.timeout_seconds, metavar="S",
        help=f"time for each {BATCH} texts, retries included (default: %(default)s)",
    )  # fmt: skip
    tls = parser.add_argument_group("TLS (any of these turns it on; files are PEM)")
    tls.add_argument("--ssl", action="store_true", help="speak TLS, trusting the public authorities that gRPC knows")
    tls.add_argument("--root-certificates", metavar="FILE", help="trust those who are in FILE instead")
    tls.add_argument("--certificate-chain", metavar="FILE", help="the client's certificate, for mutual TLS")
    tls.add_argument("--private-key", metavar="FILE", help="and its key")
    tls.add_argument("--server-name", metavar="NAME", help="the name in the server's certificate, if --url has another")
    parser.add_argument(
        "--format", choices=("table", "jsonl"), help="default: table on a terminal, jsonl into a file or pipe"
    )


def run(args: argparse.Namespace) -> int:
    """Classify what `args` name and print the answers; the exit status is said in --help."""
    try:
        client = Client(args.url, model=args.model, timeout_seconds=args.timeout_seconds, **_tls(args))
    except InvalidRequest as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        with client:
            return _classify_all(client, args)
    except BrokenPipeError:
        # Who closed the pipe (`| head`) has what they wanted. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def _tls(args: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(args, name) for name in (*TLS_FILES, "server_name")}
    return {"ssl": args.ssl or any(value is not None for value in given.values()), **given}


def table(rows: Iterable[Classification | Failure]) -> Table:
    """The rich table of `rows`: text, label, probability, tokens, latency."""
    from rich.table import Table
    from rich.text import Text

    drawn = Table()
    drawn.add_column("text", overflow="fold")
    drawn.add_column("label", overflow="fold", max_width=40)
    for name in ("probability", "tokens", "latency"):
        drawn.add_column(name, justify="right", no_wrap=True)
    # Text, not str: rich would take "[b]" in a str for markup.
    for row in rows:
        if isinstance(row, Failure):
            drawn.add_row(Text(_shortened(row.text)), Text(_printable(row.error), style="red"))
        else:
            tokens = f"{row.num_tokens} (cut)" if row.truncated else f"{row.num_tokens}"
            drawn.add_row(
                Text(_shortened(row.text)),
                Text(_printable(row.label), style="bold"),
                f"{row.probability:.4f}",
                tokens,
                f"{row.seconds * 1000:.1f} ms",
            )
    return drawn


def _classify_all(client: Client, args: argparse.Namespace) -> int:
    as_table = args.format == "table" or (args.format is None and sys.stdout.isatty())
    if isinstance(sys.stdout, io.TextIOWrapper):
        # JSON is UTF-8 whatever the locale; a lone surrogate becomes the escape that JSON has for it.
        sys.stdout.reconfigure(encoding=None if as_table else "utf-8", errors="backslashreplace")
    failed = False
    done = 0
    for batch in _batches(args.texts or _lines()):
        answers = client.classify_each(batch)
        gone = [answer for answer in answers if isinstance(answer, Unavailable)]
        if gone and not any(isinstance(answer, Classification) for answer in answers):
            print(f"error: {gone[0]}", file=sys.stderr)
            return 2
        place = "text" if args.texts else "line"
        rows = [_row(batch[i], answers[i], f"{place} {done + i + 1}") for i in range(len(batch))]
        _print_table(rows) if as_table else _print_json(rows)
        failed = failed or any(isinstance(row, Failure) for row in rows)
        done += len(batch)
    return 1 if failed else 0


def _lines() -> Iterator[bytes]:
    if sys.stdin.isatty():
        print("Reading texts, one a line; end with Ctrl-D.", file=sys.stderr)
    for line in sys.stdin.buffer:
        yield line.removesuffix(b"\n").removesuffix(b"\r")


def _batches(texts: Iterable[str | bytes]) -> Iterator[list[str | bytes]]:
    iterator = iter(texts)
    while batch := list(islice(iterator, BATCH)):
        yield batch


def _row(text: str | bytes, answer: Classification | PipelineError, place: str) -> Classification | Failure:
    if isinstance(answer, Classification):
        return answer
    shown = text if isinstance(text, str) else text.decode("utf-8", "replace")
    return Failure(shown, f"{place}: {answer}")


def _print_table(rows: Sequence[Classification | Failure]) -> None:
    from rich.console import Console

    Console().print(table(rows))


def _print_json(rows: Sequence[Classification | Failure]) -> None:
    for row in rows:
        print(json.dumps(_json_object(row), ensure_ascii=False))
    sys.stdout.flush()


def _json_object(row: Classification | Failure) -> dict[str, Any]:
    if isinstance(row, Failure):
        return {"text": row.text, "error": row.error}
    return {
        "text": row.text,
        "label": row.label,
        "probability": row.probability,
        "scores": row.scores,
        "num_tokens": row.num_tokens,
        "truncated": row.truncated,
        "seconds": round(row.seconds, 6),
    }


def _shortened(text: str) -> str:
    return _printable(text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…")


def _printable(text: str) -> str:
    """`text` on one line, and without control characters, which could drive the reader's terminal."""
    return "".join(character if character.isprintable() else "·" for character in text)
