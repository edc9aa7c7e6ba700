# SPDX-License-Identifier: Apache-2.0
"""What keeps a model on a Triton server slow: a verdict with its evidence and the fix. Any model, any server.

    python -m perf doctor --url HOST:PORT --model NAME

It sends a short load over gRPC to that host and no other (said before it starts, and bounded by --seconds, --requests
and --clients), and reads the server's statistics, the model's config and, where they can be reached, the metrics.
Inputs are made from the config: texts, token ids of realistic lengths, or random numbers; --input-data gives others.
Other traffic on the model meanwhile blurs the counts.

With --watch-seconds it sends nothing and counts what the clients that there are send meanwhile. That shows what no load
can, clients that send one request at a time; it leaves open what only a load shows, and says what that is.

With --repository it also runs each Python handler's own model.py, in a process of its own and with a time limit: it
loads the model once more, hands execute() 1, 2, 8 and 16 requests and counts forward passes and tokenizer calls. That
is proof where the statistics only hint. It needs the Python packages of the handler.

Faults it names: not batching (for the server, or for its clients), batches taken apart, tokenizes one by one,
tokenizer-bound, queue-bound, padding waste, responses that do not match requests. Exit code 0: healthy. 1: a fault was
found. 2: it cannot tell, or could not examine.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ensemble.errors import InvalidRequest, PipelineError
from perf import record
from perf.doctor import padding, report
from perf.doctor.counts import Metrics
from perf.doctor.diagnosis import diagnose
from perf.doctor.examination import ROUNDS, examine
from perf.doctor.handlers import verdicts as of_handler
from perf.doctor.input_data import FileInputs
from perf.doctor.inputs import LONGEST, InputMaker, built_in_texts, read_texts
from perf.doctor.padding import TEXTS, Sample
from perf.doctor.probe import SECONDS, Probe, probe
from perf.doctor.seen import PHASES, Examination, Limits
from perf.doctor.target import Target, find
from perf.doctor.verdict import CANNOT_TELL, PROVED, UNKNOWN, Verdict, exit_code
from perf.doctor.watching import watch
from perf.terminal import console

METRICS_PORT = 8002


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The doctor's own arguments."""
    parser.add_argument("--url", required=True, metavar="HOST:PORT", help="the server's gRPC address")
    parser.add_argument("--model", required=True, metavar="NAME", help="a model or an ensemble on it")
    parser.add_argument(
        "--repository", type=Path, metavar="DIR", help="its model repository: also RUN the Python handlers in it, here"
    )
    parser.add_argument("--texts", type=Path, metavar="FILE", help="texts like yours, one a line (default: a sample)")
    parser.add_argument("--input-data", type=Path, metavar="FILE", help="requests, as perf_analyzer's --input-data")
    parser.add_argument(
        "--watch-seconds", type=float, metavar="SECONDS", help="send nothing; watch the traffic there is for so long"
    )
    parser.add_argument("--seconds", type=float, default=9.0, help="of sending, in all (default: %(default)g)")
    parser.add_argument("--requests", type=int, default=6000, help="at most, in all (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=32, help="requests in flight at most (default: %(default)s)")
    parser.add_argument(
        "--metrics-url", metavar="URL", help=f"Prometheus metrics (default: http://HOST:{METRICS_PORT}/metrics)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")


def run(args: argparse.Namespace) -> int:
    """Examine and print; returns the exit code."""
    try:
        return _run(args)
    except (PipelineError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2


def _run(args: argparse.Namespace) -> int:
    limits = _limits(args)
    if args.repository is not None and not args.repository.is_dir():
        raise InvalidRequest(f"--repository {args.repository} is no folder: give the server's model repository")
    target = find(args.url, args.model)
    seen: Examination | None = None
    found: Sample | None = None
    cap = LONGEST
    closed = _closed(target)
    metrics = Metrics(args.metrics_url or f"http://{args.url.rpartition(':')[0]}:{METRICS_PORT}/metrics")
    if args.watch_seconds:
        _say(f"Watching {target.model} on {target.url} for {args.watch_seconds:g} s. Nothing is sent to it.")
        seen = watch(target, args.watch_seconds, metrics)
    elif not closed:
        inputs = _inputs(args, target)
        _say(_announcement(target, limits))
        found = padding.sample(target, inputs)
        seen = examine(target, inputs, limits, metrics)
        cap = inputs.cap if isinstance(inputs, InputMaker) else cap
    if seen and metrics.why:
        _say(f"Without metrics: {metrics.why}")
    probes = _probes(args, target, cap)
    if seen:
        verdicts = diagnose(seen, found, probes)
    else:
        verdicts = [verdict for one in probes.values() for verdict in of_handler(one)]
        fix = "try it with --watch-seconds, or with --repository"
        verdicts.append(Verdict(CANNOT_TELL, UNKNOWN, target.model, PROVED, (closed,), fix))
    report.show(console(), seen, verdicts)
    if args.json:
        record.write(args.json, report.as_json(target, seen, found, probes, verdicts))
    return exit_code(verdicts)


def _say(line: str) -> None:
    console().print(line, markup=False, highlight=False)


def _limits(args: argparse.Namespace) -> Limits:
    if not 0 < args.seconds <= 600:
        raise InvalidRequest(f"--seconds {args.seconds:g}: give more than 0 and at most 600")
    if args.watch_seconds is not None and not 0 < args.watch_seconds <= 86_400:
        raise InvalidRequest(f"--watch-seconds {args.watch_seconds:g}: give more than 0 and at most 86400")
    if args.watch_seconds and args.input_data:
        raise InvalidRequest("--watch-seconds sends nothing: leave --input-data out, or --watch-seconds")
    if not 1 <= args.clients <= 1024:
        raise InvalidRequest(f"--clients {args.clients}: give 1 to 1024")
    least = ROUNDS * len(PHASES) * args.clients  # a request of each client in each part
    if args.requests < least:
        raise InvalidRequest(f"--requests {args.requests}: give at least {least} for {args.clients} clients")
    return Limits(args.seconds, args.requests, args.clients)


def _inputs(args: argparse.Namespace, target: Target) -> InputMaker | FileInputs:
    if args.input_data:
        return FileInputs(target.config, args.input_data)
    return InputMaker(target.config, read_texts(args.texts) if args.texts else built_in_texts())


def _closed(target: Target) -> str:
    """Why no load can be sent; "" if it can."""
    for config in (target.config, *(leaf.config for leaf in target.leaves.values())):
        if config.HasField("sequence_batching"):
            return f"{config.name} is stateful: its requests belong to sequences, which the doctor does not make up"
    return ""


def _announcement(target: Target, limits: Limits) -> str:
    return (
        f"Sending to {target.url}, model {target.model}, and to no other host: for at most {limits.seconds:g} s in "
        f"{ROUNDS} rounds of {len(PHASES)} parts, at most {limits.requests} requests and {limits.clients} in flight "
        f"(besides, up to {TEXTS + 20} single ones first). What is in flight at the end of a part is waited for."
    )


def _probes(args: argparse.Namespace, target: Target, cap: int) -> dict[str, Probe]:
    if args.repository is None:
        return {}
    texts = read_texts(args.texts) if args.texts else built_in_texts()
    probes = {}
    for name, leaf in target.leaves.items():
        if leaf.backend == "python":
            _say(f"Running {args.repository}/{name}'s model.py here, for at most {SECONDS:g} s.")
            probes[name] = probe(leaf, args.repository, texts, cap)
    return probes
