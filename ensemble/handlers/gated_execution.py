# SPDX-License-Identifier: Apache-2.0
"""execute() with a queue in it: what goes on now is answered by it, what has to wait by a thread, the rest is refused.

Beside execution.py, which does the computing, the one module that speaks to Triton's Python backend. An answer may come
after its execute() has returned: the backend hands out a response sender for that (24.06 and later). It costs a message
each, so only those who wait anyway get theirs that way. Knows nothing of tokens; admission.py decides who waits.

A process that is killed while requests wait in it takes them along: Triton no longer watches over those, and their
callers hear nothing before their deadline. Those in a running execute() get an error at once.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import triton_python_backend_utils as pb_utils

from ensemble.errors import Overloaded
from ensemble.handlers.admission import POLL_SECONDS, Admission, Job, Limits, Pending
from ensemble.handlers.execution import Handler, Item, Parameters, Result, execute, failure, where
from ensemble.handlers.pending import PendingRequests, metrics_address

# Whatever the tokenizer may feed; a server has one of them in use.
FED = ("classifier", "baseline")
# Refusals come by the thousand, and other troubles may: of each kind, one line of the log in so many seconds.
LOG_SECONDS = 10.0


class Sized(Handler[Item, Result], Protocol[Item, Result]):
    """A handler whose items have a size."""

    def size(self, item: Item) -> tuple[int, int]:
        """Rows, and bytes of text."""


@dataclass(frozen=True)
class Read:
    """A request that was read, with what execute() asks of one; Triton's own may not outlive its execute()."""

    index: int
    item: Any
    name: str
    outputs: list[str]
    sender: Any

    def request_id(self) -> str:
        """As Triton's request."""
        return self.name

    def requested_output_names(self) -> list[str]:
        """As Triton's request."""
        return self.outputs


class Gate:
    """What a model.py calls in place of execute(). close() it in finalize()."""

    def __init__(self, args: dict[str, str], handler: Sized[Any, Any]) -> None:
        """handler: its compute() is called by two threads, and by both at once."""
        self._handler, self._model = handler, args["model_name"]
        address = metrics_address()
        self._requests, self._log = PendingRequests(address), NowAndThen()
        self._admission = Admission(limits_of(args), self._pending)
        self._meters = Meters(self._model)
        self._work, self._closing = threading.Event(), False
        if address is None:
            pb_utils.Logger.log_warn(f"{self._model}: the server has no metrics page, so its queue has no bound")
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """One entry a request: its response, or None where that follows."""
        responses: list[Any] = [None] * len(requests)
        jobs: list[Job] = []
        for index, request in enumerate(requests):
            try:
                jobs.append(self._job(index, request))
            except Exception as error:  # kept by nothing: it has the request's texts, through its traceback's frames
                responses[index] = failure(request, error)
        now: list[Read] = []
        for job, answer in zip(jobs, self._admission.admit(jobs), strict=True):
            if isinstance(answer, Overloaded):
                responses[job.payload.index] = self._meters.refusal("queue full", str(answer))
            elif answer:
                now.append(job.payload)
        if self._admission.kept:
            self._work.set()
        for read, response in zip(now, execute(now, self), strict=True):
            responses[read.index] = response
        self._meters.report(lambda: self._admission.kept)
        return responses

    def close(self) -> None:
        """End the thread. Triton unloads a model once its requests are answered, so none is left."""
        self._closing = True
        self._work.set()
        self._thread.join()
        self._requests.close()

    # A handler itself, of requests that were read already.

    def read(self, request: Read) -> Any:
        """As Handler."""
        return request.item

    def compute(self, items: list[Any]) -> list[Any]:
        """As Handler."""
        return self._handler.compute(items)

    def write(self, result: Any, wanted: frozenset[str]) -> list[Any]:
        """As Handler."""
        return self._handler.write(result, wanted)

    def _job(self, index: int, request: Any) -> Job:
        item = self._handler.read(request)
        rows, size = self._handler.size(item)
        seconds = request.timeout() / 1e6
        return Job(
            Read(index, item, request.request_id(), request.requested_output_names(), request.get_response_sender()),
            rows,
            size,
            time.monotonic() + seconds if seconds else None,
        )

    def _run(self) -> None:
        while not self._closing:
            self._work.wait()
            self._work.clear()
            while self._admission.kept and not self._closing:
                try:
                    if not self._serve_next():
                        time.sleep(POLL_SECONDS)
                except Exception as error:  # this thread must not end: all who wait would wait for ever
                    if self._log.due(type(error).__name__):
                        pb_utils.Logger.log_error(f"{self._model}: {where(error)} while requests waited")
                    time.sleep(POLL_SECONDS)

    def _serve_next(self) -> bool:
        """Whether there was anything to do."""
        taken, late = self._admission.take()
        for job in late:
            _send(job.payload, self._meters.refusal("timeout", "Request timeout expired while it waited its turn"))
        reads = [job.payload for job in taken]
        for read, response in zip(reads, execute(reads, self), strict=True):
            _send(read, response)
        self._meters.report(lambda: self._admission.kept)
        return bool(taken or late)

    def _pending(self) -> Pending | None:
        counts = self._requests()
        if counts is None:
            if self._log.due("blind"):
                pb_utils.Logger.log_warn(
                    f"{self._model}: the server's metrics page does not answer: what was sent on counts as waiting"
                )
            return None
        return Pending(counts.get(self._model, 0), sum(counts.get(model, 0) for model in FED))


class NowAndThen:
    """Whether a line of a kind may go to the log again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next: dict[str, float] = {}

    def due(self, kind: str) -> bool:
        """True once in LOG_SECONDS."""
        with self._lock:
            now = time.monotonic()
            due = now >= self._next.get(kind, now)
            if due:
                self._next[kind] = now + LOG_SECONDS
            return due


class Meters:
    """On the metrics port: onepass_waiting_rows{model=...}, onepass_refused_requests_total{model=..., reason=...}.

    Of refusals, the log gets a line now and then.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._new = dict.fromkeys(("queue full", "timeout"), 0)
        self._log = NowAndThen()
        self._shown = 0
        self._gauge: Any = None
        self._counters: dict[str, Any] = {}
        kinds = pb_utils.MetricFamily
        try:
            self._families = (  # a metric does not keep its family alive
                kinds(name="onepass_waiting_rows", description="Rows that wait for their turn", kind=kinds.GAUGE),
                kinds(
                    name="onepass_refused_requests_total",
                    description="Requests refused because too many waited, or because they waited too long",
                    kind=kinds.COUNTER,
                ),
            )
            gauge, counter = self._families
            self._gauge = gauge.Metric(labels={"model": model})
            self._counters = {reason: counter.Metric(labels={"model": model, "reason": reason}) for reason in self._new}
        except pb_utils.TritonModelException:
            pass  # the server runs without metrics

    def refusal(self, reason: str, message: str) -> Any:
        """What the caller gets."""
        with self._lock:
            self._new[reason] += 1
        if self._log.due(reason):
            pb_utils.Logger.log_warn(f"{self._model}: requests are refused, {reason}: {message}")
        error = pb_utils.TritonError(message, pb_utils.TritonError.UNAVAILABLE)
        return pb_utils.InferenceResponse(output_tensors=[], error=error)

    def report(self, waiting: Callable[[], int]) -> None:
        """Show what changed since the last report; each change is a message to the server.

        waiting: asked only when it is this thread's turn to show it: the number of whoever reports last stays.
        """
        with self._lock:
            new, self._new = self._new, dict.fromkeys(self._new, 0)
            now = waiting()
            if now != self._shown and self._gauge is not None:
                self._gauge.set(now)
            self._shown = now
        for reason, counter in self._counters.items():
            if new[reason]:
                counter.increment(new[reason])


def _send(read: Read, response: Any) -> None:
    try:
        read.sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    except Exception as error:  # this caller is gone; the others still wait
        pb_utils.Logger.log_error(f"an answer could not be sent: {type(error).__name__}")


def limits_of(args: dict[str, str]) -> Limits:
    """From the model's config. Raises ConfigError."""
    parameters = Parameters(args)
    names = ("max_waiting_rows", "max_request_bytes", "ahead_rows", "call_bytes")
    return Limits(
        **{name: parameters.number(name, int) for name in names},
        max_batch_size=json.loads(args["model_config"])["max_batch_size"],
    )
