# SPDX-License-Identifier: Apache-2.0
"""Whatever our own parsers are given, they answer or refuse it with an error of ours that says why. Property-based."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, copy_of_repository
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import InferResult, service_pb2

from ensemble.artifacts import CURRENT, FOLDER, MANIFEST, Manifest
from ensemble.client.wire import Classification, decode
from ensemble.contract import Contract, read_config
from ensemble.errors import ConfigError, RequestFailed
from ensemble.handlers.scores import Scores

CONFIGS = sorted(path.relative_to(ROOT / "model_repository") for path in (ROOT / "model_repository").rglob("*.pbtxt"))
# `value:index:label` and what is nearly that.
STRINGS = [b"0.5:1:yes", b"0.5:-1:no", b"0.5:9:no", b"x:0:no", b"0.5:x:no", b"0.5:0", b"0.5", b":", b"nan:0:a:b"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def refusal(kind: type[Exception], call: Callable[[], object]) -> str | None:
    """The message if it is refused with this error, None if it is not; any other error fails the test."""
    try:
        call()
    except kind as error:
        return str(error)
    return None


@pytest.fixture(scope="module")
def edited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository whose configs a test may change."""
    return copy_of_repository(tmp_path_factory.mktemp("edited") / "model_repository")


@given(st.data())
@QUICK
def test_a_config_with_any_edit_is_read_or_refused(edited: Path, data: st.DataObject) -> None:
    """A word, a number or a line gone, doubled or replaced: a contract, or a ConfigError."""
    relative = data.draw(st.sampled_from(CONFIGS))
    text = (ROOT / "model_repository" / relative).read_text(encoding="utf-8")
    start, end = sorted(data.draw(st.integers(0, len(text))) for _ in range(2))
    end = min(end, start + data.draw(st.sampled_from([1, 5, 40, 2000])))
    put = data.draw(
        st.sampled_from(["", "-1", "0", "99999999999999999999", '""', "{", "}", "input [ ]", "²", "\x00", "../"])
        | st.text(max_size=5)
    )
    (edited / relative).write_bytes((text[:start] + put + text[end:]).encode("utf-8", "replace"))
    name = relative.stem if relative.parent.name == "configs" else None

    def read() -> None:
        contract = Contract.read(edited, name)
        assert contract.max_batch_size >= 1 and contract.max_sequence_length >= 3
        if "classifier" in contract.models:
            assert all("model_warmup" in problem for problem in contract.warm_up_problems(512))

    try:
        assert refusal(ConfigError, read) != ""
    finally:
        shutil.copy(ROOT / "model_repository" / relative, edited / relative)


@given(st.binary(max_size=60))
@QUICK
def test_a_config_of_any_bytes_is_read_or_refused(tmp_path: Path, content: bytes) -> None:
    """Not UTF-8, not text format: a ConfigError that names the file."""
    file = tmp_path / "config.pbtxt"
    file.write_bytes(content)

    assert "config.pbtxt" in (refusal(ConfigError, lambda: read_config(file)) or "config.pbtxt")


@given(st.data())
@QUICK
def test_a_manifest_with_any_value_is_read_or_refused(repository: Path, tmp_path: Path, data: st.DataObject) -> None:
    """Any JSON in the place of any value, any value gone, any bytes: a Manifest, or a ConfigError that names the file."""
    values: Any = asdict(Manifest.read(repository / FOLDER / CURRENT))
    change = data.draw(st.sampled_from(["replace", "remove", "add", "whole", "bytes"]))
    key = data.draw(st.sampled_from(sorted(values)))
    if change == "replace":
        values[key] = data.draw(JSON)
    elif change == "remove":
        del values[key]
    elif change == "add":
        values[data.draw(st.text(max_size=5))] = data.draw(JSON)
    elif change == "whole":
        values = data.draw(JSON)
    content = json.dumps(values).encode()
    if change == "bytes":
        place = data.draw(st.integers(0, len(content)))
        content = content[:place] + data.draw(st.binary(max_size=3)) + content[place + 3 :]
    (tmp_path / MANIFEST).write_bytes(content)

    message = refusal(ConfigError, lambda: Manifest.read(tmp_path))

    assert message is None or (MANIFEST in message and "run make export" in message)


def answer_of(rows: int) -> service_pb2.ModelInferResponse:
    """What the ensemble answers to so many texts."""
    response = service_pb2.ModelInferResponse(model_name="text_classifier")
    strings = b"".join(len(s).to_bytes(4, "little") + s for s in [b"0.750000:1:yes", b"0.250000:0:no"] * rows)
    for name, kind, width, raw in (
        ("probabilities", "BYTES", 2, strings),
        ("logits", "FP32", 2, np.array([[0.0, 1.0]] * rows, dtype=np.float32).tobytes()),
        ("num_tokens", "INT32", 1, np.full(rows, 5, dtype=np.int32).tobytes()),
        ("truncated", "BOOL", 1, bytes(rows)),
    ):
        response.outputs.add(name=name, datatype=kind).shape.extend([rows, width])
        response.raw_output_contents.append(raw)
    return response


def test_the_answer_that_is_changed_below_decodes() -> None:
    """Or the next test would prove nothing."""
    (first, second) = decode(InferResult(answer_of(2)), [b"a", b"b"], 0.1, "m")

    assert (first.text, first.label, first.probability, second.scores) == ("a", "yes", 0.75, {"no": 0.25, "yes": 0.75})


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_any_answer_is_decoded_or_refused(data: st.DataObject) -> None:
    """Other types, shapes, bytes and names than ours: a list of Classifications, or RequestFailed."""
    rows = data.draw(st.integers(1, 3))
    response = answer_of(rows)
    for _ in range(data.draw(st.integers(1, 2))):
        index = data.draw(st.integers(0, 3))
        change = data.draw(st.sampled_from(["type", "numbers", "strings", "shape", "bytes", "name", "part"]))
        if change == "type":
            kinds = ["FP32", "FP64", "INT32", "INT64", "BOOL", "BYTES", "FP16", "BF16", "STRANGE", ""]
            response.outputs[index].datatype = data.draw(st.sampled_from(kinds))
        elif change == "numbers":
            kind, array = data.draw(st.sampled_from([("FP32", np.float32), ("INT64", np.int64), ("BOOL", np.bool_)]))
            response.outputs[index].datatype = kind
            size = int(np.prod(list(response.outputs[index].shape)))
            response.raw_output_contents[index] = np.zeros(abs(size), dtype=array).tobytes()
        elif change == "strings":
            texts = data.draw(st.lists(st.binary(max_size=6) | st.sampled_from(STRINGS), max_size=6))
            response.outputs[index].datatype = "BYTES"
            response.raw_output_contents[index] = b"".join(len(s).to_bytes(4, "little") + s for s in texts)
            del response.outputs[index].shape[:]
            response.outputs[index].shape.extend([rows, len(texts) // rows])
        elif change == "shape":
            del response.outputs[index].shape[:]
            response.outputs[index].shape.extend(data.draw(st.lists(st.integers(-2, 5), max_size=3)))
        elif change == "bytes":
            response.raw_output_contents[index] = data.draw(st.binary(max_size=40))
        elif change == "name":
            response.outputs[index].name = data.draw(st.sampled_from(["logits", "other", ""]))
        else:
            raw = bytearray(response.raw_output_contents[index] or b"\0")
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
            response.raw_output_contents[index] = bytes(raw)

    def decoded() -> None:
        answers = decode(InferResult(response), [b"text"] * rows, 0.1, "m")
        assert len(answers) == rows and all(isinstance(answer, Classification) for answer in answers)

    message = refusal(RequestFailed, decoded)
    assert message is None or "is not a text classifier's" in message


@given(st.lists(st.integers(0, 5), max_size=8), st.integers(-1, 1))
def test_scores_are_cut_at_the_rows_of_each_request(counts: list[int], over: int) -> None:
    """The pieces, end to end, are the whole; a count that does not fit is an error, not a shifted answer."""
    rows = max(0, sum(counts) + over)
    scores = Scores(*np.arange(4 * rows, dtype=np.float32).reshape(2, rows, 2))

    if rows != sum(counts):
        with pytest.raises(ValueError, match="came back"):
            scores.cut(counts)
        return
    pieces = scores.cut(counts)

    assert [len(piece.logits) for piece in pieces] == counts == [len(piece.probabilities) for piece in pieces]
    if pieces:
        np.testing.assert_array_equal(np.concatenate([piece.logits for piece in pieces]), scores.logits)
        np.testing.assert_array_equal(np.concatenate([piece.probabilities for piece in pieces]), scores.probabilities)
