# SPDX-License-Identifier: Apache-2.0
"""What a server is started with, and how tritonserver is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ensemble.launcher.admin_key import HTTP_HEADER, RESTRICTED, new_key
from ensemble.launcher.tls_files import TlsFiles
from ensemble.launcher.working_folder import WorkingFolder

LOOPBACK = "127.0.0.1"
# Given by the server to requests in flight when it is told to stop, and to idle HTTP connections.
EXIT_TIMEOUT_SECONDS = 5
# Of shared memory, for each instance of a Python model: more than 64 of the longest texts need, 18 MB, measured. Taken
# whole at the start, because a pool that grows under load never shrinks, and kills its instance where it cannot.
SHM_BYTES = 20_000_000


@dataclass(frozen=True)
class Trace:
    """Where the traces of one request in `rate` go: url, of an OpenTelemetry collector, OTLP over HTTP."""

    url: str
    rate: int = 100

    def arguments(self) -> list[str]:
        """For tritonserver."""
        return [
            f"--trace-config={setting}"
            for setting in (
                "mode=opentelemetry",
                "level=TIMESTAMPS",
                f"rate={self.rate}",
                f"opentelemetry,url={self.url}",
                "opentelemetry,resource=service.name=text_classifier",
            )
        ]


@dataclass(frozen=True)
class ServerOptions:
    """What to serve, and where.

    repository:  the model repository
    config_name: which <model>/configs/*.pbtxt to prefer over config.pbtxt
    models:      loaded, with the steps an ensemble needs; nothing else is
    address:     to listen on; 127.0.0.1 keeps it to this machine
    *_port:      0 picks a free one
    admin_key:   opens repository control, shared memory, trace and logging; by default one that nobody else knows
    tls:         for the gRPC port. This server's HTTP knows no TLS, so with it HTTP listens on 127.0.0.1 only.
    trace:       of some requests; None is of none
    """

    repository: Path
    config_name: str | None = None
    models: tuple[str, ...] = ("text_classifier",)
    address: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    admin_key: str = field(default_factory=new_key, repr=False)
    tls: TlsFiles | None = None
    trace: Trace | None = None

    @property
    def http_address(self) -> str:
        """Where HTTP listens."""
        return LOOPBACK if self.tls else self.address

    def arguments(self, backends: Path, folder: WorkingFolder, ports: Mapping[str, int]) -> list[str]:
        """For tritonserver. backends: its folder of them; ports: of http, grpc and metrics, free ones."""
        key = f"{','.join(RESTRICTED)}:{HTTP_HEADER}={self.admin_key}"
        return [
            f"--model-repository={folder.repository}",
            f"--backend-directory={backends}",
            *([f"--model-config-name={self.config_name}"] if self.config_name else []),
            "--model-control-mode=explicit",
            *(f"--load-model={model}" for model in self.models),
            # What is served is what the files say, not what the server would add to them.
            "--disable-auto-complete-config",
            "--exit-on-error=true",
            f"--exit-timeout-secs={EXIT_TIMEOUT_SECONDS}",
            f"--backend-config=python,shm-region-prefix-name={folder.shm_prefix}",
            f"--backend-config=python,shm-default-byte-size={SHM_BYTES}",
            f"--http-address={self.http_address}",
            *(f"--{protocol}-address={self.address}" for protocol in ("grpc", "metrics")),
            *(f"--{protocol}-port={port}" for protocol, port in ports.items()),
            f"--http-restricted-api={key}",
            f"--grpc-restricted-protocol={key}",
            # By default each gRPC thread keeps 8 requests for reuse, each as large as the largest it ever held: under
            # `python -m perf hostile` that was most of what the server's memory grew by.
            "--grpc-infer-allocation-pool-size=0",
            # Doors that the environment of a cloud could open, and that know no keys.
            "--allow-vertex-ai=false",
            "--allow-sagemaker=false",
            *(self.tls.arguments() if self.tls else ()),
            *(self.trace.arguments() if self.trace else ()),
            "--allow-gpu-metrics=true",
            "--log-info=false",
        ]
