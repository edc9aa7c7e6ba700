# SPDX-License-Identifier: Apache-2.0
"""What an experiment sends: texts to the ensemble; to a handler of padded rows, the ids that its tokenizer makes.

Each as perf_analyzer reads it and as gRPC messages. Knows nothing of servers or loads.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tritonclient.grpc import service_pb2

from ensemble.contract import ENSEMBLE
from ensemble.errors import ConfigError
from ensemble.handlers.packing import Ids
from perf import closed_loop
from perf.in_process import classifier, rows_of
from perf.load_point import Texts, measured_texts, texts_of
from perf.paper.roofline_model import BertShape

PADDED_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
WORKLOADS = {
    "full": "texts that fill the model's longest row, cut where they are longer (the case study's shape)",
    "short": "the samples of at most 64 tokens",
    "mixed": "all samples, long tail included",
}
FROM_FILE = "file"


@dataclass(frozen=True)
class Workload:
    """Texts, their rows and what the model answers to each, alone, in-process.

    longest: what a padded row is padded to
    logits:  FP32 [texts, labels]
    """

    texts: Texts
    rows: list[Ids]
    longest: int
    pad: int
    logits: npt.NDArray[np.float32]

    @property
    def name(self) -> str:
        """One of WORKLOADS, or FROM_FILE."""
        return self.texts.name

    def described(self) -> dict[str, Any]:
        """For the record: enough to know the same texts again."""
        tokens = self.texts.tokens
        digest = hashlib.sha256("\n".join(self.texts.texts).encode()).hexdigest()
        return {
            "what": WORKLOADS.get(self.name, "the file given as --texts, a text a line"),
            "texts": len(tokens),
            "mean_tokens": float(tokens.mean()),
            "median_tokens": float(np.median(tokens)),
            "longest": int(tokens.max()),
            "sha256": digest,
        }

    def indices(self, inputs: Sequence[Any]) -> npt.NDArray[np.int64]:
        """Which text each of perf_analyzer's recorded first inputs was."""
        try:
            return np.array([self._known[value if isinstance(value, str) else tuple(value)] for value in inputs])
        except KeyError as error:
            raise ConfigError(f"perf_analyzer sent what it was not given: {str(error)[:80]}") from None

    @cached_property
    def _known(self) -> dict[Any, int]:
        texts: dict[Any, int] = {text: index for index, text in enumerate(self.texts.texts)}
        return texts | {tuple(self._padded(row).tolist()): index for index, row in enumerate(self.rows)}

    def shapes(self, model: str) -> dict[str, int]:
        """Of one request's inputs, the batch's dimension left out."""
        return {"text": 1} if model == ENSEMBLE else dict.fromkeys(PADDED_INPUTS, self.longest)

    def write(self, model: str, file: Path) -> None:
        """What perf_analyzer reads."""
        if model == ENSEMBLE:
            data: list[Any] = [{"text": [text]} for text in self.texts.texts]
        else:
            data = [
                {
                    name: {"content": values.tolist(), "shape": [self.longest]}
                    for name, values in self._inputs(row).items()
                }
                for row in self.rows
            ]
        file.write_text(json.dumps({"data": data}), encoding="utf-8")

    def messages(self, model: str, every: int = 1) -> list[service_pb2.ModelInferRequest]:
        """A request for each text, or for each `every`-th of them."""
        if model == ENSEMBLE:
            return [closed_loop.message_of(text) for text in self.texts.texts[::every]]
        return [_message(model, self._inputs(row)) for row in self.rows[::every]]

    def _json(self, row: Ids) -> dict[str, Any]:
        inputs = self._inputs(row)
        return {name: {"content": values.tolist(), "shape": [self.longest]} for name, values in inputs.items()}

    def _inputs(self, row: Ids) -> dict[str, Ids]:
        mask = (np.arange(self.longest) < len(row)).astype(np.int64)
        return dict(zip(PADDED_INPUTS, (self._padded(row), mask, np.zeros_like(mask)), strict=True))

    def _padded(self, row: Ids) -> Ids:
        return np.pad(row, (0, self.longest - len(row)), constant_values=self.pad)


def workload(repository: Path, name: str, shape: BertShape, longest: int, pad: int, file: Path | None) -> Workload:
    """One of WORKLOADS by name, or FROM_FILE. Raises ConfigError for a file without texts."""
    if file is not None and name == FROM_FILE:
        texts = measured_texts(repository, name, read_texts(file), shape)
    else:
        texts = texts_of(repository, name, shape)
    rows = rows_of(repository, texts.texts)
    return Workload(texts, rows, longest, pad, classifier(repository)(rows).logits)


def read_texts(file: Path) -> list[str]:
    """A text a line, UTF-8; empty lines are none. Raises ConfigError if it cannot be read or has no text."""
    try:
        lines = file.read_bytes().decode("utf-8").split("\n")
    except OSError as error:
        raise ConfigError(
            f"--texts: {file} cannot be read ({error.strerror}): give a file with a text a line"
        ) from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"--texts: {file} is not UTF-8 (line {line}): save it as UTF-8 text") from None
    if "\0" in "".join(lines):
        raise ConfigError(f"--texts: {file} holds NUL characters: is it text, a text a line?")
    texts = [line.strip() for line in lines if line.strip()]
    if not texts:
        raise ConfigError(f"--texts: {file} has no text: give a file with a text a line")
    return list(dict.fromkeys(texts))


def _message(model: str, inputs: dict[str, Ids]) -> service_pb2.ModelInferRequest:
    message = service_pb2.ModelInferRequest(model_name=model)
    for name, values in inputs.items():
        message.inputs.add(name=name, datatype="INT64").shape.extend([1, len(values)])
        message.raw_input_contents.append(values.astype("<i8").tobytes())
    message.outputs.add(name="logits")
    return message
