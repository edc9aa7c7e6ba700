# SPDX-License-Identifier: Apache-2.0
"""The served graph without a server: what measurements hold the served figures against."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ensemble.artifacts import checked
from ensemble.contract import Contract
from ensemble.onnx_classifier import OnnxClassifier
from ensemble.packing import Ids
from ensemble.passes import CostModel
from ensemble.tokenization import TextTokenizer


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
