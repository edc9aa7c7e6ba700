# SPDX-License-Identifier: Apache-2.0
"""Triton's OpenTelemetry mode against a collector of this test: spans of both steps, and no text in any of them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ensemble import Client
from ensemble.launcher.options import ServerOptions, Trace
from ensemble.launcher.server import Server

RATE = 5
TEXT = "A text that nobody but its reader should see."
# The request as a whole; then the ensemble and its steps; and within each step its computation.
SPANS = ["InferRequest", "classifier", "compute", "compute", "text_classifier", "tokenizer"]


class Collector(ThreadingHTTPServer):
    """Takes OTLP over HTTP, as an OpenTelemetry collector does on port 4318."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Receiver)
        self.url = f"http://127.0.0.1:{self.server_port}/v1/traces"
        self.received: list[tuple[str, bytes]] = []

    def traces(self) -> dict[str, list[dict[str, Any]]]:
        """The spans of each, by its id. This server sends the JSON form."""
        found: dict[str, list[dict[str, Any]]] = {}
        for _, body in self.received:
            for resource in json.loads(body)["resourceSpans"]:
                for span in (span for scope in resource["scopeSpans"] for span in scope["spans"]):
                    found.setdefault(span["traceId"], []).append(span)
        return found


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append((self.path, body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        yield collector
        collector.shutdown()
        thread.join()


def test_one_request_in_n_leaves_spans_of_both_steps(repository: Path, collector: Collector) -> None:
    """Ten requests at a rate of 1 in 5: two traces, each through tokenizer and classifier; and no text in them."""
    options = ServerOptions(
        repository, config_name="cpu", http_port=0, grpc_port=0, metrics_port=0, trace=Trace(collector.url, RATE)
    )
    server = Server(options)
    server.start()
    try:
        with Client(server.url) as client:
            for _ in range(2 * RATE):
                client.classify([TEXT])
        deadline = time.monotonic() + 30
        while sum(map(len, collector.traces().values())) < 2 * len(SPANS):
            assert time.monotonic() < deadline, collector.received
            time.sleep(0.1)
    finally:
        server.kill()

    traces = collector.traces()
    assert len(traces) == 2
    for spans in traces.values():
        assert sorted(span["name"] for span in spans) == SPANS
        (root,) = (span for span in spans if span["name"] == "InferRequest")
        assert all(int(span["startTimeUnixNano"]) >= int(root["startTimeUnixNano"]) for span in spans)
        assert sum("parentSpanId" in span for span in spans) == len(SPANS) - 1
    assert {path for path, _ in collector.received} == {"/v1/traces"}
    assert b"nobody but its reader" not in b"".join(body for _, body in collector.received)
