# SPDX-License-Identifier: Apache-2.0
"""The batching libraries, compiled as make does it, and called as Triton's batcher calls them."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENGINE_BATCHING = "model_repository/classifier/batchstrategy.so"
TEXT_BATCHING = "model_repository/tokenizer/batchstrategy.so"


def make_library(folder: Path, library: str, *settings: str) -> subprocess.CompletedProcess[str]:
    """Make's own target, in a copy of what it needs: a library in the checkout would be loaded by every other test."""
    source = Path(library).with_suffix(".c")
    (folder / source).parent.mkdir(parents=True, exist_ok=True)
    for file in ("Makefile", "model_repository/batching.h", source):
        shutil.copyfile(ROOT / file, folder / file)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", "RUNTIME=local", *settings, library], cwd=folder, env=environment, capture_output=True, text=True
    )


def made_library(folder: Path, library: str) -> Path:
    """The same, which must succeed, without a warning."""
    made = make_library(folder, library)
    assert made.returncode == 0 and not made.stderr, made.stderr
    return folder / library


# What a library takes of Triton. An error is its text; `live` counts what was handed out and not given back.
FAKE_TRITON = r"""
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
struct request {
    int64_t shape[3]; uint32_t dims; const char *error;
    const char *buffers[4]; uint64_t sizes[4]; uint32_t count; int memory_type;
};
const char *config; size_t config_size; int live;
void *TRITONSERVER_ErrorNew(int code, const char *message) { (void)code; live++; return strdup(message); }
void TRITONSERVER_ErrorDelete(void *error) { live--; free(error); }
void *TRITONBACKEND_ModelConfig(void *model, uint32_t version, void **message) {
    (void)model; (void)version; live++; *message = &config; return NULL;
}
void *TRITONSERVER_MessageSerializeToJson(void *message, const char **base, size_t *size) {
    (void)message; *base = config; *size = config_size; return NULL;
}
void *TRITONSERVER_MessageDelete(void *message) { (void)message; live--; return NULL; }
void *TRITONBACKEND_RequestInput(struct request *request, const char *name, void **input) {
    *input = request;
    return request->error || (strcmp(name, "input_ids") && strcmp(name, "text")) ? TRITONSERVER_ErrorNew(3, request->error) : NULL;
}
void *TRITONBACKEND_InputProperties(struct request *input, void *name, void *type, const int64_t **shape, uint32_t *dims,
                                    void *size, uint32_t *count) {
    (void)name; (void)type; (void)size;
    *shape = input->shape; *dims = input->dims;
    if (count) *count = input->count;
    return NULL;
}
void *TRITONBACKEND_InputBuffer(struct request *input, uint32_t index, const void **buffer, uint64_t *size,
                                int *memory_type, int64_t *memory_type_id) {
    *memory_type_id = 0;
    *buffer = input->buffers[index]; *size = input->sizes[index]; *memory_type = input->memory_type;
    return NULL;
}
"""


@functools.cache
def _fake_triton() -> ctypes.CDLL:
    """The fake, for every library that is loaded after it."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "fake.c").write_text(FAKE_TRITON)
        subprocess.run(["cc", "-O1", "-fPIC", "-shared", "-o", "fake.so", "fake.c"], cwd=folder, check=True)
        return ctypes.CDLL(f"{folder}/fake.so", mode=ctypes.RTLD_GLOBAL)


@functools.cache
def _loaded(library: str) -> ctypes.CDLL:
    """Made, and loaded on top of the fake."""
    _fake_triton()
    with tempfile.TemporaryDirectory() as folder:
        return ctypes.CDLL(str(made_library(Path(folder), library)))


class Request(ctypes.Structure):
    """As the fake above reads it."""

    _fields_ = (
        ("shape", ctypes.c_int64 * 3),
        ("dims", ctypes.c_uint32),
        ("error", ctypes.c_char_p),
        ("buffers", ctypes.c_void_p * 4),
        ("sizes", ctypes.c_uint64 * 4),
        ("count", ctypes.c_uint32),
        ("memory_type", ctypes.c_int),
    )

    @classmethod
    def of(
        cls, *shape: int, error: bytes | None = None, buffers: Sequence[bytes] = (), memory_type: int = 0
    ) -> Request:
        """buffers: of its input, at most four. memory_type: 2 is a GPU's."""
        # Exactly as long as they are, so that a reader that goes further is found by a sanitizer.
        kept = [ctypes.create_string_buffer(part, len(part)) for part in buffers]
        request = cls(
            (ctypes.c_int64 * 3)(*shape),
            len(shape),
            error,
            (ctypes.c_void_p * 4)(*map(ctypes.addressof, kept)),
            (ctypes.c_uint64 * 4)(*map(len, kept)),
            len(kept),
            memory_type,
        )
        request.kept = kept
        return request


class Batcher:
    """The library, called as Triton's batcher calls it. `userp` stands for the batch that is being formed."""

    def __init__(self, library: str) -> None:
        """library: ENGINE_BATCHING or TEXT_BATCHING."""
        self.fake = _fake_triton()
        self.library = _loaded(library)
        for name in ("BatcherInitialize", "BatcherFinalize", "BatchInitialize", "BatchFinalize", "BatchIncludeRequest"):
            getattr(self.library, f"TRITONBACKEND_Model{name}").restype = ctypes.c_void_p
        self.batcher = ctypes.c_void_p()
        self.userp = ctypes.c_void_p()
        self.kept: list[Request] = []  # an address is not used again while a batch may hold its request

    def load(self, config: bytes) -> str | None:
        """Load a model with this config; the reason if it is refused."""
        ctypes.c_char_p.in_dll(self.fake, "config").value = config
        ctypes.c_size_t.in_dll(self.fake, "config_size").value = len(config)
        error = self.library.TRITONBACKEND_ModelBatcherInitialize(ctypes.byref(self.batcher), None)
        reason = None
        if error:
            reason = ctypes.string_at(error).decode(errors="replace")
            self.fake.TRITONSERVER_ErrorDelete(ctypes.c_void_p(error))
        assert ctypes.c_int.in_dll(self.fake, "live").value == 0
        assert bool(self.batcher) == (error is None)
        return reason

    def unload(self) -> None:
        """As Triton unloads a model."""
        assert not self.library.TRITONBACKEND_ModelBatcherFinalize(self.batcher)
        self.batcher = ctypes.c_void_p()

    def new_batch(self) -> None:
        """The last one is kept until the next is there, as Triton does."""
        self.last, self.userp = self.userp, ctypes.c_void_p()
        self._begin()

    def walk(self, *requests: Request) -> list[bool]:
        """One walk over the queue: whether each was let in, up to the first that was not."""
        if self.userp:
            assert not self.library.TRITONBACKEND_ModelBatchFinalize(self.userp)
        self._begin()
        self.kept += requests
        answers = []
        for request in requests:
            include = ctypes.c_bool(False)
            call = self.library.TRITONBACKEND_ModelBatchIncludeRequest
            assert not call(ctypes.byref(request), self.userp, ctypes.byref(include))
            answers.append(include.value)
            if not include.value:
                break
        assert ctypes.c_int.in_dll(self.fake, "live").value == 0
        return answers

    def _begin(self) -> None:
        assert not self.library.TRITONBACKEND_ModelBatchInitialize(self.batcher, ctypes.byref(self.userp))
