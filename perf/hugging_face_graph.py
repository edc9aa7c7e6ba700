# SPDX-License-Identifier: Apache-2.0
"""The graph that anybody gets of a Hugging Face BERT: torch.onnx.export, rows padded, on ONNX Runtime.

What the packed graph is held against. Knows nothing of it, nor of how this project exports.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ensemble.errors import ConfigError
from ensemble.handlers.packing import Ids

INPUTS = ("input_ids", "attention_mask", "token_type_ids")


class HuggingFaceGraph:
    """Classifies one row at a time, at its exact length: no padding, and no batch."""

    def __init__(self, model: Path, scratch: Path, options: Any) -> None:
        """model: its folder. scratch: an empty one for the graph. options: of the ONNX Runtime session.

        Raises ConfigError if there is no such model.
        """
        import onnxruntime

        file = scratch / "hugging_face.onnx"
        _export(model, file)
        self._session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        self._known = {given.name for given in self._session.get_inputs()}

    def __call__(self, rows: Sequence[Ids]) -> npt.NDArray[np.float32]:
        """Logits, FP32 [rows, labels]. rows: INT64 [length] each."""
        return np.concatenate([self._one(row[None]) for row in rows])

    def _one(self, ids: Ids) -> npt.NDArray[np.float32]:
        feeds = dict(zip(INPUTS, (ids, np.ones_like(ids), np.zeros_like(ids)), strict=True))
        (logits,) = self._session.run(["logits"], {name: feeds[name] for name in self._known})
        return np.asarray(logits)


def _export(folder: Path, file: Path) -> None:
    import torch  # here, because these take seconds
    from transformers import BertForSequenceClassification

    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is no Hugging Face model: give the folder that was exported")
    with _quiet():
        model = BertForSequenceClassification.from_pretrained(folder, use_safetensors=True)
        model.eval()  # type: ignore[no-untyped-call]
        example = torch.full((2, 16), 1000, dtype=torch.int64)
        rows, length = torch.export.Dim("rows"), torch.export.Dim("length", max=model.config.max_position_embeddings)
        torch.onnx.export(
            model,
            (),
            file,
            kwargs=dict(zip(INPUTS, (example, torch.ones_like(example), torch.zeros_like(example)), strict=True)),
            dynamo=True,
            external_data=False,
            verbose=False,
            input_names=list(INPUTS),
            output_names=["logits"],
            dynamic_shapes={name: {0: rows, 1: length} for name in INPUTS},
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Hush the exporter, which warns about its own internals."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)
