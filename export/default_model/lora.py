# SPDX-License-Identifier: Apache-2.0
"""The adapter's arithmetic: a low-rank update on linear layers, attached for training and merged for export.

Shared by train.py and build.py. It knows nothing of files, texts or the sentiment task.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

RANK = 8
SCALE = 2.0


class LoraLinear(nn.Module):
    """A frozen linear layer W plus a trained update: x W^T + bias + scale (x A^T) B^T.

    A is [rank, in], B is [out, rank]. B starts at zero, so training starts from the base model's own output.
    """

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.scale = scale
        self.lora_A = nn.Parameter(torch.empty(rank, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """x is [..., in]; the result is [..., out]."""
        result: Tensor = self.base(x) + self.scale * ((x @ self.lora_A.T) @ self.lora_B.T)
        return result


def attach(model: nn.Module, names: Iterable[str], rank: int = RANK, scale: float = SCALE) -> None:
    """Put a LoraLinear in place of each named nn.Linear of `model`."""
    for name in names:
        parent_name, _, attribute = name.rpartition(".")
        linear = model.get_submodule(name)
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"{name} is a {type(linear).__name__}; only an nn.Linear can take a LoRA update")
        setattr(model.get_submodule(parent_name), attribute, LoraLinear(linear, rank, scale))


def merge(weights: Mapping[str, Tensor], adapter: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """The weights of an ordinary model, FP32: W + scale B A for each adapted layer, whole tensors taken as they are.

    `adapter` holds `<layer>.lora_A` and `<layer>.lora_B` pairs, and whole tensors under their own names.
    """
    merged = {name: tensor.float() for name, tensor in weights.items()}
    for name, tensor in adapter.items():
        if name.endswith(".lora_A"):
            layer = name.removesuffix(".lora_A")
            update = adapter[f"{layer}.lora_B"].float() @ tensor.float()
            merged[f"{layer}.weight"] = merged[f"{layer}.weight"] + scale * update
        elif not name.endswith(".lora_B"):
            merged[name] = tensor.float()
    return merged
