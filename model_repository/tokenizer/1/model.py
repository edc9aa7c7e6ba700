# SPDX-License-Identifier: Apache-2.0
"""Triton's plug for the tokenizer: BYTES in, ids out, one tokenizer call for all that go on together."""

import threading
from itertools import chain, islice

import numpy as np

from ensemble.artifacts import checked
from ensemble.errors import InvalidRequest
from ensemble.handlers.execution import HandlerMetrics, Parameters, output, tensor_of, version_folder
from ensemble.handlers.gated_execution import Gate
from ensemble.handlers.packing import length_carrier, padded
from ensemble.handlers.tokenization import TextTokenizer, TokenizedText, check_size, decode


class TritonPythonModel:
    """An item is the texts of one request, a result is their rows."""

    def initialize(self, args):
        parameters = Parameters(args)
        self.max_text_bytes = parameters.number("max_text_bytes", int)
        self.max_request_bytes = parameters.number("max_request_bytes", int)
        file, manifest = checked(version_folder(args) / "tokenizer.json")
        self.tokenizer = TextTokenizer(file, threads=parameters.number("tokenizer_threads", int))
        self.pad_token_id = manifest.pad_token_id
        self.metrics, self.counting = HandlerMetrics(args), threading.Lock()
        self.gate = Gate(args, self)

    def execute(self, requests):
        return self.gate.execute(requests)

    def finalize(self):
        self.gate.close()

    def read(self, request) -> list[str]:
        texts = tensor_of(request, "text")
        if texts.ndim != 2 or texts.shape[1] != 1:
            raise InvalidRequest(f"text: shape {list(texts.shape)} is not [rows, 1]: send one text per row")
        read = [decode(text, row=row, max_bytes=self.max_text_bytes) for row, text in enumerate(texts[:, 0])]
        check_size(texts[:, 0], max_bytes=self.max_request_bytes)
        return read

    def size(self, texts: list[str]) -> tuple[int, int]:
        return len(texts), sum(len(text.encode()) for text in texts)

    def compute(self, items: list[list[str]]) -> list[list[TokenizedText]]:
        rows = iter(self.tokenizer(list(chain.from_iterable(items))))
        with self.counting:
            self.metrics.report_calls(self.tokenizer.calls)
        return [list(islice(rows, len(texts))) for texts in items]

    def write(self, rows: list[TokenizedText], wanted: frozenset[str]):
        ids = padded([row.ids for row in rows], self.pad_token_id)
        make = {
            "input_ids": lambda: ids,
            "attention_mask": lambda: padded([[1] * len(row.ids) for row in rows], 0),
            "token_type_ids": lambda: np.zeros_like(ids),
            "length_carrier": lambda: length_carrier(*ids.shape),
            "num_tokens": lambda: np.array([[row.num_tokens] for row in rows], dtype=np.int32),
            "truncated": lambda: np.array([[row.truncated] for row in rows], dtype=np.bool_),
        }
        return [output(name, array()) for name, array in make.items() if name in wanted]
