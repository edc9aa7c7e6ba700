# SPDX-License-Identifier: Apache-2.0
"""A gRPC server in this process that answers as Triton's `text_classifier` would, and counts what it is asked.

For promises of the client that a sound server gives no occasion to keep. Knows nothing of models or tokenizers.
"""

from __future__ import annotations

import socket
import threading
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

WAIT_SECONDS = 10.0

# What a server whose queue is full answers.
FULL = (grpc.StatusCode.UNAVAILABLE, "[request id: <id_unknown>] Exceeds maximum queue size")


def unused_url() -> str:
    """Where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def logit_of(text: str) -> float:
    """What the fake answers for `text`: the text can be told from its logits, so a mixed-up order shows."""
    return float(zlib.crc32(text.encode()) % 100_000)


class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """The server at `url`; its public attributes may be changed at any time."""

    def __init__(self, address: str = "127.0.0.1:0") -> None:
        """address: to listen at; port 0 is a free one."""
        self.labels = ["negative", "positive"]
        self.has_label_file = True
        self.probabilities = [0.25, 0.75]
        self.max_batch_size = 64
        self.ready = deque[bool]()  # one a poll; then True
        self.refusals = deque[tuple[grpc.StatusCode, str]]()  # one a request; then answers
        self.config_refusals = deque[tuple[grpc.StatusCode, str]]()
        self.left_out: set[str] = set()  # outputs
        self.company = 1  # requests that must be in flight before one is answered
        self.open = threading.Event()  # while clear, requests that are not refused hang
        self.open.set()
        self.requests: list[list[str]] = []
        self.headers: list[dict[str, str]] = []
        self.config_requests = 0
        self.in_flight = self.most_in_flight = self.cancelled = 0
        self._changed = threading.Condition()
        self._server = grpc.server(ThreadPoolExecutor(32))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self.url = f"{address.rpartition(':')[0]}:{self._server.add_insecure_port(address)}"
        self._server.start()

    def stop(self) -> None:
        self.open.set()
        self._server.stop(None).wait()

    def wait_until(self, condition) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_SECONDS), "the expected requests did not come"

    def ModelReady(self, request, context):
        return service_pb2.ModelReadyResponse(ready=self.ready.popleft() if self.ready else True)

    def ModelConfig(self, request, context):
        self.config_requests += 1
        if self.config_refusals:
            context.abort(*self.config_refusals.popleft())
        response = service_pb2.ModelConfigResponse()
        response.config.max_batch_size = self.max_batch_size
        return response

    def ModelInfer(self, request, context):
        texts = [text.decode() for text in deserialize_bytes_tensor(request.raw_input_contents[0])]
        assert list(request.inputs[0].shape) == [len(texts), 1]
        answered = threading.Event()
        # Triton does as much when the caller goes away; the handler itself is not told.
        context.add_callback(lambda: self._left(answered))
        with self._changed:
            self.requests.append(texts)
            self.headers.append(dict(context.invocation_metadata()))
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            self._changed.notify_all()
        if not self.refusals:
            self.wait_until(lambda: self.most_in_flight >= self.company)
        if not self.refusals and not any("BAD" in text for text in texts):
            self.open.wait(WAIT_SECONDS)
        answered.set()
        with self._changed:
            self.in_flight -= 1
        self._refuse(texts, context)
        return self._answer(request, texts)

    def _left(self, answered) -> None:
        with self._changed:
            self.cancelled += not answered.is_set()
            self._changed.notify_all()

    def _refuse(self, texts, context) -> None:
        if self.refusals:
            context.abort(*self.refusals.popleft())
        bad = [row for row, text in enumerate(texts) if "BAD" in text]
        if bad:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"in ensemble 'text_classifier', row {bad[0]} is bad")
        if len(texts) > self.max_batch_size:
            message = f"[request id: <id_unknown>] inference request batch-size must be <= {self.max_batch_size}"
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, message)

    def _answer(self, request, texts):
        classes, rows = len(self.probabilities), len(texts)
        outputs = {
            # The first class's is the text's; the others lie around it in the order of the probabilities.
            "logits": np.array(
                [[logit_of(text) + 1000 * (p - self.probabilities[0]) for p in self.probabilities] for text in texts],
                dtype=np.float32,
            ),
            "num_tokens": np.array([[len(text.split()) + 2] for text in texts], dtype=np.int32),
            "truncated": np.array([[len(text.split()) > 510] for text in texts], dtype=np.bool_),
        }
        response = service_pb2.ModelInferResponse(model_name=request.model_name, model_version="1")
        for wanted in request.outputs:
            if wanted.name in self.left_out:
                continue
            output = response.outputs.add(name=wanted.name)
            if wanted.name == "probabilities":
                count = min(classes, wanted.parameters["classification"].int64_param)
                output.datatype, shape, raw = "BYTES", [rows, count], self._class_strings(count, rows)
            else:
                array = outputs[wanted.name]
                output.datatype = {"f": "FP32", "i": "INT32", "b": "BOOL"}[array.dtype.kind]
                shape, raw = array.shape, array.tobytes()
            output.shape.extend(shape)
            response.raw_output_contents.append(raw)
        return response

    def _class_strings(self, count: int, rows: int) -> bytes:
        likeliest_first = sorted(range(len(self.probabilities)), key=lambda index: -self.probabilities[index])
        strings = [f"{self.probabilities[index]:.6f}:{index}" for index in likeliest_first[:count]]
        if self.has_label_file:
            strings = [f"{string}:{self.labels[int(string.split(':')[1])]}" for string in strings]
        return serialize_byte_tensor(np.array([s.encode() for s in strings] * rows, dtype=np.object_)).item()
