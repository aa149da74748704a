"""The process: sockets, signals, and an end at which no accepted request is left without an answer."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from quarrel.errors import ConfigError
from quarrel.server.connections import MAX_HEAD, MAX_MESSAGE, CountedWebSocket, protocol_for
from quarrel.server.dispatch import Dispatcher
from quarrel.server.listening import WAITING, bound
from quarrel.server.metrics import TEXT, Metrics
from quarrel.server.middleware import App, Middleware
from quarrel.server.settings import Settings

BURST = 32
"""Connections that are taken before others have their turn: thousands at once would hold up every answer."""
COLLECT_EVERY = 60.0
log = logging.getLogger("quarrel.server")


class Server(Protocol):
    """An application and what stands behind it."""

    @property
    def app(self) -> App: ...

    @property
    def dispatcher(self) -> Dispatcher: ...

    @property
    def metrics(self) -> Metrics: ...


class Before(Protocol):
    """Whoever listened before the server did."""

    listener: socket.socket

    def hand_over(self) -> list[socket.socket]:
        """Its connections, with what they have sent; it takes no further ones."""


def serve(
    server: Server,
    settings: Settings,
    *,
    preload: bool = True,
    before: Before | None = None,
    beside: Sequence[socket.socket] = (),
) -> None:
    """Listens until a signal (SIGINT, SIGTERM) says to stop. Raises ConfigError if an address cannot be bound.

    before: what has bound it already. beside: sockets of further addresses, which are closed with it.
    """
    _allow_many_files()
    with _rare_collections():
        asyncio.run(_serve(server, settings, preload, before, beside))


async def _serve(
    server: Server, settings: Settings, preload: bool, before: Before | None, beside: Sequence[socket.socket]
) -> None:
    main = _Uvicorn(_config(server.app, settings), server, before)
    sockets = [bound(settings.host, settings.port, settings.idle_timeout) if before is None else before.listener]
    log.info("listening on http://%s:%d", *sockets[0].getsockname()[:2])
    listeners = [main.serve([*sockets, *beside])]
    second = None
    if settings.metrics_port is not None:
        second = _Uvicorn(_config(_metrics_only(server), settings), None)
        listeners.append(second.serve([bound(settings.host, settings.metrics_port, settings.idle_timeout)]))
    all = [u for u in (main, second) if u is not None]
    loading = asyncio.create_task(_preload(server, all)) if preload else None
    collecting = asyncio.create_task(_collect())
    with _signals(server, all, settings.grace):
        await asyncio.gather(*listeners)
    collecting.cancel()
    if loading is not None:
        loading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await loading


async def _preload(server: Server, listeners: list[_Uvicorn]) -> None:
    """Loads the first model. An option that no model of this server can have ends the server."""
    for entry in server.dispatcher.models.entries():
        if entry.name == server.dispatcher.models.default:
            try:
                await server.dispatcher.models.load(entry.name)
            except Exception as error:  # the entry says what went wrong, and so does each request
                if isinstance(error.__cause__, ConfigError):
                    for listener in listeners:
                        listener.should_exit = True
                    raise error.__cause__ from None


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """A whole collection of garbage with thousands of connections open holds every answer up for half a second.

    What is there at the start is left out of them, and they come once in `COLLECT_EVERY` seconds.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(before[0], before[1], 1 << 30)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


async def _collect() -> None:
    while True:
        await asyncio.sleep(COLLECT_EVERY)
        gc.collect()


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signal handlers: several servers share one process here."""

    def __init__(self, config: uvicorn.Config, server: Server | None, before: Before | None = None) -> None:
        super().__init__(config)
        self.quarrel, self._before = server, before

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        taken = [] if self._before is None else self._before.hand_over()
        await super().startup(sockets)
        for one in taken:
            await asyncio.get_running_loop().connect_accepted_socket(self._protocol, one)
        for each in sockets or ():
            each.listen(WAITING)  # asyncio made the queue as short as its bursts

    def _protocol(self) -> asyncio.Protocol:
        """As uvicorn makes one for each connection that it accepts."""
        kind: Any = self.config.http_protocol_class
        made: asyncio.Protocol = kind(
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            _loop=asyncio.get_running_loop(),
        )
        return made

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _config(app: object, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=protocol_for(settings, app if isinstance(app, Middleware) else None),
        ws=CountedWebSocket,
        ws_max_size=MAX_MESSAGE + 1024,
        ws_ping_interval=30.0,
        ws_ping_timeout=30.0,
        ws_per_message_deflate=False,
        backlog=BURST,
        timeout_keep_alive=int(settings.idle_timeout),
        timeout_graceful_shutdown=int(settings.grace) + 1,
        h11_max_incomplete_event_size=MAX_HEAD,
        access_log=False,
        log_config=None,
        log_level="info",  # a lower level logs frames and heads, and with them prompts and keys
        server_header=False,
        proxy_headers=False,
        lifespan="on",
    )


@contextlib.contextmanager
def _signals(server: Server, listeners: list[_Uvicorn], grace: float) -> Iterator[None]:
    """The first signal stops taking requests and lets those in flight go on for `grace` seconds; the second ends them."""
    loop = asyncio.get_running_loop()
    stopping = False
    ending: list[asyncio.Task[None]] = []

    def end() -> None:
        ending.append(loop.create_task(server.dispatcher.models.close()))

    def stop() -> None:
        nonlocal stopping
        if stopping:
            end()
            return
        stopping = True
        server.dispatcher.closing = True
        server.dispatcher.models.stop_loading()
        log.info("stopping; %d requests in flight may take %g s more", server.dispatcher.active, grace)
        for listener in listeners:
            listener.should_exit = True
        # Closing the models ends every stream with a last event of its own.
        loop.call_later(grace, end)

    def handler(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(stop)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(n, handler) for n in numbers]
    try:
        yield
    finally:
        for number, old in zip(numbers, before, strict=True):
            signal.signal(number, old)


def _metrics_only(server: Server) -> Starlette:
    async def metrics(request: Request) -> Response:
        return PlainTextResponse(await asyncio.to_thread(server.metrics.text), media_type=TEXT)

    return Starlette(routes=[Route("/metrics", metrics)])


def _allow_many_files() -> None:
    """Each connection is a file; the soft limit is often 1024."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))
