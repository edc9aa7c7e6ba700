# SPDX-License-Identifier: Apache-2.0
"""Options, getting ready, sharing and closing of `Client` and `AsyncClient`."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from fake_triton import FULL, logit_of, unused_url
from tritonclient.grpc import InferenceServerClient

from ensemble import (
    AsyncClient,
    Cancelled,
    Client,
    InvalidRequest,
    Unavailable,
)
from ensemble.client.client import ClientOptions


@pytest.mark.parametrize("nonsense", [0, -1, float("nan"), float("inf"), 1e9, "5", True, object()])
def test_nonsense_timeouts(triton, ask, nonsense):
    """A deadline that is no positive finite number of seconds is refused by name, for a client as for a call."""
    with pytest.raises(InvalidRequest, match="timeout_seconds must be a number of seconds"):
        Client(triton.url, timeout_seconds=nonsense)
    with Client(triton.url) as client, pytest.raises(InvalidRequest, match="timeout_seconds must be a number"):
        client.classify("a", timeout_seconds=nonsense)
    assert triton.requests == []


@pytest.mark.parametrize(
    "options",
    [{"batch_limit": 0}, {"batch_limit": 1.5}, {"in_flight": 0}, {"retries": -1}, {"max_request_bytes": True},
     {"model": ""}, {"headers": {"a b": "c"}}, {"headers": {"a": "é"}}, {"root_certificates": "x.pem"},
     {"ssl": True, "root_certificates": "missing.pem"}, {"backoff_seconds": 0}],
)  # fmt: skip
def test_nonsense_options(options):
    """Every other senseless option is refused by name too."""
    name = list(options)[-1]

    with pytest.raises(InvalidRequest, match=name):
        Client(**options)


@pytest.mark.parametrize("name", ["timeout_seconds", "connect_timeout_seconds", "backoff_cap_seconds"])
def test_milliseconds(name):
    """A number that can only be one of milliseconds is refused with that guess."""
    with pytest.raises(InvalidRequest, match=rf"{name} must be .* not 30000 \(milliseconds\? divide by 1000\)"):
        Client(**{name: 30000})


def test_options_in_one_piece():
    """Options may come as one object, with single fields changed by name."""
    with Client(options=ClientOptions(model="m", retries=7), retries=1) as client:
        assert (client.options.model, client.options.retries) == ("m", 1)


def test_secrets_are_not_shown():
    """Header values appear in no repr."""
    assert "s3cret" not in repr(ClientOptions(headers={"key": "s3cret"}))


def test_wait_ready_waits_for_the_model(triton, ask):
    """wait_ready asks for the model until it is ready."""
    triton.ready.extend([False, False, True])
    ask(triton.url, "wait_ready", 30)

    assert not triton.ready


def test_wait_ready_gives_the_reason(triton, ask):
    """wait_ready tells a server without the model from a missing server."""
    triton.ready.extend([False] * 100)

    with pytest.raises(Unavailable, match="the server answers, model m is not loaded"):
        ask(triton.url, "wait_ready", 0.05, model="m")
    with pytest.raises(Unavailable, match=r"was not ready within 0.05 s: no server answers at 127"):
        ask(unused_url(), "wait_ready", 0.05)


def test_closing_twice(triton):
    """close() may be repeated; a closed client says that it is."""
    client = Client(triton.url)
    client.close()
    client.close()

    with pytest.raises(InvalidRequest, match="this client is closed"):
        client.classify("a")


def test_closing_an_async_client_twice(triton):
    """The same for AsyncClient, used or not."""

    async def scenario():
        unused, client = AsyncClient(triton.url), AsyncClient(triton.url)
        await client.classify("a")
        for each in (unused, client, unused, client):
            await each.close()
        with pytest.raises(InvalidRequest, match="this client is closed"):
            await client.classify("a")

    asyncio.run(scenario())


def test_closing_under_a_call(triton):
    """A call whose client another thread closes ends in Cancelled."""
    triton.open.clear()
    client = Client(triton.url)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(client.classify, "a")
        triton.wait_until(lambda: triton.in_flight == 1)
        client.close()

        assert isinstance(call.exception(), Cancelled)


def test_closing_between_two_tries(triton):
    """A call that waits to be sent again ends in Cancelled too."""
    triton.refusals.extend([FULL] * 1000)
    client = Client(triton.url, retries=1000, backoff_seconds=0.01, backoff_cap_seconds=0.01)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(client.classify, "a")
        triton.wait_until(lambda: len(triton.requests) >= 2)
        client.close()

        assert isinstance(call.exception(), Cancelled)


def test_closing_under_an_async_call(triton):
    """The same for a task."""
    triton.open.clear()

    async def scenario():
        client = AsyncClient(triton.url)
        task = asyncio.create_task(client.classify("a"))
        await asyncio.to_thread(triton.wait_until, lambda: triton.in_flight == 1)
        await client.close()
        with pytest.raises(Cancelled):
            await task

    asyncio.run(scenario())


def test_another_event_loop(triton):
    """An AsyncClient refuses to be used in a second event loop instead of hanging there."""
    client = AsyncClient(triton.url)

    async def first():
        await client.classify("a")

    with closing(asyncio.new_event_loop()) as one, closing(asyncio.new_event_loop()) as two:
        one.run_until_complete(first())
        with pytest.raises(InvalidRequest, match="another event loop"):
            two.run_until_complete(first())
        one.run_until_complete(client.close())


def test_threads_share_a_client(triton, monkeypatch):
    """Eight threads with one client each get the answers to their own texts, in_flight holding for all together."""
    # tritonclient keeps the request in this attribute before it adds the callback: let another thread in between.
    slow = property(lambda rpc: rpc.kept, lambda rpc, call: (setattr(rpc, "kept", call), time.sleep(0.001)))
    monkeypatch.setattr(InferenceServerClient, "_call_future", slow, raising=False)
    texts = [f"text {i}" for i in range(160)]
    with Client(triton.url, in_flight=4) as client, ThreadPoolExecutor(8) as pool:
        answers = [answer for [answer] in pool.map(client.classify, texts)]

    assert [answer.text for answer in answers] == texts
    assert [answer.logits[0] for answer in answers] == [logit_of(text) for text in texts]
    assert triton.most_in_flight <= 4


def test_tasks_share_a_client(triton):
    """A thousand calls at once on one AsyncClient are in_flight at a time, and each gets its own answer."""
    texts = [f"text {i}" for i in range(1000)]

    async def scenario():
        async with AsyncClient(triton.url, in_flight=4) as client:
            return await asyncio.gather(*map(client.classify, texts))

    assert [answer.logits[0] for [answer] in asyncio.run(scenario())] == [logit_of(text) for text in texts]
    assert triton.most_in_flight <= 4


QUIET = """
import asyncio, gc
from ensemble import AsyncClient, Client, InvalidRequest, Unavailable
for options in ({"url": "http://x"}, {"url": None}, {"ssl": True, "root_certificates": "missing.pem"}):
    for kind in (Client, AsyncClient):
        try:
            kind(**options)
            raise SystemExit("not refused")
        except InvalidRequest:
            gc.collect()
try:
    Client("127.0.0.1:9", retries=0).classify("a")
except Unavailable:
    gc.collect()
async def unclosed():
    try:
        await AsyncClient("127.0.0.1:9", retries=0).classify("a")
    except Unavailable:
        gc.collect()
asyncio.run(unclosed())
"""

BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "onnxruntime", "onnx", "tokenizers", "rich", "transformers", "pytriton"}:
            raise ImportError(f"{name} was imported")
sys.meta_path.insert(0, Block())
import ensemble
ensemble.Client().close()
"""


@pytest.mark.parametrize("script", [QUIET, BLOCKED], ids=["unclosed-and-failed-clients", "import-without-the-rest"])
def test_script_says_nothing(script):
    """Clients that fail or are never closed leave no noise; the package needs none of the server's libraries."""
    protobuf_on_3_12 = "ignore:Type google._upb._message:DeprecationWarning"
    command = [sys.executable, "-X", "dev", "-W", protobuf_on_3_12, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
