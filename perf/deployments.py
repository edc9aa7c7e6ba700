# SPDX-License-Identifier: Apache-2.0
"""The ways to serve one and the same model that measurements compare. Knows how to set each up, nothing of loads.

text_classifier   the TensorRT engine
baseline          the stacked TorchScript handler, one padded pass a batch
looped            the case study's fault, a pass a request (perf/looped); served from a view of the repository, never
                  from the repository itself
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from ensemble.artifacts import FOLDER, LABELS
from ensemble.contract import ENSEMBLE
from ensemble.launcher.options import ServerOptions
from ensemble.launcher.preflight import sound
from ensemble.launcher.server import Server
from ensemble.serve import open_server

LOOPED = Path(__file__).parent / "looped"


@dataclass(frozen=True)
class Deployment:
    """One way.

    step:      the model behind the tokenizer, whose batches are counted
    precision: of its linear layers, fp16 or fp32
    what:      one line for a table's reader
    """

    name: str
    step: str
    precision: str
    what: str


DEPLOYMENTS = {
    deployment.name: deployment
    for deployment in (
        Deployment("text_classifier", "classifier", "fp16", "the TensorRT engine"),
        Deployment("baseline", "baseline", "fp32", "TorchScript, requests stacked: one padded pass a batch"),
        Deployment(
            "looped", "looped", "fp32", "TorchScript, requests looped over: a pass a request, the case study's fault"
        ),
    )
}


def open_deployment(deployment: Deployment, repository: Path, scratch: Path, classifier: str = "tensorrt") -> Server:
    """A server for it, not yet started. scratch: an empty folder that lives as long as the server.

    classifier: what text_classifier is served with, tensorrt or onnx.
    Raises ServerError or ConfigError with the reason why it cannot run here.
    """
    if deployment.name == "looped":
        view = view_with_looped(repository, scratch)
        sound(view, None)
        return Server(ServerOptions(view, http_port=0, grpc_port=0, metrics_port=0))
    server, _ = open_server(repository, classifier if deployment.name == "text_classifier" else deployment.name)
    return server


def view_with_looped(repository: Path, folder: Path) -> Path:
    """A repository in `folder` that serves the ensemble through `looped`: links to the installed files, and no more.

    Its ensemble is the baseline's, with another second step.
    """
    repository = repository.resolve()
    sound(repository, "baseline")
    (folder / "tokenizer").symlink_to(repository / "tokenizer")
    for version in (folder / ENSEMBLE / "1", folder / "looped" / "1"):
        version.mkdir(parents=True)
    ensemble = (repository / ENSEMBLE / "configs/baseline.pbtxt").read_text(encoding="utf-8")
    (folder / ENSEMBLE / "config.pbtxt").write_text(
        ensemble.replace('model_name: "baseline"', 'model_name: "looped"'), encoding="utf-8"
    )
    (folder / FOLDER).symlink_to(repository / FOLDER)  # a handler takes no file from elsewhere
    (folder / LABELS).symlink_to((repository / LABELS).resolve())
    shutil.copy(LOOPED / "config.pbtxt", folder / "looped")
    shutil.copy(LOOPED / "model.py", folder / "looped" / "1")
    (folder / "looped/1/model.pt").symlink_to((repository / "baseline/1/model.pt").resolve())
    return folder
