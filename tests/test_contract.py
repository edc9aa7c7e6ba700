# SPDX-License-Identifier: Apache-2.0
"""The committed configs agree, and one edited by hand into something inconsistent is found before a server starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import ROOT

from ensemble.contract import Contract, read_config
from ensemble.errors import ConfigError


@pytest.mark.parametrize("config_name", [None, "cpu", "padded", "baseline"])
def test_the_committed_configs_agree(config_name: str | None) -> None:
    """For TensorRT, for the CPU and for the fallback: one batch limit, one type and shape on every edge."""
    contract = Contract.read(ROOT / "model_repository", config_name)

    assert contract.max_batch_size == 64
    assert contract.max_sequence_length == 512


@pytest.mark.parametrize(
    "file", sorted((ROOT / "model_repository").rglob("*.pbtxt")), ids=lambda file: file.parent.name
)
def test_no_committed_config_is_tied_to_one_machine(file: Path) -> None:
    """No config names a GPU by number, and every one parses."""
    assert not any(group.gpus for group in read_config(file).instance_group)


def test_the_cpu_config_has_the_tensors_of_the_tensorrt_config() -> None:
    """Only the backend is replaced: inputs, outputs and limits are the same."""
    with_engine, without = (Contract.read(ROOT / "model_repository", name) for name in (None, "cpu"))

    assert with_engine.inputs("classifier") == without.inputs("classifier")
    assert with_engine.outputs("classifier") == without.outputs("classifier")


@pytest.mark.parametrize(
    ("file", "before", "after", "message"),
    [
        ("classifier/configs/cpu.pbtxt", "max_batch_size: 64", "max_batch: 64", r"cpu\.pbtxt:5:1: .*max_batch"),
        ("classifier/configs/cpu.pbtxt", "max_batch_size: 64", "max_batch_size: 32", "classifier: max_batch_size is 32"),
        ("tokenizer/config.pbtxt", "max_batch_size: 64", "max_batch_size: 0", "tokenizer: max_batch_size is 0"),
        ("classifier/configs/cpu.pbtxt", "TYPE_INT64 dims: [ -1 ]", "TYPE_INT32 dims: [ -1 ]",
         r"classifier: input input_ids is TYPE_INT32 \[-1\], but 'input_ids' is TYPE_INT64 \[-1\]"),
        ("classifier/configs/cpu.pbtxt", "TYPE_INT64 dims: [ -1 ]", "TYPE_INT64 dims: [ -1, -1 ]",
         r"classifier: input_ids has dims \[-1, -1\]: give the dims of one row"),
        ("classifier/configs/cpu.pbtxt", " allow_ragged_batch: true", "", "classifier: input input_ids varies in length"),
        ("classifier/configs/cpu.pbtxt", "dynamic_batching { max_queue_delay_microseconds", "# {",
         "classifier: dynamic_batching is missing"),
        ("classifier/configs/cpu.pbtxt", "KIND_CPU count: 1", "KIND_CPU count: 1 gpus: [ 3 ]", "instance_group names gpus"),
        ("classifier/configs/cpu.pbtxt", 'name: "logits"', 'name: "3391"', "maps output logits of classifier"),
        ("tokenizer/config.pbtxt", "dims: [ 1 ] }", "dims: [ 1 ] reshape { shape: [ ] } }", "text has a reshape"),
        ("tokenizer/config.pbtxt", 'name: "tokenizer"', 'name: "tokeniser"', "name is 'tokeniser'"),
        ("tokenizer/config.pbtxt", 'string_value: "512"', 'string_value: "lots"', "max_sequence_length must be a whole"),
        ("classifier/configs/cpu.pbtxt", 'key: "attention_budget" value { string_value: "0"',
         'key: "attention_budget" value { string_value: "-1"', "classifier: parameter attention_budget must be a whole"),
        ("classifier/configs/cpu.pbtxt", 'key: "attention_budget"', 'key: "attention"',
         "classifier: parameter attention_budget must be a whole"),
        ("classifier/configs/cpu.pbtxt", 'key: "attention_budget" value { string_value: "0"',
         'key: "attention_budget" value { string_value: "1000000000000000000"', "attention_budget must be a whole number of"),
        ("tokenizer/config.pbtxt", 'string_value: "512"', 'string_value: "5²"', "max_sequence_length must be a whole"),
        ("text_classifier/config.pbtxt", 'input_map { key: "input_ids"', 'input_map { key: "ids"',
         "classifier: input ids is mapped in text_classifier, but the model has none of that name"),
        ("text_classifier/config.pbtxt", 'label_filename: "labels.txt"', "", "no output has label_filename"),
        ("text_classifier/config.pbtxt", '"truncated" data_type: TYPE_BOOL', '"truncated" data_type: TYPE_INT32',
         "text_classifier: output truncated is TYPE_INT32"),
        ("tokenizer/config.pbtxt", "dynamic_batching { }", "dynamic_batching { } response_cache { enable: true }",
         "tokenizer: response_cache is not supported"),
        ("classifier/configs/cpu.pbtxt", "max_queue_delay_microseconds: 1000",
         "max_queue_delay_microseconds: 1000 default_queue_policy { max_queue_size: 100 }",
         "classifier: dynamic_batching has a queue policy or priorities"),
        ("tokenizer/config.pbtxt", "dynamic_batching { }", "dynamic_batching { default_queue_policy { max_queue_size: 9 } }",
         "tokenizer: dynamic_batching has a queue policy or priorities"),
        ("classifier/configs/cpu.pbtxt", "max_queue_delay_microseconds: 1000", "priority_levels: 2 default_priority_level: 1",
         "classifier: dynamic_batching has a queue policy or priorities"),
        ("tokenizer/config.pbtxt", 'key: "max_waiting_rows" value { string_value: "512"',
         'key: "max_waiting_rows" value { string_value: "0"', "parameter max_waiting_rows must be a whole number of at least 1"),
        ("tokenizer/config.pbtxt", 'key: "ahead_rows" value { string_value: "128"',
         'key: "ahead_rows" value { string_value: "63"', "parameter ahead_rows must be a whole number of at least 64"),
        ("tokenizer/config.pbtxt", 'key: "max_request_bytes" value { string_value: "262144"',
         'key: "max_request_bytes" value { string_value: "1000"', "parameter max_request_bytes must be a whole number of at"),
        ("tokenizer/config.pbtxt", 'key: "call_bytes"', 'key: "bytes"', "parameter call_bytes must be a whole number of"),
    ],
)  # fmt: skip
def test_an_inconsistent_edit_is_found(skeleton: Path, file: str, before: str, after: str, message: str) -> None:
    """The error names the model or the file and line, and what to change."""
    text = (skeleton / file).read_text()
    assert before in text
    (skeleton / file).write_text(text.replace(before, after, 1))

    with pytest.raises(ConfigError, match=message):
        Contract.read(skeleton, "cpu")


def test_a_missing_version_folder_is_found(skeleton: Path) -> None:
    """git drops empty folders, and an ensemble without one does not load."""
    (skeleton / "text_classifier/1/.gitkeep").unlink()
    (skeleton / "text_classifier/1").rmdir()

    with pytest.raises(ConfigError, match="the version folder text_classifier/1 is missing"):
        Contract.read(skeleton, "cpu")


def test_a_missing_config_is_found(skeleton: Path) -> None:
    """The message has the path."""
    (skeleton / "tokenizer/config.pbtxt").unlink()

    with pytest.raises(ConfigError, match=r"tokenizer/config\.pbtxt is missing"):
        Contract.read(skeleton)


def test_every_problem_is_told_at_once(skeleton: Path) -> None:
    """Two mistakes are two lines of one error."""
    for file in ("tokenizer/config.pbtxt", "classifier/config.pbtxt"):
        path = skeleton / file
        path.write_text(path.read_text().replace("max_batch_size: 64", "max_batch_size: 8"))

    with pytest.raises(ConfigError) as caught:
        Contract.read(skeleton)

    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == ["tokenizer", "classifier"]


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        ({"input_ids": "TYPE_INT32"}, {"logits": "TYPE_FP32", "probabilities": "TYPE_FP32"}),
        ({"ids": "TYPE_INT64"}, {"logits": "TYPE_FP32", "probabilities": "TYPE_FP32"}),
        ({"input_ids": "TYPE_INT64"}, {"3391": "TYPE_FP32", "probabilities": "TYPE_FP32"}),
        ({"input_ids": "TYPE_INT64"}, {"logits": "TYPE_FP16", "probabilities": "TYPE_FP32"}),
    ],
)
def test_a_graph_that_the_config_does_not_describe_is_refused(inputs: dict[str, str], outputs: dict[str, str]) -> None:
    """A name or a type that differs is found at export, not when the server loads it."""
    with pytest.raises(ConfigError, match=r"the exported graph has inputs .* make them agree"):
        Contract.read(ROOT / "model_repository").check_graph(inputs, outputs)
