"""The /api routes, health, version and metrics."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from quarrel import __version__
from quarrel.engine import Chunk, Priority, Result, Service
from quarrel.errors import QuarrelError
from quarrel.process import RemoteLLM
from quarrel.server.body import body_of, reported
from quarrel.server.errors import plain_body, refused
from quarrel.server.metrics import TEXT, Metrics
from quarrel.server.openai import SSE
from quarrel.server.schemas import DetokenizeBody, GenerateBody, TokenizeBody
from quarrel.server.shelf import Entry, Model
from quarrel.server.work import Desk, Job, Make, Streamed, bursts, results, unless_gone

Json = dict[str, Any]


def make_of(body: GenerateBody, template: str | None) -> Make:
    """What a generate body asks of a model."""
    options, turns = body.sampling(), body.turns()

    def make(llm: Model, service: Service) -> Sequence[Any]:
        return [
            llm.prepare(
                body.prompt if turns is None else None,
                messages=turns,
                template=template,
                service=service,
                adapter=body.adapter,
                **options,
            )
        ]

    return make


def priority_of(body: GenerateBody) -> Priority:
    """The engine's word for it."""
    return "interactive" if body.priority == "high" else "batch"


def routes(desk: Desk, metrics: Metrics) -> APIRouter:
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
        first = desk.shelf.default
        state = None if first is None else desk.shelf.entry(first).state
        if state in ("loading", "failed"):
            text = "Loading model" if state == "loading" else "the model could not be loaded: see the server's log"
            return JSONResponse({"error": {"code": 503, "message": text, "type": "unavailable_error"}}, 503)
        return JSONResponse({"status": "ok"})

    @router.get("/readyz")
    async def ready() -> Response:
        """Whether a request would be taken: 503 while the server goes down or its first model is not there yet."""
        first = desk.shelf.default  # none is waited for where there is only a folder
        checks = {"server": "stopping" if desk.closing else "running"}
        if first is not None:
            checks["model"] = desk.shelf.entry(first).state
        up = not desk.closing and checks.get("model", "loaded") == "loaded"
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
    async def figures() -> Json:
        """What a page shows: throughput, queue and cache of each model."""
        return {"uptime": time.time() - began, "active": desk.active, "models": [figure(e) for e in desk.shelf.entries()]}

    @router.get("/api/models")
    async def list_models() -> Json:
        """Every model, with what is known of it."""
        return {
            "models": [described(e, desk.settings.chat_template) for e in desk.shelf.entries()],
            "default": desk.shelf.default,
        }

    @router.get("/api/models/{name:path}")
    async def one_model(name: str) -> Json:
        """One model."""
        return described(desk.shelf.entry(name), desk.settings.chat_template)

    @router.post("/api/models/{name:path}")
    async def load(name: str, reload: bool = False) -> Json:
        """Loads a model; `?reload=true` puts a fresh copy in place of one that runs."""
        return described(await desk.shelf.load(name, again=reload), desk.settings.chat_template)

    @router.delete("/api/models/{name:path}")
    async def unload(name: str) -> Json:
        """Unloads a model once its requests have ended."""
        return described(await desk.shelf.unload(name), desk.settings.chat_template)

    async def generate(request: Request) -> Response:
        """The continuation of a prompt; with `stream`, as lines of JSON."""
        body, headers = await reported(request, GenerateBody, desk)
        if body.stream:
            return await _stream(desk, request, body, headers, _line, "application/x-ndjson")
        began = time.perf_counter()

        async def whole() -> Json:
            async with desk.job(
                request.state.caller,
                body.model,
                make_of(body, desk.settings.chat_template),
                request.url.path,
                priority_of(body),
                stream=False,
            ) as job:
                (result,) = await results(job, desk.settings.timeout)
                return summary(result, job, time.perf_counter() - began)

        return JSONResponse(await unless_gone(request, whole()), headers=headers)

    if not desk.settings.ollama:  # which has a route of this name
        router.post("/api/generate", **body_of(GenerateBody))(generate)

    @router.post("/api/stream", **body_of(GenerateBody))
    async def stream(request: Request) -> Response:
        """The same as server-sent events."""
        body, headers = await reported(request, GenerateBody, desk)
        return await _stream(desk, request, body, headers, _sse, "text/event-stream")

    @router.post("/api/tokenize", **body_of(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        """The ids of a text."""
        body, headers = await reported(request, TokenizeBody, desk)
        async with desk.shelf.use(body.model) as (name, llm):
            ids = await asyncio.to_thread(llm.tokenize, body.text, add_special=body.add_special)
        return JSONResponse({"model": name, "tokens": ids, "count": len(ids)}, headers=headers)

    @router.post("/api/detokenize", **body_of(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        """The text of ids."""
        body, headers = await reported(request, DetokenizeBody, desk)
        async with desk.shelf.use(body.model) as (name, llm):
            text = await asyncio.to_thread(llm.detokenize, body.tokens, skip_special=False)
        return JSONResponse({"model": name, "text": text}, headers=headers)

    return router


def described(entry: Entry, template: str | None) -> Json:
    """A model for the list of models."""
    row: Json = {"name": entry.name, "state": entry.state, "loaded": entry.state == "loaded", "error": entry.error or None}
    if entry.held is not None:
        e = entry.held.llm.explain()
        row |= {
            "architecture": e.architecture,
            "backend": e.backend,
            "parameters": e.parameters,
            "quantization": e.quantization,
            "path": entry.source,
            "adapters": list(entry.held.llm.adapters),
            "device": e.device,
            "n_ctx": e.n_ctx,
            "chat": template is not None or entry.held.llm.tokenizer.chat_template is not None,
            "max_seqs": e.max_seqs,
            "memory_bytes": {"weights": e.memory.weights, "cache": e.memory.cache, "activations": e.memory.activations},
            "load_seconds": round(entry.load_seconds, 3),
            "context_length": e.n_ctx,
            "memory_usage": e.memory.weights + e.memory.cache + e.memory.activations,
        }
    return row


def figure(entry: Entry) -> Json:
    """How busy a model is."""
    if entry.held is None:
        return {"name": entry.name, "state": entry.state}
    activity, stats = entry.held.llm.activity(), entry.held.llm.stats()
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
        "experts": shares_of(entry.held.llm),
    }


def shares_of(llm: Model) -> list[float]:
    """Each expert's share of all choices so far, over all layers; empty where there are none, or none is known at once."""
    if not isinstance(llm, RemoteLLM):
        return []  # to ask would wait for a step
    layers = list(llm.expert_counts().values())
    width, total = max(map(len, layers), default=0), max(1, sum(map(sum, layers)))
    return [round(sum(layer[i] for layer in layers if i < len(layer)) / total, 5) for i in range(width)]


def summary(result: Result, job: Job, seconds: float) -> Json:
    """A finished generation in the /api routes' words."""
    return {
        "model": job.model,
        "text": result.text,
        "tokens_generated": result.usage.completion_tokens,
        "prompt_tokens": result.usage.prompt_tokens,
        "cached_tokens": result.usage.cached_tokens,
        "finish_reason": result.finish_reason,
        "seed": result.seed,
        "duration_seconds": round(seconds, 4),
        "tokens_per_sec": round(rate(result), 2),
    }


def rate(result: Result) -> float:
    """Tokens a second, the prompt left out."""
    return result.timings.decode_rate


def token_of(chunk: Chunk, job: Job, made: int) -> Json:
    """One chunk as the stream and the WebSocket show it."""
    seconds = time.perf_counter() - job.began
    row: Json = {"token": chunk.text, "token_id": chunk.token_id, "stream": True, "complete": chunk.result is not None}
    row["tokens_per_sec"] = round(made / seconds, 2) if seconds > 0 else 0.0
    if chunk.result is not None:
        row |= {k: v for k, v in summary(chunk.result, job, seconds).items() if k != "text"}
    return row


async def _stream(
    desk: Desk, request: Request, body: GenerateBody, headers: dict[str, str], write: Callable[[Json], str], media: str
) -> Response:
    stack = AsyncExitStack()
    job = await stack.enter_async_context(
        desk.job(
            request.state.caller,
            body.model,
            make_of(body, desk.settings.chat_template),
            request.url.path,
            priority_of(body),
        )
    )

    async def events() -> AsyncIterator[str]:
        made = 0
        try:
            async for burst in bursts(job, 0, desk.settings.timeout):
                rows = []
                for chunk in burst:
                    made += chunk.token_id is not None
                    rows.append(write(token_of(chunk, job, made)))
                yield "".join(rows)
        except QuarrelError as error:
            yield write(plain_body(refused(error)))

    return Streamed(stack, events(), media, {**SSE, **headers})


def _line(row: Json) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def _sse(row: Json) -> str:
    return f"data: {json.dumps(row, ensure_ascii=False)}\n\n"
