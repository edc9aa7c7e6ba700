# SPDX-License-Identifier: Apache-2.0
"""A queue that is full, callers who give up, texts that are long: through the real server, by counts and order.

The classifier is one that runs only while the test lets it, so what waits waits as long as the test wants it to.
"""

from __future__ import annotations

import re
import shutil
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import tritonclient.grpc as grpc
from triton_requests import texts_input

from ensemble import Client, DeadlineExceeded, Overloaded
from ensemble.contract import Contract
from ensemble.handlers.pending import PendingRequests
from ensemble.launcher.options import ServerOptions
from ensemble.launcher.server import Server
from ensemble.launcher.stubs import stubs_of
from ensemble.launcher.supervisor import Patience, Supervisor

CLASSIFIER = """
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.folder = Path(args["model_repository"])

    def execute(self, requests):
        shapes = [pb_utils.get_input_tensor_by_name(request, "input_ids").as_numpy().shape for request in requests]
        with (self.folder / "seen").open("a") as file:
            file.writelines(f"{length - 2}\\n" for rows, length in shapes)
        while (self.folder / "shut").exists():
            time.sleep(0.002)
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor(name, np.zeros((rows, 2), dtype=np.float32)) for name in ("logits", "probabilities")]
            )
            for rows, _ in shapes
        ]
"""


class Bench:
    """The server, and what the test may do to it. A request is 64 rows of so many words, which is also its name."""

    def __init__(self, server: Server, classifier: Path, log: list[str]) -> None:
        """log: what the server writes."""
        self.server, self._classifier, self.log = server, classifier, log
        self.client = grpc.InferenceServerClient(server.url)
        self._pending = PendingRequests(("127.0.0.1", server.metrics_port))
        self.ended: list[int] = []
        self.results: dict[int, object] = {}

    def shut(self) -> None:
        (self._classifier / "seen").write_text("")
        (self._classifier / "shut").touch()

    def open(self) -> None:
        (self._classifier / "shut").unlink(missing_ok=True)

    def send(self, name: int, rows: int = 64, **options: object) -> object:
        return self.client.async_infer(
            "text_classifier", [texts_input(["a " * name] * rows)], callback=partial(self._end, name), **options
        )

    def _end(self, name: int, result: object, error: object) -> None:
        self.results[name] = error or result
        self.ended.append(name)

    def fill(self) -> None:
        """Shut it: request 1 is being classified, 2 was sent ahead. Who comes now has to wait."""
        self.shut()
        self.send(1)
        self.until(lambda: self.seen() == [1])
        self.send(2)
        self.until(lambda: self.pending().get("classifier") == 1)

    def pending(self) -> dict[str, int]:
        """What waits at the steps; not nothing where that cannot be told."""
        return self._pending() or {"unknown": 1}

    def seen(self) -> list[int]:
        """Who came to the classifier, in order."""
        return [int(line) for line in (self._classifier / "seen").read_text().split()]

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline, (self.seen(), self.ended, self.pending())
            time.sleep(0.005)

    def metric(self, name: str) -> int:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.server.metrics_port}/metrics", timeout=10) as response:
            found = re.search(rf"^{re.escape(name)} (\d+)$", response.read().decode(), re.MULTILINE)
        return int(found[1]) if found else 0

    def tokenizer_calls(self) -> int:
        return self.metric('onepass_model_calls_total{model="tokenizer",version="1"}') or self.metric(
            'onepass_model_calls_total{model="tokenizer"}'
        )

    def wait_for_rows(self, rows: int) -> None:
        """Until so many wait in the tokenizer."""
        self.until(lambda: self.metric('onepass_waiting_rows{model="tokenizer"}') == rows)

    def queue(self, *names: int) -> None:
        """One behind the other."""
        for place, name in enumerate(names, start=1):
            self.send(name)
            self.wait_for_rows(64 * place)

    def refusal(self) -> str:
        """What one more request is told, while the queue is full or the door is shut."""
        with pytest.raises(grpc.InferenceServerException) as refused:
            self.client.infer("text_classifier", [texts_input(["one more"])])
        return refused.value.message()

    def error(self, name: int) -> tuple[str, str]:
        error = self.results[name]
        assert isinstance(error, grpc.InferenceServerException), error
        return error.status().removeprefix("StatusCode."), error.message()


@contextmanager
def served(repository: Path, folder: Path) -> Iterator[Bench]:
    """128 rows may wait, 64 are sent ahead."""
    copy = Path(shutil.copytree(repository, folder / "model_repository", symlinks=True))
    (copy / "classifier/1/model.py").write_text(CLASSIFIER)
    config = copy / "tokenizer/config.pbtxt"
    text = config.read_text()
    for key, value in (("max_waiting_rows", 128), ("ahead_rows", 64)):
        text, count = re.subn(rf'(key: "{key}" value {{ string_value: )"\d+"', rf'\1"{value}"', text)
        assert count == 1
    config.write_text(text)
    log: list[str] = []
    options = ServerOptions(copy, config_name="cpu", http_port=0, grpc_port=0, metrics_port=0)
    with Server(options, log=log.append) as server:
        bench = Bench(server, copy / "classifier", log)
        yield bench
        bench.client.close()
        bench._pending.close()


@pytest.fixture(scope="module")
def small_queue(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One server for all the tests that leave it running."""
    with served(repository, tmp_path_factory.mktemp("overload")) as bench:
        yield bench


@pytest.fixture
def bench(small_queue: Bench) -> Iterator[Bench]:
    """Empty before, and open after, whatever becomes of the test."""
    for kept in (small_queue.ended, small_queue.results, small_queue.log):
        kept.clear()
    yield small_queue
    small_queue.open()
    small_queue.until(lambda: sum(small_queue.pending().values()) == 0)
    assert small_queue.client.infer("text_classifier", [texts_input(["as before"])]).as_numpy("logits").shape == (1, 2)


def test_a_full_queue_refuses_at_once_and_answers_all_it_took_in_order(bench: Bench) -> None:
    """Four of twelve requests are taken; no text of the others is tokenized, and their callers hear of it meanwhile.

    For all eight the log gets one line, and none of their text.
    """
    calls, refusals = bench.tokenizer_calls(), bench.metric(REFUSED.format("queue full"))
    bench.fill()
    bench.queue(3, 4)
    for name in range(5, 13):
        bench.send(name)
    bench.until(lambda: len(bench.ended) == 8)

    assert sorted(bench.ended) == list(range(5, 13))
    for name in range(5, 13):
        status, message = bench.error(name)
        assert status == "UNAVAILABLE"
        assert "Exceeds maximum queue size: 128 rows (max_waiting_rows) wait already" in message
    assert bench.tokenizer_calls() - calls == 2
    bench.open()
    bench.until(lambda: len(bench.ended) == 12)
    assert bench.seen() == [1, 2, 3, 4]
    for name in range(1, 5):
        assert bench.results[name].as_numpy("logits").shape == (64, 2)
    assert bench.metric(REFUSED.format("queue full")) - refusals == 8
    bench.until(lambda: REFUSAL in "\n".join(bench.log))
    assert "\n".join(bench.log).count(REFUSAL) == 1
    assert "a a" not in "\n".join(bench.log)


REFUSAL = "tokenizer: requests are refused, queue full: Exceeds maximum queue size"
REFUSED = 'onepass_refused_requests_total{{model="tokenizer",reason="{}"}}'


def test_the_client_calls_a_refusal_overloaded_and_waits_for_room(bench: Bench) -> None:
    """Without retries it is an Overloaded; with them the call succeeds once there is room."""
    bench.fill()
    bench.queue(3, 4)
    with Client(bench.server.url, retries=0) as client, pytest.raises(Overloaded, match="is full .*max_waiting_rows"):
        client.classify(["no room"])

    bench.open()
    with Client(bench.server.url, retries=20, timeout_seconds=60) as client:
        assert len(client.classify(["room again"])) == 1


def test_who_gives_up_while_waiting_is_not_computed(bench: Bench) -> None:
    """A cancelled call, one past its deadline, and one whose channel was closed: the classifier sees none of them.

    Triton does not tell an ensemble's step that its caller is gone, so till their turn they keep their place in the queue.
    """
    bench.fill()
    waiting = bench.send(3)
    bench.send(4, rows=8, client_timeout=1.0)
    with grpc.InferenceServerClient(bench.server.url, channel_args=[("grpc.use_local_subchannel_pool", 1)]) as leaving:
        leaving.async_infer("text_classifier", [texts_input(["a " * 5] * 8)], callback=lambda result, error: None)
        bench.send(6, rows=8)
        bench.wait_for_rows(64 + 8 + 8 + 8)
    waiting.cancel()
    bench.until(lambda: {3, 4} <= set(bench.ended))
    time.sleep(0.3)  # the server hears of it by another thread than the next call

    bench.wait_for_rows(64 + 8 + 8 + 8)
    bench.open()
    bench.until(lambda: set(bench.ended) == {1, 2, 3, 4, 6})
    assert bench.error(3)[0] == "CANCELLED" and bench.error(4)[0] == "DEADLINE_EXCEEDED"
    assert bench.seen() == [1, 2, 6]


def test_a_timeout_ends_the_waiting(bench: Bench) -> None:
    """`timeout`, in microseconds, is for the queue: its caller is refused, its place is free, and it is never tokenized."""
    calls, refusals = bench.tokenizer_calls(), bench.metric(REFUSED.format("timeout"))
    bench.fill()
    bench.send(3, rows=8, timeout=100_000)
    bench.send(4, rows=8, timeout=600_000_000)
    bench.until(lambda: bench.ended == [3])

    status, message = bench.error(3)
    assert status == "UNAVAILABLE" and "Request timeout expired" in message
    bench.wait_for_rows(8)
    bench.open()
    bench.until(lambda: len(bench.ended) == 4)
    assert bench.seen() == [1, 2, 4]
    assert bench.metric(REFUSED.format("timeout")) - refusals == 1
    assert bench.tokenizer_calls() - calls == 3


def test_a_client_past_its_deadline_leaves_the_queue(bench: Bench) -> None:
    """The server is told the time that is left: the place is free again, and the text is never tokenized."""
    bench.fill()
    calls = bench.tokenizer_calls()
    with Client(bench.server.url) as client, pytest.raises(DeadlineExceeded):
        client.classify(["too late"], timeout_seconds=0.5)

    bench.wait_for_rows(0)
    bench.open()
    bench.until(lambda: set(bench.ended) == {1, 2})
    assert bench.tokenizer_calls() == calls


def test_short_texts_do_not_wait_for_long_ones(bench: Bench) -> None:
    """A quarter of a megabyte of text, then twenty short texts: all of those are answered first."""
    bench.send(2000, rows=64)
    bench.wait_for_rows(64)
    for name in range(1, 21):
        bench.send(name, rows=1)
    bench.until(lambda: len(bench.ended) == 21)

    assert bench.ended[-1] == 2000
    assert bench.results[2000].as_numpy("logits").shape == (64, 2)


class Enough(Exception):
    """The supervisor has done what the test waits for."""


def test_a_classifier_that_hangs_behind_a_full_queue_is_healed(bench: Bench) -> None:
    """Whoever asks is refused, the supervisor too. It ends the process: who waited hears of it, and who comes is answered."""
    said: list[str] = []

    def log(line: str) -> None:
        said.append(line)
        raise Enough

    patience = Patience(ask_seconds=0.2, answer_seconds=1.0, stuck_seconds=2.0)
    contract = Contract.read(bench.server.options.repository, "cpu")
    supervisor = Supervisor(bench.server, contract, log, patience)
    (hung,) = stubs_of(bench.server.pid)["classifier"]
    bench.fill()
    bench.queue(3, 4)

    with pytest.raises(Enough):
        supervisor.run()

    bench.open()
    bench.until(lambda: set(bench.ended) == {1, 2, 3, 4})
    assert said[0].startswith("healed classifier in ") and "no answer and no batch ended for 2 s" in said[0]
    assert {hung} != stubs_of(bench.server.pid)["classifier"]
    assert bench.client.infer("text_classifier", [texts_input(["again"])]).as_numpy("logits").shape == (1, 2)


def test_a_server_that_is_told_to_stop_answers_those_who_wait(repository: Path, tmp_path: Path) -> None:
    """Two are at the classifier and two wait in the tokenizer when the door is shut: all four are answered, in order."""
    with served(repository, tmp_path) as bench:
        bench.fill()
        bench.queue(3, 4)
        stopping = threading.Thread(target=bench.server.stop)
        stopping.start()
        bench.until(lambda: "the server is stopping" in bench.refusal())

        bench.open()
        bench.until(lambda: len(bench.ended) == 4)
        stopping.join(60)

    assert not stopping.is_alive()
    assert [bench.results[name].as_numpy("logits").shape for name in (1, 2, 3, 4)] == [(64, 2)] * 4
    assert bench.seen() == [1, 2, 3, 4]
