# SPDX-License-Identifier: Apache-2.0
"""Which GPUs a server started here would see. The driver is replaced; what it is asked for is the real package."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pynvml
import pytest
from fake_engine import A100, H200, L4

from ensemble.launcher.gpu import Gpu, Gpus, visible_gpus

UUIDS = ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-8932a111-0000", "GPU-7b5e9c00-1111")
MIG = "MIG-5c2f7a2d-3333"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> list[Gpu]:
    """A driver with these three GPUs, the first of them with a MIG part; a handle is an index."""
    gpus = [A100, L4, H200]

    def by_uuid(uuid: str) -> str:
        if uuid != MIG:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return uuid

    answers = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: len(gpus),
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetHandleByUUID": by_uuid,
        "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": lambda part: 0,
        "nvmlDeviceGetUUID": lambda handle: UUIDS[handle],
        "nvmlDeviceGetName": lambda handle: gpus[handle].name,
        "nvmlDeviceGetCudaComputeCapability": lambda handle: [*map(int, gpus[handle].compute_capability.split("."))],
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=gpus[handle].memory),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return gpus


def test_all_are_seen_unless_told_otherwise(driver: list[Gpu]) -> None:
    """Name, compute capability and memory of each, in the driver's order."""
    assert visible_gpus() == Gpus((A100, L4, H200))


@pytest.mark.parametrize(
    ("wanted", "seen"),
    [
        ("1", (L4,)),
        ("2,0", (H200, A100)),
        (" 2 , 0 ", (H200, A100)),
        ("0,2,-1,1", (A100, H200)),
        ("1,3,0", (L4,)),
        (UUIDS[2], (H200,)),
        ("GPU-8932f,1", (A100, L4)),
        (f"1,{MIG}", (L4, A100)),
    ],
    ids=str,
)
def test_cuda_visible_devices_is_honoured(
    driver: list[Gpu], monkeypatch: pytest.MonkeyPatch, wanted: str, seen: tuple[Gpu, ...]
) -> None:
    """Numbers, UUIDs and their beginnings, in the order given, up to the first that names nothing."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", wanted)

    assert visible_gpus() == Gpus(seen)


@pytest.mark.parametrize("wanted", ["", "-1", "3", "GPU-8932", "GPU-0", "MIG-none", "all"])
def test_a_variable_that_names_none_leaves_none(
    driver: list[Gpu], monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    """The reason quotes it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", wanted)

    assert visible_gpus() == Gpus((), f"CUDA_VISIBLE_DEVICES is {wanted!r}, which names none")


def test_a_driver_without_gpus_is_told_from_no_driver(driver: list[Gpu]) -> None:
    """A container that was started without them, say."""
    driver.clear()

    assert visible_gpus() == Gpus((), "NVIDIA's driver reports none")


@pytest.mark.parametrize(
    ("call", "code", "reason"),
    [
        ("nvmlInit", pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "NVIDIA's driver: NVML Shared Library Not Found"),
        ("nvmlInit", pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "NVIDIA's driver: Driver Not Loaded"),
        ("nvmlDeviceGetName", pynvml.NVML_ERROR_GPU_IS_LOST, "NVIDIA's driver: GPU is lost"),
        ("nvmlShutdown", pynvml.NVML_ERROR_UNINITIALIZED, "NVIDIA's driver: Uninitialized"),
    ],
)
def test_an_error_of_the_driver_is_no_gpu_and_a_reason(
    driver: list[Gpu], monkeypatch: pytest.MonkeyPatch, call: str, code: int, reason: str
) -> None:
    """Never an exception."""

    def fail(*arguments: object) -> None:
        raise pynvml.NVMLError(code)

    monkeypatch.setattr(pynvml, call, fail)

    assert visible_gpus() == Gpus((), reason)


def test_without_the_package_there_is_no_gpu_and_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client is installed without it."""
    monkeypatch.setitem(sys.modules, "pynvml", None)

    assert visible_gpus() == Gpus((), "nvidia-ml-py is not installed")
