# SPDX-License-Identifier: Apache-2.0
"""Triton's plug for the stacked-tensor TorchScript handler: ids, mask and types in, logits and probabilities out."""

from ensemble.artifacts import checked
from ensemble.errors import InvalidRequest
from ensemble.handlers.execution import HandlerMetrics, Parameters, execute, output, tensor_of, version_folder
from ensemble.handlers.packing import check_ids, check_lengths
from ensemble.handlers.scores import Scores
from ensemble.handlers.torchscript_classifier import PaddedRows, TorchScriptClassifier, device_of


class TritonPythonModel:
    """An item is the padded rows of one request, a result is their scores."""

    def initialize(self, args):
        file, self.manifest = checked(version_folder(args) / "model.pt")
        threads = Parameters(args).number("threads", int)
        self.classify = TorchScriptClassifier(file, device_of(args), threads=threads)
        self.metrics = HandlerMetrics(args)

    def execute(self, requests):
        return execute(requests, self)

    def read(self, request) -> PaddedRows:
        rows = PaddedRows(*(tensor_of(request, name) for name in ("input_ids", "attention_mask", "token_type_ids")))
        if not rows.input_ids.shape == rows.attention_mask.shape == rows.token_type_ids.shape:
            raise InvalidRequest("input_ids, attention_mask and token_type_ids differ in shape: send all three alike")
        check_lengths("input_ids", [rows.input_ids.shape[1]] * len(rows.input_ids), self.manifest.max_length)
        check_lengths("attention_mask", rows.attention_mask.sum(axis=1).tolist(), self.manifest.max_length)
        check_ids("input_ids", rows.input_ids, self.manifest.vocab_size)
        check_ids("attention_mask", rows.attention_mask, 2)
        check_ids("token_type_ids", rows.token_type_ids, self.manifest.type_vocab_size)
        return rows

    def compute(self, items: list[PaddedRows]) -> list[Scores]:
        scores = self.classify(items, self.manifest.pad_token_id)
        self.metrics.report_calls(self.classify.forward_passes)
        return scores.cut([len(rows.input_ids) for rows in items])

    def write(self, scores: Scores, wanted: frozenset[str]):
        return [output(name, getattr(scores, name)) for name in ("logits", "probabilities") if name in wanted]
