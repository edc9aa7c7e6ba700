# SPDX-License-Identifier: Apache-2.0
"""The dashboard, as far as it can be known without Grafana: every expression parses, and every metric is really there."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from promql import GPU_METRICS, names, promtool, recorded, rules

from ensemble.launcher.server import Server

DASHBOARD = json.loads((ROOT / "deploy/grafana/onepass.json").read_text(encoding="utf-8"))
PANELS = DASHBOARD["panels"]
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}

# What Grafana fills in.
FILLED_IN = {"$__rate_interval": "1m", "$instance": ".*", "$model": ".*"}


def expressions() -> list[str]:
    """Of all panels and annotations, as Prometheus gets them."""
    found = [target["expr"] for panel in PANELS for target in panel["targets"]]
    found += [annotation["expr"] for annotation in DASHBOARD["annotations"]["list"]]
    for variable, text in FILLED_IN.items():
        found = [expression.replace(variable, text) for expression in found]
    return found


def test_every_expression_parses(tmp_path: Path) -> None:
    """By promtool, as rules of a file."""
    rules_of_all = [{"record": f"dashboard:{index}", "expr": text} for index, text in enumerate(expressions())]
    file = tmp_path / "dashboard.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules_of_all}]}))

    assert not any("$" in text for text in expressions())
    promtool("check", "rules", file)


def test_every_metric_of_dashboard_and_rules_is_exposed_by_the_server(server: Server) -> None:
    """By the running one, recorded by a rule, or, for GPUs, in Triton's documentation."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{server.metrics_port}/metrics", timeout=10) as response:
        exposed = set(re.findall(r"^# TYPE (\S+) ", response.read().decode(), re.MULTILINE))
    used = set().union(*map(names, expressions()))
    used |= {names(variable["definition"]).pop() for variable in VARIABLES.values() if "definition" in variable}
    used |= set().union(*(names(rule["expr"]) for file in ("recording.yml", "alerts.yml") for rule in rules(file)))

    assert len(used) > 30
    assert used - recorded() - GPU_METRICS - exposed == set()


def test_every_recorded_figure_is_looked_at() -> None:
    """By a panel, an alert, or another rule."""
    alerts = [rule["expr"] for rule in rules("alerts.yml")]
    used = set().union(*(names(text) for text in [*expressions(), *alerts]))
    used |= set().union(*(names(rule["expr"]) - {rule["record"]} for rule in rules("recording.yml")))

    assert recorded() - used == set()


def test_the_panels_show_what_an_operator_asks_for() -> None:
    """Batch size, passes, time per stage, refusals, throughput, queues, utilization, restarts, alerts."""
    titles = {panel["title"] for panel in PANELS}

    assert titles >= {
        "Batch size",
        "Calls per batch",
        "Time per stage",
        "Refusals and failures",
        "Throughput",
        "Queues",
        "Utilization",
        "Restarts",
        "Alerts",
    }


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_every_panel_says_what_it_shows_and_whence(panel: dict) -> None:
    """A description, a unit, the data source of the variable, and the servers that were chosen."""
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert all('instance=~"$instance"' in target["expr"] for target in panel["targets"])


def test_no_panels_overlap_or_leave_the_grid() -> None:
    """Grafana's grid is 24 wide; ids are unique."""
    taken: dict[tuple[int, int], str] = {}
    for panel in PANELS:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert x < 24
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)


def test_variables_are_all_defined() -> None:
    """Those that expressions use, and the data source that every panel takes."""
    text = json.dumps(DASHBOARD)
    used = set(re.findall(r"\$\{?([a-z]\w+)\}?", text)) - {"__rate_interval"}

    assert used == set(VARIABLES) == {"datasource", "instance", "model"}


def test_grafana_is_told_where_dashboard_and_prometheus_are() -> None:
    """The provisioning files name the folder that README mounts, and a data source of the dashboard's kind."""
    folder = ROOT / "deploy/grafana/provisioning"
    provider = yaml.safe_load((folder / "dashboards/onepass.yml").read_text())["providers"][0]
    source = yaml.safe_load((folder / "datasources/prometheus.yml").read_text())["datasources"][0]

    assert provider["type"] == "file"
    assert f"onepass.json:{provider['options']['path']}/onepass.json" in (ROOT / "deploy/README.md").read_text()
    assert source["type"] == VARIABLES["datasource"]["query"] == "prometheus"
