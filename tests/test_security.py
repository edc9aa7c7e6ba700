# SPDX-License-Identifier: Apache-2.0
"""What SECURITY.md promises and no other test shows; and that each test it names is there."""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import ROOT
from triton_requests import http_call
from tritonclient import grpc
from tritonclient.grpc import model_config_pb2

from ensemble.artifacts import FOLDER, LINKS, checked, verify
from ensemble.contract import Contract
from ensemble.errors import ConfigError, ExportError
from ensemble.launcher.server import Server
from export import source
from perf.doctor import probe
from perf.doctor.target import Leaf

CODE = [file for folder in ("ensemble", "export", "perf", "model_repository") for file in (ROOT / folder).rglob("*.py")]

# What makes an object, or runs code, of bytes that somebody else may have written.
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
CALLS = {"eval", "exec", "torch.load", "np.load", "numpy.load", "yaml.load"}
METHODS = {"exec_module", "run_module", "run_path"}
# And where that is the job: the doctor's --repository, which says that it runs what it finds.
ON_PURPOSE = {("perf/doctor/probe_child.py", "exec_module")}


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Every call in a file, by its dotted name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def test_nothing_here_reads_a_pickle_or_runs_what_it_read() -> None:
    """No module that unpickles, no call that runs text or a file; the one exception is named."""
    found = set()
    for file in CODE:
        tree, place = ast.parse(file.read_text(encoding="utf-8")), file.relative_to(ROOT).as_posix()
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found |= {(place, name) for name in names if name.split(".")[0] in MODULES}
        for name, _ in calls(tree):
            method = name.rpartition(".")[2]
            found |= {(place, call) for call in {name} & CALLS | {method} & METHODS}

    assert found == ON_PURPOSE


def test_every_model_is_read_from_safetensors_and_without_its_code() -> None:
    """Of all that is read by from_pretrained: weights with use_safetensors, nothing with trust_remote_code."""
    found = {}
    for file in CODE:
        for name, call in calls(ast.parse(file.read_text(encoding="utf-8"))):
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            assert options.get("trust_remote_code", "False") == "False", file
            if name.endswith(".from_pretrained") and not name.startswith(("BertConfig", "AutoTokenizer")):
                found[f"{file.relative_to(ROOT)}: {name}"] = options.get("use_safetensors")

    assert found
    assert set(found.values()) == {"True"}, found


def test_code_in_a_model_folder_does_not_run(small_model: Callable[..., Path], tmp_path: Path) -> None:
    """Whatever its configs ask for, by whichever of the library's names; the model is read without it."""
    folder = Path(shutil.copytree(small_model(), tmp_path / "model"))
    ran = tmp_path / "ran"
    (folder / "evil.py").write_text(f"import pathlib; pathlib.Path({str(ran)!r}).touch()\nclass E: pass\n")
    auto = {
        "AutoConfig": "evil.E",
        "AutoModelForSequenceClassification": "evil.E",
        "AutoTokenizer": ["evil.E", "evil.E"],
    }
    for name in ("config.json", "tokenizer_config.json"):
        file = folder / name
        file.write_text(json.dumps({**json.loads(file.read_text()), "auto_map": auto, "trust_remote_code": True}))

    assert source.load(str(folder)).max_length == 512
    assert not ran.exists()


@pytest.mark.parametrize(
    "name", ["../text_classifier", "..%2Ftext_classifier", "/etc/passwd", "text_classifier/../baseline"]
)
def test_a_model_by_a_path_is_no_model(server: Server, name: str) -> None:
    """On both protocols, and the error tells nothing of this machine's files."""
    with grpc.InferenceServerClient(server.url) as client, pytest.raises(grpc.InferenceServerException) as caught:
        client.get_model_config(name)
    status, text = http_call(server, "GET", f"/v2/models/{name}/config", None, {})

    assert status in (400, 404)
    assert caught.value.status() in ("StatusCode.NOT_FOUND", "StatusCode.INVALID_ARGUMENT")
    assert "root:" not in text
    assert "max_batch_size" not in text


AWAY = ["../outside", "/etc/passwd", "..", "a/b"]


@pytest.mark.parametrize("name", AWAY)
@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("text_classifier/config.pbtxt", 'model_name: "classifier"', "model_name: {!r}"),
        ("text_classifier/config.pbtxt", 'label_filename: "labels.txt"', "label_filename: {!r}"),
        ("classifier/configs/cpu.pbtxt", "max_batch_size", "default_model_filename: {!r} max_batch_size"),
        ("classifier/configs/cpu.pbtxt", "max_batch_size", 'cc_model_filenames {{ key: "8.0" value: {!r} }} max_batch_size'),
        ("classifier/configs/cpu.pbtxt", "parameters [", 'parameters [ {{ key: "EXECUTION_ENV_PATH" value {{ string_value: {!r} }} }},'),
        ("classifier/configs/cpu.pbtxt", "max_batch_size", 'model_warmup [ {{ inputs {{ key: "i" value {{ input_data_file: {!r} }} }} }} ] max_batch_size'),
    ],
)  # fmt: skip
def test_a_config_names_nothing_outside_its_folder(
    skeleton: Path, file: str, before: str, after: str, name: str
) -> None:
    """By no field that Triton takes for a path; the error says which name it was."""
    text = (skeleton / file).read_text()
    assert before in text
    (skeleton / file).write_text(text.replace(before, after.format(name), 1))

    with pytest.raises(ConfigError, match=re.escape(repr(name))):
        Contract.read(skeleton, "cpu")


@pytest.mark.parametrize(
    "place", [place for place in LINKS if place.name != "model.plan"], ids=lambda place: place.name
)
def test_a_link_leads_nowhere_but_to_an_export(repository: Path, tmp_path: Path, place: Path) -> None:
    """Not even to a whole export that lies elsewhere: neither the launcher nor a handler takes it."""
    copy, elsewhere = tmp_path / "copy", tmp_path / "elsewhere"
    shutil.copytree(repository, copy, symlinks=True)
    shutil.copytree(repository / FOLDER, elsewhere, symlinks=True)
    (copy / place).unlink()
    (copy / place).symlink_to(elsewhere / "current" / LINKS[place])

    with pytest.raises(ConfigError, match=r"leads to .*elsewhere.*, which is not among the files of an export"):
        checked(copy / place)
    with pytest.raises(ConfigError, match="leads to"):
        verify(copy, ("text_classifier", "tokenizer", "classifier", "baseline"))


@pytest.mark.parametrize("name", AWAY)
def test_the_doctor_runs_nothing_outside_the_repository_it_was_given(tmp_path: Path, name: str) -> None:
    """Whatever the server that it examines calls its models and their files."""
    (tmp_path / "outside/1").mkdir(parents=True)
    (tmp_path / "outside/1/model.py").write_text(f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()")
    (tmp_path / "repository/m/1").mkdir(parents=True)
    leaves = [
        Leaf(name, model_config_pb2.ModelConfig(name=name)),
        Leaf("m", model_config_pb2.ModelConfig(name="m", default_model_filename=name)),
    ]

    for leaf in leaves:
        with pytest.raises(ConfigError, match="nothing is run"):
            probe.probe(leaf, tmp_path / "repository", [])

    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", AWAY)
def test_a_models_weights_are_in_its_folder(small_model: Callable[..., Path], tmp_path: Path, name: str) -> None:
    """The list of a model's shards names files beside it, and no others."""
    folder = Path(shutil.copytree(small_model(), tmp_path / "model"))
    (folder / "model.safetensors").rename(tmp_path / "outside")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": {"a": name}}))

    with pytest.raises(ExportError, match=rf"names {name!r}, outside the folder"):
        source.load(str(folder))


def test_the_statement_names_tests_that_there_are() -> None:
    """Each promise of SECURITY.md has one, in the file it names."""
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    named = re.findall(r"`(test_\w+)\.(test_\w+)`", text)

    assert len(named) > 20
    for module, test in named:
        assert re.search(rf"def {test}\(", (ROOT / f"tests/{module}.py").read_text(encoding="utf-8")), (
            f"{module}.{test}"
        )
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| promise")]
    assert rows and all("`test_" in row for row in rows)
