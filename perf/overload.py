# SPDX-License-Identifier: Apache-2.0
"""Overload: what becomes of those let in, and of those refused, when requests come at four times the capacity.

    python -m perf overload

Requests arrive at random, whatever becomes of those before them (an open loop), and latency counts from the time one
was due. Capacity and the latency of an unloaded server are measured first, on the same texts; the answers of those let
in are compared with the in-process ones. The client shares the cores with the server, so it says how busy it was.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
from rich.table import Table
from tritonclient.grpc import InferResult, service_pb2, service_pb2_grpc
from tritonclient.utils import serialize_byte_tensor

from ensemble.errors import PipelineError
from ensemble.launcher.server import Server
from ensemble.samples import load_samples, short_samples
from ensemble.serve import open_server
from perf import terminal
from perf.closed_loop import CHANNEL, REQUEST_SECONDS
from perf.endurance import server_processes
from perf.in_process import classifier, rows_of
from perf.open_loop import poisson

SAMPLES = {"short": short_samples, "mixed": load_samples}
# Of a logit. FP32 sums in another order in another batch.
TOLERANCE = 1e-4
ROWS_IN_FLIGHT = 64
UNLOADED_SECONDS, CAPACITY_SECONDS = 5.0, 10.0
# Later than due by more, or busier, and the client measures itself.
MOST_LAG_SECONDS, MOST_BUSY = 0.05, 0.8
MEMORY_SECONDS = 2.0
# Latencies as before, so many in a row: the server has recovered.
RECOVERED = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The measurement's own arguments."""
    parser.add_argument("--seconds", type=float, default=60.0, help="of overload (default: %(default)s)")
    parser.add_argument("--times", type=float, default=4.0, help="the capacity (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=1, help="texts of a request, 1 to 64 (default: %(default)s)")
    parser.add_argument("--texts", choices=SAMPLES, default="short", help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")


def run(args: argparse.Namespace) -> None:
    """Measure and print."""
    if not (1 <= args.rows <= ROWS_IN_FLIGHT and args.seconds > 0 and args.times > 0):
        raise PipelineError("--rows must be 1 to 64, --seconds and --times above 0")
    samples = SAMPLES[args.texts]()
    texts = [sample.text for sample in samples]
    requests = [[texts[(start + row) % len(texts)] for row in range(args.rows)] for start in range(len(texts))]
    logits = classifier(args.repository)(rows_of(args.repository, texts)).logits
    expected = [logits[[(start + row) % len(texts) for row in range(args.rows)]] for start in range(len(texts))]
    server, _ = open_server(args.repository, "onnx")
    try:
        server.start()
        figures = asyncio.run(_measure(server, [_message(request) for request in requests], expected, args))
    finally:
        server.stop()
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    _print(figures)


@dataclass
class Outcome:
    """One request: seconds to its end from when it was due and from when it was sent, and the status it ended with."""

    seconds: float
    from_sent: float
    status: str
    message: str


async def _measure(
    server: Server,
    messages: Sequence[service_pb2.ModelInferRequest],
    expected: Sequence[npt.NDArray[np.float32]],
    args: argparse.Namespace,
) -> dict[str, Any]:
    async with grpc.aio.insecure_channel(server.url, options=CHANNEL) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with terminal.progress() as progress:
            task = progress.add_task("unloaded", total=None)
            unloaded = await _closed(stub, messages, 1, UNLOADED_SECONDS)
            progress.update(task, description="capacity")
            at_once = max(4, ROWS_IN_FLIGHT // args.rows)
            await _closed(stub, messages, at_once, CAPACITY_SECONDS / 5)  # warm-up
            capacity = len(await _closed(stub, messages, at_once, CAPACITY_SECONDS)) / CAPACITY_SECONDS
            due = poisson(args.times * capacity, args.seconds, seed=1)
            progress.update(task, description=f"{args.times * capacity:.0f} requests a second", total=len(due))
            memory: list[tuple[float, dict[str, float]]] = []
            watch = asyncio.create_task(_watch(server, memory))
            cpu, began = time.process_time(), time.monotonic()
            outcomes, lag = await _flood(stub, messages, expected, due, lambda: progress.advance(task))
            busy = (time.process_time() - cpu) / (time.monotonic() - began)
            progress.update(task, description="recovery", total=None)
            recovered = await _recovery(stub, messages, float(np.percentile(unloaded, 99)))
            after = await _closed(stub, messages, 1, UNLOADED_SECONDS)
            watch.cancel()
    return {
        "rows": args.rows,
        "texts": args.texts,
        "seconds": args.seconds,
        "times": args.times,
        "capacity_per_second": capacity,
        "offered_per_second": len(due) / float(due[-1]),
        "unloaded_ms": _quantiles(unloaded),
        "let_in_ms": _quantiles([outcome.seconds for outcome in outcomes if outcome.status == "OK"]),
        "refused_ms": _quantiles([outcome.seconds for outcome in outcomes if outcome.status == "UNAVAILABLE"]),
        "refused_from_sent_ms": _quantiles(
            [outcome.from_sent for outcome in outcomes if outcome.status == "UNAVAILABLE"]
        ),
        "after_ms": _quantiles(after),
        "outcomes": dict(Counter(outcome.status for outcome in outcomes)),
        "reasons": dict(Counter(outcome.message.partition(":")[0] for outcome in outcomes if outcome.message)),
        "recovered_after_seconds": recovered,
        "memory_mb": [{"second": round(when - began, 1), **values} for when, values in memory if when >= began - 1],
        "client_lag_p99_ms": float(np.percentile(lag, 99) * 1e3),
        "client_busy": busy,
    }


async def _closed(
    stub: Any, messages: Sequence[service_pb2.ModelInferRequest], in_flight: int, seconds: float
) -> list[float]:
    """Latencies, s, of so many in flight for so long."""
    latencies: list[float] = []
    end = time.monotonic() + seconds

    async def worker(index: int) -> None:
        while (sent := time.monotonic()) < end:
            await stub.ModelInfer(messages[index % len(messages)], timeout=REQUEST_SECONDS)
            latencies.append(time.monotonic() - sent)
            index += in_flight

    await asyncio.gather(*(worker(index) for index in range(in_flight)))
    return latencies


async def _flood(
    stub: Any,
    messages: Sequence[service_pb2.ModelInferRequest],
    expected: Sequence[npt.NDArray[np.float32]],
    due: npt.NDArray[np.float64],
    step: Callable[[], None],
) -> tuple[list[Outcome], npt.NDArray[np.float64]]:
    """Send each when it is due: what became of it, how late it was sent. Raises PipelineError on a wrong answer."""
    outcomes: list[Outcome] = [None] * len(due)  # type: ignore[list-item]
    lag = np.zeros(len(due))
    start = time.monotonic()

    async def send(index: int) -> None:
        lag[index] = time.monotonic() - start - due[index]
        status, message, place = "OK", "", index % len(messages)
        try:
            answer = await stub.ModelInfer(messages[place], timeout=REQUEST_SECONDS)
        except grpc.aio.AioRpcError as error:
            status, message = error.code().name, _reason(error.details() or "")
        seconds = time.monotonic() - start - due[index]
        outcomes[index] = Outcome(seconds, seconds - lag[index], status, message)
        step()
        if status == "OK":
            difference = float(np.abs(InferResult(answer).as_numpy("logits") - expected[place]).max())
            if not difference <= TOLERANCE:  # NaN too
                raise PipelineError(
                    f"a logit differs from the in-process one by {difference:.1e}: no speed is reported"
                )

    tasks = []
    for index, when in enumerate(due):
        if (wait := start + when - time.monotonic()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(send(index)))
    await asyncio.gather(*tasks)
    return outcomes, lag


async def _recovery(stub: Any, messages: Sequence[service_pb2.ModelInferRequest], usual: float) -> float | None:
    """Seconds from the flood's last answer until single requests are as fast as before; None: not within a minute."""
    began, in_a_row, index = time.monotonic(), 0, 0
    while time.monotonic() - began < REQUEST_SECONDS:
        sent = time.monotonic()
        try:
            await stub.ModelInfer(messages[index % len(messages)], timeout=REQUEST_SECONDS)
        except grpc.aio.AioRpcError:
            in_a_row = 0
            continue
        in_a_row = in_a_row + 1 if time.monotonic() - sent <= usual else 0
        if in_a_row == RECOVERED:
            return time.monotonic() - began
        index += 1
    return None


async def _watch(server: Server, memory: list[tuple[float, dict[str, float]]]) -> None:
    """Resident MB of the server and of each stub, again and again."""
    while True:
        held = await asyncio.to_thread(server_processes.sample, server)
        memory.append((time.monotonic(), {name: of.rss / 1e6 for name, of in held.processes.items()}))
        await asyncio.sleep(MEMORY_SECONDS)


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    values = np.percentile(np.array(seconds) * 1e3, [50, 99, 100])
    return {"n": len(seconds), **dict(zip(("p50", "p99", "max"), map(float, values), strict=True))}


def _reason(details: str) -> str:
    return details.split("message: ")[-1].removeprefix("in ensemble 'text_classifier', ")


def _message(texts: Sequence[str]) -> service_pb2.ModelInferRequest:
    message = service_pb2.ModelInferRequest(model_name="text_classifier")
    message.inputs.add(name="text", datatype="BYTES").shape.extend([len(texts), 1])
    message.outputs.add(name="logits")
    array = np.array([[text.encode()] for text in texts], dtype=object)
    message.raw_input_contents.append(serialize_byte_tensor(array).item())
    return message


def _print(figures: dict[str, Any]) -> None:
    console = terminal.console()
    table = Table("", "requests", "p50 ms", "p99 ms", "longest ms", "p99 over unloaded")
    base = figures["unloaded_ms"]["p99"]
    for name in ("unloaded", "let in", "refused", "refused from sent", "after"):
        if row := figures[f"{name.replace(' ', '_')}_ms"]:
            table.add_row(
                name,
                f"{row['n']:,}",
                *(f"{row[key]:,.1f}" for key in ("p50", "p99", "max")),
                "" if name.startswith("refused") else f"{row['p99'] / base:.1f}x",
            )
    console.print(table)
    console.print(
        f"{figures['rows']} rows a request, {figures['texts']} texts; capacity {figures['capacity_per_second']:.1f} "
        f"requests/s, offered {figures['offered_per_second']:.1f}/s for {figures['seconds']:.0f} s"
    )
    console.print(f"outcomes: {figures['outcomes']}; reasons: {figures['reasons']}")
    recovered = figures["recovered_after_seconds"]
    console.print("not as before within a minute" if recovered is None else f"as before after {recovered:.1f} s")
    for name in ("tritonserver", "tokenizer", "classifier"):
        values = [entry[name] for entry in figures["memory_mb"] if name in entry]
        parts = [values[int(share * (len(values) - 1))] for share in (0, 0.25, 0.5, 0.75, 1)]
        console.print(f"resident MB of {name}, from begin to end: {', '.join(f'{part:.0f}' for part in parts)}")
    lag, busy = figures["client_lag_p99_ms"], figures["client_busy"]
    console.print(f"client: {lag:.1f} ms behind at p99, {busy:.0%} of a core")
    if lag > MOST_LAG_SECONDS * 1e3 or busy > MOST_BUSY:
        console.print("caveat: the client was at its limit; the latencies are partly its own")
