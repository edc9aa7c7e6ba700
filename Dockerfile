# SPDX-License-Identifier: Apache-2.0
# NVIDIA's Triton image with what the handlers (serve) and the export (export) need; compose.yaml runs both.
#
# A TensorRT engine loads only under the TensorRT that built it, so both stand on one image of one release. The model
# repository is mounted, never part of an image.

ARG RELEASE=24.10

FROM nvcr.io/nvidia/tritonserver:${RELEASE}-py3 AS base
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# The Python of later releases is Ubuntu's to manage; in here it is ours. Nothing is written at run time but to /tmp.
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HOME=/tmp
WORKDIR /src
COPY requirements/handlers.txt requirements/torch-cuda.txt requirements/
# Several GB, so ahead of all that changes. PyPI has this version of torch for CUDA 13, which needs driver 580 or later; for
# an older one, TORCH_INDEX is the address of PyTorch's index for CUDA 12, whose files have no hash here.
ARG TORCH_INDEX=
RUN if [ -z "${TORCH_INDEX}" ]; then \
        python3 -m pip install --no-cache-dir --no-deps --require-hashes --requirement requirements/torch-cuda.txt; \
    else \
        python3 -m pip install --no-cache-dir --extra-index-url "${TORCH_INDEX}" \
            "$(grep --only-matching '^torch==[0-9.]*' requirements/torch-cuda.txt)"; \
    fi \
    && python3 -m pip install --no-cache-dir --no-deps --require-hashes --requirement requirements/handlers.txt


FROM base AS export
# For batchstrategy.so: compiled here, it fits the C library of the server that loads it.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
# The package of the very TensorRT that is in this image; what PyPI has of it fetches the libraries from NVIDIA's index.
COPY ensemble/errors.py ensemble/
COPY ensemble/launcher/runtime.py ensemble/launcher/
COPY export/tensorrt_package.py export/
# hadolint ignore=DL3013
RUN package="$(python3 -m export.tensorrt_package)" \
    && python3 -m pip install --no-cache-dir "${package}"
COPY pyproject.toml README.md LICENSE ./
COPY ensemble ensemble
COPY export export
COPY perf perf
COPY requirements/export.txt requirements/
RUN python3 -m pip install --no-cache-dir --no-deps --require-hashes --requirement requirements/export.txt \
    && python3 -m pip install --no-cache-dir --no-deps --no-build-isolation .
WORKDIR /onepass
# triton-server, in every release.
USER 1000:1000
# The image's own entrypoint stays: it looks after old drivers, then becomes the command.
CMD ["python3", "-m", "export", "--help"]


FROM base AS serve
COPY pyproject.toml README.md LICENSE ./
COPY ensemble ensemble
COPY export export
COPY perf perf
RUN python3 -m pip install --no-cache-dir --no-deps --no-build-isolation .
WORKDIR /onepass
USER 1000:1000
EXPOSE 8000 8001 8002
STOPSIGNAL SIGTERM
# A classification, because a server whose tokenizer or classifier died still says that it is ready. The launcher heals
# such a model by itself, within seconds. Where it serves with TLS, the environment says what the probe shows (deploy/tls).
HEALTHCHECK --interval=30s --timeout=10s --start-period=130s --retries=3 \
    CMD ["python3", "-m", "ensemble", "probe", "--deadline-seconds", "5"]
CMD ["python3", "-m", "ensemble", "serve", "--address", "0.0.0.0"]
