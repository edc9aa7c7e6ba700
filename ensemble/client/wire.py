# SPDX-License-Identifier: Apache-2.0
"""One request and its answer as they travel: building, decoding, and what each gRPC status means to a caller.

Knows nothing of connections, retries, deadlines or lists longer than one request.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tritonclient.grpc import InferInput, InferRequestedOutput, InferResult
from tritonclient.utils import InferenceServerException

from ensemble.client import dead_process
from ensemble.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PipelineError,
    RequestFailed,
    Unavailable,
)

# Triton gives min(class_count, classes) strings, so this asks for every class without knowing how many there are.
_ALL_CLASSES = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Classification:
    """The answer for one text.

    Single label: `probabilities` sum to 1 and `label` is the likeliest. Multi-label: they are independent, `label` is
    still the likeliest, and the labels that hold are those in `scores` above a threshold of yours, usually 0.5.
    Regression: one output, `label` is its name and `probability` its value, which is no probability.
    """

    text: str
    label: str
    #: Of `label`; six decimals, as Triton writes it. `logits` are exact.
    probability: float
    #: Of `label`, in the three tuples below.
    index: int
    #: Tokens of the whole text, [CLS] and [SEP] included.
    num_tokens: int
    #: The model saw only the first tokens of the text.
    truncated: bool
    #: From sending the request that carried the text to its answer, without earlier tries.
    seconds: float = field(compare=False)
    #: One entry a class, in the model's order.
    labels: tuple[str, ...] = field(repr=False)
    probabilities: tuple[float, ...] = field(repr=False)
    logits: tuple[float, ...] = field(repr=False)

    @property
    def scores(self) -> dict[str, float]:
        """Label to probability, in the model's order."""
        return dict(zip(self.labels, self.probabilities, strict=True))


def infer_arguments(model: str, texts: Sequence[bytes]) -> dict[str, Any]:
    """What `infer` and `async_infer` take for `texts`, UTF-8, as the rows of one request: `text` BYTES [len(texts), 1].

    Every request asks for `probabilities` as `value:index:label` strings (Triton's classification extension), so every
    answer brings the labels it was made with. A client that kept a list of labels could not notice that the server
    loaded other ones.
    """
    text = InferInput("text", [len(texts), 1], "BYTES")
    text.set_data_from_numpy(np.array(texts, dtype=np.object_).reshape(-1, 1))
    return {
        "model_name": model,
        "inputs": [text],
        "outputs": [
            InferRequestedOutput("probabilities", class_count=_ALL_CLASSES),
            InferRequestedOutput("logits"),
            InferRequestedOutput("num_tokens"),
            InferRequestedOutput("truncated"),
        ],
    }


def decode(result: InferResult, texts: Sequence[bytes], seconds: float, model: str) -> list[Classification]:
    """The answer to `infer_arguments(model, texts)`, one entry a text, in order.

    Raises:
        RequestFailed: an output is missing, has another shape or does not parse.
    """
    rows = len(texts)
    try:
        strings = _output(result, "probabilities", rows)
        if strings.dtype != np.object_:
            raise ValueError("probabilities are numbers where label strings were asked for")
        logits = _output(result, "logits", rows)
        if strings.shape != logits.shape:
            raise ValueError(f"probabilities are {strings.shape}, logits {logits.shape}")
        num_tokens = _output(result, "num_tokens", rows)[:, 0]
        truncated = _output(result, "truncated", rows)[:, 0]
        return [
            _classification(texts[row], strings[row], logits[row], int(num_tokens[row]), bool(truncated[row]), seconds)
            for row in range(rows)
        ]
    except (ValueError, TypeError, IndexError, struct.error, InferenceServerException) as error:
        raise RequestFailed(
            f"the answer of model {model} is not a text classifier's ({error}): name the ensemble in `model`"
        ) from error


def _output(result: InferResult, name: str, rows: int) -> np.ndarray[Any, Any]:
    array = result.as_numpy(name)
    if array is None:
        raise ValueError(f"there is no output {name}")
    if array.ndim != 2 or array.shape[0] != rows or array.shape[1] == 0:
        raise ValueError(f"{name} has shape {list(array.shape)} for {rows} texts")
    return array  # type: ignore[no-any-return]


def _classification(
    text: bytes, strings: Any, logits: Any, num_tokens: int, truncated: bool, seconds: float
) -> Classification:
    """One row: `strings` object [C] of `value:index:label`, likeliest first; `logits` float32 [C]."""
    probabilities = [float("nan")] * len(strings)
    labels = [""] * len(strings)
    # The label may hold colons itself. Without a label file there is none: then it is called as in Hugging Face.
    parts = [string.decode("utf-8", "replace").split(":", 2) for string in strings]
    if sorted(int(index) for _, index, *_ in parts) != list(range(len(parts))):
        raise ValueError("the label strings do not name each class once")
    for value, index, *label in parts:
        probabilities[int(index)] = float(value)
        labels[int(index)] = label[0] if label else f"LABEL_{index}"
    # Of the logits, not of the strings: those have six decimals, and 0.9999999 and 0.99999999 print the same. Softmax,
    # sigmoid and identity all keep the order.
    best = int(np.argmax(logits))
    return Classification(
        text=text.decode("utf-8"),
        label=labels[best],
        probability=probabilities[best],
        index=best,
        num_tokens=num_tokens,
        truncated=truncated,
        seconds=seconds,
        labels=tuple(labels),
        probabilities=tuple(probabilities),
        logits=tuple(logits.tolist()),
    )


# What a gRPC status with a text that contains this means to the caller; the first row that fits counts.
_MEANINGS: tuple[tuple[str, str, type[PipelineError], str], ...] = (
    # Not of this client's making. This Triton fails a whole batch for one request in it whose last string is cut off.
    ("INVALID_ARGUMENT", "incomplete string", Unavailable,
     "the request was batched with a malformed one of another caller at {url} ({text}): send it again"),
    ("INVALID_ARGUMENT", "", InvalidRequest, "{text}"),
    ("OUT_OF_RANGE", "", InvalidRequest, "{text}"),
    ("RESOURCE_EXHAUSTED", "larger than max", InvalidRequest,
     "the request is too large for {url} ({text}): lower max_request_bytes"),
    ("RESOURCE_EXHAUSTED", "", Overloaded, "{url} is out of resources ({text}): send less at once, or try later"),
    ("UNAVAILABLE", "maximum queue size", Overloaded,
     "the queue of {model} at {url} is full ({text}): send less at once, or try later"),
    ("UNAVAILABLE", "request timeout expired", Overloaded,
     "the request waited too long in a queue of {url} ({text}): send less at once, or try later"),
    ("UNAVAILABLE", "protocol is restricted", RequestFailed, "{url} wants a key ({text}): give it in `headers`"),
    ("UNAVAILABLE", "server is stopping", Unavailable,
     "the server at {url} is stopping ({text}): ask another one, or try again when it is back"),
    # Of the ensemble too while a step of it is loaded anew. Of a model that is in no repository it is "is not found".
    *(
        (status, phrase, Unavailable,
         "model {model} at {url} is not in service ({text}): try again in seconds, a model that lost its process is"
         " loaded anew; load it if it was unloaded")
        for status in ("UNAVAILABLE", "NOT_FOUND")
        for phrase in ("no available versions", "not at ready state")
    ),
    ("UNAVAILABLE", "unknown model", Unavailable,
     "model {model} is not loaded at {url} ({text}): load it, or name another one in `model`"),
    ("UNAVAILABLE", "certificate_verify_failed", RequestFailed,
     "the certificate of {url} is not trusted ({text}): give its authority in root_certificates"),
    ("UNAVAILABLE", "hostname verification", RequestFailed,
     "the certificate of {url} is for another name ({text}): give the name in it as server_name"),
    ("UNAVAILABLE", "wrong_version_number", RequestFailed,
     "{url} speaks no TLS ({text}): leave ssl out, or check the address"),
    ("UNAVAILABLE", "http1.x", RequestFailed,
     "{url} is no gRPC port ({text}): Triton's is 8001 where nothing else was chosen"),
    # Behind the address, so while connecting; TLS 1.3 lets the caller tell no reason from another.
    ("UNAVAILABLE", ": socket closed", Unavailable,
     "{url} takes connections and closes them ({text}): if it speaks TLS, say ssl=True; if you do, it may want to see"
     " certificate_chain and private_key, or other ones"),
    ("UNAVAILABLE", "", Unavailable, "no server answers at {url} ({text}): start it, or check the address"),
    ("NOT_FOUND", "", Unavailable,
     "model {model} is not loaded at {url} ({text}): load it, or name another one in `model`"),
    ("DEADLINE_EXCEEDED", "", DeadlineExceeded,
     "no answer from {url} in time ({text}): raise timeout_seconds, or send less at once"),
    ("CANCELLED", "", Cancelled, "the request to {url} was cancelled ({text}): send it again if it is still wanted"),
    ("UNAUTHENTICATED", "", RequestFailed, "{url} does not know the caller ({text}): give a token in `headers`"),
    ("PERMISSION_DENIED", "", RequestFailed, "{url} denies the call ({text}): give another token in `headers`"),
    ("UNIMPLEMENTED", "", RequestFailed, "{url} does not offer this call ({text}): is it Triton's gRPC port?"),
    *(
        ("INTERNAL", phrase, Unavailable,
         "model {model} at {url} has lost its process ({text}): try later, its launcher starts it again")
        for phrase in dead_process.PHRASES
    ),
    ("", "", RequestFailed, "model {model} at {url} failed ({status}: {text}): see the server's log"),
)  # fmt: skip


def pipeline_error(error: InferenceServerException, url: str, model: str) -> PipelineError:
    """What the caller gets to see for a gRPC error; the one place that says so."""
    status = str(error.status()).removeprefix("StatusCode.")
    text = _clean(error.message() or "")
    for name, fragment, kind, message in _MEANINGS:
        if name in ("", status) and fragment in text.lower():
            return kind(message.format(text=text, url=url, model=model, status=status))
    raise AssertionError("the last row fits every status")


def _clean(text: str) -> str:
    """Triton's and gRPC's message without the parts that only their authors can use."""
    text = re.sub(r"\[request id: [^\]]*\] |in ensemble '[^']*', ", "", text)
    text = re.sub(r"Failed to process the request\(s\) for model instance '[^']*', message: ", "", text)
    text = re.sub(r"(failed to connect to|connections to) all \w+( failing)?; last error: (\w+: )?", "", text)
    text = re.sub(r"Tls handshake failed \(\w+\): SSL_ERROR_SSL: error:\w+:SSL routines:OPENSSL_internal:", "", text)
    text = re.sub(r": send less .*", "", text)  # the advice follows
    return text.split("\n\nAt:")[0].strip() or "no message"
