# SPDX-License-Identifier: Apache-2.0
"""Is there a mix of lengths on which a batch takes longer than its texts one at a time? In-process, no server.

    python -m perf losing-mix

Looks for one: mixes that could be trouble, random ones, and steps downhill from the worst of them, for a limited time.
Each is judged by the batch's throughput over that of its texts one at a time, each at its exact length, in turn, in few
rounds. The worst are then measured again, in many, and that is what is told. Answers are compared.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from ensemble.arguments import positive
from ensemble.handlers.onnx_classifier import OnnxClassifier
from ensemble.handlers.packing import Ids
from ensemble.handlers.passes import plan
from perf import record, terminal
from perf.in_process import classifier, cost_model
from perf.text_load import same

FLOOR = 0.95
# Of a logit. FP32 sums in another order in another batch.
TOLERANCE = 1e-4
ROWS, LONGEST = 64, 512
# Rounds, batch and single texts in turn: of each mix, for the search; of the worst few, for what is told.
LOOKS, ROUNDS, WORST = 2, 9, 5
# Steps downhill from one mix that lead nowhere, after which another is tried.
PATIENCE = 12

Mix = tuple[int, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The measurement's own arguments."""
    parser.add_argument("--seconds", type=positive(float), default=120.0, help="of search (default: %(default)g)")
    parser.add_argument("--seed", type=int, default=1, help="of the mixes (default: %(default)s)")
    parser.add_argument(
        "--tokens", type=positive(int), default=2560, help="of a mix, at most: more are tried (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the worst mixes there")


def run(args: argparse.Namespace) -> None:
    """Search and print. Raises PipelineError if an answer of a batch differs."""
    search = Search(classifier(args.repository), np.random.default_rng(args.seed), args.tokens)
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with terminal.progress(*columns) as progress:
        task = progress.add_task("searching", total=args.seconds)
        for tried in search.steps(args.seconds):
            what = f"{tried} mixes, worst {min(search.seen.values()):.2f}"
            progress.update(task, description=what, completed=search.elapsed)
        worst = sorted(search.seen, key=lambda mix: search.seen[mix])[:WORST]
        progress.update(task, description="the worst ones again")
        ratios = {mix: search.in_turn(mix) for mix in worst}
    cost = cost_model(args.repository)
    table = Table("lengths of the mix", "rows", "passes", "batch over one at a time", "in the search")
    for mix in sorted(ratios, key=lambda mix: ratios[mix]):
        passes = str(len(plan(mix, cost)))
        table.add_row(described(mix), str(len(mix)), passes, f"{ratios[mix]:.2f}", f"{search.seen[mix]:.2f}")
    least = min(ratios.values())
    verdict = "none found that loses" if least >= FLOOR else f"batching loses on a mix: below the floor of {FLOOR}"
    terminal.console().print(
        table, f"{len(search.seen)} mixes, seed {args.seed}; worst {least:.2f}: {verdict}", highlight=False
    )
    if args.json:
        mixes = [{"lengths": mix, "ratio": ratios[mix]} for mix in ratios]
        record.write(args.json, {"kind": "losing-mix", "seed": args.seed, "tried": len(search.seen), "worst": mixes})


class Search:
    """Mixes tried so far. seen: throughput of the batch over that of its texts one at a time, as judged in passing."""

    def __init__(self, classify: OnnxClassifier, random: np.random.Generator, most_tokens: int) -> None:
        self._classify, self._random, self._most_tokens = classify, random, most_tokens
        self._began = time.monotonic()
        self.seen: dict[Mix, float] = {}

    @property
    def elapsed(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began

    def steps(self, seconds: float) -> Iterator[int]:
        """Try mixes for so long, and each of suspects() at least; says after each how many there were."""
        for mix in suspects():
            self._try(mix)
            yield len(self.seen)
        while self.elapsed < seconds:
            here = self._start()
            patience = PATIENCE
            while patience and self.elapsed < seconds:
                there = self._neighbour(here)
                better = self._try(there) < self._try(here)
                here, patience = (there, PATIENCE) if better else (here, patience - 1)
                yield len(self.seen)

    def in_turn(self, mix: Mix, rounds: int = ROUNDS) -> float:
        """The ratio of one mix, the median of the rounds. Raises PipelineError if an answer differs."""
        rows = [_row(length) for length in mix]
        ratios = []
        for _ in range(rounds):
            started = time.perf_counter()
            alone = [self._classify([row]).logits for row in rows]
            middle = time.perf_counter()
            batch = self._classify(rows).logits
            ratios.append((middle - started) / (time.perf_counter() - middle))
            same(batch, np.concatenate(alone), TOLERANCE, "a batch's logits")
        return float(np.median(ratios))

    def _try(self, mix: Mix) -> float:
        if mix not in self.seen:
            self.seen[mix] = self.in_turn(mix, LOOKS)
        return self.seen[mix]

    def _start(self) -> Mix:
        """One of the worst so far, or one at random: lengths spread evenly over their orders of magnitude."""
        if self._random.random() < 0.5:
            return sorted(self.seen, key=lambda mix: self.seen[mix])[int(self._random.integers(WORST))]
        count = int(self._random.integers(2, ROWS + 1))
        low, high = np.sort(self._random.uniform(0, math.log(LONGEST), 2))
        return self._within(np.exp(self._random.uniform(low, high, count)))

    def _neighbour(self, mix: Mix) -> Mix:
        """A row more, one less, or another length for one or for all."""
        lengths = np.array(mix, dtype=np.float64)
        where = int(self._random.integers(len(lengths)))
        kind = int(self._random.integers(4))
        if kind == 0:
            lengths = np.append(lengths, lengths[where])
        elif kind == 1 and len(lengths) > 2:
            lengths = np.delete(lengths, where)
        elif kind == 2:
            lengths[where] *= math.exp(self._random.normal(0, 0.7))
        else:
            lengths *= math.exp(self._random.normal(0, 0.4))
        return self._within(lengths)

    def _within(self, lengths: npt.NDArray[np.float64]) -> Mix:
        """As whole numbers in order, and no more rows or tokens than there may be; two at least."""
        whole = self._random.permutation(np.clip(np.rint(lengths), 1, LONGEST).astype(int))[:ROWS]
        keep = max(2, int((np.cumsum(whole) <= self._most_tokens).sum()))
        return tuple(sorted(whole[:keep].tolist()))


def suspects() -> list[Mix]:
    """Equal lengths, few and many; one long row among short ones; two lengths; a length of each kind."""
    few, many = [2, 3, 8], [1, 8, 32, 64, 128, 256, 512]
    found = [(length,) * count for length in many for count in few if length * count <= 2048]
    found += [(8,) * 63 + (512,), (25,) * 63 + (512,), (8, 512), (256, 512), (384, 512), (64, 128)]
    found += [(16,) * 32 + (64,) * 32, (32,) * 8 + (256,) * 4, tuple(range(8, 72)), (8, 16, 32, 64, 128, 256, 512)]
    return [tuple(sorted(mix)) for mix in found]


def described(mix: Mix) -> str:
    """`2 x 8, 512`: each length with how often it is there, at most a few of them."""
    lengths, counts = np.unique(mix, return_counts=True)
    parts = [f"{count} x {length}" if count > 1 else str(length) for length, count in zip(lengths, counts, strict=True)]
    return ", ".join(parts[:8]) + (f", ... up to {mix[-1]}" if len(parts) > 8 else "")


def _row(length: int) -> Ids:
    """Token ids of ordinary words."""
    return np.random.default_rng(length).integers(1000, 2000, size=length)
