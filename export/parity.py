# SPDX-License-Identifier: Apache-2.0
"""Whether what was exported answers like the Hugging Face model, text by text. Knows nothing of files or Triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Tolerance:
    """What a precision may cost.

    logits:          largest difference of a logit, times the text's largest logit where that is over 1
    label_agreement: least share of equal decisions. Where it allows any to differ, one may do so on however few texts:
                     its logits are within the tolerance, so it was a near tie.
    """

    logits: float
    label_agreement: float


TOLERANCE = {
    # FP32 kernels sum in different orders: 1e-6 is usual for a BERT, a wrong mask or a lost token type costs 1e-2.
    "fp32": Tolerance(1e-4, 1.0),
    # FP16 rounds to 5e-4 of a value, at every operator: of 300 texts 3e-3 at most for 6 layers,
    # 1e-2 for BERT-base's 12, and a large BERT has 24. What overflows gives NaN.
    "fp16": Tolerance(3e-2, 0.995),
}
# A reference decision by less than this is none: both answers are right.
TIE = 1e-4


@dataclass(frozen=True)
class Parity:
    """One comparison of logits, [texts, labels], against those of the reference. Truthy when it passes.

    max_abs, mean_abs: differences of a logit, over the text's largest reference logit where that is over 1, so that a
                     regression to thousands is held to the digits FP32 has.

    label_agreement: share of equal decisions: one a text, its highest logit; of a multi-label model one a label, the
                     side of 0. A reference decision by less than TIE agrees with both.
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
            f"{self.comparison}: {self.texts} texts, at most {self.max_abs:.1e} apart "
            f"(tolerance {TOLERANCE[self.precision].logits:.0e}), mean {self.mean_abs:.1e}, same label for "
            f"{self.label_agreement:.1%}"
        )

    def as_dict(self) -> dict[str, Any]:
        """For model.json."""
        return {**asdict(self), "tolerance": asdict(TOLERANCE[self.precision])}


def compare(
    comparison: str, reference: Logits, candidate: Logits, *, multi_label: bool, precision: str = "fp32"
) -> Parity:
    """Hold a candidate's logits against the reference's; FP32 [texts, labels] both."""
    tolerance = TOLERANCE[precision]
    # NaN compares false with everything: it must count as a difference, not as none.
    scale = np.maximum(1.0, np.abs(reference).max(axis=1, keepdims=True))
    with np.errstate(invalid="ignore"):
        difference = np.nan_to_num(np.abs(candidate - reference) / scale, nan=np.inf, posinf=np.inf)
    per_text = difference.max(axis=1)
    same = _agree(reference, candidate, multi_label)
    may_differ = int(len(same) * (1 - tolerance.label_agreement))
    if tolerance.label_agreement < 1.0:
        may_differ = max(1, may_differ)
    return Parity(
        comparison=comparison,
        precision=precision,
        texts=len(reference),
        max_abs=float(per_text.max()),
        mean_abs=float(difference.mean()),
        label_agreement=float(np.mean(same)),
        worst_text=int(per_text.argmax()),
        passed=bool(per_text.max() <= tolerance.logits) and int(np.sum(~same)) <= may_differ,
    )


def _agree(reference: Logits, candidate: Logits, multi_label: bool) -> npt.NDArray[np.bool_]:
    if multi_label:
        return np.asarray(((reference > 0) == (candidate > 0)) | (np.abs(reference) <= TIE))
    chosen = np.take_along_axis(reference, candidate.argmax(axis=1)[:, None], axis=1)[:, 0]
    return np.asarray(chosen >= reference.max(axis=1) - TIE)


def failures(verdicts: Sequence[Parity]) -> list[Parity]:
    """Those that did not pass."""
    return [verdict for verdict in verdicts if not verdict]
