# SPDX-License-Identifier: Apache-2.0
"""What GPUs can do on paper: FP16 tensor cores and memory, from NVIDIA's datasheets. Knows nothing of models.

Dense figures only: datasheets from Ampere on also print twice as much, "with sparsity", which no exported BERT has.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """One GPU as NVIDIA's driver names it.

    flops:     FP16 on the tensor cores, dense, FLOP/s
    bandwidth: of its memory, bytes/s
    source:    the datasheet
    """

    name: str
    flops: float
    bandwidth: float
    source: str


_A100 = "NVIDIA A100 datasheet (1758950): 312 TFLOPS, 624 with sparsity"
_H100 = "NVIDIA H100 datasheet, SXM: 1,979 TFLOPS with sparsity, half of it dense"

CARDS = {
    card.name: card
    for card in (
        Card("NVIDIA A100-SXM4-80GB", 312e12, 2039e9, _A100),
        Card("NVIDIA A100-SXM4-40GB", 312e12, 1555e9, _A100),
        Card("NVIDIA A100 80GB PCIe", 312e12, 1935e9, _A100),
        Card("NVIDIA A100-PCIE-40GB", 312e12, 1555e9, _A100),
        Card("NVIDIA H100 80GB HBM3", 989.4e12, 3350e9, _H100),
        Card(
            "NVIDIA H200", 989.4e12, 4800e9, "NVIDIA H200 datasheet, SXM: 1,979 TFLOPS with sparsity, half of it dense"
        ),
        Card("NVIDIA L40S", 362e12, 864e9, "NVIDIA L40S datasheet: 362 TFLOPS, 733 with sparsity"),
        Card("NVIDIA L4", 121e12, 300e9, "NVIDIA L4 datasheet: 242 TFLOPS with sparsity, half of it dense"),
        Card("NVIDIA A10", 125e12, 600e9, "NVIDIA A10 datasheet: 125 TFLOPS, 250 with sparsity"),
        Card("Tesla T4", 65e12, 320e9, "NVIDIA T4 datasheet: 65 TFLOPS, no sparsity"),
    )
}

DEFAULT = CARDS["NVIDIA A100-SXM4-80GB"]


def card_of(name: str | None) -> Card | None:
    """The card of that name. None for any other, a part of one (MIG) too: no peak is better than a wrong one."""
    return CARDS.get(name or "")
