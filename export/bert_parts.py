# SPDX-License-Identifier: Apache-2.0
"""The parts of BERT that do not care how a batch is laid out, on the weights of a Hugging Face model.

packed_bert.py and padded_bert.py put them together. Knows nothing of ONNX, TorchScript or Triton.

Every part takes the `dtype` of its linear layers, torch.float32 or torch.float16. With FP16 the graph is mixed
precision, said in the graph itself by casts, since TensorRT 11 knows no other way: matrix products, GELU and what lies
between layers are FP16; sums before a LayerNorm, LayerNorm, softmax and the head are FP32. FP16 ends at 65,504, and a
LayerNorm squares its input: BERTs have overflowed there (NVIDIA/TensorRT issues 1196, 2564, 4493). With FP32 all these
casts are none.
"""

from __future__ import annotations

import math
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


def linear(layer: nn.Linear, dtype: torch.dtype) -> nn.Linear:
    """The same layer in `dtype`; the model's own stays as it is."""
    result = nn.Linear(layer.in_features, layer.out_features, dtype=dtype)
    result.load_state_dict(layer.state_dict())
    return result


def attend(query: Tensor, key: Tensor, value: Tensor, key_bias: Tensor) -> Tensor:
    """Attention with its softmax in FP32.

    query [B, heads, Q, d], key and value [B, heads, S, d], key_bias FP32 [B, 1, 1, S], 0 where a key counts and hugely
    negative where not -> context [B, heads, Q, d].
    """
    # Scaled before the product, whose FP16 would overflow first.
    scores = (query * (1.0 / math.sqrt(query.shape[-1]))) @ key.transpose(2, 3)
    return (scores.float() + key_bias).softmax(dim=-1).type_as(value) @ value


class AddAndNorm(nn.Module):
    """LayerNorm of a sum, both in FP32, back in the type of the first summand."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Both [..., hidden]."""
        result: Tensor = self.norm(a.float() + b.float())
        return result.type_as(a)


class QueryKeyValue(nn.Module):
    """The three projections of self-attention as one matrix product, [N, hidden] -> [N, 3 * hidden]."""

    def __init__(self, attention: BertAttention, dtype: torch.dtype) -> None:
        super().__init__()
        parts = [attention.self.query, attention.self.key, attention.self.value]
        self.weight = nn.Parameter(torch.cat([part.weight for part in parts]).to(dtype))
        self.bias = nn.Parameter(torch.cat([part.bias for part in parts]).to(dtype))

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

    def __init__(self, layer: BertLayer, activation: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.projection = linear(layer.attention.output.dense, dtype)
        self.attention_norm = AddAndNorm(layer.attention.output.LayerNorm)
        self.up = linear(layer.intermediate.dense, dtype)
        self.activation = ACT2FN[activation]
        self.down = linear(layer.output.dense, dtype)
        self.output_norm = AddAndNorm(layer.output.LayerNorm)

    def forward(self, context: Tensor, residual: Tensor) -> Tensor:
        """context, residual: [N, hidden] each -> [N, hidden]."""
        attended = self.attention_norm(self.projection(context), residual)
        hidden: Tensor = self.output_norm(self.down(self.activation(self.up(attended))), attended)
        return hidden


class ClassifierHead(nn.Module):
    """Pooler, classifier and the activation: [CLS] states [B, hidden] -> logits [B, C], probabilities [B, C].

    FP32 throughout: it is one row a text, so it costs nothing, and logits rounded to FP16 would tie.
    """

    def __init__(self, model: BertForSequenceClassification) -> None:
        super().__init__()
        assert model.bert.pooler is not None  # a sequence classifier has one
        self.pooler = model.bert.pooler.dense
        self.classifier = model.classifier
        self.activation: str = activation_of(model.config)

    def forward(self, cls_states: Tensor) -> tuple[Tensor, Tensor]:
        """Both outputs FP32."""
        logits = self.classifier(torch.tanh(self.pooler(cls_states.float())))
        if self.activation == "softmax":
            return logits, torch.softmax(logits, dim=-1)
        if self.activation == "sigmoid":
            return logits, torch.sigmoid(logits)
        return logits, logits.clone()  # the same tensor twice would be one output with two names
