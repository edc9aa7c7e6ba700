# SPDX-License-Identifier: Apache-2.0
"""A GPU check's result as files and tables: the JSON is the result, the rest is rendered from it. Measures nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ensemble.launcher.gpu import Gpus
from perf import record
from perf.load_point import LEAST_FOR_P99

JSON, MARKDOWN = "gpu-check.json", "gpu-check.md"
# What the engine check (python -m export engine-check) leaves in the same folder.
ENGINE = "engine.json"

# A client process that computes for more of its time than this may be what keeps the server waiting.
BUSY_CLIENT = 0.85

COLUMNS = (
    "deployment", "texts", "clients", "requests/s", "tokens/s", "p50 ms", "p99 ms", "mean batch", "passes a batch",
    "GPU busy", "TFLOP/s", "of peak",
)  # fmt: skip


def caveats(gpus: Gpus, peak: float | None) -> list[str]:
    """What a reader has to know to read the figures right."""
    return [
        *([] if gpus.devices else [f"No GPU ({gpus.why_none}): these are CPU numbers, and say nothing of any GPU."]),
        *(["The card is not in perf/paper/cards.py: its peak is unknown."] if gpus.devices and peak is None else []),
        "Closed loop: so many clients, each waiting for its answer before it sends again. Latency is then clients over "
        "throughput, not what open traffic of that rate would see.",
        "Each point was measured once, for some seconds, after a warm-up that is not counted; its time includes what "
        "was still in flight at its end.",
        f"p99 is not given for fewer than {LEAST_FOR_P99} requests.",
        "The clients share this machine's cores with the server and its tokenizer.",
        "TFLOP/s counts what the texts need, each alone at its own length: padding is no work. Peak is that of FP16 on "
        "the tensor cores; baseline and looped compute in FP32, which has a lower one.",
        "GPU busy is NVIDIA's utilization: the share of the time in which any kernel ran, not how full the GPU was.",
        "looped runs each text at its own length. The case study padded each to 512: compare with it on full texts.",
    ]


def write(folder: Path, result: dict[str, Any]) -> None:
    """Both files, what an engine check left in the folder included."""
    _add_engine(folder, result)
    record.write(folder / JSON, result)
    (folder / MARKDOWN).write_text("\n".join(_markdown(result)) + "\n", encoding="utf-8")


def show(console: Console, folder: Path, result: dict[str, Any]) -> None:
    """The same on a terminal."""
    table = Table(*COLUMNS[:2])
    for name in COLUMNS[2:]:
        table.add_column(name, justify="right")
    for row in result["rows"]:
        table.add_row(*_cells(row))
    console.print(headline(result), highlight=False, markup=False, soft_wrap=True)
    console.print(table)
    for title, lines in _remarks(result):
        console.print(f"{title}:", *(f"  {line}" for line in lines), sep="\n", highlight=False, markup=False)
    if result["engine"]:
        engine = Table("engine check", "value")
        for name, value in flattened(result["engine"]):
            engine.add_row(name, value)
        console.print(engine)
    console.print(f"written: {folder / JSON}, {folder / MARKDOWN}", highlight=False, markup=False, soft_wrap=True)


def headline(result: dict[str, Any]) -> str:
    """What it was measured on."""
    if not result["gpus"]:
        return f"CPU numbers: no GPU here ({result['why_no_gpu']})."
    peak = "peak unknown" if result["peak_tflops"] is None else f"peak {result['peak_tflops']:,.0f} TFLOP/s FP16"
    return f"{', '.join(gpu['name'] for gpu in result['gpus'])}; {peak}."


def flattened(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """A nested result as lines: names joined by dots, lists of plain values in one line."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flattened(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(inner, dict | list) for inner in value):
        for index, inner in enumerate(value):
            yield from flattened(inner, f"{name}.{index}" if name else str(index))
    elif isinstance(value, list):
        yield name, ", ".join(map(_plain, value))
    else:
        yield name, _plain(value)


def _add_engine(folder: Path, result: dict[str, Any]) -> None:
    file = folder / ENGINE
    result["engine"] = None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        result["skipped"].append({"what": "engine check", "reason": f"{ENGINE} is not in the output folder"})
    except (OSError, ValueError) as error:
        result["failed"].append({"what": "engine check", "reason": f"{file} cannot be read ({error})"})
    else:
        if isinstance(found, dict) and found.keys() == {"skipped"}:
            result["skipped"].append({"what": "engine check", "reason": found["skipped"]})
        else:
            result["engine"] = found


def _cells(row: dict[str, Any]) -> list[str]:
    passes = None if row["forward_passes"] is None else row["forward_passes"] / row["batches"]
    return [
        row["deployment"],
        row["texts"],
        str(row["clients"]),
        f"{row['requests_per_second']:,.1f}",
        f"{row['tokens_per_second']:,.0f}",
        f"{row['p50_ms']:.1f}",
        _known(row["p99_ms"], ".1f"),
        f"{row['mean_batch']:.1f}",
        _known(passes, ".1f"),
        _known(row["gpu_percent"], ".0f", " %"),
        _known(row["tflops"], ".3g"),
        _known(None if row["share_of_peak"] is None else row["share_of_peak"] * 100, ".1f", " %"),
    ]


def _known(value: float | None, spec: str, unit: str = "") -> str:
    """What is unknown is "n/a", never 0."""
    return "n/a" if value is None else format(value, spec) + unit


def _remarks(result: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """What belongs beside the table: titles, and lines under each."""
    yield "deployments", [f"{name}: {what}" for name, what in result["deployments"].items()]
    for title in ("skipped", "failed"):
        if result[title]:
            yield title, [f"{one['what']}: {one['reason']}" for one in result[title]]
    busy = [row for row in result["rows"] if row["client_busy"] > BUSY_CLIENT]
    if busy:
        yield "perhaps limited by the clients: give more --client-processes", _points(busy)
    few = [row for row in result["rows"] if row["texts_sent"] < row["texts_of"]]
    if few:
        yield "too short to send every text, so not the same texts as other points: give more --seconds", _points(few)
    yield "caveats", result["caveats"]


def _points(rows: list[dict[str, Any]]) -> list[str]:
    """Where, in one line for each deployment and texts."""
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(f"{row['deployment']}, {row['texts']}", []).append(str(row["clients"]))
    return [f"{where}: {', '.join(clients)} clients" for where, clients in found.items()]


def _markdown(result: dict[str, Any]) -> Iterator[str]:
    load, model = result["load"], result["model"]
    yield "# GPU check"
    yield ""
    yield headline(result)
    yield ""
    texts = ", ".join(f"{name} with {tokens:.0f} tokens on average" for name, tokens in load["mean_tokens"].items())
    yield (
        f"{model['source'].get('name', 'the installed model')}: {model['layers']} layers, hidden {model['hidden']}. "
        f"Load: {load['model']}, {load['seconds_a_point']:g} s a point, {load['client_processes']} client process(es). "
        f"Texts: {texts}.{'' if result['complete'] else ' Interrupted: not all points are here.'}"
    )
    yield ""
    yield from _markdown_table(COLUMNS, (_cells(row) for row in result["rows"]), numbers_from=2)
    for title, lines in _remarks(result):
        yield ""
        yield f"{title[0].upper()}{title[1:]}:"
        yield ""
        yield from (f"- {line}" for line in lines)
    if result["engine"]:
        yield ""
        yield from _markdown_table(("engine check", "value"), flattened(result["engine"]))


def _markdown_table(head: Any, rows: Any, numbers_from: int = 99) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'|'.join('---:' if index >= numbers_from else '---' for index in range(len(head)))}|"
    for row in rows:
        yield f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |"


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "n/a" if value is None else str(value)
