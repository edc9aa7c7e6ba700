# SPDX-License-Identifier: Apache-2.0
"""Every error this project raises on purpose; knows nothing of Triton, gRPC or torch.

    PipelineError                  the root: catch this to catch all of them
    ├── ConfigError                a config.pbtxt, a label file or an installed file is wrong
    ├── ExportError                a model cannot be exported, or the result is not good enough to install
    ├── ServerError                no server can be started as asked, it did not start, or it went away
    ├── InvalidRequest             the caller's own fault: sending the same again gives the same answer
    └── RequestFailed              the request was sound and got no answer
        ├── Unavailable            nobody there, or the model is not loaded or has died; it may be back in a moment
        ├── Overloaded             the server refused the request because its queue is full: back off
        ├── DeadlineExceeded       no answer within the time the caller gave
        └── Cancelled              the caller gave up

A message names the field or file that is wrong and ends with what to do about it.
"""

from __future__ import annotations


class PipelineError(Exception):
    """Root of all errors raised by export, ensemble and perf."""


class ConfigError(PipelineError):
    """A file of the model repository is missing, does not parse or contradicts another one."""


class ExportError(PipelineError):
    """The model cannot be exported, or its export does not pass the parity gate."""


class ServerError(PipelineError):
    """The server could not be started or ended by itself."""


class InvalidRequest(PipelineError):
    """The request is at fault: its text, its shape, its type or its size. Never worth a retry."""


class RequestFailed(PipelineError):
    """A sound request got no answer."""


class Unavailable(RequestFailed):
    """No server at the address, or the model is not loaded there, or its process has died."""


class Overloaded(RequestFailed):
    """The server's queue is full and the request was refused before any work was done for it."""


class DeadlineExceeded(RequestFailed):
    """No answer within the deadline."""


class Cancelled(RequestFailed):
    """The caller gave the request up before it was answered."""
