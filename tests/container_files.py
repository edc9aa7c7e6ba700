# SPDX-License-Identifier: Apache-2.0
"""Dockerfile and compose.yaml as tests read them."""

from __future__ import annotations

import re
from typing import Any

import yaml
from conftest import ROOT


def stages() -> dict[str, list[tuple[str, str]]]:
    """The Dockerfile's stages: instructions and their arguments, lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    instructions = [tuple(line.split(maxsplit=1)) for line in re.sub(r"\\\n\s*", "", text).splitlines() if line.strip()]
    found: dict[str, list[tuple[str, str]]] = {"": []}
    for instruction, arguments in instructions:
        if instruction == "FROM":
            found[arguments.rsplit(" AS ", 1)[1]] = []
        found[list(found)[-1]].append((instruction, arguments))
    return found


def arguments_of(stage: str, instruction: str) -> list[str]:
    """Of each such instruction of a stage."""
    return [arguments for name, arguments in stages()[stage] if name == instruction]


def compose(environment: dict[str, str] | None = None) -> dict:
    """The services of a checkout in /checkout, with their variables replaced as docker compose does: once parsed."""
    known = {"PWD": "/checkout", **(environment or {})}

    def replaced(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: replaced(value) for key, value in node.items()}
        if isinstance(node, list):
            return [replaced(value) for value in node]
        if not isinstance(node, str):
            return node
        text = re.sub(r"\$\{(\w+)(?::-([^}]*)|:\?[^}]*)?\}", lambda match: known.get(match[1]) or match[2] or "", node)
        assert "$" not in text
        return text

    return replaced(yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8")))["services"]
