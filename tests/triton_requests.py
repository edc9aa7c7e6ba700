# SPDX-License-Identifier: Apache-2.0
"""Raw requests to a real server, as a client that is not ours would send them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import tritonclient.grpc as grpc

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
