# SPDX-License-Identifier: Apache-2.0
"""Triton's plug for the packed graph on ONNX Runtime (configs/cpu.pbtxt): ids in, logits and probabilities out."""

from itertools import chain

from ensemble.artifacts import checked
from ensemble.handlers.execution import HandlerMetrics, Parameters, execute, output, tensor_of, version_folder
from ensemble.handlers.onnx_classifier import OnnxClassifier
from ensemble.handlers.packing import Ids, check_ids, check_lengths, without_padding
from ensemble.handlers.passes import CostModel
from ensemble.handlers.scores import Scores


class TritonPythonModel:
    """An item is the rows of one request, a result is their scores."""

    def initialize(self, args):
        parameters = Parameters(args)
        file, self.manifest = checked(version_folder(args) / "model.onnx")
        cost = CostModel(parameters.number("attention_cost", float), parameters.number("pass_cost", float))
        self.classify = OnnxClassifier(file, cost, threads=parameters.number("threads", int))
        self.metrics = HandlerMetrics(args)

    def execute(self, requests):
        return execute(requests, self)

    def read(self, request) -> list[Ids]:
        input_ids = tensor_of(request, "input_ids")
        rows = without_padding(input_ids, self.manifest.pad_token_id)
        check_lengths("input_ids", [len(row) for row in rows], self.manifest.max_length)
        check_ids("input_ids", input_ids, self.manifest.vocab_size)
        return rows

    def compute(self, items: list[list[Ids]]) -> list[Scores]:
        scores = self.classify(list(chain.from_iterable(items)))
        self.metrics.report_calls(self.classify.forward_passes)
        return scores.cut([len(rows) for rows in items])

    def write(self, scores: Scores, wanted: frozenset[str]):
        return [output(name, getattr(scores, name)) for name in ("logits", "probabilities") if name in wanted]
