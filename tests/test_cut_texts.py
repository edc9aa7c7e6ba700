# SPDX-License-Identifier: Apache-2.0
"""The tokenizer's batching library: a request whose strings are cut off fails alone.

Called as Triton's batcher calls it, and in the real server.
"""

from __future__ import annotations

import itertools
import struct
import subprocess
import time
from collections.abc import Iterator

import grpc
import numpy as np
import pytest
import tritonclient.grpc
from batching_library import ROOT, TEXT_BATCHING, Batcher, Request
from conftest import Reference
from hypothesis import given
from hypothesis import strategies as st
from triton_requests import TOLERANCE, element, raw_request
from tritonclient.grpc import service_pb2_grpc

from ensemble.launcher.server import Server
from ensemble.samples import load_samples


@pytest.fixture
def batcher() -> Iterator[Batcher]:
    batcher = Batcher(TEXT_BATCHING)
    assert batcher.load(b"{}") is None
    batcher.new_batch()
    yield batcher
    batcher.unload()


def texts(*parts: bytes, rows: int = 1, memory_type: int = 0) -> Request:
    return Request.of(rows, 1, buffers=parts, memory_type=memory_type)


def sound() -> Request:
    return texts(element(b"a text"))


def cut() -> Request:
    return texts(element(b"a text", length=200))


def test_sound_requests_share_a_batch(batcher: Batcher) -> None:
    """None is turned away, at the first time of asking or in an extension."""
    assert batcher.walk(sound(), sound(), texts(element(b"") + element(b"b"), rows=2)) == [True] * 3
    assert batcher.walk(sound()) == [True]


def test_a_cut_request_joins_no_batch(batcher: Batcher) -> None:
    """It ends the batch before it; what comes after that has not one beside it."""
    request = cut()

    assert batcher.walk(sound(), sound(), request) == [True, True, False]
    batcher.new_batch()
    assert batcher.walk(request, sound()) == [False]  # once, so that this batch is merged with no other
    assert batcher.walk(request, sound()) == [True, False]
    batcher.new_batch()
    assert batcher.walk(sound(), sound()) == [True, True]


def test_two_cut_requests_do_not_share_one(batcher: Batcher) -> None:
    """Each is told what is wrong with it, and no other."""
    assert batcher.walk(cut()) == [False]
    assert batcher.walk(cut(), cut()) == [True, False]


def test_a_walk_may_be_repeated(batcher: Batcher) -> None:
    """While it waits for the queue delay, a request is asked about again and again."""
    request = cut()
    assert batcher.walk(request) == [False]

    assert [batcher.walk(request) for _ in range(3)] == [[True]] * 3
    assert batcher.walk(request, sound()) == [True, False]


def test_a_waiting_batch_is_not_extended_by_a_cut_request(batcher: Batcher) -> None:
    """Nor one that holds a cut request, by a sound one."""
    assert batcher.walk(sound()) == [True]
    assert batcher.walk(cut()) == [False]
    batcher.new_batch()
    request = cut()
    batcher.walk(request)
    assert batcher.walk(request) == [True]
    assert batcher.walk(sound()) == [False]


def test_no_request_waits_for_longer_than_patience_lasts(batcher: Batcher) -> None:
    """Turned away by a batch that never runs, it is let in in the end."""
    assert batcher.walk(sound()) == [True]
    deadline = time.monotonic() + 30
    while batcher.walk(cut()) == [False]:
        assert time.monotonic() < deadline


@pytest.mark.parametrize(
    "request_",
    [
        Request.of(1, 1, error=b"no such input"),
        texts(element(b"abc", length=9), memory_type=2),
    ],
    ids=["no input", "on a GPU"],
)
def test_what_cannot_be_looked_at_is_left_to_the_backend(batcher: Batcher, request_: Request) -> None:
    """Let in beside others."""
    assert batcher.walk(sound(), request_, sound()) == [True] * 3


@given(
    strings=st.lists(st.binary(max_size=20), min_size=1, max_size=5),
    rows=st.integers(1, 5),
    cut_off=st.integers(0, 60),
    appended=st.binary(max_size=6),
    places=st.lists(st.integers(0, 130), max_size=3),
)
def test_cut_is_what_the_backend_would_refuse(strings, rows, cut_off, appended, places) -> None:
    """In any number of buffers, wherever these begin: as the format says, which struct can read as well."""
    whole = b"".join(map(element, strings))
    data = whole[: len(whole) - cut_off] + appended if cut_off < len(whole) else appended
    bounds = [0, *sorted(min(place, len(data)) for place in places), len(data)]
    batcher = Batcher(TEXT_BATCHING)
    assert batcher.load(b"{}") is None
    batcher.new_batch()

    first, second = batcher.walk(sound(), texts(*(data[a:b] for a, b in itertools.pairwise(bounds)), rows=rows))

    assert first and second == is_sound(data, rows)
    batcher.unload()


def is_sound(data: bytes, rows: int) -> bool:
    count = at = 0
    while at + 4 <= len(data):
        at += 4 + struct.unpack_from("<I", data, at)[0]
        count += 1
    return count == rows and at == len(data)


def test_it_reads_no_byte_too_much(tmp_path) -> None:
    """Under the address sanitizer, every truncation of a request of two strings, split everywhere."""
    (tmp_path / "main.c").write_text(SANITIZED)
    models = ROOT / "model_repository"
    command = ["cc", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover", "-I", str(models), "main.c"]

    subprocess.run([*command, str(models / "tokenizer/batchstrategy.c"), "-o", "main"], cwd=tmp_path, check=True)
    ended = subprocess.run(["./main"], cwd=tmp_path, capture_output=True, text=True)

    assert (ended.returncode, ended.stderr) == (0, "")


SANITIZED = """
#include "batching.h"
#include <stdlib.h>
#include <string.h>
static const char whole[] = "\\3\\0\\0\\0abc\\2\\0\\0\\0de";
static size_t size, split; static char *parts[2];
TRITONSERVER_Error *TRITONSERVER_ErrorNew(TRITONSERVER_Error_Code code, const char *message) {
    (void)code; (void)message; abort();
}
void TRITONSERVER_ErrorDelete(TRITONSERVER_Error *error) { (void)error; abort(); }
TRITONSERVER_Error *TRITONBACKEND_RequestInput(TRITONBACKEND_Request *request, const char *name,
                                               TRITONBACKEND_Input **input) {
    (void)request; (void)name; (void)input; return NULL;
}
TRITONSERVER_Error *TRITONBACKEND_InputProperties(TRITONBACKEND_Input *input, const char **name, void *datatype,
                                                  const int64_t **shape, uint32_t *dims, uint64_t *bytes,
                                                  uint32_t *buffers) {
    static const int64_t two[] = {2, 1};
    (void)input; (void)name; (void)datatype; (void)bytes; *shape = two; *dims = 2; *buffers = 2; return NULL;
}
TRITONSERVER_Error *TRITONBACKEND_InputBuffer(TRITONBACKEND_Input *input, uint32_t index, const void **buffer,
                                              uint64_t *bytes, TRITONSERVER_MemoryType *type, int64_t *id) {
    (void)input; *type = TRITONSERVER_MEMORY_CPU; *id = 0;
    *buffer = parts[index]; *bytes = index ? size - split : split; return NULL;
}
int main(void) {
    TRITONBACKEND_Batcher *batcher;
    TRITONBACKEND_ModelBatcherInitialize(&batcher, NULL);
    for (size = 0; size < sizeof whole; size++) for (split = 0; split <= size; split++) {
        void *userp; bool include;
        parts[0] = memcpy(malloc(split), whole, split);
        parts[1] = memcpy(malloc(size - split), whole + split, size - split);
        TRITONBACKEND_ModelBatchInitialize(batcher, &userp);
        TRITONBACKEND_ModelBatchIncludeRequest(NULL, userp, &include);
        TRITONBACKEND_ModelBatchFinalize(userp);
        free(parts[0]); free(parts[1]);
    }
    TRITONBACKEND_ModelBatcherFinalize(batcher);
    return 0;
}
"""


def test_a_cut_request_among_others_fails_alone(server: Server, reference: Reference) -> None:
    """Three hundred requests at once, each fourth cut off: those are refused, the others answered rightly."""
    samples = [sample.text for sample in load_samples() if len(sample.text) < 300][:32]
    expected = reference(samples)
    with grpc.insecure_channel(server.url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        def ask(number: int) -> grpc.Future:
            text = samples[number % 32].encode()
            spoilt = number % 4 == 3
            message = raw_request([1, 1], element(text, length=len(text) + (100 if spoilt else 0)))
            return stub.ModelInfer.future(message, timeout=60)

        futures = [ask(number) for number in range(300)]

        for number, future in enumerate(futures):
            if number % 4 == 3:
                assert future.code() == grpc.StatusCode.INVALID_ARGUMENT
                assert "incomplete string data for inference input 'text'" in future.details()
            else:
                logits = tritonclient.grpc.InferResult(future.result()).as_numpy("logits")
                np.testing.assert_allclose(logits[0], expected[number % 32], atol=TOLERANCE)
