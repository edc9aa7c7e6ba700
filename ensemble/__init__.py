# SPDX-License-Identifier: Apache-2.0
"""What the server's handlers and its clients share.

Importing this package needs nothing; its names need numpy and tritonclient[grpc] once they are used. torch, onnxruntime
and tokenizers are imported by what runs them only.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ensemble.client.async_client import AsyncClient
    from ensemble.client.client import Client
    from ensemble.client.wire import Classification
    from ensemble.errors import (
        Cancelled,
        ConfigError,
        DeadlineExceeded,
        ExportError,
        InvalidRequest,
        Overloaded,
        PipelineError,
        RequestFailed,
        ServerError,
        Unavailable,
    )

__all__ = [
    "AsyncClient",
    "Cancelled",
    "Classification",
    "Client",
    "ConfigError",
    "DeadlineExceeded",
    "ExportError",
    "InvalidRequest",
    "Overloaded",
    "PipelineError",
    "RequestFailed",
    "ServerError",
    "Unavailable",
]

_ELSEWHERE = {
    "AsyncClient": "ensemble.client.async_client",
    "Client": "ensemble.client.client",
    "Classification": "ensemble.client.wire",
}


def __getattr__(name: str) -> object:
    """On first use, so that a handler or a probe does not import what a client needs."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_ELSEWHERE.get(name, "ensemble.errors")), name)
