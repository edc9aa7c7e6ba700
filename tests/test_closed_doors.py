# SPDX-License-Identifier: Apache-2.0
"""What a caller cannot do without the admin key, and that nobody else gets to see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import tritonclient.grpc as grpc
from triton_requests import http_call, texts_input

from ensemble.errors import ConfigError
from ensemble.launcher.admin_key import GRPC_HEADER, HTTP_HEADER, RESTRICTED, hide, new_key, read_key
from ensemble.launcher.options import ServerOptions
from ensemble.launcher.server import Server


@dataclass(frozen=True)
class Door:
    """One call of a restricted API on both protocols. harmless: may be made with the key on a server that others use."""

    api: str
    call: Callable[[grpc.InferenceServerClient, dict[str, str]], object]
    method: str
    path: str
    body: object = None
    harmless: bool = True


DOORS = [
    Door("model-repository", lambda c, h: c.get_model_repository_index(headers=h), "POST", "/v2/repository/index", {}),
    Door(
        "model-repository",
        lambda c, h: c.load_model("tokenizer", headers=h),  # loaded and unchanged: nothing happens
        "POST",
        "/v2/repository/models/tokenizer/load",
        {},
    ),
    Door(
        "model-repository",
        lambda c, h: c.unload_model("tokenizer", headers=h),
        "POST",
        "/v2/repository/models/tokenizer/unload",
        {},
        harmless=False,
    ),
    Door("shared-memory", lambda c, h: c.get_system_shared_memory_status(headers=h), "GET",
         "/v2/systemsharedmemory/status"),
    Door("shared-memory", lambda c, h: c.get_cuda_shared_memory_status(headers=h), "GET",
         "/v2/cudasharedmemory/status"),
    Door(
        "shared-memory",
        lambda c, h: c.register_system_shared_memory("mine", "/onepass", 64, headers=h),
        "POST",
        "/v2/systemsharedmemory/region/mine/register",
        {"key": "/onepass", "offset": 0, "byte_size": 64},
        harmless=False,
    ),
    Door("shared-memory", lambda c, h: c.unregister_system_shared_memory("mine", headers=h), "POST",
         "/v2/systemsharedmemory/region/mine/unregister", {}),
    Door("trace", lambda c, h: c.get_trace_settings(headers=h), "GET", "/v2/trace/setting"),
    Door("trace", lambda c, h: c.update_trace_settings(settings={"trace_level": "OFF"}, headers=h), "POST",
         "/v2/trace/setting", {"trace_level": ["OFF"]}),
    Door("logging", lambda c, h: c.get_log_settings(headers=h), "GET", "/v2/logging"),
    Door("logging", lambda c, h: c.update_log_settings({"log_info": False}, headers=h), "POST", "/v2/logging",
         {"log_info": False}),
]  # fmt: skip
IDS = [f"{door.api} {door.path.removeprefix('/v2/')} {door.method}" for door in DOORS]


def test_the_doors_are_all_that_is_restricted() -> None:
    """Each of the four APIs has a call below."""
    assert {door.api for door in DOORS} == set(RESTRICTED)


@pytest.mark.parametrize("key", [None, "0" * 64], ids=["no key", "another key"])
@pytest.mark.parametrize("door", DOORS, ids=IDS)
def test_a_door_is_shut(server: Server, door: Door, key: str | None) -> None:
    """On gRPC and on HTTP, without a key and with one that is not the server's."""
    refused = pytest.raises(grpc.InferenceServerException, match="is restricted, expecting header")
    with grpc.InferenceServerClient(server.url) as client, refused as caught:
        door.call(client, {GRPC_HEADER: key} if key else {})
    status, text = http_call(server, door.method, door.path, door.body, {HTTP_HEADER: key} if key else {})

    assert caught.value.status() == "StatusCode.UNAVAILABLE"
    assert status == 403 and "is restricted" in text


@pytest.mark.parametrize("door", [door for door in DOORS if door.harmless], ids=lambda door: door.path)
def test_the_key_opens_it(server: Server, door: Door) -> None:
    """On both protocols."""
    key = server.options.admin_key

    with grpc.InferenceServerClient(server.url) as client:
        door.call(client, {GRPC_HEADER: key})
    status, text = http_call(server, door.method, door.path, door.body, {HTTP_HEADER: key})

    assert status == 200, text


def test_what_callers_need_is_open(server: Server) -> None:
    """Inference, health, metadata, configs and statistics, without a key."""
    with grpc.InferenceServerClient(server.url) as client:
        assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("text_classifier")
        assert client.get_server_metadata().name == "triton"
        assert client.get_model_metadata("text_classifier").name == "text_classifier"
        assert client.get_model_config("text_classifier").config.max_batch_size == 64
        assert client.get_inference_statistics("text_classifier").model_stats
        assert client.infer("text_classifier", [texts_input(["hello"])]).as_numpy("logits").shape == (1, 2)
    for path in ("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/text_classifier/config", "/v2/models/stats"):
        assert http_call(server, "GET", path, None, {})[0] == 200, path


def test_the_key_is_not_in_the_process_list(server: Server) -> None:
    """Nor in the environment of the server: its argument was blanked once the server had read it."""
    key = server.options.admin_key.encode()
    command = Path(f"/proc/{server.pid}/cmdline").read_bytes()

    assert b"--grpc-restricted-protocol=model-repository,shared-memory,trace,logging:admin-key=***" in command
    assert key not in command
    assert key not in Path(f"/proc/{server.pid}/environ").read_bytes()
    assert key.decode() not in repr(server.options)


def test_every_server_has_a_key_of_its_own() -> None:
    """Of 256 bits."""
    keys = {new_key() for _ in range(100)}

    assert len(keys) == 100 and {len(bytes.fromhex(key)) for key in keys} == {32}


def test_a_process_that_is_not_ours_keeps_its_arguments() -> None:
    """It is said that hiding failed; nothing is raised."""
    assert not hide(2**22 - 1, "0" * 64)


def test_the_operators_own_key_is_read(tmp_path: Path) -> None:
    """With or without a newline behind it."""
    (tmp_path / "key").write_text("an-operators_key-0123\n")

    assert read_key(tmp_path / "key") == "an-operators_key-0123"


@pytest.mark.parametrize(
    "content", [b"", b"tooshort", b"with a space in it 1234", b"a=b,c:d0123456789012", b"\xff" * 20]
)
def test_a_key_of_another_form_is_refused(tmp_path: Path, content: bytes) -> None:
    """The message says how to make one, and never holds what is in the file."""
    (tmp_path / "key").write_bytes(content)

    with pytest.raises(ConfigError, match="--admin-key-file .*key (must hold 16 to 256|cannot be read)") as caught:
        read_key(tmp_path / "key")

    assert not content or content.decode("latin-1") not in str(caught.value)


def test_a_key_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    """By its option."""
    with pytest.raises(ConfigError) as caught:
        read_key(tmp_path / "key")

    assert str(caught.value) == (
        f"--admin-key-file {tmp_path}/key cannot be read (No such file or directory): name a file that holds the key"
    )


def test_with_tls_the_port_that_knows_none_is_for_this_machine_only(tmp_path: Path) -> None:
    """Else texts would travel readable, and past the client's certificates, beside the port that protects them."""
    from ensemble.launcher.tls_files import TlsFiles

    ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
    tls = TlsFiles(tmp_path / "certificate", tmp_path / "key")

    assert Server(ServerOptions(tmp_path, address="0.0.0.0", tls=tls, **ports)).http_address == "127.0.0.1"
    assert Server(ServerOptions(tmp_path, address="0.0.0.0", **ports)).http_address == "0.0.0.0"
