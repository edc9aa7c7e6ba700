# SPDX-License-Identifier: Apache-2.0
"""Triton's statistics of a model and its steps between two readings: batches by size, and where the time went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tritonclient.grpc as triton

from ensemble.launcher.server import Server

TOKENIZER = "tokenizer"
# Where a request's time goes, in this order.
STAGES = ("client", "queue", "tokenize", "input", "infer", "output")


@dataclass(frozen=True)
class Spent:
    """What one model did; nanoseconds are summed over requests.

    batches:    executions of each batch size
    batch_ns:   time that the executions took, each counted once
    """

    requests: int
    failed: int
    total_ns: int
    queue_ns: int
    input_ns: int
    infer_ns: int
    output_ns: int
    batches: dict[int, int]
    batch_ns: int

    def since(self, before: Spent) -> Spent:
        """What came after `before`."""
        sums = {
            name: getattr(self, name) - getattr(before, name) for name in self.__dataclass_fields__ if name != "batches"
        }
        batches = {size: count - before.batches.get(size, 0) for size, count in self.batches.items()}
        return Spent(**sums, batches={size: count for size, count in sorted(batches.items()) if count})


def read(server: Server, models: tuple[str, ...]) -> dict[str, Spent]:
    """Of each of the models, as it is now."""
    with triton.InferenceServerClient(server.url, channel_args=[("grpc.enable_http_proxy", 0)]) as client:
        return {model: _spent(client.get_inference_statistics(model).model_stats[0]) for model in models}


def stages(spent: dict[str, Spent], called: str, step: str, client_ms: float) -> dict[str, float]:
    """Milliseconds a request spent in each of STAGES, on average.

    called:    the model that clients call
    step:      the one that classifies
    client_ms: mean latency as the client saw it; what the server does not account for is `client`
    """
    requests = max(1, spent[called].requests)
    classify, tokenize = spent[step], spent.get(TOKENIZER)
    milliseconds = {
        "queue": classify.queue_ns + (tokenize.queue_ns if tokenize else 0),
        "tokenize": tokenize.input_ns + tokenize.infer_ns + tokenize.output_ns if tokenize else 0,
        "input": classify.input_ns,
        "infer": classify.infer_ns,
        "output": classify.output_ns,
    }
    found = {name: value / requests / 1e6 for name, value in milliseconds.items()}
    return {"client": max(0.0, client_ms - sum(found.values())), **found}


def _spent(stats: Any) -> Spent:
    inference = stats.inference_stats
    return Spent(
        requests=int(inference.success.count),
        failed=int(inference.fail.count),
        total_ns=int(inference.success.ns),
        queue_ns=int(inference.queue.ns),
        input_ns=int(inference.compute_input.ns),
        infer_ns=int(inference.compute_infer.ns),
        output_ns=int(inference.compute_output.ns),
        batches={int(batch.batch_size): int(batch.compute_infer.count) for batch in stats.batch_stats},
        batch_ns=sum(int(batch.compute_infer.ns) for batch in stats.batch_stats),
    )
