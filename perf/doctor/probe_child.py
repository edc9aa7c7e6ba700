# SPDX-License-Identifier: Apache-2.0
"""The handler probe's child process: loads one model.py, hands its execute() requests and counts what it does.

    python -m perf.doctor.probe_child JOB RESULT

Both are JSON files. It runs the user's code, which is why it is a process of its own (probe.py gives it a time limit).
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
import time
import traceback
from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np
from tritonclient.grpc import model_config_pb2

from perf.doctor import stand_in_module
from perf.doctor.bls import answer_from_configs
from perf.doctor.call_counts import PASS, TOKENIZE, Calls
from perf.doctor.config_json import as_json
from perf.doctor.inputs import InputMaker, Text
from perf.doctor.stand_in import FINAL, InferenceRequest, Tensor


def main(job_file: str, result_file: str) -> None:
    """One handler."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    result: dict[str, Any] = {"runs": []}
    try:
        _probe(job, result)
    except BaseException as error:
        result["error"] = _reason(error)
    # The first was there to be slow, unless it is all there is.
    result["runs"] = result["runs"][1:] or result["runs"]
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")


def _probe(job: dict[str, Any], result: dict[str, Any]) -> None:
    config = model_config_pb2.ModelConfig.FromString(b64decode(job["config"]))
    folder = Path(job["folder"])
    calls = Calls()
    sys.modules["triton_python_backend_utils"] = stand_in_module.build(str(folder / job["version"]))
    InferenceRequest.answer = staticmethod(answer_from_configs(folder.parent))
    result["stage"] = "loading model.py"
    model = _load(folder / job["version"] / job["file"])()
    calls.wrap_all()
    result["stage"] = "initialize()"
    if hasattr(model, "initialize"):
        model.initialize(_args(config, folder, job))
    calls.wrap_all()
    maker = InputMaker(config, [Text(*text) for text in job["texts"]], ids=tuple(job["ids"]))
    maker.cap = job["cap"]
    # What loads lazily does so in the first, which is not counted.
    for count, alike in [(1, True), *((count, False) for count in job["counts"]), (job["counts"][-1], True)]:
        result["stage"] = f"execute() with {count} requests"
        calls.wrap_all()
        run = _run(model, maker, calls, count, alike, job["answer_seconds"])
        result["runs"].append(run)
        if run["answered"] < count:
            break  # proof enough
    if hasattr(model, "finalize"):
        model.finalize()


def _load(file: Path) -> Any:
    """The handler's class. The version folder comes first on sys.path, then the model's, as with Triton's stub."""
    sys.path[:0] = [str(file.parent), str(file.parent.parent)]
    spec = importlib.util.spec_from_file_location("model", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["model"] = module
    spec.loader.exec_module(module)
    return module.TritonPythonModel


def _args(config: Any, folder: Path, job: dict[str, Any]) -> dict[str, str]:
    return {
        "model_config": json.dumps(as_json(config)),
        "model_instance_kind": job["kind"],
        "model_instance_name": f"{config.name}_0_0",
        "model_instance_device_id": "0",
        "model_repository": str(folder),
        "model_version": job["version"],
        "model_name": config.name,
    }


def _run(model: Any, maker: InputMaker, calls: Calls, count: int, alike: bool, patience: float) -> dict[str, Any]:
    made = [maker.make(maker.alike() if alike else index) for index in range(count)]
    outputs = [field.name for field in maker.config.output]
    requests = [
        InferenceRequest(
            request_id=f"doctor-{index}",
            inputs=[Tensor(name, np.array(array)) for name, array in inputs.arrays.items()],
            requested_output_names=outputs,
            model_name=maker.config.name,
        )
        for index, inputs in enumerate(made)
    ]
    calls.reset()
    InferenceRequest.most_under_way = 0
    returned = model.execute(requests)
    if inspect.isawaitable(returned):
        import asyncio

        async def wait() -> Any:
            return await returned

        returned = asyncio.run(wait())
    answers = _answers(returned, requests, patience)
    return {
        "requests": count,
        "alike": alike,
        "passes": calls.most(PASS),
        "tokenizer_calls": calls.most(TOKENIZE),
        "pass_seconds": calls.seconds[PASS],
        "tokenizer_seconds": calls.seconds[TOKENIZE],
        "slots": calls.slots,
        "tokens": calls.tokens,
        "shapes": calls.shapes[:4],
        # Requests to other models that were under way together.
        "asked_together": InferenceRequest.most_under_way,
        **answers,
    }


def _answers(returned: Any, requests: list[InferenceRequest], patience: float) -> dict[str, Any]:
    """How many responses came back, by which way, and whether any was an error.

    patience: seconds for a handler that answers from a thread of its own, once execute() has returned.
    """
    listed = list(returned) if returned is not None else []
    deadline = time.monotonic() + patience
    while returned is None and not all(r.sender.final for r in requests) and time.monotonic() < deadline:
        time.sleep(0.01)
    given = [response for response in listed if response is not None]
    given += [response for request in requests for response in request.sender.sent]
    errors = [str(response.error().message()) for response in given if response.has_error()]
    return {
        # A list that is as long as the requests', or nothing and a final flag for each.
        "listed": None if returned is None else len(listed),
        "answered": sum(map(_answered, [*listed, *[None] * len(requests)], requests)),
        "errors": len(errors),
        "first_error": errors[0].splitlines()[0] if errors and errors[0] else "",
        "rows": sum(_rows(response) for response in given),
    }


def _answered(response: Any, request: InferenceRequest) -> bool:
    return response is not None or request.sender.final or bool(request.sender.sent)


def _rows(response: Any) -> int:
    tensors = response.output_tensors()
    return int(tensors[0].shape()[0]) if tensors and tensors[0].shape() else 0


def _reason(error: BaseException) -> str:
    """The error and the innermost line of the handler that it came through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith(".py")]
    place = f" (line {frames[-1].lineno} of {Path(frames[-1].filename).name})" if frames else ""
    return f"{type(error).__name__}: {error}".splitlines()[0] + place


if __name__ == "__main__":
    assert FINAL  # the stand-in's, not Triton's
    main(*sys.argv[1:])
