"""All routes of llama-server's protocol that OpenAI's does not have."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from quarrel.llm import Model
from quarrel.server.body import read_body
from quarrel.server.dispatch import Dispatcher, cancel_on_disconnect
from quarrel.server.errors import Refused
from quarrel.server.llama import chat, completion, slots
from quarrel.server.llama.bodies import ChatBody, DetokenizeBody, EmbeddingBody, TokenizeBody, Words
from quarrel.server.llama.completion import prompt_ids, settings_of
from quarrel.server.llama.table import Routes
from quarrel.server.metrics import TEXT, Metrics
from quarrel.server.openai import FINGERPRINT, _vector

Json = dict[str, Any]


def routes(dispatcher: Dispatcher, metrics: Metrics) -> Routes:
    """Included before all others, whose /metrics and /v1 routes it takes the place of."""
    router, own = Routes(), slots.Slots()
    router.include(completion.routes(dispatcher, own))
    router.include(chat.routes(dispatcher, own))
    router.include(slots.routes(dispatcher, own))

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

        async with dispatcher.models.use(None) as (_, llm):
            tokens = await asyncio.to_thread(work, llm)
        return JSONResponse({"tokens": tokens}, headers=headers)

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        """The text of ids."""
        body, headers = await read_body(request, DetokenizeBody, dispatcher)
        async with dispatcher.models.use(None) as (_, llm):
            text = await asyncio.to_thread(_text, llm, body.tokens)
        return JSONResponse({"content": text}, headers=headers)

    @router.post("/apply-template")
    async def apply_template(request: Request) -> Response:
        """The prompt that messages become."""
        body, headers = await read_body(request, ChatBody, dispatcher)
        messages, tools = [m.plain() for m in body.messages], None if body.tool_choice == "none" else body.tools

        def work(llm: Model) -> str:
            return llm.tokenizer.render_chat(
                messages,
                add_generation_prompt=body.add_generation_prompt is not False,
                tools=tools,
                template=dispatcher.settings.chat_template,
                kwargs=chat.variables(dispatcher.settings, body),
            )

        async with dispatcher.models.use(None) as (_, llm):
            prompt = await asyncio.to_thread(work, llm)
        return JSONResponse({"prompt": prompt}, headers=headers)

    async def embedding(request: Request) -> Response:
        """Vectors of texts, each in a list, as llama-server has them for models of one vector a text."""
        body, headers = await read_body(request, EmbeddingBody, dispatcher)
        given = body.content if body.content is not None else body.input
        if given is None:
            raise Refused(400, "invalid_request", '"input" or "content" must be provided')
        async with dispatcher.models.use(body.model) as (_, llm):
            made = await cancel_on_disconnect(request, _embed(dispatcher, request, llm, given, body))
        rows = [{"index": i, "embedding": [[float(x) for x in v]]} for i, v in enumerate(made.vectors)]
        return JSONResponse(rows, headers=headers)

    for path in ("/embedding", "/embeddings"):
        router.post(path)(embedding)

    @router.post("/v1/embeddings")
    async def openai_embeddings(request: Request) -> Response:
        """The same in OpenAI's form."""
        body, headers = await read_body(request, EmbeddingBody, dispatcher)
        if body.input is None:
            raise Refused(400, "invalid_request", '"input" must be provided')
        async with dispatcher.models.use(body.model) as (name, llm):
            made = await cancel_on_disconnect(request, _embed(dispatcher, request, llm, body.input, body))
        encoding = body.encoding_format or "float"
        rows = [
            {"object": "embedding", "index": i, "embedding": _vector(v, encoding), "tokens_evaluated": int(n)}
            for i, (v, n) in enumerate(zip(made.vectors, made.tokens, strict=True))
        ]
        usage = {"prompt_tokens": made.total_tokens, "total_tokens": made.total_tokens}
        return JSONResponse({"object": "list", "model": name, "data": rows, "usage": usage}, headers=headers)

    @router.get("/props")
    async def props(request: Request) -> Response:
        """The model, its template, and what a request is answered with that says nothing."""
        async with dispatcher.models.use(None) as (name, llm):
            return JSONResponse(await asyncio.to_thread(_props, dispatcher, name, llm))

    @router.get("/metrics")
    async def figures(request: Request) -> Response:
        """llama-server's names, and this server's own behind them."""
        async with dispatcher.models.use(None) as (_, llm):
            text = await asyncio.to_thread(_metrics, llm, metrics)
        return PlainTextResponse(text, media_type=TEXT)

    return router


def _several(given: Any) -> list[Any]:
    if isinstance(given, Words):
        return [given.text()]
    given = given if isinstance(given, str) else [g.text() if isinstance(g, Words) else g for g in given]
    if isinstance(given, str) or all(isinstance(x, int) for x in given):
        return [given]
    mixed = any(isinstance(x, int) for x in given)
    return [given] if mixed else list(given)


async def _embed(dispatcher: Dispatcher, request: Request, llm: Model, given: Any, body: EmbeddingBody) -> Any:
    texts = [t if isinstance(t, str) else prompt_ids(llm, t) for t in _several(given)]
    plain = body.embd_normalize is not None and body.embd_normalize < 0
    return await dispatcher.embed(request.state.caller, llm, texts, body.dimensions, normalize=not plain)


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


def _props(dispatcher: Dispatcher, name: str, llm: Model) -> Json:
    tokenizer, explanation = llm.tokenizer, llm.explain()
    seed = (dispatcher.settings.sampling or {}).get("seed")
    params: Any = settings_of(llm.defaults, -1 if seed is None else seed)
    params |= {"stream": False, "n_predict": -1, "max_tokens": -1}
    template = dispatcher.settings.chat_template or tokenizer.chat_template or ""
    return {
        "default_generation_settings": {"params": params, "n_ctx": llm.n_ctx, "id": 0, "is_processing": False},
        "total_slots": explanation.max_seqs,
        "model_alias": name,
        "model_path": explanation.model,
        "modalities": {"vision": bool(explanation.projector), "video": False, "audio": False},
        "media_marker": dispatcher.settings.media_marker,
        "chat_template": template,
        "bos_token": "" if tokenizer.bos_id is None else tokenizer.token_text(tokenizer.bos_id),
        "eos_token": "" if tokenizer.eos_id is None else tokenizer.token_text(tokenizer.eos_id),
        "build_info": FINGERPRINT,
        "is_sleeping": False,
    }


_COUNTERS = (
    ("prompt_tokens_total", "Number of prompt tokens processed.", "prompt_tokens"),
    ("tokens_predicted_total", "Number of generation tokens processed.", "drawn_tokens"),
    ("n_decode_total", "Total number of llama_decode() calls", "steps"),
)


def _metrics(llm: Model, metrics: Metrics) -> bytes:
    stats, activity = llm.stats(), llm.activity()
    rows = [(name, help, "counter", getattr(stats, field)) for name, help, field in _COUNTERS]
    rows += [
        ("requests_processing", "Number of requests processing.", "gauge", activity.running),
        ("requests_deferred", "Number of requests deferred.", "gauge", activity.waiting),
    ]
    lines = [f"# HELP llamacpp:{n} {h}\n# TYPE llamacpp:{n} {kind}\nllamacpp:{n} {value}\n" for n, h, kind, value in rows]
    return "".join(lines).encode() + metrics.text()
