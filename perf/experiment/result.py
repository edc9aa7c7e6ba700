# SPDX-License-Identifier: Apache-2.0
"""The experiment's record: what is in it, and how it is read back. Knows nothing of measuring or of drawing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ensemble.errors import ConfigError

KIND, SCHEMA = "experiment", 1
JSON = "experiment.json"

# What a report cannot do without, and of which type.
FIELDS: dict[str, type] = {
    "command": str,
    "created": str,
    "machine": dict,
    "versions": dict,
    "complete": bool,
    "seed": int,
    "gpus": list,
    "model": dict,
    "load": dict,
    "workloads": dict,
    "deployments": dict,
    "caveats": list,
    "advice": dict,
    "ceiling": dict,
    "answers": list,
    "rows": list,
    "open_loop": list,
    "in_process": dict,
    "skipped": list,
    "failed": list,
}


def new(**known: Any) -> dict[str, Any]:
    """A record of which nothing has been measured."""
    return {
        "kind": KIND,
        "schema": SCHEMA,
        "complete": True,
        **known,
        "advice": {},
        "ceiling": {},
        "answers": [],
        "rows": [],
        "open_loop": [],
        "in_process": {},
        "skipped": [],
        "failed": [],
    }


def read(file: Path) -> dict[str, Any]:
    """A record from its file. Raises ConfigError if it is none, or not of this version."""
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{file} is missing: make perf writes one") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read ({error}): give the experiment.json of a make perf") from None
    if not isinstance(result, dict) or result.get("kind") != KIND:
        raise ConfigError(f"{file} is not an experiment's record: give the experiment.json of a make perf")
    if result.get("schema") != SCHEMA:
        raise ConfigError(
            f"{file} is of schema {result.get('schema')!r}, and this version reads {SCHEMA}: run make perf again, or "
            "render it with the version that wrote it"
        )
    for name, kind in FIELDS.items():
        if not isinstance(result.get(name), kind):
            raise ConfigError(f"{file}: {name} is missing or not a {kind.__name__}: the file was changed")
    return result


def rows(result: dict[str, Any], deployment: str, workload: str) -> list[dict[str, Any]]:
    """The closed loop's rows of one deployment and workload, fewest clients first."""
    found = [row for row in result["rows"] if row["deployment"] == deployment and row["workload"] == workload]
    return sorted(found, key=lambda row: int(row["clients"]))


def row(result: dict[str, Any], deployment: str, workload: str, clients: int) -> dict[str, Any] | None:
    """One of them."""
    return next((row for row in rows(result, deployment, workload) if row["clients"] == clients), None)
