# SPDX-License-Identifier: Apache-2.0
"""What nobody should send over HTTP: bodies that stop half-way, headers that lie, JSON that is none, slow callers.

Each is raw bytes and a manner of sending them, made from a random generator alone. Left out: what
is known of this release of the server (KNOWN). Knows HTTP and the tensor protocol, and sockets only to write to
them.
"""

from __future__ import annotations

import gzip
import json
import random
import socket
import time
import zlib
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse
from typing import Any

from ensemble.contract import ENSEMBLE
from perf.endurance.exchange import HEADER_LENGTH, PATH, Refused, elements, http_body, request_json
from perf.endurance.hostile_texts import strange

# Not sent: what is known of this release of the server, whoever sends it.
KNOWN = {
    "JSON nested some 10,000 deep and more": "ends the server (triton-inference-server/common#156, April 2026)",
    "a chunked body of very many chunks": "ends the server (CVE-2025-23310, mended in 25.07)",
    "a compressed body that is then refused": "its unpacked size is never given back: 1 MB for 1 kB sent",
}
MOST_NESTED, MOST_CHUNKS = 500, 100
# What is not sent in full is not waited for.
NO_ANSWER_SECONDS = 0.05
# One of those that dawdle, and how many of them are kept waiting at once.
DRIP_SECONDS, MOST_HELD = 0.02, 32

WHOLE, CUT, SLOW_READER, SLOW_WRITER, HELD = "whole", "cut", "slow reader", "slow writer", "held"
HTTP, GRPC, METRICS = "http", "grpc", "metrics"
ODD_NUMBERS = (
    "-1", "0", "1", "7", "99999", "2147483648", "4294967296", "18446744073709551616", "abc", "", "1e3", " 5", "5, 6",
)  # fmt: skip
METHODS = ("GET", "PUT", "DELETE", "OPTIONS", "BREW", "post", "", "PO ST", "X" * 5000)
PATHS = (
    "/v2/models/../../etc/passwd", "/v2/models/%2e%2e/%2e%2e/etc/passwd/infer", "/v2/models//infer",
    "/v2/models/nobody/infer", f"/v2/models/{ENSEMBLE}/versions/99/infer", f"/v2/models/{ENSEMBLE}/versions/-1/infer",
    "/v2/models/%00/infer", "/%n%s%x", f"/v2/models/{ENSEMBLE}/generate", f"/v2/models/{ENSEMBLE}/generate_stream",
    "//", "*", "/" + "a" * 9000, "/v2/" + "%" * 99,
)  # fmt: skip


@dataclass(frozen=True)
class Call:
    """One connection. kind: what is wrong. port: HTTP, GRPC or METRICS. manner: how the payload is sent."""

    kind: str
    port: str
    payload: bytes
    manner: str = WHOLE


def call(rng: random.Random) -> Call:
    """One of all there are."""
    kind = rng.choice(list(CALLS))
    made = CALLS[kind](rng)
    return Call(kind, *made) if isinstance(made, tuple) else Call(kind, HTTP, made)


class Sender:
    """Sends calls to one server; keeps some connections of those that dawdle open."""

    def __init__(self, address: str, ports: dict[str, int]) -> None:
        self._address, self._ports = address, ports
        self._held: deque[socket.socket] = deque()

    def close(self) -> None:
        """Let go of what is held."""
        while self._held:
            self._held.popleft().close()

    def send(self, call: Call, seconds: float) -> str:
        """What came of it: "answered", "closed" without an answer, "cut", or "held".

        Raises Refused with what the server says, TimeoutError if it says nothing, ConnectionRefusedError if it is gone.
        """
        connection = socket.create_connection((self._address, self._ports[call.port]), timeout=seconds)
        try:
            if call.manner == SLOW_READER:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            with suppress(BrokenPipeError, ConnectionResetError):  # it was refused before it was sent
                return self._sent(connection, call)
            return "closed"
        finally:
            if connection not in self._held:
                connection.close()

    def _sent(self, connection: socket.socket, call: Call) -> str:
        if call.manner == HELD:
            connection.sendall(call.payload)
            self._held.append(connection)
            if len(self._held) > MOST_HELD:
                self._held.popleft().close()
            return "held"
        if call.manner == SLOW_WRITER:
            for place in range(0, min(len(call.payload), 400), 40):
                connection.sendall(call.payload[place : place + 40])
                time.sleep(DRIP_SECONDS)
            connection.sendall(call.payload[400:])
        else:
            connection.sendall(call.payload)
        if call.manner == CUT:
            time.sleep(NO_ANSWER_SECONDS)
            return "cut"
        if call.manner == SLOW_READER:
            for _ in range(10):
                time.sleep(DRIP_SECONDS)
                if not connection.recv(16):
                    break
            return "cut"
        return _status(connection)


def _status(connection: socket.socket) -> str:
    response = HTTPResponse(connection)
    try:
        response.begin()
        body = response.read().decode(errors="replace")
    except HTTPException:
        return "closed"
    finally:
        response.close()
    if response.status != HTTPStatus.OK:
        raise Refused(str(response.status), body)
    return "answered"


def _post(body: bytes, headers: dict[str, str] | None = None, *, path: str = PATH, length: str | None = None) -> bytes:
    """A request in full. length: what Content-Length says, if not the truth."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body) if length is None else length}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def _sound(rng: random.Random, *, binary: bool | None = None) -> tuple[bytes, dict[str, str]]:
    chosen = rng.random() < 0.5 if binary is None else binary
    return http_body(
        [strange(rng).encode() for _ in range(rng.choice([1, 1, 3]))], strings=rng.random() < 0.5, binary=chosen
    )


def _half_a_body(rng: random.Random) -> tuple[str, bytes, str]:
    whole = _post(*_sound(rng))
    return HTTP, whole[: rng.randrange(1, len(whole))], CUT


def _wrong_length(rng: random.Random) -> tuple[str, bytes, str]:
    body, headers = _sound(rng)
    length = rng.choice([*ODD_NUMBERS, str(len(body) - 1), str(len(body) + 1)])
    # What waits for more than there is, or does not know how much, waits as long as the caller does.
    short = length.isdecimal() and int(length) <= len(body)
    return HTTP, _post(body, headers, length=length), WHOLE if short and int(length) else CUT


def _wrong_header_length(rng: random.Random) -> bytes:
    body, headers = _sound(rng)
    length = rng.choice([*ODD_NUMBERS, str(len(body)), str(len(body) + 1), str(rng.randrange(len(body)))])
    return _post(body, {**headers, HEADER_LENGTH: length})


def _wrong_binary_size(rng: random.Random) -> bytes:
    texts = [strange(rng).encode()]
    head = request_json(texts, strings=False, binary=True)
    head["inputs"][0]["parameters"]["binary_data_size"] = rng.choice(
        [-1, 0, 1, 3, 4, 99_999, 2**31, 2**32, 2**63 - 1, 1.5, "4", None]
    )
    first = json.dumps(head).encode()
    tensors = rng.choice([elements(texts), b"", b"\xff" * 40, rng.randbytes(40)])
    return _post(first + tensors, {HEADER_LENGTH: str(len(first))})


def _bad_json(rng: random.Random) -> bytes:
    body = bytearray(_sound(rng, binary=False)[0])
    change = rng.randrange(4)
    if change == 0:
        for _ in range(rng.choice([1, 3, 20])):
            body[rng.randrange(len(body))] = rng.randrange(256)
    elif change == 1:
        del body[rng.randrange(len(body)) :]
    elif change == 2:
        body = bytearray(rng.choice(ODD_JSON))
    else:
        depth = rng.randrange(1, MOST_NESTED)
        body = bytearray(b"[" * depth + rng.choice([b"", b"1" + b"]" * depth]))
    return _post(bytes(body))


def _odd_json(rng: random.Random) -> bytes:
    """Sound JSON in which one value is another's kind."""
    head: Any = request_json([strange(rng).encode()], strings=rng.random() < 0.5, binary=False)
    place = head
    while True:
        key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
        if rng.random() < 0.4 or not isinstance(place[key], dict | list) or not place[key]:
            break
        place = place[key]
    place[key] = rng.choice(
        [None, True, -1, 0, 2**63, 2**64, -(2**63), 1e308, "", "text", "\x00", [], {}, [[]], [None], [1, "a"],
         ["a"] * 500, [2**31, 2**31], [-1, 1], {"a": {}}]
    )  # fmt: skip
    return _post(json.dumps(head).encode())


def _packed(rng: random.Random) -> bytes:
    """A sound body, packed or not, that says it is packed in one of the ways there are."""
    body, headers = _sound(rng, binary=False)
    name, packed = rng.choice([("gzip", gzip.compress(body)), ("deflate", zlib.compress(body)), ("br", body)])
    return _post(packed, {**headers, "Content-Encoding": name})


def _chunked(rng: random.Random) -> tuple[str, bytes, str]:
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    sizes = [
        rng.choice(["1", "0", "-1", "fffffffffffffffff", "zz", "3;a=b", ""])
        for _ in range(rng.randrange(1, MOST_CHUNKS))
    ]
    return HTTP, head + b"".join(f"{size}\r\n{{\r\n".encode() for size in sizes) + b"0\r\n\r\n", CUT


def _odd_request(rng: random.Random) -> tuple[str, bytes, str]:
    body, headers = _sound(rng)
    if rng.random() < 0.5:
        return HTTP, _post(body, headers, path=rng.choice(PATHS)), CUT
    return HTTP, _post(body, headers).replace(b"POST", rng.choice(METHODS).encode(), 1), CUT


def _odd_headers(rng: random.Random) -> tuple[str, bytes, str]:
    body, headers = _sound(rng)
    names = [
        "X" * rng.choice([1, 9000]),
        "Expect",
        "Connection",
        "Content-Type",
        "Accept-Encoding",
        "Upgrade",
        "Host",
        " ",
        "a\0b",
    ]
    values = ["100-continue", "close", "gzip", "h2c", "\xff" * 9, "a" * 9000, "", "\0"]
    headers |= {rng.choice(names): rng.choice(values) for _ in range(rng.choice([1, 5, 200]))}
    return HTTP, _post(body, headers), CUT


def _pipelined(rng: random.Random) -> tuple[str, bytes, str]:
    return HTTP, b"".join(_post(*_sound(rng)) for _ in range(rng.choice([2, 20]))), rng.choice([CUT, SLOW_READER])


def _dawdler(rng: random.Random) -> tuple[str, bytes, str]:
    whole = _post(*_sound(rng))
    manner = rng.choice([SLOW_READER, SLOW_WRITER, HELD, HELD])
    return HTTP, whole[: rng.randrange(1, len(whole))] if manner == HELD else whole, manner


def _wrong_port(rng: random.Random) -> tuple[str, bytes, str]:
    """Bytes at the ports of gRPC and of the metrics that are not for them."""
    garbage = [
        rng.randbytes(300),
        _post(*_sound(rng)),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + rng.randbytes(90),
        b"\x16\x03\x01" * 9,
    ]
    return rng.choice([GRPC, METRICS, HTTP]), rng.choice(garbage), rng.choice([CUT, CUT, HELD])


ODD_JSON = (
    b"", b"null", b"[]", b"{}", b'"a"', b"1e999", b"NaN", b'{"inputs": NaN}', b'{"inputs": [null]}', b'{"inputs": {}}',
    b'{"inputs": [{"name": "text", "shape": [1, 1], "datatype": "BYTES", "data": ["\\ud800"]}]}',
    b'{"inputs": [{"name": "text", "shape": [1, 1], "datatype": "BYTES", "data": [[[["a"]]]]}]}',
    b'{"inputs": [{"name": "text", "shape": [99999999999999999999], "datatype": "BYTES", "data": ["a"]}]}',
    b'{"inputs": [{"name": "text", "shape": [4611686018427387904, 4], "datatype": "BYTES", "data": ["a"]}]}',
    b'{"inputs": [], "inputs": [], "outputs": [{}]}', b"\xef\xbb\xbf{}", b'{"id": 5}',
    b'{"parameters": {"sequence_id": -1}}',
)  # fmt: skip

CALLS: dict[str, Callable[[random.Random], bytes | tuple[str, bytes, str]]] = {
    "half a body": _half_a_body,
    "wrong Content-Length": _wrong_length,
    f"wrong {HEADER_LENGTH}": _wrong_header_length,
    "wrong binary_data_size": _wrong_binary_size,
    "bad JSON": _bad_json,
    "odd JSON": _odd_json,
    "compressed body": _packed,
    "chunked body": _chunked,
    "odd method or path": _odd_request,
    "odd headers": _odd_headers,
    "pipelined": _pipelined,
    "slow caller": _dawdler,
    "wrong port": _wrong_port,
}
