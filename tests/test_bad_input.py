# SPDX-License-Identifier: Apache-2.0
"""Bad input at the real server: a clear INVALID_ARGUMENT for the request at fault, alone or among others."""

from __future__ import annotations

from collections.abc import Iterator

import grpc as plain_grpc
import numpy as np
import pytest
import tritonclient.grpc as grpc
from conftest import Reference
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_requests import TOLERANCE, element, http_json, in_flight_together, raw_request, tensor_input, texts_input
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from ensemble import Client, InvalidRequest
from ensemble.launcher.server import Server
from perf.endurance.server_processes import sample

GOOD = "a fine day"


@pytest.fixture
def raw(server: Server, reference: Reference) -> Iterator[grpc.InferenceServerClient]:
    """A plain client; whatever the test sent, the server must answer rightly afterwards."""
    with grpc.InferenceServerClient(server.url) as client:
        yield client
        logits = client.infer("text_classifier", [texts_input([GOOD])]).as_numpy("logits")
        np.testing.assert_allclose(logits, reference([GOOD]), atol=TOLERANCE)


BAD_TEXTS = {
    "not UTF-8": ([b"\xff\xfe"], "text: row 0 is not valid UTF-8"),
    "latin-1": ([b"good", b"caf\xe9"], "text: row 1 is not valid UTF-8"),
    "an encoded surrogate": ([b"\xed\xa0\x80"], "text: row 0 is not valid UTF-8"),
    "more than a request may have": (
        [b"word " * 1000] * 64,
        "text: 64 rows have 320000 bytes together, more than the 262144",
    ),
    "many megabytes": ([b"word " * 1_000_000], "text: row 0 has 5000000 bytes, more than the 32768"),
}


@pytest.mark.parametrize("name", BAD_TEXTS)
def test_a_bad_text_is_refused_alone(raw, name: str) -> None:
    """INVALID_ARGUMENT with the row and the reason."""
    texts, message = BAD_TEXTS[name]

    with pytest.raises(grpc.InferenceServerException) as caught:
        raw.infer("text_classifier", [texts_input(texts)])

    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert message in caught.value.message()


def test_bad_texts_among_others_fail_alone(raw, reference: Reference) -> None:
    """Every good neighbour of a batch full of bad requests gets its answer."""
    requests = [[texts_input([GOOD])] if index % 3 else [texts_input([b"\xff"])] for index in range(48)]

    results = in_flight_together(raw, "text_classifier", requests)

    for index, result in enumerate(results):
        if index % 3:
            np.testing.assert_allclose(result.as_numpy("logits"), reference([GOOD]), atol=TOLERANCE)
        else:
            assert result.status() == "StatusCode.INVALID_ARGUMENT"


def test_a_refused_text_is_forgotten(raw, server: Server) -> None:
    """Large texts, one after the other: their memory is free again at once, not when Python's collector comes by."""
    text = b"a " * 2_000_000

    def held() -> int:
        return sample(server).processes["tokenizer"].own

    before = held()
    for _ in range(10):
        with pytest.raises(InferenceServerException, match="more than the 32768"):
            raw.infer("text_classifier", [texts_input([text])])

    grown = held() - before
    assert grown < 4 * len(text)


@pytest.mark.parametrize(
    "text",
    ["", " ", "\n\t", "\x00", "\x00\x01\x02\x1b[31m", "\u200d\u200d", "e" + "\u0301" * 10_000, "שלום \u202e abc", "🙂" * 700,
     "x" * 32_768],
)  # fmt: skip
def test_odd_but_sound_texts_are_answered(raw, reference: Reference, text: str) -> None:
    """Empty, blank, NUL, control, combining, right-to-left, emoji, 32 kB: the Hugging Face model's answer."""
    logits = raw.infer("text_classifier", [texts_input([text])]).as_numpy("logits")

    np.testing.assert_allclose(logits, reference([text]), atol=TOLERANCE)


@given(st.lists(st.binary(max_size=64), min_size=1, max_size=8))
@settings(max_examples=150, deadline=None)
def test_any_bytes_are_answered_or_refused(server: Server, texts: list[bytes]) -> None:
    """Random bytes: an answer of the right shape if they are UTF-8, INVALID_ARGUMENT if not."""
    with grpc.InferenceServerClient(server.url) as client:
        try:
            for text in texts:
                text.decode()
        except UnicodeDecodeError:
            with pytest.raises(grpc.InferenceServerException, match="is not valid UTF-8"):
                client.infer("text_classifier", [texts_input(texts)])
        else:
            result = client.infer("text_classifier", [texts_input(texts)])
            assert result.as_numpy("logits").shape == (len(texts), 2)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([[GOOD] * 3] * 2, dtype=object), "text"),
        (np.array([GOOD], dtype=object), "text"),
        (np.full((65, 1), GOOD, dtype=object), "batch-size must be <= 64"),
        (np.zeros((0, 1), dtype=object), ""),
        (np.array([[1]], dtype=np.int32), "expects 'BYTES'"),
    ],
    ids=["three texts a row", "no batch dimension", "65 rows", "0 rows", "INT32"],
)
def test_a_wrong_shape_or_type_is_refused(raw, array: np.ndarray, message: str) -> None:
    """INVALID_ARGUMENT from the server or from the tokenizer, never a dropped or an extra row."""
    with pytest.raises(grpc.InferenceServerException) as caught:
        raw.infer("text_classifier", [tensor_input("text", array)])

    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert message in caught.value.message()


@pytest.mark.parametrize(
    "request_message",
    [
        raw_request([1, 1], b"abc"),
        raw_request([1, 1], element(b"abc", length=2**31)),
        raw_request([1, 1], element(b"abc", length=200)),
        raw_request([1, 1], element(b"abc") + b"trailing"),
        raw_request([2, 1], element(b"abc")),
        raw_request([-1, 1], element(b"abc")),
        raw_request([2**31, 1], element(b"abc")),
        raw_request([1, 1], b""),
        raw_request([1, 1], element(b"abc"), name="texts"),
        raw_request([1, 1], element(b"abc"), datatype="INT32"),
        raw_request([1, 1], element(b"abc"), datatype="STRANGE"),
        service_pb2.ModelInferRequest(model_name="text_classifier"),
    ],
    ids=["no length prefix", "huge length", "length past the end", "trailing bytes", "fewer elements than rows",
         "negative rows", "2^31 rows", "no bytes", "misnamed input", "wrong datatype", "unknown datatype", "no input"],
)  # fmt: skip
def test_a_malformed_tensor_is_refused(raw, server: Server, request_message: object) -> None:
    """Lengths that lie, counts that do not match, names and types that do not exist: INVALID_ARGUMENT, server up."""
    with plain_grpc.insecure_channel(server.url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        with pytest.raises(plain_grpc.RpcError) as caught:
            stub.ModelInfer(request_message, timeout=30)

    assert caught.value.code() == plain_grpc.StatusCode.INVALID_ARGUMENT


def test_a_row_count_of_zero_with_a_text_is_one_row(raw, server: Server, reference: Reference) -> None:
    """The server takes [0, 1] and [2^32, 1] for one row without a batch dimension: it is answered rightly as such."""
    with plain_grpc.insecure_channel(server.url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for rows in (0, 2**32):
            answer = stub.ModelInfer(raw_request([rows, 1], element(GOOD.encode())), timeout=30)

            logits = grpc.InferResult(answer).as_numpy("logits")
            np.testing.assert_allclose(logits, reference([GOOD])[0], atol=TOLERANCE)


# This release's HTTP frontend answers 500 to JSON it cannot parse, before any model is asked.
@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 500),
        (b"null", 500),
        (b'{"inputs": null}', 500),
        (b'{"inputs": [{"name": "text", "shape": [1, 1], "datatype": "BYTES", "data": ["\\ud800"]}]}', 500),
        (b'{"inputs": [{"name": "text", "shape": [-1, 1], "datatype": "BYTES", "data": ["a"]}]}', 500),
        (b'{"inputs": [{"name": "text", "shape": [1, 1], "datatype": "BYTES", "data": [1]}]}', 500),
        (b'{"inputs": [{"name": "text", "shape": [2, 1], "datatype": "BYTES", "data": ["a"]}]}', 400),
        (b'{"inputs": [{"name": "texts", "shape": [1, 1], "datatype": "BYTES", "data": ["a"]}]}', 400),
    ],
    ids=["truncated", "null", "null inputs", "lone surrogate", "negative rows", "a number", "too few", "misnamed"],
)
def test_malformed_json_is_refused(raw, server: Server, body: bytes, status: int) -> None:
    """An error with a reason, and the server stays up."""
    answered, answer = http_json(server, body)

    assert answered == status
    assert answer["error"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": np.array([[101, 40_000, 102]])}, "input_ids: values run from 101 to 40000, the model knows 0 to 30521"),
        ({"input_ids": np.array([[-1, 5, 102]])}, "input_ids: values run from -1"),
        ({name: np.ones((1, 513), dtype=np.int64) for name in ("input_ids", "attention_mask", "token_type_ids")},
         "row 0 has 513 tokens, the model takes 512: truncate it"),
        ({"attention_mask": np.array([[0, 0, 0]])}, "attention_mask: row 0 is empty"),
        ({"attention_mask": np.array([[1, 7, 1]])}, "attention_mask: values run from 1 to 7"),
        ({"token_type_ids": np.array([[0, 2, 0]])}, "token_type_ids: values run from 0 to 2, the model knows 0 to 1"),
        ({"attention_mask": np.array([[1, 1]])}, "differ in shape: send all three alike"),
    ],
)  # fmt: skip
def test_the_baseline_refuses_what_the_model_cannot_take(raw, change: dict[str, np.ndarray], message: str) -> None:
    """Ids that index nothing, rows past the positions, masks that mask all: refused, and the neighbour is answered."""
    good = {"input_ids": [[101, 2204, 102]], "attention_mask": [[1, 1, 1]], "token_type_ids": [[0, 0, 0]]}
    sound = {name: np.array(array) for name, array in good.items()}
    requests = [
        [tensor_input(name, array) for name, array in arrays.items()] for arrays in (sound, {**sound, **change})
    ]

    answered, refused = in_flight_together(raw, "baseline", requests)

    assert answered.as_numpy("logits").shape == (1, 2)
    assert refused.status() == "StatusCode.INVALID_ARGUMENT" and message in refused.message()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[0, 0, 0]], "input_ids: row 0 is empty"),
        ([[]], "input_ids: row 0 is empty"),
        ([[101] * 513], "row 0 has 513 tokens, the model takes 512"),
        ([[101, 99_999, 102]], "the model knows 0 to 30521"),
    ],
)
def test_the_classifier_refuses_what_the_model_cannot_take(raw, ids: list[list[int]], message: str) -> None:
    """The packed handler checks its rows too, for those who call it without our tokenizer."""
    array = np.array(ids, dtype=np.int64)
    inputs = [tensor_input("input_ids", array), tensor_input("length_carrier", np.zeros(array.shape, dtype=np.int32))]

    with pytest.raises(grpc.InferenceServerException, match=message):
        raw.infer("classifier", inputs)


def test_the_client_tells_which_text_is_at_fault(raw, client: Client) -> None:
    """A list with two bad texts: each gets its own error, the others their answers."""
    answers = client.classify_each([GOOD, b"\xff", GOOD, "x" * 200_000, GOOD])

    assert [isinstance(answer, InvalidRequest) for answer in answers] == [False, True, False, True, False]
    assert "UTF-8" in str(answers[1]) and "32768" in str(answers[3])
