"""The application that a launcher waits for: llama-server's routes on Starlette; all others are made when one is asked for.

FastAPI takes longer to import than a small model to load.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from quarrel.errors import QuarrelError
from quarrel.llm import Model
from quarrel.server.dispatch import Dispatcher
from quarrel.server.errors import Refused, llama_body, refused
from quarrel.server.keys import Keyring
from quarrel.server.llama.figures import Figures
from quarrel.server.llama.models import Facts
from quarrel.server.llama.routes import routes
from quarrel.server.llama.tools import ToolServers
from quarrel.server.metrics import Metrics
from quarrel.server.middleware import App, Middleware, Receive, Scope, Send
from quarrel.server.models import Load, ModelManager
from quarrel.server.settings import Settings
from quarrel.server.shared_limits import Limits
from quarrel.server.traces import Traces

log = logging.getLogger("quarrel.server")


@dataclass(frozen=True)
class LlamaServer:
    """An application and what stands behind it. `app` is what an ASGI server runs."""

    app: App
    dispatcher: Dispatcher
    metrics: Metrics


def build(
    settings: Settings,
    llm: Model | None,
    load: Load | None = None,
    names: Callable[[], Iterable[str]] | None = None,
    tools: ToolServers | None = None,
) -> LlamaServer:
    """Of one model, which is loaded, or of several, which `load` loads when they are wanted. They are closed when the
    application ends. load: needed, too, where the one model is unloaded while nobody uses it. names: of the models,
    read anew where a caller asks for that. tools: MCP servers that run."""
    keys = Keyring(settings.data_dir, settings.api_keys)
    settings.check(bool(keys.keys()))
    limits, traces = Limits(settings.rates, settings.shared_limits, settings.timeout + settings.grace), Traces()
    figures, facts = Figures(), Facts(settings)
    models = ModelManager(
        settings.models,
        settings.models_dir,
        _Loads(llm, load, (figures.follow, facts.keep)),
        idle=settings.keep_alive,
        any_name=not settings.router,
        most=settings.models_max,
        autoload=settings.autoload,
    )
    metrics = Metrics(models)
    dispatcher = Dispatcher(models, settings, limits, metrics, traces)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await models.close()
            await limits.close()

    api = Starlette(routes=routes(dispatcher, metrics, figures, facts, names, tools).routes, lifespan=lifespan)
    api.router.redirect_slashes = False
    api.router.default = _Others(settings, models)
    _errors(api, metrics)
    app = Middleware(api, settings, keys, limits, metrics, traces, dispatcher.check_capacity)
    return LlamaServer(app, dispatcher, metrics)


class _Loads:
    """Loads models; the first one is there already, if it is given."""

    def __init__(self, llm: Model | None, load: Load | None, follow: Sequence[Callable[[str, Model], None]]) -> None:
        """follow: who is given each, with its source."""
        self._llm, self._load, self._follow = llm, load, follow

    def __call__(self, source: str, **more: Any) -> Model:
        llm, self._llm = self._llm, None if self._load is not None else self._llm
        if llm is None:
            assert self._load is not None
            llm = self._load(source, **more)
        for follow in self._follow:
            follow(source, llm)
        return llm


class _Others:
    """All other routes of the server, over the same models."""

    def __init__(self, settings: Settings, models: ModelManager) -> None:
        self._settings, self._models = settings, models
        self._made: Any = None
        self._making = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._making:
            if self._made is None:
                self._made = await asyncio.to_thread(self._make)
        await self._made(scope, receive, send)

    def _make(self) -> App:
        from quarrel.server.app import build

        return build(self._settings, _no_load, models=self._models).app


def _no_load(source: str) -> Model:
    raise AssertionError("the models are another application's")


def _errors(api: Starlette, metrics: Metrics) -> None:
    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, QuarrelError):
            refusal = refused(error)
        elif isinstance(error, ClientDisconnect):
            refusal = Refused(499, "client_disconnected", "the caller has gone before its body was here")
        elif isinstance(error, HTTPException):
            refusal = Refused(error.status_code, "invalid_request", str(error.detail))
        else:
            log.exception("%s failed", request.url.path, exc_info=error)
            refusal = Refused(500, "internal", "the server failed at this request: its log says why")
        metrics.errors.labels(refusal.code).inc()
        more = dict(getattr(error, "headers", None) or {}) if isinstance(error, HTTPException) else {}
        return JSONResponse(llama_body(refusal), refusal.status, headers={**refusal.headers(), **more})

    for kind in (QuarrelError, ClientDisconnect, HTTPException, Exception):
        api.add_exception_handler(kind, answer)
