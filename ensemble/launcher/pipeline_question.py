# SPDX-License-Identifier: Apache-2.0
"""One small text through the ensemble, or through its steps one by one, to learn which model does not answer.

Follows the tensors of the configs, so it holds for every classifier. Knows nothing of processes or of healing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ensemble.client.dead_process import says_dead
from ensemble.contract import ENSEMBLE, Contract
from ensemble.errors import ServerError
from ensemble.launcher.server_api import NoAnswer, Refused, ServerApi, Tensor

TEXT: Tensor = {"name": "text", "shape": [1, 1], "datatype": "BYTES", "data": ["Is anybody there?"]}

# Too much to do; or a step that hangs, behind which the queue has filled up.
_FULL = "maximum queue size"
# What a refusal says that is no fault of the model: somebody with the key has unloaded it, say.
_NO_FAULT = (
    "timeout expired",
    "unknown model",
    "no available versions",
    "is not ready",
    "is stopping",
)
# Triton calls the instances of a model by its name and numbers.
_INSTANCE = re.compile(r"(?:instance|process) '(\w+?)(?:_\d+)+'")


@dataclass(frozen=True)
class Fault:
    """A model that does not answer.

    why:     for the log
    certain: the server itself says that its process is dead; else it may be the one request, or mere load
    slow:    nothing came back in time, or the queue is full
    """

    model: str
    why: str
    certain: bool = False
    slow: bool = False


class PipelineQuestion:
    """Asked of one server again and again."""

    def __init__(self, api: ServerApi, contract: Contract) -> None:
        self._api, self._contract = api, contract

    def check_answer(self, labels: int, seconds: float) -> None:
        """Raises ServerError unless the ensemble answers with as many probabilities as there are labels."""
        try:
            outputs = {tensor["name"]: tensor for tensor in self._api.infer(ENSEMBLE, [TEXT], seconds)}
        except (NoAnswer, Refused) as error:
            raise ServerError(f"the server is ready and does not classify ({error}): see its log above") from error
        if outputs["probabilities"]["shape"] != [1, labels]:
            raise ServerError(
                f"the model answers with {outputs['probabilities']['shape'][-1]} probabilities, labels.txt has "
                f"{labels} labels: run make export"
            )

    def ask(self, seconds: float) -> Fault | None:
        """None if the ensemble answers, or refuses for a reason that is no fault; else the model that is at fault."""
        answer = self._ask_model(ENSEMBLE, [TEXT], seconds)
        if not isinstance(answer, Fault):
            return None
        return answer if answer.slow or answer.model != ENSEMBLE else self._ask_steps(seconds) or answer

    def _ask_model(self, model: str, inputs: list[Tensor], seconds: float) -> list[Tensor] | Fault | None:
        """Its outputs, the fault, or None where it refuses for a reason that is no fault."""
        try:
            return self._api.infer(model, inputs, seconds)
        except NoAnswer as error:
            return Fault(model, str(error), slow=True)
        except Refused as error:
            text = str(error)
            if _FULL in text:
                return Fault(model, text, slow=True)
            if any(words in text for words in _NO_FAULT):
                return None
            if says_dead(text):
                instance = _INSTANCE.search(text)
                return Fault(instance[1] if instance else model, text, certain=True)
            return Fault(model, text)

    def _ask_steps(self, seconds: float) -> Fault | None:
        known = {TEXT["name"]: TEXT}
        for step in self._contract.models[ENSEMBLE].ensemble_scheduling.step:
            inputs = [{**known[edge], "name": name} for name, edge in step.input_map.items()]
            outputs = self._ask_model(step.model_name, inputs, seconds)
            if not isinstance(outputs, list):
                return outputs
            known |= {
                step.output_map[tensor["name"]]: tensor for tensor in outputs if tensor["name"] in step.output_map
            }
        return None
