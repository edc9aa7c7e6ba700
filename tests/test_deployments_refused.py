# SPDX-License-Identifier: Apache-2.0
"""Deployments that cannot work are refused before a server starts: each with one line that says what to do.

What only the server can notice is in tests/test_serve.py; what is wrong with an engine, in tests/test_engine_preflight.py.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import trustme

from ensemble.__main__ import main
from ensemble.contract import Contract
from ensemble.errors import ConfigError, PipelineError, ServerError
from ensemble.launcher import room
from ensemble.launcher.options import ServerOptions
from ensemble.launcher.room import check_shared_memory
from ensemble.launcher.tls_files import TlsFiles, why_untrusted
from ensemble.serve import prepare

Damage = Callable[[Path], None]

CURRENT = "text_classifier/artifacts/current"


@pytest.fixture
def deployed(repository: Path, tmp_path: Path) -> Path:
    """A copy of the repository. Its files are hard links: a test replaces one, it never writes into one."""
    return Path(shutil.copytree(repository, tmp_path / "deployed", symlinks=True, copy_function=_link))


def _link(source: str, target: str) -> str:
    os.link(source, target, follow_symlinks=False)
    return target


def replaced(file: Path, content: bytes) -> None:
    """The file's content, without touching the original that it is a hard link to."""
    file.unlink()
    file.write_bytes(content)


def refusal(repository: Path) -> str:
    """What `serve` would print, the repository's path left out."""
    ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
    with pytest.raises(PipelineError) as caught:
        prepare(repository, "onnx", ServerOptions(repository, **ports))
    message = str(caught.value).replace(f"{repository}/", "").replace(f"{repository}", "REPOSITORY")
    return message.replace((repository / CURRENT).resolve().name, "EXPORT")


def missing(name: str) -> Damage:
    return lambda repository: (repository / CURRENT / name).unlink()


def truncated(name: str) -> Damage:
    def damage(repository: Path) -> None:
        file = repository / CURRENT / name
        replaced(file, file.read_bytes()[:-1])

    return damage


def manifest(**changes: object) -> Damage:
    """model.json, edited by hand."""

    def damage(repository: Path) -> None:
        file = repository / CURRENT / "model.json"
        replaced(file, json.dumps(json.loads(file.read_text()) | changes).encode())

    return damage


def config(file: str, before: str, after: str) -> Damage:
    def damage(repository: Path) -> None:
        text = (repository / file).read_text()
        assert before in text
        replaced(repository / file, text.replace(before, after, 1).encode())

    return damage


def files_of_two_exports(repository: Path) -> None:
    """The tokenizer of another model."""
    other = repository / "text_classifier/artifacts/other"
    shutil.copytree(repository / CURRENT, other)
    (repository / "tokenizer/1/tokenizer.json").unlink()
    (repository / "tokenizer/1/tokenizer.json").symlink_to(other / "tokenizer.json")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (missing("model.onnx"), "classifier/1/model.onnx is missing: run make export"),
        (missing("tokenizer.json"), "tokenizer/1/tokenizer.json is missing: run make export"),
        (missing("labels.txt"), "text_classifier/labels.txt is missing: run make export"),
        (missing("model.json"), "text_classifier/artifacts/EXPORT/model.json is missing: run make export"),
        (
            truncated("model.onnx"),
            "classifier/1/model.onnx is not the file that was exported (its sha256 differs): run make export",
        ),
        (
            truncated("tokenizer.json"),
            "tokenizer/1/tokenizer.json is not the file that was exported (its sha256 differs): run make export",
        ),
        (
            lambda repository: replaced(repository / CURRENT / "labels.txt", b"positive\nnegative\n"),
            "text_classifier/labels.txt is not the file that was exported (its sha256 differs): run make export",
        ),
        (
            manifest(labels=["positive", "negative"]),
            "text_classifier/labels.txt and model.json name different labels: run make export",
        ),
        (files_of_two_exports, "REPOSITORY mixes files of 2 exports: run make export"),
        (
            manifest(max_length="512"),
            "text_classifier/artifacts/current/model.json cannot be read (max_length is '512', not <class 'int'>): run "
            "make export",
        ),
        (
            manifest(vocab_size=None),
            "text_classifier/artifacts/current/model.json cannot be read (vocab_size is None, not <class 'int'>): run "
            "make export",
        ),
        (
            manifest(sha256=[]),
            "text_classifier/artifacts/current/model.json cannot be read (sha256 is [], not dict[str, str]): run make "
            "export",
        ),
        (
            manifest(vocab_size=30000),
            "tokenizer/1/tokenizer.json has 30522 tokens, the model has vocab_size 30000 in model.json: run make "
            "export again",
        ),
        (
            manifest(max_length=128),
            "tokenizer/1/tokenizer.json cuts at 512 tokens, the model has max_length 128 in model.json: run make "
            "export again",
        ),
        (
            config("tokenizer/config.pbtxt", "max_batch_size: 64", "max_batch_size: 32"),
            "tokenizer: max_batch_size is 32, the ensemble's is 64: set the same in all of them",
        ),
        (
            config("classifier/configs/cpu.pbtxt", "TYPE_INT64", "TYPE_INT32"),
            "classifier: input input_ids is TYPE_INT32 [-1], but 'input_ids' is TYPE_INT64 [-1]: make both the same",
        ),
        (
            config("text_classifier/config.pbtxt", 'value: "input_ids"', 'value: "ids"'),
            "classifier: input input_ids takes 'input_ids', which no earlier step gives: correct the name",
        ),
    ],
)  # fmt: skip
def test_what_was_deployed_does_not_fit(deployed: Path, damage: Damage, message: str) -> None:
    """Missing, truncated, changed, mixed or edited files."""
    damage(deployed)

    assert refusal(deployed) == message


@contextmanager
def anybody() -> Iterator[None]:
    """As a user who may not read everything; who runs this test may be root."""
    if root := os.geteuid() == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.mark.parametrize(
    "place",
    ["", "tokenizer", "classifier/configs", "classifier/configs/cpu.pbtxt", "text_classifier/artifacts",
     f"{CURRENT}/model.json", f"{CURRENT}/model.onnx", f"{CURRENT}/tokenizer.json"],
)  # fmt: skip
def test_a_file_or_folder_that_may_not_be_read_is_named(repository: Path, place: str) -> None:
    """As it is where root exported and somebody else serves."""
    with TemporaryDirectory() as folder:  # unlike tmp_path, where everybody may look into
        Path(folder).chmod(0o755)
        copy = Path(shutil.copytree(repository, f"{folder}/deployed", symlinks=True))
        mode = (copy / place).stat().st_mode
        (copy / place).chmod(0)

        with anybody():
            message = refusal(copy)

        (copy / place).chmod(mode)
    assert re.search(r"cannot be read \(.*Permission denied.*\)", message) and message.count("\n") == 0
    assert place.removeprefix(CURRENT) in message


def test_too_little_shared_memory_is_refused(deployed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a stub dies of it in the middle of a batch; Docker's own 64 MB are enough for the two of the default."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(room.shutil, "disk_usage", lambda path: usage(0, 0, 39_000_000))
    assert refusal(deployed) == (
        "/dev/shm has 39 MB free, 2 instances of Python models need 40 MB: free some, or give the container more "
        "(shm_size in compose.yaml, --shm-size)"
    )

    monkeypatch.setattr(room.shutil, "disk_usage", lambda path: usage(0, 0, 64 << 20))
    contract = Contract.read(deployed, "cpu")
    check_shared_memory(contract, gpus=0)
    contract.models["tokenizer"].instance_group[0].count = 4
    with pytest.raises(ServerError, match="5 instances of Python models need 100 MB"):
        check_shared_memory(contract, gpus=0)
    with pytest.raises(ServerError, match="4 instances of Python models need 80 MB"):  # `baseline`, on every GPU
        check_shared_memory(Contract.read(deployed, "baseline"), gpus=3)


def test_a_full_disk_is_refused(repository: Path, tmp_path: Path) -> None:
    """Said in one line, exit code 1, and nothing is left. A limit on the size of files stands in for the disk."""
    ports = [argument for name in ("http", "grpc", "metrics") for argument in (f"--{name}-port", "0")]

    done = subprocess.run(
        [sys.executable, "-m", "ensemble", "serve", "--repository", str(repository), "--classifier", "onnx", *ports],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000)),
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode == 1
    assert done.stderr.startswith("error: the server cannot be set up (") and done.stderr.count("\n") == 1
    assert done.stderr.endswith("): set TMPDIR to a folder of 50 MB that programs may run from\n")
    assert list(tmp_path.iterdir()) == []


# --- TLS ---


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of an authority, of a server of it, and of one whose time is over."""
    folder = tmp_path_factory.mktemp("pem")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    past = datetime.now(timezone.utc) - timedelta(days=1)
    for name, issued in (
        ("server", authority.issue_cert("127.0.0.1")),
        ("other", authority.issue_cert("127.0.0.1")),
        ("expired", authority.issue_cert("127.0.0.1", not_after=past)),
    ):
        issued.cert_chain_pems[0].write_to_path(str(folder / f"{name}.pem"))
        issued.private_key_pem.write_to_path(str(folder / f"{name}.key"))
    (folder / "text.pem").write_text("no certificate")
    return folder


def test_tls_files_that_fit_are_taken(pem: Path) -> None:
    """With and without an authority for the callers."""
    TlsFiles(pem / "server.pem", pem / "server.key").check()
    TlsFiles(pem / "server.pem", pem / "server.key", pem / "ca.pem").check()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (("none.pem", "server.key"), "--tls-certificate .*/none.pem cannot be read .No such file or directory."),
        (("server.pem", "none.key"), "--tls-key .*/none.key cannot be read"),
        (("server.pem", "server.key", "none.pem"), "--tls-client-ca .*/none.pem cannot be read"),
        (("server.pem", "other.key"), "cannot be used together .key values mismatch.: give a PEM certificate and its"),
        (("text.pem", "server.key"), "cannot be used together"),
        (("server.pem", "text.pem"), "cannot be used together"),
        (("server.pem", "server.key", "text.pem"), "--tls-client-ca .*/text.pem holds no certificates"),
    ],
)
def test_tls_files_that_do_not_fit_are_refused(pem: Path, files: tuple[str, ...], message: str) -> None:
    """By their option."""
    with pytest.raises(ConfigError, match=message):
        TlsFiles(*(pem / name for name in files)).check()


@pytest.mark.parametrize(
    ("presented", "expected", "why"),
    [
        ("server", "server", None),
        ("expired", "expired", "certificate has expired"),
        ("other", "server", "unable to get local issuer certificate|unable to verify the first certificate"),
    ],
)
def test_a_certificate_is_tried_as_callers_will(pem: Path, presented: str, expected: str, why: str | None) -> None:
    """One that is not valid now would turn every caller away."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem / f"{presented}.pem", pem / f"{presented}.key")
    with _listening() as listening:
        thread = threading.Thread(target=_shake_hands, args=(context, listening))
        thread.start()
        found = why_untrusted("127.0.0.1", listening.getsockname()[1], pem / f"{expected}.pem")
        thread.join()

    assert found is None if why is None else found in why.split("|")


def test_a_port_that_speaks_no_tls_is_not_trusted(pem: Path) -> None:
    """Nor one where nobody is."""
    with _listening() as listening:
        port = listening.getsockname()[1]
    assert why_untrusted("127.0.0.1", port, pem / "server.pem") == "[Errno 111] Connection refused"


def _listening() -> socket.socket:
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    return listening


def _shake_hands(context: ssl.SSLContext, listening: socket.socket) -> None:
    connection, _ = listening.accept()
    try:
        context.wrap_socket(connection, server_side=True).close()
    except OSError:
        connection.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tls-key", "key"], "error: --tls-certificate and --tls-key go together: give both, or neither\n"),
        (["--tls-certificate", "crt"], "error: --tls-certificate and --tls-key go together: give both, or neither\n"),
        (
            ["--tls-client-ca", "ca"],
            "error: --tls-client-ca needs --tls-certificate and --tls-key: give them, or leave it out\n",
        ),
    ],
)
def test_half_of_tls_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Never a plain port where TLS was meant."""
    assert main(["serve", *arguments]) == 1
    assert capsys.readouterr().err == message
