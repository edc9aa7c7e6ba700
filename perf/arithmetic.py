# SPDX-License-Identifier: Apache-2.0
"""How much arithmetic a deployment does for its rows, how much of it was padding, and what this machine could do.

FLOPs count matrix products only, as in roofline_model.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ensemble.handlers.passes import CostModel, plan
from ensemble.launcher.gpu import Gpus
from perf.paper.roofline_model import BertShape, packed, padded

# Tokens of a pass whose products are timed: 64 short texts, and 64 of a mixed sample.
CEILING_TOKENS = (1600, 3648)
CEILING_ROUNDS = 8


def padded_rows(shape: BertShape, lengths: Sequence[int], longest: int) -> tuple[float, float]:
    """Mean FLOPs of a row padded to `longest`, and the share of them that no text needs."""
    done = padded(shape, 1, longest).flops
    needed = float(np.mean([padded(shape, 1, length).flops for length in lengths]))
    return done, 1 - needed / done


def packed_rows(
    shape: BertShape, lengths: Sequence[int], mean_batch: float, cost: CostModel | None
) -> tuple[float, float]:
    """The same of packed rows: an estimate, from texts that follow each other in batches of the mean size.

    cost: what the handler plans its passes with; None for an engine, which makes one of each batch.
    """
    size = max(1, round(mean_batch))
    texts = len(lengths) // size * size or len(lengths)
    done = 0.0
    for start in range(0, texts, size):
        batch = list(lengths[start : start + size])
        passes = plan(batch, cost) if cost else [range(len(batch))]
        done += sum(packed(shape, [batch[index] for index in members]).flops for members in passes)
    needed = sum(packed(shape, [length]).flops for length in lengths[:texts])
    return done / texts, 1 - needed / done


def ceiling(shape: BertShape, gpus: Gpus) -> dict[str, Any]:
    """The most FLOP/s that a plain matrix product of the model's shapes reached here, and with what.

    FP32 on a CPU, by the quicker of torch and ONNX Runtime; FP16 on the first GPU.
    """
    import torch  # here, because it takes seconds

    device, kind = (torch.device("cuda"), torch.float16) if gpus.devices and torch.cuda.is_available() else (
        torch.device("cpu"),
        torch.float32,
    )  # fmt: skip
    found: dict[str, float] = {}
    hidden = shape.hidden
    for tokens in CEILING_TOKENS:
        for inner, outer in ((hidden, hidden), (hidden, shape.intermediate), (shape.intermediate, hidden)):
            left = torch.rand(tokens, inner, device=device).to(kind)
            right = torch.rand(inner, outer, device=device).to(kind)
            name, flops = f"{tokens} x {inner} x {outer}", 2.0 * tokens * inner * outer
            found[f"torch, {name}"] = flops / _fastest(_torch_product(left, right))
            if device.type == "cpu":
                found[f"ONNX Runtime, {name}"] = flops / _fastest(_onnx_product(left.numpy(), right.numpy()))
    best = max(found, key=found.__getitem__)
    return {
        "flops": found[best],
        "by": best,
        "precision": "fp16" if kind is torch.float16 else "fp32",
        "all": found,
    }


def _fastest(run: Callable[[], object]) -> float:
    run()
    times = []
    for _ in range(CEILING_ROUNDS):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def _torch_product(left: Any, right: Any) -> Callable[[], object]:
    import torch

    def run() -> object:
        with torch.inference_mode():
            product = left @ right
            if product.is_cuda:
                torch.cuda.synchronize()
        return product

    return run


def _onnx_product(left: Any, right: Any) -> Callable[[], object]:
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    graph = helper.make_graph(
        [helper.make_node("MatMul", ["left", "right"], ["product"])],
        "product",
        [helper.make_tensor_value_info("left", TensorProto.FLOAT, list(left.shape))],
        [helper.make_tensor_value_info("product", TensorProto.FLOAT, [left.shape[0], right.shape[1]])],
        [numpy_helper.from_array(right, "right")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return lambda: session.run(None, {"left": left})
