"""Tools of MCP servers over HTTP, as the page calls them."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from quarrel.server import Keyring, Rates, Settings
from quarrel.server import toolbox as routes
from quarrel.toolbox import Toolbox
from tests.server.conftest import Live, running

mcp = pytest.importorskip("mcp.server")


def toys(begun: threading.Event, gate: threading.Event) -> Any:
    server: Any = mcp.MCPServer("toys")

    def add(a: int, b: int) -> int:
        """The sum."""
        return a + b

    def fail() -> str:
        raise ValueError("out of order")

    async def wait() -> str:
        begun.set()
        while not gate.is_set():
            await asyncio.sleep(0.01)
        return "done"

    for tool in (add, fail, wait):
        server.add_tool(tool)
    return server


def test_tools_are_listed_and_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, gate = threading.Event(), threading.Event()
    monkeypatch.setattr(routes, "MAX_CALLS", 1)
    with (
        Toolbox({"toys": toys(begun, gate)}) as box,
        running(Settings(data_dir=tmp_path, rates=Rates(requests=0)), tools=box) as live,
    ):
        found = live.client.get("/api/tools").json()["tools"]
        assert [t["function"]["name"] for t in found] == ["add", "fail", "wait"]
        assert found[0]["function"]["description"] == "The sum."
        made = live.client.post("/api/tools/add", json={"arguments": {"a": 2, "b": 3}})
        assert made.json() == {"name": "add", "text": "5", "failed": False}
        for name, arguments in (("add", {"a": "x"}), ("fail", {})):
            assert live.client.post(f"/api/tools/{name}", json={"arguments": arguments}).json()["failed"]
        for name, body, status in (("none", {}, 404), ("add", {"arguments": [1]}, 400), ("a/b", {}, 404)):
            assert live.client.post(f"/api/tools/{name}", json=body).status_code == status
        with socket.create_connection(("127.0.0.1", live.port)) as gone:  # a caller that goes frees its place
            gone.sendall(b"POST /api/tools/wait HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}")
            assert begun.wait(60)
        begun.clear()
        results: list[httpx.Response] = []

        def wait() -> None:
            while not results or results[-1].status_code == 503:  # the one before may not have gone yet
                results.append(httpx.post(f"{live.url}/api/tools/wait", json={}, timeout=60))

        thread = threading.Thread(target=wait)
        thread.start()
        assert begun.wait(60)
        full = live.client.post("/api/tools/add", json={"arguments": {"a": 1, "b": 1}})
        assert (full.status_code, full.headers["retry-after"]) == (503, "1")
        gate.set()
        thread.join(60)
        assert results[-1].json()["text"] == "done"


def test_without_servers_there_are_none_and_keys_guard_them(live: Live, tmp_path: Path) -> None:
    assert live.client.get("/api/tools").json() == {"tools": []}
    assert live.client.post("/api/tools/add", json={}).status_code == 404
    Keyring(tmp_path).create("a")
    with running(Settings(data_dir=tmp_path)) as locked:
        assert locked.client.get("/api/tools").status_code == 401
        assert locked.client.post("/api/tools/add", json={}).status_code == 401
