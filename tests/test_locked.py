# SPDX-License-Identifier: Apache-2.0
"""requirements/: that what is installed is what was chosen, byte for byte; and the audit of it, against a stand-in."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path

import pytest
from conftest import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = ROOT / "requirements"
PYTHONS = ("3.10.0", "3.11.0", "3.12.0")
PYTHON = ".".join(map(str, sys.version_info[:3]))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Locked:
    """One package of a file."""

    requirement: Requirement
    hashes: tuple[str, ...]

    @property
    def name(self) -> str:
        return canonicalize_name(self.requirement.name)

    @property
    def version(self) -> str:
        return str(self.requirement.specifier).removeprefix("==")

    def is_for(self, python: str) -> bool:
        marker = self.requirement.marker
        return marker is None or marker.evaluate({"python_full_version": python, "python_version": python[:4]})


def lines_of(name: str) -> list[str]:
    """A file's requirements, each in one line."""
    text = (FOLDER / f"{name}.txt").read_text(encoding="utf-8").replace("\\\n", "")
    return [line for line in text.splitlines() if not line.startswith("#")]


def packages(name: str) -> list[Locked]:
    """What a file itself locks."""
    split = [line.split("--hash=") for line in lines_of(name) if not line.startswith("-r ")]
    return [Locked(Requirement(first), tuple(each.strip() for each in hashes)) for first, *hashes in split]


def installed_by(name: str, python: str) -> dict[str, str]:
    """Package -> version, with the files that a file names."""
    chain = [line.removeprefix("-r ").removesuffix(".txt") for line in lines_of(name) if line.startswith("-r ")]
    found = {package.name: package.version for package in packages(name) if package.is_for(python)}
    return {**found, **{k: v for parent in chain for k, v in installed_by(parent, python).items()}}


FILES = sorted(file.stem for file in FOLDER.glob("*.txt"))


def test_every_locked_package_has_one_version_and_hashes() -> None:
    """SHA-256, and no word of where it comes from: that is for pip's own configuration to say."""
    for name in FILES:
        assert "://" not in (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
        for package in packages(name):
            assert re.fullmatch(r"==[^,*]+", str(package.requirement.specifier)), package
            assert package.hashes, package
            assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", each) for each in package.hashes), package


@pytest.mark.parametrize("python", PYTHONS)
def test_a_package_is_locked_in_one_place(python: str) -> None:
    """The larger file names the smaller one; nothing is said twice."""
    files = set(FILES) - {"torch-cpu"}
    names = [package.name for name in files for package in packages(name) if package.is_for(python)]

    assert sorted(set(names)) == sorted(names)
    assert not {"torch", "triton", "nvidia-cudnn-cu13"} & installed_by("dev", python).keys()
    assert {"torch", "triton", "nvidia-cudnn-cu13"} <= installed_by("torch-cuda", python).keys()


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize(
    ("name", "extras"),
    [
        ("handlers", ("handlers",)),
        ("export", ("handlers", "export")),
        ("dev", ("handlers", "server", "export", "perf", "dev")),
    ],
)
def test_a_file_holds_what_pyproject_asks_for(name: str, extras: tuple[str, ...], python: str) -> None:
    """Every direct need of those extras, and what builds the project, at a version that is allowed."""
    optional = PROJECT["project"]["optional-dependencies"]
    asked = [*PROJECT["project"]["dependencies"], *(line for extra in extras for line in optional[extra])]
    asked += PROJECT["build-system"]["requires"]
    locked = installed_by(name, python) | installed_by("torch-cuda", python)

    for requirement in map(Requirement, asked):
        if requirement.name != "onepass":
            assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), requirement


def test_these_tests_run_on_what_is_locked() -> None:
    """Every package, at its very version; torch in one build or the other."""
    torch = "torch-cpu" if metadata.version("torch").endswith("+cpu") else "torch-cuda"

    locked = installed_by("dev", PYTHON) | installed_by(torch, PYTHON)

    assert {name: metadata.version(name) for name in locked} == locked


def test_both_builds_of_torch_are_of_one_version() -> None:
    """PyPI's for every Python; and PyTorch's for CPUs, by other hashes."""
    (cpu,) = packages("torch-cpu")
    (cuda,) = [package for package in packages("torch-cuda") if package.name == "torch"]

    assert cpu.version == f"{cuda.version}+cpu"
    assert len(cuda.hashes) == len(PYTHONS)
    assert not set(cuda.hashes) & set(cpu.hashes)


@pytest.mark.parametrize("cpu_build", [True, False], ids=["with PyTorch's index", "with PyPI alone"])
def test_make_installs_by_hash_alone(tmp_path: Path, cpu_build: bool) -> None:
    """Nothing is resolved, nothing is fetched to build with, and of torch there is one build."""
    calls = tmp_path / "calls"
    (tmp_path / "requirements").mkdir()
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    python = tmp_path / "python"
    pip = f'#!/bin/sh\necho "$@" >> {calls}\ncase "$*" in *torch-cpu*) exit {int(not cpu_build)};; esac\n'
    python.write_text(f"#!/bin/sh\nmkdir -p .venv/bin; cat > .venv/bin/pip <<'E'\n{pip}E\nchmod +x .venv/bin/pip\n")
    python.chmod(0o755)

    subprocess.run(["make", f"PYTHON={python}", ".venv/installed"], cwd=tmp_path, check=True, capture_output=True)

    lines = calls.read_text().splitlines()
    installs = [line.split() for line in lines if line.startswith("install")]
    assert all({"--no-deps", "--no-build-isolation"} <= set(install) for install in installs)
    files = [install[-1].removeprefix("requirements/") for install in installs if "--require-hashes" in install]
    assert files == ["handlers.txt", "dev.txt", "torch-cpu.txt", *([] if cpu_build else ["torch-cuda.txt"])]
    assert [install[-2:] for install in installs if "--require-hashes" not in install] == [["--editable", "."]]
    assert lines[-1] == "check"


Database = tuple[str, set[str]]


@pytest.fixture
def database() -> Iterator[Callable[..., Database]]:
    """A stand-in for OSV: knows of flaws in some packages, or is broken; its address, and what it was asked about."""
    servers = []

    def start(*flawed: str, status: int = 200) -> Database:
        asked: set[str] = set()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                name = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["package"]["name"]
                asked.add(name)
                ranges = [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "99"}]}]
                affected = [{"package": {"name": name, "ecosystem": "PyPI"}, "ranges": ranges}]
                body = json.dumps({"vulns": [{"id": "PYSEC-1-1", "affected": affected}]} if name in flawed else {})
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *args: object) -> None:
                """Silent."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}/v1/query", asked

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def audit(url: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, FOLDER / "audit.py", "--database", url], capture_output=True, text=True, timeout=60
    )


def test_a_database_that_cannot_be_reached_is_said_and_no_failure() -> None:
    """One line, so that it is seen; exit code 0."""
    result = audit("http://127.0.0.1:9/")

    assert result.returncode == 0
    assert result.stdout == "SKIPPED: http://127.0.0.1:9/ cannot be reached from here, so nothing was looked up\n"


def test_every_locked_package_is_looked_up(database: Callable[..., Database]) -> None:
    """Those of all files, for this Python; nothing known is exit code 0."""
    url, asked = database()

    result = audit(url)

    assert (result.returncode, result.stdout) == (0, "no known vulnerabilities in what is locked\n")
    assert asked >= {package.name for name in FILES for package in packages(name) if package.is_for(PYTHON)}


def test_a_known_vulnerability_fails_the_audit(database: Callable[..., Database]) -> None:
    """Its package, its number and where it is mended; exit code 1."""
    url, _ = database("jinja2")

    result = audit(url)

    assert result.returncode == 1
    assert re.search(r"^jinja2 +\S+ +PYSEC-1-1 +99 *$", result.stdout, re.MULTILINE)


def test_a_broken_database_is_neither(database: Callable[..., Database]) -> None:
    """Exit code 2: nothing was found, and nothing was cleared."""
    url, _ = database(status=500)

    result = audit(url)

    assert result.returncode == 2
    assert result.stderr.startswith("the audit failed: ")
