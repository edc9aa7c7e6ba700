# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the `tensorrt` module on a machine without a GPU: its plan is the ONNX file, run by ONNX Runtime.

Only what export/ calls, with TensorRT's own names, order of calls and failures. It shows that the calls fit together;
that TensorRT itself takes the graph is shown by tensorrt_rtx, and its numbers by `make gpu-check` on a GPU.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import onnx
import onnxruntime

__version__ = "10.5.0"


class ILogger:
    class Severity(IntEnum):
        INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)

    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = Severity


class Logger(ILogger):
    def __init__(self, severity: ILogger.Severity) -> None: ...


class IProgressMonitor: ...


class NetworkDefinitionCreationFlag(IntEnum):
    STRONGLY_TYPED = 1


class MemoryPoolType(Enum):
    WORKSPACE = 0


class BuilderFlag(Enum):
    TF32 = 7


class TensorIOMode(Enum):
    INPUT, OUTPUT = range(2)


@dataclass
class Host:
    """IHostMemory."""

    data: bytes

    def __bytes__(self) -> bytes:
        return self.data


@dataclass
class Network:
    flags: int
    file: Path | None = None
    inputs: list[SimpleNamespace] = field(default_factory=list)
    num_layers: int = 0

    @property
    def num_inputs(self) -> int:
        return len(self.inputs)

    def get_input(self, index: int) -> SimpleNamespace:
        return self.inputs[index]


class OnnxParser:
    num_errors = 0

    def __init__(self, network: Network, log: ILogger) -> None:
        self.network = network

    def parse_from_file(self, file: str) -> bool:
        graph = onnx.load(file).graph
        self.network.file, self.network.num_layers = Path(file), len(graph.node)
        self.network.inputs = [
            SimpleNamespace(name=value.name, shape=(-1,) * len(value.type.tensor_type.shape.dim), is_shape_tensor=False)
            for value in graph.input
        ]
        return True


class Profile:
    def __init__(self) -> None:
        self.shapes: dict[str, tuple] = {}

    def set_shape(self, name: str, low: tuple, best: tuple, high: tuple) -> None:
        self.shapes[name] = (low, best, high)


class Config:
    def __init__(self) -> None:
        self.pools: dict[MemoryPoolType, int] = {}
        self.profiles: list[Profile] = []
        self.flags = {BuilderFlag.TF32}  # on by default
        self.progress_monitor = None

    def clear_flag(self, flag: BuilderFlag) -> None:
        self.flags.discard(flag)

    def set_memory_pool_limit(self, pool: MemoryPoolType, size: int) -> None:
        self.pools[pool] = size

    def add_optimization_profile(self, profile: Profile) -> int:
        self.profiles.append(profile)
        return len(self.profiles) - 1

    def create_timing_cache(self, data: bytes) -> SimpleNamespace | None:
        if data == b"of another GPU":
            return None
        return SimpleNamespace(serialize=lambda: Host(b"cache of two builds" if data == b"cache" else b"cache"))

    def set_timing_cache(self, cache: SimpleNamespace, ignore_mismatch: bool) -> bool:
        return True


class Builder:
    """built: what each build was given, for the test to look at; fail: the error to log instead of building."""

    built: ClassVar[list[tuple[Network, Config]]] = []
    fail: str | None = None

    def __init__(self, log: ILogger) -> None:
        self.log = log

    def create_network(self, flags: int) -> Network:
        return Network(flags)

    def create_builder_config(self) -> Config:
        return Config()

    def create_optimization_profile(self) -> Profile:
        return Profile()

    def build_serialized_network(self, network: Network, config: Config) -> Host | None:
        monitor = config.progress_monitor
        monitor.phase_start("Building engine", None, 2)
        assert monitor.step_complete("Building engine", 0)
        monitor.phase_finish("Building engine")
        if Builder.fail:
            self.log.log(ILogger.ERROR, Builder.fail)
            return None
        self.log.log(ILogger.WARNING, "Unused Input: length_carrier")
        Builder.built.append((network, config))
        return Host(network.file.read_bytes())


class Engine:
    def __init__(self, plan: bytes) -> None:
        self.session = onnxruntime.InferenceSession(plan, providers=["CPUExecutionProvider"])
        self.names = [value.name for value in (*self.session.get_inputs(), *self.session.get_outputs())]
        self.num_io_tensors = len(self.names)

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if self.names.index(name) < len(self.session.get_inputs()) else TensorIOMode.OUTPUT

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple]:
        return list(Builder.built[-1][1].profiles[profile].shapes[name])

    def create_execution_context(self) -> Context:
        return Context(self)


class Context:
    """Reads and writes memory by address, as TensorRT does: the tests give it the CPU's."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.shapes, self.addresses = engine, {}, {}

    def set_input_shape(self, name: str, shape: tuple) -> bool:
        low, _, high = self.engine.get_tensor_profile_shape(name, 0)
        self.shapes[name] = shape
        return all(a <= size <= b for a, size, b in zip(low, shape, high, strict=True))

    def set_tensor_address(self, name: str, address: int) -> None:
        self.addresses[name] = address

    def get_tensor_shape(self, name: str) -> tuple:
        rows = self.shapes["row_lengths" if "row_lengths" in self.shapes else "input_ids"][0]
        return (rows, 2)

    def execute_async_v3(self, stream: int) -> bool:
        feeds = {
            value.name: self._array(value.name, self.shapes[value.name], value.type)
            for value in self.engine.session.get_inputs()
        }
        for value, result in zip(self.engine.session.get_outputs(), self.engine.session.run(None, feeds), strict=True):
            self._array(value.name, result.shape, value.type)[:] = result
        return True

    def _array(self, name: str, shape: tuple, kind: str) -> np.ndarray:
        c_type = {"tensor(int64)": ctypes.c_int64, "tensor(int32)": ctypes.c_int32, "tensor(float)": ctypes.c_float}
        pointer = ctypes.cast(self.addresses[name], ctypes.POINTER(c_type[kind]))
        return np.ctypeslib.as_array(pointer, shape)


class Runtime:
    def __init__(self, log: ILogger) -> None: ...

    def deserialize_cuda_engine(self, plan: bytes) -> Engine | None:
        return Engine(plan) if plan != b"of another version" else None
