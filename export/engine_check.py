# SPDX-License-Identifier: Apache-2.0
"""Export a model with an engine for this machine's GPU, and keep what was measured of it: the first half of gpu-check.

Where the machine has no GPU or no TensorRT, that is written down instead, and is no failure.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path

from rich.markup import escape

from ensemble.artifacts import CURRENT, FOLDER, PLAN
from ensemble.errors import ExportError, PipelineError
from export import convert
from export.terminal import console, write_json

FILE = "engine.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of convert, and where to write."""
    convert.add_arguments(parser)
    parser.set_defaults(target="tensorrt")
    parser.add_argument(
        "--output", type=Path, default=Path("build/gpu-check"), help=f"folder for {FILE} (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Export with an engine; 0 if that worked or cannot be done here. Raises PipelineError if it failed."""
    from export.engine import find_target

    file = args.output / FILE
    try:
        find_target()
    except ExportError as error:
        console.print(f"skipped: {escape(str(error))}")
        write_json(file, {"skipped": str(error)})
        return 0
    started = time.monotonic()
    try:
        manifest = convert.convert(args)
    except PipelineError as error:
        write_json(file, {"failed": str(error)})
        raise
    assert manifest.engine is not None  # the target is tensorrt
    found = {
        "model": manifest.source,
        "seconds": time.monotonic() - started,
        "bytes": (args.repository / FOLDER / CURRENT / PLAN).stat().st_size,
        "engine": asdict(manifest.engine),
        "parity": manifest.parity,
    }
    write_json(file, found)
    return 0
