"""Certificates for servers on 127.0.0.1, made by the `openssl` command."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

__all__ = ["Certificates", "make_certificates"]


@dataclass(frozen=True)
class Certificates:
    """A certificate authority, what it has signed, and an authority that has signed nothing of it."""

    ca: Path
    other_ca: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path

    def server_args(self, port: int, *, clients: bool = False) -> tuple[str, ...]:
        """Arguments of a Redis server that speaks TLS on `port` and nothing else; `clients`: only with a certificate."""
        return (
            *("--port", "0", "--tls-port", str(port)),
            *("--tls-cert-file", str(self.server), "--tls-key-file", str(self.server_key)),
            *("--tls-ca-cert-file", str(self.ca), "--tls-auth-clients", "yes" if clients else "no"),
        )


def make_certificates(directory: Path) -> Certificates:
    """Make them; without `openssl`, skip the test, or fail it under `CI=true`."""
    if shutil.which("openssl") is None:
        if os.environ.get("CI", "").lower() in ("1", "true", "yes"):
            pytest.fail("no openssl: CI must have it", pytrace=False)
        pytest.skip("no openssl")
    directory.mkdir(parents=True, exist_ok=True)

    def made(name: str, issuer: str, *more: str) -> tuple[Path, Path]:
        certificate, key = directory / f"{name}.pem", directory / f"{name}.key"
        signer = ("-CA", str(directory / f"{issuer}.pem"), "-CAkey", str(directory / f"{issuer}.key"))
        command = [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
        ]
        command += ["-days", "2", "-subj", f"/CN={name}", "-keyout", str(key), "-out", str(certificate)]
        command += [*(signer if issuer else ()), *more]
        subprocess.run(command, check=True, capture_output=True, timeout=30)
        return certificate, key

    leaf = ("-addext", "basicConstraints=critical,CA:FALSE")
    ca, _ = made("ca", "")
    other_ca, _ = made("other-ca", "")
    server, server_key = made("server", "ca", *leaf, "-addext", "subjectAltName=IP:127.0.0.1")
    client, client_key = made("client", "ca", *leaf)
    return Certificates(ca, other_ca, server, server_key, client, client_key)
