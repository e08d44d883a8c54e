"""Certificates for servers on 127.0.0.1, made by the `openssl` command."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

__all__ = ["KEY_PASSWORD", "Certificates", "make_certificates"]

#: Opens the client's locked key.
KEY_PASSWORD = "s3cret-key"


@dataclass(frozen=True)
class Certificates:
    """A certificate authority, what it has signed, and an authority that has signed nothing of it."""

    ca: Path
    other_ca: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path
    #: The client's key once more, which `KEY_PASSWORD` opens.
    client_locked_key: Path
    #: Of a server that is called `localhost`, and not 127.0.0.1.
    named: Path
    named_key: Path

    def server_args(
        self, port: int, *, clients: bool = False, plain_port: int = 0, named: bool = False
    ) -> tuple[str, ...]:
        """Arguments of a Redis server that speaks TLS on `port`, to clients, to its replicas and in its cluster.

        Parameters:
            clients: only to those with a certificate.
            plain_port: where it speaks without TLS; nowhere if 0.
            named: with the certificate for a host name.
        """
        certificate, key = (self.named, self.named_key) if named else (self.server, self.server_key)
        return (
            *("--port", str(plain_port), "--tls-port", str(port)),
            *("--tls-cert-file", str(certificate), "--tls-key-file", str(key)),
            *("--tls-ca-cert-file", str(self.ca), "--tls-auth-clients", "yes" if clients else "no"),
            *("--tls-replication", "yes", "--tls-cluster", "yes"),
        )

    def client_options(self) -> dict[str, Any]:
        """What the driver's clients take to be let in, whatever the server asks for."""
        return {
            "ssl": True,
            "ssl_ca_certs": str(self.ca),
            "ssl_certfile": str(self.client),
            "ssl_keyfile": str(self.client_key),
            "ssl_check_hostname": False,
        }

    def driver_options(self) -> dict[str, str]:
        """The same as options of ours, with the locked key and its password."""
        return {
            "ssl_ca_certs": str(self.ca),
            "ssl_certfile": str(self.client),
            "ssl_keyfile": str(self.client_locked_key),
            "ssl_password": KEY_PASSWORD,
        }


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
    named, named_key = made("named", "ca", *leaf, "-addext", "subjectAltName=DNS:localhost")
    locked = directory / "client-locked.key"
    lock = ["openssl", "pkey", "-in", str(client_key), "-out", str(locked)]
    lock += ["-aes256", "-passout", f"pass:{KEY_PASSWORD}"]
    subprocess.run(lock, check=True, capture_output=True, timeout=30)
    return Certificates(ca, other_ca, server, server_key, client, client_key, locked, named, named_key)
