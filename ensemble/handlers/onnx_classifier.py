# SPDX-License-Identifier: Apache-2.0
"""The packed graph on ONNX Runtime: rows of ids in, logits and probabilities out. Knows nothing of Triton.

The CPU stand-in for the TensorRT engine, and what perf/ drives in-process to see what serving costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime

from ensemble.handlers.packing import Ids, pack
from ensemble.handlers.passes import CostModel, plan
from ensemble.handlers.scores import Scores


class OnnxClassifier:
    """An ONNX Runtime session over a packed graph, and the plan of its forward passes.

    forward_passes: made since it was loaded; options: of the session, for another that is held against it.
    """

    def __init__(self, file: Path, cost: CostModel, *, threads: int = 0) -> None:
        """threads: intra-op threads; 0 is one per physical core."""
        self.options = options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        # Shapes change with every batch: a memory plan made for one of them is never of use to the next.
        options.enable_mem_pattern = False
        # Work is handed to the threads in small blocks: the tokenizer and the server take a core away at any time, and
        # with a fixed half each, the other thread would wait for the one that was interrupted.
        options.add_session_config_entry("session.dynamic_block_base", "4")
        # Between two batches its threads would spin on cores that the tokenizer and the server need.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        self._session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        self._cost = cost
        self.forward_passes = 0

    def __call__(self, rows: Sequence[Ids]) -> Scores:
        """Classify rows, INT64 [length] each, every length at least 1; results in the order of the rows."""
        passes = plan([len(row) for row in rows], self._cost)
        parts = [self.one_pass([rows[member] for member in members]) for members in passes]
        back = np.argsort(np.concatenate(passes), kind="stable")
        return Scores(
            np.concatenate([part.logits for part in parts])[back],
            np.concatenate([part.probabilities for part in parts])[back],
        )

    def one_pass(self, rows: Sequence[Ids]) -> Scores:
        """One forward pass over all rows, whatever their lengths."""
        self.forward_passes += 1
        return Scores(*self._session.run(["logits", "probabilities"], pack(rows).feeds()))
