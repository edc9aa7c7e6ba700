# SPDX-License-Identifier: Apache-2.0
"""The TensorRT config's warm-up: what the real server runs of it, and what the graph makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import tritonclient.grpc as grpc
from conftest import ROOT, serving
from triton_requests import Counts

from ensemble.contract import Contract, read_config
from ensemble.launcher.options import ServerOptions
from export.backend_inputs import engine_inputs

CONFIG = ROOT / "model_repository/classifier/config.pbtxt"
# Rows and ids of a row, in the order in which they run.
SAMPLES = [(1, 2), (32, 32), (64, 32), (64, 64)]

# Answers zeros and writes a line for each execute(): every request's inputs, as their shapes, types and whether any
# element is not 0.
RECORDER = """
import json
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.file = Path(args["model_repository"], "executed.jsonl")

    def execute(self, requests):
        batch, responses = [], []
        for request in requests:
            arrays = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            batch.append({name: [list(a.shape), str(a.dtype), bool(a.any())] for name, a in arrays.items()})
            answer = np.zeros((len(arrays["input_ids"]), 2), dtype=np.float32)
            outputs = [pb_utils.Tensor(name, answer) for name in ("logits", "probabilities")]
            responses.append(pb_utils.InferenceResponse(outputs))
        with self.file.open("a") as file:
            file.write(json.dumps(batch) + "\\n")
        return responses
"""


def test_the_server_runs_each_sample_as_one_batch_before_it_is_ready(tmp_path: Path) -> None:
    """A sample of batch_size n is n requests of one row in one execute(); all have run when the model is ready."""
    folder = tmp_path / "model_repository/classifier"
    (folder / "1").mkdir(parents=True)
    (folder / "1/model.py").write_text(RECORDER)
    text = CONFIG.read_text()
    for before, after in (('platform: "tensorrt_plan"', 'backend: "python"'), ("KIND_GPU", "KIND_CPU")):
        assert text.count(before) == 1
        text = text.replace(before, after)
    (folder / "config.pbtxt").write_text(text)

    options = ServerOptions(folder.parent, models=("classifier",), http_port=0, grpc_port=0, metrics_port=0)
    with serving(options) as server, grpc.InferenceServerClient(server.url) as client:
        executed = [json.loads(line) for line in (folder / "executed.jsonl").read_text().splitlines()]
        counts = Counts.read(client, "classifier")

    assert executed == [
        [{"input_ids": [[1, length], "int64", False], "length_carrier": [[1, length], "int32", False]}] * rows
        for rows, length in SAMPLES
    ]
    # Triton's statistics do not start at 0 then: whoever counts takes differences.
    assert (counts.rows, counts.executions) == (sum(rows for rows, _ in SAMPLES), len(SAMPLES))


@pytest.mark.parametrize("config_name", [None, "padded"])
def test_an_engine_for_short_rows_takes_every_sample(config_name: str | None) -> None:
    """From one row to max_batch_size; a model exported for 64 tokens loads, and for less it is refused with a reason."""
    contract = Contract.read(ROOT / "model_repository", config_name)
    samples = contract.models["classifier"].model_warmup

    assert {1, contract.max_batch_size} <= {sample.batch_size for sample in samples}
    assert not contract.warm_up_problems(64)
    assert contract.warm_up_problems(63) == [
        "classifier: model_warmup '64 x 64' is 64 rows of 64 tokens, the model takes 64 of 63: shorten it, or export with "
        "a larger MAX_LENGTH"
    ]


@pytest.fixture(scope="module")
def graph(repository: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(str(repository / "classifier/1/model.onnx"), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("sample", [sample for sample in SAMPLES if sample[0] * sample[1] <= 1024])
def test_the_graph_takes_rows_of_nothing_but_padding(graph, sample: tuple[int, int]) -> None:
    """No token is a key; the answer, which nobody reads, is a number all the same."""
    rows, length = sample
    row = {"input_ids": np.zeros((1, length), np.int64), "length_carrier": np.zeros((1, length), np.int32)}
    inputs = engine_inputs(read_config(CONFIG), [row] * rows)

    outputs = graph.run(None, {entry.name: inputs[entry.name] for entry in graph.get_inputs()})

    for output in outputs:
        assert output.shape == (rows, 2) and np.isfinite(output).all()


def test_the_cpu_config_has_no_warm_up() -> None:
    """A sample that fails keeps a model from being loaded, and its handler refuses such rows (test_bad_input.py)."""
    assert not read_config(CONFIG.parent / "configs/cpu.pbtxt").model_warmup
