# SPDX-License-Identifier: Apache-2.0
"""Raw requests to a real server, as a client that is not ours would send them."""

from __future__ import annotations

import http.client
import json
import struct
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import tritonclient.grpc as grpc
from tritonclient.grpc import service_pb2

from ensemble.launcher.server import Server

TOLERANCE = 1e-4  # of a logit, export's for FP32
TYPES = {np.dtype(np.int64): "INT64", np.dtype(np.int32): "INT32", np.dtype(object): "BYTES"}


def texts_input(texts: Sequence[str | bytes], kind: type = grpc.InferInput) -> object:
    """`text`, BYTES [rows, 1]."""
    array = np.array([[text if isinstance(text, bytes) else text.encode()] for text in texts], dtype=object)
    return tensor_input("text", array.reshape(len(texts), 1), kind)


def tensor_input(name: str, array: np.ndarray, kind: type = grpc.InferInput) -> object:
    """Any input, with the type of its array."""
    result = kind(name, list(array.shape), TYPES[array.dtype])
    result.set_data_from_numpy(array)
    return result


def raw_request(shape: list[int], contents: bytes, **fields: str) -> object:
    """`text` of this shape, and these bytes for its content."""
    request = service_pb2.ModelInferRequest(model_name="text_classifier")
    tensor = request.inputs.add(name=fields.get("name", "text"), datatype=fields.get("datatype", "BYTES"))
    tensor.shape.extend(shape)
    request.raw_input_contents.append(contents)
    return request


def element(text: bytes, length: int | None = None) -> bytes:
    """A string as the protocol has it, with a length that may lie."""
    return struct.pack("<I", len(text) if length is None else length) + text


def http_json(server: Server, body: object) -> tuple[int, dict]:
    """POST JSON to the ensemble; status and body."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.http_port}/v2/models/text_classifier/infer",
        data=body if isinstance(body, bytes) else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def http_call(server: Server, method: str, path: str, body: object, headers: dict[str, str]) -> tuple[int, str]:
    """Status and body of one HTTP call."""
    connection = http.client.HTTPConnection(server.http_address, server.http_port, timeout=30)
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    response = connection.getresponse()
    status, text = response.status, response.read().decode()
    connection.close()
    return status, text


def in_flight_together(client: grpc.InferenceServerClient, model: str, requests: Sequence[list]) -> list:
    """Send all requests before waiting for any; the results in order, exceptions among them."""
    results: list = [None] * len(requests)
    left = threading.Semaphore(0)

    def keep(index: int, /, result: object, error: object) -> None:
        results[index] = error or result
        left.release()

    for index, request in enumerate(requests):
        client.async_infer(model, request, callback=partial(keep, index))
    for _ in requests:
        assert left.acquire(timeout=120)
    return results


@dataclass(frozen=True)
class Counts:
    """A model's counters from the statistics API."""

    requests: int
    rows: int
    executions: int
    failures: int
    batches: dict[int, int]

    @classmethod
    def read(cls, client: grpc.InferenceServerClient, model: str) -> Counts:
        """The counters since the server started."""
        stats = client.get_inference_statistics(model).model_stats[0]
        return cls(
            stats.inference_stats.success.count,
            stats.inference_count,
            stats.execution_count,
            stats.inference_stats.fail.count,
            {entry.batch_size: entry.compute_infer.count for entry in stats.batch_stats},
        )

    def since(self, before: Counts) -> Counts:
        """What was counted after `before`."""
        return Counts(
            self.requests - before.requests,
            self.rows - before.rows,
            self.executions - before.executions,
            self.failures - before.failures,
            {
                size: count - before.batches.get(size, 0)
                for size, count in self.batches.items()
                if count > before.batches.get(size, 0)
            },
        )
