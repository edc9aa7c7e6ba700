# SPDX-License-Identifier: Apache-2.0
"""A server's HTTP API as its launcher uses it: with the key, one connection a call. Knows nothing of what is served."""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import Sequence
from typing import Any

from ensemble.errors import PipelineError
from ensemble.launcher.admin_key import HTTP_HEADER

# A tensor as JSON: name, shape, datatype, data.
Tensor = dict[str, Any]

CALL_SECONDS = 10.0


class NoAnswer(PipelineError):
    """Nothing came back in time, or nobody is there."""


class Refused(PipelineError):
    """The server answered with an error, in its own words."""


class ServerApi:
    """Of one server. Every call raises NoAnswer or Refused."""

    def __init__(self, host: str, port: int, key: str) -> None:
        self._host, self._port, self._key = host, port, key

    def infer(self, model: str, inputs: Sequence[Tensor], seconds: float) -> list[Tensor]:
        """The outputs of one inference."""
        answer = self._call("POST", f"/v2/models/{model}/infer", {"inputs": list(inputs)}, seconds)
        return list(answer["outputs"])

    def is_ready(self, model: str) -> bool:
        """Whether the server says so; it does not notice a stub that died."""
        try:
            self._call("GET", f"/v2/models/{model}/ready")
        except Refused:
            return False
        return True

    def first_step(self, model: str) -> str | None:
        """The Python model that takes an ensemble's requests first; None for what is no such ensemble."""
        steps = self._config(model).get("ensemble_scheduling", {}).get("step", [])
        first = str(steps[0]["model_name"]) if steps else None
        return first if first and self._config(first).get("backend") == "python" else None

    def executions(self, model: str) -> int:
        """Batches that have ended, well or not, since it was loaded."""
        stats = self._call("GET", f"/v2/models/{model}/stats")["model_stats"][0]
        return int(stats["execution_count"]) + int(stats["inference_stats"]["fail"]["count"])

    def states(self) -> dict[str, str]:
        """Every model of the repository that was ever loaded: READY, LOADING, UNLOADING or UNAVAILABLE."""
        models = self._call("POST", "/v2/repository/index", {})
        return {entry["name"]: entry["state"] for entry in models if "state" in entry}

    def load(self, model: str, seconds: float) -> None:
        """Returns once it is loaded. A model that is loaded and did not change is left alone."""
        self._call("POST", f"/v2/repository/models/{model}/load", {}, seconds)

    def unload(self, model: str) -> None:
        """Returns at once; requests in flight are still answered, and states() says when they have been."""
        self._call("POST", f"/v2/repository/models/{model}/unload", {})

    def replace(self, model: str, handler: str, seconds: float) -> None:
        """Put another handler into a Python model's place, with the same config and without a gap."""
        config = self._config(model)
        # Where no more than the instances change, Triton keeps the files that it has loaded.
        config["parameters"] = {**config.get("parameters", {}), "replaced": {"string_value": "true"}}
        source = base64.b64encode(handler.encode()).decode()
        parameters = {"config": json.dumps(config), "file:1/model.py": source}
        self._call("POST", f"/v2/repository/models/{model}/load", {"parameters": parameters}, seconds)

    def _config(self, model: str) -> dict[str, Any]:
        return dict(self._call("GET", f"/v2/models/{model}/config"))

    def _call(self, method: str, path: str, body: Any = None, seconds: float = CALL_SECONDS) -> Any:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=seconds)
        try:
            headers = {HTTP_HEADER: self._key, "Connection": "close"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            text = response.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswer(f"no answer within {seconds:g} s ({error or type(error).__name__})") from error
        finally:
            connection.close()
        if response.status != http.client.OK:
            raise Refused(_message(text) or f"HTTP status {response.status}")
        return json.loads(text) if text else {}


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        return text.strip()
