# SPDX-License-Identifier: Apache-2.0
"""TLS between the clients and real servers, with certificates made for the test: what works, and what the errors say."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import trustme
from conftest import ROOT
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from serve_command import Serve, ready_line

from ensemble import AsyncClient, Client, InvalidRequest, RequestFailed
from ensemble.__main__ import main
from ensemble.errors import PipelineError
from ensemble.launcher.options import ServerOptions
from ensemble.launcher.server import Server
from ensemble.launcher.tls_files import TlsFiles

NAME = "classifier.example"


class Files:
    """PEM files of one authority: its own, a server's for 127.0.0.1 and NAME, and a client's."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        authority = trustme.CA()
        self.roots = folder / "ca.pem"
        authority.cert_pem.write_to_path(str(self.roots))
        self.server, self.server_key = self._issue(authority, folder / "server", "127.0.0.1", NAME)
        self.client, self.client_key = self._issue(authority, folder / "client", "client.example")
        self.locked_key = self.client_key.with_name("locked.key")
        key = load_pem_private_key(self.client_key.read_bytes(), None)
        locked = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
        self.locked_key.write_bytes(locked)

    def _issue(self, authority: trustme.CA, stem: Path, *names: str) -> tuple[Path, Path]:
        issued = authority.issue_cert(*names)
        certificate, key = stem.with_suffix(".pem"), stem.with_suffix(".key")
        certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(str(key))
        return certificate, key


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("tls") / "strangers")


@pytest.fixture(scope="module")
def servers(repository: Path, files: Files) -> Iterator[tuple[Server, Server]]:
    """One that shows its certificate, and one that wants to see the caller's too."""

    def start(client_ca: Path | None) -> Server:
        tls = TlsFiles(certificate=files.server, key=files.server_key, client_ca=client_ca)
        options = ServerOptions(repository, config_name="cpu", http_port=0, grpc_port=0, metrics_port=0, tls=tls)
        server = Server(options)
        server.start()
        return server

    with ThreadPoolExecutor(2) as pool:
        plain, mutual = pool.map(start, [None, files.roots])
    yield plain, mutual
    plain.kill()
    mutual.kill()


@pytest.fixture
def url(servers) -> str:
    return servers[0].url


@pytest.fixture
def mutual_url(servers) -> str:
    return servers[1].url


@pytest.fixture(params=["Client", "AsyncClient"])
def label(request):
    """label(url, **options): the label that a client of either kind is told for a text that is positive."""

    def blocking(url: str, **options: object) -> str:
        with Client(url, **options) as client:
            return client.classify("I would buy it again.")[0].label

    async def awaiting(url: str, **options: object) -> str:
        async with AsyncClient(url, **options) as client:
            return (await client.classify("I would buy it again."))[0].label

    if request.param == "Client":
        return blocking
    return lambda *arguments, **options: asyncio.run(awaiting(*arguments, **options))


def test_trusted_server(url, files, label):
    """A client that trusts the server's authority is answered."""
    assert label(url, ssl=True, root_certificates=files.roots) == "positive"


def test_mutual(mutual_url, files, label):
    """A server that asks for a certificate answers those who show one of its authority."""
    shown = {"certificate_chain": files.client, "private_key": files.client_key}

    assert label(mutual_url, ssl=True, root_certificates=files.roots, **shown) == "positive"


def test_several_servers(servers, files, label):
    """Several servers are checked for the one name that all their certificates carry."""
    url = ",".join(server.url for server in servers)
    shown = {"certificate_chain": files.client, "private_key": files.client_key}

    assert label(url, ssl=True, root_certificates=files.roots, server_name=NAME, **shown) == "positive"


REFUSALS = {
    "wrong authority": (
        0, lambda files, strangers: {"ssl": True, "root_certificates": strangers.roots},
        "the certificate of {url} is not trusted .*: give its authority in root_certificates",
    ),
    "no authority": (
        0, lambda files, strangers: {"ssl": True},
        "the certificate of {url} is not trusted .*: give its authority in root_certificates",
    ),
    "wrong name": (
        0, lambda files, strangers: {"ssl": True, "root_certificates": files.roots, "server_name": "other.example"},
        "the certificate of {url} is for another name .*: give the name in it as server_name",
    ),
    "plaintext": (0, lambda files, strangers: {}, "{url} takes connections and closes them .*: if it speaks TLS, say ssl=True"),
    "no certificate": (
        1, lambda files, strangers: {"ssl": True, "root_certificates": files.roots},
        "{url} takes connections and closes them .* certificate_chain and private_key",
    ),
    "certificate of strangers": (
        1,
        lambda files, strangers: {
            "ssl": True, "root_certificates": files.roots,
            "certificate_chain": strangers.client, "private_key": strangers.client_key,
        },
        "{url} takes connections and closes them .* certificate_chain and private_key",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(servers, files, strangers, label, case):
    """What is wrong with a connection is said in one line, with the option to look at."""
    which, options, message = REFUSALS[case]

    with pytest.raises(RequestFailed, match=message.format(url=servers[which].url)) as refused:
        label(servers[which].url, **options(files, strangers))
    assert "\n" not in str(refused.value)


def test_server_without_tls(server, files, label):
    """A client that speaks TLS to a server that does not is told so."""
    with pytest.raises(RequestFailed, match=f"{server.url} speaks no TLS .*: leave ssl out"):
        label(server.url, ssl=True, root_certificates=files.roots)


def test_the_serve_command(serve: Serve, files: Files) -> None:
    """The files given to it reach the port, and the line that says where it listens has it."""
    process = serve("--tls-certificate", str(files.server), "--tls-key", str(files.server_key))

    url = re.search(r"grpc (\S+) \(TLS\),", ready_line(process))[1]
    with Client(url, ssl=True, root_certificates=files.roots) as client:
        assert client.classify("good")[0].label == "positive"
    with Client(url, retries=0) as client, pytest.raises(PipelineError):
        client.classify("good")


def test_classify_command(mutual_url, files, capsys):
    """The command speaks TLS as soon as it gets one of the files."""
    arguments = ["classify", "--url", mutual_url, "--root-certificates", str(files.roots), "I would buy it again."]

    assert main([*arguments, "--certificate-chain", str(files.client), "--private-key", str(files.client_key)]) == 0
    assert json.loads(capsys.readouterr().out)["label"] == "positive"
    assert main(arguments) != 0
    assert "certificate_chain and private_key" in "".join(capsys.readouterr())


def test_a_probe_with_the_right_files_is_answered(servers, files, capsys):
    """By a server that only shows its certificate, by its other name, and by one that wants to see the probe's too."""
    roots = ["--root-certificates", str(files.roots)]
    shown = ["--certificate-chain", str(files.client), "--private-key", str(files.client_key)]

    assert main(["probe", "--url", servers[0].url, *roots]) == 0
    assert main(["probe", "--url", servers[0].url, *roots, "--server-name", NAME]) == 0
    assert main(["probe", "--url", servers[1].url, *roots, *shown]) == 0
    assert capsys.readouterr() == ("", "")


PROBE_REFUSALS = {
    "plaintext": (0, lambda files, strangers: [], "UNAVAILABLE"),
    "no authority": (0, lambda files, strangers: ["--ssl"], "CERTIFICATE_VERIFY_FAILED"),
    "wrong authority": (
        0, lambda files, strangers: ["--root-certificates", strangers.roots], "CERTIFICATE_VERIFY_FAILED",
    ),
    "wrong name": (
        0, lambda files, strangers: ["--root-certificates", files.roots, "--server-name", "other.example"],
        "Hostname Verification Check failed",
    ),
    "no certificate": (1, lambda files, strangers: ["--root-certificates", files.roots], "UNAVAILABLE"),
    "certificate of strangers": (
        1,
        lambda files, strangers: [
            "--root-certificates", files.roots,
            "--certificate-chain", strangers.client, "--private-key", strangers.client_key,
        ],
        "UNAVAILABLE",
    ),
    "another key": (
        1,
        lambda files, strangers: ["--certificate-chain", files.client, "--private-key", files.server_key],
        "server.key is not the key of .*client.pem",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PROBE_REFUSALS)
def test_a_probe_with_other_files_is_not(servers, files, strangers, capsys, case):
    """Exit code 1, and one line that says why."""
    which, options, message = PROBE_REFUSALS[case]

    assert main(["probe", "--url", servers[which].url, *map(str, options(files, strangers))]) == 1
    assert re.fullmatch(f"error: unhealthy: .*{message}.*\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (lambda files: {"root_certificates": files.roots}, "root_certificates is given but ssl is not"),
        (lambda files: {"server_name": NAME}, "server_name is given but ssl is not"),
        (lambda files: {"ssl": True, "server_name": ""}, "server_name must be a host's name"),
        (lambda files: {"ssl": True, "root_certificates": "no.pem"}, "root_certificates: cannot read no.pem: No such"),
        (lambda files: {"ssl": True, "root_certificates": files.client_key}, "client.key holds no certificate"),
        (lambda files: {"ssl": True, "certificate_chain": files.client}, "go together: give both, or neither"),
        (lambda files: {"ssl": True, "private_key": files.client_key}, "go together: give both, or neither"),
        (
            lambda files: {"ssl": True, "certificate_chain": files.client, "private_key": files.server_key},
            "server.key is not the key of .*client.pem",
        ),
        (
            lambda files: {"ssl": True, "certificate_chain": files.client, "private_key": files.locked_key},
            "locked.key is not the key of .*client.pem: .* without a password",
        ),
    ],
)
def test_files_are_checked_at_once(files, options, message):
    """What is wrong with the options or the files is refused before anything connects, by name."""
    for kind in (Client, AsyncClient):
        with pytest.raises(InvalidRequest, match=message):
            kind("127.0.0.1:1", **options(files))


@pytest.fixture
def checkout(damaged: Path, tmp_path: Path) -> Path:
    """What the guide's commands need of one, with a copy of what is served."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "Makefile").symlink_to(ROOT / "Makefile")
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "model_repository").symlink_to(damaged)
    return folder


@pytest.fixture
def served(checkout: Path, tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """Runs a command that serves on free ports, until the test ends; its gRPC port."""
    started: list[subprocess.Popen] = []

    def serve(command: str) -> str:
        ports = {f"{name}_PORT": "0" for name in ("HTTP", "GRPC", "METRICS")}
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=checkout,
            # Without what `make test` tells a make that runs in it: that one would say which folder it enters.
            env={
                **{name: value for name, value in os.environ.items() if not name.startswith("MAKE")},
                **ports,
                "TMPDIR": str(tmp_path),
                "CUDA_VISIBLE_DEVICES": "",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return re.search(r"grpc 127\.0\.0\.1:(\d+) \(TLS\),", ready_line(process))[1]

    yield serve
    for process in started:
        os.killpg(process.pid, signal.SIGTERM)
        process.communicate(timeout=60)


def test_the_guide_leads_to_answers(checkout: Path, served: Callable[[str], str]) -> None:
    """Every block of deploy/tls/README.md in order: certificates, the server, then whoever asks it."""
    guide = (ROOT / "deploy/tls/README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(sh|python)\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    said, port = [], None
    for language, block in blocks:
        if block.startswith("make serve"):
            port = served(block)
            continue
        if port is not None:
            assert ":8001" in block
            block = block.replace(":8001", f":{port}")
        command = ["bash", "-euo", "pipefail", "-c", block] if language == "sh" else [sys.executable, "-c", block]
        done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        said.append(done.stdout)

    _, classified, answered, probed = said
    assert (json.loads(classified)["label"], answered, probed) == ("positive", "positive\n", "")
    with pytest.raises(PipelineError, match="certificate_chain and private_key"):
        Client(f"127.0.0.1:{port}", ssl=True, root_certificates=checkout / "build/tls/ca.pem").classify("good")


def test_a_probe_takes_its_files_from_the_environment_too(mutual_url, files, monkeypatch, capsys):
    """What is empty there counts as not given, and an option goes before it."""
    monkeypatch.setenv("PROBE_ROOT_CERTIFICATES", str(files.roots))
    monkeypatch.setenv("PROBE_CERTIFICATE_CHAIN", str(files.client))
    monkeypatch.setenv("PROBE_PRIVATE_KEY", str(files.client_key))
    monkeypatch.setenv("PROBE_SERVER_NAME", "")

    assert main(["probe", "--url", mutual_url]) == 0
    assert main(["probe", "--url", mutual_url, "--private-key", str(files.server_key)]) == 1
    assert "server.key is not the key of" in capsys.readouterr().err
    monkeypatch.setenv("PROBE_SERVER_NAME", "other.example")
    assert main(["probe", "--url", mutual_url]) == 1


def test_several_servers_need_a_name(files):
    """A list of servers with TLS is refused without the name to check them for."""
    with pytest.raises(InvalidRequest, match="several servers with ssl need server_name"):
        Client("127.0.0.1:1,127.0.0.1:2", ssl=True, root_certificates=files.roots)
