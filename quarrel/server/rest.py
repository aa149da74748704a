"""The /api routes, health, version and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from quarrel import __version__
from quarrel.engine import Chunk, Priority, Result, Service
from quarrel.llm import Model, Structure
from quarrel.server.body import body_of, read_body
from quarrel.server.conversation import chat_request
from quarrel.server.dispatch import Admission, Dispatcher, Generation, Prepare, answer_stream, answer_whole, bursts
from quarrel.server.entries import Entry
from quarrel.server.errors import Refused, plain_body
from quarrel.server.lines import SSE, event, line
from quarrel.server.metrics import TEXT, Metrics
from quarrel.server.reader import Reading
from quarrel.server.schemas import DetokenizeBody, GenerateBody, TokenizeBody

Json = dict[str, Any]


def prepare_of(
    body: GenerateBody,
    template: str | None,
    turns: Sequence[Mapping[str, Any]] | None,
    *,
    structure: Structure | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> Prepare:
    """Makes the request of a generate body for a model. turns: the conversation, or None for its plain prompt."""
    reading = Reading(tools)
    options: Any = {"adapter": body.adapter, "structure": structure, **body.sampling()}
    options["thinking_budget"] = body.thinking_token_budget
    if body.overflow is not None:
        options["overflow"] = body.overflow

    def prepare(llm: Model, service: Service) -> Sequence[Any]:
        if turns is None:
            return [llm.prepare(body.prompt, service=service, **options)]
        return [chat_request(llm, template, turns, reading, effort=body.reasoning_effort, service=service, **options)]

    return prepare


def priority_of(body: GenerateBody) -> Priority:
    """The engine's word for it."""
    return "interactive" if body.priority == "high" else "batch"


def routes(dispatcher: Dispatcher, metrics: Metrics) -> APIRouter:
    """Everything beside /v1 and the page."""
    router = APIRouter()
    began = time.time()

    @router.get("/healthz")
    @router.get("/api/health")
    async def health() -> Json:
        """Whether the process answers."""
        return {"status": "ok"}

    @router.get("/health")
    async def health_or_loading() -> Response:
        """In llama-server's words, whose clients wait for it: 503 while the first model is loaded, or could not be."""
        first = dispatcher.models.default
        state = None if first is None else dispatcher.models.entry(first).state
        if state in ("loading", "failed"):
            text = "Loading model" if state == "loading" else "the model could not be loaded: see the server's log"
            return JSONResponse({"error": {"code": 503, "message": text, "type": "unavailable_error"}}, 503)
        return JSONResponse({"status": "ok"})

    @router.get("/readyz")
    async def ready() -> Response:
        """Whether a request would be taken: 503 while the server goes down or its first model is not there yet."""
        first = dispatcher.models.default  # none is waited for where there is only a folder
        checks = {"server": "stopping" if dispatcher.closing else "running"}
        if first is not None:
            checks["model"] = dispatcher.models.entry(first).state
        rested = first is not None and dispatcher.models.entry(first).rested  # the next request loads it
        up = not dispatcher.closing and (rested or checks.get("model", "loaded") == "loaded")
        return JSONResponse({"status": "ready" if up else "not ready", "checks": checks}, 200 if up else 503)

    @router.get("/version")
    async def version() -> Json:
        """Of this server."""
        return {"name": "quarrel", "version": __version__}

    @router.get("/metrics")
    async def prometheus() -> Response:
        """For Prometheus."""
        # On a thread: some figures are read between two steps.
        return PlainTextResponse(await asyncio.to_thread(metrics.text), media_type=TEXT)

    @router.get("/api/metrics")
    async def figures(request: Request, format: Literal["json", "prometheus"] | None = None) -> Response:
        """What a page shows: throughput, queue and cache of each model; for Prometheus where `format` says so, or Accept
        prefers its text."""
        if format == "prometheus" or (format is None and prefers_text(request.headers.get("accept", ""))):
            return await prometheus()
        return JSONResponse(
            {
                "uptime": time.time() - began,
                "active": dispatcher.active,
                "models": [activity_of(e) for e in dispatcher.models.entries()],
            }
        )

    @router.get("/api/models")
    async def list_models() -> Json:
        """Every model, with what is known of it."""
        return {
            "models": [
                {**describe_model(entry, dispatcher.settings.chat_template), "name": name.name}
                for name, entry in dispatcher.models.listed()
            ],
            "default": dispatcher.models.default,
        }

    @router.get("/api/models/{name:path}")
    async def one_model(name: str) -> Json:
        """One model."""
        return describe_model(dispatcher.models.entry(name), dispatcher.settings.chat_template)

    @router.post("/api/models/{name:path}")
    async def load(name: str, reload: bool = False) -> Json:
        """Loads a model; `?reload=true` puts a fresh copy in place of one that runs."""
        return describe_model(await dispatcher.models.load(name, again=reload), dispatcher.settings.chat_template)

    @router.delete("/api/models/{name:path}")
    async def unload(name: str) -> Json:
        """Unloads a model once its requests have ended."""
        return describe_model(await dispatcher.models.unload(name), dispatcher.settings.chat_template)

    if not dispatcher.settings.ollama:  # which has a route of this name

        @router.post("/api/generate", **body_of(GenerateBody))
        async def generate(request: Request) -> Response:
            """The continuation of a prompt; with `stream`, as lines of JSON."""
            return await answer_generate(dispatcher, request, *await read_body(request, GenerateBody, dispatcher))

    @router.post("/api/stream", **body_of(GenerateBody))
    async def stream(request: Request) -> Response:
        """The same as server-sent events."""
        body, headers = await read_body(request, GenerateBody, dispatcher)
        return await _stream(dispatcher, request, body, headers, event, "text/event-stream")

    @router.post("/api/tokenize", **body_of(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        """The ids of a text."""
        body, headers = await read_body(request, TokenizeBody, dispatcher)
        async with dispatcher.models.use(body.model) as (name, llm):
            ids = await asyncio.to_thread(llm.tokenize, body.text, add_special=body.add_special)
        return JSONResponse({"model": name, "tokens": ids, "count": len(ids)}, headers=headers)

    @router.post("/api/detokenize", **body_of(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        """The text of ids."""
        body, headers = await read_body(request, DetokenizeBody, dispatcher)
        async with dispatcher.models.use(body.model) as (name, llm):
            text = await asyncio.to_thread(llm.detokenize, body.tokens, skip_special=False)
        return JSONResponse({"model": name, "text": text}, headers=headers)

    return router


async def answer_generate(
    dispatcher: Dispatcher, request: Request, body: GenerateBody, headers: dict[str, str]
) -> Response:
    """Of `/api/generate`."""
    if body.stream:
        return await _stream(dispatcher, request, body, headers, line, "application/x-ndjson")
    began = time.perf_counter()

    def whole(generation: Generation, found: list[Result]) -> Json:
        (result,) = found
        return summary(result, generation, time.perf_counter() - began)

    admission = _admission(dispatcher, request, body, stream=False)
    return await answer_whole(request, admission, dispatcher.settings.timeout, whole, headers)


def prefers_text(accept: str) -> bool:
    """Whether a list of media types puts Prometheus' before JSON; a browser's, which has neither, does not."""
    weights: dict[str, float] = {}
    for entry in accept.lower().split(","):
        kind, *rest = (part.strip() for part in entry.split(";"))
        with contextlib.suppress(ValueError):
            weights[kind] = float(next((p[2:] for p in rest if p.startswith("q=")), "1"))
    text = max(weights.get("text/plain", 0.0), weights.get("application/openmetrics-text", 0.0))
    return text > weights.get("application/json", 0.0)


def describe_model(entry: Entry, template: str | None) -> Json:
    """A model for the list of models."""
    row: Json = {"name": entry.name, "state": entry.state, "loaded": entry.state == "loaded", "error": entry.error or None}
    if entry.loaded is not None:
        e = entry.loaded.llm.explain()
        row |= {
            "architecture": e.architecture,
            "backend": e.backend,
            "parameters": e.parameters,
            "quantization": e.quantization,
            "path": entry.source,
            "adapters": list(entry.loaded.llm.adapters),
            "device": e.device,
            "n_ctx": e.n_ctx,
            "chat": template is not None or entry.loaded.llm.tokenizer.chat_template is not None,
            "vision": bool(e.projector),
            "max_seqs": e.max_seqs,
            "memory_bytes": {"weights": e.memory.weights, "cache": e.memory.cache, "activations": e.memory.activations},
            "load_seconds": round(entry.load_seconds, 3),
            "context_length": e.n_ctx,
            "memory_usage": e.memory.weights + e.memory.cache + e.memory.activations,
        }
    return row


def activity_of(entry: Entry) -> Json:
    """How busy a model is."""
    if entry.loaded is None:
        return {"name": entry.name, "state": entry.state}
    activity, stats = entry.loaded.llm.activity(), entry.loaded.llm.stats()
    return {
        "name": entry.name,
        "state": entry.state,
        "running": activity.running,
        "waiting": activity.waiting,
        "kv_blocks": activity.n_blocks,
        "kv_blocks_free": activity.free_blocks,
        "kv_blocks_kept": activity.kept_blocks,
        "tokens_generated": stats.drawn_tokens,
        "tokens_prompt": stats.prompt_tokens,
        "experts": expert_shares(entry.loaded.llm),
    }


def expert_shares(llm: Model) -> list[float]:
    """Each expert's share of all choices so far, over all layers; empty where there are none, or none is known at once."""
    layers = list(llm.expert_counts(wait=False).values())
    width, total = max(map(len, layers), default=0), max(1, sum(map(sum, layers)))
    return [round(sum(layer[i] for layer in layers if i < len(layer)) / total, 5) for i in range(width)]


def summary(result: Result, generation: Generation, seconds: float) -> Json:
    """A finished generation in the fields of the /api routes."""
    return {
        "model": generation.model,
        "text": result.text,
        "tokens_generated": result.usage.completion_tokens,
        "prompt_tokens": result.usage.prompt_tokens,
        "cached_tokens": result.usage.cached_tokens,
        "finish_reason": result.finish_reason,
        "seed": result.seed,
        "duration_seconds": round(seconds, 4),
        "tokens_per_sec": round(rate(result), 2),
        **{n: count for n in ("dropped", "shifted") if (count := getattr(result, n))},
    }


def rate(result: Result) -> float:
    """Tokens a second, the prompt left out."""
    return result.timings.decode_rate


def token_message(chunk: Chunk, generation: Generation, made: int) -> Json:
    """One chunk as the stream and the WebSocket show it."""
    seconds = time.perf_counter() - generation.began
    row: Json = {"token": chunk.text, "token_id": chunk.token_id, "stream": True, "complete": chunk.result is not None}
    row["tokens_per_sec"] = round(made / seconds, 2) if seconds > 0 else 0.0
    if chunk.result is not None:
        row |= {k: v for k, v in summary(chunk.result, generation, seconds).items() if k != "text"}
    return row


async def _stream(
    dispatcher: Dispatcher,
    request: Request,
    body: GenerateBody,
    headers: dict[str, str],
    write: Callable[[Json], str],
    media: str,
) -> Response:
    async def events(generation: Generation) -> AsyncIterator[str]:
        made = 0
        async for burst in bursts(generation, 0, dispatcher.settings.timeout):
            rows = []
            for chunk in burst:
                made += chunk.token_id is not None
                rows.append(write(token_message(chunk, generation, made)))
            yield "".join(rows)

    def failure(error: Refused) -> str:
        return write(plain_body(error))

    return await answer_stream(_admission(dispatcher, request, body), events, failure, media, {**SSE, **headers})


def _admission(dispatcher: Dispatcher, request: Request, body: GenerateBody, *, stream: bool = True) -> Admission:
    prepare = prepare_of(body, dispatcher.settings.chat_template, body.turns())
    caller, where = request.state.caller, request.url.path
    return dispatcher.admit(caller, body.model, prepare, where, priority_of(body), stream=stream)
