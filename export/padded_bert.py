# SPDX-License-Identifier: Apache-2.0
"""BERT for sequence classification on padded rows, [B, S]: the usual layout. Knows nothing of TorchScript or Triton.

It is the baseline's TorchScript in FP32, and in FP16 the graph of a padded TensorRT engine.

Written so that torch.jit.script takes it. A trace of the Hugging Face model would carry the tracing machine's device
in its graph and fail on another one; here every tensor that is made takes the device of the input.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import BertForSequenceClassification
from transformers.models.bert.modeling_bert import BertLayer

from export.bert_parts import AddAndNorm, AfterAttention, ClassifierHead, QueryKeyValue, attend


class PaddedLayer(nn.Module):
    """One encoder layer."""

    __constants__ = ("fused",)  # TorchScript compiles only the branch that is taken

    def __init__(self, layer: BertLayer, heads: int, activation: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = heads
        # torch's own kernel is faster; TensorRT gets attention in parts, with a softmax of a type of its own.
        self.fused = dtype == torch.float32
        self.project = QueryKeyValue(layer.attention, dtype)
        self.after = AfterAttention(layer, activation, dtype)

    def forward(self, states: Tensor, is_key: Tensor) -> Tensor:
        """states [B, S, hidden], is_key BOOL [B, 1, 1, S] -> [B, S, hidden]."""
        rows, longest, hidden = states.shape
        split = self.project(states).reshape(rows, longest, 3, self.heads, hidden // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused:
            context = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=is_key)
        else:
            # Finite, because a row without any key would make softmax divide 0 by 0 with -inf.
            context = attend(query, key, value, torch.where(is_key, 0.0, -3.4e38))
        result: Tensor = self.after(context.transpose(1, 2).reshape(rows, longest, hidden), states)
        return result


class PaddedBertClassifier(nn.Module):
    """A BertForSequenceClassification with its three usual inputs."""

    def __init__(self, model: BertForSequenceClassification, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        config, embeddings = model.config, model.bert.embeddings
        self.words = nn.Parameter(embeddings.word_embeddings.weight.to(dtype))
        self.positions = nn.Parameter(embeddings.position_embeddings.weight.to(dtype))
        self.token_types = nn.Parameter(embeddings.token_type_embeddings.weight.to(dtype))
        self.norm = AddAndNorm(embeddings.LayerNorm)
        self.layers = nn.ModuleList(
            PaddedLayer(layer, config.num_attention_heads, config.hidden_act, dtype)  # type: ignore[arg-type]
            for layer in model.bert.encoder.layer
        )
        self.head = ClassifierHead(model)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> tuple[Tensor, Tensor]:
        """INT64 [B, S] each -> logits FP32 [B, C], probabilities FP32 [B, C]."""
        words = nn.functional.embedding(input_ids, self.words)
        where = nn.functional.embedding(token_type_ids, self.token_types) + self.positions[: input_ids.shape[1]]
        states = self.norm(words, where)
        is_key = attention_mask[:, None, None, :] != 0
        for layer in self.layers:
            states = layer(states, is_key)
        logits, probabilities = self.head(states[:, 0])
        return logits, probabilities
