"""TLS: the store's certificate is checked against who is trusted."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pyarrow import flight

from quarrel.errors import FlightUnavailable
from quarrel.flight import Access, LongbowClient
from tests.flight.stores import QUICK


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    """A certificate for localhost, signed by itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder: Path = tmp_path_factory.mktemp("tls")
    options = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    subprocess.run(
        ["openssl", *options.split(), "-keyout", "key.pem", "-out", "cert.pem"], cwd=folder, check=True, capture_output=True
    )
    return (folder / "cert.pem").read_bytes(), (folder / "key.pem").read_bytes()


class Server(flight.FlightServerBase):  # type: ignore[misc]
    def do_action(self, context: Any, action: Any) -> Any:
        return iter([json.dumps({"status": "READY", "index_len": 3}).encode()])


def test_a_trusted_certificate_lets_calls_through_and_another_does_not(pair: tuple[bytes, bytes]) -> None:
    with Server("grpc+tls://localhost:0", tls_certificates=[pair]) as server:
        address = f"grpc+tls://localhost:{server.port}"
        with LongbowClient(address, address, access=Access(tls_root=pair[0])) as client:
            assert client.readiness("d").indexed == 3
        with (
            LongbowClient(address, address, retry=QUICK) as client,
            pytest.raises(FlightUnavailable, match="cannot be reached"),
        ):
            client.readiness("d")
