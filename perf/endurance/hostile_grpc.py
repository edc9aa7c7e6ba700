# SPDX-License-Identifier: Apache-2.0
"""What nobody should send over gRPC: messages that are none, and sound ones with one thing wrong.

Each is made from a random generator alone, so that a number and a seed make it again. Knows the service's messages
and what the models of this repository take, nothing of connections. Texts as long as the server takes are good, and
here because those one byte longer are not: of these it is known what must come (Call.good).
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from tritonclient.grpc.service_pb2 import ModelInferRequest as Request

from ensemble.contract import ENSEMBLE
from perf.endurance.exchange import message
from perf.endurance.hostile_texts import strange

SERVICE = "/inference.GRPCInferenceService/"
INFER, STREAM = SERVICE + "ModelInfer", SERVICE + "ModelStreamInfer"
# Not sent: what is known of this release of the server, whoever sends it.
KNOWN = {
    "tensors of shape [0, 0] straight at baseline": "never answered, until the caller's deadline",
}
# Those that only look. What else there is changes the server, and is for who holds the key.
LOOKING = tuple(
    SERVICE + name
    for name in ("ServerLive", "ServerMetadata", "ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics")
)
VOCABULARY = 30_522
ODD_SIZES = (-1, 0, 1, 2, 3, 63, 64, 65, 512, 513, 2**15, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, -(2**31), -(2**63))
ODD_LENGTHS = (0, 1, 2**8, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32 - 4)
TYPES = ("BYTES", "BOOL", "INT8", "INT32", "INT64", "UINT64", "FP16", "FP32", "FP64", "BF16", "", "STRANGE", "bytes")
NAMES = ("", "text", "texts", "input_ids", "logits", "../text", "text\0", "x" * 10_000, "\N{PILE OF POO}")
PARAMETERS = (
    "classification", "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset", "sequence_id",
    "sequence_start", "sequence_end", "priority", "timeout", "binary_data", "binary_data_size", "headers",
    "triton_enable_empty_final_response", "", "triton_",
)  # fmt: skip
# Bytes of a text, more than the longest that the server takes; whether it must be answered.
AROUND = {"text up to the limit": ((-1, 0), True), "text over the limit": ((1, 1, 1_000_000), False)}
FILLINGS = (b"x", b"a ", b"\xe2\x82\xac")


@dataclass(frozen=True)
class Call:
    """One call. kind: what is wrong with it. payload: the message's bytes.

    good: True if it must be answered, False if it must be refused as the caller's mistake; None where either will do.
    """

    kind: str
    method: str
    payload: bytes
    good: bool | None = None


def call(rng: random.Random, longest: int) -> Call:
    """One of all there are. longest: bytes of a text that the server takes."""
    kind = rng.choice(list(BROKEN) + list(WRONG) * 2 + list(AROUND))
    if kind in AROUND:
        more, good = AROUND[kind]
        return Call(kind, INFER, _long(rng, longest + rng.choice(more)).SerializeToString(), good)
    if kind in BROKEN:
        method = rng.choice([INFER] * 6 + [STREAM] * 2 + list(LOOKING))
        return Call(kind, method, BROKEN[kind](rng, sound(rng).SerializeToString()))
    request = sound(rng)
    WRONG[kind](rng, request)
    return Call(kind, rng.choice([INFER] * 9 + [STREAM]), request.SerializeToString())


def sound(rng: random.Random) -> Request:
    """A small request that one of the models answers."""
    model = rng.choice([ENSEMBLE] * 4 + ["tokenizer", "classifier", "baseline"])
    rows = rng.choice([1, 1, 1, 2, 5])
    if model in (ENSEMBLE, "tokenizer"):
        return _asking(model, [strange(rng).encode() for _ in range(rows)])
    ids = [[rng.randrange(VOCABULARY) for _ in range(rng.choice([2, 3, 17]))]] * rows
    request = Request(model_name=model)
    _tensor(request, "input_ids", np.array(ids, dtype=np.int64))
    if model == "classifier":
        _tensor(request, "length_carrier", np.zeros((rows, 2), dtype=np.int32))
    else:
        _tensor(request, "attention_mask", np.ones_like(ids, dtype=np.int64))
        _tensor(request, "token_type_ids", np.zeros_like(ids, dtype=np.int64))
    return request


def _tensor(request: Request, name: str, array: np.ndarray) -> None:  # type: ignore[type-arg]
    kind = {"int64": "INT64", "int32": "INT32"}[str(array.dtype)]
    request.inputs.add(name=name, datatype=kind).shape.extend(array.shape)
    request.raw_input_contents.append(array.tobytes())


def _noise(rng: random.Random, payload: bytes) -> bytes:
    return rng.randbytes(rng.choice([0, 1, 10, 1000, 100_000]))


def _truncated(rng: random.Random, payload: bytes) -> bytes:
    return payload[: rng.randrange(len(payload))]


def _flipped(rng: random.Random, payload: bytes) -> bytes:
    changed = bytearray(payload)
    for _ in range(rng.choice([1, 1, 2, 8, 64])):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def _spliced(rng: random.Random, payload: bytes) -> bytes:
    start, end = sorted(rng.randrange(len(payload) + 1) for _ in range(2))
    return payload[:end] + rng.choice([payload[start:], rng.randbytes(8), b"\xff" * 10, b""]) + payload[end:]


def _nested(rng: random.Random, payload: bytes) -> bytes:
    """Groups in groups, which a parser must stop at."""
    return payload + b"\x0b" * rng.choice([10, 100, 10_000])


def _lengths(rng: random.Random, request: Request) -> None:
    """A BYTES element's length that is not its own."""
    raw = bytearray(request.raw_input_contents[0])
    place = rng.choice([0, 0, max(0, len(raw) - 4)])
    raw[place : place + 4] = struct.pack("<I", rng.choice(ODD_LENGTHS))
    request.raw_input_contents[0] = bytes(raw)


def _shape(rng: random.Random, request: Request) -> None:
    tensor = rng.choice(request.inputs)
    if rng.random() < 0.5:
        tensor.shape[rng.randrange(len(tensor.shape))] = rng.choice(ODD_SIZES)
    else:
        del tensor.shape[:]
        tensor.shape.extend(rng.choice(ODD_SIZES) for _ in range(rng.choice([0, 1, 2, 2, 3, 20])))


def _type(rng: random.Random, request: Request) -> None:
    rng.choice(request.inputs).datatype = rng.choice(TYPES)


def _inputs(rng: random.Random, request: Request) -> None:
    """Too few, too many, twice the same, misnamed."""
    change = rng.randrange(5)
    if change == 0:
        del request.inputs[rng.randrange(len(request.inputs))]
    elif change == 1:
        del request.inputs[:]
    elif change == 2:
        request.inputs.add().CopyFrom(request.inputs[0])
        request.raw_input_contents.append(request.raw_input_contents[0])
    elif change == 3:
        rng.choice(request.inputs).name = rng.choice(NAMES)
    else:
        for _ in range(rng.choice([1, 100, 2000])):
            request.inputs.add(name=rng.choice(NAMES), datatype="BYTES").shape.extend([1, 1])


def _contents(rng: random.Random, request: Request) -> None:
    """Bytes that are not there, not asked for, or there in both of the ways to send them."""
    change = rng.randrange(5)
    if change == 0:
        del request.raw_input_contents[:]
    elif change == 1:
        request.raw_input_contents.extend([rng.randbytes(rng.choice([0, 3, 4, 5000]))] * rng.choice([1, 50]))
    elif change == 2:
        request.raw_input_contents[0] = rng.randbytes(rng.choice([0, 1, 3, 4, 8, 5000]))
    else:
        request.inputs[0].contents.bytes_contents.extend([b"a", rng.randbytes(9)])
        request.inputs[0].contents.int64_contents.extend([1, -1])
        if change == 4:
            del request.raw_input_contents[:]


def _outputs(rng: random.Random, request: Request) -> None:
    if rng.random() < 0.3 and request.outputs:
        request.outputs.extend([request.outputs[0]] * rng.choice([1, 100, 2000]))
    else:
        output = request.outputs.add(name=rng.choice([*NAMES, "probabilities", "logits"]))
        output.parameters["classification"].int64_param = rng.choice(ODD_SIZES)


def _parameters(rng: random.Random, request: Request) -> None:
    places = [request, *request.inputs, *request.outputs]
    for _ in range(rng.choice([1, 1, 3, 30])):
        parameter = rng.choice(places).parameters[rng.choice(PARAMETERS)]
        change = rng.randrange(4)
        if change == 0:
            parameter.int64_param = rng.choice(ODD_SIZES)
        elif change == 1:
            parameter.string_param = rng.choice(NAMES)
        elif change == 2:
            parameter.bool_param = rng.random() < 0.5
        else:
            parameter.double_param = rng.choice([float("nan"), float("inf"), -1.0, 1e308])


def _names(rng: random.Random, request: Request) -> None:
    if rng.random() < 0.5:
        request.model_name = rng.choice([*NAMES, "../classifier", "/etc/passwd", "text_classifier/1"])
    request.model_version = rng.choice(["", "0", "-1", "2", "99999999999999999999", "1/../1", "one", "1" * 1000])
    request.id = rng.choice(["", "x" * 100_000, "\0", "%s%n%x", "\n[error] forged line"])


def _ids(rng: random.Random, request: Request) -> None:
    """Straight at a classifier: ids that index nothing, rows that are empty, too long or all padding."""
    model, rows = rng.choice(["classifier", "baseline"]), rng.choice([0, 1, 1, 2, 64])
    length = rng.choice([0, 1, 5, 511, 512, 513, 5000] if rows <= 2 else [0, 1, 5])
    length = length if rows else max(1, length)  # KNOWN
    values = rng.choice([(0, 1), (0, VOCABULARY), (-5, 5), (VOCABULARY - 2, VOCABULARY + 2), (-(2**63), 2**63 - 1)])
    generator = np.random.default_rng(rng.randrange(2**32))

    def random_array(bounds: tuple[int, int]) -> np.ndarray:  # type: ignore[type-arg]
        return generator.integers(*bounds, size=(rows, length), dtype=np.int64)

    request.Clear()
    request.model_name = model
    _tensor(request, "input_ids", random_array(values))
    if model == "classifier":
        _tensor(
            request, "length_carrier", np.zeros((rng.choice([rows, rows + 1]), rng.choice([0, 1, 9])), dtype=np.int32)
        )
    else:
        _tensor(request, "attention_mask", random_array(rng.choice([(0, 2), (1, 2), (0, 1), (-1, 3)])))
        _tensor(request, "token_type_ids", random_array(rng.choice([(0, 1), (0, 2), (-1, 3)])))


def _texts(rng: random.Random, request: Request) -> None:
    """Bytes that are no text, surrogates as if they were UTF-8, and too many."""
    model, change = rng.choice([ENSEMBLE, "tokenizer"]), rng.randrange(9)
    if change < 4:
        texts = [strange(rng).encode() + rng.choice([b"\xff", b"\xc0\x80", b"\xf5\x80\x80\x80", b"\xe2\x82"])]
    elif change < 7:
        texts = [("a" + chr(rng.randrange(0xD800, 0xE000))).encode("utf-8", "surrogatepass")]
    else:
        texts = [strange(rng).encode() for _ in range(rng.choice([2, 64, 65, 300]))]
    request.CopyFrom(_asking(model, texts))


def _long(rng: random.Random, size: int) -> Request:
    """One sound text of so many bytes."""
    filling = rng.choice(FILLINGS)
    text = filling * (size // len(filling)) + b"x" * (size % len(filling))
    return _asking(rng.choice([ENSEMBLE, "tokenizer"]), [text])


def _asking(model: str, texts: Sequence[bytes]) -> Request:
    """A model that takes texts for all that it answers."""
    request = message(texts, model=model)
    if model == "tokenizer":
        del request.outputs[:]
    return request


BROKEN: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "noise": _noise,
    "truncated message": _truncated,
    "flipped bytes": _flipped,
    "spliced message": _spliced,
    "nested groups": _nested,
}
WRONG: dict[str, Callable[[random.Random, Request], None]] = {
    "lengths that lie": _lengths,
    "odd shape": _shape,
    "wrong type": _type,
    "inputs missing, double or misnamed": _inputs,
    "contents that do not match": _contents,
    "odd outputs": _outputs,
    "odd parameters": _parameters,
    "odd names": _names,
    "odd ids at the classifiers": _ids,
    "odd or too many texts": _texts,
}
