# SPDX-License-Identifier: Apache-2.0
"""The files of a server's TLS, checked before it starts, and whether what it then presents can be relied on.

Knows nothing of Triton: the same holds for any server on a port.
"""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

from ensemble.errors import ConfigError


@dataclass(frozen=True)
class TlsFiles:
    """PEM files for TLS on the gRPC port.

    certificate: of the server, and behind it those that lead to its authority, if any do
    key:         the private key of it, without a passphrase
    client_ca:   only callers with a certificate of this authority are let in; None lets in everybody
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def arguments(self) -> list[str]:
        """For tritonserver."""
        return [
            "--grpc-use-ssl=true",
            f"--grpc-server-cert={self.certificate.resolve()}",
            f"--grpc-server-key={self.key.resolve()}",
            *(["--grpc-use-ssl-mutual=true", f"--grpc-root-cert={self.client_ca.resolve()}"] if self.client_ca else []),
        ]

    def check(self) -> None:
        """Raises ConfigError naming the option whose file is missing, unreadable or does not fit."""
        files = {"--tls-certificate": self.certificate, "--tls-key": self.key, "--tls-client-ca": self.client_ca}
        for option, file in files.items():
            try:
                if file is not None:
                    file.read_bytes()
            except OSError as error:
                raise ConfigError(f"{option} {file} cannot be read ({error.strerror}): name a PEM file") from None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # Without `password` OpenSSL would ask for a passphrase on the terminal.
            context.load_cert_chain(self.certificate, self.key, password="")
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"--tls-certificate {self.certificate} and --tls-key {self.key} cannot be used together "
                f"({_reason(error)}): give a PEM certificate and its own key, without a passphrase"
            ) from None
        try:
            if self.client_ca is not None:
                context.load_verify_locations(self.client_ca)
        except ssl.SSLError as error:
            raise ConfigError(
                f"--tls-client-ca {self.client_ca} holds no certificates ({_reason(error)}): give a PEM file of them"
            ) from None


def why_untrusted(address: str, port: int, certificate: Path) -> str | None:
    """Shake hands with a TLS server that should present `certificate`; None, or why a caller would turn away."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # callers know the server by other names than the launcher does
    context.load_verify_locations(certificate)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # its authority need not be known here
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection((address, port), timeout=5) as connection, context.wrap_socket(connection):
            return None
    except OSError as error:  # ssl.SSLError is one
        return _reason(error)


def _reason(error: Exception) -> str:
    """OpenSSL's reason in words, without its place in the source."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.lower().replace("_", " ")
    return str(error)
