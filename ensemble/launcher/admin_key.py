# SPDX-License-Identifier: Apache-2.0
"""The key to the server's repository, shared memory, trace and logging APIs: made, read, and kept out of sight."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from ensemble.errors import ConfigError

# Headers that carry the key. Triton puts a prefix of its own before the name on gRPC.
HTTP_HEADER = "admin-key"
GRPC_HEADER = f"triton-grpc-protocol-{HTTP_HEADER}"

# What is shut without it. Inference, health, metadata, configs and statistics stay open.
RESTRICTED = ("model-repository", "shared-memory", "trace", "logging")

_FORM = re.compile(r"[A-Za-z0-9_-]{16,256}")


def new_key() -> str:
    """A key of 256 random bits that nobody but this process knows."""
    return secrets.token_hex(32)


def read_key(file: Path) -> str:
    """The operator's own key. Raises ConfigError, which never holds what is in the file."""
    try:
        key = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not ASCII"
        raise ConfigError(f"--admin-key-file {file} cannot be read ({why}): name a file that holds the key") from None
    if not _FORM.fullmatch(key):
        raise ConfigError(
            f"--admin-key-file {file} must hold 16 to 256 letters, digits, '_' or '-' and nothing else: "
            f"openssl rand -hex 32 > {file}"
        )
    return key


def hide(pid: int, key: str) -> bool:
    """Blank the key in a process's command line, which every user of the machine can read; whether that was possible.

    tritonserver takes it as an argument only. The process must have read its arguments by now.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5), counted behind the name
        with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
            memory.seek(start)
            arguments = memory.read(end - start)
            memory.seek(start)
            memory.write(arguments.replace(key.encode(), b"*" * len(key)))
    except (OSError, ValueError, IndexError):
        return False
    return key.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
