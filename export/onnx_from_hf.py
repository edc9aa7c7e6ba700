# SPDX-License-Identifier: Apache-2.0
"""A classifier as one ONNX file. Knows nothing of Triton; TensorRT and ONNX Runtime both take what it writes."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import onnx
import torch
from torch import Tensor, nn
from transformers import BertForSequenceClassification

from ensemble.errors import ExportError
from export.packed_bert import PackedBertClassifier
from export.padded_bert import PaddedBertClassifier

# 20 has Gelu as one operator: ONNX Runtime ran it 2.5 times faster than opset 18's five, on the whole graph. The parser
# of TensorRT 10.0 has that and every other operator here, for the types they come in (onnx-tensorrt, commit 973d68d).
OPSET = 20
# protobuf's limit for one message; a BERT-large has 1.3 GB in FP32.
LARGEST_BYTES = 2**31 - 1

TYPES = {
    onnx.TensorProto.INT64: "TYPE_INT64",
    onnx.TensorProto.INT32: "TYPE_INT32",
    onnx.TensorProto.FLOAT: "TYPE_FP32",
}
OUTPUTS = ["logits", "probabilities"]


class Interface(NamedTuple):
    """A graph's inputs and outputs: name -> type, in the words of config.pbtxt."""

    inputs: dict[str, str]
    outputs: dict[str, str]


class Graph(NamedTuple):
    """What is written: a module, and its inputs as name -> (an example of any size, its dynamic dimensions)."""

    module: nn.Module
    inputs: dict[str, tuple[Tensor, dict[int, str]]]


class ForTriton(nn.Module):
    """The packed graph with one input more, which nothing reads.

    Triton's TensorRT backend looks up every input of config.pbtxt in the engine, and length_carrier is one: the source
    of longest_row (model_repository/classifier/config.pbtxt).
    """

    def __init__(self, packed: PackedBertClassifier) -> None:
        super().__init__()
        self.packed = packed

    def forward(
        self, input_ids: Tensor, row_lengths: Tensor, longest_row: Tensor, length_carrier: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See PackedBertClassifier.forward; length_carrier INT32 [any]."""
        logits, probabilities = self.packed(input_ids, row_lengths, longest_row)
        return logits, probabilities


def packed_fp32(model: BertForSequenceClassification) -> Graph:
    """The graph of the Python handler, for ONNX Runtime."""
    return Graph(PackedBertClassifier(model), _packed_inputs())


def packed_fp16(model: BertForSequenceClassification) -> Graph:
    """The graph of the TensorRT engine."""
    carrier = {"length_carrier": (torch.zeros(6, dtype=torch.int32), {0: "carrier"})}
    return Graph(ForTriton(PackedBertClassifier(model, torch.float16)), _packed_inputs() | carrier)


def padded_fp16(model: BertForSequenceClassification) -> Graph:
    """The graph of the padded TensorRT engine, with the three inputs that a Hugging Face BERT has."""
    ids = torch.tensor([[2, 3, 4, 0], [4, 5, 6, 7]])
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long(), "token_type_ids": torch.zeros_like(ids)}
    return Graph(
        PaddedBertClassifier(model, torch.float16),
        {name: (example, {0: "rows", 1: "longest"}) for name, example in inputs.items()},
    )


# Of the FP16 graph, and so of the engine, by the name it has in model.json.
FP16_GRAPHS = {"packed": packed_fp16, "padded": padded_fp16}


def _packed_inputs() -> dict[str, tuple[Tensor, dict[int, str]]]:
    return {
        "input_ids": (torch.tensor([2, 3, 4, 5, 6, 7]), {0: "tokens"}),
        "row_lengths": (torch.tensor([2, 4], dtype=torch.int32), {0: "rows"}),
        "longest_row": (torch.zeros(4, dtype=torch.int32), {0: "longest"}),
    }


def write_onnx(graph: Graph, file: Path) -> Interface:
    """Write a graph with outputs OUTPUTS, FP32 [rows, labels] each.

    Returns what the file says its inputs and outputs are. Raises ExportError if the model would not fit one file, or if
    the exporter did not write what was asked for.
    """
    size = sum(parameter.numel() * parameter.element_size() for parameter in graph.module.parameters())
    if size >= LARGEST_BYTES:
        raise ExportError(
            f"the model has {size / 1e9:.1f} GB of weights, one ONNX file holds {LARGEST_BYTES / 1e9:.1f}: "
            "export a smaller model"
        )
    dims = {name: torch.export.Dim(name) for _, dynamic in graph.inputs.values() for name in dynamic.values()}
    with _quiet():
        program = torch.onnx.export(
            graph.module.eval(),
            tuple(example for example, _ in graph.inputs.values()),
            dynamo=True,
            opset_version=OPSET,
            external_data=False,
            verbose=False,
            input_names=list(graph.inputs),
            output_names=OUTPUTS,
            dynamic_shapes=tuple(
                {axis: dims[name] for axis, name in dynamic.items()} for _, dynamic in graph.inputs.values()
            ),
        )
    assert program is not None  # with dynamo=True it never is
    program.save(str(file), external_data=False)
    return _checked(file, graph)


def _checked(file: Path, asked: Graph) -> Interface:
    """Hold what was written against what was asked for."""
    graph = onnx.load(str(file))
    onnx.checker.check_model(graph)
    opset = {entry.domain: entry.version for entry in graph.opset_import}
    if opset.get("") != OPSET or len(opset) != 1:
        raise ExportError(
            f"{file.name} has opsets {opset}, not {OPSET} alone: use the torch and onnx of pyproject.toml"
        )
    names = [value.name for value in [*graph.graph.input, *graph.graph.output]]
    fixed = [
        value.name
        for value, (_, dynamic) in zip(graph.graph.input, asked.inputs.values(), strict=False)
        if not all(value.type.tensor_type.shape.dim[axis].dim_param for axis in dynamic)
    ]
    if names != [*asked.inputs, *OUTPUTS] or fixed:
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
