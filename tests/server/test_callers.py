"""Who calls, and how many connections each address may hold: what is over it is answered, not cut."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from quarrel.errors import ConfigError
from quarrel.server import Keyring, Rates, Settings
from quarrel.server.callers import Proxies
from quarrel.server.settings import networks
from tests.server.conftest import Live, running
from tests.slowly import step_slowly

NO_RATES = Rates(requests=0)


@pytest.mark.parametrize(
    ("trusted", "peer", "forwarded", "caller"),
    [
        ("10.0.0.0/8", "10.0.0.1", "1.2.3.4", "1.2.3.4"),
        ("10.0.0.0/8", "10.0.0.1", "6.6.6.6, 1.2.3.4", "1.2.3.4"),  # the caller wrote the first
        ("10.0.0.0/8", "10.0.0.1", "6.6.6.6, 1.2.3.4, 10.9.9.9", "1.2.3.4"),
        ("10.0.0.0/8", "10.0.0.1", "10.1.1.1,10.2.2.2", "10.1.1.1"),
        ("10.0.0.0/8", "10.0.0.1", "", "10.0.0.1"),
        ("10.0.0.0/8", "10.0.0.1", "1.2.3.4, unknown", "10.0.0.1"),
        ("10.0.0.0/8", "10.0.0.1", "1.2.3.4:5555", "1.2.3.4"),
        ("::1", "::1", "[2001:db8::1]:99", "2001:db8::1"),
        ("127.0.0.1", "::ffff:127.0.0.1", "1.2.3.4", "1.2.3.4"),
        ("10.0.0.0/8", "11.0.0.1", "1.2.3.4", "11.0.0.1"),
        ("10.0.0.0/8", "local", "1.2.3.4", "local"),
    ],
)
def test_only_a_trusted_proxy_says_who_calls(trusted: str, peer: str, forwarded: str, caller: str) -> None:
    assert Proxies(networks([trusted])).caller(peer, forwarded) == caller


def test_a_proxy_that_is_no_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="the trusted proxy 'nginx' is no address"):
        Settings(trusted_proxies=("nginx",)).check(has_keys=True)


@pytest.fixture(name="narrow")
def _narrow(tmp_path: Path) -> Iterator[Live]:
    """Four connections an address."""
    with running(Settings(data_dir=tmp_path, rates=NO_RATES, connections_per_address=4, header_timeout=3.0)) as made:
        made.client.close()
        yield made


def page(live: Live, **headers: str) -> ClientConnection:
    return connect(f"ws://127.0.0.1:{live.port}/ws", additional_headers=headers)


def test_one_connection_too_many_is_answered(narrow: Live) -> None:
    with ExitStack() as held:
        for _ in range(2):
            held.enter_context(socket.create_connection(("127.0.0.1", narrow.port)))
            held.enter_context(page(narrow))  # WebSockets count, too
        for path, body in (("/v1/completions", {"prompt": "a" * 2_000_000}), ("/api/generate", {})):
            with httpx.Client() as client:
                answer = client.post(f"{narrow.url}{path}", json=body)
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            assert "this address holds 4 connections already" in str(answer.json()["error"])
            assert ("type" in answer.json()["error"]) == path.startswith("/v1")
        with pytest.raises(InvalidStatus) as refused:
            page(narrow)
        assert refused.value.response.status_code == 429
    end = time.monotonic() + 60
    while httpx.get(f"{narrow.url}/healthz").status_code != 200:  # when those have ended, there is room
        assert time.monotonic() < end


def test_behind_a_trusted_proxy_each_caller_has_its_own_bound(tmp_path: Path) -> None:
    settings = Settings(
        data_dir=tmp_path, rates=Rates(requests=3), connections_per_address=2, trusted_proxies=("127.0.0.0/8",)
    )
    with running(settings) as made, ExitStack() as held:
        ours, other = {"X-Forwarded-For": "1.1.1.1"}, {"X-Forwarded-For": "1.1.1.1, 2.2.2.2"}
        for _ in range(2):
            held.enter_context(page(made, **ours))
        with pytest.raises(InvalidStatus) as refused:
            page(made, **ours)
        assert refused.value.response.status_code == 429
        held.enter_context(page(made, **other))
        assert [made.client.get("/v1/models", headers=other).status_code for _ in range(3)] == [200, 200, 429]


def test_hundreds_of_streams_of_one_address_pass(tmp_path: Path) -> None:
    assert min(Settings().connections_per_address, Rates().streams) > 1000
    settings = Settings(data_dir=tmp_path, rates=NO_RATES, queue=1000)
    request = json.dumps({"prompt": "a", "max_tokens": 1, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"

    async def one(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head % len(request) + request)
        answer = await reader.read()
        writer.close()
        return answer

    async def all_of_them(port: int) -> list[bytes]:
        return await asyncio.gather(*(one(port) for _ in range(200)))

    with running(settings) as made:
        made.client.post("/api/models/demo")
        answers = asyncio.run(all_of_them(made.port))
    assert all(a.startswith(b"HTTP/1.1 200") and b"data: [DONE]" in a for a in answers)


def test_a_websocket_is_refused_with_a_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Keyring(tmp_path).create("a")
    with running(Settings(data_dir=tmp_path, rates=NO_RATES)) as made:
        with pytest.raises(InvalidStatus) as refused:
            page(made)
        assert refused.value.response.status_code == 401
    monkeypatch.setattr("quarrel.server.websocket.MAX_CONNECTIONS", 1)
    with running(Settings(data_dir=tmp_path / "other", rates=NO_RATES)) as made, page(made):
        with pytest.raises(InvalidStatus) as refused:
            page(made)
        assert refused.value.response.status_code == 503
        assert refused.value.response.headers["retry-after"] == "5"


def test_a_model_has_a_bounded_number_of_websockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step_slowly(monkeypatch, 0.02)
    with running(Settings(data_dir=tmp_path, rates=NO_RATES, sockets_per_model=1)) as made:
        with page(made) as first, page(made) as second:
            long = {"type": "inference", "payload": {"prompt": "a", "max_tokens": 400, "ignore_eos": True}}
            long["payload"]["seed"] = 1  # type: ignore[index]
            for _ in range(2):  # of one connection as many as it likes
                first.send(json.dumps(long))
            while '"token"' not in str(first.recv(30)):
                pass
            second.send(json.dumps(long))
            while "error" not in (said := str(second.recv(30))):
                pass
            assert json.loads(said)["payload"]["code"] == "QUEUE_FULL"
            first.send(json.dumps({"type": "stop", "payload": {}}))
            ended = 0
            while ended < 2:
                ended += "cancelled" in str(first.recv(30))
            second.send(json.dumps({"type": "inference", "payload": {"prompt": "a", "max_tokens": 1}}))
            while '"complete": true' not in (said := str(second.recv(30))):
                assert "error" not in said
