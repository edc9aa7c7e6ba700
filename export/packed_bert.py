# SPDX-License-Identifier: Apache-2.0
"""BERT for sequence classification on packed rows: no padding outside attention. Knows nothing of ONNX or Triton.

The weights are those of a Hugging Face BertForSequenceClassification, so the numbers are its numbers; only the layout
differs. A batch comes as

    input_ids    INT64 [T]   all rows end to end
    row_lengths  INT32 [B]   entries of each row
    longest_row  INT32 [S]   only its shape is read: at least the longest row

row_lengths and longest_row are INT32 because that is what Triton can make (export/backend_inputs.py).

Linear layers, LayerNorm and GELU run on [T, hidden]. Attention gathers the rows into [B, S], attends, and gathers back.
The last layer's query, output projection and feed-forward network are computed for the [CLS] rows only, which is exact:
the classifier reads nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import BertForSequenceClassification
from transformers.models.bert.modeling_bert import BertLayer

from export.bert_parts import AddAndNorm, AfterAttention, ClassifierHead, QueryKeyValue, attend


@dataclass(frozen=True)
class Layout:
    """Where the tokens of packed rows stand in a [B, S] rectangle. Built once per forward pass, used by every layer.

    first      INT64 [B]          index in [T] of each row's first token, [CLS]
    rectangle  INT64 [B * S]      for each cell the index in [T] that it shows (another row's, where its own has ended)
    cell       INT64 [T]          for each token its cell
    position   INT64 [T]          for each token its place in its row
    key_bias   FP32 [B, 1, 1, S]  0 where the cell may be attended to, hugely negative elsewhere
    """

    first: Tensor
    rectangle: Tensor
    cell: Tensor
    position: Tensor
    key_bias: Tensor


def layout_of(input_ids: Tensor, row_lengths: Tensor, longest_row: Tensor, pad_token_id: int) -> Layout:
    """Work out the layout from the packed inputs (see the module's docstring for their shapes)."""
    tokens, rows, longest = input_ids.shape[0], row_lengths.shape[0], longest_row.shape[0]
    lengths = row_lengths.to(torch.int64)
    # A running sum, spelled out: TensorRT 10 makes a loop of CumSum, one step a row, and has it for floats only.
    order = torch.arange(rows, device=input_ids.device)
    ends = torch.where(order[None, :] <= order[:, None], lengths[None, :], 0).sum(dim=1)
    first = ends - lengths
    column = torch.arange(longest, device=input_ids.device)[None, :]
    rectangle = (first[:, None] + column).clamp(max=tokens - 1).reshape(-1)

    # A row may end in [PAD], where one request's rows were made a rectangle. Those are no keys; a [PAD] with a token
    # behind it was spelled out in the text, and the Hugging Face model attends to it.
    shown = input_ids.index_select(0, rectangle).reshape(rows, longest)
    is_token = (shown != pad_token_id) & (column < lengths[:, None])
    last = torch.where(is_token, column, -1).amax(dim=1, keepdim=True)
    # Finite, because a row without any key would make softmax divide 0 by 0 with -inf.
    key_bias = torch.where(column <= last, 0.0, torch.finfo(torch.float32).min)[:, None, None, :]

    index = torch.arange(tokens, device=input_ids.device)
    row = (ends[None, :] <= index[:, None]).sum(dim=1)
    position = index - first.index_select(0, row)
    return Layout(first, rectangle, row * longest + position, position, key_bias)


class PackedLayer(nn.Module):
    """One encoder layer."""

    def __init__(self, layer: BertLayer, heads: int, activation: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = heads
        self.project = QueryKeyValue(layer.attention, dtype)
        self.after = AfterAttention(layer, activation, dtype)

    def forward(self, states: Tensor, layout: Layout, cls_only: bool) -> Tensor:
        """States of all tokens [T, hidden] -> [T, hidden], or [B, hidden] of the [CLS] rows where only they matter."""
        rows, hidden = layout.first.shape[0], states.shape[1]
        if cls_only:
            residual = states.index_select(0, layout.first)
            query = self.project.query(residual).reshape(rows, 1, self.heads, -1)
            gathered = self.project.key_value(states).index_select(0, layout.rectangle)
            key, value = gathered.reshape(rows, -1, 2, self.heads, hidden // self.heads).unbind(dim=2)
            context = self.attend(query, key, value, layout.key_bias).reshape(rows, hidden)
            return self.after(context, residual)  # type: ignore[no-any-return]
        gathered = self.project(states).index_select(0, layout.rectangle)
        query, key, value = gathered.reshape(rows, -1, 3, self.heads, hidden // self.heads).unbind(dim=2)
        context = self.attend(query, key, value, layout.key_bias).reshape(-1, hidden)
        return self.after(context.index_select(0, layout.cell), states)  # type: ignore[no-any-return]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, key_bias: Tensor) -> Tensor:
        """query [B, Q, heads, d], key and value [B, S, heads, d] -> context [B, Q, heads, d]."""
        return attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), key_bias).transpose(1, 2)


class PackedBertClassifier(nn.Module):
    """A BertForSequenceClassification on packed rows. Every row is a single text: all its token types are 0."""

    def __init__(self, model: BertForSequenceClassification, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        config, embeddings = model.config, model.bert.embeddings
        assert config.pad_token_id is not None  # export/source.py refuses a model without
        self.pad_token_id = config.pad_token_id
        self.words = nn.Parameter(embeddings.word_embeddings.weight.to(dtype))
        # One table less to gather from: the token type is 0 everywhere.
        self.positions = nn.Parameter(
            (embeddings.position_embeddings.weight + embeddings.token_type_embeddings.weight[0]).to(dtype)
        )
        self.norm = AddAndNorm(embeddings.LayerNorm)
        self.layers = nn.ModuleList(
            PackedLayer(layer, config.num_attention_heads, config.hidden_act, dtype)  # type: ignore[arg-type]
            for layer in model.bert.encoder.layer
        )
        self.head = ClassifierHead(model)

    def forward(self, input_ids: Tensor, row_lengths: Tensor, longest_row: Tensor) -> tuple[Tensor, Tensor]:
        """Packed rows (see the module's docstring) -> logits FP32 [B, C], probabilities FP32 [B, C]."""
        layout = layout_of(input_ids, row_lengths, longest_row, self.pad_token_id)
        words = self.words.index_select(0, input_ids)
        states = self.norm(words, self.positions.index_select(0, layout.position))
        for depth, layer in enumerate(self.layers, start=1):
            states = layer(states, layout, cls_only=depth == len(self.layers))
        logits, probabilities = self.head(states)
        return logits, probabilities
