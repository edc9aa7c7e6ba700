# SPDX-License-Identifier: Apache-2.0
"""The batching library in the real server: batches that stay within attention_budget.

What a batch held is known from a handler in the classifier's place that writes down the shapes of every execute().
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpc
import tritonclient.grpc.aio as grpc_aio
from batching_library import ENGINE_BATCHING, made_library, make_library
from conftest import ROOT, Reference, serving
from triton_requests import TOLERANCE, in_flight_together, tensor_input, texts_input

from ensemble.errors import ServerError
from ensemble.launcher.admin_key import GRPC_HEADER
from ensemble.launcher.options import ServerOptions
from ensemble.launcher.server import Server
from ensemble.samples import load_samples

BUDGET = 16 * 512**2

Shape = tuple[int, int]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_library(tmp_path_factory.mktemp("library"), ENGINE_BATCHING)


def test_a_missing_compiler_is_told_in_one_line(tmp_path: Path) -> None:
    """make says what to install, and leaves nothing behind."""
    made = make_library(tmp_path, ENGINE_BATCHING, "CC=no-such-compiler -m64")

    assert made.returncode != 0
    assert made.stderr.splitlines()[0] == "there is no C compiler (no-such-compiler -m64): install gcc, or set CC="
    assert not (tmp_path / ENGINE_BATCHING).exists()


RECORDING_HANDLER = """
import json, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.record = open(parameters["record"]["string_value"], "a", buffering=1)

    def execute(self, requests):
        shapes = [pb_utils.get_input_tensor_by_name(request, "input_ids").as_numpy().shape for request in requests]
        print(json.dumps(shapes), file=self.record)
        time.sleep(0.01)  # so that requests pile up, as before a busy GPU
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor(name, np.zeros((rows, 2), np.float32)) for name in ("logits", "probabilities")]
            )
            for rows, _ in shapes
        ]
"""

BAD_BUDGETS = {
    "absent": (None, "is missing"),
    "empty": ("", 'is ""'),
    "negative": ("-1", 'is "-1"'),
    "no-number": ("many", 'is "many"'),
    "a-float": ("4e6", 'is "4e6"'),
    "trailing": ("4194304 rows", 'is "4194304 rows"'),
    "leading": (" 4194304", 'is " 4194304"'),
    "overflow": ("1000000000000000000", 'is "1000000000000000000"'),
    "quoted": ('"4194304"', r'is "\"4194304\""'),
    "only-quoted-elsewhere": (None, "is missing"),
}  # fmt: skip


def add_recording_model(repository: Path, name: str, budget: str | None, library: Path | None, more: str = "") -> None:
    """A model with the classifier's CPU config, the recording handler and, if given, the library."""
    model = repository / name
    (model / "1").mkdir(parents=True)
    (model / "1/model.py").write_text(RECORDING_HANDLER)
    config = (ROOT / "model_repository/classifier/configs/cpu.pbtxt").read_text()
    config, found = re.subn(
        r'\{ key: "attention_budget" .*', parameter("record", str(repository / f"{name}.jsonl")), config
    )
    assert found == 1
    if budget is not None:
        more += f"parameters [ {parameter('attention_budget', budget)} ]"
    (model / "config.pbtxt").write_text(config.replace('name: "classifier"', f'name: "{name}"') + more)
    if library:
        shutil.copy(library, model)


def parameter(key: str, value: str) -> str:
    """One entry of a config's parameters; JSON's quoting is that of text format too."""
    return f"{{ key: {json.dumps(key)} value {{ string_value: {json.dumps(value)} }} }}"


@pytest.fixture(scope="module")
def models(repository: Path, library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository with the library beside the classifier, within a budget of one row of 512, and recording models."""
    copy = Path(shutil.copytree(repository, tmp_path_factory.mktemp("bounded") / "model_repository", symlinks=True))
    shutil.copy(library, copy / "classifier")
    config = copy / "classifier/configs/cpu.pbtxt"
    before, after = (f'"attention_budget" value {{ string_value: "{budget}" }}' for budget in (0, 512**2))
    assert before in config.read_text()
    config.write_text(config.read_text().replace(before, after))
    add_recording_model(copy, "bounded", str(BUDGET), library)
    add_recording_model(copy, "unbounded", str(BUDGET), None)
    for name, (budget, _) in BAD_BUDGETS.items():
        elsewhere = parameter('a"{', '"attention_budget": {"string_value": "4194304"}}\\')
        add_recording_model(copy, name, budget, library, f"parameters [ {elsewhere} ]" if "elsewhere" in name else "")
    return copy


@pytest.fixture(scope="module")
def bounded_server(models: Path) -> Iterator[Server]:
    options = ServerOptions(
        models,
        config_name="cpu",
        models=("text_classifier", "bounded", "unbounded"),
        http_port=0,
        grpc_port=0,
        metrics_port=0,
    )
    with serving(options) as server:
        yield server


@pytest.fixture
def raw(bounded_server: Server) -> Iterator[grpc.InferenceServerClient]:
    with grpc.InferenceServerClient(bounded_server.url) as client:
        yield client


@dataclass(frozen=True)
class Batch:
    """The requests of one execute()."""

    requests: list[Shape]

    @property
    def rows(self) -> int:
        return sum(rows for rows, _ in self.requests)

    @property
    def cost(self) -> int:
        return self.rows * max(length for _, length in self.requests) ** 2


@pytest.fixture
def batches_of(bounded_server: Server, models: Path) -> Callable[..., list[Batch]]:
    def run(model: str, shapes: Sequence[Shape], in_flight: int = 64) -> list[Batch]:
        """Send these, each as soon as another is answered; returns the batches that they made."""
        record = models / f"{model}.jsonl"
        before = len(record.read_text().splitlines())
        asyncio.run(load(bounded_server.url, model, shapes, in_flight))
        batches = [Batch(json.loads(line)) for line in record.read_text().splitlines()[before:]]
        assert sum(batch.rows for batch in batches) == sum(rows for rows, _ in shapes)
        return batches

    return run


async def load(url: str, model: str, shapes: Sequence[Shape], in_flight: int) -> None:
    waiting = iter(shapes)

    async def worker(client: grpc_aio.InferenceServerClient) -> None:
        for shape in waiting:
            await client.infer(model, request_of(shape, grpc_aio.InferInput))

    async with grpc_aio.InferenceServerClient(url) as client:
        await asyncio.gather(*(worker(client) for _ in range(in_flight)))


def request_of(shape: Shape, kind: type = grpc.InferInput) -> list[object]:
    return [
        tensor_input("input_ids", np.ones(shape, dtype=np.int64), kind),
        tensor_input("length_carrier", np.zeros(shape, dtype=np.int32), kind),
    ]


def mixed_shapes(count: int) -> list[Shape]:
    """Mostly short, one in ten long; one in seven requests has several rows."""
    rng = random.Random(8)
    return [
        (
            rng.randint(2, 8) if rng.random() < 0.15 else 1,
            rng.randint(200, 512) if rng.random() < 0.1 else rng.randint(3, 60),
        )
        for _ in range(count)
    ]


def test_batches_stay_within_the_budget(batches_of) -> None:
    """1,000 requests of 3 to 512 tokens, 64 in flight: without the library tens of batches are over the budget.

    With it, one may be: where a waiting batch has refused a request for a second, which takes a machine that stood still.
    """
    shapes = mixed_shapes(1000)

    without = [batch for batch in batches_of("unbounded", shapes) if batch.cost > BUDGET]
    batches = batches_of("bounded", shapes)

    assert len(without) > 10
    over = [batch for batch in batches if batch.cost > BUDGET and len(batch.requests) > 1]
    assert len(over) <= 1
    assert all(batch.rows <= 64 for batch in over)
    # It is the budget that ends them, not that there are few requests.
    assert sum(batch.rows for batch in batches) / len(batches) > 16


def test_a_request_over_the_budget_runs_alone(batches_of) -> None:
    """20 rows of 512 are 1.25 times the budget: answered, and in a batch with nothing else."""
    over = (20, 512)
    shapes = [over if index % 25 == 0 else (1, 20) for index in range(250)]

    batches = [batch for batch in batches_of("bounded", shapes) if list(over) in batch.requests]

    assert [batch.requests for batch in batches] == [[list(over)]] * 10


def test_short_texts_share_batches_as_without_the_library(batches_of) -> None:
    """640 requests of 20 tokens at once: the budget would allow 10,485 in a batch, so most batches are full."""
    for model in ("unbounded", "bounded"):
        batches = batches_of(model, [(1, 20)] * 640, in_flight=640)

        assert [batch.rows for batch in batches].count(64) >= 5


def test_answers_are_right_with_the_library_loaded(raw, reference: Reference) -> None:
    """64 real texts at once, batched within one row of 512: the Hugging Face model's logits, each in its own answer."""
    texts = [sample.text for sample in load_samples()[:64]]

    results = in_flight_together(raw, "text_classifier", [[texts_input([text])] for text in texts])

    logits = np.concatenate([result.as_numpy("logits") for result in results])
    np.testing.assert_allclose(logits, reference(texts), atol=TOLERANCE)


@pytest.mark.parametrize("name", BAD_BUDGETS)
def test_a_bad_budget_refuses_the_model(bounded_server: Server, raw, name: str) -> None:
    """The reason has the parameter, what is wrong with it and what to write, in one line."""
    with pytest.raises(grpc.InferenceServerException) as caught:
        raw.load_model(name, headers={GRPC_HEADER: bounded_server.options.admin_key})

    assert f"Invalid argument: {reason(BAD_BUDGETS[name][1])}" in caught.value.message().splitlines()[0]


def test_a_bad_budget_ends_the_start_of_a_server(models: Path) -> None:
    """ServerError has the same line."""
    options = ServerOptions(models, models=("negative",), http_port=0, grpc_port=0, metrics_port=0)

    with pytest.raises(ServerError) as caught:
        Server(options).start()

    assert reason(BAD_BUDGETS["negative"][1]) in str(caught.value)


def reason(wrong: str) -> str:
    return (
        f"parameter attention_budget {wrong}: write what rows x longest^2 of a batch may come to, a whole number of at "
        'most 18 digits ("0": no bound), as in parameters { key: "attention_budget" value { string_value: "4194304" } }'
    )
