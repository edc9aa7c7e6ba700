# SPDX-License-Identifier: Apache-2.0
"""What measurements print while they run."""

from __future__ import annotations

import re
import time

import pytest
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

from perf import terminal


def test_a_log_gets_a_line_of_progress_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where bars do not show: how far it is by then, and none once it is over."""
    monkeypatch.setattr(terminal, "LINE_SECONDS", 0.05)

    with terminal.progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()) as bars:
        task, said = bars.add_task("texts", total=1000), ""
        for done in (250, 500):
            bars.update(task, completed=done)
            deadline = time.monotonic() + 10
            while not re.search(rf"^texts .* {done}/1000 *$", said, re.MULTILINE):
                assert time.monotonic() < deadline, said
                time.sleep(0.01)
                said += capsys.readouterr().out
    capsys.readouterr()
    time.sleep(0.2)

    assert "\x1b" not in said
    assert capsys.readouterr().out == ""
