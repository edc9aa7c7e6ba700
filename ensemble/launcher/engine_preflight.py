# SPDX-License-Identifier: Apache-2.0
"""Check, before a server starts, that it could serve the installed engine: a plan runs only where it was built for.

Reads configs, model.json and hashes; needs no GPU, no TensorRT and no server. What is not installed here can be named
by its version, to check a repository for another machine.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ensemble.artifacts import CURRENT, FOLDER, FP16_ONNX, PLAN, Engine, Manifest, sha256_of
from ensemble.contract import Contract
from ensemble.errors import ServerError
from ensemble.launcher.choice import config_name_of
from ensemble.launcher.gpu import Gpu, Gpus, visible_gpus
from ensemble.launcher.preflight import legible, sound
from ensemble.launcher.runtime import find_runtime

# Where the TensorRT config looks for the plan, and Triton for what keeps one long text from making a batch dear.
PLAN_LINK = Path("classifier/1") / PLAN
ENGINE_BATCHING = Path("classifier/batchstrategy.so")

BUILD = "run make export TARGET=tensorrt"

SOUND, PROBLEMS, NOT_ALL_CHECKED = 0, 1, 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "--repository", type=Path, default=Path("model_repository"), help="what to check (default: %(default)s)"
    )
    parser.add_argument(
        "--tensorrt-version",
        type=_like(r"\d+\.\d+\.\d+(\.\d+)?", "10.5.0"),
        metavar="VERSION",
        help="of the server to check for, such as 10.5.0 (default: of the server on this machine)",
    )
    parser.add_argument(
        "--compute-capability",
        type=_like(r"\d+\.\d+", "8.0"),
        metavar="CAPABILITY",
        help="of the GPU to check for, such as 8.0 for an A100 (default: of the GPUs on this machine)",
    )
    parser.epilog = (
        f"Exit code: {SOUND} if all was checked and is sound; {PROBLEMS} if there are problems, a line each; "
        f"{NOT_ALL_CHECKED} if no problem was found, but something could not be checked here, which a line says."
    )


@legible()
def run(args: argparse.Namespace) -> int:
    """Print a line for each problem and for each thing that could not be checked; see --help for the exit code.

    Raises ConfigError if what every classifier needs is already wrong.
    """
    tensorrt, why_unknown = (args.tensorrt_version, "") if args.tensorrt_version else _tensorrt_here()
    gpus = Gpus((Gpu("", args.compute_capability, 0),)) if args.compute_capability else visible_gpus()
    layout = Manifest.read(args.repository / FOLDER / CURRENT).layout
    contract, manifest = sound(args.repository, config_name_of(layout))
    problems = engine_problems(args.repository, contract, manifest, tensorrt, gpus.devices)
    for problem in problems:
        print(f"problem: {problem}")
    if tensorrt is None:
        print(f"not checked: the server's TensorRT version ({why_unknown}): give --tensorrt-version")
    if not gpus.devices:
        print(f"not checked: the GPU's compute capability ({gpus.why_none}): give --compute-capability")
    if problems:
        return PROBLEMS
    if tensorrt is None or not gpus.devices:
        return NOT_ALL_CHECKED
    assert manifest.engine is not None  # or there would be a problem
    print(
        f"sound: {PLAN}, {layout}, TensorRT {manifest.engine.tensorrt}, compute capability "
        f"{manifest.engine.compute_capability}, {contract.max_batch_size} rows of {manifest.max_length} tokens"
    )
    return SOUND


def engine_problems(
    repository: Path, contract: Contract, manifest: Manifest, tensorrt: str | None, gpus: Sequence[Gpu]
) -> list[str]:
    """All that would keep a server from serving the installed engine, a line each.

    tensorrt: version of the server's TensorRT, None if unknown; gpus: those it will see. What is unknown is not
    compared.
    """
    problems = []
    if not (repository / ENGINE_BATCHING).is_file():
        problems.append(f"{repository / ENGINE_BATCHING} is missing: run make model_repository/{ENGINE_BATCHING}")
    if (engine := manifest.engine) is None:
        return [f"no engine is installed: {BUILD}", *problems]
    problems += _of_files(repository, manifest, engine)
    if tensorrt is not None and _three(tensorrt) != _three(engine.tensorrt):
        problems.append(
            f"{PLAN} was built with TensorRT {engine.tensorrt}, the server has {tensorrt}: {BUILD} again, with the "
            "server's TensorRT"
        )
    problems += _of_gpus(engine, gpus)
    problems += _of_profile(contract, manifest, engine)
    problems += contract.warm_up_problems(manifest.max_length)
    return problems


def _of_files(repository: Path, manifest: Manifest, engine: Engine) -> Iterator[str]:
    """Is the plan the one that was built, from the graph that is installed?"""
    folder, plan = repository / FOLDER / CURRENT, repository / PLAN_LINK
    if not plan.is_file():
        yield f"{plan} is missing: {BUILD} again"
    elif plan.resolve() != (folder / PLAN).resolve():
        yield f"{plan} is not of the export that is installed: delete it and {BUILD} again"
    elif sha256_of(plan) != manifest.sha256.get(PLAN):
        yield f"{plan} is not the file that was built (its sha256 differs): {BUILD} again"
    graph = folder / FP16_ONNX
    if not graph.is_file():
        yield f"{graph} is missing: {BUILD} again"
    elif (sha256 := sha256_of(graph)) != manifest.sha256.get(FP16_ONNX):
        yield f"{graph} is not the file that was exported (its sha256 differs): {BUILD} again"
    elif sha256 != engine.onnx_sha256:
        yield f"{PLAN} was not built from the {FP16_ONNX} that is installed: {BUILD} again"


def _of_gpus(engine: Engine, gpus: Sequence[Gpu]) -> Iterator[str]:
    """Can every GPU run the plan? The server puts an instance on each."""
    kinds = {gpu.compute_capability: gpu.name for gpu in reversed(gpus)}
    if not kinds.keys() - {engine.compute_capability}:
        return
    built_for = _kind(engine.compute_capability, engine.gpu)
    here = " and ".join(_kind(*kind) for kind in sorted(kinds.items()))
    if len(kinds) == 1:
        yield f"{PLAN} is for compute capability {built_for}, this GPU is {here}: {BUILD} again on this machine"
    elif engine.compute_capability in kinds:
        yield (
            f"{PLAN} is for compute capability {built_for}, these GPUs are {here}: set CUDA_VISIBLE_DEVICES to those "
            f"of {engine.compute_capability}"
        )
    else:
        yield (
            f"{PLAN} is for compute capability {built_for}, these GPUs are {here}: set CUDA_VISIBLE_DEVICES to those "
            f"of one kind and {BUILD} again"
        )


def _of_profile(contract: Contract, manifest: Manifest, engine: Engine) -> Iterator[str]:
    """Does the engine take every batch that the configs let through?"""
    taken = {*contract.inputs("classifier")}
    taken.update(name for entry in contract.models["classifier"].batch_input for name in entry.target_name)
    if taken != engine.profile.keys():
        yield (
            f"the engine's inputs are {', '.join(sorted(engine.profile))}, those of the classifier's config "
            f"{', '.join(sorted(taken))}: {BUILD} again"
        )
        return
    rows, length = contract.max_batch_size, manifest.max_length
    limits = f"max_batch_size {rows} and max_length {length}"
    for name, need in sorted(_largest(manifest.layout, taken, rows, length).items()):
        shapes = [engine.profile[name][bound] for bound in ("min", "opt", "max")]
        low, best, high = shapes
        if any(len(shape) != len(need) for shape in shapes) or not _rising(low, best, high):
            yield (
                f"the profile of {name} goes from {low} by {best} to {high}, not from small to large in "
                f"{len(need)} dimension{'s' * (len(need) > 1)}: {BUILD} again"
            )
        elif not _rising(low, [1] * len(need)):
            yield f"the profile of {name} begins at {low}, one row of one token needs {[1] * len(need)}: {BUILD} again"
        elif not _rising(need, high):
            yield f"the profile of {name} ends at {high}, {limits} need {need}: {BUILD} again"


def _largest(layout: str, inputs: set[str], rows: int, length: int) -> dict[str, list[int]]:
    """The largest shape in which each input of the engine comes."""
    if layout == "padded":
        return {name: [rows, length] for name in inputs}
    largest = {
        "input_ids": [rows * length],
        # A request of b rows of L ids has b * ceil(L / b) of these, never more than ids.
        "length_carrier": [rows * length],
        "longest_row": [max(b * -(-length // b) for b in range(1, rows + 1))],
        "row_lengths": [rows],
    }
    return {name: largest[name] for name in inputs & largest.keys()}


def _rising(*shapes: Sequence[int]) -> bool:
    """Whether no dimension falls from one shape to the next."""
    return all(list(sizes) == sorted(sizes) for sizes in zip(*shapes, strict=True))


def _three(version: str) -> list[str]:
    """Major, minor and patch; a library tells no more of itself."""
    return version.split(".")[:3]


def _kind(compute_capability: str, name: str) -> str:
    return f"{compute_capability} ({name})" if name else compute_capability


def _tensorrt_here() -> tuple[str | None, str]:
    """The version of TensorRT in this machine's server, or None and the reason."""
    try:
        runtime = find_runtime()
    except ServerError as error:
        return None, str(error)
    return runtime.tensorrt, runtime.why_unknown


def _like(pattern: str, example: str) -> Callable[[str], str]:
    """An argument's type: text of a pattern."""

    def checked(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise argparse.ArgumentTypeError(f"{text!r} is not of the form {example}")
        return text

    return checked
