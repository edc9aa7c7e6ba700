# SPDX-License-Identifier: Apache-2.0
"""The handler probe's own manners: what it makes of handlers that fail, hang, or answer too little or too much."""

from __future__ import annotations

from pathlib import Path

import pytest
from probed_handlers import Forked, probed
from tritonclient.grpc import model_config_pb2

from ensemble.errors import ConfigError
from perf.doctor import handlers, probe
from perf.doctor.inputs import built_in_texts
from perf.doctor.target import Leaf


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ("[answer([[1, 2]]) for _ in requests[1:]]", "was handed 1 requests, returned a list of 0 and answered 0"),
        ("[answer([[1, 2]]) for _ in range(len(requests) + 1)]", "returned a list of 2"),
        ("answer_only_first(requests)", "was handed 2 requests, returned nothing and answered 1"),
    ],
)
def test_missing_and_surplus_responses_are_reported(tmp_path: Path, monkeypatch, returned: str, says: str) -> None:
    """Triton fails the whole batch for them."""
    monkeypatch.setattr(probe, "start", Forked)
    monkeypatch.setattr(probe, "ANSWER_SECONDS", 0.2)

    found = probed(
        tmp_path,
        f"""
        def answer_only_first(requests):
            requests[0].get_response_sender().send(answer([[1, 2]]), flags=1)

        class TritonPythonModel:
            def execute(self, requests):
                return {returned}
        """,
    )

    verdicts = list(handlers.verdicts(found))
    assert [one.name for one in verdicts if one.kind == "fault"] == ["responses do not match requests"]
    assert any(says in line for one in verdicts for line in one.evidence)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("import no_such_package_anywhere", "loading model.py: ModuleNotFoundError"),
        ("x = 1", "loading model.py: AttributeError"),
        (
            "class TritonPythonModel:\n    def initialize(self, args):\n        raise OSError('no weights')",
            "no weights",
        ),
        ("class TritonPythonModel:\n    def execute(self, requests):\n        return 1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_handler_that_fails_is_said_and_nothing_is_claimed(tmp_path: Path, monkeypatch, body: str, says: str) -> None:
    """Cannot tell, with its own words."""
    monkeypatch.setattr(probe, "start", Forked)

    (verdict,) = handlers.verdicts(probed(tmp_path, body))

    assert says in verdict.evidence[0] and verdict.name == "cannot tell"


def test_a_handler_that_ends_its_process_ends_no_other(tmp_path: Path) -> None:
    """In a real process of its own: how it ended, and the last that it wrote."""
    (verdict,) = handlers.verdicts(probed(tmp_path, "import os\nprint('bye', flush=True)\nos._exit(3)"))

    assert "its process ended with 3: bye" in verdict.evidence[0] and verdict.name == "cannot tell"


def test_a_handler_that_hangs_is_ended_with_what_it_started(tmp_path: Path, monkeypatch) -> None:
    """The limit is on the whole probe, the start of its process included."""
    monkeypatch.setattr(probe, "SECONDS", 1.0)

    # The handler under examination hangs, for longer than any test may take; the test itself waits 1 s.
    found = probed(tmp_path, "import time\ntime.sleep(600)")

    assert "it took more than 1 s" in found.error


def test_a_repository_without_the_model_is_refused(tmp_path: Path) -> None:
    """With the folder it looked in."""
    with pytest.raises(ConfigError, match="has no version folder with a model.py"):
        probe.probe(Leaf("m", model_config_pb2.ModelConfig(name="m")), tmp_path, built_in_texts())
