# SPDX-License-Identifier: Apache-2.0
"""The inputs that Triton's TensorRT backend would form, fed to the exported graph: the answers of the Python handler.

What runs is committed: the config, the tokenizer's and the classifier's handlers, on a stand-in for Triton's utilities,
and the graph that export wrote. Only the backend itself is modelled, by export/backend_inputs.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import onnxruntime
import pytest
from conftest import ROOT
from google.protobuf import json_format, text_format
from hypothesis import given
from hypothesis import strategies as st
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument, RuntimeException
from tritonclient.grpc import model_config_pb2

from ensemble.contract import read_config
from ensemble.errors import ExportError
from ensemble.handlers.tokenization import TokenizedText
from ensemble.samples import load_samples, long_samples
from export.backend_inputs import UNWRITTEN, engine_inputs, input_bounds
from export.parity import compare

CONFIG = ROOT / "model_repository/classifier/config.pbtxt"
LENGTHS = [1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 24, 31, 32, 40]

Request = dict[str, np.ndarray]


@dataclass
class Handlers:
    """The committed handlers of one repository, loaded and initialised."""

    tokenizer: Any
    classifier: Any

    def tokenized(self, texts: list[str]) -> list[TokenizedText]:
        return self.tokenizer.compute([texts])[0]

    def request(self, rows: Sequence[TokenizedText]) -> Request:
        """What the classifier gets for a request of these rows: padded, and with its carrier, as the tokenizer writes."""
        return dict(self.tokenizer.write(list(rows), frozenset({"input_ids", "length_carrier"})))

    def shapes(self, rows: int, length: int) -> Request:
        """A request that only its shapes matter of."""
        return self.request([TokenizedText([101] * length, length)] * rows)


@pytest.fixture(scope="module")
def handlers(repository: Path) -> Iterator[Handlers]:
    stand_in = ModuleType("triton_python_backend_utils")
    stand_in.TritonModelException = type("TritonModelException", (Exception,), {})
    stand_in.Tensor = lambda name, array: (name, array)
    stand_in.get_input_tensor_by_name = lambda request, name: SimpleNamespace(as_numpy=lambda: request[name])
    stand_in.MetricFamily, stand_in.Logger = MagicMock(), MagicMock()

    def load(model: str, config: str) -> Any:
        spec = importlib.util.spec_from_file_location(f"{model}_handler", repository / model / "1/model.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        message = read_config(repository / model / config)
        handler = module.TritonPythonModel()
        handler.initialize(
            {
                "model_config": json.dumps(json_format.MessageToDict(message, preserving_proto_field_name=True)),
                "model_name": model,
                "model_repository": str(repository / model),
                "model_version": "1",
            }
        )
        return handler

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, stand_in.__name__, stand_in)
        modules = ("ensemble.handlers.execution", "ensemble.handlers.gated_execution")
        for name in modules:
            patch.delitem(sys.modules, name, raising=False)
        handlers = Handlers(load("tokenizer", "config.pbtxt"), load("classifier", "configs/cpu.pbtxt"))
        yield handlers
        handlers.tokenizer.finalize()
        for name in modules:
            del sys.modules[name]


@pytest.fixture(scope="module")
def session(repository: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4  # what fails here is meant to
    return onnxruntime.InferenceSession(
        str(repository / "classifier/1/model.onnx"), options, providers=["CPUExecutionProvider"]
    )


@pytest.fixture(scope="module")
def rows(handlers: Handlers) -> dict[int, list[TokenizedText]]:
    """Rows by length, real texts cut to it with their [SEP]; every fifth spells out [PAD] in its middle."""
    texts = [sample.text for sample in load_samples() if sample.tokens >= 40][:12]
    texts = [text if index % 5 else text.replace(" ", " [PAD] ", 2) for index, text in enumerate(texts)]
    whole = [text.ids for text in handlers.tokenized(texts)]
    result = {length: [cut(ids, length) for ids in whole] for length in LENGTHS}
    (long,) = handlers.tokenized([long_samples()[0].text])
    return result | {length: [cut(long.ids, length)] for length in (100, 257, 511, 512)}


def cut(ids: list[int], length: int) -> TokenizedText:
    return TokenizedText([*ids[: length - 1], ids[-1]] if length > 1 else ids[:1], len(ids))


@pytest.fixture(scope="module")
def mixes(handlers: Handlers, rows: dict[int, list[TokenizedText]]) -> list[list[Request]]:
    """Batches as lists of requests: mostly small ones, and the corners."""
    chance = random.Random(20241)

    def some(count: int, lengths: Sequence[int]) -> list[TokenizedText]:
        return [chance.choice(rows[chance.choice(lengths)]) for _ in range(count)]

    def mix(requests: int, most_rows: int, lengths: Sequence[int]) -> list[Request]:
        return [handlers.request(some(chance.randint(1, most_rows), lengths)) for _ in range(requests)]

    small = [mix(chance.randint(1, 4), chance.choice([1, 2, 4]), LENGTHS[: chance.randint(3, 14)]) for _ in range(280)]
    medium = [mix(chance.randint(6, 12), 3, LENGTHS) for _ in range(16)]
    corners = [
        [handlers.request(rows[1][:1])],
        [handlers.request(rows[512])],
        [handlers.request(some(1, [length])) for length in (2, 512, 1, 24)],
        [handlers.request(rows[512] + some(2, [3, 17])), handlers.request(some(1, [8]))],
        [handlers.request(rows[511] + rows[257] + rows[100])],
        [handlers.request(some(1, LENGTHS)) for _ in range(64)],
        [handlers.request(some(64, LENGTHS))],
        [handlers.request(some(63, LENGTHS)), handlers.request(some(1, LENGTHS))],
        [*mix(10, 6, LENGTHS[:8]), handlers.request(rows[100])],
    ]
    return [*small, *medium, *corners]


@pytest.fixture(scope="module")
def answers(handlers: Handlers, mixes: list[list[Request]]) -> dict[bytes, tuple[np.ndarray, np.ndarray]]:
    """What the classifier's handler computes for each distinct row of all mixes: logits, probabilities."""
    distinct = {row.tobytes(): row for mix in mixes for request in mix for row in handlers.classifier.read(request)}
    bare = list(distinct.values())
    scores = handlers.classifier.compute([bare[start : start + 64] for start in range(0, len(bare), 64)])
    logits, probabilities = (np.concatenate([getattr(s, n) for s in scores]) for n in ("logits", "probabilities"))
    return dict(zip(distinct, zip(logits, probabilities, strict=True), strict=True))


@pytest.fixture
def expected(handlers: Handlers, answers):
    """The handler's logits and probabilities of a batch, [rows, labels] each, as it reads the requests."""

    def scores(mix: list[Request]) -> tuple[np.ndarray, np.ndarray]:
        found = [answers[row.tobytes()] for request in mix for row in handlers.classifier.read(request)]
        return np.stack([logits for logits, _ in found]), np.stack([probabilities for _, probabilities in found])

    return scores


def run(session: onnxruntime.InferenceSession, inputs: Request) -> tuple[np.ndarray, np.ndarray]:
    """Logits and probabilities of the graph. It may have no use for the carrier: onnxruntime takes no unknown input."""
    taken = [entry.name for entry in session.get_inputs()]
    return tuple(session.run(["logits", "probabilities"], {name: inputs[name] for name in taken}))


def outside(inputs: Request, bounds: dict[str, list[tuple[int, int]]]) -> list[tuple[str, tuple[int, ...]]]:
    """The inputs whose shape the bounds do not allow."""
    assert inputs.keys() == bounds.keys()
    return [
        (name, array.shape)
        for name, array in inputs.items()
        if array.ndim != len(bounds[name])
        or not all(low <= size <= high for size, (low, high) in zip(array.shape, bounds[name], strict=True))
    ]


Edits = dict[str, dict[str, Any]]

LENGTHS_BY_REQUEST: Edits = {"row_lengths": {"kind": "BATCH_ELEMENT_COUNT"}}
LENGTHS_OF_CARRIER: Edits = {"row_lengths": {"source_input": ["length_carrier"]}}
LONGEST_OF_IDS: Edits = {"longest_row": {"source_input": ["input_ids"]}}


def changed(edits: Edits) -> Any:
    """The committed config with these fields of these batch inputs set otherwise."""
    config = read_config(CONFIG)
    for entry in config.batch_input:
        edit = edits.get(entry.target_name[0], {})
        for field in edit:
            entry.ClearField(field)
        json_format.ParseDict(edit, entry)
    return config


def test_the_mixes_hold_every_corner(handlers: Handlers, mixes: list[list[Request]]) -> None:
    """Over 300 batches: requests of 1 to 64 rows, rows of 1 and of 512 ids, padding behind rows, [PAD] within them."""
    ids = [request["input_ids"] for mix in mixes for request in mix]
    read = [row for request in ids for row in handlers.classifier.read({"input_ids": request})]

    assert len(mixes) == 305
    assert {1, 2, 3, 4, 63, 64} <= {len(request) for request in ids}
    assert {1, 2, 3, 512} <= {len(row) for row in read}
    assert {1, 64} <= {sum(len(request["input_ids"]) for request in mix) for mix in mixes}
    assert any((request[:, -1] == 0).any() for request in ids)
    assert any((row == 0).any() for row in read)


def test_the_graph_answers_as_the_handler_does(session, mixes: list[list[Request]], expected) -> None:
    """For every batch, on the inputs that the backend would form; and none of them is outside the bounds."""
    config = read_config(CONFIG)
    bounds = input_bounds(config, 512)
    wanted, got = [], []
    for mix in mixes:
        inputs = engine_inputs(config, mix)
        assert outside(inputs, bounds) == []
        wanted.append(expected(mix))
        got.append(run(session, inputs))
        assert got[-1][0].shape == wanted[-1][0].shape

    for index, what in enumerate(("logits", "probabilities")):
        reference, candidate = (np.concatenate([part[index] for part in parts]) for parts in (wanted, got))
        verdict = compare(f"{what} of {len(mixes)} batches", reference, candidate, multi_label=False)
        print(verdict)
        assert verdict, verdict


@pytest.mark.parametrize(
    "edits",
    [LENGTHS_BY_REQUEST, LENGTHS_OF_CARRIER, LENGTHS_OF_CARRIER | LONGEST_OF_IDS],
    ids=["lengths by request", "lengths of the carrier", "sources swapped"],
)
def test_a_wrong_config_does_not_give_those_answers(session, mixes, expected, edits: Edits) -> None:
    """Wherever a request has several rows; where none has, nothing shows it, and so it gets into production."""
    config, right = changed(edits), {True: [], False: []}
    for mix in [mix for mix in mixes[:120] if max(request["input_ids"].shape[1] for request in mix) > 2][:60]:
        logits, _ = expected(mix)
        try:
            answer, _ = run(session, engine_inputs(config, mix))
            same = answer.shape == logits.shape and bool(compare("", logits, answer, multi_label=False))
        except (InvalidArgument, RuntimeException):
            same = False
        right[any(len(request["input_ids"]) > 1 for request in mix)].append(same)

    assert len(right[True]) > 20 and not any(right[True])
    assert len(right[False]) > 5 and all(right[False])


def test_the_longest_row_comes_from_the_carrier(handlers: Handlers, rows: dict[int, list[TokenizedText]]) -> None:
    """b rows of L ids count at most L + b - 1; with the ids as the source they would count b * L."""
    mix = [handlers.request(rows[40][:10]), handlers.request(rows[5][:1])]

    assert engine_inputs(read_config(CONFIG), mix)["longest_row"].shape == (40,)
    assert engine_inputs(changed(LONGEST_OF_IDS), mix)["longest_row"].shape == (400,)
    assert engine_inputs(read_config(CONFIG), [handlers.shapes(63, 512)])["longest_row"].shape == (567,)


def test_element_counts_are_one_a_request(handlers: Handlers) -> None:
    """Three rows of 5 and one of 2: two counts, 15 and 2, where there are four rows."""
    mix = [handlers.shapes(3, 5), handlers.shapes(1, 2)]

    assert engine_inputs(changed(LENGTHS_BY_REQUEST), mix)["row_lengths"].tolist() == [15, 2]
    assert engine_inputs(read_config(CONFIG), mix)["row_lengths"].tolist() == [5, 5, 5, 2]


def test_ragged_inputs_lie_end_to_end_in_the_order_of_the_batch() -> None:
    """Row by row, the padding within a request included; types as the config has them."""
    first = {"input_ids": np.array([[1, 2], [3, 0]]), "length_carrier": np.zeros((2, 1), dtype=np.int32)}
    second = {"input_ids": np.array([[4]]), "length_carrier": np.ones((1, 1), dtype=np.int32)}

    inputs = engine_inputs(read_config(CONFIG), [first, second])

    assert inputs["input_ids"].tolist() == [1, 2, 3, 0, 4]
    assert inputs["length_carrier"].tolist() == [0, 0, 1]
    assert inputs["row_lengths"].tolist() == [2, 2, 1]
    assert {name: str(array.dtype) for name, array in inputs.items()} == {
        "input_ids": "int64", "length_carrier": "int32", "row_lengths": "int32", "longest_row": "int32",
    }  # fmt: skip


@pytest.mark.parametrize("data_type", ["TYPE_INT32", "TYPE_FP32"])
def test_a_graph_that_reads_the_longest_row_would_be_found(handlers: Handlers, data_type: str) -> None:
    """Nothing is written there, so it holds neither zeros nor lengths."""
    config = changed({"longest_row": {"data_type": data_type}})

    longest = engine_inputs(config, [handlers.shapes(1, 3)])["longest_row"]

    assert longest.dtype == UNWRITTEN[data_type].dtype
    assert not (np.abs(longest) < 1e9).any()


@pytest.mark.parametrize(
    "kind", ["BATCH_ACCUMULATED_ELEMENT_COUNT", "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", "BATCH_ITEM_SHAPE"]
)
def test_a_kind_that_is_not_modelled_is_refused(handlers: Handlers, kind: str) -> None:
    """By name, and by both functions."""
    config = changed({"row_lengths": {"kind": kind}})

    with pytest.raises(ExportError, match=f"batch_input of kind {kind} is not modelled"):
        engine_inputs(config, [handlers.shapes(1, 3)])
    with pytest.raises(ExportError, match=f"batch_input of kind {kind} is not modelled"):
        input_bounds(config, 512)


def test_a_type_that_triton_cannot_make_is_refused(handlers: Handlers) -> None:
    """INT64 row lengths, which would suit the graph."""
    config = changed({"row_lengths": {"data_type": "TYPE_INT64"}})

    with pytest.raises(ExportError, match=r"batch_input \['row_lengths'\] is TYPE_INT64: set TYPE_INT32 or TYPE_FP32"):
        engine_inputs(config, [handlers.shapes(1, 3)])


PADDED = text_format.Parse(
    """
    max_batch_size: 64
    input { name: "ids" data_type: TYPE_INT64 dims: -1 }
    input { name: "flag" data_type: TYPE_INT32 dims: 1 }
    """,
    model_config_pb2.ModelConfig(),
)


def padded_request(rows: int, length: int, value: int) -> Request:
    return {"ids": np.full((rows, length), value), "flag": np.full((rows, 1), value, dtype=np.int32)}


def test_inputs_that_are_not_ragged_are_stacked() -> None:
    """Two requests of two and one rows are three rows."""
    inputs = engine_inputs(PADDED, [padded_request(2, 3, 7), padded_request(1, 3, 8)])

    assert inputs["ids"].tolist() == [[7, 7, 7], [7, 7, 7], [8, 8, 8]]
    assert inputs["flag"].tolist() == [[7], [7], [8]]


def test_rows_of_two_lengths_share_no_batch_unless_ragged() -> None:
    """The batcher would have ended the batch between them."""
    with pytest.raises(ExportError, match=r"ids: one batch has rows of the shapes \[\(3,\), \(4,\)\], which Triton"):
        engine_inputs(PADDED, [padded_request(1, 3, 0), padded_request(1, 4, 0)])


def test_bounds_of_the_committed_config() -> None:
    """64 rows of 512 ids; the longest request of several rows counts 63 * ceil(512 / 63) = 567."""
    assert input_bounds(read_config(CONFIG), 512) == {
        "input_ids": [(1, 64 * 512)],
        "length_carrier": [(1, 64 * 512)],
        "row_lengths": [(1, 64)],
        "longest_row": [(1, 567)],
    }
    assert input_bounds(PADDED, 512) == {"ids": [(1, 64), (1, 512)], "flag": [(1, 64), (1, 1)]}


@pytest.mark.parametrize(
    "config",
    [changed({}), changed(LONGEST_OF_IDS), changed(LENGTHS_BY_REQUEST)],
    ids=["committed", "longest of the ids", "lengths by request"],
)
@pytest.mark.parametrize(("most_rows", "longest"), [(1, 1), (1, 4), (2, 5), (3, 4), (4, 3), (4, 5), (5, 2)])
def test_bounds_are_what_batches_reach(handlers: Handlers, config: Any, most_rows: int, longest: int) -> None:
    """Over all batches of so few rows, the smallest and the largest size of every input is its bound."""
    config.max_batch_size = most_rows
    one = {
        (rows, length): handlers.shapes(rows, length)
        for rows in range(1, most_rows + 1)
        for length in range(1, longest + 1)
    }
    sizes: dict[str, set[int]] = {}
    for count in range(1, most_rows + 1):
        for mix in combinations_with_replacement(one, count):
            if sum(rows for rows, _ in mix) <= most_rows:
                for name, array in engine_inputs(config, [one[shape] for shape in mix]).items():
                    sizes.setdefault(name, set()).add(array.shape[0])

    assert {name: [(min(found), max(found))] for name, found in sizes.items()} == input_bounds(config, longest)


@given(st.data())
def test_no_batch_leaves_its_bounds(handlers: Handlers, data: st.DataObject) -> None:
    """Whatever the limits and however its rows are cut into requests."""
    config = read_config(CONFIG)
    config.max_batch_size = data.draw(st.integers(1, 70), label="max_batch_size")
    longest = data.draw(st.integers(1, 600), label="max_sequence_length")
    mix, left = [], config.max_batch_size
    while left and (not mix or data.draw(st.booleans(), label="another")):
        rows = data.draw(st.integers(1, left), label="rows")
        mix.append(handlers.shapes(rows, data.draw(st.integers(1, longest), label="length")))
        left -= rows

    inputs = engine_inputs(config, mix)

    assert outside(inputs, input_bounds(config, longest)) == []
    assert all(inputs["longest_row"].size >= request["input_ids"].shape[1] for request in mix)
    assert inputs["length_carrier"].size == sum(math.prod(request["length_carrier"].shape) for request in mix)
