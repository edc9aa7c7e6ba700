# SPDX-License-Identifier: Apache-2.0
"""The parts of BERT that do not care how a batch is laid out, on the weights of a Hugging Face model.

packed_bert.py and padded_bert.py put attention between them. Knows nothing of ONNX, TorchScript or Triton.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification
from transformers.activations import ACT2FN
from transformers.models.bert.modeling_bert import BertAttention, BertLayer

Activation = Literal["softmax", "sigmoid", "identity"]


def activation_of(config: BertConfig) -> Activation:
    """What turns logits into `probabilities`, as the Hugging Face text-classification pipeline decides it.

    Softmax for one label of several, sigmoid for a multi-label model and for a single logit that is not declared a
    regression; a regression's value is handed out as it is. Source: transformers/pipelines/text_classification.py.
    """
    if config.problem_type == "regression":
        return "identity"
    if config.problem_type == "multi_label_classification" or config.num_labels == 1:
        return "sigmoid"
    return "softmax"


class QueryKeyValue(nn.Module):
    """The three projections of self-attention as one matrix product, [N, hidden] -> [N, 3 * hidden]."""

    def __init__(self, attention: BertAttention) -> None:
        super().__init__()
        parts = [attention.self.query, attention.self.key, attention.self.value]
        self.weight = nn.Parameter(torch.cat([part.weight for part in parts]))
        self.bias = nn.Parameter(torch.cat([part.bias for part in parts]))

    def forward(self, states: Tensor) -> Tensor:
        """Query, key and value of every state, side by side."""
        return nn.functional.linear(states, self.weight, self.bias)

    def query(self, states: Tensor) -> Tensor:
        """The query alone, [N, hidden]."""
        hidden = self.weight.shape[1]
        return nn.functional.linear(states, self.weight[:hidden], self.bias[:hidden])

    def key_value(self, states: Tensor) -> Tensor:
        """Key and value side by side, [N, 2 * hidden]."""
        hidden = self.weight.shape[1]
        return nn.functional.linear(states, self.weight[hidden:], self.bias[hidden:])


class AfterAttention(nn.Module):
    """The rest of an encoder layer: output projection, feed-forward network, and both LayerNorms (post-norm)."""

    def __init__(self, layer: BertLayer, activation: str) -> None:
        super().__init__()
        self.projection = layer.attention.output.dense
        self.attention_norm = layer.attention.output.LayerNorm
        self.up = layer.intermediate.dense
        self.activation = ACT2FN[activation]
        self.down = layer.output.dense
        self.output_norm = layer.output.LayerNorm

    def forward(self, context: Tensor, residual: Tensor) -> Tensor:
        """context, residual: [N, hidden] each -> [N, hidden]."""
        attended = self.attention_norm(self.projection(context) + residual)
        hidden: Tensor = self.output_norm(self.down(self.activation(self.up(attended))) + attended)
        return hidden


class ClassifierHead(nn.Module):
    """Pooler, classifier and the activation: [CLS] states [B, hidden] -> logits [B, C], probabilities [B, C]."""

    def __init__(self, model: BertForSequenceClassification) -> None:
        super().__init__()
        assert model.bert.pooler is not None  # a sequence classifier has one
        self.pooler = model.bert.pooler.dense
        self.classifier = model.classifier
        self.activation: str = activation_of(model.config)

    def forward(self, cls_states: Tensor) -> tuple[Tensor, Tensor]:
        """Both outputs FP32."""
        logits = self.classifier(torch.tanh(self.pooler(cls_states)))
        if self.activation == "softmax":
            return logits, torch.softmax(logits, dim=-1)
        if self.activation == "sigmoid":
            return logits, torch.sigmoid(logits)
        return logits, logits.clone()  # the same tensor twice would be one output with two names
