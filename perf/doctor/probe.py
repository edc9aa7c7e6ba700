# SPDX-License-Identifier: Apache-2.0
"""The handler probe: counts what execute() does with 1, 2, 8 and 16 requests. Proof, where the statistics only hint.

Runs the user's model.py, in a process of its own with a time limit, and so only when asked by --repository. Knows
nothing of servers: the config comes from the one that is examined.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from base64 import b64encode
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ensemble.contract import leads_away
from ensemble.errors import ConfigError
from perf.doctor.inputs import ID_RANGES, LONGEST, Text
from perf.doctor.target import Leaf

COUNTS = (1, 2, 8, 16)
# A large model takes a minute to load from a cold disk.
SECONDS = 180.0
# For responses that a handler sends after execute() has returned.
ANSWER_SECONDS = 20.0
# The handler calls its model for nearly every request; a pass for each of a few groups of lengths is no loop.
LOOPED = 0.75


@dataclass(frozen=True)
class Probe:
    """What one handler did.

    runs:  one entry an execute(): requests, passes, tokenizer_calls, ... as probe_child.py writes them
    error: why there are none, or no more of them
    """

    model: str
    runs: Sequence[dict[str, Any]] = field(default_factory=list)
    error: str = ""

    def of(self, key: str, *, alike: bool = False) -> dict[int, int]:
        """Requests of an execute() -> passes or tokenizer_calls of it."""
        return {run["requests"]: run[key] for run in self.runs if run["alike"] is alike}

    def looped(self, key: str, *, alike: bool = False) -> bool | None:
        """Whether calls grow in step with the requests; None where no call was seen or there was never company."""
        calls = self.of(key, alike=alike)
        most = max(calls, default=0)
        if most < 2 or not calls[most]:
            return None
        once = max(1, self.of(key).get(1, 1))
        return calls[most] >= max(2, LOOPED * most * once)

    def padding(self) -> float | None:
        """Share of what went through the passes that was padding, by the masks; None where none was seen."""
        runs = [run for run in self.runs if not run["alike"] and run["slots"]]
        return 1 - runs[-1]["tokens"] / runs[-1]["slots"] if runs else None


def probe(leaf: Leaf, repository: Path, texts: Sequence[Text], cap: int = LONGEST) -> Probe:
    """Run it. Raises ConfigError if the repository has no such handler; its own failures are in the result."""
    file = leaf.config.default_model_filename or "model.py"
    # Both are the server's words, and what they lead to is run.
    if leads_away(leaf.name) or leads_away(file):
        raise ConfigError(
            f"{leaf.name!r}, {file!r}: names that lead out of {repository}, so nothing is run: check the server"
        )
    folder = (repository / leaf.name).resolve()
    versions = sorted(int(path.parent.name) for path in folder.glob(f"*/{file}") if path.parent.name.isdigit())
    if not versions:
        raise ConfigError(f"{folder} has no version folder with a {file}: give the server's model repository")
    most = leaf.max_batch or 1
    job = {
        "config": b64encode(leaf.config.SerializeToString()).decode(),
        "folder": str(folder),
        "version": str(versions[-1]),
        "file": file,
        "kind": "GPU" if leaf.on_gpu else "CPU",
        "counts": [count for count in COUNTS if count <= most],
        "texts": [(text.text, text.tokens) for text in texts],
        "ids": ID_RANGES[0],
        "cap": cap,
        "answer_seconds": ANSWER_SECONDS,
    }
    return _run(leaf.name, job)


def _run(model: str, job: dict[str, Any]) -> Probe:
    with tempfile.TemporaryDirectory(prefix="doctor-") as scratch:
        task, result, log = (Path(scratch) / name for name in ("job.json", "result.json", "log"))
        task.write_text(json.dumps(job), encoding="utf-8")
        child = start(task, result, log)
        try:
            code = child.wait(SECONDS)
        except subprocess.TimeoutExpired:
            return Probe(model, error=f"it took more than {SECONDS:.0f} s")
        finally:
            _end(child)
        if not result.exists():
            tail = log.read_text(errors="replace").strip().splitlines()[-1:] or ["it wrote nothing"]
            return Probe(model, error=f"its process ended with {code}: {tail[0]}")
        found = json.loads(result.read_text(encoding="utf-8"))
    error = f"{found['stage']}: {found['error']}" if "error" in found else ""
    return Probe(model, found["runs"], error)


def start(task: Path, result: Path, log: Path) -> subprocess.Popen[bytes]:
    """The process that runs the handler. It leads a session, so that what it starts can be ended with it."""
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "perf.doctor.probe_child", str(task), str(result)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _end(child: subprocess.Popen[bytes]) -> None:
    """The child and whatever it started."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
