# SPDX-License-Identifier: Apache-2.0
"""Ports to listen on: known to be free, or said in one line not to be. Knows nothing of who will listen."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from contextlib import ExitStack

from ensemble.errors import ServerError


def free_ports(wanted: Mapping[str, tuple[str, int]]) -> list[int]:
    """The ports, once they are known to be free and different; a free one for each 0.

    wanted: setting -> address and port. Raises ServerError naming the setting.
    """
    ports = []
    with ExitStack() as held:  # all at once, or two of them could get the same free port
        for name, (address, port) in wanted.items():
            probe = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            # As the server does: a port whose last connections linger in TIME_WAIT is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
                probe.listen()  # bound alone, two sockets may share a port
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise ServerError(f"{address}:{port} is taken: set another {name}") from None
                raise ServerError(
                    f"{address}:{port} cannot be listened on ({error.strerror}): set ADDRESS to an IPv4 "
                    f"address of this machine, and {name} to a port you may use"
                ) from None
            ports.append(probe.getsockname()[1])
    return ports
