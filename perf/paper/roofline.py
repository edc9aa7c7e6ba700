# SPDX-License-Identifier: Apache-2.0
"""The roofline on paper: what a BERT could do on a card. Arithmetic only; nothing is run.

    python -m perf roofline

FLOPs, bytes and time of a batch, packed and padded, and what the engine's attention budget (rows x longest^2) makes of
batches formed in order of arrival. Texts: equal lengths, and the built-in samples, whose lengths are the installed
tokenizer's. How FLOPs and bytes are counted is said in perf/paper/roofline_model.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ensemble.samples import load_samples
from perf import record, terminal
from perf.in_process import rows_of
from perf.paper import published_bert, roofline_tables
from perf.paper.attention_budget import Outcome, budgeted, in_order_of_arrival, planned, shuffled
from perf.paper.cards import CARDS, DEFAULT, Card
from perf.paper.roofline_model import BertShape, Setting, Work, bound, packed, padded, seconds

LENGTHS = (32, 128, 512)
# What "padded to the maximum" pads to.
MAXIMUM = 512
# The default of the TensorRT classifier's parameter attention_budget is one of them; None: no bound.
BUDGETS = (2**20, 2**21, 2**22, 2**23, 2**24, None)
# The samples are 300 texts: so many shuffles of them make the mean steady to 1 %.
SHUFFLES, SEED = 40, 2024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    for field, value in asdict(BertShape()).items():
        parser.add_argument(f"--{field}", type=_count, default=value, help="of the model (default: %(default)s)")
    parser.add_argument("--card", choices=CARDS, default=DEFAULT.name, help="default: %(default)s")
    parser.add_argument("--batch", type=_count, default=64, help="rows of a batch (default: %(default)s)")
    parser.add_argument(
        "--share", type=_share, default=0.6, help="of the card's peak that is reached (default: %(default)s)"
    )
    parser.add_argument(
        "--pass-ms",
        type=float,
        nargs="+",
        default=[0.1, 0.6],
        help="what a pass costs beside its work, for the budgets: 0.1 is bare launches, 0.6 fits NVIDIA's published "
        "small batches (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all of it there too")


def run(args: argparse.Namespace) -> None:
    """Calculate and print; ConfigError if there is no tokenizer to measure the samples with."""
    shape = BertShape(args.layers, args.hidden, args.intermediate, args.heads)
    setting = Setting(shape, CARDS[args.card], args.batch, args.share)
    mixed = [len(row) for row in rows_of(args.repository, [sample.text for sample in load_samples()])]
    result = calculate(setting, mixed, args.pass_ms)
    terminal.console().print(*roofline_tables.of(result))
    if args.json:
        record.write(args.json, result)


def calculate(setting: Setting, mixed: Sequence[int], pass_ms: Sequence[float]) -> dict[str, Any]:
    """Everything as plain values. mixed: the lengths of the samples; pass_ms: what a pass costs beside its work."""
    rows, shape = setting.rows, setting.shape
    arrivals = shuffled(mixed, SHUFFLES, SEED)
    uniform = {f"{length} tokens": [length] * rows for length in LENGTHS}
    layouts: dict[str, Callable[[Sequence[int]], Work]] = {
        "packed": lambda batch: packed(shape, batch),
        "packed, attention fused": lambda batch: packed(shape, batch).fused,
        "padded to longest": lambda batch: padded(shape, len(batch), max(batch)),
        f"padded to {MAXIMUM}": lambda batch: padded(shape, len(batch), MAXIMUM),
    }
    budget_texts = {"mixed": arrivals, f"{MAXIMUM} tokens": [MAXIMUM] * 64 * rows, "25 tokens": [25] * 64 * rows}
    cases = [(ms, fused) for fused in (False, True) for ms in pass_ms]
    return {
        **{name: value for name, value in asdict(setting).items() if name != "fused"},
        "cases": [{"pass_ms": ms, "attention_fused": fused} for ms, fused in cases],
        "checks": checks(shape, setting.card),
        "published": _published(setting.share),
        "roofline": [
            {"texts": name, "layout": layout, **figures(setting, lengths, work_of)}
            for name, lengths in {**uniform, "mixed": arrivals}.items()
            for layout, work_of in layouts.items()
        ],
        "budgets": [
            {"texts": name, **row}
            for name, lengths in budget_texts.items()
            for row in _budgets(setting, lengths, cases)
        ],
    }


def figures(setting: Setting, lengths: Sequence[int], work_of: Callable[[Sequence[int]], Work]) -> dict[str, Any]:
    """The mean full batch, in order of arrival and without a budget."""
    batches = in_order_of_arrival(lengths, None, setting.rows)
    works = [work_of(batch) for batch in batches]
    total = sum(works, Work())
    ideal = sum(seconds(work, setting.card) for work in works)
    reached = sum(seconds(work, setting.card, setting.share) for work in works)
    return {
        "tokens": sum(lengths) / len(batches),
        "linear_gflop": total.linear_flops / len(batches) / 1e9,
        "attention_gflop": total.attention_flops / len(batches) / 1e9,
        "gigabytes": total.bytes / len(batches) / 1e9,
        "flop_per_byte": total.intensity,
        "bound_by": bound(total, setting.card, setting.share),
        "ms_at_peak": ideal / len(batches) * 1e3,
        "ms": reached / len(batches) * 1e3,
        "sequences_per_second_at_peak": len(lengths) / ideal,
        "sequences_per_second": len(lengths) / reached,
        "tokens_per_second": sum(lengths) / reached,
    }


def checks(shape: BertShape, card: Card) -> list[dict[str, Any]]:
    """Figures that are quoted elsewhere, each with the way of counting that gives it."""
    one = padded(shape, 1, MAXIMUM)
    tail = [25] * 63 + [MAXIMUM]
    whole, saved = packed(shape, tail, cls_only=False), packed(shape, tail)
    every, cls = "every layer whole", "the last layer for [CLS] only, as the packed graph has it"
    rows: list[tuple[str, float, str]] = [
        (f"GFLOP of one sequence of {MAXIMUM}", one.flops / 1e9, every),
        (f"sequences of {MAXIMUM} a second at peak", card.flops / one.flops, every),
        (f"GFLOP of attention, 63 x 25 and 1 x {MAXIMUM} in one pass", whole.attention_flops / 1e9, every),
        ("GFLOP of linear layers, the same pass", whole.linear_flops / 1e9, every),
        ("GFLOP of attention, the same pass", saved.attention_flops / 1e9, cls),
        ("GFLOP of linear layers, the same pass", saved.linear_flops / 1e9, cls),
    ]
    return [{"what": what, "value": value, "counted": counted} for what, value, counted in rows]


def _published(share: float) -> dict[str, Any]:
    """NVIDIA's figures beside the same arithmetic: how good the paper is."""
    fixed = published_bert.pass_seconds(share)
    shape, card = published_bert.SHAPE, published_bert.CARD
    return {
        "card": card.name,
        "pass_ms": fixed * 1e3,
        "passes": [
            {
                "rows": rows,
                "length": length,
                "published_ms": measured,
                "paper_ms": (seconds(padded(shape, rows, length), card, share) + fixed) * 1e3,
                "share_of_peak": published_bert.share_of_peak(rows, length),
            }
            for (rows, length), measured in published_bert.MILLISECONDS.items()
        ],
    }


def _budgets(setting: Setting, lengths: Sequence[int], cases: Sequence[tuple[float, bool]]) -> list[dict[str, Any]]:
    """One row a budget, with one text a pass before them and, where lengths differ, planned passes after them.

    cases: milliseconds a pass costs beside its work, and whether attention is fused; a value for each.
    """
    names = {"one text a pass": 0, **{str(budget or "none"): budget for budget in BUDGETS}}
    settings = [(replace(setting, fused=fused), ms) for ms, fused in cases]
    rows = [
        _row(name, [(budgeted(case, lengths, budget), ms) for case, ms in settings]) for name, budget in names.items()
    ]
    if len(set(lengths)) > 1:
        rows.append(
            _row("none, but planned passes", [(planned(case, lengths, ms * 1e-3), ms) for case, ms in settings])
        )
    return rows


def _row(budget: str, outcomes: Sequence[tuple[Outcome, float]]) -> dict[str, Any]:
    """outcomes: with the milliseconds that a pass costs beside its work."""
    return {
        "budget": budget,
        "rows_per_pass": [outcome.rows for outcome, _ in outcomes],
        "sequences_per_second": [outcome.per_second(ms * 1e-3) for outcome, ms in outcomes],
        "longest_ms": [outcome.longest * 1e3 for outcome, _ in outcomes],
        "score_megabytes": [outcome.scores / 1e6 for outcome, _ in outcomes],
    }


def _count(text: str) -> int:
    value = int(text) if text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share above 0 and up to 1")
    return value
