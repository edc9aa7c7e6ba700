# SPDX-License-Identifier: Apache-2.0
"""The padded module as TorchScript, for the baseline. Knows nothing of Triton."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from transformers import BertForSequenceClassification

from export.padded_bert import PaddedBertClassifier


def write_torchscript(model: BertForSequenceClassification, file: Path) -> None:
    """Write a module that takes any batch size, length and device (see export/padded_bert.py for its inputs)."""
    with warnings.catch_warnings():
        # torch says TorchScript is deprecated; it is what the baseline is about.
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(PaddedBertClassifier(model).eval()).save(str(file))  # type: ignore[no-untyped-call]
