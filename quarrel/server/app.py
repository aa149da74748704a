"""The whole application: routes, guard, errors, and the page."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.staticfiles import StaticFiles

from quarrel import __version__
from quarrel.errors import QuarrelError
from quarrel.server import anthropic, ollama, ollama_models, openai, rerank, responses, rest, tokens, toolbox, websocket
from quarrel.server.dispatch import Dispatcher
from quarrel.server.errors import Refused, error_body, is_ollama, refused
from quarrel.server.keys import Keyring
from quarrel.server.llama import beside
from quarrel.server.metrics import Metrics
from quarrel.server.middleware import App, Middleware
from quarrel.server.models import Load, ModelManager
from quarrel.server.names import Names
from quarrel.server.ollama_facts import Describer
from quarrel.server.openapi import as_yaml, document, methods_of
from quarrel.server.settings import Settings
from quarrel.server.shared_limits import Limits
from quarrel.server.traces import Traces
from quarrel.toolbox import Toolbox

STATIC = Path(__file__).parent / "static"
log = logging.getLogger("quarrel.server")


@dataclass(frozen=True)
class Server:
    """An application and what stands behind it. `app` is what an ASGI server runs."""

    app: App
    dispatcher: Dispatcher
    keys: Keyring
    metrics: Metrics
    api: FastAPI


def build(
    settings: Settings,
    load: Load,
    traces: Traces | None = None,
    tools: Toolbox | None = None,
    models: ModelManager | None = None,
) -> Server:
    """Puts an application together; `load` makes a model from what `settings.models` names. tools: open while it runs.
    models: those of the application around this one, if it is a part of one."""
    traces = traces or Traces()
    keys = Keyring(settings.data_dir, settings.api_keys)
    settings.check(bool(keys.keys()))
    limits = Limits(settings.rates, settings.shared_limits, settings.timeout + settings.grace)
    models = models or ModelManager(
        settings.models,
        settings.models_dir,
        load,
        Names(settings.data_dir / "models.json"),
        idle=settings.keep_alive,
        budget=settings.budget,
    )
    metrics = Metrics(models)
    dispatcher = Dispatcher(models, settings, limits, metrics, traces)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await models.close()
            await limits.close()

    api = FastAPI(title="Quarrel", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    if settings.ollama:  # first, as /api/generate then is Ollama's
        describer = Describer(settings.chat_template)
        api.include_router(ollama.routes(dispatcher, describer))
        api.include_router(ollama_models.routes(dispatcher, describer))
    api.include_router(openai.routes(dispatcher))
    api.include_router(anthropic.routes(dispatcher))
    api.include_router(responses.routes(dispatcher))
    api.include_router(rerank.routes(dispatcher))
    api.include_router(tokens.routes(dispatcher))
    api.include_router(rest.routes(dispatcher, metrics))
    api.include_router(toolbox.routes(dispatcher, tools))
    api.include_router(websocket.routes(dispatcher, metrics))
    if not settings.llama:  # which has these already
        api.include_router(beside.routes(dispatcher))
    if settings.page:
        _page(api, settings.ollama)
    _errors(api, metrics, settings)
    api.openapi = lambda: document(api)  # type: ignore[method-assign]
    return Server(
        Middleware(api, settings, keys, limits, metrics, traces, dispatcher.check_capacity), dispatcher, keys, metrics, api
    )


def _page(api: FastAPI, ollama_routes: bool) -> None:
    @api.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page(request: Request) -> Response:
        headers = {"Cache-Control": "no-cache", "Vary": "Accept"}
        if ollama_routes and "text/html" not in request.headers.get("accept", ""):  # by which its clients know it
            return PlainTextResponse("Ollama is running", headers=headers)
        return FileResponse(STATIC / "index.html", headers=headers)

    @api.api_route("/favicon.ico", methods=["GET", "HEAD"], include_in_schema=False)
    async def icon() -> Response:
        return FileResponse(STATIC / "icon.svg", media_type="image/svg+xml")

    @api.api_route("/sw.js", methods=["GET", "HEAD"], include_in_schema=False)
    async def worker() -> Response:
        # At the root, as a service worker serves what lies below itself.
        return FileResponse(STATIC / "sw.js", media_type="text/javascript", headers={"Cache-Control": "no-cache"})

    @api.get("/openapi.yaml", include_in_schema=False)
    async def yaml() -> Response:
        return PlainTextResponse(as_yaml(document(api)), media_type="application/yaml")

    api.mount("/static", StaticFiles(directory=STATIC), name="static")


ABSENT = {
    "/audio/": "no model here hears or speaks",
    "/images/": "no model here makes images",
    "/videos": "no model here makes videos",
    "/moderations": "no model here judges",
}
"""OpenAI's routes that no model answers."""


def _errors(api: FastAPI, metrics: Metrics, settings: Settings) -> None:
    def answer(request: Request, error: Refused) -> Response:
        metrics.errors.labels(error.code).inc()
        ollama = settings.ollama and not getattr(request.state, "own", False)
        body = error_body(request.url.path, error, ollama=ollama, llama=settings.llama)
        return JSONResponse(body, error.status, headers=error.headers())

    @api.exception_handler(QuarrelError)
    async def deliberate(request: Request, error: QuarrelError) -> Response:
        return answer(request, refused(error))

    @api.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return answer(request, Refused(499, "client_disconnected", "the caller has gone before its body was here"))

    @api.exception_handler(HTTPException)
    async def of_routing(request: Request, error: HTTPException) -> Response:
        words = {404: ("not_found", "there is no such route"), 405: ("method_not_allowed", "this route has other methods")}
        code, text = words.get(error.status_code, ("invalid_request", str(error.detail)))
        if error.status_code == 404:
            text = next((said for path, said in ABSENT.items() if path in request.url.path), text)
        refusal = Refused(error.status_code, code, f"{text}: see /openapi.json for what there is")
        response = answer(request, refusal)
        if settings.ollama and code != "invalid_request" and is_ollama(request.url.path):
            sentence = "page not found" if error.status_code == 404 else "method not allowed"
            response = PlainTextResponse(f"{error.status_code} {sentence}", error.status_code)
        headers = error.headers or {}
        response.headers.update(headers)
        if error.status_code == 405:
            # Of all routes, not of the first that has the path; those of the page are not in the document.
            of_one = sorted(headers.get("Allow", "GET, HEAD").split(", "))
            response.headers["Allow"] = ", ".join(methods_of(api, request.url.path) or of_one)
        return response

    @api.exception_handler(RequestValidationError)
    async def of_a_query(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(p) for p in first["loc"])
        return answer(request, Refused(400, "invalid_request", f"{where[:80]}: {first['msg'][:200]}", param=where[:80]))

    @api.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> Response:
        log.exception("%s failed", request.url.path, exc_info=error)
        return answer(request, Refused(500, "internal", "the server failed at this request: its log says why"))
