# SPDX-License-Identifier: Apache-2.0
"""The traffic of a soak: good requests of every size over every transport, and among them what real callers also do.

They send what cannot be answered, change their minds, set deadlines too short, hang up, and connect anew all the
time. Knows what may come of each, nothing of what is measured meanwhile.
"""

from __future__ import annotations

import http.client
import random
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import grpc
from tritonclient.grpc import service_pb2

from ensemble.contract import Contract
from ensemble.launcher.server import Server
from perf.endurance import exchange
from perf.endurance.exchange import BINARY, GRPC, JSON, Caller, Refused
from perf.endurance.questions import Asker
from perf.endurance.reference import Reference
from perf.endurance.tally import Tally

# Per cent of the requests.
SHARES = {"kept": 70, "fresh": 12, "refused": 9, "cancelled": 4, "deadline": 3, "hung up": 2}
# Rows of a request, and per cent of the requests with so many.
ROWS = {(1, 1): 70, (2, 8): 25, (9, 32): 5}
# The same of a warm-up. Requests that end early leave most behind, once: tens of MB that the allocator keeps and uses
# again. In the traffic itself, of which they are a few per cent, that would go on for an hour and look like a leak.
STIRRING_SHARES = {"kept": 15, "fresh": 15, "refused": 20, "cancelled": 20, "deadline": 15, "hung up": 15}
STIRRING_ROWS = {(1, 1): 100}
# For an answer that is waited for. Nothing takes so long that is not stuck.
SECONDS = 120.0
# When callers change their minds, and deadlines too short: from before a request is read until it is answered.
SOON = (0.001, 0.05)


class Traffic:
    """`Traffic(...)(number, stop)` is one client at work, for perf.endurance.workers."""

    def __init__(
        self,
        server: Server,
        repository: Path,
        reference: Reference,
        tally: Tally,
        seed: int,
        shares: Mapping[str, int] = SHARES,
        row_shares: Mapping[tuple[int, int], int] = ROWS,
    ) -> None:
        contract = Contract.read(repository, server.options.config_name)
        limit = int(contract.models["tokenizer"].parameters["max_text_bytes"].string_value)
        self._server, self._reference, self._tally, self._seed = server, reference, tally, seed
        self._shares, self._row_shares = shares, row_shares
        self._asker = Asker(reference, tally)
        self._bad = _bad_requests(limit, contract.max_batch_size)
        self._kinds: dict[str, Callable[[Caller, random.Random], None]] = {
            "kept": self._kept,
            "fresh": self._fresh,
            "refused": self._refused,
            "cancelled": self._cancelled,
            "deadline": self._deadline,
            "hung up": self._hung_up,
        }

    def __call__(self, number: int, stop: threading.Event) -> None:
        """Ask until told to stop. Every kind comes early, so that a short run has all of them."""
        rng = random.Random(f"{self._seed}:{number}")  # noqa: S311
        kinds = list(self._shares)
        with Caller(self._server) as caller:
            for kind in kinds[number % len(kinds) :] + kinds[: number % len(kinds)]:
                self._kinds[kind](caller, rng)
            while not stop.is_set():
                (kind,) = rng.choices(kinds, list(self._shares.values()))
                self._kinds[kind](caller, rng)

    def _kept(self, caller: Caller, rng: random.Random) -> None:
        self._asker.ask(caller, "kept", self._rows(rng), rng, SECONDS)

    def _fresh(self, caller: Caller, rng: random.Random) -> None:
        with Caller(self._server) as fresh:
            self._asker.ask(fresh, "fresh", self._rows(rng), rng, SECONDS)

    def _refused(self, caller: Caller, rng: random.Random) -> None:
        name = rng.choice(list(self._bad))
        bad, status = self._bad[name], grpc.StatusCode.INVALID_ARGUMENT.name
        try:
            if isinstance(bad, tuple):
                status = str(http.HTTPStatus.BAD_REQUEST.value)
                caller.post(bad[0], bad[1], SECONDS)
            else:
                _infer(caller, bad, SECONDS)
            self._tally.fault("refused", "answered", [f"{name} was answered"])
        except (Refused, OSError, http.client.HTTPException) as error:
            if isinstance(error, Refused) and error.status == status:
                self._tally.add("refused", "refused")
            else:
                self._asker.unanswered("refused", error, name)

    def _cancelled(self, caller: Caller, rng: random.Random) -> None:
        rows = self._rows(rng)
        future = caller.stub.ModelInfer.future(self._message(rows), timeout=SECONDS)
        time.sleep(rng.uniform(*SOON))
        future.cancel()
        self._early_end("cancelled", rows, grpc.StatusCode.CANCELLED, future)

    def _deadline(self, caller: Caller, rng: random.Random) -> None:
        rows = self._rows(rng)
        future = caller.stub.ModelInfer.future(self._message(rows), timeout=rng.uniform(*SOON))
        self._early_end("deadline", rows, grpc.StatusCode.DEADLINE_EXCEEDED, future)

    def _hung_up(self, caller: Caller, rng: random.Random) -> None:
        texts = [self._reference.texts[row].encode() for row in self._rows(rng)]
        try:
            caller.sent(*exchange.http_body(texts, binary=rng.random() < 0.5), SECONDS)
            self._tally.add("hung up", "hung up")
        except (OSError, http.client.HTTPException) as error:
            self._tally.fault("hung up", "not sent", [f"{type(error).__name__}: {error}"])
        caller.hang_up()

    def _early_end(self, kind: str, rows: list[int], expected: grpc.StatusCode, future: grpc.Future) -> None:
        """An answer, which must be right, or the end that the caller chose."""
        try:
            answer = exchange.from_message(future.result())
        except grpc.FutureCancelledError:
            self._tally.add(kind, kind)
        except grpc.RpcError as error:
            if error.code() == expected:
                self._tally.add(kind, kind)
            else:
                self._asker.unanswered(kind, exchange.refused(error), f"{len(rows)} rows")
        else:
            self._asker.judge(kind, rows, answer)

    def _message(self, rows: list[int]) -> service_pb2.ModelInferRequest:
        return exchange.message([self._reference.texts[row].encode() for row in rows])

    def _rows(self, rng: random.Random) -> list[int]:
        (bounds,) = rng.choices(list(self._row_shares), list(self._row_shares.values()))
        return [rng.randrange(len(self._reference.texts)) for _ in range(rng.randint(*bounds))]


def _infer(caller: Caller, message: service_pb2.ModelInferRequest, seconds: float) -> None:
    try:
        caller.stub.ModelInfer(message, timeout=seconds)
    except grpc.RpcError as error:
        raise exchange.refused(error) from error


def _bad_requests(
    limit: int, most_rows: int
) -> dict[str, service_pb2.ModelInferRequest | tuple[bytes, dict[str, str]]]:
    """What nobody can answer, over gRPC as a message and over HTTP as a body with headers."""
    texts = {
        "not UTF-8": [b"a sound text", b"\xff\xfe"],
        "a text over the limit": [b"x" * (limit + 1)],
        "too many rows": [b"a"] * (most_rows + 1),
    }
    messages = {f"{name} ({GRPC})": exchange.message(rows) for name, rows in texts.items()}
    for name in ("wrong type", "wrong shape", "no such input", "a length that lies"):
        messages[f"{name} ({GRPC})"] = exchange.message([b"a sound text"])
    messages[f"wrong type ({GRPC})"].inputs[0].datatype = "INT32"
    messages[f"wrong shape ({GRPC})"].inputs[0].shape[0] = 2
    messages[f"no such input ({GRPC})"].inputs[0].name = "texts"
    messages[f"a length that lies ({GRPC})"].raw_input_contents[0] = b"\1\0\0\0abc"
    bodies = {f"{name} ({BINARY})": exchange.http_body(rows, binary=True) for name, rows in texts.items()}
    bodies[f"no such input ({JSON})"] = (b'{"inputs": []}', {})
    return {**messages, **bodies}
