# SPDX-License-Identifier: Apache-2.0
"""The flow of export: source -> files -> parity gate -> engine -> installed. Each step lives in a module of its own."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

from ensemble.artifacts import FP16_ONNX, PLAN, Manifest, sha256_of
from ensemble.contract import Contract
from ensemble.errors import ExportError, PipelineError
from ensemble.launcher.choice import config_name_of
from export import engine, gate, gate_fp16, install, source
from export.bert_parts import activation_of
from export.engine_from_onnx import Settings
from export.fp16_on_cpu import fp16_on_cpu
from export.onnx_from_hf import FP16_GRAPHS, packed_fp32, write_onnx
from export.profile import profile_of
from export.torchscript_from_hf import write_torchscript

LIBRARIES = ("torch", "transformers", "tokenizers", "onnx", "onnxscript", "onnxruntime", "numpy")

TARGETS = ("onnx", "tensorrt")

Report = Callable[[str], None]


def export(
    name: str,
    repository: Path,
    *,
    texts: Sequence[str],
    revision: str = "main",
    max_length: int | None = None,
    target: str = "onnx",
    layout: str = "packed",
    engine_settings: Settings | None = None,
    report: Report = lambda _: None,
) -> Manifest:
    """Make a model repository serve a model. Returns the manifest of what was installed.

    name:       local folder or hub id of a BertForSequenceClassification
    texts:      what the parity gate compares answers on, and the lengths an engine is tuned for
    max_length: tokens of the longest row; by default all that the model, its tokenizer and the tokenizer's config take
    target:     one of TARGETS: "tensorrt" also builds an engine for this machine's GPU
    layout:     of the FP16 graph and the engine, one of FP16_GRAPHS
    report:     told each step as it begins

    Raises ExportError, and leaves the repository as it was, if any step fails.
    """
    gpu_target = engine.find_target() if target == "tensorrt" else None
    report(f"loading {name}")
    model = source.load(name, revision)
    config = model.model.config
    assert config.pad_token_id is not None  # export/source.py refuses a model without
    contract = Contract.read(repository)
    served = Contract.read(repository, config_name_of(layout))
    length = _max_length(model.max_length, contract.max_sequence_length, max_length)
    if gpu_target is not None and (problems := served.warm_up_problems(length)):
        raise ExportError("\n".join(problems))
    with install.staging(repository) as folder:
        report("writing model.onnx: packed rows, FP32")
        with _told("ONNX"):
            interface = write_onnx(packed_fp32(model.model), folder / "model.onnx")
        contract.check_graph(*interface)
        report(f"writing {FP16_ONNX}: {layout} rows, FP16 with LayerNorm and softmax in FP32")
        with _told("ONNX"):
            interface = write_onnx(FP16_GRAPHS[layout](model.model), folder / FP16_ONNX)
        served.check_graph(*interface, every_input=True)
        report("writing model.pt: TorchScript for the baseline")
        with _told("TorchScript"):
            write_torchscript(model.model, folder / "model.pt")
        model.tokenizer.enable_truncation(length)
        model.tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "labels.txt").write_text("".join(f"{label}\n" for label in model.labels), encoding="utf-8")
        report(f"parity gate: {len(texts)} texts through the Hugging Face model and through what was written")
        expected = gate.reference(model, folder, length, texts)
        verdicts = gate.check_fp32(expected, folder)
        classifier = served.models["classifier"]
        pad = config.pad_token_id
        fp16 = gate_fp16.check("FP16", fp16_on_cpu(folder / FP16_ONNX), classifier, pad, expected)
        verdicts += fp16.verdicts
        built = None
        if gpu_target is not None:
            report(f"building {PLAN} with TensorRT {gpu_target.trt.__version__} for {gpu_target.gpu.name}")
            profile = profile_of(classifier, length, [len(row) for row in expected.rows])
            settings = engine_settings or Settings()
            built = engine.build(gpu_target, folder / FP16_ONNX, profile, settings, report)
            verdicts += engine.check(gpu_target, folder / PLAN, profile, classifier, pad, expected, fp16)
        for verdict in verdicts:
            report(f"  {verdict}")
        manifest = Manifest(
            source=model.identity,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            versions={
                "python": platform.python_version(),
                **{library: importlib.metadata.version(library) for library in LIBRARIES},
            },
            sha256={file.name: sha256_of(file) for file in sorted(folder.iterdir())},
            labels=model.labels,
            activation=activation_of(config),
            max_length=length,
            vocab_size=config.vocab_size,
            type_vocab_size=config.type_vocab_size,
            pad_token_id=config.pad_token_id,
            layout=layout,
            parity=[verdict.as_dict() for verdict in verdicts],
            engine=built,
        )
        manifest.write(folder)
        report("installing")
    return manifest


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Tell in one line what the exporters of torch say in hundreds."""
    try:
        yield
    except (PipelineError, OSError):
        raise
    except Exception as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ExportError(
            f"the model cannot be written as {what} ({line}), nothing is installed: use the versions of pyproject.toml"
        ) from error


def _max_length(model_limit: int, config_limit: int, asked: int | None) -> int:
    """The served length: what was asked for, within what model and config allow."""
    limit = min(model_limit, config_limit)
    if asked is None:
        return limit
    if not source.SHORTEST <= asked <= limit:
        raise ExportError(
            f"max length {asked} is not between {source.SHORTEST} and {limit} (the model takes {model_limit}, "
            f"max_sequence_length in tokenizer/config.pbtxt is {config_limit}): choose one in that range"
        )
    return asked
