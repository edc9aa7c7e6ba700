# SPDX-License-Identifier: Apache-2.0
"""How a client behaves, checked before anything is sent; knows nothing of gRPC, requests or answers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

from ensemble.errors import InvalidRequest

DEFAULT_URL = "127.0.0.1:8001"
DEFAULT_MODEL = "text_classifier"

# gRPC counts some of them in milliseconds of 32 bits, which is 24 days.
_LONGEST_SECONDS = 86400.0


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
    #: Bytes of text in one request. Other gRPC programs on the way, such as proxies, refuse 4 MiB and more by default.
    max_request_bytes: int = 4_000_000
    #: Requests on their way at any moment, over all calls and threads that share the client.
    in_flight: int = 8
    #: Further tries after the first, for a request that found nobody or a full queue.
    retries: int = 4
    #: The n-th pause is drawn from [0, min(backoff_cap_seconds, backoff_seconds * 2**(n - 1))].
    backoff_seconds: float = 0.1
    backoff_cap_seconds: float = 2.0
    #: Sent with every request: a proxy's token, a key of --grpc-restricted-protocol. Not in repr(): they may be secret.
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    #: TLS. `root_certificates` is a PEM file; None takes gRPC's own list.
    ssl: bool = False
    root_certificates: str | Path | None = None

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
        if self.root_certificates is not None:
            _check_certificates(self.ssl, self.root_certificates)


def check_seconds(name: str, value: Any) -> float:
    """`value` as a float of seconds.

    Raises:
        InvalidRequest: `value` is not a number, or not in (0, one day].
    """
    sound = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not sound or not 0 < value <= _LONGEST_SECONDS:
        raise InvalidRequest(f"{name} must be a number of seconds above 0 and at most a day, not {value!r}")
    return float(value)


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


def _check_certificates(ssl: bool, path: str | Path) -> None:
    if not ssl:
        raise InvalidRequest("root_certificates is given but ssl is not: say ssl=True, or leave it out")
    # Read here, because tritonclient opens it half-way through its constructor and then complains from __del__.
    try:
        Path(path).read_bytes()
    except OSError as error:
        raise InvalidRequest(f"root_certificates: cannot read {path}: {error.strerror}") from None
