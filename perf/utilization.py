# SPDX-License-Identifier: Apache-2.0
"""How busy the GPUs are while something runs, by NVIDIA's driver, sampled in a thread. Knows nothing of what runs.

It is the share of the time in which any kernel ran, not how full the GPU was: a loop over single requests can show
90 % of it and do a tenth of the work.
"""

from __future__ import annotations

import os
import statistics
from contextlib import suppress
from typing import Any

from ensemble.launcher.gpu import VISIBLE
from perf.sampling import Sampler


class Utilization(Sampler):
    """`with Utilization() as used: ...`; then used.percent: the mean over the time and the GPUs, None if unknown."""

    percent: float | None = None

    def sample(self) -> None:
        """At every tick; the driver itself averages over a sixth of a second or more before it."""
        try:
            import pynvml  # here, because a machine without a GPU may not have it
        except ImportError:
            return
        # No driver, or a part of a GPU (MIG), for which the driver does not say.
        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            try:
                handles = _handles(pynvml)
                samples = []
                for _ in self.ticks():
                    samples += [pynvml.nvmlDeviceGetUtilizationRates(handle).gpu for handle in handles]
                self.percent = statistics.fmean(samples) if samples else None
            finally:
                pynvml.nvmlShutdown()


def _handles(pynvml: Any) -> list[Any]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, by number or by full UUID."""
    names = os.environ.get(VISIBLE)
    if names is None:
        return [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    return [
        pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else pynvml.nvmlDeviceGetHandleByUUID(name)
        for name in map(str.strip, names.split(","))
        if name
    ]
