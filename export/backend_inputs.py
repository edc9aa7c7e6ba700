# SPDX-License-Identifier: Apache-2.0
"""What Triton's TensorRT backend makes of the requests of one batch: the engine's inputs, and how large they can be.

A model of it, so that a graph can be fed here what the backend will feed the engine there. It follows classifier's
config.pbtxt (ensemble.contract.read_config) and knows nothing of ONNX or TensorRT. Read in triton-inference-server:

    tensorrt_backend  src/instance_state.cc, ModelInstanceState::Run: which input is filled how
    backend           src/backend_input_collector.cc, BatchInputShape and ProcessBatchInput: the batch inputs
    core              src/model_config_utils.cc, ValidateBatchIO: one source each, INT32 or FP32
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tritonclient.grpc import model_config_pb2

from ensemble.errors import ExportError
from ensemble.handlers.packing import length_carrier

Array = npt.NDArray[Any]

# The tensor by which the tokenizer tells the padded length inside attention, made by length_carrier() of
# ensemble/handlers/packing.py. A config says a tensor's type and dims, but not that.
CARRIER = "length_carrier"

# What a batch input holds where the backend writes nothing. Triton promises nothing about it; here it is no index and
# no length of anything, so that a graph which reads it is caught.
UNWRITTEN: dict[str, Array] = {
    "TYPE_INT32": np.array(0x7BADF00D, dtype=np.int32),
    "TYPE_FP32": np.array(np.nan, dtype=np.float32),
}


def engine_inputs(config: Any, requests: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """The engine's inputs by name, for one batch: at least one request, in the order of the batch.

    requests: each maps every input of the config to its array [b, ...], b the rows of that request.

    An input with allow_ragged_batch: [elements of all requests], end to end. Any other: [rows of all requests, ...].
    Batch inputs: see _batch_input. Raises ExportError for requests that the batcher would not have put together, and
    for a kind or type of batch input that is not modelled.
    """
    inputs: dict[str, Array] = {}
    for tensor in config.input:
        arrays = [request[tensor.name] for request in requests]
        if tensor.allow_ragged_batch:
            inputs[tensor.name] = np.concatenate([array.reshape(-1) for array in arrays])
        else:
            inputs[tensor.name] = _stacked(tensor.name, arrays)
    for entry in config.batch_input:
        made = _batch_input(entry, [request[entry.source_input[0]].shape for request in requests])
        inputs |= dict.fromkeys(entry.target_name, made)
    return inputs


def _stacked(name: str, arrays: Sequence[Array]) -> Array:
    """Rows of all requests, one below the other.

    The backend takes the row's shape from the first request and copies all bytes behind each other. That is right
    because the batcher ends a batch where the next request's rows differ in shape (core, src/scheduler_utils.cc,
    RequiredEqualInputs::HasEqualInputs).
    """
    if len({array.shape[1:] for array in arrays}) > 1:
        raise ExportError(
            f"{name}: one batch has rows of the shapes {sorted({array.shape[1:] for array in arrays})}, which Triton "
            "never puts together: set allow_ragged_batch in classifier/config.pbtxt, or give requests of one shape"
        )
    return np.concatenate(arrays)


def _batch_input(entry: Any, shapes: Sequence[tuple[int, ...]]) -> Array:
    """One batch input from the shapes of its source in each request, batch dimension first: [b, ...].

    BATCH_ITEM_SHAPE_FLATTEN          [rows of all requests * dims of a row]: a row's shape, again for each row of its
                                      request. For rows of one dimension, as ours are: one length per row.
    BATCH_MAX_ELEMENT_COUNT_AS_SHAPE  [the most elements any request has], all its rows together. Nothing is written.
    BATCH_ELEMENT_COUNT               [requests]: the elements of each, all its rows together.
    """
    kind = model_config_pb2.BatchInput.Kind.Name(entry.kind)
    data_type = model_config_pb2.DataType.Name(entry.data_type)
    if data_type not in UNWRITTEN:
        raise ExportError(
            f"batch_input {list(entry.target_name)} is {data_type}: set TYPE_INT32 or TYPE_FP32, Triton makes no other"
        )
    unwritten = UNWRITTEN[data_type]
    if kind == "BATCH_ITEM_SHAPE_FLATTEN":
        return np.array([size for rows, *row in shapes for size in row * rows], dtype=unwritten.dtype)
    if kind == "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE":
        return np.full(max(math.prod(shape) for shape in shapes), unwritten)
    if kind == "BATCH_ELEMENT_COUNT":
        return np.array([math.prod(shape) for shape in shapes], dtype=unwritten.dtype)
    raise _not_modelled(kind)


def input_bounds(config: Any, max_sequence_length: int) -> dict[str, list[tuple[int, int]]]:
    """For each engine input the smallest and the largest size of each of its dims; every one of them occurs.

    Over all batches of 1 to max_batch_size rows, of 1 to max_sequence_length ids each, cut into requests in any way.
    Rows have one dimension, as ensemble/contract.py demands. Holds for what the tokenizer sends: a client that calls
    the classifier itself can send a carrier of any size. Raises ExportError for a kind that is not modelled.
    """
    rows, longest = int(config.max_batch_size), max_sequence_length
    bounds: dict[str, list[tuple[int, int]]] = {}
    for tensor in config.input:
        if tensor.allow_ragged_batch:
            # Also the carrier's: b * ceil(L / b) <= b * L, so no cut into requests beats single rows, where both are L.
            bounds[tensor.name] = [(1, rows * longest)]
        else:
            bounds[tensor.name] = [(1, rows), *((1, longest) if dim == -1 else (dim, dim) for dim in tensor.dims)]
    for entry in config.batch_input:
        kind = model_config_pb2.BatchInput.Kind.Name(entry.kind)
        if kind in ("BATCH_ITEM_SHAPE_FLATTEN", "BATCH_ELEMENT_COUNT"):
            largest = rows  # one entry per row; one per request, and a request has at least one row
        elif kind == "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE":
            largest = _most_elements(entry.source_input[0], rows, longest)
        else:
            raise _not_modelled(kind)
        bounds |= {name: [(1, largest)] for name in entry.target_name}
    return bounds


def _most_elements(source: str, rows: int, longest: int) -> int:
    """The most elements of `source` in one request of 1 to `rows` rows of 1 to `longest` ids.

    For the carrier that is b * ceil(L / b): it never falls with L, so L is the longest, and every b is tried, because
    it jumps with b. Always below L + b, so about one row: 567 for up to 64 rows of up to 512, by 63 rows.
    """
    if source == CARRIER:
        return max(length_carrier(b, longest).size for b in range(1, rows + 1))
    return rows * longest


def _not_modelled(kind: str) -> ExportError:
    return ExportError(
        f"batch_input of kind {kind} is not modelled: use BATCH_ITEM_SHAPE_FLATTEN and "
        "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE in classifier/config.pbtxt"
    )
