# SPDX-License-Identifier: Apache-2.0
"""What the blocking and the asyncio client share: how they are made, connect, ask for the batch limit and get ready.

Knows nothing of threads or event loops, and of texts only how many a call has.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tritonclient.utils import InferenceServerException

from ensemble.client.call import Call, Deadline, pause_before_retry
from ensemble.client.channel import check_servers, connection_arguments
from ensemble.client.options import DEFAULT_URL, ClientOptions, check_seconds
from ensemble.client.wire import pipeline_error
from ensemble.errors import Cancelled, InvalidRequest, Unavailable

# What close() gives those in flight: answers and refusals under way have come by then.
CLOSE_SECONDS = 1.0


class BaseClient:
    """What both clients are made with. `options` in one piece, or any of its fields by name, or both."""

    def __init__(self, url: str = DEFAULT_URL, *, options: ClientOptions | None = None, **fields: Any) -> None:
        servers = check_servers(url)
        self.url = url
        self.options = replace(options or ClientOptions(), **fields)
        self._connection = connection_arguments(servers, self.options)
        self._batch_limit = self.options.batch_limit
        self._closed = False

    def _config_arguments(self, call: Call) -> dict[str, Any]:
        return {
            "model_name": self.options.model,
            "headers": dict(self.options.headers),
            "client_timeout": call.deadline.rpc_timeout(),
        }

    def _pause_or_raise(self, error: InferenceServerException, tries: int, call: Call) -> float:
        """Seconds until the model's config is asked for again; raises what `error` means where it is not to be."""
        meaning = pipeline_error(error, self.url, self.options.model)
        pause = pause_before_retry(meaning, tries, self.options, call.deadline)
        if pause is None:
            raise meaning
        return pause

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequest("this client is closed: make a new one")


def closed_meanwhile() -> Cancelled:
    """The end of a request whose client was closed by someone else while it waited."""
    return Cancelled("the client was closed before the answer came: close it after its calls")


class ReadyWait:
    """How `wait_ready` polls: how long one poll may take, how long to pause, when and with what reason to give up."""

    POLL_SECONDS = 0.1

    def __init__(self, url: str, options: ClientOptions, timeout_seconds: float) -> None:
        self._url, self._options = url, options
        self._deadline = Deadline(check_seconds("timeout_seconds", timeout_seconds))

    def arguments(self) -> dict[str, Any]:
        """For `is_model_ready`."""
        return {
            "model_name": self._options.model,
            "headers": dict(self._options.headers),
            "client_timeout": min(self._deadline.rpc_timeout(), self._options.connect_timeout_seconds),
        }

    def pause(self, error: InferenceServerException | None) -> float:
        """Seconds until the next poll, after one that ended in `error` or, with None, in "not ready".

        Raises:
            Unavailable: there is no time for another one.
        """
        if self._deadline.left() > self.POLL_SECONDS:
            return self.POLL_SECONDS
        model = self._options.model
        reason = f"the server answers, model {model} is not loaded or still loading: see the server's log"
        if error is not None:
            reason = str(pipeline_error(error, self._url, model))
        raise Unavailable(f"model {model} was not ready within {self._deadline.seconds:g} s: {reason}")
