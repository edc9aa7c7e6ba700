# SPDX-License-Identifier: Apache-2.0
"""What a classifier answers for the rows of a batch, whichever runtime computed it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Scores:
    """logits and probabilities, FP32 [rows, labels] each, C-contiguous."""

    logits: npt.NDArray[np.float32]
    probabilities: npt.NDArray[np.float32]

    def cut(self, row_counts: Sequence[int]) -> list[Scores]:
        """One piece per request, given the rows of each, in order."""
        if sum(row_counts) != len(self.logits):
            raise ValueError(f"{sum(row_counts)} rows were asked for, {len(self.logits)} came back")
        ends = list(accumulate(row_counts, initial=0))
        return [Scores(self.logits[start:end], self.probabilities[start:end]) for start, end in pairwise(ends)]
