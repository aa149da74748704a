"""A full server refuses from the bytes that came: as the guard does, and the plainest requests only."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
import uvicorn
from prometheus_client import CollectorRegistry
from uvicorn.server import ServerState

from quarrel.server import Rates, Settings
from quarrel.server.connections import protocol_for
from quarrel.server.errors import Refused
from quarrel.server.keys import Keyring
from quarrel.server.middleware import _HEADERS
from quarrel.server.shed import Shed
from tests.server.conftest import running

FULL = Refused(503, "queue_full", "3 requests wait already", retry_after=2.0)


class Counted:
    """Metrics that only count."""

    def __init__(self) -> None:
        from prometheus_client import Counter

        self.errors = Counter("errors", "", ["type"], registry=CollectorRegistry())
        self.rows: list[tuple[object, ...]] = []

    def answered(self, *row: object) -> None:
        self.rows.append(row)


def full(path: str) -> None:
    raise FULL


def plain(body: bytes = b"{}", *more: str, path: str = "/v1/completions", length: int | None = None) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: h", f"Content-Length: {len(body) if length is None else length}", *more]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@pytest.mark.parametrize(
    "data",
    [
        plain(path="/v1/embeddings"),
        plain(path="/v1/completions?x=1"),
        plain(path="/v1/../v1/completions"),
        plain().replace(b"POST", b"GET"),
        plain().replace(b"HTTP/1.1", b"HTTP/1.0"),
        plain(length=3),
        plain(length=1),
        plain() + b"x",
        plain()[:-3],
        plain(b"", "Transfer-Encoding: chunked"),
        plain(b"{}", "Content-Length: 2"),
        plain(b"{}", "Content-Length : 2"),
        plain(length=-2),
        plain().replace(b"\r\n", b"\n"),
        plain().replace(b"Host: h\r\n", b"Host: h\n"),
        plain(b"", "X: a\n\nGET /healthz HTTP/1.1"),
        plain(b"{}", "Origin: https://page.example"),
        plain(b"{}", "Expect: 100-continue"),
        plain(b"{}", "Upgrade: h2c"),
        b"",
        b"\x16\x03\x01",
        b"POST /v1/completions HTTP/1.1\r\n",
    ],
)
def test_what_is_not_of_the_plainest_form_is_read_properly(data: bytes, tmp_path: Path) -> None:
    shed = Shed(full, Keyring(tmp_path), Counted(), [])  # type: ignore[arg-type]
    assert shed(data) is None


def test_a_plain_one_is_answered_unless_there_is_room_or_a_key_is_wanted(tmp_path: Path) -> None:
    counted, keys = Counted(), Keyring(tmp_path)
    shed = Shed(full, keys, counted, [(b"x-a", b"b")])  # type: ignore[arg-type]
    answer = shed(plain())
    assert answer is not None
    assert not answer.close
    head, _, body = answer.data.partition(b"\r\n\r\n")
    assert b"\r\nx-a: b\r\n" in head
    assert b"\r\nRetry-After: 2\r\n" in head
    assert json.loads(body)["error"]["code"] == "queue_full"
    assert f"Content-Length: {len(body)}".encode() in head
    assert counted.rows == [("POST", "/v1/completions", 503, 0.0, 2, len(body))]
    last = shed(plain(b"", "connection: Close", path="/api/generate"))
    assert last is not None
    assert last.close
    assert b'"QUEUE_FULL"' in last.data
    assert Shed(lambda path: None, keys, counted, [])(plain()) is None  # type: ignore[arg-type]
    secret = keys.create("one")[1]
    for wrong in ((), ("Authorization: Bearer x",), (f"Authorization: Basic {secret}",), ("X-API-Key: ",)):
        assert shed(plain(b"{}", *wrong)) is None
    for right in (f"authorization: bearer {secret}", f"Authorization: ApiKey {secret} ", f"X-API-Key: {secret}"):
        assert shed(plain(b"{}", right)) is not None
    assert shed(plain(b"{}", f"X-API-Key: {secret}", "Authorization: Bearer x")) is None


def test_a_full_server_says_the_same_before_and_after_reading(tmp_path: Path) -> None:
    with running(Settings(data_dir=tmp_path, queue=2, max_seqs=1, rates=Rates(requests=0))) as made:
        made.server.dispatcher._accepted["demo"] = 3
        short, read = (made.client.post("/v1/completions", json={}, headers=h) for h in ({}, {"Expect": "x"}))
        assert short.status_code == read.status_code == 503
        # Who waits for leave to send a body may send none: what came next on this connection would be taken for it.
        assert read.headers["connection"] == "close"
        assert short.json() == read.json()
        changing = {"x-request-id", "date", "connection"}
        assert {k for k, _ in _HEADERS} <= {k.lower().encode() for k in short.headers}
        assert {k: v for k, v in short.headers.items() if k not in changing} == {
            k: v for k, v in read.headers.items() if k not in changing
        }
        with httpx.Client(base_url=made.url) as one:  # the connection goes on, and what comes on it is read
            for _ in range(3):
                assert one.post("/v1/completions", json={"prompt": "a"}).status_code == 503
                assert one.get("/healthz").status_code == 200
        made.server.dispatcher._accepted["demo"] = 0
        assert made.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        seen = made.client.get("/metrics").text
        assert 'quarrel_webui_http_requests_total{endpoint="/v1/completions",method="POST",status="503"} 5.0' in seen
        assert 'quarrel_webui_inference_queue_full_total{model="demo"} 5.0' in seen


def test_who_takes_no_answers_is_read_slowly() -> None:
    """The parser stops reading where nobody takes what is written; what is shed would be kept without end."""
    shed, served = [], []

    def refuse(data: bytes, caller: str) -> tuple[bytes, bool]:
        shed.append(data)
        return b"no", False

    async def app(scope: Any, receive: Any, send: Any) -> None:
        served.append(scope["path"])
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def go() -> None:
        config = uvicorn.Config(app, lifespan="off", log_config=None)
        config.load()
        made: Any = protocol_for(Settings(), Mock(shed=refuse))
        protocol = made(config=config, server_state=ServerState(), app_state={})
        here, there = socket.socketpair()
        here.setblocking(False)
        events = asyncio.get_running_loop()
        transport, _ = await events.connect_accepted_socket(lambda: protocol, there)
        with here:
            for paused in (False, True):
                if paused:
                    protocol.pause_writing()
                    events.call_later(0.05, protocol.resume_writing)
                await events.sock_sendall(here, plain())
                await events.sock_recv(here, 4096)
        transport.close()
        await asyncio.sleep(0.01)

    asyncio.run(go())
    assert shed == [plain()]
    assert served == ["/v1/completions"]
