# SPDX-License-Identifier: Apache-2.0
"""How a client behaves, checked before anything is sent; knows nothing of gRPC, requests or answers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from ssl import PROTOCOL_TLS_CLIENT, SSLContext, SSLError
from typing import Any

from ensemble.errors import InvalidRequest

DEFAULT_URL = "127.0.0.1:8001"
DEFAULT_MODEL = "text_classifier"

# Nobody waits longer for one call; a larger number is one of milliseconds, most likely.
_LONGEST_SECONDS = 3600.0

# The options that are PEM files.
TLS_FILES = ("root_certificates", "certificate_chain", "private_key")


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """Every knob of `Client` and `AsyncClient`; a senseless value is an InvalidRequest that names it."""

    model: str = DEFAULT_MODEL
    #: Seconds for one whole call: every request of it, every retry and every pause between retries.
    timeout_seconds: float = 30.0
    #: Seconds for one attempt to connect, at least 0.1: gRPC takes nothing shorter.
    connect_timeout_seconds: float = 3.0
    #: Texts in one request. None: `max_batch_size` of the server's model, asked for once, at the first call with more
    #: than one text. 1: every text travels alone and the server alone does the batching.
    batch_limit: int | None = None
    #: Bytes of text in one request, a little less than the `max_request_bytes` of the tokenizer's config.
    max_request_bytes: int = 250_000
    #: Requests on their way at any moment, over all calls and threads that share the client.
    in_flight: int = 8
    #: Further tries after the first, for a request that found nobody, a full queue or a model without its process.
    retries: int = 4
    #: The n-th pause is drawn from [0, min(backoff_cap_seconds, backoff_seconds * 2**(n - 1))].
    backoff_seconds: float = 0.1
    backoff_cap_seconds: float = 2.0
    #: Sent with every request: a proxy's token, a key of --grpc-restricted-protocol. Not in repr(): they may be secret.
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    #: Speak TLS. The rest is for ssl=True only, the files are PEM.
    ssl: bool = False
    #: Who may have signed the server's certificate; None takes gRPC's own list of public authorities.
    root_certificates: str | Path | None = None
    #: What the client shows a server that asks for a certificate (mutual TLS), and its key, unencrypted.
    certificate_chain: str | Path | None = None
    private_key: str | Path | None = None
    #: The name in the server's certificate, where `url` has another one: several servers, an address, a tunnel.
    server_name: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise InvalidRequest(f"model must be a model's name, not {self.model!r}")
        for name in ("timeout_seconds", "connect_timeout_seconds", "backoff_seconds", "backoff_cap_seconds"):
            check_seconds(name, getattr(self, name))
        if self.batch_limit is not None:
            _check_count("batch_limit", self.batch_limit, least=1)
        _check_count("max_request_bytes", self.max_request_bytes, least=1)
        _check_count("in_flight", self.in_flight, least=1)
        _check_count("retries", self.retries, least=0)
        # gRPC takes lower-case names only; people write them as in HTTP.
        headers = {_header_name(name): _header_value(name, value) for name, value in self.headers.items()}
        object.__setattr__(self, "headers", headers)
        for name in (*TLS_FILES, "server_name"):
            if getattr(self, name) is not None and not self.ssl:
                raise InvalidRequest(f"{name} is given but ssl is not: say ssl=True, or leave it out")
        if self.server_name is not None and not (isinstance(self.server_name, str) and self.server_name.strip()):
            raise InvalidRequest(f"server_name must be a host's name, not {self.server_name!r}")
        _check_tls_files(self)


def check_seconds(name: str, value: Any) -> float:
    """`value` as a float of seconds.

    Raises:
        InvalidRequest: `value` is not a number, or not in (0, one hour].
    """
    sound = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if sound and 0 < value <= _LONGEST_SECONDS:
        return float(value)
    hint = " (milliseconds? divide by 1000)" if sound and value > _LONGEST_SECONDS else ""
    raise InvalidRequest(
        f"{name} must be a number of seconds above 0 and at most {_LONGEST_SECONDS:.0f}, not {value!r}{hint}"
    )


def check_url(url: Any) -> str:
    """`url` as gRPC takes it: `host:port`.

    Raises:
        InvalidRequest: it is not a string, has no host or no port, or starts with the scheme of another protocol.
    """
    if not isinstance(url, str) or not url.strip() or any(character.isspace() for character in url):
        raise InvalidRequest(f"url must be host:port, for example {DEFAULT_URL}, not {url!r}")
    if re.match(r"(https?|grpcs?)://", url, re.IGNORECASE):
        raise InvalidRequest(f"url must be host:port without a scheme, for example {DEFAULT_URL}, not {url!r}")
    # gRPC would take a missing port for 443, and 99999 modulo 65536.
    port = re.fullmatch(r"[^:].*:([0-9]{1,5})", url)
    if not port or not 0 < int(port[1]) < 65536:
        raise InvalidRequest(f"url must be host:port with a port of 1 to 65535, for example {DEFAULT_URL}, not {url!r}")
    return url


def _check_count(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidRequest(f"{name} must be a whole number, at least {least}, not {value!r}")


def _header_name(name: Any) -> str:
    # gRPC wants bytes, not str, in headers whose names end in -bin; nothing here needs one.
    if not isinstance(name, str) or not re.fullmatch(r"[0-9A-Za-z_.-]+(?<!-bin)", name):
        raise InvalidRequest(
            f"headers: {name!r} is no header name: letters, digits, '_', '.', '-', and no '-bin' at its end"
        )
    return name.lower()


def _header_value(name: str, value: Any) -> str:
    # The value stays out of the message: it may be a token.
    if not isinstance(value, str) or not re.fullmatch(r"[ -~]*", value):
        raise InvalidRequest(f"headers: the value of {name!r} must be a str of printable ASCII")
    return value


def _check_tls_files(options: ClientOptions) -> None:
    """Here, because gRPC would write to stderr and never connect, and tritonclient would complain from its __del__."""
    paths = {name: Path(path) for name in TLS_FILES if (path := getattr(options, name)) is not None}
    for name, path in paths.items():
        try:
            path.read_bytes()
        except OSError as error:
            raise InvalidRequest(f"{name}: cannot read {path}: {error.strerror}") from None
    if (options.certificate_chain is None) != (options.private_key is None):
        raise InvalidRequest("certificate_chain and private_key go together: give both, or neither")
    context = SSLContext(PROTOCOL_TLS_CLIENT)
    if roots := paths.get("root_certificates"):
        try:
            context.load_verify_locations(roots)
        except SSLError:
            raise InvalidRequest(f"root_certificates: {roots} holds no certificate: give a PEM file") from None
    if chain := paths.get("certificate_chain"):
        try:
            # With no password at all, OpenSSL would ask the terminal for that of an encrypted key.
            context.load_cert_chain(chain, paths["private_key"], password="")
        except SSLError:
            raise InvalidRequest(
                f"private_key: {paths['private_key']} is not the key of {chain}: give PEM files that belong together, "
                f"the key without a password"
            ) from None
