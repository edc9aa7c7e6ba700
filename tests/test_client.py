# SPDX-License-Identifier: Apache-2.0
"""What `Client` and `AsyncClient` promise, each promise on both, against a server that counts what it is asked."""

from __future__ import annotations

import asyncio
import random
import threading
import time

import grpc
import numpy as np
import pytest
from fake_triton import FULL, logit_of
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
from ensemble.client.call import plan_requests
from ensemble.client.wire import pipeline_error

FAILING = "connections to all backends failing; last error: UNKNOWN: ipv4:a:1"


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

    def test_first_error_ends_the_call(self, triton):
        """When classify raises, what was not sent never is, and nobody hangs up on the server that has the rest."""
        triton.open.clear()
        triton.company = 3

        with Client(triton.url, batch_limit=1, in_flight=3) as client:
            with pytest.raises(InvalidRequest, match=r"texts\[0\]"):
                client.classify(["BAD", "text", "text", "never sent"])
            time.sleep(0.2)  # hanging up would have been noticed by then
            triton.open.set()
        assert len(triton.requests) == 3
        assert triton.in_flight == triton.cancelled == 0

    def test_first_error_ends_the_call_async(self, triton):
        """The same for AsyncClient."""
        triton.open.clear()
        triton.company = 3

        async def scenario():
            async with AsyncClient(triton.url, batch_limit=1, in_flight=3) as client:
                with pytest.raises(InvalidRequest, match=r"texts\[0\]"):
                    await client.classify(["BAD", "text", "text", "never sent"])
                await asyncio.sleep(0.2)
                triton.open.set()

        asyncio.run(scenario())
        assert len(triton.requests) == 3
        assert triton.in_flight == triton.cancelled == 0

    def test_cancelling_a_task_leaves_its_requests_to_their_end(self, triton):
        """When the task that awaits classify is cancelled, what was sent is answered, and what was not never is sent."""
        triton.open.clear()

        async def scenario():
            async with AsyncClient(triton.url, batch_limit=1, in_flight=3) as client:
                task = asyncio.create_task(client.classify(["a"] * 4))
                await asyncio.to_thread(triton.wait_until, lambda: triton.in_flight == 3)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                await asyncio.sleep(0.2)
                triton.open.set()

        asyncio.run(scenario())
        assert len(triton.requests) == 3
        assert triton.in_flight == triton.cancelled == 0

    def test_a_deadline_is_no_hanging_up(self, triton, ask):
        """The call ends at its deadline; its request, which the server is a little late with, ends by itself."""
        triton.open.clear()
        threading.Timer(0.5, triton.open.set).start()

        with pytest.raises(DeadlineExceeded, match=r"within 0.2 s for 1 of 1 texts"):
            ask(triton.url, "classify", "a", timeout_seconds=0.2)
        assert triton.in_flight == triton.cancelled == 0

    @pytest.mark.parametrize(
        ("status", "text", "kind", "message"),
        [
            ("INVALID_ARGUMENT", "text 0 is empty", InvalidRequest, "text 0 is empty"),
            ("UNAVAILABLE", FULL[1], Overloaded, "queue of m at u:1 is full"),
            ("UNAVAILABLE", "Request timeout expired", Overloaded, "waited too long in a queue"),
            ("UNAVAILABLE", "Request for unknown model: 'm' is not found", Unavailable, "model m is not loaded at u:1"),
            ("UNAVAILABLE", "Request for unknown model: 'm' has no available versions", Unavailable, "is not in service"),
            ("NOT_FOUND", "Request for unknown model: 'm' has no available versions", Unavailable,
             "model m at u:1 is not in service (Request for unknown model: 'm' has no available versions): try again"),
            ("UNAVAILABLE", "in ensemble 'm', Request for unknown model: 'step' version 1 is not at ready state",
             Unavailable, "model m at u:1 is not in service (Request for unknown model: 'step' version 1 is not at"),
            ("UNAVAILABLE", "in ensemble 'm', the server is stopping: ask another one", Unavailable,
             "the server at u:1 is stopping (the server is stopping: ask another one): ask another one, or try again"),
            ("UNAVAILABLE", "Server is stopping, scheduler for model has stopped accepting new inference requests",
             Unavailable, "the server at u:1 is stopping"),
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
            ("INTERNAL", "Failed to obtain the health mutex.", Unavailable, "model m at u:1 has lost its process (Fail"),
            ("INTERNAL", "Stub process is unhealthy and it will be restarted.", Unavailable, "lost its process (Stub"),
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
