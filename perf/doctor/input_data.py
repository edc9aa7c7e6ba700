# SPDX-License-Identifier: Apache-2.0
"""Requests from a file in the layout of perf_analyzer's --input-data. Knows nothing of servers.

    {"data": [{"text": ["one"]}, {"text": {"content": ["two"], "shape": [1]}}]}

Shapes leave the batch dimension out, as perf_analyzer's do; {"b64": "..."} gives raw bytes.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tritonclient.grpc import model_config_pb2
from tritonclient.utils import triton_to_np_dtype

from ensemble.errors import PipelineError
from perf.doctor.inputs import Array, Inputs, Text


class FileInputs:
    """The same interface as InputMaker."""

    def __init__(self, config: Any, file: Path) -> None:
        self._config, self._file = config, file
        try:
            data = json.loads(file.read_text(encoding="utf-8"))["data"]
            flat = [entry for item in data for entry in (item if isinstance(item, list) else [item])]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PipelineError(
                f'{file} is no input data ({type(error).__name__}: {error}): write {{"data": [{{"INPUT": [...]}}]}}'
            ) from None
        if not flat:
            raise PipelineError(f"{file} has no requests: put at least one under data")
        self._entries: Sequence[dict[str, Any]] = flat
        self.cap = 0
        for index in range(len(flat)):
            self.make(index)

    def texts(self) -> Sequence[Text]:
        """None are known."""
        return []

    def __len__(self) -> int:
        return len(self._entries)

    def make(self, index: int, rows: int = 1) -> Inputs:
        """The index-th request of the file, with so many equal rows."""
        entry = self._entries[index % len(self._entries)]
        arrays, types, length = {}, {}, 1
        for field in self._config.input:
            if field.name not in entry:
                if field.optional:
                    continue
                raise PipelineError(f"{self._file}: a request has no {field.name}: the model needs it")
            kind = model_config_pb2.DataType.Name(field.data_type)[len("TYPE_") :]
            types[field.name] = kind = "BYTES" if kind == "STRING" else kind
            try:
                row = _array(entry[field.name], kind, [int(dim) for dim in field.dims])
            except (ValueError, TypeError) as error:
                raise PipelineError(f"{self._file}: {field.name}: {error}: correct it there") from None
            batch = (rows,) if self._config.max_batch_size else ()
            arrays[field.name] = np.ascontiguousarray(np.broadcast_to(row, (*batch, *row.shape)))
            if kind in ("INT64", "INT32") and row.size > 1:
                length = row.shape[-1]
        return Inputs(arrays, types, length, length)

    def alike(self) -> int:
        """The first."""
        return 0

    def longest(self) -> int:
        """The one with the most elements."""
        return max(range(len(self)), key=lambda index: sum(array.size for array in self.make(index).arrays.values()))


def _array(value: Any, kind: str, dims: list[int]) -> Array:
    shape = value.get("shape") if isinstance(value, dict) else None
    content = value["content"] if isinstance(value, dict) and "content" in value else value
    dtype = object if kind == "BYTES" else triton_to_np_dtype(kind)
    if isinstance(content, dict):
        raw = base64.b64decode(content["b64"])
        array = np.array([raw], dtype=object) if kind == "BYTES" else np.frombuffer(raw, dtype=dtype)
    elif kind == "BYTES":
        array = np.array([str(item).encode() for item in np.ravel(content)], dtype=object)
    else:
        array = np.ravel(np.array(content, dtype=dtype))
    if shape is None:
        if dims.count(-1) > 1:
            raise ValueError(f'dims {dims} leave the shape open: give {{"content": [...], "shape": [...]}}')
        shape = dims
    return array.reshape(shape)
