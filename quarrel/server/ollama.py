"""Ollama's API, for clients that speak no other: /api/tags, show, ps, version, generate, chat, embed, embeddings.

Its answers are lines of JSON, streamed unless `stream` is false. Times are nanoseconds. A prompt over the context is an
error here, where Ollama cuts it without a word.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field, StrictBool, StrictFloat, StrictInt, StrictStr
from starlette.responses import JSONResponse, Response

from quarrel import __version__
from quarrel.engine import Result, Service, TokenLogprob
from quarrel.llm import Model, Structure
from quarrel.server.body import body_of, read_body
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
from quarrel.server.fields import Body, Ids, Text
from quarrel.server.lines import line
from quarrel.server.logprobs import chat_logprob
from quarrel.server.messages import ChatMessage
from quarrel.server.ollama_models import listed, now, only_model, plain_name, shown
from quarrel.server.schemas import Samplers
from quarrel.server.tools import functions_of, split_calls

Json = dict[str, Any]
Word = Annotated[Text, Field(min_length=1)]


class Options(Samplers):
    """Sampling parameters in Ollama's words. What a load fixes (`num_ctx`, `num_gpu`) is reported as not understood."""

    num_predict: Annotated[StrictInt, Field(ge=-2)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    repeat_last_n: Annotated[StrictInt, Field(ge=-1)] | None = None

    def sampling(self) -> Any:
        options: Json = dict(super().sampling())
        if self.num_predict is not None:
            options["max_tokens"] = None if self.num_predict < 0 else self.num_predict
        if self.repeat_penalty is not None:
            options["repetition_penalty"] = self.repeat_penalty
        if self.repeat_last_n is not None:
            options["penalty_last_n"] = self.repeat_last_n
        return options


class KeptBody(Body):
    """A model stays until it is unloaded: `keep_alive` 0 does that behind the request, below 0 is what happens anyway, and
    a time is reported as not understood."""

    model: StrictStr
    keep_alive: StrictStr | StrictInt | StrictFloat | None = None

    def seconds(self) -> float | None:
        """How long the model is to stay; negative is for ever. None where nothing is said."""
        given = self.keep_alive
        if not isinstance(given, str):
            return given
        if not _DURATION.fullmatch(given):
            message = f"keep_alive is {given[:40]!r}, wanted seconds or a duration such as 5m"
            raise Refused(400, "invalid_request", message, param="keep_alive")
        parts = re.findall(r"([\d.]+)(ns|us|\u00b5s|ms|s|m|h)?", given)
        return (-1 if given.startswith("-") else 1) * sum(float(n) * _UNITS[unit] for n, unit in parts)

    def unknown(self) -> list[str]:
        return sorted([*super().unknown(), *(["keep_alive"] if (self.seconds() or 0) > 0 else [])])


_UNITS = {"": 1.0, "ns": 1e-9, "us": 1e-6, "\u00b5s": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
# A unit ends each part, so that there is one way to read digits: with several, no match would take for ever to find.
_DURATION = re.compile(r"[+-]?(\d+(\.\d+)?|(\d+(\.\d+)?(ns|us|\u00b5s|ms|s|m|h)){1,8})", re.ASCII)


class OllamaBody(KeptBody):
    stream: StrictBool = True
    options: Options = Options()
    format: StrictStr | dict[str, Any] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None

    def sampling(self) -> Any:
        options = {"max_tokens": None, **self.options.sampling()}
        if self.top_logprobs is not None and not self.logprobs:
            raise Refused(400, "invalid_request", "top_logprobs is given without logprobs: true", param="top_logprobs")
        return {**options, "logprobs": self.top_logprobs or 0} if self.logprobs else options

    def structure(self) -> Structure | None:
        """The grammar of the answer."""
        if not self.format:
            return None
        if isinstance(self.format, str) and self.format != "json":
            raise Refused(
                400, "invalid_request", f"format is {self.format[:40]!r}, wanted json or a schema", param="format"
            )
        return Structure.json({"type": "object"} if isinstance(self.format, str) else self.format)


class OllamaGenerate(OllamaBody):
    model: StrictStr = ""
    """The only model, where none is named."""
    prompt: Text = ""
    """Nothing only loads the model, or unloads it."""
    system: Text | None = None
    raw: StrictBool = False
    context: Ids | Annotated[list[StrictInt], Field(max_length=0)] | None = None
    """The ids of what was said before, as an earlier answer ended with them; many clients begin with none."""
    suffix: Text | None = None
    images: list[Any] | None = None

    def check(self) -> None:
        """Raises `Refused` for what a model here cannot do."""
        for name in ("suffix", "images"):
            if getattr(self, name):
                raise Refused(400, "unsupported", f"{name} is not understood here: leave it out", param=name)


class OllamaChat(OllamaBody):
    messages: list[ChatMessage] = Field(default_factory=list, max_length=4096)
    """None only load the model, or unload it."""
    tools: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None


class OllamaEmbed(KeptBody):
    input: Word | Annotated[list[Word], Field(max_length=2048)]
    dimensions: Annotated[StrictInt, Field(ge=1)] | None = None


class OllamaEmbedding(KeptBody):
    """As clients older than /api/embed send it."""

    prompt: Word
    options: Options = Options()


class OllamaShow(Body):
    """`name` is what older clients send."""

    model: StrictStr | None = None
    name: StrictStr | None = None


def routes(dispatcher: Dispatcher) -> APIRouter:
    """The routes of `--ollama-compat`."""
    router = APIRouter()

    @router.get("/api/tags")
    async def tags() -> Json:
        """The models."""
        return {"models": [listed(e) for e in dispatcher.models.entries()]}

    @router.get("/api/ps")
    async def running() -> Json:
        """The models in memory."""
        return {"models": [listed(e) for e in dispatcher.models.entries() if e.loaded is not None]}

    @router.get("/api/version")
    async def version() -> Json:
        """Of this server."""
        return {"version": __version__}

    @router.post("/api/show", **body_of(OllamaShow))
    async def show(request: Request) -> Json:
        """One model."""
        body, _ = await read_body(request, OllamaShow, dispatcher)
        name = body.model or body.name
        if not name:
            raise Refused(400, "invalid_request", "model is missing: name one, as /api/tags lists them", param="model")
        return await asyncio.to_thread(shown, dispatcher.models.entry(plain_name(name, dispatcher)))

    @router.post("/api/generate", **body_of(OllamaGenerate))
    async def generate(request: Request) -> Response:
        """The continuation of a prompt; put to the model by its chat template unless `raw`."""
        body, headers = await read_body(request, OllamaGenerate, dispatcher)
        body.model = body.model or only_model(dispatcher)
        body.check()
        if not body.prompt:
            return await _loaded(dispatcher, body, {"response": ""}, headers)
        options, structure, template = body.sampling(), body.structure(), dispatcher.settings.chat_template
        turns: list[dict[str, object]] = [{"role": "system", "content": body.system}] if body.system else []
        turns.append({"role": "user", "content": body.prompt})

        def prepare(llm: Model, service: Service) -> Sequence[Any]:
            more: Any = {"service": service, "structure": structure, **options}
            plain = body.raw or not (template or llm.tokenizer.chat_template)
            made = llm.prepare(body.prompt, **more) if plain else llm.prepare(messages=turns, template=template, **more)
            if body.context:
                begins = made.tokens[:1] == (llm.tokenizer.bos_id,)  # which stands at the beginning of the context
                made = llm.prepare([*body.context, *made.tokens[begins:]], **more)
            return [made]

        return await _answer(dispatcher, request, body, prepare, lambda text: {"response": text}, headers, [])

    @router.post("/api/chat", **body_of(OllamaChat))
    async def chat(request: Request) -> Response:
        """The next message of a conversation."""
        body, headers = await read_body(request, OllamaChat, dispatcher)
        if not body.messages:
            return await _loaded(dispatcher, body, {"message": {"role": "assistant", "content": ""}}, headers)
        options, structure, template = body.sampling(), body.structure(), dispatcher.settings.chat_template
        messages = [m.plain() for m in body.messages]

        def prepare(llm: Model, service: Service) -> Sequence[Any]:
            return [
                llm.prepare(
                    messages=messages, tools=body.tools, template=template, service=service, structure=structure, **options
                )
            ]

        names = [f["name"] for f in functions_of(body.tools)]
        return await _answer(
            dispatcher,
            request,
            body,
            prepare,
            lambda text: {"message": {"role": "assistant", "content": text}},
            headers,
            names,
        )

    @router.post("/api/embed", **body_of(OllamaEmbed))
    async def embed(request: Request) -> Response:
        """Vectors of texts."""
        body, headers = await read_body(request, OllamaEmbed, dispatcher)
        texts = [body.input] if isinstance(body.input, str) else body.input
        async with dispatcher.models.use(plain_name(body.model, dispatcher)) as (name, llm):
            made = await cancel_on_disconnect(request, dispatcher.embed(request.state.caller, llm, texts, body.dimensions))
        await _unload(dispatcher, body)
        rows = [[float(x) for x in v] for v in made.vectors]
        return JSONResponse({"model": name, "embeddings": rows, "prompt_eval_count": made.total_tokens}, headers=headers)

    @router.post("/api/embeddings", **body_of(OllamaEmbedding))
    async def embedding(request: Request) -> Response:
        """The vector of one text."""
        body, headers = await read_body(request, OllamaEmbedding, dispatcher)
        async with dispatcher.models.use(plain_name(body.model, dispatcher)) as (_, llm):
            made = await cancel_on_disconnect(request, dispatcher.embed(request.state.caller, llm, [body.prompt], None))
        await _unload(dispatcher, body)
        return JSONResponse({"embedding": [float(x) for x in made.vectors[0]]}, headers=headers)

    return router


async def _answer(
    dispatcher: Dispatcher,
    request: Request,
    body: OllamaBody,
    prepare: Prepare,
    show: Callable[[str], Json],
    headers: dict[str, str],
    names: Sequence[str],
) -> Response:
    admission = dispatcher.admit(
        request.state.caller, plain_name(body.model, dispatcher), prepare, request.url.path, stream=body.stream
    )
    limit = dispatcher.settings.timeout
    if not body.stream:

        def whole(generation: Generation, found: list[Result]) -> Json:
            (result,) = found
            row = _last(result, generation, body, _shown(result.text, show, names))
            return row if result.logprobs is None else {**row, **_logprobs(result.logprobs, generation)}

        answer = await answer_whole(request, admission, limit, whole, headers)
        await _unload(dispatcher, body)
        return answer

    async def lines(generation: Generation) -> AsyncIterator[str]:
        async for chunk in chunks(generation, 0, limit):
            text = "" if names else chunk.text
            if chunk.result is not None:
                final = _shown(chunk.result.text, show, names) if names else show(text)
                row = _last(chunk.result, generation, body, final)
            else:
                row = {"model": body.model, "created_at": now(), **show(text), "done": False}
            if chunk.logprob is not None:
                row |= _logprobs([chunk.logprob], generation)
            if chunk.result is not None:
                await _unload(dispatcher, body)
            yield line(row)

    def failure(error: Refused) -> str:
        return line({"error": str(error)})

    return await answer_stream(admission, lines, failure, "application/x-ndjson", headers)


async def _loaded(dispatcher: Dispatcher, body: OllamaBody, row: Json, headers: dict[str, str]) -> Response:
    """The answer to a request for nothing, which loads a model, or unloads it."""
    name = plain_name(body.model, dispatcher)
    if body.seconds() == 0:
        await dispatcher.models.unload(name)
    else:
        await dispatcher.models.load(name)
    reason = "unload" if body.seconds() == 0 else "load"
    made = {"model": body.model, "created_at": now(), **row, "done": True, "done_reason": reason}
    if not body.stream:
        return JSONResponse(made, headers=headers)
    return Response(json.dumps(made) + "\n", media_type="application/x-ndjson", headers=headers)


async def _unload(dispatcher: Dispatcher, body: KeptBody) -> None:
    """Behind a request that says so; others that the model runs finish."""
    if body.seconds() == 0:
        await dispatcher.models.unload(plain_name(body.model, dispatcher))


def _logprobs(entries: Sequence[TokenLogprob], generation: Generation) -> Json:
    return {"logprobs": [chat_logprob(entry, generation.llm) for entry in entries]}


def _shown(text: str, show: Callable[[str], Json], names: Sequence[str]) -> Json:
    rest, calls = split_calls(text, names) if names else (text, [])
    row = show(rest)
    if calls:
        row["message"]["tool_calls"] = [{"function": {"name": c.name, "arguments": json.loads(c.arguments)}} for c in calls]
    return row


def _last(result: Result, generation: Generation, body: OllamaBody, row: Json) -> Json:
    t = result.timings
    if isinstance(body, OllamaGenerate):
        row["context"] = [*generation.requests[0].tokens, *result.token_ids]
    return {
        "model": body.model,
        "created_at": now(),
        **row,
        "done": True,
        "done_reason": "length" if result.finish_reason == "length" else "stop",
        "total_duration": int((time.perf_counter() - generation.began) * 1e9),
        "load_duration": 0,
        "prompt_eval_count": result.usage.prompt_tokens,
        "prompt_eval_duration": int(t.prefill * 1e9),
        "eval_count": result.usage.completion_tokens,
        "eval_duration": int(t.decode * 1e9),
    }
