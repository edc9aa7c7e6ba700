# SPDX-License-Identifier: Apache-2.0
"""The padded TorchScript module, one forward pass a batch. Knows nothing of Triton.

The baseline to beat, and the fallback on a GPU machine that has no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ensemble.handlers.packing import Ids, padded
from ensemble.handlers.scores import Scores


@dataclass(frozen=True)
class PaddedRows:
    """The rows of one request, INT64 [b, L] each."""

    input_ids: Ids
    attention_mask: Ids
    token_type_ids: Ids


class TorchScriptClassifier:
    """A TorchScript module on one device.

    forward_passes: made since it was loaded.
    """

    def __init__(self, file: Path, device: str, *, threads: int = 0) -> None:
        """device: as torch names it, such as "cpu" or "cuda:1". threads: on the CPU; 0 leaves torch's own choice."""
        if threads:
            torch.set_num_threads(threads)
        self.device = torch.device(device)
        self._module = torch.jit.load(str(file), map_location=self.device).eval()  # type: ignore[no-untyped-call]
        self.forward_passes = 0

    def __call__(self, requests: Sequence[PaddedRows], pad_token_id: int) -> Scores:
        """Stack the rows of all requests, padded to the longest, and run the model once."""
        stacked = (
            self._stack([request.input_ids for request in requests], pad_token_id),
            self._stack([request.attention_mask for request in requests], 0),
            self._stack([request.token_type_ids for request in requests], 0),
        )
        self.forward_passes += 1
        with torch.inference_mode():
            logits, probabilities = self._module(*stacked)
        return Scores(logits.cpu().numpy(), probabilities.cpu().numpy())

    def _stack(self, arrays: Sequence[Ids], fill: int) -> torch.Tensor:
        rows: list[Ids] = [row for array in arrays for row in array]
        return torch.from_numpy(np.asarray(padded(rows, fill))).to(self.device)


def device_of(args: dict[str, str]) -> str:
    """Where Triton placed this instance, from what it hands to initialize(), in torch's words."""
    if args["model_instance_kind"] == "GPU":
        return f"cuda:{args['model_instance_device_id']}"
    return "cpu"
