# SPDX-License-Identifier: Apache-2.0
"""The parity gate: the Hugging Face tokenizer and model against the files just written, on real texts.

Nothing passes here by trust: the reference tokenizes and runs each text alone, at its own length; the candidates use
the written tokenizer.json and the written graphs, alone and in batches of mixed lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from rich.progress import track

from ensemble.errors import ExportError
from ensemble.onnx_classifier import OnnxClassifier
from ensemble.packing import Ids, padded
from ensemble.passes import CostModel
from ensemble.scores import Scores
from ensemble.tokenization import TextTokenizer
from ensemble.torchscript_classifier import PaddedRows, TorchScriptClassifier
from export.parity import Logits, Parity, compare, failures
from export.source import SourceModel

# A batch as it may come: neighbours of any length, in one pass, so that a text's logits could depend on them.
BATCH = 4
ONE_PASS = CostModel(attention_cost=0.0, pass_cost=1.0)


def check(source: SourceModel, folder: Path, max_length: int, texts: Sequence[str]) -> list[Parity]:
    """The verdicts, all passed. Raises ExportError naming the worst text if one did not."""
    # One thread: on short rows more gain little, and on a machine that is busy otherwise they lose twentyfold, waiting
    # for each other at every operator.
    torch.set_num_threads(1)
    # Whatever texts were given, one is longer than the model takes: the cut must be the same too.
    texts = [*texts, " ".join([*texts, *map(str, range(max_length))])]
    rows = _same_rows(source, folder, max_length, texts)
    reference = np.stack([_reference(source, row) for row in track(rows, "  Hugging Face model", transient=True)])
    expected = _probabilities(source, reference)
    onnx = OnnxClassifier(folder / "model.onnx", ONE_PASS)
    baseline = TorchScriptClassifier(folder / "model.pt", "cpu")

    def stacked(batch: Sequence[Ids]) -> Scores:
        ids, mask = padded(batch, 0), padded([np.ones_like(row) for row in batch], 0)
        return baseline([PaddedRows(ids, mask, np.zeros_like(ids))], 0)

    alone = _scores(onnx, rows, 1, "ONNX, alone")
    batched = _scores(onnx, rows, BATCH, "ONNX, batched")
    torchscript = _scores(stacked, rows, BATCH, "TorchScript, batched")
    multi_label = source.model.config.problem_type == "multi_label_classification"
    verdicts = [
        compare("ONNX alone against PyTorch", reference, alone.logits, multi_label=multi_label),
        compare("ONNX batched against PyTorch", reference, batched.logits, multi_label=multi_label),
        compare("ONNX batched against alone", alone.logits, batched.logits, multi_label=multi_label),
        compare("ONNX probabilities against PyTorch", expected, batched.probabilities, multi_label=False),
        compare("TorchScript batched against PyTorch", reference, torchscript.logits, multi_label=multi_label),
    ]
    if failed := failures(verdicts):
        worst = max(failed, key=lambda verdict: verdict.max_abs)
        raise ExportError(
            f"the parity gate failed, nothing is installed. {worst}. The worst text is number {worst.worst_text} "
            f"({len(rows[worst.worst_text])} tokens): {texts[worst.worst_text][:80]!r}"
        )
    return verdicts


def _same_rows(source: SourceModel, folder: Path, max_length: int, texts: Sequence[str]) -> list[Ids]:
    """The rows of the written tokenizer, once they are those of the Hugging Face tokenizer."""
    rows = TextTokenizer(folder / "tokenizer.json")(texts)
    expected = source.hf_tokenizer(list(texts), truncation=True, max_length=max_length)["input_ids"]
    for text, row, ids in zip(texts, rows, expected, strict=True):
        if row.ids != ids:
            raise ExportError(
                f"the written tokenizer.json disagrees with the Hugging Face tokenizer on {text[:80]!r}; "
                "nothing is installed: check its tokenizer_config.json, or use the versions of pyproject.toml"
            )
    return [np.array(row.ids, dtype=np.int64) for row in rows]


def _reference(source: SourceModel, row: Ids) -> Logits:
    ids = torch.from_numpy(row)[None]
    with torch.inference_mode():
        logits: Logits = source.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0].numpy()
    return logits


def _probabilities(source: SourceModel, logits: Logits) -> Logits:
    """What the Hugging Face text-classification pipeline makes of the logits."""
    config, tensor = source.model.config, torch.from_numpy(logits)
    if config.problem_type == "regression":
        return logits
    if config.problem_type == "multi_label_classification" or config.num_labels == 1:
        return tensor.sigmoid().numpy()
    return tensor.softmax(dim=-1).numpy()


def _scores(run: Callable[[Sequence[Ids]], Scores], rows: Sequence[Ids], batch: int, what: str) -> Scores:
    starts = track(range(0, len(rows), batch), f"  {what}", transient=True)
    parts = [run(rows[start : start + batch]) for start in starts]
    return Scores(
        np.concatenate([part.logits for part in parts]), np.concatenate([part.probabilities for part in parts])
    )
