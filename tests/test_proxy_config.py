# SPDX-License-Identifier: Apache-2.0
"""deploy/proxy/envoy.yaml against the project's own limits; tests/test_several_servers.py runs it."""

from __future__ import annotations

import re

import yaml
from conftest import ROOT

from ensemble.contract import Contract


def test_a_whole_request_can_be_held() -> None:
    """Envoy's buffer is larger than the longest request that the tokenizer takes, and the comment has that number."""
    text = (ROOT / "deploy/proxy/envoy.yaml").read_text(encoding="utf-8")
    (listener,) = yaml.safe_load(text)["static_resources"]["listeners"]
    tokenizer = Contract.read(ROOT / "model_repository").models["tokenizer"]
    longest = tokenizer.parameters["max_request_bytes"].string_value

    assert re.search(r"the tokenizer takes (\d+) bytes \(max_request_bytes\)", text)[1] == longest
    assert listener["per_connection_buffer_limit_bytes"] > int(longest)
