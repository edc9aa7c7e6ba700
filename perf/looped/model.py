# SPDX-License-Identifier: Apache-2.0
"""The handler of the case study, fault included: one forward pass a request, however many requests Triton hands over.

To be measured, never to be served. Each text runs at its own length; the case study padded each to 512 besides.
"""

from __future__ import annotations

from typing import Any

from ensemble.artifacts import checked
from ensemble.handlers.execution import HandlerMetrics, Parameters, execute, output, tensor_of, version_folder
from ensemble.handlers.scores import Scores
from ensemble.handlers.torchscript_classifier import PaddedRows, TorchScriptClassifier, device_of


class TritonPythonModel:
    """An item is the padded rows of one request, a result is their scores."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the baseline's model."""
        file, self.manifest = checked(version_folder(args) / "model.pt")
        self.classify = TorchScriptClassifier(file, device_of(args), threads=Parameters(args).number("threads", int))
        self.metrics = HandlerMetrics(args)

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response per request."""
        return execute(requests, self)

    def read(self, request: Any) -> PaddedRows:
        """Unchecked: what comes in is from our own tokenizer."""
        return PaddedRows(*(tensor_of(request, name) for name in ("input_ids", "attention_mask", "token_type_ids")))

    def compute(self, items: list[PaddedRows]) -> list[Scores]:
        """The fault: a loop where baseline stacks."""
        scores = [self.classify([rows], self.manifest.pad_token_id) for rows in items]
        self.metrics.report_calls(self.classify.forward_passes)
        return scores

    def write(self, scores: Scores, wanted: frozenset[str]) -> list[Any]:
        """What was asked for."""
        return [output(name, getattr(scores, name)) for name in ("logits", "probabilities") if name in wanted]
