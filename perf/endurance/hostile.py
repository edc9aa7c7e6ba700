# SPDX-License-Identifier: Apache-2.0
"""Hostile requests of every kind at the real server, good ones among them, and whether the server minds.

    python -m perf hostile --requests 60000

Over gRPC: messages that are none, lengths that lie, odd shapes, types, names, parameters, ids and texts, at the
ensemble and straight at its steps and the baseline (hostile_grpc.py); floods of tiny requests. Over HTTP: bodies
that stop half-way, headers that lie, JSON that is none, callers that dawdle (hostile_http.py). Good requests
among them must be answered rightly, with texts of every block of Unicode and as long as a server takes. Exit code 0:
they were, a text one byte longer was refused, all processes live, none of our handlers failed inside, no request hung,
and neither memory, shared memory, file descriptors nor threads leak. 1: not so. 2: too few requests to tell about
memory. Writes a record, JSON. Request number N of a seed is always the same: --only N sends it again.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from rich.progress import Progress

from ensemble.arguments import positive
from ensemble.contract import Contract
from ensemble.errors import ServerError
from ensemble.launcher.server import Server
from ensemble.samples import load_samples
from perf.endurance import exchange, hostile_grpc, hostile_http, reference
from perf.endurance import trial as endurance
from perf.endurance.exchange import Caller, Refused
from perf.endurance.hostile_texts import of_every_block
from perf.endurance.questions import FULL_QUEUE, Asker
from perf.endurance.reference import Reference
from perf.endurance.server_processes import Sample, replaced, sample
from perf.endurance.tally import Tally
from perf.endurance.trend import CANNOT_TELL, GROWS, Trend, trend
from perf.endurance.trial import Verdict
from perf.endurance.workers import workers

# Good requests, per hostile one; and floods.
GOOD_SHARE, FLOOD_SHARE = 0.15, 0.01
FLOOD = 64
# Good ones before the first hostile one.
WARM_UP_REQUESTS = 6
# A request without an answer for so long has hung.
SECONDS = 120.0
# Before a good request that was not taken is sent again.
BACK_OFF_SECONDS = 0.2
# Between looks at the server's processes.
TICK_SECONDS = 0.5
# The last requests, kept for the day one of them ends the server; and of those, printed.
REMEMBERED, PRINTED = 200, 12
# Bytes that a hostile request may leave behind: a leak of a whole message would be more.
LIMIT = 1024.0
# Until its memory is as large as it gets, the server gains with every new kind of request.
WARM_UP_SHARE = 0.3
# What execution.py answers for what a handler did not foresee.
OUR_FAULT = "internal error ("
# What gRPC says where there is no server any more.
NOBODY_THERE = "failed to connect"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The measurement's own arguments."""
    endurance.add_arguments(parser, "hostile", clients=8, texts=60)
    parser.add_argument(
        "--requests",
        type=positive(int),
        default=60_000,  # 20,000 did not always tell: the server's memory reaches its level late
        help="hostile ones, good ones not counted (default: %(default)s)",
    )
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="send these again and no others")


def run(args: argparse.Namespace) -> int:
    """Send, compare, write and print; returns the exit code."""
    hostile = Hostile(args)
    code = endurance.run(args, hostile.result, hostile.measure, hostile.verdict)
    endurance.show(hostile.result)
    return code


@dataclass(frozen=True)
class Attack:
    """One hostile request. number: with the seed, all it takes to make it again."""

    number: int
    call: hostile_grpc.Call | hostile_http.Call

    @classmethod
    def of(cls, seed: int, number: int, longest: int) -> Attack:
        """The one of this number. longest: bytes of a text that the server takes."""
        rng = random.Random(f"{seed}:{number}")  # noqa: S311
        return cls(number, hostile_grpc.call(rng, longest) if rng.random() < 0.6 else hostile_http.call(rng))

    def described(self) -> dict[str, Any]:
        """For a record."""
        call = self.call
        where = call.method if isinstance(call, hostile_grpc.Call) else f"{call.port}, {call.manner}"
        return {
            "number": self.number,
            "kind": call.kind,
            "where": where,
            "bytes": len(call.payload),
            "begins": repr(call.payload[:80]),
        }


class Hostile:
    """One run of the command. result: what is known so far, as it is written."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._tally = args, Tally()
        self._numbers = iter(args.only or range(args.requests))
        self._total = len(args.only) if args.only else args.requests
        self._lock, self._flooding = threading.Lock(), threading.Lock()
        self._done = 0
        self._recent: deque[Attack] = deque(maxlen=REMEMBERED)
        self._samples: list[tuple[int, Sample]] = []
        self._idle: list[Sample] = []
        self._ended: list[str] = []
        self.result: dict[str, Any] = {
            "what": "hostile",
            "settings": {name: getattr(args, name) for name in ("requests", "only", "clients", "seed")},
            "left_out": {**hostile_grpc.KNOWN, **hostile_http.KNOWN},
        }

    def measure(self, bar: Progress) -> None:
        """Send all, and look at the server's processes meanwhile and before and after."""
        args = self._args
        with endurance.started(args.repository, args.classifier, beside=["baseline"]) as (server, served_by):
            contract = Contract.read(args.repository, server.options.config_name)
            longest = int(contract.models["tokenizer"].parameters["max_text_bytes"].string_value)
            expected = self._texts(served_by, longest)
            self.result |= {"classifier": served_by, "reference": reference.described(expected)}
            asker = Asker(expected, self._tally)
            with Caller(server) as caller:
                for number in range(WARM_UP_REQUESTS):
                    self._good(caller, asker, random.Random(number))  # noqa: S311
            self._idle.append(endurance.idle(server))
            task = bar.add_task("hostile", total=self._total)

            def work(number: int, stop: threading.Event) -> None:
                self._work(server, asker, longest, stop)

            with workers(args.clients, work) as busy:
                while busy(TICK_SECONDS) and self._lives(server):
                    bar.update(task, description=f"hostile, {self._tally.faulty} faults", completed=self._done)
            if not self._ended and self._lives(server):
                self._idle.append(endurance.idle(server))

    def verdict(self) -> Verdict:
        """Of what there is; fills the result too."""
        found = self._trend()
        self.result |= {
            "hostile_requests": self._done,
            "counts": self._tally.described(),
            "samples": [{"requests": requests, **held.described()} for requests, held in self._samples],
            "idle": [held.described() for held in self._idle],
            "bytes_a_request": found and vars(found),
        }
        verdict = Verdict(failed=[*self._ended, *endurance.wrongs(self._tally)])
        if self._ended:
            self.result["suspects"] = [attack.described() for attack in self._recent]
            verdict.failed += [str(attack.described()) for attack in list(self._recent)[-PRINTED:]]
        elif len(self._idle) == 2:
            verdict.failed += endurance.leaks(*self._idle)
        if found and found.verdict(LIMIT) == GROWS:
            verdict.failed.append(
                f"memory grows by {found.slope:.0f} bytes a request ({found.low:.0f} to {found.high:.0f})"
            )
        elif not found or found.verdict(LIMIT) == CANNOT_TELL:
            says = (
                f"{found.slope:.0f} bytes a request ({found.low:.0f} to {found.high:.0f})"
                if found
                else "too few samples"
            )
            verdict.unsure.append(f"memory: {says}, {LIMIT:.0f} is the most: give more --requests")
        return verdict

    def _texts(self, served_by: str, longest: int) -> Reference:
        """Real texts, texts of every block of Unicode, and the longest that the server takes."""
        half = self._args.distinct // 2
        texts = [sample.text for sample in load_samples()[:half]]
        texts += of_every_block(half, random.Random(self._args.seed))  # noqa: S311
        return reference.of_texts(
            self._args.repository, [*texts, "a " * (longest // 2), "\N{EURO SIGN}" * (longest // 3)], served_by
        )

    def _work(self, server: Server, asker: Asker, longest: int, stop: threading.Event) -> None:
        ports = {"http": server.http_port, "grpc": server.grpc_port, "metrics": server.metrics_port}
        sender, rng = hostile_http.Sender(server.http_address, ports), random.Random()  # noqa: S311
        with Caller(server) as caller:
            try:
                while not stop.is_set():
                    with self._lock:
                        number = next(self._numbers, None)
                    if number is None:
                        return
                    rng.seed(f"{self._args.seed}:{number}:good")
                    if rng.random() < GOOD_SHARE:
                        self._good(caller, asker, rng)
                    if rng.random() < FLOOD_SHARE:
                        self._flood(caller, asker)
                    self._attack(caller, sender, Attack.of(self._args.seed, number, longest))
            finally:
                sender.close()

    def _attack(self, caller: Caller, sender: hostile_http.Sender, attack: Attack) -> None:
        self._recent.append(attack)
        kind, call = attack.call.kind, attack.call
        try:
            outcome = _called(caller, call) if isinstance(call, hostile_grpc.Call) else sender.send(call, SECONDS)
        except Refused as error:
            if OUR_FAULT in error.message:
                self._tally.fault(kind, "failed inside", [f"number {attack.number}: {error}"])
            elif error.status == grpc.StatusCode.DEADLINE_EXCEEDED.name or NOBODY_THERE in error.message:
                self._tally.fault(kind, error.status, [f"number {attack.number}: {error}"])
            elif _rightly(call, error):
                self._tally.add(kind, error.status)
            else:
                self._tally.fault(kind, f"wrongly {error.status}", [f"number {attack.number}: {error}"])
        except (TimeoutError, ConnectionRefusedError) as error:
            self._tally.fault(kind, "no answer", [f"number {attack.number}: {type(error).__name__}"])
        except OSError as error:
            self._tally.add(kind, type(error).__name__)
        else:
            if _rightly(call):
                self._tally.add(kind, outcome)
            else:
                self._tally.fault(kind, f"wrongly {outcome}", [f"number {attack.number} was {outcome}"])
        with self._lock:
            self._done += 1

    def _good(self, caller: Caller, asker: Asker, rng: random.Random) -> None:
        rows = [rng.randrange(len(asker.reference.texts)) for _ in range(rng.choice([1, 1, 2, 5]))]
        while not asker.ask(caller, "good", rows, rng, SECONDS):
            time.sleep(BACK_OFF_SECONDS)

    def _flood(self, caller: Caller, asker: Asker) -> None:
        """Tiny good requests, all at once, one flood at a time."""
        tiny = min(range(len(asker.reference.texts)), key=lambda text: len(asker.reference.texts[text]))
        request = exchange.message([asker.reference.texts[tiny].encode()])
        with self._flooding:
            futures = [caller.stub.ModelInfer.future(request, timeout=SECONDS) for _ in range(FLOOD)]
            for future in futures:
                try:
                    asker.judge("flood", [tiny], exchange.from_message(future.result()))
                except grpc.RpcError as error:
                    asker.unanswered("flood", exchange.refused(error), "one tiny text")

    def _lives(self, server: Server) -> bool:
        try:
            held = sample(server)
        except ServerError as error:
            self._ended.append(f"{error}; the last requests were:")
            return False
        self._samples.append((self._done, held))
        if lost := replaced(self._idle[0], held):
            self._ended.append(f"{', '.join(lost)} ended or was replaced; the last requests were:")
        return not lost

    def _trend(self) -> Trend | None:
        """Bytes of all processes together for a hostile request, after the first of them."""
        kept = [(at, held.memory) for at, held in self._samples if at > self._total * WARM_UP_SHARE]
        return trend(np.array([float(at) for at, _ in kept]), np.array([float(memory) for _, memory in kept]))


def _rightly(call: hostile_grpc.Call | hostile_http.Call, error: Refused | None = None) -> bool:
    """Whether this may become of it: an answer, or this error. A full queue may refuse anything."""
    if isinstance(call, hostile_http.Call) or call.good is None or (error and FULL_QUEUE in error.message):
        return True
    if call.good:
        return error is None
    return error is not None and error.status == grpc.StatusCode.INVALID_ARGUMENT.name


def _called(caller: Caller, call: hostile_grpc.Call) -> str:
    """Over gRPC, as bytes that no library looks at. Raises Refused."""
    try:
        if call.method == hostile_grpc.STREAM:
            stream = caller.channel.stream_stream(call.method, _same, _same)
            for answer in stream(iter([call.payload]), timeout=SECONDS):
                if OUR_FAULT.encode() in answer:
                    raise Refused("in the stream", answer.decode(errors="replace"))
            return "stream ended"
        caller.channel.unary_unary(call.method, _same, _same)(call.payload, timeout=SECONDS)
        return "answered"
    except grpc.RpcError as error:
        raise exchange.refused(error) from error


def _same(payload: bytes) -> bytes:
    return payload
