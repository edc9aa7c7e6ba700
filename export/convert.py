# SPDX-License-Identifier: Apache-2.0
"""Export a Hugging Face BERT classifier into a model repository that Triton serves."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rich.markup import escape

from ensemble.artifacts import Manifest
from ensemble.errors import PipelineError
from ensemble.launcher.choice import CONFIG_NAMES
from export.terminal import console

# Of the built-in sample, for the parity gate: every length there is, and a minute's work on two cores.
GATE_TEXTS = 100
LARGEST_WORKSPACE_GIB = 1024.0
TIMING_CACHE = Path("build/tensorrt.timing")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("model", help="local folder or hub id of a BertForSequenceClassification")
    parser.add_argument(
        "--revision", default="main", help="commit, tag or branch of a hub model (default: %(default)s)"
    )
    parser.add_argument(
        "--repository", type=Path, default=Path("model_repository"), help="where to install (default: %(default)s)"
    )
    parser.add_argument(
        "--max-length",
        type=int,
        help="cut texts to this many tokens, [CLS] and [SEP] included (default: what the model takes)",
    )
    parser.add_argument(
        "--texts",
        type=Path,
        help="UTF-8 file, one text per line, for the parity gate and for the lengths an engine is tuned for; texts of "
        "your own domain and language are the best proof (default: the built-in English sample)",
    )
    parser.add_argument(
        "--target",
        choices=("onnx", "tensorrt"),
        default="onnx",
        help="onnx: all but the engine, on any machine; tensorrt: also the FP16 engine, on the machine with the GPU it "
        "is for, with the TensorRT version of the server (default: %(default)s)",
    )
    parser.add_argument(
        "--layout",
        choices=sorted(CONFIG_NAMES),
        default="packed",
        help="of the engine and its graph. packed: no padding, any lengths share a batch; padded: plain [rows, length] "
        "for texts of equal length, since Triton batches only those together (default: %(default)s)",
    )
    parser.add_argument(
        "--workspace-gib", type=float, default=4.0, help="GPU memory a layer of the engine may use (default: 4)"
    )
    parser.add_argument(
        "--timing-cache",
        type=Path,
        default=TIMING_CACHE,
        help="file that keeps TensorRT's kernel timings for the next build (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Export; 0 once it is installed. Raises ExportError if it is not, and then nothing was changed."""
    try:
        manifest = convert(args)
    except KeyboardInterrupt:
        console.print("interrupted: nothing was installed")
        return 130
    console.print(
        f"{escape(str(args.repository))} is ready to serve {escape(manifest.source['name'])}: "
        f"{len(manifest.labels)} labels, up to {manifest.max_length} tokens"
        f"{', with an engine for ' + escape(manifest.engine.gpu) if manifest.engine else ''}. "
        "Next: make serve (anew, if it runs)"
    )
    return 0


def convert(args: argparse.Namespace) -> Manifest:
    """Export as the arguments say, telling each step."""
    started = time.monotonic()
    texts = _texts(args.texts)
    if not 0 < args.workspace_gib < LARGEST_WORKSPACE_GIB:
        raise PipelineError(f"--workspace-gib {args.workspace_gib} is no size of a GPU's memory: give one such as 4")
    # Imported here, so that --help and a wrong file answer at once.
    from export.engine_from_onnx import GIBIBYTE, Settings
    from export.pipeline import export

    return export(
        args.model,
        args.repository,
        texts=texts,
        revision=args.revision,
        max_length=args.max_length,
        target=args.target,
        layout=args.layout,
        engine_settings=Settings(int(args.workspace_gib * GIBIBYTE), args.timing_cache),
        report=lambda step: console.print(f"[dim]{time.monotonic() - started:6.1f} s[/dim]  {escape(step)}"),
    )


def _texts(file: Path | None) -> list[str]:
    if file is None:
        from ensemble.samples import load_samples

        return [sample.text for sample in load_samples()[:GATE_TEXTS]]
    try:
        texts = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise PipelineError(f"--texts {file} cannot be read ({error}): give a UTF-8 file, one text per line") from error
    if not texts:
        raise PipelineError(f"--texts {file} is empty: give one text per line")
    return texts
