# SPDX-License-Identifier: Apache-2.0
"""The engine of an export: built on this machine's GPU, and held against the same texts as the graph it comes from."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.cuda import is_available as cuda_is_available

from ensemble.artifacts import PLAN, Engine, sha256_of
from ensemble.errors import ExportError
from ensemble.launcher.gpu import Gpu, visible_gpus
from export import engine_from_onnx, gate, gate_fp16
from export.engine_runner import TensorRtEngine
from export.parity import Parity
from export.profile import Profile, as_dict


@dataclass(frozen=True)
class Target:
    """What engines are built with and for here: the module `tensorrt`, and the GPU it uses."""

    trt: ModuleType
    gpu: Gpu


def find_target() -> Target:
    """This machine's. Raises ExportError if it has no GPU or no TensorRT."""
    gpus = visible_gpus()
    if not gpus.devices:
        raise ExportError(
            f"an engine is built on the GPU it is for, and none can be used here ({gpus.why_none}): run make export "
            "TARGET=tensorrt on the machine with the GPU; make compile-check compiles the graph without one"
        )
    # As the driver numbers them, and the server: else "the first" may mean two GPUs. Read when CUDA starts.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if not cuda_is_available():
        raise ExportError(
            f"torch {torch.__version__} cannot use the {gpus.devices[0].name}, and the engine's answers are checked "
            "with it: install a torch with CUDA that the driver can run"
        )
    return Target(engine_from_onnx.load("tensorrt"), gpus.devices[0])


def build(
    target: Target,
    onnx: Path,
    profile: Profile,
    settings: engine_from_onnx.Settings,
    report: Callable[[str], None],
) -> Engine:
    """Build model.plan beside the FP16 graph; returns what model.json keeps of it."""
    built = engine_from_onnx.build(target.trt, onnx, profile, settings, report=report)
    (onnx.parent / PLAN).write_bytes(built.plan)
    report(f"  {PLAN}: {len(built.plan) / 1e6:.0f} MB, {built.layers} layers parsed, {built.seconds:.0f} s")
    return Engine(
        tensorrt=target.trt.__version__,
        compute_capability=target.gpu.compute_capability,
        gpu=target.gpu.name,
        onnx_sha256=sha256_of(onnx),
        profile=as_dict(profile),
    )


def check(
    target: Target,
    plan: Path,
    profile: Profile,
    config: Any,
    pad_token_id: int,
    expected: gate.Reference,
    built_from: gate_fp16.Checked,
) -> list[Parity]:
    """The verdicts on the engine as it lies in the file. Raises ExportError if one did not pass.

    Also if the engine's profile is not what was asked for, in every dimension.
    """
    engine = TensorRtEngine.open(target.trt, plan)
    if engine.profile() != dict(profile):
        raise ExportError(f"the engine has the profile {engine.profile()}, not {dict(profile)}: report this")
    return gate_fp16.check("TensorRT", engine, config, pad_token_id, expected, built_from=built_from).verdicts
