# SPDX-License-Identifier: Apache-2.0
"""Whether this machine has the room that a server's Python models need, known before it starts."""

from __future__ import annotations

import shutil

from ensemble.contract import Contract
from ensemble.errors import ServerError
from ensemble.launcher.options import SHM_BYTES
from ensemble.launcher.working_folder import SHARED_MEMORY


def check_shared_memory(contract: Contract, gpus: int) -> None:
    """Raises ServerError if /dev/shm has no room for the Python models' instances. gpus: that the server will see."""
    instances = sum(_instances(config, gpus) for config in contract.models.values() if config.backend == "python")
    need, free = instances * SHM_BYTES, shutil.disk_usage(SHARED_MEMORY).free
    if free < need:
        raise ServerError(
            f"{SHARED_MEMORY} has {free // 1_000_000} MB free, {instances} instances of Python models need "
            f"{need // 1_000_000} MB: free some, or give the container more (shm_size in compose.yaml, --shm-size)"
        )


def _instances(config: object, gpus: int) -> int:
    """Of one model: Triton makes `count` of a group on every GPU that it may use, else on the CPU."""
    groups = getattr(config, "instance_group", None)
    if not groups:
        return max(1, gpus)
    cpu = groups[0].KIND_CPU
    return sum(max(1, group.count) * (1 if group.kind == cpu else max(1, gpus)) for group in groups)
