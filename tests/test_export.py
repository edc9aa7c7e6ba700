# SPDX-License-Identifier: Apache-2.0
"""Export: what is refused and how, what is written, the parity gate, and all-or-nothing installs."""

from __future__ import annotations

import fcntl
import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from transformers import BertConfig

from ensemble.artifacts import FP16_ONNX, LINKS, PLAN, Manifest, verify
from ensemble.contract import Contract
from ensemble.errors import ConfigError, ExportError
from ensemble.handlers.tokenization import TextTokenizer
from export import gate, source
from export.__main__ import main
from export.pipeline import export

TEXTS = ["a good film", "the worst hour of my life " * 20, "", "[PAD] or [SEP]? 🙂", "word " * 600]
# One model for two tests: each other config is a graph of its own to write.
FEW_POSITIONS = {"num_labels": 1, "max_position_embeddings": 40}


@pytest.fixture
def folder(small_model: Callable[..., Path], tmp_path: Path) -> Path:
    """A sound model folder that the test may damage."""
    return Path(shutil.copytree(small_model(), tmp_path / "damaged"))


def edit_config(folder: Path, **fields: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


# --- refusals ---


def test_a_folder_that_does_not_exist_is_refused() -> None:
    """A path is never taken for a hub id."""
    with pytest.raises(ExportError, match=r"\./nowhere/at/all: no such folder; give a folder or a hub id"):
        source.load("./nowhere/at/all")


def test_a_hub_id_that_cannot_be_reached_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network the message says to give a folder."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ExportError, match=r"nobody/nothing: its config.json cannot be read .* give its folder"):
        source.load("nobody/nothing")


@pytest.mark.parametrize(
    ("remove", "message"),
    [
        (["config.json"], r"config\.json is missing: save the model with save_pretrained"),
        (["model.safetensors"], r"model\.safetensors is missing: save the model"),
        (["tokenizer.json", "vocab.txt"], r"no tokenizer\.json and no vocab\.txt: save the tokenizer"),
    ],
)
def test_a_folder_that_lacks_a_part_is_refused(folder: Path, remove: list[str], message: str) -> None:
    """The message names the part and how to make it."""
    for name in remove:
        (folder / name).unlink(missing_ok=True)

    with pytest.raises(ExportError, match=message):
        source.load(str(folder))


def test_pickled_weights_are_refused_unread(folder: Path, tmp_path: Path) -> None:
    """A folder with nothing but a pickle is refused, and the code in the pickle does not run."""
    marker = tmp_path / "ran"

    class Payload:
        def __reduce__(self) -> tuple:
            return (Path.touch, (marker,))

    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Payload()))

    with pytest.raises(ExportError, match=r"pickled \(pytorch_model.bin\), which runs code .* safe_serialization"):
        source.load(str(folder))
    assert not marker.exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["BertForMaskedLM"]}, "its architecture is BertForMaskedLM; only BertForSequence"),
        ({"architectures": ["RobertaForSequenceClassification"], "model_type": "roberta"},
         "its architecture is RobertaForSequenceClassification; only"),
        ({"architectures": None}, "its architecture is bert; only"),
        ({"is_decoder": True}, "only encoders with absolute position embeddings"),
        ({"pad_token_id": None}, "pad_token_id is missing"),
        ({"id2label": {"0": "yes\nno", "1": "b"}}, r"label 'yes\\nno' in id2label must be one line"),
        ({"id2label": {"0": "a\0b", "1": "b"}}, "in id2label must be one line of printable characters"),
        ({"id2label": {"0": "a\ud800", "1": "b"}}, "in id2label must be one line of printable characters"),
        ({"id2label": {"0": "same", "1": "same"}}, "two entries of id2label in config.json are the same"),
        ({"id2label": {"0": "a", "2": "b"}}, "id2label in config.json must name the labels 0 to 1"),
        ({"hidden_act": "gelu_python"}, "hidden_act 'gelu_python' in config.json is not among those that can be exported"),
        ({"hidden_size": 64}, "weights are missing or of the wrong shape|cannot be read from safetensors"),
        ({"num_hidden_layers": 3}, r"weights are missing or of the wrong shape \(bert.encoder.layer.2"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_served_is_refused(folder: Path, fields: dict[str, object], message: str) -> None:
    """Another architecture, a head that was never trained, labels that are no labels: each says what would work."""
    edit_config(folder, **fields)

    with pytest.raises(ExportError, match=message):
        source.load(str(folder))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_truncated_file_is_refused(folder: Path, name: str) -> None:
    """Half a file is an error with the folder's name and one line of reason, not a traceback."""
    (folder / name).write_bytes((folder / name).read_bytes()[:100])

    with pytest.raises(ExportError, match=f"{folder}: its .* cannot be read"):
        source.load(str(folder))


def test_a_tokenizer_with_more_entries_than_the_model_is_refused(small_model) -> None:
    """Its ids would index past the embedding table."""
    with pytest.raises(ExportError, match="the tokenizer has 30522 entries, the model's vocab_size is 1000"):
        source.load(str(small_model(vocab_size=1000)))


def test_a_model_of_too_few_positions_is_refused(small_model) -> None:
    """[CLS] and [SEP] alone leave nothing to classify."""
    with pytest.raises(ExportError, match="at least 3 tokens are needed"):
        source.load(str(small_model(max_position_embeddings=2)))


def test_a_tokenizer_that_cuts_at_the_left_is_refused(folder: Path) -> None:
    """Only the cut at the right is exported; another would answer long texts differently without a word."""
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "truncation_side": "left"}))

    with pytest.raises(ExportError, match="its tokenizer cuts long texts at the left"):
        source.load(str(folder))


@pytest.mark.parametrize("length", [2, 513, -1])
def test_a_max_length_out_of_range_is_refused(small_model, skeleton: Path, length: int) -> None:
    """The message has the range and where it comes from."""
    with pytest.raises(ExportError, match=f"max length {length} is not between 3 and 512 .* max_sequence_length in"):
        export(str(small_model()), skeleton, texts=TEXTS, max_length=length)


# --- what is written ---


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        ({"id2label": {0: "schlecht", 1: "a:b", 2: "très bien"}, "num_labels": 3}, "softmax"),
        ({"num_labels": 4, "problem_type": "multi_label_classification"}, "sigmoid"),
        ({"num_labels": 1, "problem_type": "regression"}, "identity"),
        (FEW_POSITIONS, "sigmoid"),
    ],
)
def test_every_kind_of_head_is_exported(small_model, skeleton: Path, config: dict, activation: str) -> None:
    """Single-label, multi-label, regression and a lone logit: gate passed, labels and activation as the config says."""
    model = small_model(**config)

    manifest = export(str(model), skeleton, texts=TEXTS)

    assert manifest.activation == activation
    assert (skeleton / "text_classifier/labels.txt").read_text(encoding="utf-8").splitlines() == manifest.labels
    assert manifest.labels == list(BertConfig.from_pretrained(model).id2label.values())
    assert all(verdict["passed"] and verdict["label_agreement"] == 1 for verdict in manifest.parity)
    assert verify(skeleton, Contract.read(skeleton, "cpu").models) == manifest


def test_settings_of_the_caller_do_not_matter(folder: Path, skeleton: Path) -> None:
    """A config that returns tuples and chunks its feed-forward computes the same, and is exported."""
    edit_config(folder, return_dict=False, chunk_size_feed_forward=7)

    assert export(str(folder), skeleton, texts=TEXTS[:2]).max_length == 512


def test_the_graph_is_one_file_of_the_stated_opset(repository: Path) -> None:
    """No side files, opset 20 alone, the committed tensor names, dynamic tokens, rows and longest row."""
    graph = onnx.load(str(repository / "classifier/1/model.onnx"), load_external_data=False)

    assert [(entry.domain, entry.version) for entry in graph.opset_import] == [("", 20)]
    assert not any(tensor.external_data for tensor in graph.graph.initializer)
    dims = {value.name: value.type.tensor_type.shape.dim[0].dim_param for value in graph.graph.input}
    assert dims == {"input_ids": "tokens", "row_lengths": "rows", "longest_row": "longest"}
    assert [value.name for value in graph.graph.output] == ["logits", "probabilities"]
    assert {node.op_type for node in graph.graph.node} >= {"LayerNormalization", "Gelu", "Softmax"}


def test_the_manifest_says_where_the_files_come_from(repository: Path) -> None:
    """model.json: source and its hash, versions, the hash of each file, limits, labels, parity numbers."""
    manifest = Manifest.read(repository / "text_classifier/artifacts/current")

    assert manifest.source["name"] == "default_model" and len(manifest.source["sha256"]) == 64
    assert set(manifest.sha256) == {*LINKS.values(), FP16_ONNX} - {PLAN} and manifest.engine is None
    assert manifest.versions.keys() >= {"python", "torch", "transformers", "tokenizers", "onnx", "onnxruntime"}
    assert (manifest.max_length, manifest.labels) == (512, ["negative", "positive"])
    assert {verdict["comparison"].split()[0] for verdict in manifest.parity} == {"ONNX", "TorchScript", "FP16"}
    for verdict in manifest.parity:
        assert verdict["tolerance"]["logits"] == {"fp32": 1e-4, "fp16": 3e-2}[verdict["precision"]]
        assert verdict["max_abs"] <= verdict["tolerance"]["logits"]


def test_a_shorter_max_length_is_honoured(small_model, skeleton: Path) -> None:
    """--max-length 64 is what tokenizer.json and model.json then say."""
    manifest = export(str(small_model()), skeleton, texts=TEXTS, max_length=64)

    assert manifest.max_length == 64
    assert TextTokenizer(skeleton / "tokenizer/1/tokenizer.json").max_length == 64


def test_a_model_with_few_positions_limits_the_length(small_model, skeleton: Path) -> None:
    """A model of 40 positions is served with rows of at most 40 tokens, whatever its tokenizer says."""
    assert export(str(small_model(**FEW_POSITIONS)), skeleton, texts=TEXTS).max_length == 40


# --- the gate ---


def corrupt_one_weight(file: Path) -> None:
    """Add 1 to one weight of the classifier in an ONNX file."""
    graph = onnx.load(str(file))
    weight = next(tensor for tensor in graph.graph.initializer if "classifier" in tensor.name)
    values = onnx.numpy_helper.to_array(weight).copy()
    values.flat[0] += 1
    weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
    onnx.save(graph, str(file))


@pytest.mark.parametrize(("file", "tolerance"), [("model.onnx", "1e-04"), (FP16_ONNX, "3e-02")])
def test_a_failed_gate_installs_nothing_and_names_the_worst_text(
    small_model,
    skeleton: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    file: str,
    tolerance: str,
) -> None:
    """One wrong weight: exit code 1, the numbers and the text in the message, the repository as it was."""
    before = export(str(small_model()), skeleton, texts=TEXTS)
    real_reference = gate.reference

    def reference(model: object, folder: Path, *rest: object) -> object:
        corrupt_one_weight(folder / file)
        return real_reference(model, folder, *rest)

    monkeypatch.setattr("export.pipeline.gate.reference", reference)
    (skeleton / "texts").write_text("\n".join(text for text in TEXTS if text))

    code = main(["convert", str(small_model()), "--repository", str(skeleton), "--texts", str(skeleton / "texts")])

    assert code == 1
    message = capsys.readouterr().err
    assert "the parity gate failed, nothing is installed" in message
    assert "The worst text is number" in message and f"tolerance {tolerance}" in message
    assert verify(skeleton, Contract.read(skeleton, "cpu").models) == before


SIGNALLING = np.array([0x7F800001], dtype=np.uint32).view(np.float32)[0]  # what memory that nobody wrote may hold


@pytest.mark.parametrize("value", [np.nan, np.inf, SIGNALLING], ids=["nan", "inf", "signalling-nan"])
def test_nan_and_inf_fail_the_gate(value: float) -> None:
    """They compare false with every tolerance, and still count as the worst difference."""
    reference = np.zeros((3, 2), dtype=np.float32)
    candidate = reference.copy()
    candidate[1, 0] = value

    verdict = gate.compare("x", reference, candidate, multi_label=False)

    assert not verdict and verdict.worst_text == 1 and verdict.max_abs == np.inf


def test_tiny_differences_near_zero_pass_the_gate() -> None:
    """The tolerance is absolute: logits near 0 are not held to a relative error, and a tie agrees with both labels."""
    reference = np.array([[1e-6, -1e-6], [2.0, -1.0]], dtype=np.float32)

    verdict = gate.compare("x", reference, reference + np.float32([[-2e-6, 2e-6], [0, 0]]), multi_label=False)

    assert verdict and verdict.label_agreement == 1.0


def test_large_values_are_held_to_the_digits_fp32_has() -> None:
    """A regression to thousands differs in the fourth digit behind the point and passes; in the first it fails."""
    reference = np.array([[20_000.0]], dtype=np.float32)

    assert gate.compare("x", reference, reference + np.float32(0.004), multi_label=False)
    assert not gate.compare("x", reference, reference + np.float32(4), multi_label=False)


@pytest.mark.parametrize("multi_label", [False, True])
def test_another_label_fails_the_gate(multi_label: bool) -> None:
    """A decision that differs by more than the tolerance is counted, for both kinds of label."""
    reference = np.array([[1.0, -1.0]] * 4, dtype=np.float32)
    candidate = reference.copy()
    candidate[2] *= -1

    verdict = gate.compare("x", reference, candidate, multi_label=multi_label)

    assert not verdict and verdict.label_agreement == 0.75 and verdict.worst_text == 2


# --- installing ---


def test_an_interrupted_export_leaves_the_old_repository_working(small_model, skeleton: Path, monkeypatch) -> None:
    """Whatever step ends it, the files served before are served still, and the next export clears up."""
    before = export(str(small_model()), skeleton, texts=TEXTS)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for step in ("write_torchscript", "gate.check_fp32", "gate_fp16.check", "Manifest.write"):
        with monkeypatch.context() as patch:
            patch.setattr(f"export.pipeline.{step}", interrupt)
            with pytest.raises(KeyboardInterrupt):
                export(str(small_model()), skeleton, texts=TEXTS)
        assert verify(skeleton, Contract.read(skeleton, "cpu").models) == before

    artifacts = skeleton / "text_classifier/artifacts"
    (artifacts / ".staging-killed").mkdir()  # as after kill -9
    after = export(str(small_model(num_labels=3)), skeleton, texts=TEXTS)
    assert len(verify(skeleton, Contract.read(skeleton, "cpu").models).labels) == len(after.labels) == 3
    assert sorted(path.name for path in artifacts.iterdir() if path.name not in (".lock", "current")) == [
        (artifacts / "current").readlink().name
    ]


def test_two_exports_do_not_mix(small_model, skeleton: Path) -> None:
    """The second is refused while the first one runs."""
    artifacts = skeleton / "text_classifier/artifacts"
    artifacts.mkdir()
    with (artifacts / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        with pytest.raises(ExportError, match="another export into .* is running: wait for it"):
            export(str(small_model()), skeleton, texts=TEXTS)


def test_a_full_disk_is_told_and_changes_nothing(small_model, skeleton: Path, monkeypatch) -> None:
    """The message has the system's reason."""
    before = export(str(small_model()), skeleton, texts=TEXTS)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("export.pipeline.write_torchscript", full)

    with pytest.raises(ExportError, match=r"cannot write to .* \(No space left on device\): nothing was installed"):
        export(str(small_model()), skeleton, texts=TEXTS)
    assert verify(skeleton, Contract.read(skeleton, "cpu").models) == before


def test_a_folder_that_is_no_repository_is_refused(small_model, tmp_path: Path) -> None:
    """A wrong --repository is named."""
    with pytest.raises(ConfigError, match=r"text_classifier/config\.pbtxt is missing"):
        export(str(small_model()), tmp_path, texts=TEXTS)


@pytest.mark.parametrize("damage", ["missing", "edited", "labels", "mixed"])
def test_damaged_artefacts_are_found_before_serving(repository: Path, tmp_path: Path, damage: str) -> None:
    """A file that is missing, changed, or of another export, and labels that disagree, each in one line."""
    copy = Path(shutil.copytree(repository, tmp_path / "copy", symlinks=True))
    models = Contract.read(copy, "cpu").models
    current = (copy / "text_classifier/artifacts/current").resolve()
    if damage == "missing":
        (current / "model.onnx").unlink()
        message = r"classifier/1/model\.onnx is missing: run make export"
    elif damage == "edited":
        with (current / "model.onnx").open("ab") as file:
            file.write(b"x")
        message = r"classifier/1/model\.onnx is not the file that was exported \(its sha256 differs\): run make export"
    elif damage == "labels":
        manifest = json.loads((current / "model.json").read_text())
        (current / "model.json").write_text(json.dumps({**manifest, "labels": ["bad", "good"]}))
        message = r"labels\.txt and model\.json name different labels: run make export"
    else:
        shutil.copytree(current, current.parent / "other")
        (copy / "tokenizer/1/tokenizer.json").unlink()
        (copy / "tokenizer/1/tokenizer.json").symlink_to(current.parent / "other/tokenizer.json")
        message = "mixes files of 2 exports: run make export"

    with pytest.raises(ConfigError, match=message):
        verify(copy, models)


# --- the command ---


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["./no-such-model"], 1, "error: ./no-such-model: no such folder"),
        (["x", "--texts", "/no/such/file"], 1, "error: --texts /no/such/file cannot be read"),
        (["x", "--max-length", "many"], 2, "argument --max-length: invalid int value: 'many'"),
        (["x", "--target", "gpu"], 2, "argument --target: invalid choice: 'gpu' (choose from"),
        (["x", "--layout", "flat"], 2, "argument --layout: invalid choice: 'flat' (choose from"),
        (
            ["x", "--workspace-gib", "0"],
            1,
            "error: --workspace-gib 0.0 is no size of a GPU's memory: give one such as 4",
        ),
        (["x", "--workspace-gib", "inf"], 1, "error: --workspace-gib inf is no size of a GPU's memory"),
        ([], 2, "the following arguments are required: model"),
    ],
)
def test_the_command_fails_in_one_line(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A message and the right exit code."""
    try:
        ended = main(["convert", *arguments])
    except SystemExit as end:  # argparse's
        ended = end.code

    assert ended == code
    assert message in capsys.readouterr().err


def test_the_command_is_a_process_of_its_own() -> None:
    """`python -m export`: its exit code is the command's, and the message all that it prints."""
    command = [sys.executable, "-m", "export", "convert", "x", "--texts", "/no/such/file"]

    result = subprocess.run(command, capture_output=True, text=True)

    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("error: --texts /no/such/file cannot be read") and result.stderr.count("\n") == 1


def test_the_torchscript_module_takes_any_batch_length_and_device(repository: Path) -> None:
    """Shapes it was never shown work, and no device is written into its code."""
    module = torch.jit.load(str(repository / "baseline/1/model.pt"))

    for rows, length in ((1, 1), (4, 31), (3, 512)):
        ids = torch.full((rows, length), 2000)
        logits, probabilities = module(ids, torch.ones_like(ids), torch.zeros_like(ids))
        assert logits.shape == probabilities.shape == (rows, 2)
    assert 'torch.device("cpu")' not in module.inlined_graph.__str__()
    assert 'value="cpu"' not in str(module.inlined_graph)
