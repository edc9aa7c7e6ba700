# SPDX-License-Identifier: Apache-2.0
"""The GPUs of this machine that a server started here would see, as NVIDIA's driver reports them. Starts nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    name:               "NVIDIA A100-SXM4-80GB"
    compute_capability: "8.0"
    memory:             bytes
    """

    name: str
    compute_capability: str
    memory: int


@dataclass(frozen=True)
class Gpus:
    """The GPUs, in the order a server numbers them. Where there is none, why_none says why."""

    devices: tuple[Gpu, ...] = ()
    why_none: str = ""


def visible_gpus() -> Gpus:
    """What the driver reports, of that what CUDA_VISIBLE_DEVICES leaves. Never raises: no driver is no GPU."""
    try:
        import pynvml  # here, because clients are installed without it
    except ImportError:
        return Gpus(why_none="nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
        try:
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            wanted = os.environ.get(VISIBLE)
            chosen = handles if wanted is None else _named(pynvml, handles, wanted)
            devices = tuple(_gpu(pynvml, handle) for handle in chosen)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return Gpus(why_none=f"NVIDIA's driver: {error}")
    if not handles:
        return Gpus(why_none="NVIDIA's driver reports none")
    return Gpus(devices, "" if devices else f"{VISIBLE} is {wanted!r}, which names none")


def _named(pynvml: Any, handles: list[Any], wanted: str) -> list[Any]:
    """The GPUs that a value of CUDA_VISIBLE_DEVICES names, read as CUDA does.

    Numbers as nvidia-smi has them (see CUDA_DEVICE_ORDER in runtime.py), or the beginning of a UUID, "GPU-8932f937", as
    long as no other GPU's begins alike, or "MIG-..." for a part of one. What stands behind one that names nothing does
    not count.
    """
    uuids = [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
    chosen = []
    for name in map(str.strip, wanted.split(",")):
        if name.startswith("MIG-"):
            try:
                part = pynvml.nvmlDeviceGetHandleByUUID(name)
                found = [pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part)]
            except pynvml.NVMLError:
                found = []
        elif name.startswith("GPU-"):
            found = [handle for handle, uuid in zip(handles, uuids, strict=True) if uuid.startswith(name)]
        else:
            found = handles[int(name) :][:1] if name.isdecimal() else []
        if len(found) != 1:
            break
        chosen += found
    return chosen


def _gpu(pynvml: Any, handle: Any) -> Gpu:
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(pynvml.nvmlDeviceGetName(handle), f"{major}.{minor}", pynvml.nvmlDeviceGetMemoryInfo(handle).total)
