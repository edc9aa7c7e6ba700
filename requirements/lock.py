# SPDX-License-Identifier: Apache-2.0
"""pyproject.toml -> the files beside this one: each package at one version, with the hash of every file that may be it.

    handlers.txt     what a server's handlers need, but for torch; the image of the server installs it
    export.txt       handlers.txt, and what the export adds; so does the image of the export
    dev.txt          export.txt, and what the server, the measurements and the tests add; `make` installs it
    torch-cuda.txt   torch as PyPI has it, and the libraries of CUDA that it needs
    torch-cpu.txt    torch as PyTorch's own index has it for CPUs, which needs none of them

uv resolves, for Linux on x86-64 and every Python the project takes ([tool.uv] in pyproject.toml). What is locked stays
at its version until it is named with --upgrade-package, or all is with --upgrade. The addresses of files are not
written down: which index has them is pip's to know.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from packaging.markers import Marker
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent

# File -> the extras of pyproject.toml it holds, beside what the project itself needs. Each contains the one before.
LAYERS = {
    "handlers": ("handlers",),
    "export": ("handlers", "export"),
    "dev": ("handlers", "export", "server", "perf", "dev"),
}
# torch's metadata does not say which of its needs are those of its CUDA build, but their names do.
OF_CUDA = re.compile(r"torch|triton|(cuda|nvidia)-.+")
NOT_OF_CUDA = {"nvidia-ml-py", "nvidia-pytriton"}

# Both builds are of one version, and pip that checks hashes may take PyPI's where it sees both, so each has a file. uv
# sees PyPI's only. These are of the other, as PyTorch's index lists them; that of Python 3.11 was computed of the file,
# too. None is known for Python 3.10, which gets PyPI's.
CPU_TORCH = {
    "2.13.0": (
        "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",  # cp311
        "4ca4a9394b0c771238a4f73590fdbbc4debad85ed0fa63d026ae1b085da7d6e2",  # cp312
    )
}

PYTHONS = ((3, 10), (3, 11), (3, 12))
# The oldest C library among those of NVIDIA's images (Ubuntu 22.04) is 2.35.
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(35, 4, -1)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
# True of all that is locked, so said once, in the header.
EVERYWHERE = {
    "platform_machine == 'x86_64'",
    "sys_platform == 'linux'",
    "platform_python_implementation == 'CPython'",
    "implementation_name == 'cpython'",
    "python_full_version < '3.13'",
}

HEADER = """\
# {what}. For Linux on x86-64 and Python 3.10 to 3.12.
# Written by: .venv/bin/python requirements/lock.py [--upgrade | --upgrade-package NAME]
# Installed by: pip install --no-deps --require-hashes -r {name}
"""


def main() -> int:
    """Write the files. An error of uv's ends it with uv's message and exit code."""
    parser = argparse.ArgumentParser(prog="lock.py", description="lock what pyproject.toml asks for")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions of everything")
    parser.add_argument("--upgrade-package", action="append", default=[], metavar="NAME", help="... of this package")
    args = parser.parse_args()
    upgrades = [f"--upgrade-package={name}" for name in args.upgrade_package] + ["--upgrade"] * args.upgrade
    try:
        for name, text in locked(upgrades).items():
            (FOLDER / f"{name}.txt").write_text(text, encoding="utf-8")
    except subprocess.CalledProcessError as error:
        return error.returncode
    return 0


def locked(upgrades: list[str]) -> dict[str, str]:
    """The texts of all files, by name."""
    with tempfile.TemporaryDirectory() as folder:
        versions = Path(folder) / "versions.txt"
        # uv keeps to what it finds in the file it is to write.
        known = [file.read_text(encoding="utf-8") for file in sorted(FOLDER.glob("*.txt")) if file.stem != "torch-cpu"]
        versions.write_text(re.sub(r"^-r .*\n", "", "".join(known), flags=re.MULTILINE), encoding="utf-8")
        _compile("dev", versions, *upgrades)
        layers = {}
        for layer in LAYERS:
            file = Path(folder) / f"pylock.{layer}.toml"
            _compile(layer, file, f"--constraint={versions}")
            layers[layer] = tomllib.loads(file.read_text(encoding="utf-8"))["packages"]
    texts, before, written = {}, "", set()
    for layer, packages in layers.items():
        names = {package["name"] for package in packages} - written
        written |= names
        # As the whole resolution has it: one package may be needed on every Python by the next layer only.
        chosen = [package for package in layers["dev"] if package["name"] in names]
        if before == "":
            texts |= _torch([package for package in chosen if _is_of_cuda(package["name"])])
        rest = [package for package in chosen if not _is_of_cuda(package["name"])]
        what = f"What {', '.join(LAYERS[layer])} of pyproject.toml need, but for torch"
        texts[layer] = _text(layer, what, map(_requirement, rest), before)
        before = f"-r {layer}.txt\n"
    return texts


def _compile(layer: str, output: Path, *options: str) -> None:
    extras = [f"--extra={extra}" for extra in LAYERS[layer]]
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal", "--python-version=3.10", *extras]
    subprocess.run([*command, *options, f"--output-file={output}", "pyproject.toml"], cwd=ROOT, check=True)


def _torch(packages: list[dict[str, Any]]) -> dict[str, str]:
    """The files of both builds."""
    (version,) = {package["version"] for package in packages if package["name"] == "torch"}
    if version not in CPU_TORCH:
        sys.exit(f"CPU_TORCH has no hashes of torch {version}: take them from PyTorch's index for CPUs")
    cpu = _pinned(f"torch=={version}+cpu", CPU_TORCH[version])
    return {
        "torch-cuda": _text("torch-cuda", "torch as PyPI has it", map(_requirement, packages)),
        "torch-cpu": _text("torch-cpu", "torch as PyTorch's index for CPUs has it", [cpu]),
    }


def _text(name: str, what: str, requirements: Iterable[str], before: str = "") -> str:
    return HEADER.format(what=what, name=f"requirements/{name}.txt") + before + "".join(requirements)


def _pinned(requirement: str, hashes: Iterable[str]) -> str:
    return " \\\n    --hash=sha256:".join([requirement, *hashes]) + "\n"


def _requirement(package: dict[str, Any]) -> str:
    """One package of pylock.toml as pip's requirement, with the hashes of what may be installed."""
    marker = " and ".join(clause for clause in package["marker"].split(" and ") if clause not in EVERYWHERE)
    hashes = sorted({sha256 for python in PYTHONS for sha256 in _hashes(package, python)})
    return _pinned(f"{package['name']}=={package['version']}{f' ; {marker}' if marker else ''}", hashes)


def _hashes(package: dict[str, Any], python: tuple[int, int]) -> set[str]:
    """Of the wheels that this Python can take, or of the source where there is none."""
    version = f"{python[0]}.{python[1]}"
    if not Marker(package["marker"]).evaluate({"python_full_version": f"{version}.0", "python_version": version}):
        return set()
    tags = {*cpython_tags(python, platforms=PLATFORMS), *compatible_tags(python, platforms=PLATFORMS)}
    fitting = {
        wheel["hashes"]["sha256"] for wheel in package.get("wheels", []) if not tags.isdisjoint(_tags_of(wheel["url"]))
    }
    return fitting or {package["sdist"]["hashes"]["sha256"]}


def _tags_of(url: str) -> frozenset[Tag]:
    return parse_wheel_filename(url.rsplit("/", 1)[1].replace("%2B", "+"))[3]


def _is_of_cuda(name: str) -> bool:
    return bool(OF_CUDA.fullmatch(name)) and name not in NOT_OF_CUDA


if __name__ == "__main__":
    sys.exit(main())
