# SPDX-License-Identifier: Apache-2.0
"""A model of BERT-base's size whose activations are those of a trained one, without a model hub.

Speed does not depend on the weights, but FP16 does: random weights have none of the outliers, up to 190 here, that a
trained BERT has. So the default model is widened from 384 to 768 by a rule that keeps its function, as Net2Net does
(Chen et al. 2016, arXiv 1511.05641): every value exists twice, and a weight W that reads x becomes

    1/2 [W + E, W - E] [x; x] = W x,    E seeded noise of W's own spread, so that no two columns are alike,

and each of the 6 layers stands twice in a row, which makes 12. At 6 layers it answers as the default model does; at 12
its answers mean nothing, but its activations stay within a few per cent of those of the layer they come from.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification


def base_sized(
    model: BertForSequenceClassification, *, layers: int = 12, seed: int = 0
) -> BertForSequenceClassification:
    """The model at twice its width: hidden 768, intermediate 3072, 12 heads, for the default model's 384, 1536, 12."""
    config, source = model.config, model.state_dict()
    generator = torch.Generator().manual_seed(seed)
    wide: BertForSequenceClassification = BertForSequenceClassification(
        BertConfig(
            **{
                **config.to_diff_dict(),
                "hidden_size": 2 * config.hidden_size,
                "intermediate_size": 2 * config.intermediate_size,
                "num_hidden_layers": layers,
            }
        )
    )
    wide.eval()  # type: ignore[no-untyped-call]
    weights = {}
    for name, target in wide.state_dict().items():
        depth = re.search(r"\.layer\.(\d+)\.", name)
        origin = name
        if depth:
            origin = name.replace(depth[0], f".layer.{int(depth[1]) * config.num_hidden_layers // layers}.")
        weights[name] = _widened(origin, source[origin], target.shape, config.num_attention_heads, generator)
    wide.load_state_dict(weights)
    return wide


def _widened(name: str, weight: Tensor, shape: torch.Size, heads: int, generator: torch.Generator) -> Tensor:
    """One tensor of the model, at its width there."""
    if weight.shape == shape:
        return weight
    # Attention's inner values double within each head: head 0 twice, then head 1.
    into_heads = re.search(r"attention\.self\.(query|key|value)\.", name)
    # Each of query and key by 2^(1/4), for twice the products over the root of twice the head: 2 / sqrt(2).
    scale = 2**-0.25 if into_heads and into_heads[1] != "value" else 1.0
    if "embeddings" in name or weight.ndim == 1:
        copies, _ = _twice(weight.shape[-1], heads if into_heads else 1)
        return weight[..., copies] * scale
    copies, sign = _twice(weight.shape[1], heads if "attention.output" in name else 1)
    rows = torch.arange(len(weight)) if len(weight) == shape[0] else _twice(len(weight), heads if into_heads else 1)[0]
    noise = torch.randn(len(rows), weight.shape[1], generator=generator) * weight.std()
    return scale * (weight[rows][:, copies] + sign * noise[:, copies]) / 2


def _twice(size: int, groups: int) -> tuple[Tensor, Tensor]:
    """For each place of the doubled width the place it copies, and the sign of its noise; both [2 * size]."""
    places = torch.arange(size).reshape(groups, -1)
    signs = torch.ones(places.shape)
    return torch.cat([places, places], dim=1).reshape(-1), torch.cat([signs, -signs], dim=1).reshape(-1)
