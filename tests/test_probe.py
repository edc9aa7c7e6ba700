# SPDX-License-Identifier: Apache-2.0
"""`python -m ensemble probe`: healthy is a server that answers a classification in time, and no other."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest
from tritonclient.grpc import service_pb2

from ensemble.__main__ import main
from ensemble.launcher.server import Server
from ensemble.probe import METHOD, REQUEST


@contextmanager
def answering(behaviour: Callable[[bytes, grpc.ServicerContext], bytes]) -> Iterator[str]:
    """A gRPC server that does this with every inference; its address."""
    service, method = METHOD[1:].split("/")
    handler = grpc.method_handlers_generic_handler(service, {method: grpc.unary_unary_rpc_method_handler(behaviour)})
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers([handler])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def refusing(code: grpc.StatusCode, text: str) -> Callable[[bytes, grpc.ServicerContext], bytes]:
    return lambda request, context: context.abort(code, text)


def test_the_request_is_what_tritons_own_client_would_send() -> None:
    """One text for text_classifier, asking for probabilities."""
    request = service_pb2.ModelInferRequest(model_name="text_classifier")
    text = request.inputs.add(name="text", datatype="BYTES", shape=[1, 1])
    text.contents.bytes_contents.append(b"Is anybody there?")
    request.outputs.add(name="probabilities")

    assert request.SerializeToString() == REQUEST


def test_a_server_that_answers_is_healthy(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0, and nothing to read. The answer is a real one."""
    assert main(["probe", "--url", server.url, "--deadline-seconds", "30"]) == 0
    assert capsys.readouterr() == ("", "")

    with grpc.insecure_channel(server.url) as channel:
        answer = service_pb2.ModelInferResponse.FromString(channel.unary_unary(METHOD)(REQUEST))
    assert [(output.name, list(output.shape)) for output in answer.outputs] == [("probabilities", [1, 2])]


def test_nobody_there_is_unhealthy(capsys: pytest.CaptureFixture[str]) -> None:
    """One line with the address; exit code 1."""
    assert main(["probe", "--url", "127.0.0.1:9"]) == 1

    assert re.fullmatch(
        r"error: unhealthy: 127\.0\.0\.1:9: UNAVAILABLE: .*Connection refused.*\n", capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (grpc.StatusCode.INTERNAL, "Stub process 'tokenizer_0_0' is not healthy."),
        (grpc.StatusCode.UNAVAILABLE, "Request for unknown model: 'text_classifier' has no available versions"),
        (grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size: 256 rows wait"),
    ],
)
def test_a_server_that_refuses_is_unhealthy(
    code: grpc.StatusCode, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In its own words; a full queue too, if it is full for as long as the probe has time."""
    with answering(refusing(code, text)) as url:
        assert main(["probe", "--url", url, "--deadline-seconds", "0.5"]) == 1

    assert capsys.readouterr().err == f"error: unhealthy: {url}: {code.name}: {text}\n"


def test_a_queue_that_was_full_for_a_moment_is_asked_again() -> None:
    """Within the deadline."""
    asked = []

    def behaviour(request: bytes, context: grpc.ServicerContext) -> bytes:
        asked.append(request)
        if len(asked) < 3:
            context.abort(grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size")
        return service_pb2.ModelInferResponse(outputs=[{"name": "probabilities"}]).SerializeToString()

    with answering(behaviour) as url:
        assert main(["probe", "--url", url, "--deadline-seconds", "30"]) == 0

    assert len(asked) == 3


def test_an_answer_without_probabilities_is_unhealthy(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever it comes from."""
    with answering(lambda request, context: b"") as url:
        assert main(["probe", "--url", url]) == 1

    assert capsys.readouterr().err == f"error: unhealthy: {url} answers, but not with probabilities\n"


@pytest.mark.parametrize("accepting", [True, False], ids=["a server that hangs", "a port that nobody reads"])
def test_silence_is_unhealthy_at_the_deadline(accepting: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1, and not much later than was asked for."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        started = time.monotonic()
        if accepting:
            with answering(lambda request, context: time.sleep(2) or b"") as url:
                code = main(["probe", "--url", url, "--deadline-seconds", "0.3"])
        else:
            code = main(["probe", "--url", f"127.0.0.1:{silent.getsockname()[1]}", "--deadline-seconds", "0.3"])

    assert code == 1 and time.monotonic() - started < 15
    assert "DEADLINE_EXCEEDED" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon", "5000"])
def test_a_deadline_that_makes_no_sense_is_a_usage_error(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is in seconds, and says so."""
    with pytest.raises(SystemExit) as caught:
        main(["probe", f"--deadline-seconds={seconds}"])

    assert caught.value.code == 2
    assert "is not a number of seconds above 0 and at most 3600" in capsys.readouterr().err


def test_a_certificate_that_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """As a reason to be unhealthy."""
    assert main(["probe", "--root-certificates", "/nowhere/ca.pem"]) == 1

    assert capsys.readouterr().err == (
        "error: unhealthy: root_certificates: cannot read /nowhere/ca.pem: No such file or directory\n"
    )


@pytest.mark.parametrize("given", ["--certificate-chain", "--private-key"])
def test_half_of_a_certificate_is_unhealthy(given: str) -> None:
    """In a process of its own, because gRPC ends the one that asks it for this."""
    command = [sys.executable, "-m", "ensemble", "probe", "--url", "127.0.0.1:9", given, __file__]

    done = subprocess.run(command, capture_output=True, text=True)

    assert (done.returncode, done.stderr) == (
        1,
        "error: unhealthy: certificate_chain and private_key go together: give both, or neither\n",
    )


def test_little_is_imported_for_it() -> None:
    """It runs every few seconds beside a busy server: nothing of the other commands, and nothing that serves."""
    code = (
        "import sys; from ensemble.__main__ import main; main(['probe', '--url', '127.0.0.1:9']); "
        "print([name for name in ('torch', 'rich', 'numpy', 'tritonclient', 'ensemble.launcher.server', 'ensemble.classify') if name in sys.modules])"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert done.stdout == "[]\n", done.stderr
