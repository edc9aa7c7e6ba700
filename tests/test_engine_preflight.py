# SPDX-License-Identifier: Apache-2.0
"""What keeps an engine from being served is told before a server starts: every message, whole. No plan is run."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import copy_of_repository
from fake_engine import A100, H200, L4, PACKED, PADDED, install_engine, install_export

from ensemble.artifacts import CURRENT, FOLDER, Manifest
from ensemble.contract import Contract
from ensemble.errors import ConfigError, ServerError
from ensemble.launcher import engine_preflight
from ensemble.launcher.choice import config_name_of
from ensemble.launcher.gpu import Gpu, Gpus
from ensemble.launcher.runtime import Runtime
from export.profile import profile_of

AGAIN = "run make export TARGET=tensorrt again"


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """A repository without an engine."""
    install_export(repository := copy_of_repository(tmp_path / "model_repository"))
    return repository


@pytest.fixture
def repository(exported: Path) -> Path:
    """One with an engine that is sound for an A100 and TensorRT 10.5.0."""
    install_engine(exported)
    return exported


def problems(repository: Path, tensorrt: str | None = "10.5.0", gpus: tuple[Gpu, ...] = (A100,)) -> list[str]:
    """As serve finds them; the repository's path is left out."""
    config_name = config_name_of(Manifest.read(repository / FOLDER / CURRENT).layout)
    contract, manifest = engine_preflight.sound(repository, config_name)
    found = engine_preflight.engine_problems(repository, contract, manifest, tensorrt, gpus)
    return [problem.replace(f"{repository}/", "") for problem in found]


def profile(name: str, **bounds: list[int]) -> dict[str, dict[str, list[int]]]:
    """The sound profile with other bounds for one input."""
    return {**PACKED, name: PACKED[name] | bounds}


def test_a_sound_engine_has_no_problems(repository: Path) -> None:
    """On as many GPUs of its kind as there are, and where the build number of TensorRT is known too."""
    assert problems(repository) == []
    assert problems(repository, "10.5.0.18", (A100, A100)) == []


def test_what_is_unknown_is_not_compared(repository: Path) -> None:
    """No server and no GPU: the rest is still checked."""
    assert problems(repository, None, ()) == []


def test_no_engine(exported: Path) -> None:
    """And what else it will need."""
    assert problems(exported) == [
        "no engine is installed: run make export TARGET=tensorrt",
        "classifier/batchstrategy.so is missing: run make model_repository/classifier/batchstrategy.so",
    ]


def test_another_tensorrt(repository: Path) -> None:
    """Both versions are named; a patch is another version too."""
    assert problems(repository, "11.0.0") == [
        f"model.plan was built with TensorRT 10.5.0, the server has 11.0.0: {AGAIN}, with the server's TensorRT"
    ]
    assert problems(repository, "10.5.1") != []


def test_another_gpu(repository: Path) -> None:
    """Both kinds are named."""
    assert problems(repository, gpus=(H200, H200)) == [
        "model.plan is for compute capability 8.0 (NVIDIA A100-SXM4-80GB), this GPU is 9.0 (NVIDIA H200): "
        f"{AGAIN} on this machine"
    ]


def test_gpus_of_several_kinds(repository: Path) -> None:
    """The server would put an instance on each."""
    assert problems(repository, gpus=(H200, A100)) == [
        "model.plan is for compute capability 8.0 (NVIDIA A100-SXM4-80GB), these GPUs are 8.0 (NVIDIA A100-SXM4-80GB) "
        "and 9.0 (NVIDIA H200): set CUDA_VISIBLE_DEVICES to those of 8.0"
    ]
    assert problems(repository, gpus=(H200, L4)) == [
        "model.plan is for compute capability 8.0 (NVIDIA A100-SXM4-80GB), these GPUs are 8.9 (NVIDIA L4) and 9.0 "
        f"(NVIDIA H200): set CUDA_VISIBLE_DEVICES to those of one kind and {AGAIN}"
    ]


def _edit(name: str) -> Callable[[Path], object]:
    return lambda repository: (repository / FOLDER / CURRENT / name).write_text("edited")


def _delete(name: str) -> Callable[[Path], object]:
    return lambda repository: (repository / FOLDER / CURRENT / name).unlink()


def _replace_the_link(repository: Path) -> None:
    (repository / "classifier/1/model.plan").unlink()
    (repository / "classifier/1/model.plan").write_text("plan")


def _reexport(repository: Path) -> None:
    engine = Manifest.read(repository / FOLDER / CURRENT).engine
    install_engine(repository, onnx_sha256=engine.onnx_sha256[::-1])


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (_delete("model.plan"), f"classifier/1/model.plan is missing: {AGAIN}"),
        (_edit("model.plan"),
         f"classifier/1/model.plan is not the file that was built (its sha256 differs): {AGAIN}"),
        (_replace_the_link,
         f"classifier/1/model.plan is not of the export that is installed: delete it and {AGAIN}"),
        (_delete("model.fp16.onnx"), f"text_classifier/artifacts/current/model.fp16.onnx is missing: {AGAIN}"),
        (_edit("model.fp16.onnx"),
         "text_classifier/artifacts/current/model.fp16.onnx is not the file that was exported (its sha256 differs): "
         f"{AGAIN}"),
        (_reexport, f"model.plan was not built from the model.fp16.onnx that is installed: {AGAIN}"),
        (lambda repository: (repository / "classifier/batchstrategy.so").unlink(),
         "classifier/batchstrategy.so is missing: run make model_repository/classifier/batchstrategy.so"),
    ],
    ids=["no plan", "plan edited", "plan from elsewhere", "no graph", "graph edited", "plan of another graph",
         "no batching library"],
)  # fmt: skip
def test_files_that_do_not_belong_together(repository: Path, damage: Callable[[Path], object], problem: str) -> None:
    """The file and what to run."""
    damage(repository)

    assert problems(repository) == [problem]


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (profile("row_lengths", min=[64]),
         "the profile of row_lengths begins at [64], one row of one token needs [1]"),
        (profile("row_lengths", opt=[16], max=[16]),
         "the profile of row_lengths ends at [16], max_batch_size 64 and max_length 512 need [64]"),
        (profile("input_ids", max=[32767]),
         "the profile of input_ids ends at [32767], max_batch_size 64 and max_length 512 need [32768]"),
        (profile("length_carrier", max=[4096]),
         "the profile of length_carrier ends at [4096], max_batch_size 64 and max_length 512 need [32768]"),
        (profile("longest_row", max=[566]),
         "the profile of longest_row ends at [566], max_batch_size 64 and max_length 512 need [567]"),
        (profile("input_ids", opt=[65536]),
         "the profile of input_ids goes from [1] by [65536] to [32768], not from small to large in 1 dimension"),
        (profile("input_ids", max=[64, 512]),
         "the profile of input_ids goes from [1] by [4096] to [64, 512], not from small to large in 1 dimension"),
        ({name: PACKED[name] for name in ("input_ids", "row_lengths", "longest_row")},
         "the engine's inputs are input_ids, longest_row, row_lengths, those of the classifier's config input_ids, "
         "length_carrier, longest_row, row_lengths"),
        (PADDED,
         "the engine's inputs are attention_mask, input_ids, token_type_ids, those of the classifier's config "
         "input_ids, length_carrier, longest_row, row_lengths"),
    ],
)  # fmt: skip
def test_a_profile_that_does_not_take_every_batch(exported: Path, wrong: dict, problem: str) -> None:
    """The input, its bounds, and what the configs let through."""
    install_engine(exported, profile=wrong)

    assert problems(exported) == [f"{problem}: {AGAIN}"]


@pytest.mark.parametrize(
    "edit",
    [
        {"profile": None},
        {"profile": {"input_ids": None}},
        {"profile": {"input_ids": {"max": [32768]}}},
        {"profile": {"input_ids": {"min": [1], "opt": ["a"], "max": [32768]}}},
        {"tensorrt": None},
        {"compiler": "x"},
    ],
)
def test_an_engine_that_model_json_describes_wrongly(exported: Path, edit: dict) -> None:
    """Edited by hand into something that is none: one line, no traceback."""
    install_engine(exported)
    file = exported / "text_classifier/artifacts/current/model.json"
    manifest = json.loads(file.read_text())
    file.write_text(json.dumps({**manifest, "engine": {**manifest["engine"], **edit}}))

    with pytest.raises(ConfigError, match=r"model\.json cannot be read \(.+\): run make export"):
        Manifest.read(file.parent)


def test_a_batch_limit_raised_after_export(repository: Path) -> None:
    """Every input it concerns."""
    for file in repository.rglob("*.pbtxt"):
        file.write_text(file.read_text().replace("max_batch_size: 64", "max_batch_size: 128"))

    assert problems(repository) == [
        f"the profile of {name} ends at {end}, max_batch_size 128 and max_length 512 need {need}: {AGAIN}"
        for name, end, need in [
            ("input_ids", [32768], [65536]),
            ("length_carrier", [32768], [65536]),
            ("longest_row", [567], [635]),
            ("row_lengths", [64], [128]),
        ]
    ]


def test_a_padded_engine_is_held_against_its_own_config(exported: Path) -> None:
    """[rows, length] of every input."""
    install_engine(exported, layout="padded")
    sound = problems(exported)

    short = {"min": [1, 1], "opt": [32, 128], "max": [64, 128]}
    many = {"min": [8, 1], "opt": [32, 128], "max": [64, 512]}
    install_engine(exported, layout="padded", profile=PADDED | {"input_ids": short, "attention_mask": many})

    assert sound == []
    assert problems(exported) == [
        f"the profile of attention_mask begins at [8, 1], one row of one token needs [1, 1]: {AGAIN}",
        f"the profile of input_ids ends at [64, 128], max_batch_size 64 and max_length 512 need [64, 512]: {AGAIN}",
    ]


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_the_profile_that_export_makes_is_sound_and_no_larger_than_needed(exported: Path, layout: str) -> None:
    """Both read the same configs and know nothing of each other: one less in any dimension is a problem here."""
    config = Contract.read(exported, config_name_of(layout)).models["classifier"]
    made = {
        name: {"min": [*shapes.min], "opt": [*shapes.opt], "max": [*shapes.max]}
        for name, shapes in profile_of(config, 512, [25] * 64).items()
    }
    install_engine(exported, layout=layout, profile=made)
    sound = problems(exported)
    install_engine(
        exported,
        layout=layout,
        profile={name: shapes | {"max": [*shapes["max"][:-1], shapes["max"][-1] - 1]} for name, shapes in made.items()},
    )
    less = problems(exported)

    assert sound == []
    assert [re.search("the profile of (.+) ends at", problem)[1] for problem in less if "goes from" not in problem] == [
        name for name in sorted(made) if made[name]["opt"][-1] < made[name]["max"][-1]
    ]
    assert len(less) == len(made)


def test_all_problems_are_told_at_once(exported: Path) -> None:
    """A line each."""
    install_engine(exported, profile=profile("row_lengths", min=[8]))
    _edit("model.plan")(exported)
    (exported / "classifier/batchstrategy.so").unlink()

    found = problems(exported, "11.0.0", (H200,))

    assert [problem.split(" ")[0] for problem in found] == [
        "classifier/batchstrategy.so", "classifier/1/model.plan", "model.plan", "model.plan", "the",
    ]  # fmt: skip


def test_what_every_classifier_needs_comes_first(repository: Path) -> None:
    """A changed graph is refused whatever the engine."""
    _edit("model.onnx")(repository)
    with pytest.raises(ConfigError) as caught:
        problems(repository)
    assert str(caught.value) == (
        f"{repository}/classifier/1/model.onnx is not the file that was exported (its sha256 differs): run make export"
    )


# --- the command ---


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Runtime:
    """A machine with the embedded server and no GPU."""
    runtime = Runtime(
        "the embedded server", tmp_path, tmp_path, {}, why_unknown="the embedded server has no TensorRT backend"
    )
    monkeypatch.setattr(engine_preflight, "find_runtime", lambda: runtime)
    monkeypatch.setattr(engine_preflight, "visible_gpus", lambda: Gpus((), "NVIDIA's driver: Driver Not Loaded"))
    return runtime


def command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    engine_preflight.add_arguments(parser)
    return engine_preflight.run(parser.parse_args(arguments))


def test_a_sound_repository_is_said_to_be_sound(
    repository: Path, here: Runtime, capsys: pytest.CaptureFixture[str]
) -> None:
    """For another machine, on one without a GPU: exit code 0."""
    code = command(
        "--repository", str(repository), "--tensorrt-version", "10.5.0", "--compute-capability", "8.0"
    )  # fmt: skip

    assert code == 0
    assert capsys.readouterr().out == (
        "sound: model.plan, packed, TensorRT 10.5.0, compute capability 8.0, 64 rows of 512 tokens\n"
    )


def test_problems_are_printed_and_the_exit_code_is_1(
    repository: Path, here: Runtime, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where something else could not be checked."""
    code = command("--repository", str(repository), "--compute-capability", "9.0")

    assert code == 1
    assert capsys.readouterr().out == (
        "problem: model.plan is for compute capability 8.0 (NVIDIA A100-SXM4-80GB), this GPU is 9.0: "
        f"{AGAIN} on this machine\n"
        "not checked: the server's TensorRT version (the embedded server has no TensorRT backend): give "
        "--tensorrt-version\n"
    )


def test_what_cannot_be_checked_is_not_called_sound(
    repository: Path, here: Runtime, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 3, and a line for each thing; so too where there is no server at all."""
    assert command("--repository", str(repository)) == 3
    assert capsys.readouterr().out == (
        "not checked: the server's TensorRT version (the embedded server has no TensorRT backend): give "
        "--tensorrt-version\n"
        "not checked: the GPU's compute capability (NVIDIA's driver: Driver Not Loaded): give --compute-capability\n"
    )

    def none() -> Runtime:
        raise ServerError("the embedded server is not installed")

    monkeypatch.setattr(engine_preflight, "find_runtime", none)
    assert command("--repository", str(repository), "--compute-capability", "8.0") == 3
    assert capsys.readouterr().out == (
        "not checked: the server's TensorRT version (the embedded server is not installed): give --tensorrt-version\n"
    )


def test_this_machine_is_what_is_checked_by_default(
    repository: Path, here: Runtime, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server's TensorRT and its GPUs."""
    monkeypatch.setattr(
        engine_preflight, "find_runtime", lambda: Runtime("installed", here.executable, here.backends, {}, "11.0.0")
    )
    monkeypatch.setattr(engine_preflight, "visible_gpus", lambda: Gpus((A100,)))

    assert command("--repository", str(repository)) == 1
    assert capsys.readouterr().out == (
        f"problem: model.plan was built with TensorRT 10.5.0, the server has 11.0.0: {AGAIN}, with the server's "
        "TensorRT\n"
    )


def test_nothing_exported_is_an_error(tmp_path: Path, here: Runtime) -> None:
    """With the command that exports."""
    with pytest.raises(ConfigError) as caught:
        command("--repository", str(tmp_path))

    assert str(caught.value) == f"{tmp_path}/text_classifier/artifacts/current/model.json is missing: run make export"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tensorrt-version", "10"], "argument --tensorrt-version: '10' is not of the form 10.5.0"),
        (["--compute-capability", "sm80"], "argument --compute-capability: 'sm80' is not of the form 8.0"),
    ],
)
def test_a_version_of_another_form_is_a_usage_error(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, before anything is read."""
    with pytest.raises(SystemExit) as caught:
        command(*arguments)

    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_help_says_what_the_exit_codes_mean(capsys: pytest.CaptureFixture[str]) -> None:
    """All three of them."""
    with pytest.raises(SystemExit):
        command("--help")

    assert (
        "Exit code: 0 if all was checked and is sound; 1 if there are problems, a line each; 3 if no problem was found, "
        "but something could not be checked here, which a line says."
    ) in " ".join(capsys.readouterr().out.split())
