# SPDX-License-Identifier: Apache-2.0
"""What `python -m ensemble serve` serves and says, and what it refuses to start with, in one line."""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import tritonclient.grpc as grpc
from fake_engine import A100, H200, install_engine
from serve_command import Serve, choice_line, ready_line
from triton_requests import texts_input

from ensemble import Client
from ensemble import serve as serve_command
from ensemble.__main__ import main
from ensemble.errors import ServerError
from ensemble.launcher import runtime
from ensemble.launcher.choice import Choice
from ensemble.launcher.gpu import Gpus
from ensemble.launcher.options import ServerOptions
from ensemble.launcher.server import Server

# Why there is no GPU: the variable hides it, or there is no driver to ask.
NO_GPU = r"CUDA_VISIBLE_DEVICES is '', which names none|NVIDIA's driver.*"


def test_a_missing_batching_library_is_told(serve: Serve, repository: Path, tmp_path: Path) -> None:
    """What it keeps from happening, and how to build it; it is served nevertheless."""
    copy = Path(shutil.copytree(repository, tmp_path / "model_repository", symlinks=True))
    (copy / "tokenizer/batchstrategy.so").unlink()

    process = serve(repository=copy)

    choice_line(process)
    assert process.stderr.readline() == (
        f"{copy}/tokenizer/batchstrategy.so is missing, so a request whose text is cut off fails those batched with it: "
        "run make model_repository/tokenizer/batchstrategy.so, which needs a C compiler\n"
    )


@pytest.mark.parametrize(
    ("asked", "line", "served"),
    [
        ([], rf"onnx: ONNX Runtime on the CPU, because no GPU can be used here \(({NO_GPU})\)\n", "onnx"),
        (["--classifier", "onnx"], r"onnx: ONNX Runtime on the CPU, as asked\n", "onnx"),
        (["--classifier", "baseline"], rf"baseline: TorchScript on the CPU \(({NO_GPU})\), as asked\n", "baseline"),
    ],
)
def test_it_says_what_it_serves_and_why(serve: Serve, asked: list[str], line: str, served: str) -> None:
    """One line, before the server is even started."""
    process = serve(*asked)

    assert re.fullmatch(line, choice_line(process))
    assert process.stdout.readline().startswith(f"ready: text_classifier ({served}) at grpc ")


def test_tensorrt_without_a_gpu_is_refused(serve: Serve) -> None:
    """One line that names what runs here; exit code 1, and no server was started."""
    process = serve("--classifier", "tensorrt")
    output, errors = process.communicate(timeout=60)

    assert (process.returncode, output) == (1, "")
    assert re.fullmatch(
        rf"error: tensorrt needs a GPU, and none can be used here \(({NO_GPU})\): make serve CLASSIFIER=onnx\n", errors
    )


def test_an_engine_for_another_machine_is_refused_before_a_server_starts(
    damaged: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """auto does not fall back: a line for each problem, exit code 1."""
    install_engine(damaged)
    installed_server(damaged.parent / "opt", monkeypatch, tensorrt="11.0.0")
    monkeypatch.setattr(serve_command, "visible_gpus", lambda: Gpus((H200,)))

    code = main(["serve", "--repository", str(damaged)])

    output = capsys.readouterr()
    assert (code, output.out) == (1, "")
    assert output.err == (
        "error: model.plan was built with TensorRT 10.5.0, the server has 11.0.0: run make export TARGET=tensorrt "
        "again, with the server's TensorRT\n"
        "model.plan is for compute capability 8.0 (NVIDIA A100-SXM4-80GB), this GPU is 9.0 (NVIDIA H200): run make "
        "export TARGET=tensorrt again on this machine\n"
    )


def test_an_engine_that_the_embedded_server_cannot_load_is_refused(
    damaged: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """auto does not fall back here either; exit code 1."""
    install_engine(damaged)
    monkeypatch.setattr(runtime, "INSTALLED", damaged / "nothing")
    monkeypatch.setattr(serve_command, "visible_gpus", lambda: Gpus((A100,)))

    code = main(["serve", "--repository", str(damaged)])

    output = capsys.readouterr()
    assert (code, output.out) == (1, "")
    assert output.err == (
        "error: the engine cannot be served, the embedded server has no TensorRT backend: make serve RUNTIME=docker, "
        "or ask for CLASSIFIER=baseline or CLASSIFIER=onnx\n"
    )


def test_a_sound_engine_is_handed_to_the_tensorrt_backend(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real server reads config.pbtxt and looks for that backend, which is an empty folder here."""
    install_engine(damaged)
    installed_server(damaged.parent / "opt", monkeypatch, tensorrt="10.5.0")
    monkeypatch.setattr(serve_command, "visible_gpus", lambda: Gpus((A100,)))

    server, choice = serve_command.open_server(damaged, "auto")
    with pytest.raises(ServerError, match="the server did not start: .*(tensorrt|GPU)"):
        server.start()

    assert choice == Choice("tensorrt", None, "tensorrt: the packed engine on NVIDIA A100-SXM4-80GB")


def installed_server(opt: Path, monkeypatch: pytest.MonkeyPatch, *, tensorrt: str) -> None:
    """The wheel's server as an installed one, with a TensorRT backend that is an empty folder."""
    monkeypatch.setattr(runtime, "INSTALLED", opt)
    wheel = runtime.find_runtime().laid_out(opt)
    (wheel.backends / "tensorrt").mkdir()
    monkeypatch.setattr(serve_command, "find_runtime", lambda: replace(wheel, tensorrt=tensorrt, why_unknown=""))


def test_an_occupied_port_is_named(serve: Serve) -> None:
    """One line that says which setting to change; exit code 1."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        process = serve("--grpc-port", str(port))
        _, errors = process.communicate(timeout=60)

    assert process.returncode == 1
    assert errors == f"error: 127.0.0.1:{port} is taken: set another GRPC_PORT\n"


@pytest.mark.parametrize(
    ("file", "before", "after", "message"),
    [
        ("classifier/configs/cpu.pbtxt", "KIND_CPU", "KIND_GPU", "GPU|device"),
        ("tokenizer/1/model.py", "def execute", "def execute(", "SyntaxError"),
        (
            "classifier/configs/cpu.pbtxt",
            "dynamic_batching {",
            "dynamic_batching { preferred_batch_size: [ 128 ]",
            "preferred",
        ),
        ("tokenizer/1/model.py", "import numpy as np", "import numpy_of_another_name", "numpy_of_another_name"),
    ],
)
def test_a_start_that_the_server_refuses_has_the_servers_reason(
    serve: Serve, damaged: Path, file: str, before: str, after: str, message: str
) -> None:
    """One line with the cause, not with what every start on a machine without a GPU says."""
    text = (damaged / file).read_text()
    assert before in text
    (damaged / file).write_text(text.replace(before, after, 1))

    process = serve(repository=damaged)
    _, errors = process.communicate(timeout=60)

    assert process.returncode == 1
    assert re.search(message, errors.removeprefix("error: the server did not start: "))
    assert errors.count("\n") == 1
    assert "CudaDriverHelper" not in errors


def test_a_path_with_spaces_is_served(serve: Serve, repository: Path, tmp_path: Path) -> None:
    """The server's shell does not quote; a repository in "My Projects" is served all the same."""
    place = shutil.copytree(repository, tmp_path / "My $Projects (1)" / "repo", symlinks=True)

    assert ready_line(serve(repository=Path(place)))


def test_a_length_limit_lowered_after_export_is_refused(serve: Serve, damaged: Path) -> None:
    """The served length is the exported one; a config that says less is never silently ignored."""
    config = damaged / "tokenizer/config.pbtxt"
    config.write_text(config.read_text().replace('string_value: "512"', 'string_value: "64"'))

    process = serve(repository=damaged)
    _, errors = process.communicate(timeout=60)

    assert process.returncode == 1
    assert "exported for 512 tokens, max_sequence_length in tokenizer/config.pbtxt is 64: run make export" in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--address", "192.0.2.1"],
            "error: 192.0.2.1:0 cannot be listened on .*: set ADDRESS to an IPv4 address of this",
        ),
        (["--address", "::1"], "error: ::1:0 cannot be listened on .*: set ADDRESS to an IPv4 address of this"),
        (["--http-port", "18917", "--grpc-port", "18917"], "error: 127.0.0.1:18917 is taken: set another GRPC_PORT"),
    ],
)
def test_an_address_or_port_that_cannot_be_used_is_named(serve: Serve, arguments: list[str], message: str) -> None:
    """One line that says which setting is at fault; exit code 1."""
    process = serve(*arguments)
    _, errors = process.communicate(timeout=60)

    assert process.returncode == 1
    assert re.match(message, errors) and errors.count("\n") == 1


def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(serve: Serve, monkeypatch) -> None:
    """http_proxy is set in many shells; neither the launcher nor the client takes it for 127.0.0.1."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    process = serve()

    url = re.search(r"grpc (\S+),", ready_line(process))[1]
    with Client(url) as client:
        assert client.classify("good")[0].label == "positive"


def test_a_repository_that_was_never_exported_into_is_refused(serve: Serve, damaged: Path) -> None:
    """One line, exit code 1, before any server starts."""
    shutil.rmtree(damaged / "text_classifier/artifacts")

    process = serve(repository=damaged)
    _, errors = process.communicate(timeout=60)

    assert process.returncode == 1
    assert errors == f"error: {damaged}/classifier/1/model.onnx is missing: run make export\n"


def test_a_misspelt_field_is_refused_with_its_line(serve: Serve, damaged: Path) -> None:
    """File, line and column, exit code 1."""
    config = damaged / "tokenizer/config.pbtxt"
    config.write_text(config.read_text().replace("dynamic_batching", "dynamic_batcher"))

    process = serve(repository=damaged)
    _, errors = process.communicate(timeout=60)

    assert process.returncode == 1
    assert re.fullmatch(rf'error: {config}:\d+:1: .* has no field named "dynamic_batcher": correct it there\n', errors)


def test_a_parameter_the_handler_refuses_ends_the_start_with_its_reason(serve: Serve, damaged: Path) -> None:
    """What only the handler can check comes out of the server as one line too."""
    config = damaged / "classifier/configs/cpu.pbtxt"
    config.write_text(config.read_text().replace('string_value: "25"', 'string_value: "cheap"'))

    process = serve(repository=damaged)
    _, errors = process.communicate(timeout=60)

    assert process.returncode == 1
    assert errors.splitlines()[-1] == (
        "error: the server did not start: classifier: parameter \"pass_cost\" is 'cheap': "
        "set it to a number of at least 0 in config.pbtxt"
    )
    assert "Traceback" not in errors


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Server]]:
    """In the place of the server that the command, run in this process, would start. Signals are as before after it."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    class Pretended(Server):
        pass

    monkeypatch.setattr(serve_command, "Server", Pretended)
    yield Pretended
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_what_may_be_lost_at_the_end_is_told(
    pretended: type[Server], repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Requests in flight were not done in time: exit code 1."""

    def told_to_stop(server: Server) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(pretended, "start", told_to_stop)
    monkeypatch.setattr(pretended, "stop", lambda server: False)

    assert main(["serve", "--repository", str(repository), "--classifier", "onnx"]) == 1
    assert capsys.readouterr().err.endswith("\nstopped: what was not answered within 10 s may be lost\n")


def test_every_option_reaches_the_server(
    pretended: type[Server], repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them changes what the server is started with."""
    key = tmp_path / "key"
    key.write_text("k" * 32)
    key.chmod(0o600)
    tls = ["--tls-certificate", "c.pem", "--tls-key", "k.pem"]
    given = {
        "--classifier": ["baseline"],
        "--address": ["0.0.0.0"],
        "--http-port": ["9000"],
        "--grpc-port": ["9001"],
        "--metrics-port": ["9002"],
        "--admin-key-file": [str(key)],
        "--trace-url": ["http://127.0.0.1:4318/v1/traces"],
        "--trace-rate": ["7", "--trace-url", "http://127.0.0.1:4318/v1/traces"],
        "--tls-certificate": ["c.pem", "--tls-key", "k.pem"],
        "--tls-key": ["k.pem", "--tls-certificate", "c.pem"],
        "--tls-client-ca": ["ca.pem", *tls],
    }
    started: list[ServerOptions] = []

    def start(server: Server) -> None:
        started.append(replace(server.options, admin_key="given" if len(server.options.admin_key) == 32 else ""))
        raise ServerError("enough")

    monkeypatch.setattr(pretended, "start", start)

    def options_of(*arguments: str) -> ServerOptions:
        assert main(["serve", "--repository", str(repository), *arguments]) == 1
        return started.pop()

    plain = options_of()
    parser = argparse.ArgumentParser()
    serve_command.add_arguments(parser)
    known = {option for action in parser._actions for option in action.option_strings if option.startswith("--")}
    assert known - {"--help", "--repository"} == given.keys()
    for option, values in given.items():
        assert options_of(option, *values) != plain, option


@pytest.mark.parametrize(
    "arguments", [["--grpc-port", "70000"], ["--grpc-port", "x"], ["--http-port", "-1"], ["--classifier", "best"]]
)
def test_wrong_arguments_are_usage_errors(serve: Serve, arguments: list[str]) -> None:
    """Exit code 2 and the argument's name."""
    process = serve(*arguments)
    _, errors = process.communicate(timeout=60)

    assert process.returncode == 2
    assert f"argument {arguments[0]}" in errors and "Traceback" not in errors


def test_only_this_machine_is_listened_to(server: Server) -> None:
    """By default every port is bound to 127.0.0.1."""
    listening = [
        line.split()[1].split(":")
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        if line.split()[3] == "0A"
    ]

    for port in (server.http_port, server.grpc_port, server.metrics_port):
        # As the kernel writes 127.0.0.1, by itself or inside IPv6.
        assert [address[-8:] for address, other in listening if int(other, 16) == port] == ["0100007F"]


def test_what_is_served_is_what_the_files_say(server: Server) -> None:
    """The server adds nothing to the configs: limits, batching and shapes are those of the committed files."""
    with grpc.InferenceServerClient(server.url) as client:
        for model in ("tokenizer", "classifier", "text_classifier"):
            config = client.get_model_config(model).config
            assert config.max_batch_size == 64
            assert config.HasField("dynamic_batching") == (model != "text_classifier")
        assert client.get_model_config("classifier").config.backend == "python"


def test_an_unknown_version_is_an_error_and_stray_folders_are_ignored(repository: Path, damaged: Path) -> None:
    """Version 1 and "any" answer, 99 does not; folders that are no version change nothing."""
    for stray in ("-1", "old", "0x2"):
        (damaged / "tokenizer" / stray).mkdir()
    options = ServerOptions(damaged, config_name="cpu", http_port=0, grpc_port=0, metrics_port=0)

    with Server(options) as server, grpc.InferenceServerClient(server.url) as client:
        for version in ("", "1"):
            result = client.infer("text_classifier", [texts_input(["hello"])], model_version=version)
            assert result.as_numpy("logits").shape == (1, 2)
        with pytest.raises(
            grpc.InferenceServerException,
            match="unknown model: 'text_classifier' version 99|no available versions|is not found",
        ):
            client.infer("text_classifier", [texts_input(["hello"])], model_version="99")


def test_the_stub_finds_installed_packages_only(server: Server) -> None:
    """The server's working folder is an empty one of its own, so nothing is imported from a checkout by chance."""
    folder = Path(f"/proc/{server.pid}/cwd").resolve()

    assert folder.name.startswith("onepass-server-")
    # .ses is a mark of the GPU telemetry library.
    assert {path.name for path in folder.iterdir()} - {".ses"} == {"tritonserver", "backends", "repository"}
