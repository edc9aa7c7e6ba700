# SPDX-License-Identifier: Apache-2.0
"""What tritonserver wrote before it ended, read for the one line that says why."""

from __future__ import annotations

import re
from collections.abc import Iterable

# What every start without a GPU says; never why one failed.
GPU_NOISE = re.compile(
    r"CudaDriverHelper|pinned|unable to create stream|CUDA driver|NVML|DCGM|unable to get.*device count"
)


def crash(written: Iterable[str]) -> str:
    """That a server which was running crashed, "" if it did not. A start that fails has a reason besides."""
    for line in tuple(written):
        # SIGTERM and SIGINT, 15 and 2, it was sent.
        if found := re.fullmatch(r"Signal \((?!15\)|2\))\d+\) received\.", line.strip()):
            return f'it crashed, "{found[0]}": deploy/RUNBOOK.md has what is known of that'
    return ""


def reason(written: Iterable[str]) -> str:
    """The line that says why, as far as one can be told. written: may still grow, in another thread."""
    lines = [line for line in tuple(written) if line.strip() and not GPU_NOISE.search(line)]
    for line in lines:
        # What a model's Python raised. The log escapes quotes, and writes the traceback behind it on the same line.
        if found := re.search(r"\b\w+(?:Error|Exception): (.+)", line):
            message = found[1] if "ConfigError" in found[0] else found[0]
            return message.split(r"\n")[0].replace(r"\"", '"')
    errors = [re.sub(r"^[EF]\d{4} \S+ \d+ \S+\] ", "", line) for line in lines if re.match(r"[EF]\d{4} ", line)]
    if errors:
        return errors[0].strip('"').split(r"\n")[0].replace(r"\"", '"')
    return " / ".join(lines[-5:]) or "it wrote nothing"
