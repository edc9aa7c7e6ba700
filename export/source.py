# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face model, by hub id or local folder, checked before anything is made of it. Knows nothing of ONNX.

Reads safetensors only and runs no code that comes with a model: pickled weights and custom code are refused.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, PreTrainedTokenizerBase

from ensemble.artifacts import sha256_of
from ensemble.contract import leads_away
from ensemble.errors import ExportError

ARCHITECTURE = "BertForSequenceClassification"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model.pt", "model.bin")
TOKENIZERS = ("tokenizer.json", "vocab.txt")
# [CLS], one token, [SEP].
SHORTEST = 3
# A tokenizer without a limit reports a number like 1e30.
NO_LIMIT = 1_000_000


@dataclass(frozen=True)
class SourceModel:
    """What export works from.

    model:      in evaluation mode, FP32
    hf_tokenizer, tokenizer: the whole one, and its fast part without truncation and padding
    labels:     in the order of the logits
    max_length: tokens of the longest row that both model and tokenizer take
    identity:   name, and "revision" (hub commit) or "sha256" (of a local folder's weights)
    """

    model: BertForSequenceClassification
    hf_tokenizer: PreTrainedTokenizerBase
    tokenizer: Tokenizer
    labels: list[str]
    max_length: int
    identity: dict[str, str]


# torch.jit.script takes these; the gate has seen each of them agree with the Hugging Face model.
ACTIVATIONS = {"gelu", "gelu_new", "gelu_fast", "quick_gelu", "relu", "relu2", "relu6", "silu", "swish", "mish", "tanh"}


def load(name: str, revision: str = "main") -> SourceModel:
    """Load a model by local folder, or by hub id at a commit, tag or branch.

    Raises ExportError that says what is wrong and what would work.
    """
    local = _local_folder(name)
    if local:
        _check_files(local)
        name = str(local)
    config = _load_config(name, revision)
    model = _load_weights(name, revision, config)
    hf_tokenizer = _load_tokenizer(name, revision)
    tokenizer = _bare(hf_tokenizer)
    if tokenizer.get_vocab_size() > config.vocab_size:
        raise ExportError(
            f"{name}: the tokenizer has {tokenizer.get_vocab_size()} entries, the model's vocab_size is "
            f"{config.vocab_size}: use the tokenizer the model was trained with"
        )
    limits = [config.max_position_embeddings]
    if hf_tokenizer.model_max_length < NO_LIMIT:
        limits.append(int(hf_tokenizer.model_max_length))
    if min(limits) < SHORTEST:
        raise ExportError(
            f"{name}: max_position_embeddings in config.json and model_max_length in tokenizer_config.json are "
            f"{limits}: at least {SHORTEST} tokens are needed"
        )
    identity = {"name": local.name if local else name}
    if local:
        identity["sha256"] = _folder_hash(local)
    elif getattr(config, "_commit_hash", None):
        identity["revision"] = config._commit_hash
    return SourceModel(model, hf_tokenizer, tokenizer, _labels(name, config), min(limits), identity)


def _local_folder(name: str) -> Path | None:
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists():
        raise ExportError(f"{name} is a file: give the folder that holds config.json, the weights and the tokenizer")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith("."):
        raise ExportError(
            f"{name}: no such folder; give a folder or a hub id such as textattack/bert-base-uncased-imdb"
        )
    return None


def _check_files(folder: Path) -> None:
    """Refuse a local folder for what it lacks, before a library does so in its own words."""
    if not (folder / "config.json").is_file():
        raise ExportError(f"{folder}: config.json is missing: save the model with save_pretrained()")
    if not any((folder / name).is_file() for name in WEIGHTS):
        pickled = next((name for name in PICKLES if (folder / name).is_file()), None)
        if pickled:
            raise ExportError(
                f"{folder}: the weights are pickled ({pickled}), which runs code when it is read: load the model where "
                "you trust it and save_pretrained(..., safe_serialization=True), which writes model.safetensors"
            )
        raise ExportError(f"{folder}: model.safetensors is missing: save the model with save_pretrained()")
    for shard in _shards(folder):
        if leads_away(shard):
            raise ExportError(f"{folder}: {WEIGHTS[1]} names {shard!r}, outside the folder: save the model again")
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise ExportError(
            f"{folder}: no tokenizer.json and no vocab.txt: save the tokenizer into the same folder with "
            "tokenizer.save_pretrained()"
        )


def _shards(folder: Path) -> set[str]:
    """The files that hold the weights, if there are several; what is no list of them is told by who reads it."""
    try:
        return set(map(str, json.loads((folder / WEIGHTS[1]).read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()


def _load_config(name: str, revision: str) -> BertConfig:
    try:
        fields, _ = BertConfig.get_config_dict(name, revision=revision)
    except Exception as error:
        raise ExportError(f"{name}: its config.json cannot be read ({_line(error)}): {_OFFLINE}") from error
    architectures = fields.get("architectures") or []
    if fields.get("model_type") != "bert" or ARCHITECTURE not in architectures:
        found = ", ".join(architectures) or fields.get("model_type") or "unknown"
        raise ExportError(
            f"{name}: its architecture is {found}; only {ARCHITECTURE} can be exported: "
            "fine-tune it with AutoModelForSequenceClassification from a BERT checkpoint"
        )
    try:
        config = BertConfig.from_pretrained(name, revision=revision)
    except Exception as error:
        raise ExportError(f"{name}: its config.json is not valid ({_line(error)}): save the model again") from error
    if getattr(config, "position_embedding_type", "absolute") != "absolute" or config.is_decoder:
        raise ExportError(f"{name}: only encoders with absolute position embeddings can be exported")
    if config.pad_token_id is None:
        raise ExportError(f"{name}: pad_token_id is missing in config.json: set it to the tokenizer's [PAD] id")
    if config.hidden_act not in ACTIVATIONS:
        raise ExportError(
            f"{name}: hidden_act {config.hidden_act!r} in config.json is not among those that can be exported: "
            f"{', '.join(sorted(ACTIVATIONS))}"
        )
    # How the reference is called, not what it computes.
    config.return_dict = True
    config.chunk_size_feed_forward = 0
    return config


_OFFLINE = "check the name, or download the model where there is a network and give its folder"


def _load_weights(name: str, revision: str, config: BertConfig) -> BertForSequenceClassification:
    try:
        # The stubs know only the form without output_loading_info, which returns the model alone.
        loaded: Any = BertForSequenceClassification.from_pretrained(
            name,
            revision=revision,
            config=config,
            use_safetensors=True,
            dtype=torch.float32,
            output_loading_info=True,
        )
    except Exception as error:
        raise ExportError(
            f"{name}: its weights cannot be read from safetensors ({_line(error)}): save the model again with "
            f"save_pretrained(), or, for a hub model, {_OFFLINE}"
        ) from error
    model, report = loaded
    missing = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if missing:
        raise ExportError(
            f"{name}: weights are missing or of the wrong shape ({', '.join(missing[:4])}"
            f"{', ...' if len(missing) > 4 else ''}); they would be random: export a fine-tuned classifier"
        )
    return cast(BertForSequenceClassification, model.eval())


def _load_tokenizer(name: str, revision: str) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
    except Exception as error:
        raise ExportError(f"{name}: its tokenizer cannot be read ({_line(error)}): save it again") from error
    if tokenizer.truncation_side != "right":
        raise ExportError(
            f"{name}: its tokenizer cuts long texts at the left; only truncation_side='right' can be exported: "
            "set it in tokenizer_config.json if the model was trained so"
        )
    if not tokenizer.is_fast:
        raise ExportError(f"{name}: there is no fast tokenizer for it: save one that has a tokenizer.json")
    return cast(PreTrainedTokenizerBase, tokenizer)


def _bare(hf_tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """A copy of the fast tokenizer without the truncation and padding some models ship in their tokenizer.json."""
    tokenizer = Tokenizer.from_str(hf_tokenizer.backend_tokenizer.to_str())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _labels(name: str, config: BertConfig) -> list[str]:
    """Labels in the order of the logits; a label file has one per line, so each must be one line."""
    id2label = {int(index): str(label) for index, label in (config.id2label or {}).items()}
    count = config.num_labels or 0
    if sorted(id2label) != list(range(count)):
        raise ExportError(f"{name}: id2label in config.json must name the labels 0 to {count - 1}")
    labels = [id2label[index] for index in range(count)]
    for label in labels:
        if not label.strip() or label != label.strip() or not label.isprintable():
            raise ExportError(
                f"{name}: label {label!r} in id2label must be one line of printable characters, no space at its ends"
            )
    if len(set(labels)) != len(labels):
        raise ExportError(f"{name}: two entries of id2label in config.json are the same: name each label once")
    return labels


def _folder_hash(folder: Path) -> str:
    """One hash over the weights, the config and the tokenizer of a local folder."""
    names = sorted(
        path.name
        for path in folder.iterdir()
        if path.is_file() and (path.suffix == ".safetensors" or path.name in ("config.json", *WEIGHTS, *TOKENIZERS))
    )
    listing = {name: sha256_of(folder / name) for name in names}
    return hashlib.sha256(json.dumps(listing, sort_keys=True).encode()).hexdigest()


def _line(error: BaseException) -> str:
    """The first line of a library's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
