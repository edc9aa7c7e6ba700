# SPDX-License-Identifier: Apache-2.0
"""Which servers `Client` and `AsyncClient` talk to, and what becomes of one that is not there."""

from __future__ import annotations

import asyncio
import os
import socket
import socketserver
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import pytest
from fake_triton import FULL, FakeTriton, unused_url

from ensemble import AsyncClient, Classification, Client, DeadlineExceeded, InvalidRequest, Unavailable


def user_timeouts(port: int) -> list[int]:
    """TCP_USER_TIMEOUT, in ms, of this process's connections to `port`."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError), socket.socket(fileno=os.dup(int(link.name))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername()[1] == port:
                found.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    return found


@pytest.mark.parametrize(
    "url",
    ["", " ", "http://127.0.0.1:8000", "grpc://h:1", "a b:1", None, 8001, ["127.0.0.1:1"], ",", "127.0.0.1:1,",
     "127.0.0.1:1, 127.0.0.1:2", "127.0.0.1:1,127.0.0.1", "127.0.0.1:1,127.0.0.1:99999"],
)  # fmt: skip
def test_nonsense_urls(url):
    """An address that gRPC would misread is refused with an example of a sound one."""
    with pytest.raises(InvalidRequest, match=r"url must be host:port.*127\.0\.0\.1:8001"):
        Client(url)


@pytest.mark.parametrize("url", ["a:1,b:2", "127.0.0.1:1,localhost:1", "127.0.0.1:1,[::1]:1", "fe80::1:1,fe80::2:1"])
def test_lists_that_grpc_cannot_take(url):
    """Several servers that are not numeric addresses of one kind are refused with what would do."""
    with pytest.raises(InvalidRequest, match="all IPv4 or all IPv6.*or one name that resolves to all of them"):
        Client(url)


def test_refused_by_one_server_answered_by_another(triton, ask):
    """Of several servers the next one gets what the first refused."""
    other = FakeTriton()
    triton.refusals.extend([FULL] * 99)
    answers = ask(f"{triton.url},{other.url}", "classify", ["a"] * 20, batch_limit=1, in_flight=1, retries=50)
    other.stop()

    assert len(answers) == 20
    assert len(other.requests) == 20


def test_ipv6_addresses_take_turns(ask):
    """Several servers may be IPv6 addresses in brackets."""
    with two_servers("[::1]:0", "[::1]:0") as servers:
        assert_shared(ask, ",".join(server.url for server in servers), *servers)


def test_all_addresses_of_a_name_take_turns(ask):
    """One name with several addresses, as a headless service of Kubernetes has, is several servers; a dead one costs
    nothing."""
    with (
        two_servers("127.0.0.1:0", "127.0.0.2:{}") as servers,
        name_server("127.0.0.1", "127.0.0.2", "127.0.0.3") as dns,
    ):
        port = servers[0].url.rpartition(":")[2]
        assert_shared(ask, f"dns://{dns}/servers.example:{port}", *servers)


@contextmanager
def two_servers(first: str, second: str) -> Iterator[tuple[FakeTriton, FakeTriton]]:
    """second: {} in it is the port of the first."""
    one = FakeTriton(first)
    two = FakeTriton(second.format(one.url.rpartition(":")[2]))
    yield one, two
    one.stop()
    two.stop()


def assert_shared(ask, url: str, *servers: FakeTriton) -> None:
    """A quarter of the requests each at least, of which the first few go where there is a connection first."""
    assert len(ask(url, "classify", ["a"] * 400, batch_limit=1, retries=0)) == 400
    counts = [len(server.requests) for server in servers]
    assert sum(counts) == 400 and min(counts) >= 100


@contextmanager
def name_server(*addresses: str) -> Iterator[str]:
    """The address of a DNS server that knows these IPv4 addresses of every name."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            query, connection = self.request
            question = query[12 : query.index(b"\0", 12) + 5]
            found = addresses if question[-4:-2] == b"\0\x01" else ()  # type A; none of AAAA
            head = query[:2] + struct.pack(">5H", 0x8180, 1, len(found), 0, 0)
            records = (struct.pack(">3HIH", 0xC00C, 1, 1, 60, 4) + socket.inet_aton(address) for address in found)
            connection.sendto(head + question + b"".join(records), self.client_address)

    with socketserver.ThreadingUDPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_a_dead_server_is_left_out(triton, ask):
    """Of several servers those that are not there cost nothing, not even a retry."""
    answers = ask(f"{unused_url()},{triton.url},{unused_url()}", "classify", ["a"] * 20, batch_limit=1, retries=0)

    assert len(answers) == 20


@pytest.mark.parametrize("kind", ["Client", "AsyncClient"])
def test_a_server_that_hangs_holds_up_its_own_requests_only(kind):
    """Of two servers one takes requests and never answers: these end at the deadline, the others have their answers."""
    with two_servers("127.0.0.1:0", "127.0.0.1:0") as (hangs, answers):
        url, options = f"{hangs.url},{answers.url}", {"batch_limit": 1, "in_flight": 20, "timeout_seconds": 5}

        def connected() -> bool:
            """Before both are, all requests go to the one that is."""
            return bool(hangs.requests and answers.requests)

        def hang() -> None:
            hangs.requests.clear()
            answers.requests.clear()
            hangs.open.clear()

        def blocking():
            with Client(url, **options) as client:
                while not connected():
                    client.classify("a")
                hang()
                return client.classify_each(["a"] * 20)

        async def awaiting():
            async with AsyncClient(url, **options) as client:
                while not connected():
                    await client.classify("a")
                hang()
                return await client.classify_each(["a"] * 20)

        found = blocking() if kind == "Client" else asyncio.run(awaiting())

    ended = sum(isinstance(answer, DeadlineExceeded) for answer in found)
    assert ended == len(hangs.requests) > 0
    assert sum(isinstance(answer, Classification) for answer in found) == len(answers.requests) == 20 - ended > 0


def test_no_server_there(ask):
    """With several servers and none there the error names them all and has the last one's reason."""
    url = f"{unused_url()},{unused_url()}"

    with pytest.raises(Unavailable, match=f"no server answers at {url} .*Connection refused"):
        ask(url, "classify", "a", retries=1)


def test_a_server_that_is_stopping_is_not_called_missing(triton, ask):
    """The one there is refuses until the retries are spent: the error says that it stops, not that nobody is there."""
    triton.refusals.extend([(grpc.StatusCode.UNAVAILABLE, "the server is stopping: ask another one")] * 9)

    with pytest.raises(Unavailable, match=f"the server at {triton.url} is stopping .*: ask another one, or try again"):
        ask(triton.url, "classify", "a", retries=2)
    assert len(triton.requests) == 3


def test_nobody_there(ask):
    """A refused connection is Unavailable and names the address."""
    url = unused_url()

    with pytest.raises(Unavailable, match=f"no server answers at {url} .*Connection refused"):
        ask(url, "classify", "a")


def test_server_that_never_speaks(ask):
    """A peer that takes the connection and says nothing is given up after the connect time-out."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"127.0.0.1:{silent.getsockname()[1]}"

        with pytest.raises(Unavailable, match=f"no server answers at {url}"):
            ask(url, "classify", "a", connect_timeout_seconds=0.1, retries=0, timeout_seconds=15)


def test_channel_arguments():
    """Messages are not limited to 4 MiB, connecting is limited in time, Triton's limit for pings is kept."""
    with Client(connect_timeout_seconds=1.5) as client:
        arguments = dict(client._connection["channel_args"])

    assert arguments["grpc.max_send_message_length"] == arguments["grpc.max_receive_message_length"] == 2**31 - 1
    assert arguments["grpc.min_reconnect_backoff_ms"] == 1500
    assert arguments["grpc.keepalive_time_ms"] > 300_000
    assert "grpc.keepalive_permit_without_calls" not in arguments


def test_a_machine_that_vanishes(triton):
    """A connection whose peer acknowledges nothing is ended by the kernel after 10 s, not after a quarter hour."""
    with Client(triton.url) as client:
        client.classify("a")
        port = int(triton.url.rpartition(":")[2])

        assert user_timeouts(port) == [10_000]
