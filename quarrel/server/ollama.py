"""Ollama's API for generation: /api/generate, chat, embed, embeddings.

Its answers are lines of JSON, streamed unless `stream` is false. Times are nanoseconds. A prompt over the context is an
error here, where Ollama cuts it without a word.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from quarrel.engine import Result, Service, TokenLogprob
from quarrel.errors import UnsupportedModel
from quarrel.llm import Embeddings, Model
from quarrel.server.body import body_of, read_body
from quarrel.server.conversation import chat_request
from quarrel.server.dispatch import (
    Dispatcher,
    Generation,
    Prepare,
    answer_stream,
    answer_whole,
    cancel_on_disconnect,
    chunks,
)
from quarrel.server.errors import Refused
from quarrel.server.fields import Body
from quarrel.server.lines import line
from quarrel.server.logprobs import chat_logprob
from quarrel.server.messages import behind_images
from quarrel.server.ollama_bodies import (
    GeneratingBody,
    KeptBody,
    OllamaChat,
    OllamaEmbed,
    OllamaEmbedding,
    OllamaGenerate,
)
from quarrel.server.ollama_facts import Describer, capabilities, facts_of, registered, when
from quarrel.server.ollama_models import known
from quarrel.server.reader import Pieces, Reading
from quarrel.server.rest import answer_generate
from quarrel.server.schemas import GenerateBody
from quarrel.server.variants import PLAIN, chat_template

Json = dict[str, Any]
_OWN = GenerateBody.model_fields.keys() - OllamaGenerate.model_fields.keys()
_OLLAMAS = OllamaGenerate.model_fields.keys() - GenerateBody.model_fields.keys()


def routes(dispatcher: Dispatcher, describer: Describer) -> APIRouter:
    """Those that run a model."""
    router = APIRouter()

    def named(body: KeptBody) -> None:
        body.model = body.named()
        known(dispatcher, body.model, f"model '{body.model}' not found")

    @router.post("/api/generate", **body_of(OllamaGenerate, GenerateBody))
    async def generate(request: Request) -> Response:
        """The continuation of a prompt; put to the model by its chat template unless `raw`. Quarrel's own protocol has the
        same route, for bodies with a field of its own and none of Ollama's, or that name no model."""

        def choose(data: Json) -> type[Body]:
            given = {name for name, value in data.items() if value is not None}
            own = bool(_OWN & given) or (given >= {"prompt"} and "model" not in given)
            request.state.own = own and not _OLLAMAS & given
            return GenerateBody if request.state.own else OllamaGenerate

        body, headers = await read_body(request, Body, dispatcher, choose)
        if isinstance(body, GenerateBody):
            return await answer_generate(dispatcher, request, body, headers)
        assert isinstance(body, OllamaGenerate)
        body.model = body.model or body.name or _only_model(dispatcher)
        named(body)
        if not body.prompt:
            return await _loaded(dispatcher, body, {"response": ""}, headers)
        if body.suffix:
            raise Refused(400, "unsupported", f"{registered(body.model)} does not support insert", param="suffix")
        if body.raw and body.images:
            text = "raw prompts take no images: leave raw out, or send them to /api/chat"
            raise Refused(400, "unsupported", text, param="images")
        if body.context and body.images:
            text = "a context holds no images, and goes before none: send the earlier turns with these to /api/chat"
            raise Refused(400, "unsupported", text, param="images")
        await _check(dispatcher, describer, body, tools=False)
        options, structure = body.sampling(), body.structure()
        reading = Reading(shaped=structure is not None, thoughts=not body.raw)
        turns: list[dict[str, object]] = [{"role": "system", "content": body.system}] if body.system else []
        turns.append({"role": "user", "content": behind_images(body.images, body.prompt)})

        def prepare(llm: Model, service: Service) -> Sequence[Any]:
            more: Any = {"service": service, "structure": structure, **options}
            template = chat_template(llm, dispatcher.settings.chat_template)
            if (body.raw or template == PLAIN) and not body.images:
                made = llm.prepare(body.prompt, names=reading.names, **more)
            else:
                made = _seen(llm, dispatcher.settings.chat_template, turns, reading, effort=body.think, **more)
            if body.context:
                begins = made.tokens[:1] == (llm.tokenizer.bos_id,)  # which stands at the beginning of the context
                made = llm.prepare([*body.context, *made.tokens[begins:]], names=reading.names, **more)
            return [made]

        return await _answer(dispatcher, request, body, prepare, headers, reading)

    @router.post("/api/chat", **body_of(OllamaChat))
    async def chat(request: Request) -> Response:
        """The next message of a conversation."""
        body, headers = await read_body(request, OllamaChat, dispatcher)
        named(body)
        if not body.messages:
            return await _loaded(dispatcher, body, {"message": {"role": "assistant", "content": ""}}, headers)
        await _check(dispatcher, describer, body, tools=bool(body.tools))
        options, structure = body.sampling(), body.structure()
        messages, reading = [m.plain() for m in body.messages], Reading(body.tools, shaped=structure is not None)

        def prepare(llm: Model, service: Service) -> Sequence[Any]:
            more: Any = {"effort": body.think, "service": service, "structure": structure, **options}
            return [_seen(llm, dispatcher.settings.chat_template, messages, reading, **more)]

        return await _answer(dispatcher, request, body, prepare, headers, reading)

    @router.post("/api/embed", **body_of(OllamaEmbed))
    async def embed(request: Request) -> Response:
        """Vectors of texts."""
        body, headers = await read_body(request, OllamaEmbed, dispatcher)
        texts, began = [body.input] if isinstance(body.input, str) else body.input, time.perf_counter()
        body.model = body.named()
        known(dispatcher, body.model, f'model "{body.model}" not found, try pulling it first')
        if not texts:
            await dispatcher.models.load(body.model)
            await dispatcher.models.keep(body.model, body.keep_alive)
            return JSONResponse({"model": body.model, "embeddings": []}, headers=headers)
        made, loading = await _embedded(dispatcher, request, body, texts, body.dimensions, truncate=body.truncate)
        row: Json = {"model": body.model, "embeddings": [[float(x) for x in v] for v in made.vectors]}
        row |= {"total_duration": _ns(time.perf_counter() - began), "load_duration": _ns(loading)}
        return JSONResponse({**row, "prompt_eval_count": made.total_tokens}, headers=headers)

    @router.post("/api/embeddings", **body_of(OllamaEmbedding))
    async def embedding(request: Request) -> Response:
        """The vector of one text."""
        body, headers = await read_body(request, OllamaEmbedding, dispatcher)
        named(body)
        if not body.prompt:
            await dispatcher.models.load(body.model)
            await dispatcher.models.keep(body.model, body.keep_alive)
            return JSONResponse({"embedding": []}, headers=headers)
        made, _ = await _embedded(dispatcher, request, body, [body.prompt], None, truncate=True)
        return JSONResponse({"embedding": [float(x) for x in made.vectors[0]]}, headers=headers)

    return router


def _only_model(dispatcher: Dispatcher) -> str:
    """The model of a request that names none: the only one that is loaded, or offered."""
    offered = dispatcher.models.entries()
    loaded = [e for e in offered if e.loaded is not None]
    for some in (loaded, offered):
        if len(some) == 1:
            return some[0].name
    count = f"{len(loaded)} of {len(offered)} models are loaded"
    raise Refused(
        400, "invalid_request", f"model is missing, and {count}: name one, as /api/tags lists them", param="model"
    )


def _seen(llm: Model, template: str | None, turns: Sequence[Mapping[str, object]], reading: Reading, **more: Any) -> Any:
    """A chat's request; images for a model without eyes are refused in Ollama's words."""
    try:
        return chat_request(llm, template, turns, reading, **more)
    except UnsupportedModel as error:
        if not any(isinstance(turn["content"], list) for turn in turns):
            raise
        text = f"Multimodal data provided, but model does not support multimodal requests: {error}"
        raise Refused(400, "unsupported", text, param="images") from None


async def _check(dispatcher: Dispatcher, describer: Describer, body: GeneratingBody, *, tools: bool) -> None:
    """Raises `Refused` for what the model's template knows nothing of."""
    if not (body.think or tools):
        return
    name, entry = dispatcher.models.named(body.model)
    facts = await asyncio.to_thread(facts_of, entry)
    able = capabilities(facts, describer.template_of(name, facts))
    if tools and "tools" not in able:
        raise Refused(400, "unsupported", f"{registered(body.model)} does not support tools", param="tools")
    if body.think and "thinking" not in able:
        raise Refused(400, "unsupported", f'"{body.model}" does not support thinking', param="think")


async def _embedded(
    dispatcher: Dispatcher,
    request: Request,
    body: KeptBody,
    texts: Sequence[str],
    dimensions: int | None,
    *,
    truncate: bool,
) -> tuple[Embeddings, float]:
    """The vectors, and the seconds until the model was there. truncate: leave out the end of a text that does not fit."""
    began = time.perf_counter()
    async with dispatcher.models.use(body.model) as (_, llm):
        loading = time.perf_counter() - began
        cut = await asyncio.to_thread(lambda: [_cut(llm, text) if truncate else text for text in texts])
        made = await cancel_on_disconnect(request, dispatcher.embed(request.state.caller, llm, cut, dimensions))
    await dispatcher.models.keep(body.model, body.keep_alive)
    return made, loading


def _cut(llm: Model, text: str) -> str | list[int]:
    """The text, or of one that does not fit the ids that do, with what ends every text."""
    ids, special = llm.tokenize(text), llm.tokenize("")
    if len(ids) <= llm.n_ctx:
        return text
    ends = max(n for n in range(len(special) + 1) if n == 0 or ids[-n:] == special[-n:])
    return [*ids[: llm.n_ctx - ends], *ids[len(ids) - ends :]]


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


async def _answer(
    dispatcher: Dispatcher,
    request: Request,
    body: GeneratingBody,
    prepare: Prepare,
    headers: dict[str, str],
    reading: Reading,
) -> Response:
    admission = dispatcher.admit(request.state.caller, body.model, prepare, request.url.path, stream=body.stream)
    limit = dispatcher.settings.timeout
    if not body.stream:

        def whole(generation: Generation, found: list[Result]) -> Json:
            (result,) = found
            pieces = reading.reader(generation.llm, generation.requests[0].tokens).push(result.text, last=True)
            row = _last(result, generation, body, _shown(pieces, body))
            return row if result.logprobs is None else {**row, **_logprobs(result.logprobs, generation)}

        answer = await answer_whole(request, admission, limit, whole, headers)
        await dispatcher.models.keep(body.model, body.keep_alive)
        return answer

    async def lines(generation: Generation) -> AsyncIterator[str]:
        reader = reading.reader(generation.llm, generation.requests[0].tokens)
        async for chunk in chunks(generation, 0, limit):
            pieces = reader.push(chunk.text, last=chunk.result is not None)
            if pieces != Pieces() or chunk.logprob is not None:
                row = {"model": body.model, "created_at": when(time.time()), **_shown(pieces, body), "done": False}
                yield line(row if chunk.logprob is None else {**row, **_logprobs([chunk.logprob], generation)})
            if chunk.result is not None:
                await dispatcher.models.keep(body.model, body.keep_alive)
                yield line(_last(chunk.result, generation, body, _shown(Pieces(), body)))

    def failure(error: Refused) -> str:
        return line({"error": str(error)})

    return await answer_stream(admission, lines, failure, "application/x-ndjson", headers)


async def _loaded(dispatcher: Dispatcher, body: GeneratingBody, row: Json, headers: dict[str, str]) -> Response:
    """The answer to a request for nothing, which loads a model, or unloads it."""
    if body.keep_alive != 0:
        await dispatcher.models.load(body.model)
    await dispatcher.models.keep(body.model, body.keep_alive)
    reason = "unload" if body.keep_alive == 0 else "load"
    made = {"model": body.model, "created_at": when(time.time()), **row, "done": True, "done_reason": reason}
    return JSONResponse(made, headers=headers)


def _logprobs(entries: Sequence[TokenLogprob], generation: Generation) -> Json:
    return {"logprobs": [chat_logprob(entry, generation.llm) for entry in entries]}


def _shown(pieces: Pieces, body: GeneratingBody) -> Json:
    thought = {"thinking": pieces.thought} if pieces.thought else {}
    if isinstance(body, OllamaGenerate):
        return {"response": pieces.text, **thought}
    message: Json = {"role": "assistant", "content": pieces.text, **thought}
    if pieces.calls:
        calls = ({"name": c.name, "arguments": c.parsed} for c in pieces.calls)
        message["tool_calls"] = [{"function": call} for call in calls]
    return {"message": message}


def _last(result: Result, generation: Generation, body: GeneratingBody, row: Json) -> Json:
    t = result.timings
    if isinstance(body, OllamaGenerate):
        row["context"] = [*generation.requests[0].tokens, *result.token_ids]
    return {
        "model": body.model,
        "created_at": when(time.time()),
        **row,
        "done": True,
        "done_reason": "length" if result.finish_reason == "length" else "stop",
        "total_duration": _ns(time.perf_counter() - generation.began),
        "load_duration": 0,
        "prompt_eval_count": result.usage.prompt_tokens,
        "prompt_eval_duration": _ns(t.prefill),
        "eval_count": result.usage.completion_tokens,
        "eval_duration": _ns(t.decode),
    }
