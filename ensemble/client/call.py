# SPDX-License-Identifier: Apache-2.0
"""One classify call as a plan: which texts travel together, what is tried again and when, what the caller gets.

Knows nothing of channels, threads or event loops. `Client` and `AsyncClient` do the waiting, and both do it like this:

    while not call.finished:
        send every chunk that call.take() hands out
        wait for an answer, at most call.pause() seconds, and hand it to call.settle()
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from tritonclient.grpc import InferResult
from tritonclient.utils import InferenceServerException

from ensemble.client.options import ClientOptions, check_seconds
from ensemble.client.wire import Classification, decode, infer_arguments, pipeline_error
from ensemble.errors import DeadlineExceeded, InvalidRequest, Overloaded, PipelineError, Unavailable

Texts = Iterable[str | bytes] | str | bytes

# Texts share a request while the longest has at most 1.5 times the bytes of the shortest, plus 32. See plan_requests.
_LENGTH_RATIO = 1.5
_LENGTH_SLACK = 32

# After the deadline the server has so long to say that the time is up, before gRPC hangs up on it. See Client.
_GRACE_SECONDS = 5.0


class Deadline:
    """`seconds` from now, on the monotonic clock."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds left; 0 once it has passed."""
        return max(0.0, self._end - time.monotonic())

    def rpc_timeout(self) -> float:
        """Seconds left as gRPC takes them: it wants more than 0, and ends the call itself if this is too little."""
        return max(0.001, self.left())


class Chunk:
    """The texts of one request, by their place in the call."""

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = rows
        self.tries = 0
        self.sent = 0.0
        self.due = 0.0


def encode_texts(texts: Texts) -> list[bytes | InvalidRequest]:
    """UTF-8 of every text, or why there is none. A bare str or bytes is one text, never a list of its letters.

    Raises:
        InvalidRequest: `texts` is neither a text nor iterable.
    """
    if isinstance(texts, str | bytes):
        texts = [texts]
    if not isinstance(texts, Iterable):
        raise InvalidRequest(f"texts must be a str or an iterable of str, not {type(texts).__name__}")
    return [_encode(text) for text in texts]


def _encode(text: Any) -> bytes | InvalidRequest:
    try:
        if isinstance(text, str):
            return text.encode("utf-8")
        if isinstance(text, bytes):
            text.decode("utf-8")
            return bytes(text)
    except UnicodeEncodeError as error:
        return InvalidRequest(f"has a lone surrogate at position {error.start}, which UTF-8 cannot carry: remove it")
    except UnicodeDecodeError as error:
        return InvalidRequest(f"is not UTF-8 at byte {error.start}: encode it as UTF-8")
    return InvalidRequest(f"must be a str, or bytes of UTF-8, not {type(text).__name__}")


def plan_requests(lengths: dict[int, int], limit: int, max_bytes: int) -> list[list[int]]:
    """Which texts share a request: place to length in bytes in, lists of places out.

    The rows of one request are padded to its longest, and a TensorRT engine computes the padding. So texts are sorted
    by length, and a request ends before the text that is much longer than its first; also at `limit` texts and at
    `max_bytes` of text. Long and short texts still meet in one batch: that is the server's work, and costs no padding.
    """
    requests: list[list[int]] = []
    size = shortest = 0
    for place in sorted(lengths, key=lambda place: lengths[place]):
        length = lengths[place]
        fits = requests and len(requests[-1]) < limit and size + length <= max_bytes
        if not fits or length > _LENGTH_RATIO * shortest + _LENGTH_SLACK:
            requests.append([])
            size, shortest = 0, length
        requests[-1].append(place)
        size += length
    return requests


def pause_before_retry(error: PipelineError, tries: int, options: ClientOptions, deadline: Deadline) -> float | None:
    """Seconds to wait after `tries` tries that ended in `error`; None where there is to be no other try.

    Classifying twice gives the same answer and changes nothing, so a request may be sent again even if the server got
    it the first time. Full jitter, so that clients refused together do not come back together.
    """
    if not isinstance(error, Unavailable | Overloaded) or tries > options.retries:
        return None
    longest = min(options.backoff_cap_seconds, options.backoff_seconds * 2.0 ** (tries - 1))
    pause = random.uniform(0.0, longest)  # noqa: S311 (no secret hangs on it)
    return pause if pause < deadline.left() else None


class Call:
    """The state of one classify call. `strict` ends it at the first error; else an error takes its texts' places."""

    def __init__(
        self, texts: Texts, url: str, options: ClientOptions,
        timeout_seconds: float | None, strict: bool,
    ) -> None:  # fmt: skip
        seconds = options.timeout_seconds if timeout_seconds is None else timeout_seconds
        self.deadline = Deadline(check_seconds("timeout_seconds", seconds))
        self._url, self._options, self._strict = url, options, strict
        items = encode_texts(texts)
        self._texts: dict[int, bytes] = {}
        self._answers: list[Classification | PipelineError | None] = [None] * len(items)
        for place, item in enumerate(items):
            if isinstance(item, bytes) and len(item) > options.max_request_bytes:
                item = InvalidRequest(
                    f"has {len(item)} bytes, more than max_request_bytes={options.max_request_bytes}: shorten it"
                )
            if isinstance(item, bytes):
                self._texts[place] = item
            else:
                self._record([place], self._named(place, item))
        self._ready: deque[Chunk] = deque()
        self._later: list[Chunk] = []
        self._flying: set[Chunk] = set()

    @property
    def valid_texts(self) -> int:
        """How many texts are worth sending."""
        return len(self._texts)

    @property
    def finished(self) -> bool:
        """Every text that was planned has its answer or its error."""
        return not (self._ready or self._later or self._flying)

    def plan(self, batch_limit: int) -> None:
        """Lay out the requests; nothing can be taken before."""
        lengths = {place: len(text) for place, text in self._texts.items()}
        self._ready.extend(Chunk(rows) for rows in plan_requests(lengths, batch_limit, self._options.max_request_bytes))

    def take(self) -> Chunk | None:
        """The next chunk to send; None when nothing is due or `in_flight` of this call are on their way."""
        if self.deadline.left() == 0.0:
            self._expire()
        now = time.monotonic()
        for chunk in [chunk for chunk in self._later if chunk.due <= now]:
            self._later.remove(chunk)
            self._ready.appendleft(chunk)
        if not self._ready or len(self._flying) >= self._options.in_flight:
            return None
        chunk = self._ready.popleft()
        chunk.tries += 1
        self._flying.add(chunk)
        return chunk

    def arguments(self, chunk: Chunk) -> dict[str, Any]:
        """For `infer` or `async_infer`, made at the moment of sending: the time left goes with it.

        gRPC's own end of it comes later: who waits for the answer ends the wait at the deadline, by pause().
        """
        chunk.sent, seconds = time.monotonic(), self.deadline.rpc_timeout()
        return {
            **infer_arguments(self._options.model, self._texts_of(chunk)),
            "headers": dict(self._options.headers),
            "client_timeout": seconds + _GRACE_SECONDS,
            # In microseconds, for the queue: this Triton does not tell an ensemble's step that its caller is gone.
            "timeout": int(seconds * 1e6),
        }

    def settle(self, chunk: Chunk, result: InferResult | None, error: Exception | None) -> None:
        """Take in the end of a chunk's request: its answer or its error."""
        if chunk not in self._flying:
            return  # given up before
        self._flying.remove(chunk)
        if isinstance(error, InferenceServerException):
            error = pipeline_error(error, self._url, self._options.model)
        elif error is not None and not isinstance(error, PipelineError):
            raise error
        if error is None:
            try:
                seconds = time.monotonic() - chunk.sent
                answers = decode(result, self._texts_of(chunk), seconds, self._options.model)
            except PipelineError as unreadable:
                error = unreadable
        if error is not None:
            self._failed(chunk, error)
        else:
            for place, answer in zip(chunk.rows, answers, strict=True):
                self._answers[place] = answer

    def pause(self) -> float:
        """Seconds until something is to be done without an answer: a retry falls due, or the time is up."""
        now = time.monotonic()
        return max(0.0, min([self.deadline.left(), *(chunk.due - now for chunk in self._later)]))

    def give_up(self, error: PipelineError) -> None:
        """The same error for everything that has no answer yet, planned or not."""
        self._ready.clear()
        self._later.clear()
        self._flying.clear()
        self._record([place for place, answer in enumerate(self._answers) if answer is None], error)

    def answers(self) -> list[Classification | PipelineError]:
        """One entry a text, in the caller's order; of a finished call."""
        return [answer for answer in self._answers if answer is not None]

    def _texts_of(self, chunk: Chunk) -> list[bytes]:
        return [self._texts[place] for place in chunk.rows]

    def _failed(self, chunk: Chunk, error: PipelineError) -> None:
        if isinstance(error, InvalidRequest) and len(chunk.rows) > 1:
            # The server refuses a request as a whole. Halving finds the texts it meant and saves the others. At the
            # front of the queue, so that a strict call ends at the first of them and does not send the rest before.
            middle = len(chunk.rows) // 2
            self._ready.extendleft([Chunk(chunk.rows[middle:]), Chunk(chunk.rows[:middle])])
            return
        pause = pause_before_retry(error, chunk.tries, self._options, self.deadline)
        if pause is None:
            self._record(chunk.rows, self._named(chunk.rows[0], error))
        else:
            chunk.due = time.monotonic() + pause
            self._later.append(chunk)

    def _expire(self) -> None:
        missing = sum(answer is None for answer in self._answers)
        if missing:
            self.give_up(
                DeadlineExceeded(
                    f"no answer from {self._url} within {self.deadline.seconds:g} s for {missing} of"
                    f" {len(self._answers)} texts: raise timeout_seconds, or send fewer texts at once"
                )
            )

    def _named(self, place: int, error: PipelineError) -> PipelineError:
        # Where errors take the places of texts, the place says it, and the caller may have another name for the text.
        return (
            InvalidRequest(f"texts[{place}]: {error}") if self._strict and isinstance(error, InvalidRequest) else error
        )

    def _record(self, rows: Sequence[int], error: PipelineError) -> None:
        if self._strict:
            raise error
        for place in rows:
            self._answers[place] = error
