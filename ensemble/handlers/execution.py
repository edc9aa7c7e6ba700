# SPDX-License-Identifier: Apache-2.0
"""From the requests of one execute() to their responses: one computation for all, every failure kept to its request.

With gated_execution.py, what speaks to Triton's Python backend; runs inside its stub process. Knows nothing of tokens
or models: a handler says how to read one request, how to compute many at once, and how to write one result.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import triton_python_backend_utils as pb_utils

from ensemble.errors import ConfigError, InvalidRequest

Item = TypeVar("Item")
Result = TypeVar("Result")


class Handler(Protocol[Item, Result]):
    """What a model.py brings. An Item is one request's input, a Result is its output; each may span several rows."""

    def read(self, request: Any) -> Item:
        """Take the input out of a request and check it. Raises InvalidRequest where the caller is at fault."""

    def compute(self, items: list[Item]) -> list[Result]:
        """All items at once; one result per item, in order."""

    def write(self, result: Result, wanted: frozenset[str]) -> list[Any]:
        """The output tensors among those wanted."""


def execute(requests: Sequence[Any], handler: Handler[Item, Result]) -> list[Any]:
    """One response per request, in order, whatever happens: Triton fails the whole batch if one is missing.

    A list, not a response sender for each: a sender costs a message to the server and back, 0.35 to 0.6 ms a request.
    """
    responses: dict[int, Any] = {}
    items: dict[int, Item] = {}
    for index, request in enumerate(requests):
        try:
            items[index] = handler.read(request)
        except Exception as error:
            responses[index] = failure(request, error)
    for index, outcome in _computed(handler, items):
        responses[index] = _response(requests[index], handler, outcome)
    return [responses[index] for index in range(len(requests))]


def _computed(handler: Handler[Item, Result], items: dict[int, Item]) -> list[tuple[int, Result | BaseException]]:
    """All items together; if that fails, one by one, so that only the request at fault pays for it."""
    if not items:
        return []
    try:
        return list(zip(items, handler.compute(list(items.values())), strict=True))
    # Not Exception: a panic in a library written in Rust arrives as a BaseException, and would take the stub with it.
    except BaseException as error:
        if len(items) == 1:
            return [(index, error) for index in items]
        # Said even if every request then succeeds alone: one by one is the slowness this project is about.
        pb_utils.Logger.log_warn(f"a batch of {len(items)} requests failed and runs one by one: {where(error)}")
        return [pair for index, item in items.items() for pair in _computed(handler, {index: item})]


def _response(request: Any, handler: Handler[Item, Result], outcome: Result | BaseException) -> Any:
    if isinstance(outcome, BaseException):
        return failure(request, outcome)
    try:
        tensors = handler.write(outcome, frozenset(request.requested_output_names()))
    except Exception as error:
        return failure(request, error)
    return pb_utils.InferenceResponse(output_tensors=tensors)


def failure(request: Any, error: BaseException) -> Any:
    """The response of a request that failed. The log gets a line without the caller's data for what is our fault."""
    if isinstance(error, InvalidRequest):
        return _error(str(error), pb_utils.TritonError.INVALID_ARG)
    pb_utils.Logger.log_error(f"request {request.request_id() or '(no id)'} failed: {where(error)}")
    return _error(f"internal error ({type(error).__name__}); see the server's log", pb_utils.TritonError.INTERNAL)


def where(error: BaseException) -> str:
    """The error's class and the innermost places it came through; not its message, which may hold a caller's data."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    return f"{type(error).__name__} at {' < '.join(f'{Path(f.filename).name}:{f.lineno}' for f in reversed(frames))}"


def _error(message: str, code: Any) -> Any:
    return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(message, code))


def tensor_of(request: Any, name: str) -> Any:
    """One input as a numpy array, [b, ...] with the batch dimension. Raises InvalidRequest if it cannot be read."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        raise InvalidRequest(f"{name}: the input is missing")
    try:
        array = tensor.as_numpy()
    except Exception as error:  # a BYTES buffer whose lengths lie surfaces here
        raise InvalidRequest(
            f"{name}: the tensor cannot be read ({type(error).__name__}): check its encoding"
        ) from error
    if array.shape[0] == 0:
        raise InvalidRequest(f"{name}: the request has no rows: send at least one")
    return array


def output(name: str, array: Any) -> Any:
    """An output tensor from a numpy array [b, ...]."""
    return pb_utils.Tensor(name, array)


def version_folder(args: dict[str, str]) -> Path:
    """The folder of the version being loaded: model.py and what export installed beside it."""
    return Path(args["model_repository"], args["model_version"])


class HandlerMetrics:
    """What a handler tells on Triton's metrics port; nothing where the server runs without metrics.

    onepass_model_calls_total{model=...}: forward passes of a classifier, tokenizer calls. Over nv_inference_exec_count
    it is calls per execute(): the number that tells one batch, one pass from a loop over the requests, which none of
    Triton's own metrics does.

    onepass_model_start_time_seconds{model=...}: when the model was loaded, since the epoch. It changes when a dead stub
    was replaced.
    """

    def __init__(self, args: dict[str, str]) -> None:
        self._reported = 0
        self._calls: Any = None
        kinds = pb_utils.MetricFamily
        try:
            self._families = (  # a metric does not keep its family alive
                kinds(
                    name="onepass_model_calls_total",
                    description="Calls of the model or tokenizer by its handler",
                    kind=kinds.COUNTER,
                ),
                kinds(
                    name="onepass_model_start_time_seconds",
                    description="When the handler was loaded, in seconds since the epoch",
                    kind=kinds.GAUGE,
                ),
            )
            labels = {"model": args["model_name"]}
            self._calls, self._started = (family.Metric(labels=labels) for family in self._families)
            self._started.set(time.time())
        except pb_utils.TritonModelException:
            pass

    def report_calls(self, total: int) -> None:
        """The calls made since the model was loaded."""
        if self._calls is not None:
            self._calls.increment(total - self._reported)
            self._reported = total


class Parameters:
    """The `parameters` of a config.pbtxt. A missing or unreadable one refuses the model with its name."""

    def __init__(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        self._model = config["name"]
        self._values = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}

    def number(self, key: str, kind: type[int] | type[float]) -> Any:
        """A parameter that is at least 0, as int or float."""
        text = self._values.get(key)
        try:
            value = kind(text)  # type: ignore[arg-type]
            if not 0 <= value < float("inf"):
                raise ValueError
        except (TypeError, ValueError):
            raise ConfigError(
                f'{self._model}: parameter "{key}" is {"missing" if text is None else repr(text)}: '
                f"set it to {'a whole number' if kind is int else 'a number'} of at least 0 in config.pbtxt"
            ) from None
        return value
