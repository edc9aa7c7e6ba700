# SPDX-License-Identifier: Apache-2.0
"""What the probe's stand-in answers when a handler asks another model (BLS): zeros of the shapes its config promises.

Runs in the probe's child process. The other model is not run; that it was asked is what counts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2
from tritonclient.utils import triton_to_np_dtype

from perf.doctor.stand_in import InferenceRequest, InferenceResponse, Tensor


def answer_from_configs(repository: Path) -> Callable[[InferenceRequest], InferenceResponse]:
    """Answers by <repository>/<model>/config.pbtxt; without one, each requested output is FP32 [rows, 2]."""

    def answer(request: InferenceRequest) -> InferenceResponse:
        shape = request.inputs()[0].shape() if request.inputs() else (1,)
        rows, length = (shape[0] if shape else 1), (shape[-1] if len(shape) > 1 else 1)
        declared = {field.name: field for field in _config(repository / request.model_name()).output}
        names = request.requested_output_names() or list(declared)
        return InferenceResponse([Tensor(name, _zeros(declared.get(name), rows, length)) for name in names])

    return answer


def _config(folder: Path) -> Any:
    config = model_config_pb2.ModelConfig()
    file = folder / "config.pbtxt"
    return text_format.Parse(file.read_text(encoding="utf-8"), config) if file.is_file() else config


def _zeros(field: Any, rows: int, length: int) -> Any:
    if field is None:
        return np.zeros((rows, 2), dtype=np.float32)
    kind = model_config_pb2.DataType.Name(field.data_type)[len("TYPE_") :]
    whole = kind.startswith(("INT", "UINT"))
    dims = [(max(length, 8) if whole else 2) if dim == -1 else int(dim) for dim in field.dims]
    if kind == "STRING":
        return np.full((rows, *dims), b"text", dtype=object)
    return np.full((rows, *dims), 1 if whole else 0, dtype=triton_to_np_dtype(kind))
