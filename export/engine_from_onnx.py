# SPDX-License-Identifier: Apache-2.0
"""An FP16 ONNX file to a TensorRT engine: parse, one optimization profile, build. Knows nothing of BERT or Triton.

Written for `tensorrt` 10 and 11 and for `tensorrt_rtx`, which share this API; what differs is said where it does. The
network is strongly typed: precision is what the graph says. TensorRT 11 knows no other, 10 takes the flag
(docs.nvidia.com/deeplearning/tensorrt, "Migrating from TensorRT 10.x to 11.x").

TensorRT needs the GPU an engine is for. TensorRT for RTX compiles for a named compute capability without any GPU: its
engines are not for Triton, but its parser, its type checker and its compiler are NVIDIA's own.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
from onnx.external_data_helper import ExternalDataInfo, uses_external_data
from rich.progress import Progress, TaskID

from ensemble.errors import ExportError
from export import profile

Report = Callable[[str], None]

GIBIBYTE = 2**30
# What one layer may use beside weights and activations. More lets TensorRT choose faster kernels; a BERT needs none.
WORKSPACE = 4 * GIBIBYTE

INSTALL = {
    "tensorrt": "run make export TARGET=tensorrt RUNTIME=docker, whose image has it, or install tensorrt-cu12 at the "
    "version of the server's TensorRT",
    "tensorrt_rtx": "pip install '.[dev]'",
}


@dataclass(frozen=True)
class Settings:
    """How to build.

    workspace:          bytes
    timing_cache:       file of kernel timings, read and written, so that a second build is quicker; TensorRT only
    compute_capability: to compile for, "8.0", without a GPU; TensorRT for RTX only
    """

    workspace: int = WORKSPACE
    timing_cache: Path | None = None
    compute_capability: str | None = None


@dataclass(frozen=True)
class Built:
    """An engine: its bytes, the seconds it took, the layers of the network as parsed, and what TensorRT warned of."""

    plan: bytes
    seconds: float
    layers: int
    warnings: list[str] = field(default_factory=list)


def load(name: str) -> ModuleType:
    """The module `tensorrt` or `tensorrt_rtx`. Raises ExportError saying where to get it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == name
        what = "is not installed" if missing else f"cannot be loaded ({error})"
        raise ExportError(f"{name} {what}: {INSTALL[name]}") from error


def build(
    trt: ModuleType,
    file: Path,
    shapes: profile.Profile,
    settings: Settings,
    *,
    report: Report = lambda _: None,
) -> Built:
    """Build an engine of the graph, for the shapes of one profile.

    trt: what load() gave. report: told each kind of warning once.

    Raises ExportError with everything the parser found wrong, with the input whose profile does not fit, or with what
    TensorRT said last when it built nothing.
    """
    profile.check(shapes)
    _require_files(file)
    started = time.monotonic()
    log = _log(trt)
    builder = _builder(trt, log)
    network = _parsed(trt, builder, log, file)
    config = builder.create_builder_config()
    # On an A100 it would round the inputs of the FP32 products to 10 bits.
    config.clear_flag(trt.BuilderFlag.TF32)
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, settings.workspace)
    _add_profile(builder, network, config, shapes, log)
    if settings.compute_capability:
        _compile_for(trt, config, settings.compute_capability)
    cache = _read_cache(config, settings.timing_cache, report)
    with Progress(transient=True) as bars:
        config.progress_monitor = _monitor(trt, bars)
        plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise ExportError(f"TensorRT built no engine of {file.name}: {log.last}: see its warnings above")
    if cache is not None and settings.timing_cache is not None:
        _write_cache(cache, settings.timing_cache, report)
    for warning in log.warnings:
        report(f"  TensorRT: {warning}")
    return Built(bytes(plan), time.monotonic() - started, network.num_layers, log.warnings)


def _require_files(file: Path) -> None:
    """Raise ExportError naming the graph or side file of weights that is missing; TensorRT names neither."""
    if not file.is_file():
        raise ExportError(f"{file} is missing: run make export")
    for weight in onnx.load(str(file), load_external_data=False).graph.initializer:
        if uses_external_data(weight):
            side = file.parent / ExternalDataInfo(weight).location
            if not side.is_file():
                raise ExportError(f"{side}, which has weights of {file.name}, is missing: run make export")


def _parsed(trt: ModuleType, builder: Any, log: Any, file: Path) -> Any:
    """The network of the file, strongly typed."""
    typed = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(typed)
    parser = trt.OnnxParser(network, log)
    # By its path: weights kept beside the file are found from there.
    if not parser.parse_from_file(str(file)):
        errors = [parser.get_error(index) for index in range(parser.num_errors)]
        lines = "".join(f"\n  node {error.node_name()!r} ({error.node_operator()}): {error.desc()}" for error in errors)
        raise ExportError(f"TensorRT cannot take {file.name}: {lines or log.last}\nexport the model again: make export")
    # Triton's backend looks for the values of such an input in the request, where no batch input is.
    if shapes := [value.name for value in _inputs(network) if value.is_shape_tensor]:
        raise ExportError(
            f"{file.name} computes shapes from the values of {shapes}, which Triton cannot feed: report this"
        )
    return network


def _inputs(network: Any) -> list[Any]:
    return [network.get_input(index) for index in range(network.num_inputs)]


def _add_profile(builder: Any, network: Any, config: Any, shapes: profile.Profile, log: Any) -> None:
    inputs = {value.name: value for value in _inputs(network)}
    if inputs.keys() != shapes.keys():
        raise ExportError(
            f"the graph has the inputs {sorted(inputs)}, the optimization profile {sorted(shapes)}: export the model "
            "again with this config: make export"
        )
    optimization = builder.create_optimization_profile()
    for name, sizes in shapes.items():
        if len(sizes.min) != len(inputs[name].shape):
            raise ExportError(
                f"the optimization profile gives {name} {len(sizes.min)} dimensions, the graph has "
                f"{len(inputs[name].shape)}: export the model again with this config: make export"
            )
        try:
            optimization.set_shape(name, *sizes)
        except (ValueError, RuntimeError) as error:
            raise ExportError(f"TensorRT does not take {name}'s {sizes}: {error or log.last}") from error
    if config.add_optimization_profile(optimization) < 0:
        raise ExportError(f"TensorRT does not take the optimization profile: {log.last}")


def _compile_for(trt: ModuleType, config: Any, capability: str) -> None:
    """Set the one GPU generation to compile for."""
    name = f"SM{capability.replace('.', '')}"
    known = trt.ComputeCapability.__members__
    if name not in known:
        capabilities = sorted(f"{other[2:-1]}.{other[-1]}" for other in known if other.startswith("SM"))
        raise ExportError(f"{trt.__name__} compiles for {', '.join(capabilities)}, not for {capability!r}")
    config.num_compute_capabilities = 1
    config.set_compute_capability(known[name], 0)


def _read_cache(config: Any, file: Path | None, report: Report) -> Any:
    """The timing cache in use, or None. One from another version or GPU is a fresh start, not an error."""
    if file is None:
        return None
    try:
        known = file.read_bytes() if file.is_file() else b""
    except OSError as error:
        report(f"  the timing cache {file} cannot be read ({error.strerror}): building without it")
        known = b""
    cache = config.create_timing_cache(known)
    if cache is None or not config.set_timing_cache(cache, False):
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, False)
    return cache


def _write_cache(cache: Any, file: Path, report: Report) -> None:
    """Keep the timings for the next build; a finished engine is not given up where that fails."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(cache.serialize()))
    except OSError as error:
        report(f"  the timing cache {file} cannot be written ({error.strerror}): the next build begins anew")


def _builder(trt: ModuleType, log: Any) -> Any:
    try:
        builder = trt.Builder(log)
    except TypeError:  # what the bindings make of a null pointer
        builder = None
    if builder is None:
        raise ExportError(
            f"TensorRT cannot start ({log.last}): it needs an NVIDIA GPU and its driver; make compile-check compiles "
            "without"
        )
    return builder


def _log(trt: ModuleType) -> Any:
    """A logger that keeps the last error, and every warning once."""

    class Log(trt.ILogger):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.last = "it gave no reason"
            self.warnings: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR):
                self.last = message.strip()
            elif severity == trt.ILogger.WARNING and message not in self.warnings:
                self.warnings.append(message.strip())

    return Log()


def _monitor(trt: ModuleType, bars: Progress) -> Any:
    """Shows the phases of a build as bars, an inner one under the outer."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.bars: dict[str, TaskID] = {}

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            self.bars[phase] = bars.add_task(f"  {phase}", total=steps)

        def step_complete(self, phase: str, step: int) -> bool:
            with suppress(KeyError):
                bars.update(self.bars[phase], completed=step + 1)
            return True

        def phase_finish(self, phase: str) -> None:
            with suppress(KeyError):
                bars.remove_task(self.bars.pop(phase))

    return Monitor()
