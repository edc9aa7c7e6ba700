# SPDX-License-Identifier: Apache-2.0
"""What the server's handlers and its clients share.

Importing this package needs numpy and tritonclient[grpc] only: nothing here imports torch, onnxruntime or tokenizers
until the part that needs it is used.
"""

from ensemble.client import AsyncClient, Classification, Client
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
