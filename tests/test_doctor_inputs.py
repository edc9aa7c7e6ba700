# SPDX-License-Identifier: Apache-2.0
"""What the doctor sends: inputs made from a model's config, and what it cannot make up."""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from perf.doctor.inputs import CannotMakeInput, InputMaker, Text, built_in_texts


def _config(text: str):
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def test_inputs_follow_the_config() -> None:
    """Fixed dims are filled up and masked, open ones take the text's length, and floats are random."""
    config = _config(
        'name: "m" max_batch_size: 8 input { name: "input_ids" data_type: TYPE_INT32 dims: 32 }'
        'input { name: "attention_mask" data_type: TYPE_INT64 dims: 32 }'
        'input { name: "token_type_ids" data_type: TYPE_INT64 dims: -1 }'
        'input { name: "pixels" data_type: TYPE_FP16 dims: [3, -1, -1] }'
        'input { name: "prompt" data_type: TYPE_STRING dims: 1 } input { name: "x" data_type: TYPE_BF16 dims: 1 optional: true }'
    )

    made = InputMaker(config, [Text("two words", 5)]).make(0, rows=2)

    arrays = made.arrays
    assert arrays["input_ids"].shape == (2, 32) and arrays["input_ids"].dtype == np.int32
    assert (arrays["input_ids"][:, :5] >= 1000).all() and not arrays["input_ids"][:, 5:].any()
    assert arrays["attention_mask"].sum() == 10
    assert arrays["token_type_ids"].shape == (2, 5) and not arrays["token_type_ids"].any()
    assert arrays["pixels"].shape == (2, 3, 224, 224) and np.ptp(arrays["pixels"]) > 0
    assert arrays["prompt"].tolist() == [[b"two words"]] * 2
    assert (made.length, made.slots) == (5, 32)
    assert len(made.message("m").raw_input_contents) == 5


def test_a_model_without_a_batch_dimension_gets_none() -> None:
    """max_batch_size 0: dims are all there is, and a leading -1 is the model's own batch dimension."""
    rows = _config('name: "m" input { name: "ids" data_type: TYPE_INT64 dims: [-1, -1] }')
    flat = _config('name: "m" input { name: "ids" data_type: TYPE_INT64 dims: -1 }')

    texts = [Text("a", 7)]

    assert InputMaker(rows, texts).make(0).arrays["ids"].shape == (1, 7)
    assert InputMaker(flat, texts).make(0).arrays["ids"].shape == (7,)


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ('input { name: "x" data_type: TYPE_BF16 dims: 1 }', "x is BF16"),
        ('input { name: "x" data_type: TYPE_INT32 dims: 1 is_shape_tensor: true }', "x is a shape tensor"),
        ("", "lists no inputs"),
    ],
)
def test_what_cannot_be_made_up_is_said(field: str, says: str) -> None:
    """With the input's name, and the way out."""
    with pytest.raises(CannotMakeInput, match=says) as caught:
        InputMaker(_config(f'name: "m" {field}'), built_in_texts())
    assert "--input-data" in str(caught.value)


def test_whole_numbers_that_are_no_token_ids_are_not_taken_for_padding() -> None:
    """Features of a fixed number have none; ids padded to a fixed length do, and so does what has a mask."""
    line = 'input { name: "%s" data_type: TYPE_INT64 dims: 32 }'

    def slots(*names: str) -> int:
        config = _config('name: "m" max_batch_size: 8 ' + "".join(line % name for name in names))
        return InputMaker(config, [Text("a", 7)]).make(0).slots

    assert slots("features") == 7 and slots("user_history") == 7
    assert slots("INPUT_IDS") == slots("tokens") == slots("words", "attention_mask") == 32
