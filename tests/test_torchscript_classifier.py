# SPDX-License-Identifier: Apache-2.0
"""The padded TorchScript module in-process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ensemble.handlers.torchscript_classifier import PaddedRows, TorchScriptClassifier, device_of


def request_of(ids: list[list[int]]) -> PaddedRows:
    array = np.array(ids)
    return PaddedRows(array, np.ones_like(array), np.zeros_like(array))


@pytest.mark.parametrize(
    ("kind", "device_id", "device"), [("CPU", "0", "cpu"), ("GPU", "0", "cuda:0"), ("GPU", "1", "cuda:1")]
)
def test_an_instance_runs_where_triton_placed_it(kind: str, device_id: str, device: str) -> None:
    """The instance group decides: two GPU instances are not both on GPU 0."""
    assert device_of({"model_instance_kind": kind, "model_instance_device_id": device_id}) == device


def test_requests_of_different_length_and_rows_are_one_pass(repository: Path) -> None:
    """Two rows of 4 tokens and one of 7: one forward pass, and each row as if it were alone."""
    classify = TorchScriptClassifier(repository / "baseline/1/model.pt", "cpu")
    requests = [request_of([[101, 5, 6, 102], [101, 7, 8, 102]]), request_of([[101, 9, 9, 9, 9, 9, 102]])]

    together = classify(requests, pad_token_id=0).cut([2, 1])

    assert classify.forward_passes == 1
    for scores, request in zip(together, requests, strict=True):
        alone = classify([request], pad_token_id=0)
        np.testing.assert_allclose(scores.logits, alone.logits, atol=1e-5)
        np.testing.assert_allclose(scores.probabilities.sum(axis=1), 1, atol=1e-6)
