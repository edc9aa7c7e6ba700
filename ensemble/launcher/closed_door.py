# SPDX-License-Identifier: Apache-2.0
"""Refuse what comes and answer what is in flight: how a server is emptied before it is told to stop.

Left to itself, Triton stops all models at once: what an ensemble's first step has accepted, its second then refuses.
Unloading the ensemble first is no better: an answer with class labels needs the model's name to be in service when it
leaves. So the first step is replaced, in service, by a handler that refuses everything. A request that is in flight
keeps the models it began with, the old first step among them, until it is answered; when the last one is, Triton ends
the old step's process. Which is how to know.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from ensemble.launcher.server_api import ServerApi
from ensemble.launcher.stubs import stubs_of

# Runs in a stub, for the seconds that a server has left.
REFUSE = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        # An error each: two responses that share one arrive as garbage.
        return [pb_utils.InferenceResponse(output_tensors=[], error=self.refusal()) for request in requests]

    def refusal(self):
        return pb_utils.TritonError("the server is stopping: ask another one", pb_utils.TritonError.UNAVAILABLE)
"""

LOAD_SECONDS = 10.0


def drain(api: ServerApi, pid: Callable[[], int | None], models: Iterable[str], seconds: float) -> bool:
    """True once nothing that went through the ensembles among `models` is in flight; False if it is after `seconds`.

    pid: of the server, None once it has ended. Raises NoAnswer or Refused if the server does not cooperate.
    """
    firsts = {first for model in models if (first := api.first_step(model))}
    old = {stub for first in firsts for stub in stubs_of(pid() or -1).get(first, ())}
    for first in firsts:
        api.replace(first, REFUSE, LOAD_SECONDS)
    deadline = time.monotonic() + seconds
    while (server := pid()) and time.monotonic() < deadline:
        if not old & set().union(*stubs_of(server).values()):
            return True
        time.sleep(0.02)
    return False
