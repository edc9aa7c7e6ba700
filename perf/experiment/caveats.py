# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with a measured point, each by a name, and what to do about it. Knows figures, measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ensemble.contract import ENSEMBLE
from perf.load_point import LEAST_FOR_P99
from perf.machine_load import Shares

# perf_analyzer's own criterion: three windows within so many per cent of each other.
STABLE_PERCENT = 10.0
# Of the requests that should be in flight; of the latency, by which a request was sent too late.
LEAST_IN_FLIGHT, MOST_LAG = 0.9, 0.1
# Of all cores.
MOST_CLIENT_PERCENT, MOST_OTHER_PERCENT = 50.0, 10.0
# Of the offered rate.
LEAST_KEPT_UP = 0.95

ADVICE = {
    "unstable": "the three windows of the point differ; take the figure as a rough one, or give more --seconds on a "
    "quieter machine",
    "too few for a p99": f"no 99th percentile is given of fewer than {LEAST_FOR_P99} requests; give more --seconds",
    "not every text": "the point was too short to send every text, so its texts are not those of other points; give "
    "more --seconds",
    "client saturated": "the client could not keep so many requests in flight, or took most of the machine; the server "
    "could do more: run the client elsewhere, or on more cores",
    "machine busy": "other processes, or other tenants of the host, used the machine during the point; the figure is "
    "too low: end them and measure again",
    "errors": "some requests failed; latencies are those of the others: see the server's log",
    "cannot keep up": "the server answered clearly fewer than were offered: the queue grows, and latency with the "
    "length of the run",
    "utilization unknown": "the point was too short for the processes to be watched",
}

GENERAL = (
    "Closed loop: so many clients, each waiting for its answer before it sends again. Latency is then clients over "
    "throughput, not what open traffic of that rate would see; that is in the open loop's table.",
    "The clients share this machine's cores with the server: their work is a cost of the served figures.",
    "Each point was measured once, in one run, in the order of the tables. Nothing was measured again because of its "
    "result.",
    "FLOPs count matrix products. Those of text_classifier are an estimate: of texts that follow each other in batches "
    "of the mean size.",
    "baseline and looped get token ids, already made and padded to the longest row the model takes, as in the case "
    "study; text_classifier gets texts and tokenizes them, within the figures.",
    "The time of each stage is a mean over all requests of a point, its start and end included; `client` is what the "
    "client waited beyond what the server accounts for.",
)


def caveat(name: str, detail: str) -> dict[str, str]:
    """One, with the figure that earned it."""
    assert name in ADVICE
    return {"name": name, "detail": detail}


def of_windows(windows: Sequence[dict[str, float]]) -> list[dict[str, str]]:
    """Whether throughput and mean latency stood still from window to window."""
    found = []
    for name, unit in (("requests_per_second", "requests/s"), ("mean_ms", "ms mean latency")):
        values = [window[name] for window in windows]
        if min(values) <= 0 or max(values) / min(values) > 1 + STABLE_PERCENT / 100:
            found.append(f"{' / '.join(f'{value:.3g}' for value in values)} {unit}")
    return [caveat("unstable", "; ".join(found))] if found else []


def of_requests(requests: int, errors: int) -> list[dict[str, str]]:
    """What too few of them, or failed ones, mean."""
    found = []
    if requests < LEAST_FOR_P99:
        found.append(caveat("too few for a p99", f"{requests} requests"))
    if errors:
        found.append(caveat("errors", f"{errors} failed"))
    return found


def of_texts(sent: int, texts: int) -> list[dict[str, str]]:
    """Whether all were sent that had to be: where each row is padded to the same length, any will do."""
    return [caveat("not every text", f"{sent} of {texts} texts")] if sent < texts else []


def of_machine(shares: Shares | None) -> list[dict[str, str]]:
    """Who else used the cores."""
    if shares is None:
        return [caveat("utilization unknown", "fewer than two samples")]
    found = []
    if shares.client > MOST_CLIENT_PERCENT:
        found.append(caveat("client saturated", f"the client took {shares.client:.0f} % of the machine"))
    if shares.other > MOST_OTHER_PERCENT:
        found.append(caveat("machine busy", f"{shares.other:.0f} % of it were used by others"))
    return found


def of_clients(in_flight: float | None, clients: int) -> list[dict[str, str]]:
    """Whether a closed loop kept its requests in flight. in_flight: on average; None if unknown."""
    if in_flight is None or in_flight >= LEAST_IN_FLIGHT * clients:
        return []
    return [caveat("client saturated", f"{in_flight:.1f} of {clients} requests in flight")]


def of_arrivals(lag_ms: float, median_ms: float, offered: float, answered: float) -> list[dict[str, str]]:
    """Whether an open loop sent in time, and the server kept up. lag_ms: of the 99th percentile."""
    found = []
    if lag_ms > MOST_LAG * median_ms:
        found.append(caveat("client saturated", f"1 % of requests was sent {lag_ms:.1f} ms too late or more"))
    if answered < LEAST_KEPT_UP * offered:
        found.append(caveat("cannot keep up", f"{answered:.1f} of {offered:.1f} requests/s"))
    return found


def general(why_no_gpu: str | None, classifier: str, note: str | None) -> list[str]:
    """What a reader has to know whatever was measured. note: of who ran it."""
    found = [note] if note else []
    if why_no_gpu is not None:
        found.append(f"No GPU ({why_no_gpu}): these are CPU figures, and say nothing of any GPU.")
    elif classifier == "onnx":
        found.append(
            f"No engine is installed: {ENSEMBLE} ran on the CPU, and the others on the GPU. Compare after make export "
            "TARGET=tensorrt."
        )
    return [*found, *GENERAL]


def raised(result: dict[str, Any]) -> dict[str, str]:
    """The advice for the caveats that a result has."""
    names = {one["name"] for row in [*result["rows"], *result["open_loop"]] for one in row["caveats"]}
    return {name: advice for name, advice in ADVICE.items() if name in names}
