# SPDX-License-Identifier: Apache-2.0
"""What `Client` and `AsyncClient` promise, each promise on both, against a server that counts what it is asked."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import grpc
import numpy as np
import pytest
from fake_triton import FakeTriton, logit_of
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from ensemble import (
    AsyncClient,
    Cancelled,
    Classification,
    Client,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    RequestFailed,
    Unavailable,
)
from ensemble.client.call import Deadline, pause_before_retry, plan_requests
from ensemble.client.client import ClientOptions
from ensemble.client.wire import pipeline_error

FAILING = "connections to all backends failing; last error: UNKNOWN: ipv4:a:1"
FULL = (grpc.StatusCode.UNAVAILABLE, "[request id: <id_unknown>] Exceeds maximum queue size")


@pytest.fixture
def triton():
    server = FakeTriton()
    yield server
    server.stop()


@pytest.fixture(params=["Client", "AsyncClient"])
def ask(request):
    """ask(url, method, *arguments, **options): that method's result, of a client of either kind."""

    def blocking(url, method, *arguments, **options):
        with Client(url, backoff_seconds=0.001, **options) as client:
            return getattr(client, method)(*arguments)

    async def awaiting(url, method, *arguments, **options):
        async with AsyncClient(url, backoff_seconds=0.001, **options) as client:
            return await getattr(client, method)(*arguments)

    if request.param == "Client":
        return blocking
    return lambda *arguments, **options: asyncio.run(awaiting(*arguments, **options))


def unused_url() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def user_timeouts(port: int) -> list[int]:
    """TCP_USER_TIMEOUT, in ms, of this process's connections to `port`."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError), socket.socket(fileno=os.dup(int(link.name))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername()[1] == port:
                found.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    return found


class TestTexts:
    def test_str_is_one_text(self, triton, ask):
        """A bare str is one text, never a list of its letters."""
        answers = ask(triton.url, "classify", "abc")

        assert [answer.text for answer in answers] == ["abc"]
        assert triton.requests == [["abc"]]

    def test_bytes_and_numpy_strings(self, triton, ask):
        """UTF-8 bytes, np.bytes_ and np.str_ get the answer of the same str."""
        text = "café 👍🏽 你好"
        answers = ask(triton.url, "classify", [text, text.encode(), np.bytes_(text.encode()), np.str_(text)])

        assert answers == answers[:1] * 4
        assert answers[0].logits[0] == logit_of(text)

    def test_nothing_is_no_request(self, triton, ask):
        """An empty list has an empty answer, and no request is made for it."""
        assert ask(triton.url, "classify", []) == []
        assert triton.requests == []
        assert triton.config_requests == 0

    def test_generator(self, triton, ask):
        """Texts may come from a generator."""
        answers = ask(triton.url, "classify", (f"text {i}" for i in range(3)))

        assert [answer.text for answer in answers] == ["text 0", "text 1", "text 2"]

    @pytest.mark.parametrize(
        ("bad", "message"),
        [
            ("a\ud800", r"texts\[1\]: has a lone surrogate at position 1"),
            (b"a\xff", r"texts\[1\]: is not UTF-8 at byte 1"),
            (7, r"texts\[1\]: must be a str, or bytes of UTF-8, not int"),
            (None, r"texts\[1\]: must be a str, or bytes of UTF-8, not NoneType"),
            ("x" * 101, r"texts\[1\]: has 101 bytes, more than max_request_bytes=100"),
        ],
    )
    def test_bad_text_is_refused_locally(self, triton, ask, bad, message):
        """A text that cannot be sent is named by its place, and nothing is sent."""
        with pytest.raises(InvalidRequest, match=message):
            ask(triton.url, "classify", ["good", bad], max_request_bytes=100)
        assert triton.requests == []

    def test_texts_must_be_iterable(self, triton, ask):
        """Something that is neither a text nor iterable is refused by its type."""
        with pytest.raises(InvalidRequest, match="texts must be a str or an iterable of str, not int"):
            ask(triton.url, "classify", 3)


class TestAnswers:
    def test_every_field(self, triton, ask):
        """A classification carries the best label, all labels with probabilities, exact logits and the token count."""
        [answer] = ask(triton.url, "classify", "a good film")

        assert (answer.label, answer.probability, answer.index) == ("positive", 0.75, 1)
        assert answer.scores == {"negative": 0.25, "positive": 0.75}
        assert answer.logits == (logit_of("a good film"), logit_of("a good film") + 500)
        assert (answer.num_tokens, answer.truncated) == (5, False)
        assert answer.seconds > 0

    def test_truncation_is_reported(self, triton, ask):
        """A text the model saw only in part says so."""
        [answer] = ask(triton.url, "classify", "word " * 600)

        assert answer.truncated
        assert answer.num_tokens == 602

    def test_one_request_is_enough(self, triton, ask):
        """Labels come with the answer: one text costs one request and nothing else."""
        ask(triton.url, "classify", "a")

        assert len(triton.requests) == 1
        assert triton.config_requests == 0

    def test_labels_are_never_stale(self, triton):
        """When the server loads other labels under a running client, the next answer has them."""
        with Client(triton.url) as client:
            before = client.classify("a")[0]
            triton.labels = ["bad", "good"]
            after = client.classify("a")[0]

        assert (before.label, after.label) == ("positive", "good")

    @pytest.mark.parametrize("label", ["a:b:c", "très bien", "", "0.5:1:x"])
    def test_any_label(self, triton, ask, label):
        """A label may hold colons, accents or nothing."""
        triton.labels = ["no", label]

        assert ask(triton.url, "classify", "a")[0].label == label

    def test_no_label_file(self, triton, ask):
        """Without a label file the classes are called as in Hugging Face."""
        triton.has_label_file = False

        assert ask(triton.url, "classify", "a")[0].scores == {"LABEL_0": 0.25, "LABEL_1": 0.75}

    def test_multi_label(self, triton, ask):
        """Independent probabilities stay as they are; scores tells which labels hold."""
        triton.labels, triton.probabilities = ["toxic", "rude", "fine"], [0.9, 0.8, 0.1]
        [answer] = ask(triton.url, "classify", "a")

        assert [label for label, probability in answer.scores.items() if probability > 0.5] == ["toxic", "rude"]

    def test_regression(self, triton, ask):
        """A single output gives its name as the label and its value unchanged, even below zero."""
        triton.labels, triton.probabilities = ["stars"], [-3.5]
        [answer] = ask(triton.url, "classify", "a")

        assert (answer.label, answer.probability) == ("stars", -3.5)

    def test_many_classes(self, triton, ask):
        """Every class comes back, however many there are."""
        triton.labels = [f"class {i}" for i in range(1000)]
        triton.probabilities = [i / 1000 for i in range(1000)]
        [answer] = ask(triton.url, "classify", "a")

        assert len(answer.scores) == 1000
        assert answer.label == "class 999"

    @pytest.mark.parametrize("output", ["probabilities", "logits", "num_tokens", "truncated"])
    def test_other_model(self, triton, ask, output):
        """A model that is no text classifier is reported with what its answer lacks."""
        triton.left_out = {output}

        with pytest.raises(RequestFailed, match=f"there is no output {output}"):
            ask(triton.url, "classify", "a")


class TestRequests:
    def test_order(self, triton, ask):
        """Answers come in the order of the texts, though texts travel by length and overtake each other."""
        texts = [f"{'word ' * (i * 37 % 200)}{i}" for i in range(100)]
        answers = ask(triton.url, "classify", texts, batch_limit=7)

        assert [answer.text for answer in answers] == texts
        assert [answer.logits[0] for answer in answers] == [logit_of(text) for text in texts]

    def test_batch_limit_is_the_servers(self, triton, ask):
        """Without a batch_limit, a request has at most as many texts as the server's model takes."""
        triton.max_batch_size = 4
        ask(triton.url, "classify", ["a"] * 10)

        assert sorted(map(len, triton.requests)) == [2, 4, 4]

    def test_batch_limit_is_asked_once(self, triton):
        """The server's limit is asked for once in a client's life."""
        with Client(triton.url) as client:
            for _ in range(3):
                client.classify(["a", "b"])

        assert triton.config_requests == 1

    def test_batch_limit_above_the_servers(self, triton, ask):
        """A request of more texts than the server takes is halved until it fits."""
        triton.max_batch_size = 4

        assert len(ask(triton.url, "classify", ["a"] * 16, batch_limit=16)) == 16
        assert sorted(map(len, triton.requests)) == [4, 4, 4, 4, 8, 8, 16]

    def test_asking_for_the_limit_is_tried_again(self, triton, ask):
        """A server that is still loading when asked for its limit is asked again."""
        triton.config_refusals.extend([(grpc.StatusCode.UNAVAILABLE, "Request for unknown model")] * 2)

        assert len(ask(triton.url, "classify", ["a", "b"])) == 2
        assert triton.config_requests == 3

    def test_no_limit_to_be_had(self, triton, ask):
        """Where the limit cannot be learnt, classify_each says so in the place of every text."""
        triton.config_refusals.append((grpc.StatusCode.INTERNAL, "broken"))
        answers = ask(triton.url, "classify_each", ["a", "b"])

        assert [type(answer) for answer in answers] == [RequestFailed] * 2

    @pytest.mark.parametrize("in_flight", [1, 3])
    def test_in_flight(self, triton, ask, in_flight):
        """As many requests as allowed are on their way at once, never more."""
        triton.company = in_flight
        ask(triton.url, "classify", ["a"] * 12, batch_limit=1, in_flight=in_flight)

        assert len(triton.requests) == 12
        assert triton.most_in_flight == in_flight

    def test_large_lists_are_cut_by_bytes(self, triton, ask):
        """64 texts of 25 kB are more than the tokenizer takes at once, and travel in seven requests."""
        answers = ask(triton.url, "classify", ["x" * 25_000] * 64)

        assert len(answers) == 64
        assert sorted(map(len, triton.requests)) == [4, *[10] * 6]

    def test_message_too_large(self, triton, ask):
        """A message that the server's gRPC refuses is halved; a text that is too large alone is named with the knob."""
        answers = ask(
            triton.url, "classify_each", ["y" * 5_000_000] + ["x" * 3_000_000] * 2, batch_limit=8,
            max_request_bytes=50_000_000,
        )  # fmt: skip

        assert isinstance(answers[0], InvalidRequest)
        assert "lower max_request_bytes" in str(answers[0])
        assert all(isinstance(answer, Classification) for answer in answers[1:])

    def test_headers(self, triton, ask):
        """Headers travel with the request, in lower case as gRPC wants them."""
        ask(triton.url, "classify", "a", headers={"Authorization": "Bearer x"})

        assert triton.headers[0]["authorization"] == "Bearer x"

    def test_padding_is_bounded(self):
        """No text shares a request with one of half its length and less, so that padding stays a small part."""
        lengths = {place: random.Random(place).randrange(1, 3000) for place in range(500)}
        requests = plan_requests(lengths, limit=64, max_bytes=100_000)

        assert sorted(place for request in requests for place in request) == list(lengths)
        assert all(len(request) <= 64 for request in requests)
        assert all(sum(lengths[place] for place in request) <= 100_000 for request in requests)
        for request in requests:
            sizes = [lengths[place] for place in request]
            assert max(sizes) <= 1.5 * min(sizes) + 32


class TestErrors:
    def test_strict_names_the_text(self, triton, ask):
        """classify raises for the first bad text found and says which it is, in the server's words."""
        texts = ["good"] * 10
        texts[6] = "BAD!"

        with pytest.raises(InvalidRequest, match=r"^texts\[6\]: row 0 is bad$"):
            ask(triton.url, "classify", texts)

    def test_strict_looks_no_further(self, triton, ask):
        """The hunt for the bad text of a refused request comes before the requests that still wait."""
        with pytest.raises(InvalidRequest, match=r"^texts\[0\]"):
            ask(triton.url, "classify", ["BAD!"] + ["good"] * 15, batch_limit=4, in_flight=1)
        assert [len(texts) for texts in triton.requests] == [4, 2, 1]

    def test_each_isolates_bad_texts(self, triton, ask):
        """classify_each gives errors to the bad texts, local or the server's, and answers to all others."""
        texts = ["good"] * 20
        texts[3], texts[4], texts[17] = "BAD!", "\ud800", "BAD?"
        answers = ask(triton.url, "classify_each", texts)

        assert [i for i, answer in enumerate(answers) if isinstance(answer, InvalidRequest)] == [3, 4, 17]
        assert [i for i, answer in enumerate(answers) if isinstance(answer, Classification)] == [
            i for i in range(20) if i not in (3, 4, 17)
        ]

    def test_invalid_request_is_not_retried(self, triton, ask):
        """A text the server refuses is sent once."""
        with pytest.raises(InvalidRequest):
            ask(triton.url, "classify", "BAD")
        assert len(triton.requests) == 1

    def test_first_error_cancels_the_rest(self, triton):
        """When classify raises, its other requests in flight are cancelled and those not yet sent never are sent."""
        triton.open.clear()
        triton.company = 3

        with Client(triton.url, batch_limit=1, in_flight=3) as client:
            with pytest.raises(InvalidRequest, match=r"texts\[0\]"):
                client.classify(["BAD", "text", "text", "never sent"])
            triton.wait_until(lambda: triton.cancelled == 2)
        assert len(triton.requests) == 3

    def test_first_error_cancels_the_rest_async(self, triton):
        """The same for AsyncClient."""
        triton.open.clear()
        triton.company = 3

        async def scenario():
            async with AsyncClient(triton.url, batch_limit=1, in_flight=3) as client:
                with pytest.raises(InvalidRequest, match=r"texts\[0\]"):
                    await client.classify(["BAD", "text", "text", "never sent"])
                await asyncio.to_thread(triton.wait_until, lambda: triton.cancelled == 2)

        asyncio.run(scenario())
        assert len(triton.requests) == 3

    def test_cancelling_a_task_cancels_its_requests(self, triton):
        """When the task that awaits classify is cancelled, the server is told of every request in flight."""
        triton.open.clear()

        async def scenario():
            async with AsyncClient(triton.url, batch_limit=1, in_flight=3) as client:
                task = asyncio.create_task(client.classify(["a"] * 3))
                await asyncio.to_thread(triton.wait_until, lambda: triton.in_flight == 3)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                await asyncio.to_thread(triton.wait_until, lambda: triton.cancelled == 3)

        asyncio.run(scenario())

    @pytest.mark.parametrize(
        ("status", "text", "kind", "message"),
        [
            ("INVALID_ARGUMENT", "text 0 is empty", InvalidRequest, "text 0 is empty"),
            ("UNAVAILABLE", FULL[1], Overloaded, "queue of m at u:1 is full"),
            ("UNAVAILABLE", "Request timeout expired", Overloaded, "waited too long in a queue"),
            ("UNAVAILABLE", "Request for unknown model: 'm' is not found", Unavailable, "model m is not loaded at u:1"),
            ("UNAVAILABLE", "Request for unknown model: 'm' has no available versions", Unavailable, "model m is not"),
            ("NOT_FOUND", "Request for unknown model: 'm' is not found", Unavailable, "model m is not loaded at u:1"),
            ("UNAVAILABLE", "This protocol is restricted, expecting header 'k'", RequestFailed, "in `headers`"),
            ("INVALID_ARGUMENT", "incomplete string data for inference input 'text'", Unavailable, "batched with a malformed"),
            ("UNAVAILABLE", "Socket closed", Unavailable, "no server answers at u:1 (Socket closed)"),
            ("UNAVAILABLE", f"{FAILING}: Tls handshake failed (X): SSL_ERROR_SSL: error:1a:SSL routines:OPENSSL_internal:"
             "CERTIFICATE_VERIFY_FAILED: expired", RequestFailed, "u:1 is not trusted (ipv4:a:1: CERTIFICATE_VERIFY_FAIL"),
            ("UNAVAILABLE", f"{FAILING}: Socket closed", Unavailable, "u:1 takes connections and closes them (ipv4:a:1:"),
            ("UNAVAILABLE", f"{FAILING}: Failed parsing HTTP/2 (Trying to connect an http1.x server)", RequestFailed,
             "u:1 is no gRPC port"),
            ("RESOURCE_EXHAUSTED", "Received message larger than max (9 vs. 4)", InvalidRequest, "max_request_bytes"),
            ("RESOURCE_EXHAUSTED", "quota", Overloaded, "out of resources"),
            ("DEADLINE_EXCEEDED", "Deadline Exceeded", DeadlineExceeded, "timeout_seconds"),
            ("CANCELLED", "gone", Cancelled, "was cancelled (gone)"),
            ("UNAUTHENTICATED", "who?", RequestFailed, "in `headers`"),
            ("UNIMPLEMENTED", "Method not found!", RequestFailed, "Triton's gRPC port?"),
            ("INTERNAL", "Stub process 'x' is not healthy.", Unavailable, "model m at u:1 has lost its process (Stub"),
            ("INTERNAL", "other", RequestFailed, "model m at u:1 failed (INTERNAL: other)"),
            ("SOMETHING_NEW", "", RequestFailed, "(SOMETHING_NEW: no message)"),
        ],
    )  # fmt: skip
    def test_status(self, status, text, kind, message):
        """Every gRPC status has one meaning, and the message names what to look at."""
        error = pipeline_error(InferenceServerException(text, status=f"StatusCode.{status}"), url="u:1", model="m")

        assert type(error) is kind
        assert message in str(error)

    def test_triton_message_is_cleaned(self):
        """What only Triton's authors can use is cut from its messages."""
        text = (
            "in ensemble 'text_classifier', [request id: <id_unknown>] Failed to process the request(s) for model "
            "instance 'tokenizer_0', message: boom\n\nAt:\n  /models/model.py(7): execute\n"
        )
        error = InferenceServerException(text, status="StatusCode.INVALID_ARGUMENT")

        assert str(pipeline_error(error, url="u:1", model="m")) == "boom"


class TestDeadlineAndRetry:
    @pytest.mark.parametrize("nonsense", [0, -1, float("nan"), float("inf"), 1e9, "5", True, object()])
    def test_nonsense_timeouts(self, triton, ask, nonsense):
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
    def test_nonsense_options(self, options):
        """Every other senseless option is refused by name too."""
        name = list(options)[-1]

        with pytest.raises(InvalidRequest, match=name):
            Client(**options)

    @pytest.mark.parametrize("name", ["timeout_seconds", "connect_timeout_seconds", "backoff_cap_seconds"])
    def test_milliseconds(self, name):
        """A number that can only be one of milliseconds is refused with that guess."""
        with pytest.raises(InvalidRequest, match=rf"{name} must be .* not 30000 \(milliseconds\? divide by 1000\)"):
            Client(**{name: 30000})

    @pytest.mark.parametrize(
        "url",
        ["", " ", "http://127.0.0.1:8000", "grpc://h:1", "a b:1", None, 8001, ["127.0.0.1:1"], ",", "127.0.0.1:1,",
         "127.0.0.1:1, 127.0.0.1:2", "127.0.0.1:1,127.0.0.1", "127.0.0.1:1,127.0.0.1:99999"],
    )  # fmt: skip
    def test_nonsense_urls(self, url):
        """An address that gRPC would misread is refused with an example of a sound one."""
        with pytest.raises(InvalidRequest, match=r"url must be host:port.*127\.0\.0\.1:8001"):
            Client(url)

    @pytest.mark.parametrize(
        "url", ["a:1,b:2", "127.0.0.1:1,localhost:1", "127.0.0.1:1,[::1]:1", "fe80::1:1,fe80::2:1"]
    )
    def test_lists_that_grpc_cannot_take(self, url):
        """Several servers that are not numeric addresses of one kind are refused with what would do."""
        with pytest.raises(InvalidRequest, match="all IPv4 or all IPv6.*or one name that resolves to all of them"):
            Client(url)

    def test_deadline(self, triton, ask):
        """A call that the server does not answer in time ends in DeadlineExceeded and is not sent again."""
        triton.open.clear()

        with pytest.raises(DeadlineExceeded, match="raise timeout_seconds"):
            ask(triton.url, "classify", ["a", "b"], timeout_seconds=0.1)
        assert triton.requests == [["a", "b"]]

    def test_deadline_keeps_what_is_there(self, triton, ask):
        """classify_each gives the answers that came before the deadline."""
        triton.refusals.append((grpc.StatusCode.INTERNAL, "broken"))  # the first is answered, though the server hangs
        triton.open.clear()
        answers = ask(triton.url, "classify_each", ["a", "b", "c"], batch_limit=1, in_flight=1, timeout_seconds=0.1)

        assert [type(answer) for answer in answers] == [RequestFailed, DeadlineExceeded, DeadlineExceeded]
        assert triton.requests == [["a"], ["b"]]

    def test_deadline_while_others_hold_every_slot(self, triton):
        """A call that gets no slot of a shared client in time ends by its own deadline, and nothing is sent for it."""
        triton.open.clear()
        with Client(triton.url, in_flight=1) as client, ThreadPoolExecutor(1) as pool:
            other = pool.submit(client.classify, "first")
            triton.wait_until(lambda: triton.in_flight == 1)
            with pytest.raises(DeadlineExceeded):
                client.classify("second", timeout_seconds=0.05)
            triton.open.set()

            assert other.result()[0].text == "first"
        assert triton.requests == [["first"]]

    def test_a_deadline_makes_room(self, triton):
        """A call whose deadline has passed holds its slot of a shared client no longer."""
        triton.open.clear()
        with Client(triton.url, in_flight=1) as client, ThreadPoolExecutor(1) as pool:
            given_up = pool.submit(client.classify, "first", timeout_seconds=0.2)
            triton.wait_until(lambda: triton.requests == [["first"]])
            waiting = pool.submit(client.classify, "second")
            triton.wait_until(lambda: triton.requests == [["first"], ["second"]])
            triton.open.set()

            assert isinstance(given_up.exception(), DeadlineExceeded)
            assert waiting.result()[0].text == "second"

    def test_a_cancelled_task_makes_room(self, triton):
        """The same for a task that is cancelled, while its request is under way as while it waits to be sent again."""
        triton.open.clear()
        triton.refusals.append(FULL)

        async def scenario():
            async with AsyncClient(triton.url, in_flight=1, backoff_seconds=60, backoff_cap_seconds=60) as client:
                for text in ("refused", "under way"):
                    task = asyncio.create_task(client.classify(text, timeout_seconds=3000))
                    await asyncio.to_thread(triton.wait_until, lambda text=text: triton.requests[-1:] == [[text]])
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
                triton.open.set()
                return await client.classify("next")

        assert asyncio.run(scenario())[0].text == "next"

    def test_full_queue_is_tried_again(self, triton, ask):
        """A request refused three times by a full queue is answered by the fourth try."""
        triton.refusals.extend([FULL] * 3)

        assert ask(triton.url, "classify", "a")[0].label == "positive"
        assert len(triton.requests) == 4

    @pytest.mark.parametrize("refusal", [FULL, (grpc.StatusCode.UNAVAILABLE, "Request for unknown model: 'm'")])
    def test_retries_are_bounded(self, triton, ask, refusal):
        """After `retries` further tries the error is raised."""
        triton.refusals.extend([refusal] * 9)

        with pytest.raises(Overloaded if refusal is FULL else Unavailable):
            ask(triton.url, "classify", "a", retries=2)
        assert len(triton.requests) == 3

    def test_a_dead_stub_is_tried_again(self, triton, ask):
        """A model whose Python process died comes back when the launcher has seen it, or answers on another server."""
        triton.refusals.append((grpc.StatusCode.INTERNAL, "Stub process 'tokenizer_0_0' is not healthy."))

        assert ask(triton.url, "classify", "a")[0].label == "positive"

    @pytest.mark.parametrize(
        ("code", "text"),
        [("INTERNAL", "no"), ("UNKNOWN", "no"), ("CANCELLED", "no"), ("UNIMPLEMENTED", "no"),
         ("DEADLINE_EXCEEDED", "no"), ("UNAVAILABLE", "This protocol is restricted, expecting header 'k'")],
    )  # fmt: skip
    def test_other_errors_are_not_tried_again(self, triton, ask, code, text):
        """Only a missing server, a dead model and a full queue are worth a retry."""
        triton.refusals.append((grpc.StatusCode[code], text))

        with pytest.raises(RequestFailed):
            ask(triton.url, "classify", "a")
        assert len(triton.requests) == 1

    def test_pauses_double_up_to_the_cap(self, monkeypatch):
        """Pauses are drawn from zero to a bound that doubles with every try and stops at the cap."""
        monkeypatch.setattr(random, "uniform", lambda low, high: (low, high)[1])
        options = ClientOptions(backoff_seconds=0.1, backoff_cap_seconds=0.5, retries=5)
        pauses = [pause_before_retry(Overloaded("full"), tries, options, Deadline(60)) for tries in range(1, 7)]

        assert pauses == [0.1, 0.2, 0.4, 0.5, 0.5, None]

    def test_no_retry_past_the_deadline(self, monkeypatch):
        """A pause that would outlast the deadline is not begun: the error comes at once."""
        monkeypatch.setattr(random, "uniform", lambda low, high: high)

        assert pause_before_retry(Overloaded("full"), 1, ClientOptions(backoff_seconds=2.0), Deadline(1.0)) is None

    def test_refused_by_one_server_answered_by_another(self, triton, ask):
        """Of several servers the next one gets what the first refused."""
        other = FakeTriton()
        triton.refusals.extend([FULL] * 99)
        answers = ask(f"{triton.url},{other.url}", "classify", ["a"] * 20, batch_limit=1, in_flight=1, retries=50)
        other.stop()

        assert len(answers) == 20
        assert len(other.requests) == 20

    def test_a_dead_server_is_left_out(self, triton, ask):
        """Of several servers those that are not there cost nothing, not even a retry."""
        answers = ask(f"{unused_url()},{triton.url},{unused_url()}", "classify", ["a"] * 20, batch_limit=1, retries=0)

        assert len(answers) == 20

    def test_no_server_there(self, ask):
        """With several servers and none there the error names them all and has the last one's reason."""
        url = f"{unused_url()},{unused_url()}"

        with pytest.raises(Unavailable, match=f"no server answers at {url} .*Connection refused"):
            ask(url, "classify", "a", retries=1)

    def test_nobody_there(self, ask):
        """A refused connection is Unavailable and names the address."""
        url = unused_url()

        with pytest.raises(Unavailable, match=f"no server answers at {url} .*Connection refused"):
            ask(url, "classify", "a")

    def test_server_that_never_speaks(self, ask):
        """A peer that takes the connection and says nothing is given up after the connect time-out."""
        with socket.create_server(("127.0.0.1", 0)) as silent:
            url = f"127.0.0.1:{silent.getsockname()[1]}"

            with pytest.raises(Unavailable, match=f"no server answers at {url}"):
                ask(url, "classify", "a", connect_timeout_seconds=0.1, retries=0, timeout_seconds=15)


class TestLifeCycle:
    def test_wait_ready_waits_for_the_model(self, triton, ask):
        """wait_ready asks for the model until it is ready."""
        triton.ready.extend([False, False, True])
        ask(triton.url, "wait_ready", 30)

        assert not triton.ready

    def test_wait_ready_gives_the_reason(self, triton, ask):
        """wait_ready tells a server without the model from a missing server."""
        triton.ready.extend([False] * 100)

        with pytest.raises(Unavailable, match="the server answers, model m is not loaded"):
            ask(triton.url, "wait_ready", 0.05, model="m")
        with pytest.raises(Unavailable, match=r"was not ready within 0.05 s: no server answers at 127"):
            ask(unused_url(), "wait_ready", 0.05)

    def test_closing_twice(self, triton):
        """close() may be repeated; a closed client says that it is."""
        client = Client(triton.url)
        client.close()
        client.close()

        with pytest.raises(InvalidRequest, match="this client is closed"):
            client.classify("a")

    def test_closing_an_async_client_twice(self, triton):
        """The same for AsyncClient, used or not."""

        async def scenario():
            unused, client = AsyncClient(triton.url), AsyncClient(triton.url)
            await client.classify("a")
            for each in (unused, client, unused, client):
                await each.close()
            with pytest.raises(InvalidRequest, match="this client is closed"):
                await client.classify("a")

        asyncio.run(scenario())

    def test_closing_under_a_call(self, triton):
        """A call whose client another thread closes ends in Cancelled."""
        triton.open.clear()
        client = Client(triton.url)
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(client.classify, "a")
            triton.wait_until(lambda: triton.in_flight == 1)
            client.close()

            assert isinstance(call.exception(), Cancelled)

    def test_closing_between_two_tries(self, triton):
        """A call that waits to be sent again ends in Cancelled too."""
        triton.refusals.extend([FULL] * 1000)
        client = Client(triton.url, retries=1000, backoff_seconds=0.01, backoff_cap_seconds=0.01)
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(client.classify, "a")
            triton.wait_until(lambda: len(triton.requests) >= 2)
            client.close()

            assert isinstance(call.exception(), Cancelled)

    def test_closing_under_an_async_call(self, triton):
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

    def test_another_event_loop(self, triton):
        """An AsyncClient refuses to be used in a second event loop instead of hanging there."""
        client = AsyncClient(triton.url)

        async def first():
            await client.classify("a")

        with closing(asyncio.new_event_loop()) as one, closing(asyncio.new_event_loop()) as two:
            one.run_until_complete(first())
            with pytest.raises(InvalidRequest, match="another event loop"):
                two.run_until_complete(first())
            one.run_until_complete(client.close())

    def test_threads_share_a_client(self, triton, monkeypatch):
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

    def test_tasks_share_a_client(self, triton):
        """A thousand calls at once on one AsyncClient are in_flight at a time, and each gets its own answer."""
        texts = [f"text {i}" for i in range(1000)]

        async def scenario():
            async with AsyncClient(triton.url, in_flight=4) as client:
                return await asyncio.gather(*map(client.classify, texts))

        assert [answer.logits[0] for [answer] in asyncio.run(scenario())] == [logit_of(text) for text in texts]
        assert triton.most_in_flight <= 4

    def test_channel_arguments(self):
        """Messages are not limited to 4 MiB, connecting is limited in time, Triton's limit for pings is kept."""
        with Client(connect_timeout_seconds=1.5) as client:
            arguments = dict(client._connection["channel_args"])

        assert arguments["grpc.max_send_message_length"] == arguments["grpc.max_receive_message_length"] == 2**31 - 1
        assert arguments["grpc.min_reconnect_backoff_ms"] == 1500
        assert arguments["grpc.keepalive_time_ms"] > 300_000
        assert "grpc.keepalive_permit_without_calls" not in arguments

    def test_a_machine_that_vanishes(self, triton):
        """A connection whose peer acknowledges nothing is ended by the kernel after 10 s, not after a quarter hour."""
        with Client(triton.url) as client:
            client.classify("a")
            port = int(triton.url.rpartition(":")[2])

            assert user_timeouts(port) == [10_000]

    def test_options_in_one_piece(self):
        """Options may come as one object, with single fields changed by name."""
        with Client(options=ClientOptions(model="m", retries=7), retries=1) as client:
            assert (client.options.model, client.options.retries) == ("m", 1)

    def test_secrets_are_not_shown(self):
        """Header values appear in no repr."""
        assert "s3cret" not in repr(ClientOptions(headers={"key": "s3cret"}))


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
