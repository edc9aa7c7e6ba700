# SPDX-License-Identifier: Apache-2.0
"""Text in, labels with probabilities out: the client of the `text_classifier` ensemble, blocking and for asyncio.

    with Client("127.0.0.1:8001") as client:
        for answer in client.classify(["a good film", "a bad one"]):
            print(answer.label, answer.probability)

The two clients promise the same and differ in the waiting only:

- Answers come in the order of the texts. A bare str is one text; no text is no request.
- Long lists travel as several requests, `in_flight` at once, each of texts alike in length (`plan_requests` says why).
  `batch_limit=1` sends one text a request; Triton batches requests either way.
- `classify` gives every answer or raises the first error. `classify_each` loses nothing: an error takes the place of
  the text it is about. A request refused for its content is halved until the bad text stands alone.
- `timeout_seconds` covers the whole call. Within it, requests that found nobody or a full queue are tried again
  (`retries`, 0 to be told at once), with growing pauses and jitter. A text that was refused never is. That is safe:
  classifying twice gives the same answer and changes nothing.
- Several servers, "10.0.0.1:8001,10.0.0.2:8001", or one name that stands for several: requests take turns, servers
  without a connection are left out, and what is tried again goes to the next one.
- Who gives up, for an error or the deadline, leaves the requests that were sent to their end: they carry the deadline,
  and the server drops those that still wait then. Nobody hangs up on it: a Triton before 25.06 can crash if that
  happens just as its answer is made (pull requests 7840, 8078 and 8220 of triton-inference-server/server), and under
  overload, where many give up, it does.
- One client, one channel, made for reuse: keep it. A peer that vanishes is noticed after 10 s; one that is there and
  hangs, by the deadline.

Knows nothing of models, tokenizers or the repository's files.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import Any, cast

from tritonclient import grpc
from tritonclient.utils import InferenceServerException

from ensemble.client.async_client import AsyncClient
from ensemble.client.base import CLOSE_SECONDS, BaseClient, ReadyWait, closed_meanwhile
from ensemble.client.call import Call, Chunk, Texts
from ensemble.client.options import DEFAULT_URL, ClientOptions
from ensemble.client.wire import Classification
from ensemble.errors import PipelineError

__all__ = ["AsyncClient", "Classification", "Client", "ClientOptions"]

_Answer = tuple[Chunk, grpc.InferResult | None, Exception | None]


class Client(BaseClient):
    """The blocking client. Threads may share it; close() it from one that knows the others are done."""

    def __init__(self, url: str = DEFAULT_URL, *, options: ClientOptions | None = None, **fields: Any) -> None:
        """Connects at the first call.

        Args:
            url: `host:port` of the server's gRPC port, 8001 by default there; of several servers, their numeric
                addresses `address:port`, all IPv4 or all IPv6, with commas between.
            options, fields: see ClientOptions; `Client(url, timeout_seconds=5)` is the usual form.

        Raises:
            InvalidRequest: a value makes no sense.
        """
        super().__init__(url, options=options, **fields)
        self._slots = threading.Semaphore(self.options.in_flight)
        self._sending = threading.Lock()
        self._in_flight, self._ended = 0, threading.Condition()
        self._rpc = grpc.InferenceServerClient(**self._connection)

    def classify(self, texts: Texts, *, timeout_seconds: float | None = None) -> list[Classification]:
        """One answer a text, in order, within `timeout_seconds` (None: the options').

        Raises:
            InvalidRequest: a text is at fault; the message says which.
            RequestFailed: there is no answer for some text: Unavailable, Overloaded, DeadlineExceeded, Cancelled.
        """
        call = Call(texts, self.url, self.options, timeout_seconds, strict=True)
        return cast("list[Classification]", self._run(call))

    def classify_each(
        self, texts: Texts, *, timeout_seconds: float | None = None
    ) -> list[Classification | PipelineError]:
        """Like classify(), with the error in the place of every text that has no answer; nothing else is lost.

        Raises:
            InvalidRequest: `texts` is not iterable, `timeout_seconds` makes no sense, or the client is closed.
        """
        return self._run(Call(texts, self.url, self.options, timeout_seconds, strict=False))

    def wait_ready(self, timeout_seconds: float = 60.0) -> None:
        """Return once Triton calls the model ready, and not merely itself.

        Raises:
            Unavailable: it did not within `timeout_seconds`; the message has the reason.
        """
        wait = ReadyWait(self.url, self.options, timeout_seconds)
        while True:
            self._check_open()
            try:
                if self._rpc.is_model_ready(**wait.arguments()):
                    return
                time.sleep(wait.pause(None))
            except InferenceServerException as error:
                time.sleep(wait.pause(error))

    def close(self) -> None:
        """Give the connection back. Harmless when repeated.

        What is in flight, left behind or of other threads, has CLOSE_SECONDS to be answered; such calls then end in
        Cancelled.
        """
        self._closed = True
        with self._ended:
            self._ended.wait_for(lambda: self._in_flight == 0, CLOSE_SECONDS)
        self._rpc.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, call: Call) -> list[Classification | PipelineError]:
        self._check_open()
        try:
            call.plan(self._rows_per_request(call))
        except PipelineError as error:
            call.give_up(error)
        answered: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        slots: dict[Chunk, _Slot] = {}
        try:
            while not call.finished:
                while (chunk := call.take()) is not None:
                    # None if other threads kept every slot till the deadline.
                    if (slot := _Slot.of(self._slots, call.deadline.left())) is not None:
                        slots[chunk] = slot
                        self._send(call, chunk, slot, answered)
                try:
                    chunk, result, failure = answered.get(timeout=call.pause())
                except queue.Empty:
                    continue
                slots.pop(chunk, None)
                call.settle(chunk, result, failure)
        finally:
            for slot in slots.values():
                slot.free()
        return call.answers()

    def _send(self, call: Call, chunk: Chunk, slot: _Slot, answered: queue.SimpleQueue[_Answer]) -> None:
        """Send one request; its end is put into `answered`."""

        def done(result: grpc.InferResult | None, error: Exception | None) -> None:
            slot.free()
            answered.put((chunk, result, error))
            with self._ended:
                self._in_flight -= 1
                self._ended.notify_all()

        with self._ended:
            self._in_flight += 1
        try:
            if self._closed:
                raise closed_meanwhile()
            arguments = call.arguments(chunk)
            # Not thread-safe as it claims to be: it keeps the request in an attribute before it adds the callback, so
            # that of two threads in there at once, one would get the other's answer.
            with self._sending:
                self._rpc.async_infer(callback=done, **arguments)
        except Exception as error:  # a ValueError is gRPC's way to say that the channel is closed
            done(None, closed_meanwhile() if self._closed else error)

    def _rows_per_request(self, call: Call) -> int:
        """`batch_limit`, or the server's; 1, without asking, where there is nothing to put together."""
        tries = 0
        while self._batch_limit is None and call.valid_texts > 1:
            self._check_open()
            try:
                config = self._rpc.get_model_config(**self._config_arguments(call)).config
                self._batch_limit = max(1, config.max_batch_size)
            except InferenceServerException as error:
                tries += 1
                time.sleep(self._pause_or_raise(error, tries, call))
        return self._batch_limit or 1


class _Slot:
    """A request's place among those in flight: until its end, or until nobody waits for it any more."""

    def __init__(self, slots: threading.Semaphore) -> None:
        self._slots, self._taken = slots, threading.Lock()

    @classmethod
    def of(cls, slots: threading.Semaphore, seconds: float) -> _Slot | None:
        """One, or None if there is none within so many seconds."""
        return cls(slots) if slots.acquire(timeout=seconds) else None

    def free(self) -> None:
        """Harmless when repeated."""
        if self._taken.acquire(blocking=False):
            self._slots.release()
