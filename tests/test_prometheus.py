# SPDX-License-Identifier: Apache-2.0
"""Alerts and recorded figures: each rule on made-up series, and all of them in a real Prometheus on real servers."""

from __future__ import annotations

import json
import random
import re
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from promql import RULES, binary, promtool, rules

from ensemble.handlers.passes import plan
from ensemble.launcher.server import Server
from ensemble.samples import short_samples
from perf import closed_loop
from perf.deployments import DEPLOYMENTS, open_deployment
from perf.in_process import cost_model

ALERTS = rules("alerts.yml")
# In flight at each server; the alerts ask for 8 that wait.
CLIENTS = 64
SECONDS = 240.0

# Samples by their labels, as {"model": "classifier"} gives them; the newest value each.
Query = Callable[[str], list[tuple[dict[str, str], float]]]


def test_promtool_accepts_the_config_and_the_rules() -> None:
    """The rules are checked with the config that names them."""
    promtool("check", "config", "prometheus.yml")


def test_in_kubernetes_the_servers_are_the_pods_of_the_deployment(tmp_path: Path) -> None:
    """By the label and the port that deployment.yaml gives them. Debian's build cannot look for pods: without that part."""
    config = yaml.safe_load((RULES / "kubernetes.yml").read_text())
    pod = yaml.safe_load((ROOT / "deploy/kubernetes/deployment.yaml").read_text())["spec"]["template"]
    ports = {port["name"]: port["containerPort"] for one in pod["spec"]["containers"] for port in one.get("ports", [])}
    (job,) = config["scrape_configs"]

    assert (
        job["relabel_configs"][0]["regex"] == f"{pod['metadata']['labels']['app']};metrics" and ports["metrics"] == 8002
    )
    assert job.pop("kubernetes_sd_configs") == [{"role": "pod"}]
    config["rule_files"] = [str(RULES / file) for file in config["rule_files"]]
    (tmp_path / "kubernetes.yml").write_text(yaml.safe_dump(config))
    promtool("check", "config", tmp_path / "kubernetes.yml")


def test_alerts_fire_in_their_cases_and_in_no_other() -> None:
    """alerts.test.yml says for each case which alerts fire; promtool runs it."""
    promtool("test", "rules", "alerts.test.yml")


def test_every_alert_has_a_case_in_which_it_fires() -> None:
    """By name, among what is expected; that the others stay silent is part of each case."""
    cases = (RULES / "alerts.test.yml").read_text()

    assert {alert["alert"] for alert in ALERTS} == set(re.findall(r'alertname="(\w+)"', cases))


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_every_alert_says_what_is_wrong_and_leads_to_its_entry_in_the_runbook(alert: dict) -> None:
    """Severity, summary, description, and a heading of RUNBOOK.md."""
    assert alert["labels"]["severity"] in ("critical", "warning")
    assert alert["annotations"]["summary"] and alert["annotations"]["description"]
    file, anchor = alert["annotations"]["runbook"].split("#")
    headings = re.findall(r"^## (.+)$", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    assert anchor in {heading.lower().replace(" ", "-") for heading in headings}


def test_passes_planned_for_long_texts_do_not_look_like_a_collapse() -> None:
    """Rows of 300 to 512 tokens, all different, 8 a batch: the most passes that planning makes of a mix."""
    choose = random.Random(5)
    cost = cost_model(ROOT / "model_repository")
    passes = [len(plan(choose.sample(range(300, 513), 8), cost)) for _ in range(200)]

    assert 8 * len(passes) / sum(passes) > 1.25  # BatchCollapsed fires below
    assert sum(passes) / (8 * len(passes)) < 0.85  # BatchTakenApart fires above


@contextmanager
def prometheus(folder: Path, targets: dict[str, int]) -> Iterator[Query]:
    """The project's own config and rules on these servers (name -> metrics port), everything in seconds, not minutes."""
    for file in ("recording.yml", "alerts.yml"):
        text = (RULES / file).read_text()
        (folder / file).write_text(re.sub(r"for: \d+m", "for: 2s", text).replace("[2m]", "[15s]"))
    config = yaml.safe_load((RULES / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"] = [
        {"targets": [f"127.0.0.1:{port}"], "labels": {"instance": name}} for name, port in targets.items()
    ]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                binary("prometheus"),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=log,
        )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def query(expression: str) -> list[tuple[dict[str, str], float]]:
        url = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        with opener.open(url, timeout=10) as response:
            return [(sample["metric"], float(sample["value"][1])) for sample in json.load(response)["data"]["result"]]

    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                query("vector(1)")
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
                time.sleep(0.1)
        yield query
    finally:
        process.kill()
        process.wait()


@contextmanager
def load(*servers: Server) -> Iterator[None]:
    """The same short texts to all of them at the same time, CLIENTS in flight at each, until the block is left."""
    texts = [sample.text for sample in short_samples()]
    enough = threading.Event()
    failures: list[Exception] = []

    def send(server: Server) -> None:
        try:
            while not enough.is_set():
                closed_loop.timed(server.url, texts, CLIENTS, seconds=2)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=send, args=(server,)) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        enough.set()
        for thread in threads:
            thread.join()
    assert not failures


def value(query: Query, expression: str) -> float:
    """Of the one sample that fits; 0 as long as there is none."""
    samples = query(expression)
    assert len(samples) <= 1, samples
    return samples[0][1] if samples else 0.0


@pytest.fixture
def looped(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The case study's handler behind the same tokenizer. Ended at once: nothing of it is kept."""
    server = open_deployment(DEPLOYMENTS["looped"], repository, tmp_path_factory.mktemp("looped"))
    server.start()
    yield server
    server.kill()


def test_the_collapsed_batch_is_reported_of_the_looped_handler_and_not_of_ours(
    server: Server, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """One Prometheus on both, under the same load at the same time. The recorded figures are what the load makes them."""
    binary("prometheus")
    looped = request.getfixturevalue("looped")
    with prometheus(tmp_path, {"ours": server.metrics_port, "looped": looped.metrics_port}) as query:
        with load(server, looped):
            deadline = time.monotonic() + SECONDS
            expected = {"BatchCollapsed", "BatchTakenApart"}
            while True:
                firing = query('ALERTS{alertstate="firing"}')
                queued = value(query, 'onepass:queued:mean{instance="ours", model="classifier"}')
                in_flight = value(query, 'onepass:in_flight:mean{instance="ours", model="text_classifier"}')
                loaded = queued >= 8 and in_flight > CLIENTS / 2
                if loaded and expected <= {labels["alertname"] for labels, _ in firing}:
                    break
                assert time.monotonic() < deadline, f"after {SECONDS} s: {firing}, {query('onepass:queued:mean')}"
                time.sleep(0.5)

            def of(figure: str, instance: str, model: str) -> float:
                return value(query, f'{figure}{{instance="{instance}", model="{model}"}}')

            # Triton formed batches for both; only ours ran them as such.
            assert of("onepass:batch_rows:mean", "looped", "looped") > 8
            assert of("onepass:call_rows:mean", "looped", "looped") == pytest.approx(1, abs=0.2)
            assert of("onepass:call_rows:mean", "ours", "classifier") > 4
            assert of("onepass:batch_calls:mean", "ours", "tokenizer") == pytest.approx(1, abs=0.2)
            # Little's law: those in flight are the clients there are.
            assert in_flight < CLIENTS * 1.25
            stages = query('sum(onepass:stage_seconds:mean{instance="ours", model="classifier"})')[0][1]
            assert 0.5 < stages / of("onepass:request_seconds:mean", "ours", "classifier") < 1.25
            assert 0 < value(query, 'onepass:cpu_utilization:mean{instance="ours"}') <= 1
        assert {labels["model"] for labels, _ in firing if labels["alertname"] in expected} == {"looped"}
        # Never pending either. Alerts of waiting are left out: shortened to seconds, they depend on the machine's speed.
        silent = 'alertname=~"Batch.*|GpuIdle|RequestsRefused|RequestsFailing|ModelRestarted|ServerDown"'
        assert query(f'count_over_time(ALERTS{{instance="ours", {silent}}}[1h])') == []
