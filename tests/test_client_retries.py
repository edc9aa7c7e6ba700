# SPDX-License-Identifier: Apache-2.0
"""What `Client` and `AsyncClient` promise of deadlines and of what is tried again, each promise on both."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from fake_triton import FULL

from ensemble import (
    AsyncClient,
    Client,
    DeadlineExceeded,
    Overloaded,
    RequestFailed,
    Unavailable,
)
from ensemble.client.call import Deadline, pause_before_retry
from ensemble.client.client import ClientOptions


def test_deadline(triton, ask):
    """A call that the server does not answer in time ends in DeadlineExceeded and is not sent again."""
    triton.open.clear()

    with pytest.raises(DeadlineExceeded, match="raise timeout_seconds"):
        ask(triton.url, "classify", ["a", "b"], timeout_seconds=0.1)
    assert triton.requests == [["a", "b"]]


def test_deadline_keeps_what_is_there(triton, ask):
    """classify_each gives the answers that came before the deadline."""
    triton.refusals.append((grpc.StatusCode.INTERNAL, "broken"))  # the first is answered, though the server hangs
    triton.open.clear()
    answers = ask(triton.url, "classify_each", ["a", "b", "c"], batch_limit=1, in_flight=1, timeout_seconds=0.1)

    assert [type(answer) for answer in answers] == [RequestFailed, DeadlineExceeded, DeadlineExceeded]
    assert triton.requests == [["a"], ["b"]]


def test_deadline_while_others_hold_every_slot(triton):
    """A call that gets no slot of a shared client in time ends by its own deadline, and nothing is sent for it."""
    triton.open.clear()
    with Client(triton.url, in_flight=1) as client, ThreadPoolExecutor(1) as pool:
        other = pool.submit(client.classify, "first")
        triton.wait_until(lambda: triton.in_flight == 1)
        with pytest.raises(DeadlineExceeded):
            client.classify("second", timeout_seconds=0.05)
        triton.open.set()

        assert other.result()[0].text == "first"
    assert triton.requests == [["first"]]


def test_a_deadline_makes_room(triton):
    """A call whose deadline has passed holds its slot of a shared client no longer."""
    triton.open.clear()
    with Client(triton.url, in_flight=1) as client, ThreadPoolExecutor(1) as pool:
        given_up = pool.submit(client.classify, "first", timeout_seconds=0.2)
        triton.wait_until(lambda: triton.requests == [["first"]])
        waiting = pool.submit(client.classify, "second")
        triton.wait_until(lambda: triton.requests == [["first"], ["second"]])
        triton.open.set()

        assert isinstance(given_up.exception(), DeadlineExceeded)
        assert waiting.result()[0].text == "second"


def test_a_cancelled_task_makes_room(triton):
    """The same for a task that is cancelled, while its request is under way as while it waits to be sent again."""
    triton.open.clear()
    triton.refusals.append(FULL)

    async def scenario():
        async with AsyncClient(triton.url, in_flight=1, backoff_seconds=60, backoff_cap_seconds=60) as client:
            for text in ("refused", "under way"):
                task = asyncio.create_task(client.classify(text, timeout_seconds=3000))
                await asyncio.to_thread(triton.wait_until, lambda text=text: triton.requests[-1:] == [[text]])
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            triton.open.set()
            return await client.classify("next")

    assert asyncio.run(scenario())[0].text == "next"


def test_full_queue_is_tried_again(triton, ask):
    """A request refused three times by a full queue is answered by the fourth try."""
    triton.refusals.extend([FULL] * 3)

    assert ask(triton.url, "classify", "a")[0].label == "positive"
    assert len(triton.requests) == 4


@pytest.mark.parametrize("refusal", [FULL, (grpc.StatusCode.UNAVAILABLE, "Request for unknown model: 'm'")])
def test_retries_are_bounded(triton, ask, refusal):
    """After `retries` further tries the error is raised."""
    triton.refusals.extend([refusal] * 9)

    with pytest.raises(Overloaded if refusal is FULL else Unavailable):
        ask(triton.url, "classify", "a", retries=2)
    assert len(triton.requests) == 3


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("INTERNAL", "Stub process 'tokenizer_0_0' is not healthy."),
        ("INTERNAL", "Failed to obtain the health mutex."),
        ("NOT_FOUND", "Request for unknown model: 'text_classifier' has no available versions"),
        ("UNAVAILABLE", "the server is stopping: ask another one"),
    ],
)
def test_what_passes_is_tried_again(triton, ask, code, text):
    """A model whose process died, or that is loaded anew, comes back; a server that stops has others beside it."""
    triton.refusals.append((grpc.StatusCode[code], text))

    assert ask(triton.url, "classify", "a")[0].label == "positive"


@pytest.mark.parametrize(
    ("code", "text"),
    [("INTERNAL", "no"), ("UNKNOWN", "no"), ("CANCELLED", "no"), ("UNIMPLEMENTED", "no"),
     ("DEADLINE_EXCEEDED", "no"), ("UNAVAILABLE", "This protocol is restricted, expecting header 'k'")],
)  # fmt: skip
def test_other_errors_are_not_tried_again(triton, ask, code, text):
    """Only a missing server, a dead model and a full queue are worth a retry."""
    triton.refusals.append((grpc.StatusCode[code], text))

    with pytest.raises(RequestFailed):
        ask(triton.url, "classify", "a")
    assert len(triton.requests) == 1


def test_pauses_double_up_to_the_cap(monkeypatch):
    """Pauses are drawn from zero to a bound that doubles with every try and stops at the cap."""
    monkeypatch.setattr(random, "uniform", lambda low, high: (low, high)[1])
    options = ClientOptions(backoff_seconds=0.1, backoff_cap_seconds=0.5, retries=5)
    pauses = [pause_before_retry(Overloaded("full"), tries, options, Deadline(60)) for tries in range(1, 7)]

    assert pauses == [0.1, 0.2, 0.4, 0.5, 0.5, None]


def test_no_retry_past_the_deadline(monkeypatch):
    """A pause that would outlast the deadline is not begun: the error comes at once."""
    monkeypatch.setattr(random, "uniform", lambda low, high: high)

    assert pause_before_retry(Overloaded("full"), 1, ClientOptions(backoff_seconds=2.0), Deadline(1.0)) is None
