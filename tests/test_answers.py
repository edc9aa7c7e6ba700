# SPDX-License-Identifier: Apache-2.0
"""Answers of the real server are those of the Hugging Face model, whatever they are batched with and however sent."""

from __future__ import annotations

from itertools import islice, pairwise

import numpy as np
import pytest
import torch
import tritonclient.grpc as grpc
from conftest import Reference
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from triton_requests import TOLERANCE, http_json, in_flight_together, tensor_input, texts_input

from ensemble import AsyncClient, Client
from ensemble.launcher.server import Server
from ensemble.samples import load_samples

ODD = [
    "",
    " ",
    "a\x00b",
    "café",
    "你好",
    "👍🏽",
    "مرحبا",
    "e" + "\u0301" * 300,
    "[PAD]",
    "[SEP] x [CLS]",
    "x" * 5000,
    "\u202eabc",
]


@pytest.fixture(scope="module")
def samples() -> list[str]:
    """Real texts, short to past 512 tokens."""
    return [sample.text for sample in load_samples()[:96]]


@pytest.fixture
def raw(server: Server):
    """A plain Triton client."""
    with grpc.InferenceServerClient(server.url) as client:
        yield client


def softmax(logits: np.ndarray) -> np.ndarray:
    exponent = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exponent / exponent.sum(axis=1, keepdims=True)


def test_each_text_alone(raw, samples, reference: Reference) -> None:
    """One text a request, one after the other."""
    texts = [*samples[:24], *ODD]

    results = [raw.infer("text_classifier", [texts_input([text])]) for text in texts]

    logits = np.concatenate([result.as_numpy("logits") for result in results])
    probabilities = np.concatenate([result.as_numpy("probabilities") for result in results])
    expected = reference(texts)
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE)
    np.testing.assert_allclose(probabilities, softmax(expected), atol=TOLERANCE)


def test_many_requests_in_flight_together(raw, samples, reference: Reference) -> None:
    """Requests that Triton batches, of every length, each get the answer of their own text."""
    texts = [*samples, *ODD]

    results = in_flight_together(raw, "text_classifier", [[texts_input([text])] for text in texts])

    logits = np.concatenate([result.as_numpy("logits") for result in results])
    np.testing.assert_allclose(logits, reference(texts), atol=TOLERANCE)


def test_requests_of_several_rows_are_cut_by_their_own_batch_dimension(raw, samples, reference: Reference) -> None:
    """Requests of 1, 8, 2, 31, 5, ... rows in flight together come back with their own rows, in order."""
    counts = [1, 8, 2, 31, 5, 1, 17, 3]
    ends = np.cumsum([0, *counts])
    requests = [samples[start:end] for start, end in pairwise(ends)]

    results = in_flight_together(raw, "text_classifier", [[texts_input(texts)] for texts in requests])

    for texts, result in zip(requests, results, strict=True):
        np.testing.assert_allclose(result.as_numpy("logits"), reference(texts), atol=TOLERANCE)


def test_a_full_batch_in_one_request(raw, samples, reference: Reference) -> None:
    """64 rows, the advertised limit."""
    result = raw.infer("text_classifier", [texts_input(samples[:64])])

    np.testing.assert_allclose(result.as_numpy("logits"), reference(samples[:64]), atol=TOLERANCE)


def test_a_batch_says_nothing_about_the_one_before(raw, samples, reference: Reference) -> None:
    """Batches of 8, 2 and 8 different rows in sequence: no buffer is carried over."""
    iterator = iter(samples)
    for texts in (list(islice(iterator, rows)) for rows in (8, 2, 8)):
        result = raw.infer("text_classifier", [texts_input(texts)])
        np.testing.assert_allclose(result.as_numpy("logits"), reference(texts), atol=TOLERANCE)


@pytest.mark.parametrize("neighbours", [1, 8, 63])
def test_a_text_does_not_feel_its_neighbours(raw, samples, neighbours: int) -> None:
    """The same text alone, among short ones and beside one of 512 tokens: the same logits to 1e-4."""
    text = "The plot is thin, yet I stayed to the end."
    long = "word " * 600
    alone = raw.infer("text_classifier", [texts_input([text])]).as_numpy("logits")

    among = raw.infer("text_classifier", [texts_input([text, *samples[: neighbours - 1], long])]).as_numpy("logits")

    np.testing.assert_allclose(among[0], alone[0], atol=TOLERANCE)


def test_num_tokens_and_truncated_tell_what_was_cut(raw) -> None:
    """Up to 512 tokens nothing is cut; past it the count goes on and the flag is set."""
    result = raw.infer("text_classifier", [texts_input(["hello " * count for count in (0, 1, 510, 511, 2000)])])

    assert result.as_numpy("num_tokens")[:, 0].tolist() == [2, 3, 512, 513, 2002]
    assert result.as_numpy("truncated")[:, 0].tolist() == [False, False, False, True, True]


def test_str_and_bytes_and_numpy_bytes_are_the_same_text(raw) -> None:
    """However a client spells the array, the model sees the text and not its repr."""
    arrays = [np.array([["café"]], dtype=object), np.array([["café".encode()]], dtype=object)]
    fixed_width = np.array([["café".encode()]])

    results = []
    for array in arrays:
        results.append(raw.infer("text_classifier", [tensor_input("text", array)]).as_numpy("logits"))
    numpy_bytes = grpc.InferInput("text", [1, 1], "BYTES")
    numpy_bytes.set_data_from_numpy(fixed_width)
    results.append(raw.infer("text_classifier", [numpy_bytes]).as_numpy("logits"))

    assert all((result == results[0]).all() for result in results)


def test_the_classification_extension_gives_labels(raw, samples, reference: Reference) -> None:
    """`probability:index:label`, best first, for each row of a batch by itself."""
    texts = samples[:3]
    wanted = [grpc.InferRequestedOutput("probabilities", class_count=2)]

    rows = raw.infer("text_classifier", [texts_input(texts)], outputs=wanted).as_numpy("probabilities")

    assert rows.shape == (3, 2)
    for row, expected in zip(rows, softmax(reference(texts)), strict=True):
        values, indices, labels = zip(*(entry.decode().split(":") for entry in row), strict=True)
        assert [int(index) for index in indices] == np.argsort(-expected).tolist()
        assert list(labels) == [("negative", "positive")[int(index)] for index in indices]
        np.testing.assert_allclose([float(value) for value in values], sorted(expected, reverse=True), atol=TOLERANCE)


def test_http_with_plain_json(server: Server, reference: Reference) -> None:
    """No client library, no binary data: the same logits as over gRPC."""
    texts = ["a good film", "ok 👍", "café"]

    status, answer = http_json(
        server, {"inputs": [{"name": "text", "shape": [3, 1], "datatype": "BYTES", "data": texts}]}
    )

    assert status == 200
    outputs = {output["name"]: output for output in answer["outputs"]}
    assert outputs["logits"]["shape"] == [3, 2]
    np.testing.assert_allclose(np.reshape(outputs["logits"]["data"], (3, 2)), reference(texts), atol=TOLERANCE)


@pytest.mark.parametrize("through", ["baseline", "text_classifier"])
def test_the_baseline_answers_the_same(
    through: str, raw, baseline_server: Server, samples, reference: Reference, default_model
) -> None:
    """The stacked TorchScript handler, called with ids of different lengths, and the ensemble chained into it."""
    texts = samples[:12]
    if through == "text_classifier":
        with grpc.InferenceServerClient(baseline_server.url) as client:
            results = in_flight_together(client, "text_classifier", [[texts_input([text])] for text in texts])
    else:
        tokenizer = AutoTokenizer.from_pretrained(default_model)
        results = in_flight_together(raw, "baseline", [ids_of(tokenizer, [text]) for text in texts])

    logits = np.concatenate([result.as_numpy("logits") for result in results])
    np.testing.assert_allclose(logits, reference(texts), atol=TOLERANCE)


def test_the_baseline_keeps_segments_and_masks_apart(raw, default_model) -> None:
    """Sentence pairs, two rows of different length: masks and segment ids reach the model by name."""
    pairs = AutoTokenizer.from_pretrained(default_model)(
        ["How was it?", "Well?"], ["I loved every minute of it.", "No."], padding=True, return_tensors="pt"
    )
    model = AutoModelForSequenceClassification.from_pretrained(default_model).eval()
    with torch.inference_mode():
        expected = model(**pairs).logits.numpy()

    result = raw.infer("baseline", [tensor_input(name, array.numpy()) for name, array in pairs.items()])

    assert pairs["token_type_ids"].any() and not pairs["attention_mask"].all()
    np.testing.assert_allclose(result.as_numpy("logits"), expected, atol=TOLERANCE)


def ids_of(tokenizer, texts: list[str]) -> list:
    encoded = tokenizer(texts, truncation=True, max_length=512, padding=True, return_tensors="np")
    return [tensor_input(name, array.astype(np.int64)) for name, array in encoded.items()]


# --- the project's own clients on the real server ---


def test_the_client_gives_labels_in_order(client: Client, samples, reference: Reference) -> None:
    """More texts than a batch holds: one result each, in order, with label, probability and tokens."""
    answers = client.classify(samples)

    expected = softmax(reference(samples))
    assert [answer.text for answer in answers] == samples
    assert [answer.index for answer in answers] == expected.argmax(axis=1).tolist()
    assert {answer.label for answer in answers} == {"negative", "positive"}
    np.testing.assert_allclose([answer.probability for answer in answers], expected.max(axis=1), atol=TOLERANCE)


async def test_the_asyncio_client_gives_the_same(client: Client, server: Server, samples) -> None:
    """Both clients answer alike."""
    async with AsyncClient(server.url) as other:
        answers = await other.classify(samples[:20])

    assert [(answer.label, answer.num_tokens) for answer in answers] == [
        (answer.label, answer.num_tokens) for answer in client.classify(samples[:20])
    ]


def test_clients_see_no_difference_between_classifier_and_baseline(
    client: Client, baseline_server: Server, samples
) -> None:
    """Label, tokens and truncation are equal, probabilities to 1e-4."""
    with Client(baseline_server.url) as other:
        theirs = other.classify(samples[:16])

    for ours, other_answer in zip(client.classify(samples[:16]), theirs, strict=True):
        assert (ours.label, ours.num_tokens, ours.truncated) == (
            other_answer.label,
            other_answer.num_tokens,
            other_answer.truncated,
        )
        assert ours.probability == pytest.approx(other_answer.probability, abs=TOLERANCE)
