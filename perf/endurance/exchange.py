# SPDX-License-Identifier: Apache-2.0
"""One request for the ensemble as it goes over gRPC or HTTP, written by hand, and its answer.

Knows nothing of what is right. Not ensemble.Client: that refuses locally much of what a server must be able to
refuse, and sends nothing over HTTP.
"""

from __future__ import annotations

import http.client
import json
import struct
from collections.abc import Mapping, Sequence
from http.client import HTTPMessage
from types import TracebackType
from typing import Any, Protocol

import grpc
import numpy as np
from tritonclient.grpc import InferResult, service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor

from ensemble.contract import ENSEMBLE
from perf.closed_loop import CHANNEL
from perf.endurance.reference import Answer

GRPC, JSON, BINARY = TRANSPORTS = ("grpc", "http-json", "http-binary")
OUTPUTS = ("logits", "probabilities", "num_tokens", "truncated")
# More than any model has; Triton gives as many as there are.
ALL_CLASSES = 2**31 - 1
PATH = f"/v2/models/{ENSEMBLE}/infer"
HEADER_LENGTH = "Inference-Header-Content-Length"
TYPES = {"FP32": np.float32, "INT32": np.int32, "INT64": np.int64, "BOOL": np.bool_}
# A connection of its own for each channel, and not the one that another channel has already.
OWN_CONNECTION = [*CHANNEL, ("grpc.use_local_subchannel_pool", 1)]


class Refused(Exception):
    """The server answered with an error. status: gRPC's name of it, or HTTP's number."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status, self.message = status, message


class Served(Protocol):
    """Where a server listens."""

    @property
    def url(self) -> str:
        """Of gRPC."""

    @property
    def http_address(self) -> str:
        """Of HTTP, without its port."""

    @property
    def http_port(self) -> int:
        """Of HTTP."""


class Caller:
    """One client: a gRPC channel and an HTTP connection of its own, kept from one request to the next."""

    def __init__(self, server: Served) -> None:
        self.channel = grpc.insecure_channel(server.url, options=OWN_CONNECTION)
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)
        self._host, self._port = server.http_address, server.http_port
        self._http: http.client.HTTPConnection | None = None

    def __enter__(self) -> Caller:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close both connections."""
        self.channel.close()
        self.hang_up()

    def hang_up(self) -> None:
        """Close the HTTP connection; the next request makes another."""
        if self._http:
            self._http.close()
            self._http = None

    def ask(self, transport: str, texts: Sequence[str], *, strings: bool, seconds: float) -> Answer:
        """The answer to these texts as the rows of one request. strings: ask for `value:index:label`.

        Raises Refused with the server's reason; OSError or http.client.HTTPException if there is no answer over HTTP
        (over gRPC that is a Refused too).
        """
        encoded = [text.encode() for text in texts]
        if transport == GRPC:
            try:
                return from_message(self.stub.ModelInfer(message(encoded, strings=strings), timeout=seconds))
            except grpc.RpcError as error:
                raise refused(error) from error
        body, headers = http_body(encoded, strings=strings, binary=transport == BINARY)
        return from_http(*self.post(body, headers, seconds))

    def post(self, body: bytes, headers: Mapping[str, str], seconds: float) -> tuple[bytes, HTTPMessage]:
        """Send a body over HTTP; the answer's body and headers. Raises as ask() does."""
        try:
            connection = self.sent(body, headers, seconds)
            with connection.getresponse() as response:
                answer = response.read()
                if response.status != http.HTTPStatus.OK:
                    raise Refused(str(response.status), answer.decode(errors="replace"))
                return answer, response.headers
        except (OSError, http.client.HTTPException):
            self.hang_up()
            raise

    def sent(self, body: bytes, headers: Mapping[str, str], seconds: float) -> http.client.HTTPConnection:
        """Send a body over HTTP, and leave the answer to the caller."""
        if not self._http:
            self._http = http.client.HTTPConnection(self._host, self._port, timeout=seconds)
        self._http.request("POST", PATH, body, dict(headers))
        return self._http


def refused(error: grpc.RpcError) -> Refused:
    """What a gRPC error says, without its wrapping."""
    return Refused(error.code().name, str(error.details()))


def elements(texts: Sequence[bytes]) -> bytes:
    """BYTES on the wire: each with its length in front, 4 bytes, little-endian."""
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


def message(texts: Sequence[bytes], *, strings: bool = False, model: str = ENSEMBLE) -> service_pb2.ModelInferRequest:
    """A request over gRPC."""
    request = service_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name="text", datatype="BYTES").shape.extend([len(texts), 1])
    request.raw_input_contents.append(elements(texts))
    for name in OUTPUTS:
        output = request.outputs.add(name=name)
        if strings and name == "probabilities":
            output.parameters["classification"].int64_param = ALL_CLASSES
    return request


def from_message(response: service_pb2.ModelInferResponse) -> Answer:
    """Its answer."""
    result = InferResult(response)
    return _answer({name: result.as_numpy(name) for name in OUTPUTS})


def http_body(texts: Sequence[bytes], *, strings: bool = False, binary: bool = False) -> tuple[bytes, dict[str, str]]:
    """A request over HTTP, body and headers. binary: texts in, and numbers out, behind the JSON instead of in it."""
    head = request_json(texts, strings=strings, binary=binary)
    if not binary:
        return json.dumps(head).encode(), {"Content-Type": "application/json"}
    first, tensors = json.dumps(head).encode(), elements(texts)
    return first + tensors, {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(first))}


def request_json(texts: Sequence[bytes], *, strings: bool, binary: bool) -> dict[str, Any]:
    """The JSON of a request over HTTP."""
    tensor: dict[str, Any] = {"name": "text", "shape": [len(texts), 1], "datatype": "BYTES"}
    if binary:
        tensor["parameters"] = {"binary_data_size": len(elements(texts))}
    else:
        tensor["data"] = [text.decode() for text in texts]
    outputs: list[dict[str, Any]] = [{"name": name, "parameters": {"binary_data": binary}} for name in OUTPUTS]
    if strings:
        outputs[OUTPUTS.index("probabilities")]["parameters"]["classification"] = ALL_CLASSES
    return {"inputs": [tensor], "outputs": outputs}


def from_http(body: bytes, headers: HTTPMessage) -> Answer:
    """The answer of a request over HTTP."""
    length = int(headers.get(HEADER_LENGTH, len(body)))
    tensors, place = {}, length
    for output in json.loads(body[:length])["outputs"]:
        size = output.get("parameters", {}).get("binary_data_size")
        if size is None:
            flat = np.array(output["data"], dtype=TYPES.get(output["datatype"], np.object_))
        elif output["datatype"] == "BYTES":
            flat = deserialize_bytes_tensor(body[place : place + size])
        else:
            flat = np.frombuffer(body[place : place + size], dtype=TYPES[output["datatype"]])
        tensors[output["name"]] = flat.reshape(output["shape"])
        place += size or 0
    return _answer(tensors)


def _answer(tensors: Mapping[str, Any]) -> Answer:
    probabilities, strings = tensors["probabilities"], None
    if probabilities.dtype == np.object_:
        strings = [[s.decode() if isinstance(s, bytes) else str(s) for s in row] for row in probabilities]
        probabilities = None
    return Answer(
        tensors["logits"],
        probabilities,
        strings,
        tensors["num_tokens"][:, 0].tolist(),
        tensors["truncated"][:, 0].tolist(),
    )
