# SPDX-License-Identifier: Apache-2.0
"""The roofline on paper: the arithmetic against figures worked out by hand or published, and the command."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble.samples import load_samples
from perf.__main__ import main
from perf.paper import published_bert, roofline
from perf.paper.attention_budget import budgeted, in_order_of_arrival, planned, shuffled
from perf.paper.cards import CARDS, DEFAULT, Card, card_of
from perf.paper.roofline_model import BertShape, Setting, Work, bound, packed, padded, seconds, useful_flops
from perf.paper.roofline_tables import worst_shares

BERT_BASE = BertShape()
TAIL = [25] * 63 + [512]


def test_a_sequence_of_512_is_96_6_gflop_with_every_layer_whole() -> None:
    """BERT-base, and with it 3,229 sequences a second at the A100's peak."""
    flops = padded(BERT_BASE, 1, 512).flops

    assert flops == pytest.approx(96.6e9, rel=1e-3)
    assert DEFAULT.flops / flops == pytest.approx(3229, abs=1)


def test_one_long_text_makes_618_gflop_of_attention_beside_355_of_linear_work() -> None:
    """63 texts of 25 tokens and one of 512 in one pass, every layer whole."""
    work = packed(BERT_BASE, TAIL, cls_only=False)

    assert work.attention_flops == pytest.approx(618e9, rel=1e-3)
    assert work.linear_flops == pytest.approx(355e9, rel=2e-3)


def test_the_last_layer_is_saved_for_all_but_cls() -> None:
    """What is saved: attention but one query a row, and of the projections and FFN all but key, value and [CLS]."""
    whole, saved = packed(BERT_BASE, TAIL, cls_only=False), packed(BERT_BASE, TAIL)

    tokens = sum(TAIL)
    not_cls = (tokens - 64) * 2 * (2 * 768**2 + 2 * 768 * 3072)
    assert whole.linear_flops - saved.linear_flops == not_cls
    assert whole.attention_flops - saved.attention_flops == 4 * 64 * 512 * 511 * 768
    assert whole.weight_bytes == saved.weight_bytes == 2 * 12 * (4 * 768**2 + 2 * 768 * 3072)


def test_equal_lengths_cost_as_much_packed_as_padded_but_for_the_gathering() -> None:
    """Same FLOPs and scores; packed moves each layer's four tensors to the rectangle and back."""
    rectangle, packing = padded(BERT_BASE, 8, 32), packed(BERT_BASE, [32] * 8, cls_only=False)

    assert packing.flops == rectangle.flops
    assert packing.score_bytes == rectangle.score_bytes
    assert packing.activation_bytes - rectangle.activation_bytes == 2 * 12 * 8 * (8 * 32 * 768)


def test_bytes_are_those_counted_by_hand() -> None:
    """One layer of hidden 4, intermediate 8, 2 heads, on 3 rows of 5: each tensor written once and read once."""
    work = padded(BertShape(layers=1, hidden=4, intermediate=8, heads=2), 3, 5)

    state, inner = 3 * 5 * 4, 3 * 5 * 8
    projections, attention, output, norm = 4 * state, 4 * state, 2 * state, 3 * state
    feed_forward = (state + inner) + (inner + state)
    assert work.activation_bytes == 2 * (projections + attention + output + norm + feed_forward + norm)
    assert work.score_bytes == 2 * 4 * (2 * 3 * 5 * 5)
    assert work.weight_bytes == 2 * (4 * 4 * 4 + 2 * 4 * 8)
    assert work.fused.bytes == work.activation_bytes + work.weight_bytes


def test_useful_flops_are_those_of_each_text_alone() -> None:
    """No padding, no shared rectangle, no saving."""
    assert useful_flops(BERT_BASE, [7, 512]) == padded(BERT_BASE, 1, 7).flops + padded(BERT_BASE, 1, 512).flops


def test_the_slower_of_computing_and_moving_bytes_is_the_time() -> None:
    """A card of 10 FLOP/s and 5 bytes/s; half its peak makes computing the slower one."""
    card = Card("a card", flops=10.0, bandwidth=5.0, source="made up")
    work = Work(linear_flops=60.0, attention_flops=20.0, weight_bytes=30.0, activation_bytes=10.0, score_bytes=5.0)

    assert (seconds(work, card), bound(work, card)) == (9.0, "memory")
    assert (seconds(work, card, share=0.5), bound(work, card, share=0.5)) == (16.0, "compute")
    assert Setting(BERT_BASE, card, share=1.0, fused=True).seconds(work) == 8.0
    assert work.intensity == 80 / 45


def test_published_a100_figures_are_met_within_a_sixth_from_8_rows_on() -> None:
    """NVIDIA's latencies, against 60 % of peak and 0.6 ms a pass; large batches reach 53 to 58 % of peak."""
    fixed = published_bert.pass_seconds(0.6)

    assert fixed == pytest.approx(0.6e-3, rel=0.1)
    for (rows, length), published in published_bert.MILLISECONDS.items():
        paper = seconds(padded(published_bert.SHAPE, rows, length), published_bert.CARD, 0.6) + fixed
        assert paper * 1e3 == pytest.approx(published, rel=0.16 if rows >= 8 else 0.3)
        assert rows < 32 or 0.53 <= published_bert.share_of_peak(rows, length) <= 0.58


def test_only_a_card_by_its_full_name_has_a_peak() -> None:
    """A part of an A100 is not an A100."""
    assert card_of("NVIDIA A100-SXM4-80GB") == DEFAULT
    assert card_of("NVIDIA A100-SXM4-80GB MIG 1g.10gb") is None
    assert card_of(None) is None
    assert all(name == card.name and "datasheet" in card.source for name, card in CARDS.items())


def test_a_budget_ends_a_batch_before_the_row_that_does_not_fit() -> None:
    """Four rows of 2 fit into 16, a row of 4 alone fills it, one of 5 exceeds it and is alone."""
    assert in_order_of_arrival([2, 2, 2, 2, 2, 4, 1, 5, 2], 16, 64) == [[2, 2, 2, 2], [2], [4], [1], [5], [2]]
    assert in_order_of_arrival([9, 9, 9], None, 2) == [[9, 9], [9]]


@given(st.lists(st.integers(1, 512), max_size=200), st.none() | st.integers(0, 2**24), st.integers(1, 64))
def test_batches_hold_every_row_in_order_within_the_budget(lengths: list[int], budget: int | None, rows: int) -> None:
    """And no batch could have taken the next row."""
    batches = in_order_of_arrival(lengths, budget, rows)

    def fits(batch: list[int]) -> bool:
        return len(batch) <= rows and (budget is None or len(batch) * max(batch) ** 2 <= budget)

    assert [length for batch in batches for length in batch] == lengths
    assert all(fits(batch) or len(batch) == 1 for batch in batches)
    assert not any(fits([*batch, following[0]]) for batch, following in pairwise(batches))


def test_a_budget_of_64_rows_of_512_is_none() -> None:
    """2^24 never ends a batch."""
    setting, lengths = Setting(BERT_BASE, DEFAULT), [512] * 640

    assert budgeted(setting, lengths, 2**24) == budgeted(setting, lengths, None)
    assert budgeted(setting, lengths, 2**22).rows == 16


def test_a_long_tail_gains_from_a_budget_and_more_from_planned_passes() -> None:
    """On the samples' lengths, whatever a pass costs; nothing is lost where lengths are alike."""
    lengths = shuffled([min(sample.tokens, 512) for sample in load_samples()], 4, seed=1)
    setting = Setting(BERT_BASE, DEFAULT)

    for pass_seconds in (1e-4, 6e-4):
        rate = {budget: budgeted(setting, lengths, budget).per_second(pass_seconds) for budget in (0, 2**22, None)}
        assert rate[0] < rate[None] < rate[2**22] < planned(setting, lengths, pass_seconds).per_second(pass_seconds)
        alike = [25] * 640
        assert planned(setting, alike, pass_seconds) == budgeted(setting, alike, 2**22)


def test_shuffles_keep_every_length_and_depend_on_the_seed_alone() -> None:
    """Each round is a permutation."""
    lengths = list(range(20))

    twice = shuffled(lengths, 2, seed=3)
    assert sorted(twice[:20]) == sorted(twice[20:]) == lengths
    assert twice == shuffled(lengths, 2, seed=3) != shuffled(lengths, 2, seed=4)


def test_the_safest_budget_keeps_most_of_the_best_for_all_texts() -> None:
    """The least share over the texts; ways that are no budget do not count."""
    rows = [("a", "1", 10.0), ("a", "none", 5.0), ("a", "planned", 99.0), ("b", "1", 4.0), ("b", "none", 8.0)]
    budgets = [{"texts": texts, "budget": budget, "sequences_per_second": [rate]} for texts, budget, rate in rows]

    assert worst_shares(budgets, 0) == {"1": 0.5, "none": 0.5}


def test_the_command_prints_its_tables_and_writes_them(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One JSON with what was printed, for the card and model that were asked for."""
    file = tmp_path / "new" / "roofline.json"
    chosen = ["--card", "NVIDIA H200", "--layers", "6", "--hidden", "384", "--intermediate", "1536", "--batch", "32"]
    assert main(["roofline", "--repository", str(repository), "--json", str(file), *chosen]) == 0

    printed, result = capsys.readouterr().out, json.loads(file.read_text())
    assert all(words in printed for words in ("989 TFLOP/s", "padded to longest", "attention budget", "published"))
    assert result["shape"] == {"layers": 6, "hidden": 384, "intermediate": 1536, "heads": 12}
    assert {row["texts"] for row in result["roofline"]} == {"32 tokens", "128 tokens", "512 tokens", "mixed"}
    mixed = {row["layout"]: row for row in result["roofline"] if row["texts"] == "mixed"}
    assert mixed["packed"]["tokens"] == pytest.approx(32 * 57.1, rel=0.01)
    assert mixed["packed"]["sequences_per_second"] > mixed["padded to longest"]["sequences_per_second"]
    assert {row["budget"] for row in result["budgets"]} >= {str(2**power) for power in range(20, 25)} | {"none"}
    assert result["versions"]["python"] and result["machine"]["cores"] >= 1


def test_without_a_tokenizer_the_command_says_what_to_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1 and one line."""
    assert main(["roofline", "--repository", str(tmp_path)]) == 1

    error = capsys.readouterr().err
    assert "tokenizer.json is missing" in error and error.strip().endswith("run make export")


@pytest.mark.parametrize("wrong", [["--batch", "0"], ["--share", "1.5"], ["--share", "x"], ["--card", "GTX"]])
def test_a_senseless_argument_is_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """By argparse, with the argument's name."""
    with pytest.raises(SystemExit, match="2"):
        main(["roofline", *wrong])

    assert wrong[0] in capsys.readouterr().err


def test_the_default_budget_is_among_those_compared() -> None:
    """4,194,304: what the classifier's config has."""
    assert 4_194_304 in roofline.BUDGETS
