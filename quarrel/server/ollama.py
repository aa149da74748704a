"""Ollama's API, for clients that speak no other: /api/tags, show, ps, version, generate, chat, embed, embeddings.

Its answers are lines of JSON, streamed unless `stream` is false. Times are nanoseconds. A prompt over the context is an
error here, where Ollama cuts it without a word.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field, StrictBool, StrictInt, StrictStr
from starlette.responses import JSONResponse, Response

from quarrel import __version__
from quarrel.engine import Result, Service
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
from quarrel.server.fields import Body, Text
from quarrel.server.messages import ChatMessage
from quarrel.server.models import Entry
from quarrel.server.schemas import Samplers
from quarrel.server.tools import functions_of, split_calls

Json = dict[str, Any]


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


class OllamaBody(Body):
    model: StrictStr
    stream: StrictBool = True
    options: Options = Options()
    keep_alive: StrictStr | StrictInt | None = None
    format: StrictStr | dict[str, Any] | None = None

    def sampling(self) -> Any:
        return {"max_tokens": None, **self.options.sampling()}

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
    system: Text | None = None
    raw: StrictBool = False


class OllamaChat(OllamaBody):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]
    tools: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None


class OllamaEmbed(Body):
    model: StrictStr
    input: Text | Annotated[list[Text], Field(max_length=2048)]
    dimensions: Annotated[StrictInt, Field(ge=1)] | None = None


class OllamaEmbedding(Body):
    """As clients older than /api/embed send it."""

    model: StrictStr
    prompt: Text
    options: Options = Options()
    keep_alive: StrictStr | StrictInt | None = None


class OllamaShow(Body):
    model: StrictStr


def routes(dispatcher: Dispatcher) -> APIRouter:
    """The routes of `--ollama-compat`."""
    router = APIRouter()

    @router.get("/api/tags")
    async def tags() -> Json:
        """The models."""
        return {"models": [_listed(e) for e in dispatcher.models.entries()]}

    @router.get("/api/ps")
    async def running() -> Json:
        """The models in memory."""
        return {"models": [_listed(e) for e in dispatcher.models.entries() if e.loaded is not None]}

    @router.get("/api/version")
    async def version() -> Json:
        """Of this server."""
        return {"version": __version__}

    @router.post("/api/show", **body_of(OllamaShow))
    async def show(request: Request) -> Json:
        """One model."""
        body, _ = await read_body(request, OllamaShow, dispatcher)
        entry = dispatcher.models.entry(_plain(body.model, dispatcher))
        return {**_listed(entry), "modelfile": "", "parameters": "", "template": "", "capabilities": ["completion"]}

    @router.post("/api/generate", **body_of(OllamaGenerate))
    async def generate(request: Request) -> Response:
        """The continuation of a prompt; put to the model by its chat template unless `raw`."""
        body, headers = await read_body(request, OllamaGenerate, dispatcher)
        body.model = body.model or _only(dispatcher)
        options, structure, template = body.sampling(), body.structure(), dispatcher.settings.chat_template
        turns: list[dict[str, object]] = [{"role": "system", "content": body.system}] if body.system else []
        turns.append({"role": "user", "content": body.prompt})

        def prepare(llm: Model, service: Service) -> Sequence[Any]:
            if body.raw or not (template or llm.tokenizer.chat_template):
                return [llm.prepare(body.prompt, service=service, structure=structure, **options)]
            return [llm.prepare(messages=turns, template=template, service=service, structure=structure, **options)]

        return await _answer(dispatcher, request, body, prepare, lambda text: {"response": text}, headers, [])

    @router.post("/api/chat", **body_of(OllamaChat))
    async def chat(request: Request) -> Response:
        """The next message of a conversation."""
        body, headers = await read_body(request, OllamaChat, dispatcher)
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
        async with dispatcher.models.use(_plain(body.model, dispatcher)) as (name, llm):
            made = await cancel_on_disconnect(request, dispatcher.embed(request.state.caller, llm, texts, body.dimensions))
        rows = [[float(x) for x in v] for v in made.vectors]
        return JSONResponse({"model": name, "embeddings": rows, "prompt_eval_count": made.total_tokens}, headers=headers)

    @router.post("/api/embeddings", **body_of(OllamaEmbedding))
    async def embedding(request: Request) -> Response:
        """The vector of one text."""
        body, headers = await read_body(request, OllamaEmbedding, dispatcher)
        async with dispatcher.models.use(_plain(body.model, dispatcher)) as (_, llm):
            made = await cancel_on_disconnect(request, dispatcher.embed(request.state.caller, llm, [body.prompt], None))
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
        request.state.caller, _plain(body.model, dispatcher), prepare, request.url.path, stream=body.stream
    )
    limit = dispatcher.settings.timeout
    if not body.stream:

        def whole(generation: Generation, found: list[Result]) -> Json:
            (result,) = found
            return _last(result, generation, body.model, _shown(result.text, show, names))

        return await answer_whole(request, admission, limit, whole, headers)

    async def lines(generation: Generation) -> AsyncIterator[str]:
        async for chunk in chunks(generation, 0, limit):
            text = "" if names else chunk.text
            if chunk.result is not None:
                shown = _shown(chunk.result.text, show, names) if names else show(text)
                row = _last(chunk.result, generation, body.model, shown)
            else:
                row = {"model": body.model, "created_at": _now(), **show(text), "done": False}
            yield json.dumps(row, ensure_ascii=False) + "\n"

    def failure(error: Refused) -> str:
        return json.dumps({"error": str(error)}) + "\n"

    return await answer_stream(admission, lines, failure, "application/x-ndjson", headers)


def _shown(text: str, show: Callable[[str], Json], names: Sequence[str]) -> Json:
    rest, calls = split_calls(text, names) if names else (text, [])
    row = show(rest)
    if calls:
        row["message"]["tool_calls"] = [{"function": {"name": c.name, "arguments": json.loads(c.arguments)}} for c in calls]
    return row


def _last(result: Result, generation: Generation, model: str, row: Json) -> Json:
    t = result.timings
    return {
        "model": model,
        "created_at": _now(),
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


def _only(dispatcher: Dispatcher) -> str:
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


def _plain(name: str, dispatcher: Dispatcher) -> str:
    """Ollama's clients put `:latest` behind names without a tag."""
    known = {e.name for e in dispatcher.models.entries()}
    return name.removesuffix(":latest") if name not in known else name


def _listed(entry: Entry) -> Json:
    row: Json = {"name": entry.name, "model": entry.name, "modified_at": _now(entry.created), "size": 0}
    row["digest"] = _digest(entry.source)
    details: Json = {"format": "gguf", "family": "", "families": None, "parameter_size": "", "quantization_level": ""}
    if entry.loaded is not None:
        e = entry.loaded.llm.explain()
        details["family"] = e.architecture
        details["parameter_size"] = f"{e.parameters / 1e9:.1f}B" if e.parameters >= 1e8 else f"{e.parameters / 1e6:.1f}M"
        details["quantization_level"] = e.quantization
        row["size"] = e.memory.weights
    return {**row, "details": details}


def _digest(source: str) -> str:
    """Stands for the model until its file changes; the file itself, which may be large, is not read."""
    try:
        found = Path(source).stat()
        identity = f"{source}\0{found.st_size}\0{found.st_mtime_ns}"
    except (OSError, ValueError):  # a name
        identity = source
    return hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()


def _now(at: float | None = None) -> str:
    return datetime.fromtimestamp(time.time() if at is None else at, UTC).isoformat().replace("+00:00", "Z")
