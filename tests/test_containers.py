# SPDX-License-Identifier: Apache-2.0
"""Dockerfile, compose.yaml and their make targets, as far as they can be known without Docker."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import pytest
import tritonclient.grpc as triton
import yaml
from conftest import ROOT
from container_files import arguments_of, compose, stages

import ensemble.__main__
from ensemble import probe, serve
from ensemble.launcher.choice import CLASSIFIERS
from ensemble.launcher.server import START_SECONDS, STOP_SECONDS, Server

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# The server's version -> NVIDIA's release, from the table in its support matrix.
RELEASES = {"2.51.0": "24.10"}

# Docker's own, where compose.yaml does not say.
DOCKER_SHM_MB = 64


def copied(stage: str) -> list[str]:
    """What a stage copies from the checkout."""
    return [source for arguments in arguments_of(stage, "COPY") for source in arguments.split()[:-1]]


def admitted(path: str) -> bool:
    """Whether .dockerignore lets a file of the checkout reach a build: the last pattern that fits it decides."""
    answer = True
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        pattern = line.removeprefix("!")
        if not line or line.startswith("#"):
            continue
        parents = [path, *map(str, Path(path).parents)][:-1]
        if pattern.startswith("**/"):
            fits = pattern.removeprefix("**/") in Path(path).parts
        else:
            fits = any(fnmatch(name, pattern) and name.count("/") == pattern.count("/") for name in parents)
        if fits:
            answer = line.startswith("!")
    return answer


def read(file: str) -> dict:
    """The services of a compose file as they are written."""
    return yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))["services"]


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], argparse.Namespace]:
    """What the project's own parser makes of a command that serves."""

    def parse(command: list[str]) -> argparse.Namespace:
        assert command[:4] == ["python3", "-m", "ensemble", "serve"]
        seen: list[argparse.Namespace] = []
        monkeypatch.setattr(serve, "run", lambda args: seen.append(args) or 0)
        assert ensemble.__main__.main(command[3:]) == 0
        return seen[0]

    return parse


@pytest.mark.parametrize("stage", ["base", "export", "serve"])
def test_all_that_is_copied_exists_and_reaches_the_build(stage: str) -> None:
    """Every source of every COPY."""
    assert copied(stage)
    for source in copied(stage):
        assert (ROOT / source).exists(), source
        assert admitted(source if (ROOT / source).is_file() else f"{source}/__init__.py"), source


@pytest.mark.parametrize("stage", ["export", "serve"])
def test_the_package_can_be_built_from_what_is_copied(stage: str) -> None:
    """All packages, the README and the licence that pyproject.toml names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {name.split(".")[0] for name in project["tool"]["setuptools"]["packages"]}

    needed = packages | {project["project"]["readme"], *project["project"]["license-files"], "pyproject.toml"}

    assert needed <= {*copied(stage), *copied("base")}


@pytest.mark.parametrize(
    "path",
    [
        ".env",
        ".git/config",
        ".venv/bin/python",
        "build/default_model/config.json",
        "model_repository/classifier/1/model.plan",
        "tests/conftest.py",
        "ensemble/__pycache__/serve.cpython-311.pyc",
    ],
)
def test_nothing_else_reaches_the_build(path: str) -> None:
    """No history, no secrets, no models."""
    assert not admitted(path)


def test_both_images_stand_on_one_release(server: Server) -> None:
    """An engine loads only under the TensorRT that built it; by default it is that of the server these tests run."""
    with triton.InferenceServerClient(server.url) as client:
        release = RELEASES[client.get_server_metadata().version]

    assert arguments_of("", "ARG") == [f"RELEASE={release}"]
    assert arguments_of("base", "FROM") == ["nvcr.io/nvidia/tritonserver:${RELEASE}-py3 AS base"]
    assert arguments_of("export", "FROM") == ["base AS export"]
    assert arguments_of("serve", "FROM") == ["base AS serve"]
    for name, service in compose().items():
        assert service["build"] == {
            "context": ".",
            "target": name,
            "args": {"RELEASE": release, "TORCH_INDEX": ""},
        }
        assert service["image"].endswith(f":{release}")


def test_another_release_is_one_for_both_images() -> None:
    """RELEASE reaches both builds and both names."""
    for service in compose({"RELEASE": "25.07"}).values():
        assert service["build"]["args"] == {"RELEASE": "25.07", "TORCH_INDEX": ""}
        assert service["image"].endswith(":25.07")


def test_the_tensorrt_package_is_asked_for_by_the_images_library(tmp_path: Path) -> None:
    """What the Dockerfile has copied by then answers, with nothing installed, from a library that says 10.5.0."""
    before = []
    for instruction, arguments in stages()["export"]:
        if "tensorrt_package" in arguments and instruction == "RUN":
            break
        before += arguments.split()[:-1] if instruction == "COPY" else []
    for source in before:
        (tmp_path / source).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / source, tmp_path / source)
    backend = tmp_path / "tritonserver/backends/tensorrt/libtriton_tensorrt.so"
    backend.parent.mkdir(parents=True)
    backend.write_bytes(b"\0libnvinfer.so.10\0")
    (tmp_path / "tritonserver/bin").mkdir()
    (tmp_path / "tritonserver/bin/tritonserver").touch()
    (tmp_path / "library.c").write_text("int getInferLibVersion(void) { return 100500; }")
    subprocess.run(["cc", "-shared", "-o", "libnvinfer.so.10", "library.c"], cwd=tmp_path, check=True)
    ask = (
        f"import sys, runpy, pathlib; sys.path.insert(0, {str(tmp_path)!r}); import ensemble.launcher.runtime as runtime; "
        f"runtime.INSTALLED = pathlib.Path({str(tmp_path / 'tritonserver')!r}); "
        "runpy.run_module('export.tensorrt_package', run_name='__main__')"
    )

    answer = subprocess.run(
        [sys.executable, "-I", "-S", "-c", ask],  # without site-packages
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "CUDA_VERSION": "12.6.2.004"},
        capture_output=True,
        text=True,
    )

    assert answer.stderr == ""
    assert answer.stdout == "tensorrt-cu12==10.5.0.*\n"


@pytest.mark.parametrize("stage", ["export", "serve"])
def test_no_image_runs_as_root(stage: str) -> None:
    """By number, so that an orchestrator can see it."""
    assert arguments_of(stage, "USER") == ["1000:1000"]


def test_the_health_check_is_a_classification(server: Server) -> None:
    """0 from a server that classifies, 1 where nobody answers; it is given the time a server has to start."""
    (check,) = arguments_of("serve", "HEALTHCHECK")
    command = json.loads(check.split("CMD ", 1)[1])

    def outcome(url: str) -> int:
        here = [sys.executable, *command[1:], "--url", url]
        return subprocess.run(here, capture_output=True).returncode

    assert command[0] == "python3"
    assert outcome(server.url) == 0
    assert outcome("127.0.0.1:9") == 1
    assert int(re.search(r"--start-period=(\d+)s", check)[1]) >= START_SECONDS
    assert int(re.search(r"--timeout=(\d+)s", check)[1]) > float(command[command.index("--deadline-seconds") + 1])


def test_the_image_serves_to_its_outside(parsed: Callable[[list[str]], argparse.Namespace]) -> None:
    """The command is one, and it listens on every address of the container."""
    (command,) = arguments_of("serve", "CMD")

    args = parsed(json.loads(command))

    assert args.address == "0.0.0.0"
    assert arguments_of("serve", "EXPOSE") == [f"{args.http_port} {args.grpc_port} {args.metrics_port}"]
    assert arguments_of("serve", "ENTRYPOINT") == []  # NVIDIA's, which looks after old drivers and then is the command


@pytest.mark.parametrize("classifier", CLASSIFIERS)
def test_the_service_takes_each_classifier(classifier: str, parsed: Callable[[list[str]], argparse.Namespace]) -> None:
    """CLASSIFIER is handed on."""
    service = compose({"CLASSIFIER": classifier})["serve"]

    args = parsed(service["command"])

    assert (args.classifier, args.address) == (classifier, "0.0.0.0")


def test_only_loopback_is_published_unless_asked(parsed: Callable[[list[str]], argparse.Namespace]) -> None:
    """All three ports, and none of the export's."""
    services = compose()
    args = parsed(services["serve"]["command"])

    assert services["serve"]["ports"] == [
        f"127.0.0.1:{port}:{port}" for port in (args.http_port, args.grpc_port, args.metrics_port)
    ]
    assert "ports" not in services["export"]
    assert "network_mode" not in services["serve"]


def test_ports_and_address_can_be_asked_for() -> None:
    """The names are the Makefile's."""
    asked = {"ADDRESS": "10.0.0.7", "HTTP_PORT": "9000", "GRPC_PORT": "9001", "METRICS_PORT": "9002"}

    assert compose(asked)["serve"]["ports"] == ["10.0.0.7:9000:8000", "10.0.0.7:9001:8001", "10.0.0.7:9002:8002"]


@pytest.mark.parametrize("name", ["export", "serve"])
def test_a_container_can_do_little(name: str) -> None:
    """No capabilities, no new ones, nothing writable but /tmp and what is mounted to be written."""
    service = compose()[name]

    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"] is True
    assert service["tmpfs"] == ["/tmp"]
    assert not {"privileged", "cap_add", "pid", "ipc"} & service.keys()


def test_the_repository_is_read_by_one_and_written_by_the_other() -> None:
    """`serve` has it read-only where its command looks for it; `export` writes to it and to build/ alone."""
    services = compose()

    (served,) = services["serve"]["volumes"]
    written = [volume["target"] for volume in services["export"]["volumes"] if not volume.get("read_only")]

    assert (served["source"], served["target"]) == ("./model_repository", "/onepass/model_repository")
    assert served["read_only"] is True
    assert arguments_of("serve", "WORKDIR")[-1] == "/onepass"
    assert written == ["/checkout/model_repository", "/checkout/build", "/huggingface"]


@pytest.mark.parametrize("name", ["export", "serve"])
def test_a_container_has_one_gpu(name: str) -> None:
    """The same one for both by default, because an engine is for one kind of GPU."""
    (device,) = compose()[name]["deploy"]["resources"]["reservations"]["devices"]

    assert device == {"driver": "nvidia", "device_ids": ["0"], "capabilities": ["gpu"]}


def test_a_server_can_end_in_order_and_has_room_for_its_tensors() -> None:
    """Docker waits as long as the launcher does, and /dev/shm is larger than Docker makes it."""
    service = compose()["serve"]

    assert int(service["stop_grace_period"].removesuffix("s")) > STOP_SECONDS
    assert int(service["shm_size"].removesuffix("mb")) > DOCKER_SHM_MB
    assert service["restart"] == "unless-stopped"
    assert compose()["export"]["profiles"] == ["export"]  # never by `docker compose up`


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """make in a checkout of nothing but the Makefile, with a `docker` that writes down how it was called, or none."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("awk", "bash", "env", "id", "mkdir", "realpath", "touch"):
        (tools / tool).symlink_to(shutil.which(tool))
    checkout = tmp_path / "a checkout"
    for file in ("Makefile", "export/default_model/wheel.txt", "export/default_model/adapter.safetensors"):
        (checkout / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, checkout / file)
    for file in ("batching.h", "classifier/batchstrategy.c", "tokenizer/batchstrategy.c"):
        (checkout / "model_repository" / file).parent.mkdir(parents=True, exist_ok=True)
        (checkout / "model_repository" / file).touch()

    def run(*arguments: str, docker: bool = True) -> subprocess.CompletedProcess:
        if docker:
            (tools / "docker").write_text(
                "#!/usr/bin/env bash\nmkdir -p build/download build/default_model\n"
                'printf "%s\\n" "$#" "$@" "RESTART=${RESTART-}" "GRPC_PORT=$GRPC_PORT" '
                '"RELEASE=${RELEASE-}" "EXPORT_USER=$EXPORT_USER" >> "$CALLS"\n'
            )
            (tools / "docker").chmod(0o755)
        environment = {"PATH": str(tools), "HOME": str(tmp_path), "CALLS": str(tmp_path / "calls")}
        return subprocess.run(
            [shutil.which("make"), *arguments], cwd=checkout, env=environment, capture_output=True, text=True
        )

    return run


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """What an export leaves in that checkout."""
    manifest = tmp_path / "a checkout/model_repository/text_classifier/artifacts/current/model.json"
    manifest.parent.mkdir(parents=True)
    manifest.touch()
    return manifest


def calls_of(tmp_path: Path) -> list[tuple[list[str], list[str]]]:
    """Of the pretended docker: arguments and environment."""
    lines = (tmp_path / "calls").read_text().splitlines()
    calls = []
    while lines:
        count = int(lines[0])
        calls.append((lines[1 : count + 1], lines[count + 1 : count + 5]))
        del lines[: count + 5]
    return calls


def test_make_refuses_a_runtime_it_does_not_know(make: Callable[..., subprocess.CompletedProcess]) -> None:
    """One line that names what there is; exit code 2."""
    result = make("serve", "RUNTIME=podman")

    assert result.returncode == 2
    assert re.fullmatch(
        r"Makefile:\d+: \*\*\* RUNTIME=podman is not known: give local or docker.  Stop.\n", result.stderr
    )


def test_make_says_that_docker_is_missing(make: Callable[..., subprocess.CompletedProcess], installed: Path) -> None:
    """Whatever is installed."""
    result = make("serve", "RUNTIME=docker", docker=False)

    assert result.returncode == 2
    assert result.stderr.startswith("RUNTIME=docker needs docker with its compose plugin: install them")


def test_make_serve_in_docker_runs_the_service(
    make: Callable[..., subprocess.CompletedProcess], tmp_path: Path, installed: Path
) -> None:
    """In the foreground, built anew if need be, not started again, with the settings that were given."""
    result = make("serve", "RUNTIME=docker", "GRPC_PORT=9001", "RELEASE=25.07")

    assert result.returncode == 0, result.stderr
    command, environment = calls_of(tmp_path)[-1]
    assert command == ["compose", "up", "--build", "--exit-code-from", "serve", "serve"]
    assert not any("export" in command for command, _ in calls_of(tmp_path))  # what is installed is enough
    assert environment[:3] == ["RESTART=no", "GRPC_PORT=9001", "RELEASE=25.07"]


def test_make_serve_in_docker_hands_over_the_key(
    make: Callable[..., subprocess.CompletedProcess], tmp_path: Path, installed: Path
) -> None:
    """By the file that mounts it, and only where a key is given."""
    result = make("serve", "RUNTIME=docker", "ADMIN_KEY_FILE=my key")

    assert result.returncode == 0, result.stderr
    command, _ = calls_of(tmp_path)[-1]
    files = ["--file", "compose.yaml", "--file", "deploy/compose.admin-key.yaml"]
    assert command == ["compose", *files, "up", "--build", "--exit-code-from", "serve", "serve"]


@pytest.mark.parametrize("setting", ["TLS_CERTIFICATE", "TLS_KEY", "TLS_CLIENT_CA"])
def test_make_serve_in_docker_refuses_tls_files(
    make: Callable[..., subprocess.CompletedProcess], tmp_path: Path, setting: str
) -> None:
    """Before anything is exported, and with what to do instead."""
    result = make("serve", "RUNTIME=docker", f"{setting}=server.pem")

    assert result.returncode == 2
    assert result.stderr.startswith(
        "TLS_* are for RUNTIME=local: with docker, lay deploy/tls/compose.yaml over compose.y"
    )
    assert all(command == ["compose", "version"] for command, _ in calls_of(tmp_path))


@pytest.mark.parametrize("file", ["deploy/compose.admin-key.yaml", "deploy/tls/compose.yaml"])
def test_what_is_laid_over_the_service_only_adds(file: str, parsed: Callable[[list[str]], argparse.Namespace]) -> None:
    """To the command that it repeats: options whose files are in what it mounts, read-only. Nothing else is changed."""
    base, (service, over) = read("compose.yaml")["serve"], *read(file).items()
    (mount,) = over["volumes"]
    command = base["command"]

    assert service == "serve" and over.keys() <= {"command", "environment", "volumes"}
    assert over["command"][: len(command)] == command
    added = [option.split("=", 1) for option in over["command"][len(command) :]]
    named = [*(path for _, path in added), *over.get("environment", {}).values()]
    assert all(Path(path).is_relative_to(mount["target"]) for path in named)
    assert mount["type"] == "bind" and mount["read_only"] is True
    args = parsed([part if "$" not in part else "auto" for part in over["command"]])
    assert {option: str(getattr(args, option[2:].replace("-", "_"))) for option, _ in added} == dict(added)


def test_the_health_check_shows_what_the_server_wants_to_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of its environment are the probe's, and its files those of deploy/tls/README.md's recipe."""
    environment = read("deploy/tls/compose.yaml")["serve"]["environment"]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    parser = argparse.ArgumentParser()
    probe.add_arguments(parser)
    args = parser.parse_args([])

    assert set(environment.values()) == {
        str(args.root_certificates),
        str(args.certificate_chain),
        str(args.private_key),
    }
    guide = (ROOT / "deploy/tls/README.md").read_text(encoding="utf-8")
    assert all(re.search(rf"-(out|keyout) {Path(path).name}\b", guide) for path in environment.values())


def test_make_export_in_docker_hands_over_the_model(
    make: Callable[..., subprocess.CompletedProcess], tmp_path: Path
) -> None:
    """A folder is mounted under its own path, spaces and all; what is written is the caller's."""
    model = tmp_path / "a checkout/my model"
    model.mkdir()

    result = make("export", "RUNTIME=docker", "MODEL=my model")

    assert result.returncode == 0, result.stderr
    command, environment = calls_of(tmp_path)[-1]
    before, after = command[: command.index("export")], command[command.index("export") :]
    assert before == ["compose", "run", "--rm", "--volume", f"{model}:{model}:ro"]
    assert after[:4] == ["export", "python3", "-m", "export"]
    assert "my model" in after
    assert environment[3] == f"EXPORT_USER={os.getuid()}:{os.getgid()}"


def test_make_export_in_docker_takes_a_hub_id(make: Callable[..., subprocess.CompletedProcess], tmp_path: Path) -> None:
    """Nothing is mounted for it, and what the engine's batcher needs is compiled in the image."""
    result = make("export", "RUNTIME=docker", "TARGET=tensorrt", "MODEL=someone/some-model")

    assert result.returncode == 0, result.stderr
    commands = [command for command, _ in calls_of(tmp_path)]
    assert ["compose", "build", "export"] in commands
    compiled = next(command for command in commands if command[4:5] == ["gcc"])
    assert compiled[-2:] == [
        "model_repository/classifier/batchstrategy.so",
        "model_repository/classifier/batchstrategy.c",
    ]
    assert commands[-1][:4] == ["compose", "run", "--rm", "export"]
    assert "someone/some-model" in commands[-1]


def test_make_export_in_docker_makes_the_default_model(
    make: Callable[..., subprocess.CompletedProcess], tmp_path: Path
) -> None:
    """Downloaded and built in the container too: no Python is needed outside."""
    result = make("export", "RUNTIME=docker")

    assert result.returncode == 0, result.stderr
    modules = [command[6] for command, _ in calls_of(tmp_path) if command[4:6] == ["python3", "-m"]]
    assert modules == ["pip", "export.default_model", "export"]
