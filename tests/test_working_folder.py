# SPDX-License-Identifier: Apache-2.0
"""What a server that was killed leaves behind, and who clears it away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ensemble.launcher.runtime import STUB
from ensemble.launcher.working_folder import WorkingFolder


@pytest.mark.parametrize("server_lives", [False, True])
def test_a_stub_that_outlived_its_server_is_ended_by_the_next_start(
    server_lives: bool, tmp_path: Path, monkeypatch
) -> None:
    """It may wait for a lock for ever, and keeps its server's folder from being cleared away; another server's lives on."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    handler = tmp_path / "served/tokenizer/1/model.py"
    handler.parent.mkdir(parents=True)
    handler.write_text("import sys, time; print(flush=True); time.sleep(60)")
    first = WorkingFolder(tmp_path / "served")
    stub = [f"/x/{STUB}", str(first.repository / "tokenizer/1/model.py")]
    server = [
        "tritonserver",
        "-c",
        "import time; print(flush=True); time.sleep(60)",
        f"--model-repository={first.repository}",
    ]
    processes = [
        subprocess.Popen(command, executable=sys.executable, pass_fds=[first.lock], stdout=subprocess.PIPE)
        for command in ([stub, server] if server_lives else [stub])
    ]
    for process in processes:
        process.stdout.readline()
    os.close(first.lock)  # this launcher is gone

    WorkingFolder(tmp_path / "served").remove()

    try:
        if not server_lives:
            assert processes[0].wait(timeout=30) == -signal.SIGKILL
            WorkingFolder(tmp_path / "served").remove()
        assert [process.poll() for process in processes] == ([None, None] if server_lives else [-signal.SIGKILL])
        assert first.path.exists() is server_lives
    finally:
        for process in processes:
            process.kill()
            process.communicate()
