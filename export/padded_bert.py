# SPDX-License-Identifier: Apache-2.0
"""BERT for sequence classification on padded rows, [B, S]: the usual layout. Knows nothing of TorchScript or Triton.

Written so that torch.jit.script takes it. A trace of the Hugging Face model would carry the tracing machine's device
in its graph and fail on another one; here every tensor that is made takes the device of the input.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import BertForSequenceClassification

from export.bert_parts import AfterAttention, ClassifierHead, QueryKeyValue


class PaddedLayer(nn.Module):
    """One encoder layer."""

    def __init__(self, layer: nn.Module, heads: int, activation: str) -> None:
        super().__init__()
        self.heads = heads
        self.project = QueryKeyValue(layer.attention)  # type: ignore[arg-type]
        self.after = AfterAttention(layer, activation)  # type: ignore[arg-type]

    def forward(self, states: Tensor, is_key: Tensor) -> Tensor:
        """states FP32 [B, S, hidden], is_key BOOL [B, 1, 1, S] -> FP32 [B, S, hidden]."""
        rows, longest, hidden = states.shape
        split = self.project(states).reshape(rows, longest, 3, self.heads, hidden // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        context = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=is_key)
        result: Tensor = self.after(context.transpose(1, 2).reshape(rows, longest, hidden), states)
        return result


class PaddedBertClassifier(nn.Module):
    """A BertForSequenceClassification with its three usual inputs."""

    def __init__(self, model: BertForSequenceClassification) -> None:
        super().__init__()
        config, embeddings = model.config, model.bert.embeddings
        self.words = embeddings.word_embeddings
        self.positions = embeddings.position_embeddings
        self.token_types = embeddings.token_type_embeddings
        self.norm = embeddings.LayerNorm
        self.layers = nn.ModuleList(
            PaddedLayer(layer, config.num_attention_heads, config.hidden_act) for layer in model.bert.encoder.layer
        )
        self.head = ClassifierHead(model)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> tuple[Tensor, Tensor]:
        """INT64 [B, S] each -> logits FP32 [B, C], probabilities FP32 [B, C]."""
        position = torch.arange(input_ids.shape[1], device=input_ids.device)
        states = self.norm(self.words(input_ids) + self.token_types(token_type_ids) + self.positions(position))
        is_key = attention_mask[:, None, None, :] != 0
        for layer in self.layers:
            states = layer(states, is_key)
        logits, probabilities = self.head(states[:, 0])
        return logits, probabilities
