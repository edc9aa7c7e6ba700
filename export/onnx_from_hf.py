# SPDX-License-Identifier: Apache-2.0
"""The packed graph as one ONNX file. Knows nothing of Triton; TensorRT and ONNX Runtime both take what it writes."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import onnx
import torch
from transformers import BertForSequenceClassification

from ensemble.errors import ExportError
from export.packed_bert import PackedBertClassifier

# 20 has Gelu as one operator: ONNX Runtime ran it 2.5 times faster than opset 18's five, on the whole graph.
OPSET = 20
# protobuf's limit for one message; a BERT-large has 1.3 GB in FP32.
LARGEST_BYTES = 2**31 - 1

TYPES = {
    onnx.TensorProto.INT64: "TYPE_INT64",
    onnx.TensorProto.INT32: "TYPE_INT32",
    onnx.TensorProto.FLOAT: "TYPE_FP32",
}
INPUTS = ["input_ids", "row_lengths", "longest_row"]
OUTPUTS = ["logits", "probabilities"]


class Interface(NamedTuple):
    """A graph's inputs and outputs: name -> type, in the words of config.pbtxt."""

    inputs: dict[str, str]
    outputs: dict[str, str]


def write_onnx(model: BertForSequenceClassification, file: Path) -> Interface:
    """Write the packed FP32 graph: inputs INPUTS (see export/packed_bert.py), outputs OUTPUTS, FP32 [rows, labels].

    Returns what the file says its inputs and outputs are. Raises ExportError if the model would not fit one file, or if
    the exporter did not write what was asked for.
    """
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    if size >= LARGEST_BYTES:
        raise ExportError(
            f"the model has {size / 1e9:.1f} GB of weights, one ONNX file holds {LARGEST_BYTES / 1e9:.1f}: "
            "export a smaller model"
        )
    packed = PackedBertClassifier(model).eval()
    example = (
        torch.tensor([2, 3, 4, 5, 6, 7]),
        torch.tensor([2, 4], dtype=torch.int32),
        torch.zeros(4, dtype=torch.int32),
    )
    with _quiet():
        program = torch.onnx.export(
            packed,
            example,
            dynamo=True,
            opset_version=OPSET,
            external_data=False,
            verbose=False,
            input_names=INPUTS,
            output_names=OUTPUTS,
            dynamic_shapes=tuple({0: torch.export.Dim(name)} for name in ("tokens", "rows", "longest")),
        )
    assert program is not None  # with dynamo=True it never is
    program.save(str(file), external_data=False)
    return _checked(file)


def _checked(file: Path) -> Interface:
    """Hold what was written against what was asked for."""
    graph = onnx.load(str(file))
    onnx.checker.check_model(graph)
    opset = {entry.domain: entry.version for entry in graph.opset_import}
    if opset.get("") != OPSET or len(opset) != 1:
        raise ExportError(
            f"{file.name} has opsets {opset}, not {OPSET} alone: use the torch and onnx of pyproject.toml"
        )
    values = [*graph.graph.input, *graph.graph.output]
    names = [value.name for value in values]
    fixed = [value.name for value in values if not value.type.tensor_type.shape.dim[0].dim_param]
    if names != INPUTS + OUTPUTS or fixed:
        raise ExportError(
            f"{file.name} has inputs and outputs {names}, those of a fixed size: {fixed}: use the torch and onnx of "
            "pyproject.toml"
        )
    inputs, outputs = (
        {value.name: TYPES[value.type.tensor_type.elem_type] for value in part}
        for part in (graph.graph.input, graph.graph.output)
    )
    return Interface(inputs, outputs)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hush the exporter, which warns about torchvision, which a BERT does not need, and about its own internals."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)
