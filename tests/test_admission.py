# SPDX-License-Identifier: Apache-2.0
"""Who goes on, who waits and who is refused, against a clock and a queue that the test moves."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble.errors import Overloaded
from ensemble.handlers.admission import BLIND_SECONDS, Admission, Job, Limits, Pending

LIMITS = Limits(max_waiting_rows=100, max_request_bytes=3000, ahead_rows=64, call_bytes=1000, max_batch_size=64)


class World:
    """The clock, and what Triton would say waits; None while it says nothing."""

    def __init__(self) -> None:
        self.now, self.looks = 0.0, 0
        self.pending: Pending | None = Pending()

    def look(self) -> Pending | None:
        self.looks += 1
        return self.pending


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def admission(world: World) -> Admission:
    return Admission(LIMITS, world.look, lambda: world.now)


def job(name: str = "", rows: int = 1, size: int = 10, expires: float | None = None) -> Job:
    return Job(name, rows, size, expires)


def names(jobs: list[Job]) -> list[str]:
    return [entry.payload for entry in jobs]


def stuck(world: World, admission: Admission) -> None:
    """The classifier takes nothing more: one request of 64 rows waits before it."""
    assert admission.admit([job(rows=64)]) == [True]
    world.pending, world.now = Pending(ahead=1), world.now + 1


def test_while_the_classifier_keeps_up_everyone_goes_on(world: World, admission: Admission) -> None:
    """And it is asked only once for as many rows as it may be ahead, or for a tenth of a second."""
    for _ in range(640):
        assert admission.admit([job()]) == [True]
        world.now += 0.001

    assert world.looks <= 17


def test_what_is_sent_ahead_is_bounded_in_rows(world: World, admission: Admission) -> None:
    """Requests pending at the classifier count with the rows they were sent with, and the others wait."""
    assert admission.admit([job(rows=60), job(rows=3)]) == [True, True]
    world.pending = Pending(ahead=2)

    answers = admission.admit([job(rows=2), job(rows=1)])

    assert answers == [True, False]
    assert admission.kept == 1


def test_over_the_bound_is_refused_and_what_waits_comes_in_order(world: World, admission: Admission) -> None:
    """100 rows may wait: a request that comes before they are reached is kept whole, the next one is refused."""
    stuck(world, admission)

    answers = admission.admit([job("a", 60), job("b", 39), job("c", 60), job("d", 1)])

    assert answers[:3] == [False] * 3
    assert isinstance(answers[3], Overloaded)
    assert "Exceeds maximum queue size: 100 rows (max_waiting_rows) wait already" in str(answers[3])
    assert admission.take() == ([], [])
    taken = []
    for _ in range(3):
        world.pending, world.now = Pending(), world.now + 1
        taken.append(names(admission.take()[0]))
    assert taken == [["a"], ["b"], ["c"]]
    assert admission.admit([job()]) == [True]


def test_nobody_overtakes_those_who_wait(world: World, admission: Admission) -> None:
    """There is room again, but somebody came earlier."""
    stuck(world, admission)
    admission.admit([job("first")])
    world.pending, world.now = Pending(), world.now + 1

    assert admission.admit([job("second")]) == [False]
    assert names(admission.take()[0]) == ["first", "second"]


def test_what_waits_before_the_tokenizer_counts_too(world: World, admission: Admission) -> None:
    """Where the tokenizer is the slow one, the queue is Triton's own; it is seen within a tenth of a second."""
    admission.admit([job()])
    stuck(world, admission)
    world.pending = Pending(here=100, ahead=1)

    assert isinstance(admission.admit([job()])[0], Overloaded)
    world.pending, world.now = Pending(here=0, ahead=1), world.now + 0.01
    assert admission.admit([job()]) == [False]


def test_those_whose_time_is_up_are_given_back_and_not_sent(world: World, admission: Admission) -> None:
    """From anywhere in the queue, even while there is no room."""
    stuck(world, admission)
    admission.admit([job("a"), job("late", expires=world.now + 5), job("b", expires=world.now + 50)])
    world.now += 5

    assert [names(jobs) for jobs in admission.take()] == [[], ["late"]]
    world.pending, world.now = Pending(), world.now + 1
    assert [names(jobs) for jobs in admission.take()] == [["a", "b"], []]
    assert admission.kept == 0


def test_long_texts_wait_for_a_call_of_their_own(world: World, admission: Admission) -> None:
    """What goes on at once is at most call_bytes; short ones that come later do not wait for it."""
    answers = admission.admit([job("short", size=600), job("long", size=600), job("small", size=400)])

    assert answers == [True, False, True]
    assert admission.admit([job("later", size=10)]) == [True]
    assert names(admission.take()[0]) == ["long"]


def test_long_and_short_take_turns(world: World, admission: Admission) -> None:
    """Neither kind holds up the other for more than one call."""
    stuck(world, admission)
    admission.admit([job(name, size=1001) for name in "AB"] + [job(name, rows=40) for name in "abc"])
    taken = []
    for _ in range(5):
        world.pending, world.now = Pending(), world.now + 1
        taken += names(admission.take()[0])

    assert taken == ["a", "A", "b", "B", "c"]


def test_long_texts_that_wait_are_bounded_in_bytes(world: World, admission: Admission) -> None:
    """Once max_request_bytes of them wait, the next long one is refused; short ones still go on."""
    assert admission.admit([job(size=2000), job(size=2000)]) == [False, False]

    assert "3000 bytes (max_request_bytes) of long texts wait" in str(admission.admit([job(size=2000)])[0])
    assert admission.admit([job(size=10)]) == [True]


SIZES = {"short": st.integers(0, 100), "at the limit": st.integers(990, 1010), "any": st.integers(0, 3000)}


@given(
    st.lists(
        st.tuples(
            st.booleans(),
            st.lists(st.tuples(st.integers(1, 64), st.one_of(*SIZES.values())), max_size=12),
        ),
        max_size=20,
    )
)
def test_who_shares_a_call_shares_it_with_call_bytes_at_most(
    arrivals: list[tuple[bool, list[tuple[int, int]]]],
) -> None:
    """Whatever comes in whatever mix: only a request alone is more, and never in what goes on at once.

    Nobody is lost or served twice, and where short and long ones wait, no two calls in a row are long.
    """
    world = World()
    admission = Admission(LIMITS, world.look, lambda: world.now)
    calls, kept, served = [], [], []
    for room, sizes in [*arrivals, *[(True, [])] * 250]:
        world.pending, world.now = Pending(ahead=0 if room else 4096), world.now + 1
        jobs = [job(rows=rows, size=size) for rows, size in sizes]
        answers = admission.admit(jobs)
        now = [entry for entry, answer in zip(jobs, answers, strict=True) if answer is True]
        kept += [entry for entry, answer in zip(jobs, answers, strict=True) if answer is False]
        assert sum(entry.size for entry in now) <= LIMITS.call_bytes
        short_waits = bool(admission._short.jobs)
        taken, _ = admission.take()
        served += taken
        if taken:
            assert len(taken) == 1 or sum(entry.size for entry in taken) <= LIMITS.call_bytes
            assert len(taken) == 1 or sum(entry.rows for entry in taken) <= LIMITS.max_batch_size
            calls.append((short_waits, any(entry.size > LIMITS.call_bytes for entry in taken)))

    assert sorted(map(id, served)) == sorted(map(id, kept))
    assert not [pair for pair in pairwise(calls) if pair == ((True, True), (True, True))]


def test_requests_of_others_count_as_a_row_each(world: World, admission: Admission) -> None:
    """Somebody calls the classifier directly: its queue is seen all the same."""
    world.pending, world.now = Pending(ahead=64), 1.0

    assert admission.admit([job()]) == [False]


def test_while_nobody_says_what_waits_the_bounds_hold(world: World, admission: Admission) -> None:
    """The last count stands: who waits waits on, the queue fills, and who comes then is refused."""
    stuck(world, admission)
    world.pending = None

    answers = []
    for _ in range(150):
        answers += admission.admit([job()])
        assert admission.take() == ([], [])
        world.now += 0.01

    assert answers[:100] == [False] * 100
    assert all(isinstance(answer, Overloaded) for answer in answers[100:])


def test_what_is_sent_unseen_counts_as_waiting(world: World, admission: Admission) -> None:
    """Nothing waited when last seen, then nothing is known: no more goes on than may be ahead."""
    assert admission.admit([job()]) == [True]
    world.pending = None

    answers = []
    for _ in range(150):
        world.now += 0.01
        answers += admission.admit([job()])

    assert answers == [True] * 63 + [False] * 87


def test_a_count_that_never_comes_back_does_not_end_the_service(world: World, admission: Admission) -> None:
    """Blind, it goes on with ahead_rows at a time, once in BLIND_SECONDS, and no faster."""
    stuck(world, admission)
    admission.admit([job(rows=32) for _ in range(4)])
    world.pending, world.now = None, world.now + 0.01
    assert admission.take() == ([], [])

    taken = []
    for _ in range(2):
        world.now += BLIND_SECONDS + 0.01
        taken.append([len(admission.take()[0]) for _ in range(3)])

    assert taken == [[2, 0, 0], [2, 0, 0]]


def test_once_the_count_is_back_it_is_believed(world: World, admission: Admission) -> None:
    """All was done meanwhile: there is room at once."""
    stuck(world, admission)
    world.pending = None
    world.now += 0.01
    assert admission.admit([job("a")]) == [False]

    world.pending, world.now = Pending(), world.now + 0.01
    assert names(admission.take()[0]) == ["a"]
