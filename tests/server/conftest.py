"""A real server on a free port, on the bundled model; and what tests need to talk to it."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

import quarrel
import quarrel.server
from quarrel.engine import AsyncStream, Chunk, Result, Timings, Usage
from quarrel.llm import LLM
from quarrel.server import Server, Settings, build
from quarrel.server.listening import bound
from quarrel.server.llama.app import build as llama_build
from quarrel.server.run import _config, _Uvicorn
from quarrel.server.traces import Traces
from quarrel.toolbox import Toolbox


@dataclass
class Live:
    """A running server."""

    port: int
    server: Server
    settings: Settings
    client: httpx.Client

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def raw(self, data: bytes, wait: float = 5.0) -> bytes:
        """Everything that comes back on one connection until the server closes it or `wait` is over."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=wait) as made:
            made.sendall(data)
            made.settimeout(wait)
            got = b""
            try:
                while piece := made.recv(65536):
                    got += piece
            except TimeoutError:
                pass
            return got


def load(source: str) -> LLM:
    return quarrel.load(source, backend="cpu", threads=2, max_seqs=8)


@contextmanager
def running(  # type: ignore[no-untyped-def]
    settings: Settings, load_model=load, traces: Traces | None = None, tools: Toolbox | None = None, server: Any = None
) -> Iterator[Live]:
    """Starts a server on its own thread; it has ended when the block does. server: made already."""
    if server is None:
        llama = settings.llama
        server = llama_build(settings, load_model("demo")) if llama else build(settings, load_model, traces, tools)
    listener = bound("127.0.0.1", 0, settings.idle_timeout)
    port = listener.getsockname()[1]
    uvicorn = _Uvicorn(_config(server.app, replace(settings, grace=2.0)), server)
    thread = threading.Thread(target=lambda: asyncio.run(uvicorn.serve([listener])), daemon=True)
    thread.start()
    end = time.monotonic() + 60
    while not uvicorn.started and time.monotonic() < end:
        time.sleep(0.01)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            yield Live(port, server, settings, client)
    finally:
        uvicorn.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """One for the tests that leave it as it was; no keys, no rates."""
    folder: Path = tmp_path_factory.mktemp("server")
    rates = quarrel.server.Rates(requests=0, streams=0)
    with running(Settings(data_dir=folder, rates=rates, chat_template="chatml", ollama=False)) as made:
        yield made


@pytest.fixture(name="written")
def _written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The model writes these, in these pieces."""
    pieces: list[str] = []

    async def script(self: AsyncStream) -> Any:
        position = self.__dict__.setdefault("_position", 0)
        if position > len(pieces):
            raise StopAsyncIteration
        self.__dict__["_position"] = position + 1
        if position < len(pieces):
            return Chunk(index=0, text=pieces[position], token_id=5)
        result = Result("".join(pieces), (), "stop", Usage(1, 2), Timings(0, 0, 0, 0, 0, 0), 0)
        self.__dict__["_result_made"] = result
        return Chunk(index=0, text="", token_id=None, result=result)

    monkeypatch.setattr(AsyncStream, "__anext__", script)
    monkeypatch.setattr(AsyncStream, "ready", lambda self: None)
    monkeypatch.setattr(AsyncStream, "result", property(lambda self: self.__dict__.get("_result_made")))
    return pieces
