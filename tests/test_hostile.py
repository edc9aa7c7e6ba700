# SPDX-License-Identifier: Apache-2.0
"""Hostile requests, a short run of them, at the session's server."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest
from tritonclient.grpc import service_pb2

from ensemble.errors import ServerError
from ensemble.launcher.server import Server
from perf.__main__ import main
from perf.endurance import hostile, hostile_grpc, hostile_http
from perf.endurance.exchange import Refused
from perf.endurance.hostile import Attack
from perf.endurance.hostile_texts import of_every_block
from perf.endurance.questions import FULL_QUEUE, QUEUE_FULL, RIGHT

# Bytes of a text, in the committed config.
LONGEST = 32_768


@pytest.fixture
def command(repository: Path, tmp_path: Path):
    """The command on the session's model; its exit code and its record."""

    def run(*arguments: str) -> tuple[int, dict]:
        file = tmp_path / "hostile.json"
        code = main(["hostile", "--repository", str(repository), "--output", str(file), *arguments])
        return code, json.loads(file.read_text())

    return run


@pytest.mark.usefixtures("on_the_sessions_server")
def test_the_server_lives_and_good_requests_are_answered_rightly(command, server: Server) -> None:
    """Hundreds, of every kind: the same processes, no wrong answer, no hang, no failure inside a handler, no leak."""
    before = server.pid

    code, result = command("--requests", "600", "--distinct", "20")

    counts = result["counts"]
    assert server.pid == before and result["complete"] and result["hostile_requests"] == 600
    assert (counts["wrong"], counts["faults"]) == (0, [])
    kinds = {*hostile_grpc.BROKEN, *hostile_grpc.WRONG, *hostile_grpc.AROUND, *hostile_http.CALLS}
    assert counts["outcomes"].keys() == {*kinds, "good", "flood"} and counts["texts_compared"] > 100
    assert {RIGHT} <= counts["outcomes"]["good"].keys() <= {RIGHT, QUEUE_FULL}
    assert "answered" in counts["outcomes"]["text up to the limit"]
    assert "INVALID_ARGUMENT" in counts["outcomes"]["text over the limit"]
    # Of memory so few requests say little, and the code may be that it cannot be told.
    assert [line for line in result["failed"] if "memory grows" not in line] == []
    assert code == {"holds": 0, "fails": 1, "cannot tell": 2}[result["verdict"]]


@pytest.mark.usefixtures("on_the_sessions_server")
def test_when_the_server_ends_the_last_requests_are_named(command, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Their numbers, with which --only sends them again, their kinds and how they begin."""
    real, looks = hostile.sample, iter(range(10))

    def dying(server: Server):
        if next(looks) > 1:
            raise ServerError("the server has ended: see its log")
        return real(server)

    monkeypatch.setattr(hostile, "sample", dying)

    code, result = command("--requests", "5000", "--distinct", "4")

    assert code == 1 and result["failed"][0] == "the server has ended: see its log; the last requests were:"
    assert {"number", "kind", "where", "bytes", "begins"} <= result["suspects"][-1].keys()
    assert f"'number': {result['suspects'][-1]['number']}" in capsys.readouterr().out


@pytest.mark.usefixtures("on_the_sessions_server")
def test_named_requests_are_sent_again(command) -> None:
    """Only those, as they were."""
    _, result = command("--only", "3", "5", "--distinct", "4")

    assert result["hostile_requests"] == 2
    sent = {kind for kind in result["counts"]["outcomes"] if kind not in ("good", "flood")}
    assert sent == {Attack.of(1, number, LONGEST).call.kind for number in (3, 5)}


def test_a_number_and_a_seed_make_a_request_again() -> None:
    """The same bytes each time, others for another number."""
    assert [Attack.of(1, number, LONGEST) for number in range(50)] == [
        Attack.of(1, number, LONGEST) for number in range(50)
    ]
    assert Attack.of(1, 2, LONGEST) != Attack.of(2, 2, LONGEST) != Attack.of(2, 3, LONGEST)


def test_texts_go_up_to_the_limit_and_over_it() -> None:
    """By one byte too, as sound UTF-8, and each says what must become of it."""
    calls = [Attack.of(1, number, LONGEST).call for number in range(4000)]

    found = set()
    for call in calls:
        if call.kind in hostile_grpc.AROUND:
            (content,) = service_pb2.ModelInferRequest.FromString(call.payload).raw_input_contents
            found.add((len(content[4:].decode().encode()) - LONGEST, call.good))
    assert found == {(-1, True), (0, True), (1, False), (1_000_000, False)}


@pytest.mark.parametrize(
    ("good", "error", "rightly"),
    [
        (True, None, True),
        (True, Refused("INVALID_ARGUMENT", "too long"), False),
        (True, Refused("UNAVAILABLE", f"Exceeds {FULL_QUEUE}"), True),
        (False, None, False),
        (False, Refused("INVALID_ARGUMENT", "too long"), True),
        (False, Refused("INTERNAL", "too long"), False),
        (None, None, True),
        (None, Refused("INTERNAL", "a broken message"), True),
    ],
)
def test_what_must_be_answered_and_what_must_be_refused(
    good: bool | None, error: Refused | None, rightly: bool
) -> None:
    """A full queue may refuse either."""
    assert hostile._rightly(hostile_grpc.Call("kind", hostile_grpc.INFER, b"", good), error) == rightly


def test_texts_of_every_block_have_a_character_of_each() -> None:
    """Every 128 code points that have an assigned character, surrogates aside."""
    import random

    found = {ord(character) // 128 for text in of_every_block(20, random.Random(1)) for character in text}

    wanted = {point // 128 for point in range(0x110000) if unicodedata.category(chr(point)) not in ("Cn", "Cs")}
    assert found == wanted
