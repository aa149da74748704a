"""All routes of llama-server's protocol that OpenAI's does not have."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from quarrel.llm import Model
from quarrel.server.body import read_body
from quarrel.server.dispatch import Dispatcher, cancel_on_disconnect
from quarrel.server.errors import Refused
from quarrel.server.llama import chat, completion, lora, models, predict, proxy, slots, texts, tools
from quarrel.server.llama.bodies import DetokenizeBody, EmbeddingBody, TokenizeBody
from quarrel.server.llama.figures import Figures
from quarrel.server.llama.table import Routes
from quarrel.server.metrics import TEXT, Metrics
from quarrel.server.openai import _vector

Json = dict[str, Any]


def routes(
    dispatcher: Dispatcher,
    metrics: Metrics,
    figures: Figures,
    facts: models.Facts,
    names: Callable[[], Iterable[str]] | None,
    servers: tools.ToolServers | None,
) -> Routes:
    """Included before all others, whose /metrics and /v1 routes it takes the place of."""
    router, own, adapter = Routes(), slots.Slots(figures), lora.Lora(dispatcher.settings)
    router.include(completion.routes(dispatcher, own, adapter))
    router.include(chat.routes(dispatcher, own, adapter))
    router.include(slots.routes(dispatcher, own, adapter))
    router.include(lora.routes(dispatcher, adapter))
    router.include(models.routes(dispatcher, facts, names))
    router.include(tools.routes(dispatcher, servers))
    router.include(predict.routes(dispatcher))
    router.include(proxy.routes(dispatcher))
    router.include(texts.routes(dispatcher))

    @router.get("/health")
    @router.get("/v1/health")
    async def health(request: Request) -> Response:
        """The model is there, as nothing listens here before."""
        return JSONResponse({"status": "ok"})

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        """The ids of a text; control tokens are found by their names unless `parse_special` is false."""
        body, headers = await read_body(request, TokenizeBody, dispatcher)
        special, parse = bool(body.add_special), body.parse_special is not False

        def work(llm: Model) -> list[Any]:
            entries = [body.content] if isinstance(body.content, str) else body.content
            ids: list[int] = []
            for at, entry in enumerate(entries):
                ids += [entry] if isinstance(entry, int) else llm.tokenize(entry, special and at == 0, parse)
            if not body.with_pieces:
                return ids
            return [{"id": id, "piece": _piece(llm, id)} for id in ids]

        async with dispatcher.models.use(body.model) as (_, llm):
            tokens = await asyncio.to_thread(work, llm)
        return JSONResponse({"tokens": tokens}, headers=headers)

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        """The text of ids."""
        body, headers = await read_body(request, DetokenizeBody, dispatcher)
        async with dispatcher.models.use(body.model) as (_, llm):
            text = await asyncio.to_thread(_text, llm, body.tokens)
        return JSONResponse({"content": text}, headers=headers)

    @router.post("/v1/embeddings")
    async def openai_embeddings(request: Request) -> Response:
        """The same in OpenAI's form."""
        body, headers = await read_body(request, EmbeddingBody, dispatcher)
        if body.input is None:
            raise Refused(400, "invalid_request", '"input" must be provided')
        async with dispatcher.models.use(body.model) as (name, llm):
            made = await cancel_on_disconnect(request, texts.embed(dispatcher, request, llm, body.input, body))
        encoding = body.encoding_format or "float"
        rows = [
            {"object": "embedding", "index": i, "embedding": _vector(v, encoding), "tokens_evaluated": int(n)}
            for i, (v, n) in enumerate(zip(made.vectors, made.tokens, strict=True))
        ]
        usage = {"prompt_tokens": made.total_tokens, "total_tokens": made.total_tokens}
        return JSONResponse({"object": "list", "model": name, "data": rows, "usage": usage}, headers=headers)

    @router.get("/metrics")
    async def counted(request: Request) -> Response:
        """llama-server's names, and this server's own behind them."""
        if not dispatcher.settings.metrics:
            message = "This server does not support metrics endpoint. Start it with `--metrics`"
            raise Refused(501, "not_supported", message)
        text = figures.text(dispatcher.models) + await asyncio.to_thread(metrics.text)
        return PlainTextResponse(text, media_type=TEXT, headers={"Process-Start-Time-Unix": str(figures.began)})

    return router


def _text(llm: Model, ids: list[int]) -> str:
    """Behind a BOS no space is lost, and the names of control tokens are kept."""
    detokenizer = llm.tokenizer.detokenizer(False, continues=True)
    return "".join([detokenizer.push(id) for id in ids]) + detokenizer.flush()


def _piece(llm: Model, id: int) -> str | list[int]:
    raw = llm.tokenizer.token_bytes(id, special=True)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)
