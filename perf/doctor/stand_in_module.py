# SPDX-License-Identifier: Apache-2.0
"""The module triton_python_backend_utils itself, put together from stand_in.py. Runs in the probe's child process."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import numpy as np
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor, triton_to_np_dtype

from perf.doctor.stand_in import (
    FINAL,
    InferenceRequest,
    InferenceResponse,
    ResponseSender,
    Tensor,
    TritonError,
    TritonModelException,
)


class Anything:
    """Stands for what the probe has no use for: loggers, metrics, memory preferences."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return Anything()

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Whatever is called."""
        return Anything()


def build(folder: str) -> types.ModuleType:
    """The module. folder: of the model, as get_model_dir() says it with the version."""
    module = types.ModuleType("triton_python_backend_utils")
    members: dict[str, Any] = {
        "Tensor": Tensor,
        "InferenceRequest": InferenceRequest,
        "InferenceResponse": InferenceResponse,
        "InferenceResponseSender": ResponseSender,
        "TritonError": TritonError,
        "TritonModelException": TritonModelException,
        "Logger": Anything(),
        "MetricFamily": _MetricFamily,
        "PreferredMemory": Anything,
        "TRITONSERVER_RESPONSE_COMPLETE_FINAL": FINAL,
        "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START": 1,
        "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END": 2,
        "TRITONSERVER_MEMORY_CPU": 0,
        "TRITONSERVER_MEMORY_GPU": 1,
        "get_input_tensor_by_name": lambda request, name: _named(request.inputs(), name),
        "get_output_tensor_by_name": lambda response, name: _named(response.output_tensors(), name),
        "get_input_config_by_name": lambda config, name: _entry(config["input"], name),
        "get_output_config_by_name": lambda config, name: _entry(config["output"], name),
        "triton_string_to_numpy": _string_to_numpy,
        "triton_to_numpy_type": _string_to_numpy,
        "numpy_to_triton_type": lambda dtype: Tensor("", np.zeros(0, dtype)).triton_dtype(),
        "using_decoupled_model_transaction_policy": _decoupled,
        "serialize_byte_tensor": serialize_byte_tensor,
        "deserialize_bytes_tensor": deserialize_bytes_tensor,
        "is_model_ready": lambda *args, **options: True,
        "load_model": lambda *args, **options: None,
        "unload_model": lambda *args, **options: None,
        "get_model_dir": lambda: folder,
        "ModelConfig": Anything,
    }
    for name, member in members.items():
        setattr(module, name, member)
    return module


class _MetricFamily:
    """Counts nothing."""

    COUNTER, GAUGE, HISTOGRAM = range(3)

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def Metric(self, *args: Any, **options: Any) -> Anything:
        """As Triton names it."""
        return Anything()


def _named(tensors: Any, name: str) -> Any:
    return next((tensor for tensor in tensors if tensor.name() == name), None)


def _entry(entries: Any, name: str) -> Any:
    return next((entry for entry in entries if entry["name"] == name), None)


def _string_to_numpy(kind: str) -> Any:
    name = str(kind).removeprefix("TYPE_")
    return np.object_ if name in ("STRING", "BYTES") else triton_to_np_dtype(name)


def _decoupled(config: Mapping[str, Any]) -> bool:
    return bool(config.get("model_transaction_policy", {}).get("decoupled", False))
