# SPDX-License-Identifier: Apache-2.0
"""The roofline's values as tables for a terminal. Knows only what perf/paper/roofline.py's calculate() returns."""

from __future__ import annotations

from typing import Any

from rich.table import Table


def of(result: dict[str, Any]) -> list[Table | str]:
    """What to print, in order."""
    card, shape = result["card"], result["shape"]
    return [
        f"{card['name']}: {card['flops'] / 1e12:.0f} TFLOP/s FP16, {card['bandwidth'] / 1e9:,.0f} GB/s "
        f"({card['source']}). "
        f"BERT of {shape['layers']} layers, hidden {shape['hidden']}, intermediate {shape['intermediate']}, "
        f"{shape['heads']} heads. All of it is paper; nothing was run.",
        _roofline(result),
        _budgets(result),
        _verdict(result),
        _published(result),
        _checks(result),
    ]


def _roofline(result: dict[str, Any]) -> Table:
    at = f"{result['share']:.0%}"
    table = Table(
        "texts",
        "layout",
        title=f"batches of {result['rows']}: time = max(FLOPs / peak, bytes / bandwidth)",
        title_justify="left",
    )
    for name in (
        "tokens", "GFLOP linear", "attention", "GB", "FLOP/byte", "ms at peak", f"ms at {at}", "bound by",
        "seq/s at peak", f"seq/s at {at}", f"tokens/s at {at}",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    for row in result["roofline"]:
        table.add_row(
            row["texts"],
            row["layout"],
            f"{row['tokens']:,.0f}",
            f"{row['linear_gflop']:,.0f}",
            f"{row['attention_gflop']:,.0f}",
            f"{row['gigabytes']:.1f}",
            f"{row['flop_per_byte']:.0f}",
            f"{row['ms_at_peak']:.2f}",
            f"{row['ms']:.2f}",
            row["bound_by"],
            f"{row['sequences_per_second_at_peak']:,.0f}",
            f"{row['sequences_per_second']:,.0f}",
            f"{row['tokens_per_second']:,.0f}",
        )
    return table


def _budgets(result: dict[str, Any]) -> Table:
    table = Table(
        "texts",
        "attention budget",
        title=f"packed, in order of arrival, at most {result['rows']} rows: rows x longest^2 within a budget",
        title_justify="left",
    )
    table.add_column("rows a pass", justify="right")
    for case in result["cases"]:
        table.add_column(f"seq/s, {_case(case)}", justify="right")
    for name in ("longest pass, ms", "scores of a layer, MB"):
        table.add_column(name, justify="right")
    for row in result["budgets"]:
        table.add_row(
            row["texts"],
            row["budget"],
            _span(row["rows_per_pass"], ".1f"),
            *(f"{value:,.0f}" for value in row["sequences_per_second"]),
            _span(row["longest_ms"], ".1f"),
            _span(row["score_megabytes"], ".0f"),
        )
    return table


def _span(values: list[float], spec: str) -> str:
    """One value where they agree, else each: planned passes differ with what a pass costs."""
    return " / ".join(dict.fromkeys(format(value, spec) for value in values))


def _case(case: dict[str, Any]) -> str:
    return f"{case['pass_ms']:g} ms a pass{', fused' * case['attention_fused']}"


def _verdict(result: dict[str, Any]) -> Table:
    """How much of the best each budget keeps, whatever the traffic."""
    shares = [worst_shares(result["budgets"], index) for index in range(len(result["cases"]))]
    table = Table(
        "attention budget",
        title="least share, over these texts, of what the best budget for them gives",
        title_justify="left",
    )
    for case in result["cases"]:
        table.add_column(_case(case), justify="right")
    for budget in shares[0]:
        table.add_row(budget, *(f"{by_budget[budget]:.0%}" for by_budget in shares))
    return table


def worst_shares(budgets: list[dict[str, Any]], index: int) -> dict[str, float]:
    """For each budget, the least share it keeps, over the texts, of what the best budget for those texts gives.

    index: which of the costs of a pass. The larger, the safer a default where the traffic is not known.
    """
    rates: dict[str, dict[str, float]] = {}
    for row in budgets:
        if row["budget"].isdigit() or row["budget"] == "none":
            rates.setdefault(row["texts"], {})[row["budget"]] = row["sequences_per_second"][index]
    return {
        budget: min(by_budget[budget] / max(by_budget.values()) for by_budget in rates.values())
        for budget in next(iter(rates.values()))
    }


def _published(result: dict[str, Any]) -> Table:
    published = result["published"]
    table = Table(
        title=f"how good the paper is: BERT-base on {published['card']}, NVIDIA's published latency beside this "
        f"arithmetic with {published['pass_ms']:.2f} ms a pass (least squares)",
        title_justify="left",
    )
    for name in ("rows x length", "published ms", "paper ms", "paper / published", "share of peak, published"):
        table.add_column(name, justify="right")
    for row in published["passes"]:
        table.add_row(
            f"{row['rows']} x {row['length']}",
            f"{row['published_ms']:.2f}",
            f"{row['paper_ms']:.2f}",
            f"{row['paper_ms'] / row['published_ms']:.2f}",
            f"{row['share_of_peak']:.0%}",
        )
    return table


def _checks(result: dict[str, Any]) -> Table:
    table = Table("figure", "value", "counted", title="figures quoted elsewhere", title_justify="left")
    for row in result["checks"]:
        table.add_row(row["what"], f"{row['value']:,.1f}", row["counted"])
    return table
