# SPDX-License-Identifier: Apache-2.0
"""The files `export` installs into a model repository, and where the server finds them. Knows nothing of their insides.

All files of one export lie in one folder, and the models reach them through links:

    model_repository/
      text_classifier/artifacts/20261201T093000-1f2e3d4c/   model.onnx, model.fp16.onnx, model.pt, tokenizer.json,
                                                            labels.txt, model.json, and model.plan if one was built
      text_classifier/artifacts/current -> 20261201T093000-1f2e3d4c
      classifier/1/model.onnx           -> ../../text_classifier/artifacts/current/model.onnx      (and so on, LINKS)

so that replacing `current`, one rename, replaces everything at once or nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from ensemble.errors import ConfigError

FOLDER = Path("text_classifier/artifacts")
CURRENT = "current"
MANIFEST = "model.json"

# The TensorRT engine; only an export with TARGET=tensorrt has one.
PLAN = "model.plan"

LABELS = Path("text_classifier/labels.txt")

# Where in the repository each file is looked for -> its name in the artifacts' folder.
LINKS = {
    Path("classifier/1/model.onnx"): "model.onnx",
    Path("baseline/1/model.pt"): "model.pt",
    Path("tokenizer/1/tokenizer.json"): "tokenizer.json",
    LABELS: "labels.txt",
    Path("classifier/1/model.plan"): PLAN,
}
# What an engine is built from. No model of the repository reads it.
FP16_ONNX = "model.fp16.onnx"


def _check_types(value: Any) -> None:
    """Raises TypeError with the first field of a dataclass that is not of the type it is declared with."""
    for name, declared in get_type_hints(type(value)).items():
        if not _fits(getattr(value, name), declared):
            raise TypeError(f"{name} is {getattr(value, name)!r:.60}, not {declared}")


def _fits(value: object, declared: Any) -> bool:
    """Whether a value out of JSON is of a type as dataclasses here declare them."""
    origin, inner = get_origin(declared), get_args(declared)
    if declared is Any:
        return True
    if origin is list:
        return isinstance(value, list) and all(_fits(item, inner[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            _fits(key, inner[0]) and _fits(item, inner[1]) for key, item in value.items()
        )
    if inner:
        return any(_fits(value, choice) for choice in inner)  # Engine | None
    return isinstance(value, declared) and not (declared is int and isinstance(value, bool))


@dataclass(frozen=True)
class Engine:
    """What model.plan was built with and for; a plan runs nowhere else.

    tensorrt:           version of the library that built it, "10.5.0"
    compute_capability: of the GPU it was built for, "8.0" for an A100
    gpu:                that GPU's name
    onnx_sha256:        of the graph it was built from, model.fp16.onnx
    profile:            input -> {"min", "opt", "max"} -> shape; the optimization profile
    """

    tensorrt: str
    compute_capability: str
    gpu: str
    onnx_sha256: str
    profile: dict[str, dict[str, list[int]]]

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError for what is not of these types: it is read from JSON."""
        _check_types(self)
        for name, shapes in self.profile.items():
            if shapes.keys() != {"min", "opt", "max"}:
                raise ValueError(f"engine: the profile of {name} has {sorted(shapes)}, not min, opt and max")


@dataclass(frozen=True)
class Manifest:
    """model.json: what was exported, from what, with what, and how close it came.

    source:     "name" as given to export; "revision" of a hub model or "sha256" of a folder's weights
    versions:   of the libraries that made the export
    sha256:     of every other file beside model.json
    labels:     in the order of the logits
    activation: what makes `probabilities` of the logits: softmax, sigmoid or identity (regression)
    max_length: tokens of the longest row, [CLS] and [SEP] included
    layout:     of the FP16 graph and the engine: packed, or padded
    parity:     the gate's verdicts, one per comparison (export/parity.py)
    engine:     what model.plan was built with, if there is one
    """

    source: dict[str, str]
    created: str
    versions: dict[str, str]
    sha256: dict[str, str]
    labels: list[str]
    activation: str
    max_length: int
    vocab_size: int
    type_vocab_size: int
    pad_token_id: int
    layout: str
    parity: list[dict[str, Any]] = field(default_factory=list)
    engine: Engine | None = None

    def __post_init__(self) -> None:
        """Raises TypeError for what is not of these types: it is read from JSON."""
        _check_types(self)

    def write(self, folder: Path) -> None:
        """Write model.json into a folder."""
        (folder / MANIFEST).write_text(json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read model.json from a folder. Raises ConfigError if it is missing or not what this version writes."""
        file = folder / MANIFEST
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
            if values.get("engine") is not None:
                values["engine"] = Engine(**values["engine"])
            return cls(**values)
        except FileNotFoundError:
            raise ConfigError(f"{file} is missing: run make export") from None
        except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{file} cannot be read ({error}): run make export") from error


def sha256_of(file: Path) -> str:
    """The file's SHA-256 as hex digits."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def checked(link: Path) -> tuple[Path, Manifest]:
    """The installed file behind a link and its manifest, once its hash is what the manifest says.

    Raises ConfigError if the file is missing, lies outside the repository or was changed since it was exported.
    """
    if not link.is_file():
        raise ConfigError(f"{link} is missing: run make export")
    file = link.resolve()
    # A link is in the folder of its model, or of the model's version.
    if file.parent.parent not in [(place / FOLDER).resolve() for place in link.absolute().parents[1:3]]:
        raise ConfigError(f"{link} leads to {file}, which is not among the files of an export: run make export")
    manifest = Manifest.read(file.parent)
    if manifest.sha256.get(file.name) != sha256_of(file):
        raise ConfigError(f"{link} is not the file that was exported (its sha256 differs): run make export")
    return file, manifest


def verify(repository: Path, models: Collection[str]) -> Manifest:
    """Check all that these models need before a server loads them; returns the one manifest they share.

    Raises ConfigError for a missing or changed file, for files of different exports, and for labels that disagree.
    """
    manifests = {}
    for link in LINKS:
        # Only the TensorRT config needs a plan, and ensemble/launcher/engine_preflight.py looks after it.
        if link.parts[0] in models and LINKS[link] != PLAN:
            file, manifest = checked(repository / link)
            manifests[file.parent] = manifest
    if len(manifests) != 1:
        raise ConfigError(f"{repository} mixes files of {len(manifests)} exports: run make export")
    folder, manifest = manifests.popitem()
    labels = (folder / LINKS[LABELS]).read_text(encoding="utf-8").splitlines()
    if labels != manifest.labels:
        raise ConfigError(f"{repository / LABELS} and {MANIFEST} name different labels: run make export")
    return manifest
