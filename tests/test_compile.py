# SPDX-License-Identifier: Apache-2.0
"""The FP16 graph, its profile, and whether NVIDIA's own compiler makes an engine for an A100 of them, without a GPU."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import ROOT, copy_of_repository
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from transformers import BertForSequenceClassification

from ensemble.artifacts import CURRENT, FOLDER, FP16_ONNX
from ensemble.contract import read_config
from ensemble.errors import ExportError
from ensemble.samples import load_samples
from export import engine_from_onnx, gate, gate_fp16, source
from export.__main__ import main
from export.default_model.base_sized import base_sized
from export.engine_from_onnx import Settings
from export.fp16_on_cpu import fp16_on_cpu
from export.onnx_from_hf import FP16_GRAPHS, write_onnx
from export.pipeline import export
from export.profile import Range, profile_of, typical_batch

A100_ONLY = Settings(compute_capability="8.0")
PACKED = read_config(ROOT / "model_repository/classifier/config.pbtxt")
PADDED = read_config(ROOT / "model_repository/classifier/configs/padded.pbtxt")
LENGTHS = [25] * 60 + [300] * 4


@pytest.fixture(scope="module")
def exports(repository: Path, default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Repositories with the default model, by the layout of its FP16 graph."""
    padded = copy_of_repository(tmp_path_factory.mktemp("padded") / "model_repository")
    export(str(default_model), padded, texts=["good", "bad, but long enough"], layout="padded")
    return {"packed": repository, "padded": padded}


def compiled(graph: Path | onnx.ModelProto, shapes: dict[str, Range], tmp_path: Path) -> engine_from_onnx.Built:
    """Compile for an A100, by NVIDIA's compiler."""
    if isinstance(graph, onnx.ModelProto):
        onnx.save(graph, str(tmp_path / "graph.onnx"))
        graph = tmp_path / "graph.onnx"
    return engine_from_onnx.build(engine_from_onnx.load("tensorrt_rtx"), graph, shapes, A100_ONLY)


def small_graph(*nodes: onnx.NodeProto, weights: dict[str, np.ndarray] | None = None) -> onnx.ModelProto:
    """A graph from FP16 `x` [n, 4] to FP16 `y`."""
    value = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT16, ["n", 4]) for name in "xy"}
    initializers = [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()]
    graph = helper.make_graph(nodes, "g", [value["x"]], [value["y"]], initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid("ours", 1)])


# --- the FP16 graph ---


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_the_fp16_graph_is_mixed_precision_as_stated(exports: dict[str, Path], layout: str) -> None:
    """Every matrix product but the head's is FP16; LayerNorm and softmax are FP32; inputs integers, outputs FP32."""
    graph = onnx.shape_inference.infer_shapes(onnx.load(str(exports[layout] / FOLDER / CURRENT / FP16_ONNX))).graph

    kinds = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.output)}
    kinds |= {weight.name: weight.data_type for weight in graph.initializer}

    used = [(node.op_type, kinds[node.output[0]]) for node in graph.node]
    products = [kind for op, kind in used if op in ("MatMul", "Gemm")]
    assert products.count(TensorProto.FLOAT) == 2 and products.count(TensorProto.FLOAT16) == len(products) - 2
    assert len(products) == 2 + 6 * 6 + (layout == "packed")  # the last layer's query is a product of its own
    assert {kind for op, kind in used if op in ("LayerNormalization", "Softmax")} == {TensorProto.FLOAT}
    assert {kind for op, kind in used if op == "Gelu"} == {TensorProto.FLOAT16}
    assert [op for op, _ in used].count("LayerNormalization") == 13
    tables = [weight for weight in graph.initializer if weight.dims[:1] and weight.dims[0] in (30522, 512)]
    assert len(tables) == 2 and {weight.data_type for weight in tables} == {TensorProto.FLOAT16}
    whole = {TensorProto.INT64, TensorProto.INT32}
    assert {value.type.tensor_type.elem_type for value in graph.input} <= whole
    assert {kinds[value.name] for value in graph.output} == {TensorProto.FLOAT}


def test_an_overflow_in_fp16_shows_on_a_cpu(repository: Path, tmp_path: Path) -> None:
    """A weight that overflows gives NaN, as on a GPU: ONNX Runtime alone computes in FP32 and would pass it."""
    graph = onnx.load(str(repository / FOLDER / CURRENT / FP16_ONNX))
    weight = next(tensor for tensor in graph.graph.initializer if tensor.name.endswith("layers.0.after.up.weight"))
    weight.CopyFrom(numpy_helper.from_array(np.full(tuple(weight.dims), 60000, dtype=np.float16), weight.name))
    onnx.save(graph, str(tmp_path / "graph.onnx"))
    inputs = {
        "input_ids": np.array([101, 2307, 102]),
        "row_lengths": np.array([3], dtype=np.int32),
        "longest_row": np.zeros(3, dtype=np.int32),
        "length_carrier": np.zeros(3, dtype=np.int32),
    }

    assert np.isnan(fp16_on_cpu(tmp_path / "graph.onnx")(inputs).logits).all()
    assert np.isfinite(fp16_on_cpu(repository / FOLDER / CURRENT / FP16_ONNX)(inputs).logits).all()


# --- the profile ---


def test_the_profile_is_what_the_config_can_produce() -> None:
    """Limits by config.pbtxt, the optimum a batch as it forms: 38 rows or more of typical length."""
    packed = profile_of(PACKED, 512, LENGTHS)
    padded = profile_of(PADDED, 384, [384])

    assert {name: (shapes.min, shapes.max) for name, shapes in packed.items()} == {
        "input_ids": ((1,), (64 * 512,)),
        "length_carrier": ((1,), (64 * 512,)),
        "row_lengths": ((1,), (64,)),
        "longest_row": ((1,), (567,)),
    }
    assert packed["input_ids"].opt == (60 * 25,) and packed["row_lengths"].opt == (60,)
    assert packed["longest_row"].opt == (25,)
    assert set(padded.values()) == {Range((1, 1), (1, 384), (64, 384))}


@given(st.lists(st.integers(1, 512), min_size=1, max_size=200))
def test_a_typical_batch_keeps_to_rows_and_budget(lengths: list[int]) -> None:
    """Never more rows than max_batch_size, never over the budget unless it is one row."""
    batch = typical_batch(lengths, 64, 16 * 512**2)

    assert 1 <= len(batch) <= 64
    assert len(batch) == 1 or len(batch) * max(batch) ** 2 <= 16 * 512**2


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (Range((64,), (8,), (64,)), r"x: min \[64\], opt \[8\], max \[64\]"),
        (Range((1,), (128,), (64,)), r"x: min \[1\], opt \[128\], max \[64\]"),
        (Range((0,), (8,), (64,)), r"x: min \[0\], opt \[8\], max \[64\]"),
        (Range((1,), (8, 4), (64, 4)), r"x: min \[1\], opt \[8, 4\], max \[64, 4\]"),
    ],
)
def test_a_profile_that_does_not_fit_together_is_refused(tmp_path: Path, shapes: Range, message: str) -> None:
    """Before anything is built, naming the input."""
    with pytest.raises(ExportError, match="the optimization profile needs 1 <= min <= opt <= max .* " + message):
        compiled(tmp_path / "none.onnx", {"x": shapes}, tmp_path)


# --- compiled by NVIDIA's compiler, without a GPU ---


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_the_default_model_compiles_for_an_a100(
    exports: dict[str, Path], tmp_path: Path, layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`python -m export compile-check`: the installed graph, with the profile of the config that serves it."""
    repository = exports[layout]

    code = main(["compile-check", "--repository", str(repository), "--json", str(tmp_path / "out/compiled.json")])

    assert code == 0
    found = json.loads((tmp_path / "out/compiled.json").read_text())
    assert (found["layout"], found["compute_capability"]) == (layout, "8.0")
    assert found["bytes"] > 45e6 and found["layers"] > 500  # 22.7 million weights in FP16
    config = PADDED if layout == "padded" else PACKED
    assert found["profile"].keys() == {tensor.name for tensor in config.input} | {
        name for entry in config.batch_input for name in entry.target_name
    }
    assert "MB" in capsys.readouterr().err


def test_a_model_of_base_size_passes_the_gate_and_compiles(default_model: Path, tmp_path: Path) -> None:
    """110 million weights, with the activations of a trained model: FP16 is as close as stated, an A100 gets an engine.

    The gate's rows have up to 128 tokens here; of 512 they are with the default model, whose layers are the same.
    """
    wide = base_sized(BertForSequenceClassification.from_pretrained(default_model))
    assert wide.config.num_hidden_layers == 12
    model = replace(source.load(str(default_model)), model=wide)
    model.tokenizer.enable_truncation(128)
    model.tokenizer.save(str(tmp_path / "tokenizer.json"))
    graph = tmp_path / "graph.onnx"
    write_onnx(FP16_GRAPHS["packed"](wide), graph)

    expected = gate.reference(model, tmp_path, 128, [sample.text for sample in load_samples()[:8]])
    fp16 = gate_fp16.check("FP16", fp16_on_cpu(graph), PACKED, 0, expected).verdicts
    built = compiled(graph, profile_of(PACKED, 512, LENGTHS), tmp_path)

    assert len(fp16) == 5 and all(verdict and verdict.max_abs < 3e-2 for verdict in fp16)
    assert {verdict.label_agreement for verdict in fp16} == {1.0}
    assert max(verdict.max_abs for verdict in fp16) > 1e-5  # it is FP16
    assert len(built.plan) > 215e6


def test_the_base_sized_model_keeps_the_function_and_its_outliers(default_model: Path) -> None:
    """At 6 layers it answers as the model it was made of, to 1e-5; the widths are BERT-base's, no two columns alike."""
    model = BertForSequenceClassification.from_pretrained(default_model)
    ids = model.dummy_inputs["input_ids"]

    wide = base_sized(model, layers=6)

    np.testing.assert_allclose(wide(ids).logits.detach(), model(ids).logits.detach(), atol=1e-5)
    assert (wide.config.hidden_size, wide.config.intermediate_size) == (768, 3072)
    weight = wide.bert.encoder.layer[0].intermediate.dense.weight
    assert not np.allclose(weight[:, :384].detach(), weight[:, 384:].detach(), atol=1e-3)


def test_an_operator_tensorrt_lacks_is_named_with_its_node(tmp_path: Path) -> None:
    """Every parser error is in the message."""
    graph = small_graph(helper.make_node("Swirl", ["x"], ["y"], "the_swirl", domain="ours"))

    with pytest.raises(ExportError, match=r"TensorRT cannot take graph\.onnx: \n  node 'the_swirl' \(Swirl\): .+"):
        compiled(graph, {"x": Range((1, 4), (8, 4), (64, 4))}, tmp_path)


def test_a_wrong_type_is_refused(tmp_path: Path) -> None:
    """FP16 times FP32: what a forgotten cast would be."""
    weights = {"w": np.ones((4, 4), dtype=np.float32)}
    graph = small_graph(helper.make_node("MatMul", ["x", "w"], ["y"], "product"), weights=weights)

    with pytest.raises(ExportError, match=r"(?s)graph\.onnx.*(type|Float|Half)"):
        compiled(graph, {"x": Range((1, 4), (8, 4), (64, 4))}, tmp_path)


def test_a_profile_the_graph_does_not_allow_is_refused(tmp_path: Path) -> None:
    """A dimension that the graph fixes at 4, asked for up to 8: TensorRT's reason is in the message."""
    graph = small_graph(helper.make_node("Relu", ["x"], ["y"]))

    with pytest.raises(ExportError, match=r"TensorRT .*\n?.*(profile|dim|x)"):
        compiled(graph, {"x": Range((1, 4), (8, 8), (64, 8))}, tmp_path)
    with pytest.raises(ExportError, match=r"the graph has the inputs \['x'\], the optimization profile \['z'\]"):
        compiled(graph, {"z": Range((1, 4), (8, 4), (64, 4))}, tmp_path)
    with pytest.raises(ExportError, match="gives x 1 dimensions, the graph has 2"):
        compiled(graph, {"x": Range((1,), (8,), (64,))}, tmp_path)


def test_weights_that_lay_beside_the_graph_and_are_gone_are_told(tmp_path: Path) -> None:
    """A graph with its weights in a side file compiles where that lies beside it, and names it where it does not."""
    weights = {"w": np.ones((4, 4), dtype=np.float16)}
    graph = small_graph(helper.make_node("MatMul", ["x", "w"], ["y"]), weights=weights)
    onnx.save(graph, str(tmp_path / "graph.onnx"), save_as_external_data=True, location="side.bin", size_threshold=0)
    shapes = {"x": Range((1, 4), (8, 4), (64, 4))}
    assert compiled(tmp_path / "graph.onnx", shapes, tmp_path).plan

    (tmp_path / "side.bin").unlink()

    with pytest.raises(ExportError, match=r"/side\.bin, which has weights of graph\.onnx, is missing: run make export"):
        compiled(tmp_path / "graph.onnx", shapes, tmp_path)


def test_an_engine_that_is_not_built_says_why(tmp_path: Path) -> None:
    """What parses and still cannot be built, here a reshape no input fits, ends with TensorRT's last words."""
    shape = {"shape": np.array([3, 5], dtype=np.int64)}
    graph = small_graph(helper.make_node("Reshape", ["x", "shape"], ["y"], "reshape"), weights=shape)

    with pytest.raises(ExportError, match=r"(?s)(built no engine of graph\.onnx|cannot take graph\.onnx): .{20,}"):
        compiled(graph, {"x": Range((1, 4), (8, 4), (64, 4))}, tmp_path)


def test_a_graph_that_is_missing_or_changed_is_not_compiled(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, exit code 1; so is a GPU generation the compiler does not know."""
    copy = Path(shutil.copytree(repository, tmp_path / "copy", symlinks=True))

    assert main(["compile-check", "--repository", str(copy), "--compute-capability", "9.9"]) == 1
    assert "compiles for 12.0, 12.1, 7.5, 8.0, 8.6, 8.9, not for '9.9'" in capsys.readouterr().err
    (copy / FOLDER / CURRENT / FP16_ONNX).write_bytes(b"changed")
    assert main(["compile-check", "--repository", str(copy)]) == 1
    assert f"{FP16_ONNX} is not the file that was exported: run make export" in capsys.readouterr().err
    assert main(["compile-check", "--repository", str(tmp_path)]) == 1
    assert "model.json is missing: run make export" in capsys.readouterr().err
