# SPDX-License-Identifier: Apache-2.0
"""The served graph without a server: what measurements hold the served figures against."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ensemble.artifacts import checked
from ensemble.contract import Contract
from ensemble.handlers.onnx_classifier import OnnxClassifier
from ensemble.handlers.packing import Ids
from ensemble.handlers.passes import CostModel
from ensemble.handlers.tokenization import TextTokenizer
from perf.paper.roofline_model import BertShape


def cost_model(repository: Path) -> CostModel:
    """The cost model that classifier/configs/cpu.pbtxt serves with."""
    parameters = Contract.read(repository, "cpu").models["classifier"].parameters
    return CostModel(*(float(parameters[key].string_value) for key in ("attention_cost", "pass_cost")))


def classifier(repository: Path) -> OnnxClassifier:
    """The installed graph with the cost model it is served with, on all cores."""
    file, _ = checked(repository / "classifier/1/model.onnx")
    return OnnxClassifier(file, cost_model(repository))


def rows_of(repository: Path, texts: Sequence[str]) -> list[Ids]:
    """The texts' rows, INT64 [length] each, by the installed tokenizer."""
    file, _ = checked(repository / "tokenizer/1/tokenizer.json")
    tokenizer = TextTokenizer(file)
    return [np.array(row.ids, dtype=np.int64) for row in tokenizer(texts)]


def shape(repository: Path) -> BertShape:
    """The shape of the installed model, from its TorchScript; but for its heads, which no FLOP depends on."""
    import torch  # here, because it takes seconds and most measurements do without

    file, _ = checked(repository / "baseline/1/model.pt")
    weights = torch.jit.load(str(file), map_location="cpu").state_dict()  # type: ignore[no-untyped-call]
    layers = {name.split(".")[1] for name in weights if re.match(r"layers\.\d+\.", name)}
    hidden = next(weight.shape[1] for name, weight in weights.items() if name.startswith("words"))
    products = sum(
        weight.numel() for name, weight in weights.items() if name.startswith("layers.") and weight.ndim == 2
    )
    return BertShape(
        layers=len(layers),
        hidden=hidden,
        intermediate=(products // len(layers) - 4 * hidden**2) // (2 * hidden),
    )


def rates(repository: Path, rows: Sequence[Ids], *, batch: int = 64, rounds: int = 3) -> dict[str, float]:
    """Rows a second of the served graph without a server, in batches and one by one; the best of the rounds."""
    classify = classifier(repository)
    many = list(rows) * -(-batch // len(rows))
    batches = [many[start : start + batch] for start in range(0, len(many), batch)]
    alone = [[row] for row in rows]
    classify(batches[0])
    return {
        "batched_per_second": len(many) / min(_seconds(classify, batches) for _ in range(rounds)),
        "alone_per_second": len(alone) / min(_seconds(classify, alone) for _ in range(rounds)),
    }


def _seconds(classify: OnnxClassifier, batches: Sequence[Sequence[Ids]]) -> float:
    started = time.perf_counter()
    for rows in batches:
        classify(rows)
    return time.perf_counter() - started
