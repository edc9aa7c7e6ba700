# SPDX-License-Identifier: Apache-2.0
"""Counts forward passes and tokenizer calls by wrapping the methods that make them. Runs in the probe's child process.

Only the outermost call counts: a module's own layers, and the Rust tokenizer in a transformers one, are parts of it. A
handler that calls `model.forward(x)` goes around that for the outermost module, so calls are kept by the object they
were made on, and the passes are those of the object that was called most often.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

PASS, TOKENIZE = "pass", "tokenize"

# Where it is, the class, its methods, and what a call of them is.
WRAPPED = (
    ("torch.nn", "Module", ("__call__",), PASS),
    ("onnxruntime", "InferenceSession", ("run", "run_with_iobinding", "run_with_ort_values"), PASS),
    ("tensorrt", "IExecutionContext", ("execute_async_v3", "execute_v2", "execute_async_v2"), PASS),
    ("openvino", "CompiledModel", ("__call__",), PASS),
    ("triton_python_backend_utils", "InferenceRequest", ("_asking",), PASS),
    ("tokenizers", "Tokenizer", ("encode", "encode_batch", "encode_batch_fast"), TOKENIZE),
    ("transformers.tokenization_utils_base", "PreTrainedTokenizerBase", ("__call__", "encode"), TOKENIZE),
)


class Calls:
    """The counts since reset(). Thread-safe: a handler may run its passes in threads of its own."""

    def __init__(self) -> None:
        self._lock, self._local = threading.Lock(), threading.local()
        self._wrapped: set[type] = set()
        self.reset()

    def reset(self) -> None:
        """Forget what was counted."""
        self._counts: dict[str, Counter[Any]] = {PASS: Counter(), TOKENIZE: Counter()}
        self._kept: list[Any] = []  # or a new object could get the id of one that is gone
        self.seconds = {PASS: 0.0, TOKENIZE: 0.0}
        self.slots = self.tokens = 0
        self.shapes: list[list[int]] = []

    def most(self, kind: str) -> int:
        """Calls of the object that was called most often."""
        return max(self._counts[kind].values(), default=0)

    def wrap_all(self) -> None:
        """Wrap whatever of WRAPPED has been imported by now and is not wrapped yet."""
        for module, name, methods, kind in WRAPPED:
            found = getattr(sys.modules.get(module), name, None)
            if isinstance(found, type) and found not in self._wrapped:
                self._wrapped.add(found)
                for method in methods:
                    with suppress(AttributeError, TypeError):
                        setattr(found, method, self._wrapper(getattr(found, method), kind))

    def _wrapper(self, original: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def wrapper(owner: Any, *args: Any, **options: Any) -> Any:
            depth = getattr(self._local, kind, 0)
            setattr(self._local, kind, depth + 1)
            started = time.perf_counter()
            try:
                return original(owner, *args, **options)
            finally:
                setattr(self._local, kind, depth)
                if depth == 0:
                    self._note(owner, kind, time.perf_counter() - started, args, options)

        return wrapper

    def _note(self, owner: Any, kind: str, seconds: float, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        # A request to another model is made anew each time; it counts for the model.
        key = owner.model_name() if hasattr(owner, "get_response_sender") else id(owner)
        with self._lock:
            self._counts[kind][key] += 1
            self._kept.append(owner)
            self.seconds[kind] += seconds
            if kind == PASS:
                self._note_shapes(args, options)

    def _note_shapes(self, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        """The shape of the largest whole-number input, and the padding where an input is a mask."""
        arrays = []
        for value in [*args, *options.values()]:
            for item in value.values() if isinstance(value, Mapping) else [value]:
                if len(shape := tuple(getattr(item, "shape", ()))) and "int" in str(getattr(item, "dtype", "")):
                    arrays.append((shape, item))
        if not arrays:
            return
        shape = max((shape for shape, _ in arrays), key=lambda shape: int(np.prod(shape)))
        self.shapes.append([int(size) for size in shape])
        masks = [mask for shape, item in arrays if len(shape) == 2 and (mask := _mask(item)) is not None]
        if masks:
            self.slots += masks[0].size
            self.tokens += int(masks[0].sum())


def _mask(item: Any) -> Any:
    """The item as an array if it looks like an attention mask: ones, then zeros, in every row."""
    with suppress(Exception):
        array = np.asarray(item.detach().cpu() if hasattr(item, "detach") else item)
        if array.size and np.isin(array, (0, 1)).all() and (array[:, 0] == 1).all() and (np.diff(array) <= 0).all():
            return array
    return None
