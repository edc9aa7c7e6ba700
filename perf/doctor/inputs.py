# SPDX-License-Identifier: Apache-2.0
"""Inputs for any model, made from its config: texts, token ids of realistic lengths, masks, or random numbers.

Knows configs and numpy, nothing of servers; the load and the handler probe both take their requests from here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tritonclient.grpc import model_config_pb2, service_pb2
from tritonclient.utils import serialize_byte_tensor, triton_to_np_dtype

from ensemble.errors import PipelineError
from ensemble.samples import load_samples

# Ordinary words in a BERT vocabulary; the second range is for models of a smaller one.
ID_RANGES = ((1000, 2000), (1, 50))
# What a BERT takes.
LONGEST = 512
# Height and width of what looks like a picture.
PICTURE = 224

Array = npt.NDArray[Any]


class CannotMakeInput(PipelineError):
    """The config asks for something the doctor has no way to make up."""


@dataclass(frozen=True)
class Text:
    """One text; tokens: word pieces, counted for the built-in sample and estimated for a file of the user's."""

    text: str
    tokens: int


@dataclass(frozen=True)
class Inputs:
    """One request.

    arrays: by input name, with the batch dimension where the model has one
    length: tokens of a row, before any padding
    slots:  what a row of ids takes with its padding; equal to length where nothing was padded
    """

    arrays: Mapping[str, Array]
    types: Mapping[str, str]
    length: int
    slots: int

    def message(self, model: str) -> service_pb2.ModelInferRequest:
        """As it goes over the wire."""
        message = service_pb2.ModelInferRequest(model_name=model)
        for name, array in self.arrays.items():
            message.inputs.add(name=name, datatype=self.types[name]).shape.extend(array.shape)
            raw = serialize_byte_tensor(array).item() if array.dtype == object and array.size else array.tobytes()
            message.raw_input_contents.append(raw)
        return message


def built_in_texts() -> list[Text]:
    """The project's sample: 300 texts, most of them short, with a tail past 512 tokens."""
    return [Text(sample.text, sample.tokens) for sample in load_samples()]


def read_texts(file: Path) -> list[Text]:
    """One text a line. Raises PipelineError if there is none or the file is not UTF-8."""
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise PipelineError(f"{file} cannot be read ({error}): give a UTF-8 file with one text a line") from None
    if not any(lines):
        raise PipelineError(f"{file} has no text: give one text a line")
    # English: a word is about 1.3 word pieces, and [CLS] and [SEP] are two more.
    return [Text(line, 2 + round(1.3 * len(line.split()))) for line in lines if line]


class InputMaker:
    """Makes requests for one model. Raises CannotMakeInput with the input's name where it cannot."""

    def __init__(self, config: Any, texts: Sequence[Text], *, ids: tuple[int, int] = ID_RANGES[0]) -> None:
        """ids: from which token ids are drawn."""
        if not config.input:
            raise CannotMakeInput(f"{config.name}: its config lists no inputs: give requests with --input-data")
        self.config, self._texts, self._ids = config, texts, ids
        self._has_mask = any("mask" in field.name.lower() for field in config.input)
        self.cap = LONGEST
        self.make(0)

    def texts(self) -> Sequence[Text]:
        """What the lengths follow."""
        return self._texts

    def __len__(self) -> int:
        return len(self._texts)

    def make(self, index: int, rows: int = 1) -> Inputs:
        """The index-th request, always the same, with so many equal rows."""
        text = self._texts[index % len(self._texts)]
        length = max(1, min(text.tokens, self.cap))
        random = np.random.default_rng(index)
        arrays, types = {}, {}
        widths = []
        for field in self.config.input:
            if field.optional:
                continue
            types[field.name] = kind = model_config_pb2.DataType.Name(field.data_type)[len("TYPE_") :]
            types[field.name] = kind = "BYTES" if kind == "STRING" else kind
            shape = self._shape(field, kind, rows, length)
            row = self._row(field, kind, shape[1:], min(length, shape[-1]), text.text, random)
            arrays[field.name] = np.ascontiguousarray(np.broadcast_to(row, shape).reshape(self._sent(shape)))
            if kind in ("INT64", "INT32") and int(np.prod(shape[1:])) > 1 and (self._has_mask or _tokens(field)):
                widths.append(shape[-1])
        slots = max(widths, default=length)
        return Inputs(arrays, types, min(length, slots), slots)

    def smaller_ids(self) -> bool:
        """Draw from the next range of ids, with all lengths again; False if there is no smaller one."""
        if self._ids == ID_RANGES[-1]:
            return False
        self._ids, self.cap = ID_RANGES[-1], LONGEST
        return True

    def alike(self) -> int:
        """The index of a short text: of ten, nine are longer."""
        order = sorted(range(len(self._texts)), key=lambda index: self._texts[index].tokens)
        return order[len(order) // 10]

    def longest(self) -> int:
        """The index of the longest text."""
        return max(range(len(self._texts)), key=lambda index: self._texts[index].tokens)

    def _shape(self, field: Any, kind: str, rows: int, length: int) -> tuple[int, ...]:
        """[rows, ...], also for a model without a batch dimension: _sent() takes it off again."""
        if field.is_shape_tensor:
            raise CannotMakeInput(f"{self.config.name}: {field.name} is a shape tensor: give it with --input-data")
        dims = [int(dim) for dim in field.dims]
        if self.config.max_batch_size == 0 and len(dims) > 1 and dims[0] == -1:
            dims = dims[1:]  # a batch dimension that the model keeps to itself
        open_dims = dims.count(-1)
        if kind == "BYTES":
            return (rows, *(1 if dim == -1 else dim for dim in dims))
        size = length if open_dims == 1 else PICTURE
        if kind in ("INT64", "INT32"):
            size = length
        return (rows, *(size if dim == -1 else dim for dim in dims))

    def _sent(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if self.config.max_batch_size:
            return shape
        first = self.config.input[0]
        keeps = len(first.dims) > 1 and first.dims[0] == -1
        return shape if keeps or shape[0] > 1 else shape[1:]

    def _row(self, field: Any, kind: str, dims: tuple[int, ...], length: int, text: str, random: Any) -> Array:
        name = field.name.lower()
        if kind == "BYTES":
            return np.full(dims, text.encode(), dtype=object)
        dtype = triton_to_np_dtype(kind)
        if dtype is None or kind == "BF16":
            raise CannotMakeInput(f"{self.config.name}: {field.name} is {kind}, which numpy has not: use --input-data")
        if np.issubdtype(dtype, np.floating):
            return np.asarray(random.standard_normal(dims)).astype(dtype)
        row = np.zeros(dims, dtype=dtype)
        if int(np.prod(dims)) == 1 or dtype == np.bool_ or "mask" in name:
            row[..., :length] = 1
        elif "type" in name or "segment" in name:
            pass
        elif "position" in name:
            row[...] = np.arange(dims[-1])
        elif kind in ("INT64", "INT32"):
            filled = length if self._has_mask else dims[-1]
            row[..., :filled] = random.integers(*self._ids, size=(*dims[:-1], filled))
        else:
            row[...] = random.integers(0, 100, size=dims)
        return row


def _tokens(field: Any) -> bool:
    """Whether whole numbers are token ids, by their name: of other ones none need be padding."""
    return re.search("input_?ids|token", field.name.lower()) is not None
