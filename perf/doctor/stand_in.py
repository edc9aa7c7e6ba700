# SPDX-License-Identifier: Apache-2.0
"""A stand-in for triton_python_backend_utils, enough of it that a handler cannot tell it from Triton's.

Runs in the probe's child process (probe_child.py). Keeps what a handler sends through a response sender, and counts the
requests a handler makes to other models (BLS), answering them from those models' configs.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from tritonclient.utils import np_to_triton_dtype

FINAL = 1


class TritonModelException(Exception):
    """As Triton names it."""


class TritonError:
    """An error with its code."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str = "", code: int = INTERNAL) -> None:
        self._message, self._code = message, code

    def message(self) -> str:
        """What went wrong."""
        return self._message

    def code(self) -> int:
        """Its kind."""
        return self._code

    __str__ = message


class Tensor:
    """A named array."""

    def __init__(self, name: str, array: Any) -> None:
        if not isinstance(array, np.ndarray):
            raise TritonModelException(f"Tensor {name} takes a numpy array, not {type(array).__name__}")
        self._name, self._array, self._other = name, array, None

    @classmethod
    def from_dlpack(cls, name: str, tensor: Any) -> Tensor:
        """Of another framework's tensor."""
        tensor = tensor.detach().cpu() if hasattr(tensor, "detach") else tensor
        return cls(name, np.from_dlpack(tensor) if hasattr(tensor, "__dlpack__") else np.asarray(tensor))

    def to_dlpack(self) -> Any:
        """For another framework."""
        # Frameworks refuse memory that may not be written to.
        return self._array.copy().__dlpack__()

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.copy().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def name(self) -> str:
        """Of the tensor."""
        return self._name

    def as_numpy(self) -> Any:
        """Its array."""
        return self._array

    def shape(self) -> tuple[int, ...]:
        """Its dims, with the batch dimension."""
        return tuple(self._array.shape)

    def triton_dtype(self) -> str:
        """Its type by Triton's name."""
        return str(np_to_triton_dtype(self._array.dtype))

    def is_cpu(self) -> bool:
        """Always: the probe sends nothing from a GPU."""
        return True


class InferenceResponse:
    """What a handler answers."""

    def __init__(self, output_tensors: Any = (), error: Any = None, parameters: Any = None) -> None:
        self._outputs, self._error, self._parameters = list(output_tensors or ()), error, parameters

    def output_tensors(self) -> list[Tensor]:
        """The outputs."""
        return self._outputs

    def has_error(self) -> bool:
        """Whether it is an error."""
        return self._error is not None

    def error(self) -> Any:
        """The error, or None."""
        return self._error

    def parameters(self) -> str:
        """As JSON."""
        return json.dumps(self._parameters or {})


class ResponseSender:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.final = False

    def send(self, response: Any = None, flags: int = 0) -> None:
        """One response, or only the flag that ends them."""
        if self.final:
            raise TritonModelException("a response was sent after the final one")
        if response is not None:
            self.sent.append(response)
        self.final = bool(flags & FINAL)

    def is_cancelled(self) -> bool:
        """Never."""
        return False


class InferenceRequest:
    """What a handler is handed, and what it makes to ask another model."""

    answer: Callable[[InferenceRequest], InferenceResponse]
    # Of requests to other models: those under way, and the most that ever were at once.
    under_way = most_under_way = 0

    def __init__(
        self,
        request_id: str = "",
        correlation_id: Any = 0,
        inputs: Any = (),
        requested_output_names: Any = (),
        model_name: str = "",
        *more: Any,
        **options: Any,
    ) -> None:
        self._id, self._inputs, self._wanted = request_id, list(inputs), list(requested_output_names)
        self._model, self._correlation, self._options = model_name, correlation_id, options
        self.sender = ResponseSender()

    def inputs(self) -> list[Tensor]:
        """All inputs."""
        return self._inputs

    def request_id(self) -> str:
        """As the client gave it."""
        return self._id

    def correlation_id(self) -> Any:
        """Of a sequence; 0."""
        return self._correlation

    def requested_output_names(self) -> list[str]:
        """What the caller wants."""
        return self._wanted

    def model_name(self) -> str:
        """Which model it is for."""
        return self._model

    def get_response_sender(self) -> ResponseSender:
        """Where decoupled handlers send to."""
        return self.sender

    def is_cancelled(self) -> bool:
        """Never."""
        return False

    def flags(self) -> int:
        """Of a sequence; none."""
        return 0

    def timeout(self) -> int:
        """None."""
        return 0

    def parameters(self) -> str:
        """As JSON."""
        return json.dumps(self._options.get("parameters") or {})

    def set_release_flags(self, flags: int) -> None:
        """Of no concern here."""

    def preferred_memory(self) -> None:
        """None."""

    def trace(self) -> None:
        """None."""

    def exec(self, decoupled: bool = False, **options: Any) -> Any:
        """Ask the other model, and wait for it: long enough for another thread to ask as well."""
        with self._asking():
            time.sleep(0.001)
            response = type(self).answer(self)
        return iter([response]) if decoupled else response

    async def async_exec(self, decoupled: bool = False, **options: Any) -> Any:
        """The same, awaited."""
        with self._asking():
            await asyncio.sleep(0.001)
            response = type(self).answer(self)
        return iter([response]) if decoupled else response

    @contextmanager
    def _asking(self) -> Iterator[None]:
        InferenceRequest.under_way += 1
        InferenceRequest.most_under_way = max(InferenceRequest.most_under_way, InferenceRequest.under_way)
        try:
            yield
        finally:
            InferenceRequest.under_way -= 1
