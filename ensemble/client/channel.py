# SPDX-License-Identifier: Apache-2.0
"""Which servers a client talks to and how gRPC connects to them: addresses, balancing, time-outs, TLS.

Balancing, reconnecting and leaving out a server whose connection is gone are gRPC's own. Knows nothing of requests.
"""

from __future__ import annotations

import ipaddress
import json
import re
from typing import Any

from tritonclient.grpc import MAX_GRPC_MESSAGE_SIZE

from ensemble.client.options import TLS_FILES, ClientOptions, check_url
from ensemble.errors import InvalidRequest

_LOOPBACK = re.compile(r"(localhost|127\.[0-9.]+|\[::1\]):")

# One request after the other goes to the next server that is connected; so a retry goes to another one.
_SERVICE_CONFIG = json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})

# Where nothing of what was sent is acknowledged for so long, Linux ends the connection (TCP_USER_TIMEOUT, which gRPC
# sets where keepalive is on): that machine, or the way to it, is gone. Else it would get its share of the requests for
# a quarter of an hour.
_SILENT_PEER_MS = 10_000
# The pings of keepalive themselves are of no use here, and Triton ends connections that ping more often than every
# 300 s. So: never during a call of usual length.
_PING_MS = 400_000


def check_servers(url: Any) -> list[str]:
    """The addresses in `url`, `host:port` or several `address:port` with commas between.

    Raises:
        InvalidRequest: one is not `host:port`; or there are several, and not all are IPv4 or all are IPv6 addresses.
    """
    servers = url.split(",") if isinstance(url, str) else [url]
    for server in servers:
        check_url(server)
    versions = {_ip_version(server) for server in servers}
    if len(servers) > 1 and (None in versions or len(versions) > 1):
        raise InvalidRequest(
            f"url: several servers must be numeric addresses, all IPv4 or all IPv6, not {url!r}: give those, or one "
            f"name that resolves to all of them"
        )
    return servers


def connection_arguments(servers: list[str], options: ClientOptions) -> dict[str, Any]:
    """For tritonclient's InferenceServerClient of either kind.

    Raises:
        InvalidRequest: the certificates of several servers cannot be checked, because `server_name` is missing.
    """
    if len(servers) > 1 and options.ssl and options.server_name is None:
        raise InvalidRequest("several servers with ssl need server_name: the name that all their certificates carry")
    connect_ms = max(100, int(options.connect_timeout_seconds * 1000))
    return {
        "url": _target(servers),
        "ssl": options.ssl,
        **{name: str(path) for name in TLS_FILES if (path := getattr(options, name)) is not None},
        "channel_args": [
            ("grpc.max_send_message_length", MAX_GRPC_MESSAGE_SIZE),
            ("grpc.max_receive_message_length", MAX_GRPC_MESSAGE_SIZE),
            ("grpc.service_config", _SERVICE_CONFIG),
            # The first is also gRPC's time-out for one attempt to connect, 20 s if left alone. The others let a
            # retry meet a fresh attempt, where gRPC's own pause would be a second and more.
            ("grpc.min_reconnect_backoff_ms", connect_ms),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
            ("grpc.keepalive_time_ms", _PING_MS),
            ("grpc.keepalive_timeout_ms", _SILENT_PEER_MS),
            # Else clients of one process share a connection, and the pauses after another one's failures.
            ("grpc.use_local_subchannel_pool", 1),
            # gRPC would send the whole list as the name of the host, which a proxy refuses.
            *([("grpc.default_authority", servers[0])] if len(servers) > 1 else []),
            *([("grpc.ssl_target_name_override", options.server_name)] if options.server_name else []),
            # A proxy that the environment names cannot reach this machine's own loopback, nor a list.
            *([("grpc.enable_http_proxy", 0)] if len(servers) > 1 or _LOOPBACK.match(servers[0]) else []),
        ],
    }


def _target(servers: list[str]) -> str:
    if len(servers) == 1:
        return servers[0]
    return f"ipv{_ip_version(servers[0])}:{','.join(servers)}"


def _ip_version(server: str) -> int | None:
    """4 or 6; None for a name, and for an IPv6 address without its brackets."""
    host = server.rpartition(":")[0]
    bracketed = re.fullmatch(r"\[(.+)\]", host)
    try:
        version = ipaddress.ip_address(bracketed[1] if bracketed else host).version
    except ValueError:
        return None
    return version if (version == 6) == bool(bracketed) else None
