# SPDX-License-Identifier: Apache-2.0
"""Counts on the real server: batches that form, and what is done for each of them. No timings."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import tritonclient.grpc as grpc
from triton_requests import Counts, in_flight_together, tensor_input, texts_input

from ensemble.handlers.packing import padded
from ensemble.launcher.server import Server
from ensemble.samples import load_samples, short_samples
from perf import closed_loop


@dataclass
class Watch:
    """Counts of one model since `start()`."""

    server: Server
    client: grpc.InferenceServerClient
    model: str

    def start(self) -> None:
        """Count from here, once all that was sent before is counted: an answer goes out before that."""
        before = None
        while before != (before := (Counts.read(self.client, self.model), self._calls())):
            time.sleep(0.2)
        self.before, self.calls_before = before

    def counts(self, rows: int = 0) -> Counts:
        """The counts, once these many rows are in them."""
        deadline = time.monotonic() + 10
        while (counts := Counts.read(self.client, self.model).since(self.before)).rows < rows:
            assert time.monotonic() < deadline, f"{counts} after 10 s, not {rows} rows"
            time.sleep(0.05)
        return counts

    def calls(self) -> int:
        """Forward passes, or tokenizer calls."""
        return self._calls() - self.calls_before

    def _calls(self) -> int:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.server.metrics_port}/metrics", timeout=10) as response:
            metrics = response.read().decode()
        found = re.search(rf'^onepass_model_calls_total{{model="{self.model}".*}} (\S+)$', metrics, re.MULTILINE)
        return int(float(found[1])) if found else 0


@pytest.fixture
def raw(server: Server) -> Iterator[grpc.InferenceServerClient]:
    with grpc.InferenceServerClient(server.url) as client:
        yield client


@pytest.fixture
def watch(server: Server, raw):
    def start(model: str) -> Watch:
        watch = Watch(server, raw, model)
        watch.start()
        return watch

    return start


def test_mixed_lengths_share_batches(server: Server, watch) -> None:
    """Requests from tweets to past 512 tokens: with 128 in flight the classifier's mean batch is at least 40.

    While a batch runs, those who are not in it wait: half of what is in flight, so 64 here, less who is on the way.
    """
    texts = [sample.text for sample in load_samples()]
    closed_loop.run(server.url, texts[:64], in_flight=64)
    classifier, tokenizer = watch("classifier"), watch("tokenizer")

    closed_loop.run(server.url, (texts * 3)[:900], in_flight=128)

    counts = classifier.counts(rows=900)
    assert counts.rows == 900 and counts.failures == 0
    assert counts.rows / counts.executions >= 40
    assert max(counts.batches) > 48
    # One tokenizer call per execute(), and far fewer executes than requests.
    assert tokenizer.calls() == tokenizer.counts().executions < 450


def test_like_lengths_are_one_forward_pass_per_execute(server: Server, watch) -> None:
    """256 requests of 21 to 24 tokens: passes equal executions exactly, and there are far fewer than requests."""
    texts = [sample.text for sample in short_samples() if 21 <= sample.tokens <= 24]
    classifier = watch("classifier")

    closed_loop.run(server.url, (texts * 256)[:256], in_flight=64)

    counts = classifier.counts(rows=256)
    assert counts.rows == 256
    assert classifier.calls() == counts.executions < 64


def test_one_long_text_takes_one_more_pass(raw, watch) -> None:
    """63 short texts and one of 512 tokens in one request: two forward passes, one execution, one tokenizer call."""
    classifier, tokenizer = watch("classifier"), watch("tokenizer")

    raw.infer("text_classifier", [texts_input(["short and sweet"] * 63 + ["word " * 600])])

    assert (classifier.counts(rows=64).executions, classifier.calls()) == (1, 2)
    assert (tokenizer.counts(rows=64).executions, tokenizer.calls()) == (1, 1)


def test_the_baseline_stacks_every_batch_into_one_pass(raw, watch) -> None:
    """32 requests of different lengths: ragged input lets them share batches, each of which is one forward pass."""
    baseline = watch("baseline")
    requests = []
    for length in range(3, 35):
        ids = np.full((1, length), 2000)
        requests.append(
            [
                tensor_input("input_ids", ids),
                tensor_input("attention_mask", np.ones_like(ids)),
                tensor_input("token_type_ids", np.zeros_like(ids)),
            ]
        )

    results = in_flight_together(raw, "baseline", requests)

    assert all(result.as_numpy("logits").shape == (1, 2) for result in results)
    counts = baseline.counts(rows=32)
    assert counts.rows == 32
    assert baseline.calls() == counts.executions < 16


def test_padding_sent_to_the_classifier_is_not_computed(raw) -> None:
    """A row padded to 512 by its sender gets the answer of the bare row."""
    row = [101, 2023, 2003, 2204, 102]
    answers = []
    for ids in (np.array([row]), padded([row, [1] * 512], 0)[:1]):
        inputs = [tensor_input("input_ids", ids), tensor_input("length_carrier", np.zeros(ids.shape, dtype=np.int32))]
        answers.append(raw.infer("classifier", inputs).as_numpy("logits"))

    assert (answers[0] == answers[1]).all()


def test_more_load_means_larger_batches(server: Server, watch) -> None:
    """From 8 to 64 requests in flight the classifier's mean batch grows."""
    texts = [sample.text for sample in short_samples()]
    means = []
    for in_flight in (8, 64):
        classifier = watch("classifier")
        closed_loop.run(server.url, texts[:192], in_flight)
        counts = classifier.counts(rows=192)
        means.append(counts.rows / counts.executions)

    assert means[0] < means[1]


def test_every_model_counts_the_requests_of_the_ensemble(raw, watch) -> None:
    """Three requests of two rows: three successes and six inferences, in the ensemble and in both steps."""
    watches = [watch(model) for model in ("text_classifier", "tokenizer", "classifier")]

    in_flight_together(raw, "text_classifier", [[texts_input(["one", "two"])] for _ in range(3)])

    counts = [entry.counts(rows=6) for entry in watches]
    assert [(entry.requests, entry.rows) for entry in counts] == [(3, 6)] * 3


def test_requests_cancelled_in_the_queue_are_not_computed(raw, watch) -> None:
    """Of 64 long requests, the 56 cancelled at once cost the classifier fewer rows than were sent."""
    classifier = watch("classifier")
    text = texts_input(["word " * 600])
    calls = [raw.async_infer("text_classifier", [text], callback=lambda result, error: None) for _ in range(64)]

    for call in calls[8:]:
        call.cancel()
    raw.infer("text_classifier", [texts_input(["the last one, so that all before it are done"])])

    assert 1 <= classifier.counts(rows=1).rows < 60
