# SPDX-License-Identifier: Apache-2.0
"""Watch a running server and heal its models: a stub that died stays dead in this Triton, and everything says ready.

Two looks tell a sick model from a busy one. Its processes: one is gone, though the repository's index calls the model
ready. And a real inference: the server says that a stub is not healthy, a step fails twice in a row, or nothing comes
back but refusals and no batch of the model ends for a minute. While batches end, a full queue and an answer that takes
long are load.

To heal is to end what is left of the model's processes, to unload it and to load it, from the same files: if another
export was installed meanwhile, or a config was edited, a healed model would not fit the others, and the server ends.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from ensemble.contract import ENSEMBLE, Contract
from ensemble.errors import PipelineError, ServerError
from ensemble.launcher.pipeline_question import Fault, PipelineQuestion
from ensemble.launcher.served_files import fingerprint
from ensemble.launcher.server import START_SECONDS, Server
from ensemble.launcher.server_api import NoAnswer, Refused
from ensemble.launcher.stubs import stubs_of


@dataclass(frozen=True)
class Patience:
    """How often is looked, and when it is enough.

    look_seconds:   between two looks at the processes
    ask_seconds:    between two inferences
    answer_seconds: for one of them; longer is slow, which is no fault by itself
    stuck_seconds:  without an answer and without the end of any batch: the model hangs
    failures:       answers in a row that are errors, until the model is healed
    held_seconds:   a model that is sick again sooner was not healed
    tries:          heals in a row that did not hold, until the server is given up
    heals:          in window_seconds, until it is given up, though each of them held
    """

    look_seconds: float = 0.25
    ask_seconds: float = 5.0
    answer_seconds: float = 5.0
    stuck_seconds: float = 60.0
    failures: int = 2
    held_seconds: float = 5.0
    tries: int = 5
    heals: int = 10
    window_seconds: float = 300.0

    def pause(self, tries: int) -> float:
        """Seconds before the next heal, after so many that did not hold."""
        return min(2.0 ** (tries - 1), 8.0) if tries else 0.0


@dataclass
class Health:
    """What is known of one step of the ensemble.

    stubs:     processes it has in health
    failures:  answers in a row that were errors
    progress:  its count of batches when it was first slow, and the time of that
    healed_at: the end of the last heal
    tries:     heals in a row that did not hold
    broken:    why it could not be loaded again, "" if it could
    """

    stubs: int = 0
    failures: int = 0
    progress: tuple[int, float] | None = None
    healed_at: float = float("-inf")
    tries: int = 0
    broken: str = ""


@dataclass
class Supervisor:
    """Of one server that runs. log: told one line an event."""

    server: Server
    contract: Contract
    log: Callable[[str], None]
    patience: Patience = field(default_factory=Patience)

    def __post_init__(self) -> None:
        self._steps = {name: Health() for name in self.contract.models if name != ENSEMBLE}
        self._question = PipelineQuestion(self.server.api, self.contract)
        self._served = self._fingerprint()
        self._heals: list[float] = []
        self._ensemble_failures = 0
        for name, count in self._alive().items():
            self._steps[name].stubs = count

    @property
    def heals(self) -> int:
        """Models healed so far."""
        return len(self._heals)

    def run(self) -> None:
        """Watch until the server ends by itself or is given up, which raises ServerError with the reason."""
        ask_at = 0.0
        while True:
            self.server.wait(self.patience.look_seconds)
            for model, why in self._without_process().items():
                self._heal(model, why)
            if time.monotonic() >= ask_at:
                self._judge(self._question.ask(self.patience.answer_seconds))
                ask_at = time.monotonic() + self.patience.ask_seconds

    def _without_process(self) -> dict[str, str]:
        """The models that lack a process or could not be loaded, and why."""
        alive = self._alive()
        lacking = [name for name, health in self._steps.items() if alive[name] < health.stubs and not health.broken]
        states = self._states() if lacking else {}
        # Somebody with the key who unloads a model has a reason; it is not ready then.
        return {name: "its process died" for name in lacking if states.get(name) == "READY"} | {
            name: health.broken for name, health in self._steps.items() if health.broken
        }

    def _judge(self, fault: Fault | None) -> None:
        """Heal the model that an inference found at fault, once that is sure."""
        if fault is None:
            for health in self._steps.values():
                health.failures, health.progress = 0, None
            self._ensemble_failures = 0
        elif fault.slow:
            self._judge_slow()
        elif fault.model not in self._steps:
            self._ensemble_failures += 1
            if self._ensemble_failures > self.patience.tries:
                raise ServerError(
                    f"giving up: {fault.model} fails, though its steps answer ({fault.why}): start the server again"
                )
        else:
            health = self._steps[fault.model]
            health.failures += 1
            if fault.certain or health.failures >= self.patience.failures:
                self._heal(fault.model, fault.why)

    def _judge_slow(self) -> None:
        """Of the steps, in their order, the first that ends no batch holds up the others."""
        for name, health in self._steps.items():
            try:
                executions = self.server.api.executions(name)
            except (NoAnswer, Refused):
                return
            if health.progress is None or health.progress[0] != executions:
                health.progress = executions, time.monotonic()
            elif time.monotonic() - health.progress[1] > self.patience.stuck_seconds:
                self._heal(name, f"no answer and no batch ended for {self.patience.stuck_seconds:.0f} s")
                return

    def _heal(self, model: str, why: str) -> None:
        """Load a model anew. Raises ServerError where that is done in vain."""
        health, started = self._steps[model], time.monotonic()
        health.tries = health.tries + 1 if started - health.healed_at < self.patience.held_seconds else 0
        recent = [heal for heal in self._heals if started - heal < self.patience.window_seconds]
        if health.tries > self.patience.tries or len(recent) >= self.patience.heals:
            raise ServerError(
                f"giving up: {model} was loaded anew {len(recent)} times within {self.patience.window_seconds:.0f} s "
                f"and is sick again ({why}): see the log above, then start the server again"
            )
        self.server.wait(self.patience.pause(health.tries))
        self._check_files(model, why)
        try:
            for pid in stubs_of(self.server.pid or -1).get(model, ()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.server.api.unload(model)
            self.server.api.load(model, START_SECONDS)
            health.broken = ""
        except (NoAnswer, Refused) as error:
            self.server.wait(0)  # if it has ended, that is the news
            health.broken = f"it could not be loaded anew: {error}"
        self._heals.append(time.monotonic())
        health.healed_at, health.failures, health.progress = time.monotonic(), 0, None
        if health.broken:
            self.log(f"{model} is still sick: {health.broken}")
            return
        self._check_files(model, why)
        self.log(f"healed {model} in {time.monotonic() - started:.1f} s ({why}); {self.heals} since the server started")

    def _check_files(self, model: str, why: str) -> None:
        if self._fingerprint() != self._served:
            raise ServerError(
                f"giving up: {model} is sick ({why}), and the repository no longer holds what this server was started "
                "with: start it again"
            )

    def _fingerprint(self) -> str:
        try:
            return fingerprint(self.server.options.repository, self.contract.models)
        except OSError as error:
            return str(error)

    def _alive(self) -> Counter[str]:
        """Processes of each step that has any."""
        stubs = stubs_of(self.server.pid or -1)
        return Counter({name: len(pids) for name, pids in stubs.items() if name in self._steps})

    def _states(self) -> dict[str, str]:
        try:
            return self.server.api.states()
        except PipelineError:
            return {}
