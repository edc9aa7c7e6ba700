# SPDX-License-Identifier: Apache-2.0
"""An installed export of any bytes, and an engine beside it that nothing can run: enough for all that only compares."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from ensemble.artifacts import CURRENT, FOLDER, FP16_ONNX, LINKS, PLAN, Engine, Manifest, sha256_of
from ensemble.launcher.gpu import Gpu

A100 = Gpu("NVIDIA A100-SXM4-80GB", "8.0", 80 << 30)
H200 = Gpu("NVIDIA H200", "9.0", 141 << 30)
L4 = Gpu("NVIDIA L4", "8.9", 24 << 30)

# For 64 rows of 512 tokens, as the committed configs have it.
PACKED = {
    "input_ids": {"min": [1], "opt": [4096], "max": [32768]},
    "length_carrier": {"min": [1], "opt": [4096], "max": [32768]},
    "row_lengths": {"min": [1], "opt": [64], "max": [64]},
    "longest_row": {"min": [1], "opt": [64], "max": [567]},
}
PADDED = {
    name: {"min": [1, 1], "opt": [64, 64], "max": [64, 512]}
    for name in ("input_ids", "attention_mask", "token_type_ids")
}


def install_export(repository: Path) -> None:
    """What export leaves where no engine was asked for; the files' content is never read."""
    folder = repository / FOLDER / "20261201T093000-1f2e3d4c"
    folder.mkdir(parents=True)
    for name in {*LINKS.values(), FP16_ONNX} - {PLAN}:
        (folder / name).write_text("negative\npositive\n" if name == "labels.txt" else name)
    (folder.parent / CURRENT).symlink_to(folder.name)
    for place, name in LINKS.items():
        if name != PLAN:
            _link(repository, place, name)
    Manifest(
        source={"name": "fake"},
        created="2026-12-01T09:30:00+00:00",
        versions={},
        sha256={file.name: sha256_of(file) for file in folder.iterdir()},
        labels=["negative", "positive"],
        activation="softmax",
        max_length=512,
        vocab_size=30522,
        type_vocab_size=2,
        pad_token_id=0,
        layout="packed",
    ).write(folder)


def install_engine(repository: Path, *, layout: str = "packed", **changes: Any) -> None:
    """A plan for an A100 and TensorRT 10.5.0, its graph, and its entry in model.json; changes: of that entry."""
    folder = repository / FOLDER / CURRENT
    (folder / FP16_ONNX).write_text("graph")
    (folder / PLAN).write_text("plan")
    _link(repository, Path("classifier/1") / PLAN, PLAN)
    (repository / "classifier/batchstrategy.so").touch()
    sha256 = {name: sha256_of(folder / name) for name in (FP16_ONNX, PLAN)}
    engine = Engine(
        tensorrt="10.5.0",
        compute_capability=A100.compute_capability,
        gpu=A100.name,
        onnx_sha256=sha256[FP16_ONNX],
        profile=PACKED if layout == "packed" else PADDED,
    )
    manifest = Manifest.read(folder)
    replace(manifest, sha256=manifest.sha256 | sha256, layout=layout, engine=replace(engine, **changes)).write(folder)


def _link(repository: Path, place: Path, name: str) -> None:
    link = repository / place
    link.unlink(missing_ok=True)
    link.symlink_to(os.path.relpath(repository / FOLDER / CURRENT / name, link.parent))
