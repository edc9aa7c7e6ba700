# SPDX-License-Identifier: Apache-2.0
"""Runs an FP16 graph on a CPU with every rounding it asks for. Knows nothing of BERT or Triton.

ONNX Runtime has few FP16 operators for CPUs: it computes the others in FP32 and drops the casts between neighbours, so
that nothing is rounded and nothing overflows (a weight of 60,000 that gives NaN on a GPU passed unnoticed). An
Identity behind each operator, with optimizations off, keeps every value FP16 between operators. Sums inside a matrix
product stay FP32; should TensorRT choose a kernel that sums in FP16, only the check of the engine itself can show it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt
import onnx
import onnxruntime

from ensemble.handlers.scores import Scores


def fp16_on_cpu(file: Path) -> Callable[[Mapping[str, npt.NDArray[Any]]], Scores]:
    """The graph in a file, to be called with its inputs by name; slower than the file itself."""
    session = _session(file)
    return lambda inputs: Scores(*session.run(["logits", "probabilities"], dict(inputs)))


def _session(file: Path) -> onnxruntime.InferenceSession:
    model = onnx.load(str(file))
    inferred = onnx.shape_inference.infer_shapes(model)
    half = {
        value.name
        for value in inferred.graph.value_info
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT16
    }
    nodes = []
    for node in model.graph.node:
        nodes.append(node)
        for index, name in enumerate(node.output):
            if name in half:
                node.output[index] = f"{name}_unrounded"
                nodes.append(onnx.helper.make_node("Identity", [node.output[index]], [name]))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    del model.graph.value_info[:]
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1  # see gate.reference()
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
