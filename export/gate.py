# SPDX-License-Identifier: Apache-2.0
"""The parity gate: the Hugging Face tokenizer and model against the files just written, on real texts.

Nothing passes here by trust: the reference tokenizes and runs each text alone, at its own length; the candidates use
the written tokenizer.json and the written graphs, alone and in batches of mixed lengths. Here are the reference and the
FP32 graphs; export/gate_fp16.py has the FP16 graph and the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.progress import track

from ensemble.errors import ExportError
from ensemble.handlers.onnx_classifier import OnnxClassifier
from ensemble.handlers.packing import Ids, padded
from ensemble.handlers.passes import CostModel
from ensemble.handlers.scores import Scores
from ensemble.handlers.tokenization import TextTokenizer
from ensemble.handlers.torchscript_classifier import PaddedRows, TorchScriptClassifier
from export.parity import Logits, Parity, compare, failures
from export.source import SourceModel

# A batch as it may come: neighbours of any length, in one pass, so that a text's logits could depend on them.
BATCH = 4
ONE_PASS = CostModel(attention_cost=0.0, pass_cost=1.0)


@dataclass(frozen=True)
class Reference:
    """The texts of the gate, as rows of the written tokenizer.json, and the Hugging Face model's answers.

    rows: INT64 [length] each; logits, probabilities: FP32 [texts, labels]
    """

    texts: Sequence[str]
    rows: Sequence[Ids]
    logits: Logits
    probabilities: Logits
    multi_label: bool

    def compare(self, what: str, precision: str, scores: Scores) -> list[Parity]:
        """Both outputs of a candidate against the reference."""
        return [
            compare(
                f"{what} against PyTorch",
                self.logits,
                scores.logits,
                multi_label=self.multi_label,
                precision=precision,
            ),
            compare(
                f"{what}: probabilities",
                self.probabilities,
                scores.probabilities,
                multi_label=False,
                precision=precision,
            ),
        ]

    def require(self, verdicts: Sequence[Parity]) -> None:
        """Raise ExportError naming the worst text if a verdict did not pass."""
        if failed := failures(verdicts):
            worst = max(failed, key=lambda verdict: verdict.max_abs)
            raise ExportError(
                f"the parity gate failed, nothing is installed. {worst}. The worst text is number {worst.worst_text} "
                f"({len(self.rows[worst.worst_text])} tokens): {self.texts[worst.worst_text][:80]!r}"
            )


def reference(source: SourceModel, folder: Path, max_length: int, texts: Sequence[str]) -> Reference:
    """Run the Hugging Face model. Raises ExportError where the written tokenizer disagrees with its tokenizer."""
    # One thread: on short rows more gain little, and on a machine that is busy otherwise they lose twentyfold, waiting
    # for each other at every operator.
    torch.set_num_threads(1)
    # Whatever texts were given, one is longer than the model takes: the cut must be the same too.
    texts = [*texts, " ".join([*texts, *map(str, range(max_length))])]
    rows = _same_rows(source, folder, max_length, texts)
    logits = np.stack([_logits(source, row) for row in track(rows, "  Hugging Face model", transient=True)])
    multi_label = source.model.config.problem_type == "multi_label_classification"
    return Reference(texts, rows, logits, _probabilities(source, logits), multi_label)


def check_fp32(expected: Reference, folder: Path) -> list[Parity]:
    """The verdicts on model.onnx and model.pt, all passed. Raises ExportError naming the worst text otherwise."""
    onnx = OnnxClassifier(folder / "model.onnx", ONE_PASS)
    baseline = TorchScriptClassifier(folder / "model.pt", "cpu")

    def stacked(batch: Sequence[Ids]) -> Scores:
        ids, mask = padded(batch, 0), padded([np.ones_like(row) for row in batch], 0)
        return baseline([PaddedRows(ids, mask, np.zeros_like(ids))], 0)

    alone = run(onnx, expected.rows, 1, "ONNX, alone")
    batched = run(onnx, expected.rows, BATCH, "ONNX, batched")
    torchscript = run(stacked, expected.rows, BATCH, "TorchScript, batched")
    verdicts = [
        *expected.compare("ONNX alone", "fp32", alone),
        *expected.compare("ONNX batched", "fp32", batched),
        compare("ONNX batched against alone", alone.logits, batched.logits, multi_label=expected.multi_label),
        *expected.compare("TorchScript batched", "fp32", torchscript),
    ]
    expected.require(verdicts)
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


def _logits(source: SourceModel, row: Ids) -> Logits:
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


def run(classify: Callable[[Sequence[Ids]], Scores], rows: Sequence[Ids], batch: int, what: str) -> Scores:
    """All rows through a candidate, `batch` of them at a time."""
    starts = track(range(0, len(rows), batch), f"  {what}", transient=True)
    parts = [classify(rows[start : start + batch]) for start in starts]
    return Scores(
        np.concatenate([part.logits for part in parts]), np.concatenate([part.probabilities for part in parts])
    )
