# SPDX-License-Identifier: Apache-2.0
"""Which classifier is served: from what was asked for and what is there, to one answer with its reason. Does nothing.

asked for   there is                              served
auto        no GPU                                onnx
auto        a GPU, no engine                      baseline
auto        a GPU, an engine, a server for it     tensorrt
auto        a GPU, an engine, no server for it    refused: what was built for this machine would lie unused
tensorrt    all three                             tensorrt, else refused
onnx                                              onnx
baseline                                          baseline
"""

from __future__ import annotations

from dataclasses import dataclass

from ensemble.artifacts import MANIFEST, Manifest
from ensemble.errors import ConfigError, ServerError
from ensemble.launcher.gpu import Gpus
from ensemble.launcher.runtime import Runtime

CLASSIFIERS = ("auto", "tensorrt", "onnx", "baseline")

# The engine's layout, as model.json has it -> the config files for it (model_repository/*/configs); None: config.pbtxt.
CONFIG_NAMES = {"packed": None, "padded": "padded"}


@dataclass(frozen=True)
class Choice:
    """What is served.

    classifier:  tensorrt, onnx or baseline
    config_name: the config files that say so
    why:         one line for the person who started it
    """

    classifier: str
    config_name: str | None
    why: str


def choose(asked: str, gpus: Gpus, manifest: Manifest | None, runtime: Runtime) -> Choice:
    """The classifier for one of CLASSIFIERS; manifest: of what is installed, if anything is.

    Raises ServerError where the classifier that was asked for cannot run, or one that was built for this machine could
    not be served. Nothing is replaced silently by something slower.
    """
    engine = manifest is not None and manifest.engine is not None
    if asked == "onnx":
        return Choice("onnx", "cpu", "onnx: ONNX Runtime on the CPU, as asked")
    if asked == "baseline":
        return Choice("baseline", "baseline", f"baseline: TorchScript on {_place(gpus)}, as asked")
    if asked == "auto" and not gpus.devices:
        return Choice(
            "onnx", "cpu", f"onnx: ONNX Runtime on the CPU, because no GPU can be used here ({gpus.why_none})"
        )
    if asked == "auto" and not engine:
        return Choice(
            "baseline",
            "baseline",
            f"baseline: TorchScript on {_place(gpus)}, because no engine is installed; make export TARGET=tensorrt "
            "builds one",
        )
    if not gpus.devices:
        raise ServerError(
            f"tensorrt needs a GPU, and none can be used here ({gpus.why_none}): make serve CLASSIFIER=onnx"
        )
    if manifest is None or not engine:
        raise ServerError("tensorrt needs an engine, and none is installed: run make export TARGET=tensorrt")
    if not runtime.has_tensorrt_backend:
        raise ServerError(
            f"the engine cannot be served, {runtime.name} has no TensorRT backend: make serve RUNTIME=docker, or ask "
            "for CLASSIFIER=baseline or CLASSIFIER=onnx"
        )
    unchecked = f"; its TensorRT version is not checked ({runtime.why_unknown})" if runtime.tensorrt is None else ""
    return Choice(
        "tensorrt",
        config_name_of(manifest.layout),
        f"tensorrt: the {manifest.layout} engine on {_place(gpus)}{unchecked}",
    )


def config_name_of(layout: str) -> str | None:
    """The config files for an engine's layout. Raises ConfigError for a layout this version does not know."""
    if layout not in CONFIG_NAMES:
        raise ConfigError(f"{MANIFEST} has layout {layout!r}, not one of {', '.join(CONFIG_NAMES)}: run make export")
    return CONFIG_NAMES[layout]


def _place(gpus: Gpus) -> str:
    """Where a classifier runs that takes a GPU if there is one."""
    names = dict.fromkeys(gpu.name for gpu in gpus.devices)
    return " and ".join(names) or f"the CPU ({gpus.why_none})"
