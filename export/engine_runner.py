# SPDX-License-Identifier: Apache-2.0
"""Runs a TensorRT engine in this process, on the GPU it was built for. Knows nothing of how it was built or is served.

For checking an engine's numbers before it is installed; the server runs it through its own backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ensemble.errors import ExportError
from ensemble.handlers.scores import Scores
from export.profile import Range

DEVICE = "cuda"


class TensorRtEngine:
    """An engine and one execution context. Called with the engine's inputs by name, any shapes within its profile."""

    def __init__(self, trt: ModuleType, plan: bytes) -> None:
        """trt: the module `tensorrt`. Raises ExportError if the plan does not load here."""
        self._trt = trt
        self._runtime = trt.Runtime(trt.Logger(trt.Logger.ERROR))  # kept: the engine lives no longer than it
        self._engine = self._runtime.deserialize_cuda_engine(plan)
        if self._engine is None:
            raise ExportError(
                f"TensorRT {trt.__version__} does not load the plan: build it on this machine, with this version: "
                "make export TARGET=tensorrt"
            )
        self._context = self._engine.create_execution_context()
        if self._context is None:
            raise ExportError("the GPU has no memory for the engine: end what else runs on it, or lower max_batch_size")
        names = [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]
        self.inputs = [name for name in names if self._engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
        self.outputs = [name for name in names if name not in self.inputs]

    @classmethod
    def open(cls, trt: ModuleType, file: Path) -> TensorRtEngine:
        """The engine in a file."""
        return cls(trt, file.read_bytes())

    def profile(self) -> dict[str, Range]:
        """The optimization profile that the engine really has."""
        return {
            name: Range(*(tuple(shape) for shape in self._engine.get_tensor_profile_shape(name, 0)))
            for name in self.inputs
        }

    def __call__(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Scores:
        """One forward pass. Raises ExportError for shapes outside the profile."""
        try:
            return self._run(inputs)
        except torch.OutOfMemoryError as error:
            raise ExportError(f"the GPU has no memory for a batch ({error}): end what else runs on it") from error

    def _run(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Scores:
        on_gpu = {name: torch.from_numpy(inputs[name]).to(DEVICE) for name in self.inputs}
        for name, tensor in on_gpu.items():
            if not self._context.set_input_shape(name, tuple(tensor.shape)):
                raise ExportError(f"{name}: shape {list(tensor.shape)} is outside the profile {self.profile()[name]}")
            self._context.set_tensor_address(name, tensor.data_ptr())
        results = {}
        for name in self.outputs:
            shape = tuple(self._context.get_tensor_shape(name))
            results[name] = torch.empty(shape, dtype=torch.float32, device=DEVICE)
            self._context.set_tensor_address(name, results[name].data_ptr())
        # A stream of its own, because TensorRT waits at every call on the default one; and the inputs, copied on that,
        # must have arrived.
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        if not self._context.execute_async_v3(stream.cuda_stream):
            raise ExportError("TensorRT did not run the engine; the lines above say why")
        stream.synchronize()
        return Scores(*(results[name].cpu().numpy().astype(np.float32) for name in ("logits", "probabilities")))
