# SPDX-License-Identifier: Apache-2.0
"""The handler probe, on handlers written as tutorials write them: what it counts, and what the counts mean."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from probed_handlers import IDS, TEXT, TORCH, Forked, probed

from perf.doctor import handlers, probe
from perf.doctor.probe import Probe

IN_STEP = {1: 1, 2: 2, 8: 8, 16: 16}
ONCE = {1: 1, 2: 1, 8: 1, 16: 1}
APART, ONE_BY_ONE = "batches taken apart", "tokenizes one by one"


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe's process is not the point here."""
    monkeypatch.setattr(probe, "start", Forked)


def names(found: Probe) -> list[str]:
    return [verdict.name for verdict in handlers.verdicts(found) if verdict.kind == "fault"]


@dataclass(frozen=True)
class Tutorial:
    """A handler; its forward passes and tokenizer calls by requests (None: not looked at); the faults it has."""

    name: str
    body: str
    faults: tuple[str, ...] = ()
    passes: dict[int, int] | None = None
    calls: dict[int, int] | None = None
    inputs: str = IDS
    extra: str = ""

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


SQUEEZE = (
    TORCH
    + """
class TritonPythonModel:
    def initialize(self, args):
        self.config = json.loads(args["model_config"])
        kind = pb_utils.get_output_config_by_name(self.config, "logits")["data_type"]
        self.dtype = pb_utils.triton_string_to_numpy(kind)
        self.net = torch.jit.script(Net()).eval()

    def execute(self, requests):
        responses = []
        for request in requests:
            ids = torch.as_tensor(get(request))
            with torch.no_grad():
                logits = self.net(ids).squeeze(0).numpy().astype(self.dtype)
            responses.append(pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("logits", logits)]))
        return responses
"""
)

# model.forward() goes around the module's own call; its layers give it away.
COMPREHENSION = (
    TORCH
    + """
class TritonPythonModel:
    def initialize(self, args):
        self.net = Net().eval()

    def execute(self, requests):
        return [answer(self.net.forward(torch.from_dlpack(
            pb_utils.get_input_tensor_by_name(r, "input_ids").to_dlpack())).detach()) for r in requests]
"""
)

# A pass for each request, in threads: as many passes, only side by side.
THREADS = (
    TORCH
    + """
from concurrent.futures import ThreadPoolExecutor

class TritonPythonModel:
    def initialize(self, args):
        self.net, self.pool = Net().eval(), ThreadPoolExecutor(4)

    def execute(self, requests):
        return list(self.pool.map(lambda r: answer(self.net(torch.as_tensor(get(r))).detach()), requests))
"""
)

# One pass, and a loop over its rows that runs no model.
POSTPROCESSING = (
    TORCH
    + """
class TritonPythonModel:
    def initialize(self, args):
        self.net = Net().eval()

    def execute(self, requests):
        rows = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(get(r)[0]) for r in requests], batch_first=True)
        logits = self.net(rows).detach().numpy()
        return [answer([[float(value) * 2 for value in row]]) for row in logits]
"""
)

# A transformers tokenizer called for each request; the Rust one inside it is not counted again.
TOKENIZER = """
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

class TritonPythonModel:
    def initialize(self, args):
        rust = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
        rust.pre_tokenizer = pre_tokenizers.Whitespace()
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=rust, unk_token="[UNK]", pad_token="[UNK]")

    def execute(self, requests):
        responses = []
        for request in requests:
            texts = [text.decode("utf-8") for text in get(request, "text")[:, 0]]
            ids = self.tokenizer(texts, return_tensors="np", padding=True)["input_ids"]
            responses.append(answer(ids[:, :2]))
        return responses
"""

ONE_CALL = """
from tokenizers import Tokenizer, models

class TritonPythonModel:
    def initialize(self, args):
        self.tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))

    def execute(self, requests):
        texts = [get(request, "text")[0, 0].decode() for request in requests]
        return [answer([[len(one.ids), 0]]) for one in self.tokenizer.encode_batch(texts)]
"""

# BLS in a loop: the other model gets them one by one.
BLS = """
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            inner = pb_utils.InferenceRequest(
                model_name="bert", requested_output_names=["logits"],
                inputs=[pb_utils.get_input_tensor_by_name(request, "input_ids")])
            response = inner.exec()
            if response.has_error():
                raise pb_utils.TritonModelException(response.error().message())
            logits = pb_utils.get_output_tensor_by_name(response, "logits").as_numpy()
            responses.append(answer(logits))
        return responses
"""

SENDERS = """
import threading

class TritonPythonModel:
    def execute(self, requests):
        def work():
            for request in requests:
                sender = request.get_response_sender()
                sender.send(answer([[1, 2]]))
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        threading.Timer(0.1, work).start() if LATE else work()
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"

TUTORIALS = (
    Tutorial("a loop with squeeze", SQUEEZE, (APART,), IN_STEP),
    Tutorial("a list comprehension over forward", COMPREHENSION, (APART,), IN_STEP),
    Tutorial("a thread for each request", THREADS, (APART,), IN_STEP),
    Tutorial("one pass and a loop over its rows", POSTPROCESSING, (), ONCE),
    Tutorial("per-item tokenization", TOKENIZER, (ONE_BY_ONE,), calls=IN_STEP, inputs=TEXT),
    Tutorial("one tokenizer call for all", ONE_CALL, (), calls=ONCE, inputs=TEXT),
    Tutorial("one BLS request after the other", BLS, (APART,), IN_STEP),
    Tutorial("response senders", SENDERS.replace("LATE", "False"), extra=DECOUPLED),
    Tutorial("response senders in a thread", SENDERS.replace("LATE", "True"), extra=DECOUPLED),
)


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=str)
def test_each_handler_has_its_faults_and_no_other(tutorial: Tutorial, tmp_path: Path) -> None:
    """By counts: passes and tokenizer calls in step with the requests, or once for all; everybody answered."""
    found = probed(tmp_path, tutorial.body, inputs=tutorial.inputs, extra=tutorial.extra)

    assert found.error == ""
    assert tutorial.passes is None or found.of("passes") == tutorial.passes
    assert tutorial.calls is None or found.of("tokenizer_calls") == tutorial.calls
    assert [run["answered"] for run in found.runs] == [1, 2, 8, 16, 16]
    assert names(found) == list(tutorial.faults)
    # Without a pass to be seen there is nothing to say of batches.
    assert handlers.whole(found) is (None if tutorial.passes is None else tutorial.passes == ONCE)


def test_stacked_rows_are_one_pass_and_their_padding_is_counted(tmp_path: Path) -> None:
    """One pass whatever the requests; padded to 512, most of it was padding."""
    found = probed(
        tmp_path,
        TORCH
        + """
class TritonPythonModel:
    def initialize(self, args):
        self.net = Net().eval()

    def execute(self, requests):
        rows = [torch.from_numpy(get(r)[0]) for r in requests]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        ids = torch.nn.functional.pad(ids, (0, 512 - ids.shape[1]))
        mask = torch.arange(512)[None, :] < torch.tensor([len(row) for row in rows])[:, None]
        logits = self.net(ids, attention_mask=mask.long()).detach().numpy()
        return [answer(row[None]) for row in logits]
""",
    )

    assert found.of("passes") == ONCE and handlers.whole(found) is True
    assert found.padding() > 0.8
    assert names(found) == ["padding waste"]


def test_running_only_equal_lengths_together_is_told_from_a_loop(tmp_path: Path) -> None:
    """With lengths alike it is one pass; with lengths mixed, nearly one for each request."""
    found = probed(
        tmp_path,
        TORCH
        + """
class TritonPythonModel:
    def initialize(self, args):
        self.net = Net().eval()

    def execute(self, requests):
        by_length = {}
        for i, r in enumerate(requests):
            by_length.setdefault(get(r).shape[1], []).append(i)
        out = [None] * len(requests)
        for members in by_length.values():
            for i, row in zip(members, self.net(torch.tensor(np.concatenate([get(requests[i]) for i in members])))):
                out[i] = answer(row[None].detach())
        return out
""",
    )

    (verdict,) = [one for one in handlers.verdicts(found) if one.kind == "fault"]
    assert found.of("passes", alike=True) == {16: 1}
    assert "only if their lengths are equal" in verdict.fix


def test_requests_to_another_model_that_are_awaited_together_are_no_fault(tmp_path: Path) -> None:
    """Its batcher can join them again; a note says so."""
    found = probed(
        tmp_path,
        """
        import asyncio

        class TritonPythonModel:
            async def execute(self, requests):
                inner = [pb_utils.InferenceRequest(model_name="bert", requested_output_names=["logits"],
                         inputs=request.inputs()).async_exec() for request in requests]
                return [answer(one.output_tensors()[0].as_numpy()) for one in await asyncio.gather(*inner)]
        """,
    )

    assert names(found) == []
    assert [verdict.kind for verdict in handlers.verdicts(found)] == ["note"]


def test_a_loop_over_onnx_runtime_is_caught(tmp_path: Path) -> None:
    """session.run() for each request."""
    import onnx

    node = onnx.helper.make_node("Identity", ["x"], ["y"])
    ends = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, ["b", "l"]) for name in "xy"]
    model = onnx.helper.make_model(
        onnx.helper.make_graph([node], "g", ends[:1], ends[1:]),
        opset_imports=[onnx.helper.make_opsetid("", 17)],
        ir_version=9,
    )
    onnx.save(model, tmp_path / "model.onnx")

    found = probed(
        tmp_path,
        f"""
        import onnxruntime

        class TritonPythonModel:
            def initialize(self, args):
                self.session = onnxruntime.InferenceSession({str(tmp_path / "model.onnx")!r})

            def execute(self, requests):
                return [answer(self.session.run(None, {{"x": get(r)}})[0][:, :1]) for r in requests]
        """,
    )

    assert found.of("passes") == IN_STEP and names(found) == [APART]


def test_a_loop_over_a_tensorrt_context_is_caught(tmp_path: Path) -> None:
    """execute_async_v3() for each request, on a stand-in for TensorRT."""
    (tmp_path / "stand-in").mkdir()
    (tmp_path / "stand-in/tensorrt.py").write_text(
        "class IExecutionContext:\n    def execute_async_v3(self, stream):\n        return True\n"
    )

    found = probed(
        tmp_path,
        f"""
        import sys
        sys.path.insert(0, {str(tmp_path / "stand-in")!r})
        import tensorrt as trt

        class TritonPythonModel:
            def initialize(self, args):
                self.context = trt.IExecutionContext()

            def execute(self, requests):
                return [answer([[self.context.execute_async_v3(0), 0]]) for r in requests]
        """,
    )

    assert found.of("passes")[16] == 16 and names(found) == [APART]


def test_a_small_max_batch_size_is_not_exceeded(tmp_path: Path) -> None:
    """Triton would never hand over more; with one at a time there is nothing to tell."""
    one = probed(tmp_path / "one", BLS, batch=1)
    four = probed(tmp_path / "four", BLS, batch=4)

    assert one.of("passes") == {1: 1} and handlers.whole(one) is None
    assert max(four.of("passes")) == 2
