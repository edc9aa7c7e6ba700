# SPDX-License-Identifier: Apache-2.0
"""The model under examination and the server it is on: found, and described by its own configs. Sends no inference."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import tritonclient.grpc as triton
from tritonclient.grpc import model_config_pb2

from ensemble.client.options import check_url
from ensemble.errors import ServerError
from perf.closed_loop import CHANNEL, reason

# For a question about the server or a model; an inference may take longer.
ASK_SECONDS = 10.0

# These backends run a batch as one, by construction: no handler of the user's stands between.
WHOLE_BATCH = {"onnxruntime", "tensorrt", "pytorch", "tensorflow", "openvino", "fil", "dali"}


@dataclass(frozen=True)
class Leaf:
    """One model that does work itself: the target, or a step of it where that is an ensemble.

    config:    as the server reports it, a ModelConfig message
    instances: that run at once; a KIND_AUTO or KIND_GPU group counts once for each GPU that the config names
    """

    name: str
    config: Any

    @property
    def instances(self) -> int:
        """At least 1."""
        return max(1, sum(int(group.count or 1) * max(1, len(group.gpus)) for group in self.config.instance_group))

    @property
    def max_batch(self) -> int:
        """max_batch_size; 0 is a model without a batch dimension."""
        return int(self.config.max_batch_size)

    @property
    def takes_text(self) -> bool:
        """Whether an input is BYTES."""
        return any(field.data_type == model_config_pb2.TYPE_STRING for field in self.config.input)

    @property
    def delay(self) -> float:
        """Seconds for which the config lets a request wait for company."""
        return float(self.config.dynamic_batching.max_queue_delay_microseconds) / 1e6

    @property
    def backend(self) -> str:
        """`python`, `onnxruntime`, ...; older configs say it by platform."""
        platform = {"tensorrt_plan": "tensorrt", "onnxruntime_onnx": "onnxruntime", "pytorch_libtorch": "pytorch"}
        return str(self.config.backend or platform.get(self.config.platform, self.config.platform.split("_")[0]))

    @property
    def whole_batches(self) -> bool:
        """Whether the backend itself sees to it that a batch is run as one."""
        return self.backend in WHOLE_BATCH

    @property
    def on_gpu(self) -> bool:
        """Whether every instance is on a GPU."""
        kinds = {group.kind for group in self.config.instance_group}
        return kinds == {model_config_pb2.ModelInstanceGroup.KIND_GPU}

    @property
    def decoupled(self) -> bool:
        """Whether it may answer after its execute() has returned, and any number of times."""
        return bool(self.config.model_transaction_policy.decoupled)

    @property
    def rigid(self) -> list[str]:
        """Inputs that vary in shape without being ragged: requests that differ in them never share a batch."""
        return [field.name for field in self.config.input if -1 in field.dims and not field.allow_ragged_batch]


@dataclass(frozen=True)
class Target:
    """What is examined.

    config: of the model that was named
    leaves: the models that do its work, by name, in the order of an ensemble's steps
    """

    url: str
    model: str
    config: Any
    leaves: Mapping[str, Leaf]

    @property
    def is_ensemble(self) -> bool:
        """Whether the model is made of others."""
        return bool(self.config.ensemble_scheduling.step)

    @property
    def streamed(self) -> bool:
        """Whether it can be asked over a stream only."""
        return any(leaf.decoupled for leaf in self.leaves.values())

    @property
    def instances(self) -> int:
        """Of the step that has most."""
        return max(leaf.instances for leaf in self.leaves.values())


def connect(url: str) -> triton.InferenceServerClient:
    """A client that goes to that host and nowhere else."""
    return triton.InferenceServerClient(url, channel_args=CHANNEL)


def find(url: str, model: str) -> Target:
    """Ask the server. Raises ServerError, or InvalidRequest for what is no address."""
    check_url(url)
    with connect(url) as client:
        try:
            client.is_server_live(client_timeout=ASK_SECONDS)
        except triton.InferenceServerException as error:
            raise ServerError(
                f"no Triton server answers over gRPC at {url} ({_line(error)}): start it, or give its gRPC port "
                "(8001 unless told otherwise; 8000 is HTTP and 8002 metrics)"
            ) from None
        config = _config(client, url, model)
        return Target(url, model, config, {leaf.name: leaf for leaf in _leaves(client, url, config, model)})


def lost(url: str, error: triton.InferenceServerException) -> str:
    """Why a question got no answer in the middle of it all."""
    try:
        with connect(url) as client:
            client.is_server_live(client_timeout=ASK_SECONDS)
    except triton.InferenceServerException:
        return f"the server at {url} went away ({_line(error)}): see its log"
    return f"{url} does not answer ({_line(error)}): the doctor needs its statistics and model configurations"


def _leaves(client: Any, url: str, config: Any, model: str) -> list[Leaf]:
    if not config.ensemble_scheduling.step:
        return [Leaf(model, config)]
    found = []
    for step in config.ensemble_scheduling.step:
        found += _leaves(client, url, _config(client, url, step.model_name), step.model_name)
    return found


def _config(client: Any, url: str, model: str) -> Any:
    try:
        return client.get_model_config(model, client_timeout=ASK_SECONDS).config
    except triton.InferenceServerException as error:
        names: list[str] = []
        with suppress(triton.InferenceServerException):  # a server may keep its index to itself
            index = client.get_model_repository_index(client_timeout=ASK_SECONDS)
            names = sorted({entry.name for entry in index.models if entry.state == "READY"})
        known = f"it serves {', '.join(names)}" if names else "see what it serves"
        raise ServerError(f"{url} has no model {model!r} ready ({_line(error)}): {known}") from None


def _line(error: Exception) -> str:
    message = getattr(error, "message", None)
    return str(message()).splitlines()[0] if callable(message) else reason(error)
