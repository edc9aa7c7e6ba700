# SPDX-License-Identifier: Apache-2.0
"""What Triton says waits, read from a metrics page that may be missing, out of order or gone."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from ensemble.handlers import pending as pending_module
from ensemble.handlers.pending import PendingRequests, page_of


@pytest.mark.parametrize(
    ("arguments", "page"),
    [
        ([], ("127.0.0.1", 8002)),
        (["--metrics-port=18002", "--http-address=127.0.0.2", "--model-repository=x"], ("127.0.0.2", 18002)),
        (["--metrics-address", "10.0.0.1", "--http-address=127.0.0.2"], ("10.0.0.1", 8002)),
        (["--http-address=0.0.0.0"], ("127.0.0.1", 8002)),
        (["--allow-metrics=false"], None),
    ],
)
def test_the_metrics_page_is_found_by_the_servers_arguments(arguments: list[str], page: tuple[str, int] | None) -> None:
    """As Triton understands them."""
    assert page_of(arguments) == page


class Page(http.server.ThreadingHTTPServer):
    """A metrics page on which seven requests wait; it counts connections and readings, and may be out of order."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Reading)
        self.works, self.hangs_up, self.connections, self.readings = True, False, 0, 0
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def process_request(self, request, client_address) -> None:
        self.connections += 1
        super().process_request(request, client_address)

    def handle_error(self, request, client_address) -> None:
        """Nobody's business here."""


class Reading(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        page: Page = self.server
        page.readings += 1
        self.close_connection = page.hangs_up  # without a word to the client
        body = b'nv_inference_pending_request_count{model="classifier",version="1"} 7\n'
        self.send_response(200 if page.works else 503)
        self.send_header("Content-Length", str(len(body) if page.works else 0))
        self.end_headers()
        if page.works:
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Quiet."""


@pytest.fixture
def page() -> Iterator[Page]:
    with Page() as page:
        yield page
        page.shutdown()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The one that the pause goes by; `now` is its time."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(pending_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_a_page_that_was_never_there_says_nothing_waits(clock: SimpleNamespace) -> None:
    """Such a server goes without a bound; nor is it asked again at once."""
    pending = PendingRequests(("127.0.0.1", 1))

    assert pending() == {}
    pending._page.request = lambda *args: pytest.fail("asked again")
    assert pending() == {}
    assert PendingRequests(None)() == {}


def test_a_page_that_fails_is_told_from_one_on_which_nothing_waits(page: Page, clock: SimpleNamespace) -> None:
    """None while it does not come; asked again after the pause, on a new connection, and then believed again."""
    pending = PendingRequests(page.server_address)
    assert pending() == {"classifier": 7}

    page.works = False
    assert [pending() for _ in range(3)] == [None] * 3
    assert (page.readings, page.connections) == (2, 1)

    page.works, clock.now = True, pending_module.PAUSE_SECONDS
    assert pending() == {"classifier": 7}
    assert (page.readings, page.connections) == (3, 2)
    pending.close()


def test_a_connection_that_was_closed_meanwhile_is_no_failure(page: Page, clock: SimpleNamespace) -> None:
    """The server hung up on an idle one: the page is asked for on a new one at once."""
    pending = PendingRequests(page.server_address)
    page.hangs_up = True

    assert [pending() for _ in range(3)] == [{"classifier": 7}] * 3
    assert page.connections == 3
    pending.close()
