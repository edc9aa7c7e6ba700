# SPDX-License-Identifier: Apache-2.0
"""Handlers for the probe: what they have in common; and a probe whose process is forked, which saves its imports."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from functools import cache
from pathlib import Path
from textwrap import dedent

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from perf.doctor import probe, probe_child
from perf.doctor.inputs import built_in_texts
from perf.doctor.probe import Probe
from perf.doctor.target import Leaf

IDS = 'input { name: "input_ids" data_type: TYPE_INT64 dims: -1 allow_ragged_batch: true }'
MASK = 'input { name: "attention_mask" data_type: TYPE_INT64 dims: -1 allow_ragged_batch: true }'
TEXT = 'input { name: "text" data_type: TYPE_STRING dims: 1 }'

HEAD = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

def get(request, name="input_ids"):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy()

def answer(array):
    return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("logits", np.asarray(array, dtype=np.float32))])

"""

TORCH = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(3000, 4), torch.nn.Linear(4, 2)

    def forward(self, ids, attention_mask=None):
        return self.head(self.embed(ids).mean(dim=1))

"""


def probed(folder: Path, body: str, *, inputs: str = IDS, extra: str = "", batch: int = 64) -> Probe:
    """Write the handler into a repository and probe it."""
    config = text_format.Parse(
        f'name: "m" backend: "python" max_batch_size: {batch} {inputs} '
        f'output {{ name: "logits" data_type: TYPE_FP32 dims: 2 }} dynamic_batching {{ }} {extra}',
        model_config_pb2.ModelConfig(),
    )
    version = folder / "m" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(HEAD + dedent(body))
    return probe.probe(Leaf("m", config), folder, built_in_texts())


class Forked:
    """A probe's process, forked off one that has imported what handlers import. The same interface as Popen's."""

    def __init__(self, task: Path, result: Path, log: Path) -> None:
        self._process = _context().Process(target=_child, args=(str(task), str(result), str(log)))
        self._process.start()
        self.pid = self._process.pid

    def wait(self, seconds: float | None = None) -> int:
        self._process.join(seconds)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("probe", seconds or 0.0)
        return self._process.exitcode


@cache
def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "onnxruntime", "tokenizers", "pytest", "perf.doctor.probe_child"])
    return context


def _child(task: str, result: str, log: str) -> None:
    os.setsid()
    with Path(log).open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    probe_child.main(task, result)
