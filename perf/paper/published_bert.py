# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's own BERT-base figures on an A100, and how far the paper's arithmetic is from them. Pure.

From NVIDIA/TensorRT, demo/BERT/README.md (commit 007c3470), "Inference performance: NVIDIA A100 (40GB)", BERT Base,
FP16 latency, average; without copying inputs and outputs. Padded rows, no server, TensorRT's own fused attention.
"""

from __future__ import annotations

import numpy as np

from perf.paper.cards import CARDS
from perf.paper.roofline_model import BertShape, padded, seconds

CARD = CARDS["NVIDIA A100-SXM4-40GB"]
SHAPE = BertShape()

# (rows, length) -> milliseconds of one pass
MILLISECONDS = {
    (1, 128): 0.67,
    (2, 128): 0.83,
    (4, 128): 1.02,
    (8, 128): 1.38,
    (16, 128): 2.18,
    (32, 128): 4.10,
    (64, 128): 8.05,
    (128, 128): 16.14,
    (1, 384): 1.31,
    (2, 384): 1.64,
    (4, 384): 2.31,
    (8, 384): 3.62,
    (16, 384): 6.72,
    (32, 384): 13.51,
    (64, 384): 26.11,
    (128, 384): 51.26,
}


def share_of_peak(rows: int, length: int) -> float:
    """Of the card's FP16 peak, what a published pass reaches."""
    work = padded(SHAPE, rows, length)
    return work.flops / (MILLISECONDS[rows, length] * 1e-3) / CARD.flops


def pass_seconds(share: float) -> float:
    """What a pass costs beside its roofline at `share` of the peak: least squares on relative errors.

    Launches, and kernels too small to fill the card. With 60 % it is 0.6 ms, and from 8 rows on all are met within a
    sixth.
    """
    paper = np.array([seconds(padded(SHAPE, *size), CARD, share) for size in MILLISECONDS])
    measured = np.array(list(MILLISECONDS.values())) * 1e-3
    weight = 1 / measured**2
    return float((weight * (measured - paper)).sum() / weight.sum())
