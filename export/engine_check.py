# SPDX-License-Identifier: Apache-2.0
"""Export a model with an engine for this machine's GPU, and keep what was measured of it: the first half of gpu-check.

Where the machine has no GPU or no TensorRT, that is written down instead, and is no failure.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.markup import escape

from ensemble.artifacts import CURRENT, FOLDER, PLAN
from ensemble.errors import ExportError
from export import convert
from export.terminal import console

FILE = "engine.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of convert, and where to write."""
    convert.add_arguments(parser)
    parser.set_defaults(target="tensorrt")
    parser.add_argument(
        "--output", type=Path, default=Path("build/gpu-check"), help=f"folder for {FILE} (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Export with an engine; 0 if that worked or cannot be done here. Raises ExportError if the engine is not good."""
    from export.engine import find_target

    args.output.mkdir(parents=True, exist_ok=True)
    try:
        find_target()
    except ExportError as error:
        console.print(f"skipped: {escape(str(error))}")
        return _write(args.output, {"skipped": str(error)})
    started = time.monotonic()
    manifest = convert.convert(args)
    plan = args.repository / FOLDER / CURRENT / PLAN
    assert manifest.engine is not None  # the target is tensorrt
    return _write(
        args.output,
        {
            "model": manifest.source,
            "seconds": time.monotonic() - started,
            "bytes": plan.stat().st_size,
            "engine": asdict(manifest.engine),
            "parity": manifest.parity,
        },
    )


def _write(folder: Path, found: dict[str, Any]) -> int:
    (folder / FILE).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0
