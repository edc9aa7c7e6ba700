# SPDX-License-Identifier: Apache-2.0
"""Small deployments with one fault each, and sound ones, for the doctor: written into one repository for one server.

A forward pass sleeps, so that it takes its time on a busy machine as on an idle one, and costs the same whatever the
rows, as on hardware that a batch does not fill. The few handlers that the probe is to look into make it a torch module.
"""

from __future__ import annotations

from pathlib import Path

IDS = '{ name: "input_ids" data_type: TYPE_INT64 dims: [ %s ] %s }'
TEXT = '{ name: "text" data_type: TYPE_STRING dims: [ 1 ] }'
RAGGED = "allow_ragged_batch: true"

HANDLER = """# SPDX-License-Identifier: Apache-2.0
import time
from itertools import zip_longest

import numpy as np
import triton_python_backend_utils as pb_utils

{torch}


class Classifier({base}):
    def forward(self, ids):
        time.sleep({seconds})
        means = ids.mean(axis=1, keepdims=True).astype(np.float32)
        return np.concatenate([means, -means], axis=1)


class TritonPythonModel:
    def initialize(self, args):
        self.model = Classifier()

    def ids(self, request):
        return pb_utils.get_input_tensor_by_name(request, "input_ids").as_numpy()

    def execute(self, requests):
{body}
"""

LOOP = """
        responses = []
        for request in requests:
            logits = self.model(self.ids(request))
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("logits", logits)]))
        return responses
"""

STACK = """
        rows = [row for request in requests for row in self.ids(request)]
        logits = self.model(np.array(list(zip_longest(*rows, fillvalue=0))).T)
        cut = np.cumsum([len(self.ids(request)) for request in requests])[:-1]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("logits", part)]) for part in np.split(logits, cut)]
"""

PICKY = (
    """
        if any((self.ids(request) != 42).any() for request in requests):
            raise ValueError("only 42 will do")
"""
    + STACK
)

# A fixed amount of work a batch: instances that do it at the same time slow each other down.
SPIN = (
    """
        sum(range(200_000))
"""
    + STACK
)

STREAMED = """# SPDX-License-Identifier: Apache-2.0
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.01)
        for request in requests:
            rows = len(pb_utils.get_input_tensor_by_name(request, "input_ids").as_numpy())
            logits = pb_utils.Tensor("logits", np.zeros((rows, 2), dtype=np.float32))
            sender = request.get_response_sender()
            sender.send(pb_utils.InferenceResponse([logits]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"

SLOW_TOKENIZER = """# SPDX-License-Identifier: Apache-2.0
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            texts = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()
            time.sleep({seconds} * len(texts))
            ids = np.full((len(texts), 8), 1000, dtype=np.int64)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("input_ids", ids)]))
        return responses
"""


def config(
    name: str, inputs: str, *, output: str = "logits", batch: int = 64, batching: str = "dynamic_batching { }"
) -> str:
    """A Python model's."""
    kind = "INT64" if output == "input_ids" else "FP32"
    dims = "-1" if output == "input_ids" else "2"
    return (
        f'name: "{name}" backend: "python" max_batch_size: {batch}\n'
        f'input [ {inputs} ]\noutput [ {{ name: "{output}" data_type: TYPE_{kind} dims: [ {dims} ] }} ]\n'
        f"{batching}\ninstance_group [ {{ kind: KIND_CPU count: 1 }} ]\n"
    )


CALLABLE = """class Callable:
    def __call__(self, ids):
        return self.forward(ids)
"""


def handler(body: str, seconds: float = 0.004, *, torch: bool = False) -> str:
    """A model.py with that execute()."""
    how = {"torch": "import torch", "base": "torch.nn.Module"} if torch else {"torch": CALLABLE, "base": "Callable"}
    code = HANDLER.replace("{seconds}", str(seconds)).replace("{body}", body)
    return code.replace("{torch}", how["torch"]).replace("{base}", how["base"])


def ensemble(name: str, first: str, second: str) -> str:
    """Text through `first` into `second`."""
    return (
        f'name: "{name}" platform: "ensemble" max_batch_size: 64\ninput [ {TEXT} ]\n'
        'output [ { name: "logits" data_type: TYPE_FP32 dims: [ 2 ] } ]\nensemble_scheduling { step [\n'
        f'{{ model_name: "{first}" model_version: -1 input_map {{ key: "text" value: "text" }}\n'
        '  output_map { key: "input_ids" value: "ids" } },\n'
        f'{{ model_name: "{second}" model_version: -1 input_map {{ key: "input_ids" value: "ids" }}\n'
        '  output_map { key: "logits" value: "logits" } } ] }\n'
    )


def write(folder: Path, name: str, pbtxt: str, code: str | None) -> None:
    """One model. Without code, its version folder is empty, as an ensemble's is."""
    version = folder / name / "1"
    version.mkdir(parents=True)
    (folder / name / "config.pbtxt").write_text(pbtxt)
    (version / (".keep" if code is None else "model.py")).write_text(code or "")


def write_all(folder: Path) -> tuple[str, ...]:
    """The repository; the names of its models."""
    varied, fixed = IDS % ("-1", RAGGED), IDS % ("16", "")
    no_batches = config("no_dynamic_batching", varied, batching="")
    two = config("overloaded", varied, batch=2)
    late = config("late", varied, batching="dynamic_batching { max_queue_delay_microseconds: 250000 }")
    write(folder, "looped", config("looped", varied), handler(LOOP, torch=True))
    write(folder, "looped_fixed", config("looped_fixed", fixed), handler(LOOP))
    write(folder, "stacked", config("stacked", varied), handler(STACK, 0.01))
    write(folder, "no_dynamic_batching", no_batches, handler(STACK))
    write(
        folder,
        "no_batch_dimension",
        config("no_batch_dimension", IDS % ("1, 16", ""), batch=0, batching=""),
        handler(STACK),
    )
    write(folder, "rigid", config("rigid", IDS % ("-1", "")), handler(STACK))
    write(folder, "late", late, handler(STACK))
    write(folder, "overloaded", two, handler(STACK))
    streamed = config("streamed", varied, batching=DECOUPLED)
    streamed_batches = config("streamed_batches", varied, batching=f"dynamic_batching {{ }} {DECOUPLED}")
    side_by_side = config("side_by_side", varied).replace("count: 1", "count: 4")
    write(folder, "streamed", streamed, STREAMED)
    write(folder, "streamed_batches", streamed_batches, STREAMED)
    write(folder, "side_by_side", side_by_side, handler(SPIN, 0))
    write(folder, "picky", config("picky", varied), handler(PICKY))
    write(folder, "padded", config("padded", IDS_AND_MASK), handler(STACK))
    write(folder, "classify", config("classify", varied), handler(STACK))
    write(
        folder,
        "slow_tokenizer",
        config("slow_tokenizer", TEXT, output="input_ids"),
        SLOW_TOKENIZER.format(seconds=0.005),
    )
    write(
        folder, "quick_tokenizer", config("quick_tokenizer", TEXT, output="input_ids"), SLOW_TOKENIZER.format(seconds=0)
    )
    write(folder, "slow_text", ensemble("slow_text", "slow_tokenizer", "classify"), None)
    write(folder, "quick_text", ensemble("quick_text", "quick_tokenizer", "classify"), None)
    return tuple(sorted(path.name for path in folder.iterdir()))


# As the case study has it: 512 fixed, and a mask that says how little of it is used.
IDS_AND_MASK = f"{IDS % ('512', '')}, {IDS.replace('input_ids', 'attention_mask') % ('512', '')}"
