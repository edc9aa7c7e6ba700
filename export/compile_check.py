# SPDX-License-Identifier: Apache-2.0
"""Compile the FP16 graph for a GPU on a machine without one: with TensorRT for RTX, which shares TensorRT's parser.

What it shows: every operator is one that TensorRT has, the types fit, and the profile of the classifier's config
compiles. What it cannot show: numbers and speed, which need the GPU. The engine is thrown away.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from ensemble.artifacts import CURRENT, FOLDER, FP16_ONNX, Manifest, sha256_of
from ensemble.contract import Contract
from ensemble.errors import ConfigError
from ensemble.launcher.choice import config_name_of
from export.terminal import console, write_json

A100 = "8.0"


@dataclass(frozen=True)
class Compiled:
    """What was compiled, for which compute capability, by what; layers as parsed, bytes and seconds of the engine."""

    layout: str
    compute_capability: str
    compiler: str
    layers: int
    bytes: int
    seconds: float
    profile: dict[str, dict[str, list[int]]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "--repository", type=Path, default=Path("model_repository"), help="whose graph (default: %(default)s)"
    )
    parser.add_argument(
        "--compute-capability", default=A100, help="of the GPU to compile for (default: %(default)s, an A100)"
    )
    parser.add_argument("--json", type=Path, help="also write what was found to this file")


def run(args: argparse.Namespace) -> int:
    """Compile and print; 0. Raises ExportError with all that the compiler finds wrong."""
    compiled = compile_check(args.repository, args.compute_capability)
    table = Table(title=f"{FP16_ONNX}, {compiled.layout}, compiled for {args.compute_capability}: no GPU needed")
    for column in ("input", "min", "opt", "max"):
        table.add_column(column)
    for name, shapes in compiled.profile.items():
        table.add_row(name, *(escape(str(shapes[bound])) for bound in ("min", "opt", "max")))
    console.print(table)
    console.print(
        f"{compiled.compiler}: {compiled.layers} layers, an engine of {compiled.bytes / 1e6:.0f} MB, "
        f"{compiled.seconds:.1f} s"
    )
    if args.json:
        write_json(args.json, asdict(compiled))
    return 0


def compile_check(repository: Path, compute_capability: str = A100) -> Compiled:
    """Compile what is installed, with the profile of the config it will be served with.

    Raises ConfigError if no export is installed, ExportError if the graph does not compile.
    """
    folder = repository / FOLDER / CURRENT
    manifest = Manifest.read(folder)
    graph = folder / FP16_ONNX
    if not graph.is_file() or sha256_of(graph) != manifest.sha256.get(FP16_ONNX):
        raise ConfigError(f"{graph} is not the file that was exported: run make export")
    contract = Contract.read(repository, config_name_of(manifest.layout))
    # Imported here, so that --help answers at once.
    from ensemble.handlers.tokenization import TextTokenizer
    from ensemble.samples import load_samples
    from export import engine_from_onnx
    from export.profile import as_dict, profile_of

    rows = TextTokenizer(folder / "tokenizer.json")([sample.text for sample in load_samples()])
    profile = profile_of(contract.models["classifier"], manifest.max_length, [len(row.ids) for row in rows])
    compiler = engine_from_onnx.load("tensorrt_rtx")
    settings = engine_from_onnx.Settings(compute_capability=compute_capability)
    built = engine_from_onnx.build(
        compiler, graph, profile, settings, report=lambda line: console.print(escape(line), style="dim")
    )
    return Compiled(
        layout=manifest.layout,
        compute_capability=compute_capability,
        compiler=f"TensorRT for RTX {compiler.__version__}",
        layers=built.layers,
        bytes=len(built.plan),
        seconds=built.seconds,
        profile=as_dict(profile),
    )
