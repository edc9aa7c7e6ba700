# SPDX-License-Identifier: Apache-2.0
"""The handler probe, on handlers written as tutorials write them: what it counts, and what the counts mean."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from ensemble.errors import ConfigError
from perf.doctor import handlers, probe
from perf.doctor.inputs import built_in_texts
from perf.doctor.probe import Probe
from perf.doctor.target import Leaf

IDS = 'input { name: "input_ids" data_type: TYPE_INT64 dims: -1 allow_ragged_batch: true }'
MASK = 'input { name: "attention_mask" data_type: TYPE_INT64 dims: -1 allow_ragged_batch: true }'
TEXT = 'input { name: "text" data_type: TYPE_STRING dims: 1 }'

HEAD = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

def get(request, name="input_ids"):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy()

def answer(array):
    return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("logits", np.asarray(array, dtype=np.float32))])

"""

TORCH = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(3000, 4), torch.nn.Linear(4, 2)

    def forward(self, ids, attention_mask=None):
        return self.head(self.embed(ids).mean(dim=1))

"""


def probed(folder: Path, body: str, *, inputs: str = IDS, extra: str = "", batch: int = 64) -> Probe:
    """Write the handler into a repository and probe it."""
    config = text_format.Parse(
        f'name: "m" backend: "python" max_batch_size: {batch} {inputs} '
        f'output {{ name: "logits" data_type: TYPE_FP32 dims: 2 }} dynamic_batching {{ }} {extra}',
        model_config_pb2.ModelConfig(),
    )
    version = folder / "m" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(HEAD + dedent(body))
    return probe.probe(Leaf("m", config), folder, built_in_texts())


def names(found: Probe) -> list[str]:
    return [verdict.name for verdict in handlers.verdicts(found) if verdict.kind == "fault"]


def test_a_loop_with_squeeze_is_caught(tmp_path: Path) -> None:
    """for request in requests: model(...).squeeze(): a pass for each request."""
    found = probed(
        tmp_path,
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
""",
    )

    assert found.error == ""
    assert found.of("passes") == {1: 1, 2: 2, 8: 8, 16: 16}
    assert names(found) == ["batches taken apart"]
    assert handlers.whole(found) is False


def test_a_list_comprehension_over_forward_is_caught(tmp_path: Path) -> None:
    """model.forward() goes around the module's own call; its layers give it away."""
    found = probed(
        tmp_path,
        TORCH
        + """
class TritonPythonModel:
    def initialize(self, args):
        self.net = Net().eval()

    def execute(self, requests):
        return [answer(self.net.forward(torch.from_dlpack(
            pb_utils.get_input_tensor_by_name(r, "input_ids").to_dlpack())).detach()) for r in requests]
""",
    )

    assert found.error == ""
    assert found.of("passes")[16] == 16
    assert names(found) == ["batches taken apart"]


def test_stacked_rows_are_one_pass_and_their_padding_is_counted(tmp_path: Path) -> None:
    """One pass whatever the requests; padded to the longest of 16, most of it was padding."""
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

    assert set(found.of("passes").values()) == {1}
    assert handlers.whole(found) is True
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


def test_per_item_tokenization_is_caught(tmp_path: Path) -> None:
    """A transformers tokenizer called for each request; the Rust one inside it is not counted again."""
    found = probed(
        tmp_path,
        """
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
        """,
        inputs=TEXT,
    )

    assert found.error == ""
    assert found.of("tokenizer_calls") == {1: 1, 2: 2, 8: 8, 16: 16}
    assert names(found) == ["tokenizes one by one"]
    assert handlers.whole(found) is None  # no forward pass was seen


def test_one_tokenizer_call_for_all_is_not_a_fault(tmp_path: Path) -> None:
    """The fast tokenizer's own batch call."""
    found = probed(
        tmp_path,
        """
        from tokenizers import Tokenizer, models

        class TritonPythonModel:
            def initialize(self, args):
                self.tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))

            def execute(self, requests):
                texts = [get(request, "text")[0, 0].decode() for request in requests]
                return [answer([[len(one.ids), 0]]) for one in self.tokenizer.encode_batch(texts)]
        """,
        inputs=TEXT,
    )

    assert set(found.of("tokenizer_calls").values()) == {1}
    assert names(found) == []


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


def test_one_request_after_the_other_to_another_model_is_caught(tmp_path: Path) -> None:
    """BLS in a loop: the other model gets them one by one."""
    found = probed(tmp_path, BLS)

    assert found.error == ""
    assert found.of("passes")[16] == 16
    assert names(found) == ["batches taken apart"]


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

    assert found.of("passes") == {1: 1, 2: 2, 8: 8, 16: 16}
    assert names(found) == ["batches taken apart"]


def test_a_loop_over_a_tensorrt_context_is_caught(tmp_path: Path) -> None:
    """execute_async_v3() for each request, on a stand-in for TensorRT beside the handler."""
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "tensorrt.py").write_text(
        "class IExecutionContext:\n    def execute_async_v3(self, stream):\n        return True\n"
    )
    (tmp_path / "m" / "1").rename(tmp_path / "one")

    body = """
        import sys
        sys.path.insert(0, "PLACE")
        import tensorrt as trt

        class TritonPythonModel:
            def initialize(self, args):
                self.context = trt.IExecutionContext()

            def execute(self, requests):
                return [answer([[self.context.execute_async_v3(0), 0]]) for r in requests]
        """.replace("PLACE", str(tmp_path / "one"))
    (tmp_path / "m").rmdir()
    found = probed(tmp_path, body)

    assert found.of("passes")[16] == 16
    assert names(found) == ["batches taken apart"]


@pytest.mark.parametrize("late", [False, True])
def test_response_senders_do_not_confuse_it(tmp_path: Path, late: bool) -> None:
    """A handler that returns nothing and answers over its senders, at once or from a thread."""
    found = probed(
        tmp_path,
        f"""
        import threading

        class TritonPythonModel:
            def execute(self, requests):
                def work():
                    for request in requests:
                        sender = request.get_response_sender()
                        sender.send(answer([[1, 2]]))
                        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                threading.Timer(0.1, work).start() if {late} else work()
        """,
        extra="model_transaction_policy { decoupled: true }",
    )

    assert found.error == "" and names(found) == []
    assert [run["answered"] for run in found.runs] == [1, 2, 8, 16, 16]


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ("[answer([[1, 2]]) for _ in requests[1:]]", "was handed 1 requests, returned a list of 0 and answered 0"),
        ("[answer([[1, 2]]) for _ in range(len(requests) + 1)]", "returned a list of 2"),
        ("answer_only_first(requests)", "was handed 2 requests, returned nothing and answered 1"),
    ],
)
def test_missing_and_surplus_responses_are_reported(tmp_path: Path, monkeypatch, returned: str, says: str) -> None:
    """Triton fails the whole batch for them."""
    monkeypatch.setattr(probe, "ANSWER_SECONDS", 0.2)
    found = probed(
        tmp_path,
        f"""
        def answer_only_first(requests):
            requests[0].get_response_sender().send(answer([[1, 2]]), flags=1)

        class TritonPythonModel:
            def execute(self, requests):
                return {returned}
        """,
    )

    assert names(found) == ["responses do not match requests"]
    assert any(says in line for one in handlers.verdicts(found) for line in one.evidence)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("import no_such_package_anywhere", "loading model.py: ModuleNotFoundError"),
        ("x = 1", "loading model.py: AttributeError"),
        (
            "class TritonPythonModel:\n    def initialize(self, args):\n        raise OSError('no weights')",
            "no weights",
        ),
        ("class TritonPythonModel:\n    def execute(self, requests):\n        return 1 / 0", "ZeroDivisionError"),
        ("import os\nprint('bye')\nos._exit(3)", "its process ended with 3: bye"),
    ],
)
def test_a_handler_that_fails_is_said_and_nothing_is_claimed(tmp_path: Path, body: str, says: str) -> None:
    """Cannot tell, with its own words."""
    found = probed(tmp_path, body)

    (verdict,) = handlers.verdicts(found)
    assert says in verdict.evidence[0]
    assert verdict.name == "cannot tell"


def test_a_handler_that_hangs_is_ended_with_what_it_started(tmp_path: Path, monkeypatch) -> None:
    """The limit is on the whole probe."""
    monkeypatch.setattr(probe, "SECONDS", 3.0)

    # The handler under examination hangs, for longer than any test may take; the test itself waits 3 s.
    found = probed(tmp_path, "import time\ntime.sleep(600)")

    assert "it took more than 3 s" in found.error


def test_a_small_max_batch_size_is_not_exceeded(tmp_path: Path) -> None:
    """Triton would never hand over more; with one at a time there is nothing to tell."""
    body = BLS
    one = probed(tmp_path / "one", body, batch=1)
    four = probed(tmp_path / "four", body, batch=4)

    assert one.of("passes") == {1: 1} and handlers.whole(one) is None
    assert max(four.of("passes")) == 2


def test_a_repository_without_the_model_is_refused(tmp_path: Path) -> None:
    """With the folder it looked in."""
    with pytest.raises(ConfigError, match="has no version folder with a model.py"):
        probe.probe(Leaf("m", model_config_pb2.ModelConfig(name="m")), tmp_path, built_in_texts())
