# SPDX-License-Identifier: Apache-2.0
"""Whether what was exported answers like the Hugging Face model, text by text. Knows nothing of files or Triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]

# Largest difference of a logit, by precision, times the text's largest logit where that is over 1. FP32 kernels sum in
# different orders: 1e-6 is usual for a BERT, a wrong mask or a lost token type costs 1e-2 and more.
TOLERANCE = {"fp32": 1e-4}


@dataclass(frozen=True)
class Parity:
    """One comparison of logits, [texts, labels], against those of the reference. Truthy when it passes.

    max_abs, mean_abs: differences of a logit, over the text's largest reference logit where that is over 1, so that a
                     regression to thousands is held to the digits FP32 has.

    label_agreement: share of texts with the same decision: the highest logit, or for a multi-label model the same side
                     of 0 on every logit. A reference decision by less than the tolerance is a tie and agrees with both.
    """

    comparison: str
    precision: str
    texts: int
    max_abs: float
    mean_abs: float
    label_agreement: float
    worst_text: int
    passed: bool

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        return (
            f"{self.comparison}: {self.texts} texts, logits differ by at most {self.max_abs:.1e} "
            f"(tolerance {TOLERANCE[self.precision]:.0e}), same label for {self.label_agreement:.1%}"
        )

    def as_dict(self) -> dict[str, Any]:
        """For model.json."""
        return {**asdict(self), "tolerance": TOLERANCE[self.precision]}


def compare(
    comparison: str, reference: Logits, candidate: Logits, *, multi_label: bool, precision: str = "fp32"
) -> Parity:
    """Hold a candidate's logits against the reference's; FP32 [texts, labels] both."""
    tolerance = TOLERANCE[precision]
    # NaN compares false with everything: it must count as a difference, not as none.
    scale = np.maximum(1.0, np.abs(reference).max(axis=1, keepdims=True))
    difference = np.nan_to_num(np.abs(candidate - reference) / scale, nan=np.inf, posinf=np.inf)
    per_text = difference.max(axis=1)
    agreement = float(np.mean(_agree(reference, candidate, multi_label, tolerance)))
    return Parity(
        comparison=comparison,
        precision=precision,
        texts=len(reference),
        max_abs=float(per_text.max()),
        mean_abs=float(difference.mean()),
        label_agreement=agreement,
        worst_text=int(per_text.argmax()),
        passed=bool(per_text.max() <= tolerance) and agreement == 1.0,
    )


def _agree(reference: Logits, candidate: Logits, multi_label: bool, tolerance: float) -> npt.NDArray[np.bool_]:
    if multi_label:
        same = ((reference > 0) == (candidate > 0)) | (np.abs(reference) <= tolerance)
        return np.asarray(same.all(axis=1))
    chosen = np.take_along_axis(reference, candidate.argmax(axis=1)[:, None], axis=1)[:, 0]
    return np.asarray(chosen >= reference.max(axis=1) - tolerance)


def failures(verdicts: Sequence[Parity]) -> list[Parity]:
    """Those that did not pass."""
    return [verdict for verdict in verdicts if not verdict]
