# SPDX-License-Identifier: Apache-2.0
"""execute(): a response for every request, and every failure kept to its own. Against a stand-in for Triton's utilities."""

from __future__ import annotations

import gc
import importlib
import re
import sys
import threading
import weakref
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest

from ensemble.errors import ConfigError, InvalidRequest


class Request:
    """One request of a single input `numbers`, FP64 [rows]."""

    def __init__(self, *numbers: float, name: str = "") -> None:
        self.numbers, self.name = numbers, name

    def request_id(self) -> str:
        return self.name

    def requested_output_names(self) -> list[str]:
        return ["doubled"]


class Panic(BaseException):
    """How a panic of a Rust library arrives: not as an Exception."""


class Doubler:
    """Doubles numbers; refuses 13, chokes on 66, panics on 99; counts its calls."""

    def __init__(self) -> None:
        self.computed: list[int] = []

    def read(self, request: Request) -> list[float]:
        if 13 in request.numbers:
            raise InvalidRequest("numbers: 13 is unlucky: send another")
        if 14 in request.numbers:
            raise KeyError("secret")
        return list(request.numbers)

    def compute(self, items: list[list[float]]) -> list[list[float]]:
        self.computed.append(len(items))
        if any(66 in item for item in items):
            raise RuntimeError("secret")
        if any(99 in item for item in items):
            raise Panic("secret")
        return [[2 * number for number in item] for item in items]

    def write(self, result: list[float], wanted: frozenset[str]) -> list[list[float]]:
        if 154 in result:
            raise OSError("secret")
        return [result] if "doubled" in wanted else []


@pytest.fixture
def execution(monkeypatch: pytest.MonkeyPatch):
    """ensemble.handlers.execution with the stand-in; `logged` are the lines it wrote."""
    logged: list[str] = []
    stand_in = ModuleType("triton_python_backend_utils")
    stand_in.TritonError = type(
        "TritonError",
        (),
        {
            "INVALID_ARG": "INVALID_ARG",
            "INTERNAL": "INTERNAL",
            "__init__": lambda self, message, code: self.__dict__.update(message=message, code=code),
        },
    )
    stand_in.InferenceResponse = lambda output_tensors, error=None: SimpleNamespace(tensors=output_tensors, error=error)
    stand_in.Tensor = lambda name, array: (name, array)
    stand_in.Logger = SimpleNamespace(log_error=logged.append, log_warn=logged.append)
    stand_in.get_input_tensor_by_name = lambda request, name: request.tensor
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", stand_in)
    monkeypatch.delitem(sys.modules, "ensemble.handlers.execution", raising=False)
    module = importlib.import_module("ensemble.handlers.execution")
    module.logged = logged
    yield module
    del sys.modules["ensemble.handlers.execution"]


def outcomes(responses: list[SimpleNamespace]) -> list[object]:
    return [response.error.code if response.error else response.tensors[0] for response in responses]


def test_sound_requests_are_computed_together(execution) -> None:
    """Three requests of one, two and one rows are one computation."""
    handler = Doubler()

    responses = execution.execute([Request(1), Request(2, 3), Request(4)], handler)

    assert outcomes(responses) == [[2], [4, 6], [8]]
    assert handler.computed == [3]


def test_a_refused_request_leaves_its_neighbours_in_one_computation(execution) -> None:
    """The refusal says why, in its place; the others do not pay for it."""
    handler = Doubler()

    responses = execution.execute([Request(1), Request(13), Request(2)], handler)

    assert outcomes(responses) == [[2], "INVALID_ARG", [4]]
    assert responses[1].error.message == "numbers: 13 is unlucky: send another"
    assert handler.computed == [2]
    assert execution.logged == []


@pytest.mark.parametrize("poison", [14, 66, 77, 99])
def test_a_request_that_breaks_something_fails_alone(execution, poison: int) -> None:
    """Whether reading, computing (an exception or a panic) or writing fails: one error, the neighbours answered."""
    responses = execution.execute([Request(1), Request(poison), Request(2)], Doubler())

    assert outcomes(responses) == [[2], "INTERNAL", [4]]


@pytest.mark.parametrize("poison", [13, 14, 66, 77, 99])
def test_a_request_that_failed_is_forgotten(execution, poison: int) -> None:
    """An error that is kept keeps, through its traceback, all that its request had, until Python's collector runs."""
    requests = [Request(1), Request(poison), Request(2)]
    kept = [weakref.ref(request) for request in requests]
    gc.disable()
    try:
        execution.execute(requests, Doubler())
        requests.clear()

        assert [request() for request in kept] == [None] * 3
    finally:
        gc.enable()


def test_what_is_our_fault_is_logged_without_the_callers_data(execution) -> None:
    """One line: the request's id, the error's class and where it arose; neither log nor answer repeats its message."""
    (response,) = execution.execute([Request(66, name="r-7")], Doubler())

    (line,) = execution.logged
    assert re.fullmatch(r"request r-7 failed: RuntimeError at test_execution.py:\d+ < execution.py:\d+", line)
    assert response.error.message == "internal error (RuntimeError); see the server's log"


def test_a_batch_that_runs_one_by_one_is_told(execution) -> None:
    """Even if every request then succeeds alone: that is how one batch stops being one pass."""

    class OneAtATime(Doubler):
        def compute(self, items: list[list[float]]) -> list[list[float]]:
            if len(items) > 1:
                raise MemoryError
            return super().compute(items)

    responses = execution.execute([Request(1), Request(2)], OneAtATime())

    assert outcomes(responses) == [[2], [4]]
    (line,) = execution.logged
    assert line.startswith("a batch of 2 requests failed and runs one by one: MemoryError at test_execution.py:")


def test_when_every_request_is_refused_nothing_is_computed(execution) -> None:
    """No items, no call of the model."""
    handler = Doubler()

    responses = execution.execute([Request(13), Request(13)], handler)

    assert outcomes(responses) == ["INVALID_ARG"] * 2
    assert handler.computed == []


def test_no_requests_give_no_responses(execution) -> None:
    """An empty batch is an empty answer."""
    assert execution.execute([], Doubler()) == []


def test_the_next_batch_after_a_panic_works(execution) -> None:
    """A panic does not outlive its request."""
    handler = Doubler()
    execution.execute([Request(99)], handler)

    assert outcomes(execution.execute([Request(5)], handler)) == [[10]]


def test_an_input_that_is_missing_unreadable_or_empty_is_the_callers_fault(execution) -> None:
    """Each is an InvalidRequest that names the input."""

    def lying() -> np.ndarray:
        raise ValueError("buffer too small")

    for tensor, message in [
        (None, "text: the input is missing"),
        (SimpleNamespace(as_numpy=lying), r"text: the tensor cannot be read \(ValueError\)"),
        (SimpleNamespace(as_numpy=lambda: np.zeros((0, 1))), "text: the request has no rows"),
    ]:
        with pytest.raises(InvalidRequest, match=message):
            execution.tensor_of(SimpleNamespace(tensor=tensor), "text")


@pytest.mark.parametrize("value", [None, "many", "-1", "1.5", "", "inf", "nan"])
def test_a_missing_or_bad_parameter_refuses_the_model(execution, value: str | None) -> None:
    """The message names the model, the parameter and the file."""
    parameters = "{}" if value is None else f'{{"threads": {{"string_value": "{value}"}}}}'
    args = {"model_config": f'{{"name": "classifier", "parameters": {parameters}}}'}

    with pytest.raises(ConfigError, match='classifier: parameter "threads" is .* whole number .* in config.pbtxt'):
        execution.Parameters(args).number("threads", int)


@pytest.fixture
def gated(execution, monkeypatch: pytest.MonkeyPatch):
    """ensemble.handlers.gated_execution with the same stand-in."""
    stand_in = sys.modules["triton_python_backend_utils"]
    stand_in.MetricFamily, stand_in.TritonModelException = MagicMock(), OSError
    monkeypatch.delitem(sys.modules, "ensemble.handlers.gated_execution", raising=False)
    module = importlib.import_module("ensemble.handlers.gated_execution")
    module.logged = execution.logged
    yield module
    del sys.modules["ensemble.handlers.gated_execution"]


def test_an_error_that_stays_is_paused_for_and_told_now_and_then(gated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifty in a row, a second's pause after each: a line in ten seconds, and then the thread works on."""
    now, served = [0.0], threading.Event()

    class Failing:
        kept, takes = 1, 0

        def take(self) -> tuple[list, list]:
            self.takes += 1
            if self.takes <= 50:
                raise RuntimeError("secret")
            self.kept = 0
            served.set()
            return [], []

    def sleep(seconds: float) -> None:
        now[0] += 1

    monkeypatch.setattr(gated, "Admission", lambda limits, pending: Failing())
    monkeypatch.setattr(gated, "limits_of", lambda args: None)
    monkeypatch.setattr(gated, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    gate = gated.Gate({"model_name": "tokenizer"}, MagicMock())
    gate._work.set()
    assert served.wait(30)
    gate.close()

    lines = [line for line in gated.logged if "while requests waited" in line]
    assert len(lines) == 5
    assert all(re.match(r"tokenizer: RuntimeError at test_execution.py:\d+ < ", line) for line in lines)
    assert now[0] >= 50


def test_the_gauge_shows_what_was_true_last(gated) -> None:
    """One thread is about to show an old number when another has a new one: the new one stays."""
    meters, waiting, shown = gated.Meters("tokenizer"), [5], []
    other = threading.Thread(target=meters.report, args=(lambda: waiting[0],))

    def show(rows: int) -> None:
        if rows == 5:
            waiting[0] = 0
            other.start()
            other.join(0.2)  # let it go first, if it can
        shown.append(rows)

    meters._gauge.set = show
    meters.report(lambda: waiting[0])
    other.join()

    assert shown == [5, 0]
