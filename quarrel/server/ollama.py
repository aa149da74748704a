"""Ollama's API, for clients that speak no other: /api/tags, show, ps, version, generate, chat, embed, embeddings.

Its answers are lines of JSON, streamed unless `stream` is false. Times are nanoseconds. A prompt over the context is an
error here, where Ollama cuts it without a word.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field, StrictBool, StrictInt, StrictStr
from starlette.responses import JSONResponse, Response

from quarrel import __version__
from quarrel.engine import Result, Service
from quarrel.errors import QuarrelError
from quarrel.llm import Structure
from quarrel.server.body import body_of, reported
from quarrel.server.errors import Refused, refused
from quarrel.server.schemas import Body, ChatMessage, Samplers, Text
from quarrel.server.shelf import Entry, Model
from quarrel.server.tools import functions_of, split_calls
from quarrel.server.work import Desk, Job, Make, Streamed, chunks, results, unless_gone

Json = dict[str, Any]


class Options(Samplers):
    """Sampling parameters in Ollama's words."""

    num_predict: Annotated[StrictInt, Field(ge=-2)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    repeat_last_n: Annotated[StrictInt, Field(ge=-1)] | None = None
    num_ctx: StrictInt | None = None
    """The context is settled when a model is loaded: accepted, without effect."""

    def sampling(self) -> Any:
        options: Json = dict(super().sampling())
        if self.num_predict is not None:
            options["max_tokens"] = None if self.num_predict < 0 else self.num_predict
        if self.repeat_penalty is not None:
            options["repetition_penalty"] = self.repeat_penalty
        if self.repeat_last_n is not None:
            options["penalty_last_n"] = self.repeat_last_n
        return options


class Asked(Body):
    model: StrictStr
    stream: StrictBool = True
    options: Options = Options()
    keep_alive: StrictStr | StrictInt | None = None
    format: StrictStr | dict[str, Any] | None = None

    def sampling(self) -> Any:
        return {"max_tokens": None, **self.options.sampling()}

    def structure(self) -> Structure | None:
        """What the answer is held to."""
        if not self.format:
            return None
        if isinstance(self.format, str) and self.format != "json":
            raise Refused(
                400, "invalid_request", f"format is {self.format[:40]!r}, wanted json or a schema", param="format"
            )
        return Structure.json({"type": "object"} if isinstance(self.format, str) else self.format)


class GenerateAsked(Asked):
    model: StrictStr = ""
    """The only model, where none is named."""
    prompt: Text = ""
    system: Text | None = None
    raw: StrictBool = False


class ChatAsked(Asked):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]
    tools: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None


class EmbedAsked(Body):
    model: StrictStr
    input: Text | Annotated[list[Text], Field(max_length=2048)]
    dimensions: Annotated[StrictInt, Field(ge=1)] | None = None


class EmbeddingAsked(Body):
    """As clients of before /api/embed ask."""

    model: StrictStr
    prompt: Text
    options: Options = Options()
    keep_alive: StrictStr | StrictInt | None = None


class ShowAsked(Body):
    model: StrictStr


def routes(desk: Desk) -> APIRouter:
    """The routes of `--ollama-compat`."""
    router = APIRouter()

    @router.get("/api/tags")
    async def tags() -> Json:
        """The models."""
        return {"models": [_listed(e) for e in desk.shelf.entries()]}

    @router.get("/api/ps")
    async def running() -> Json:
        """The models in memory."""
        return {"models": [_listed(e) for e in desk.shelf.entries() if e.held is not None]}

    @router.get("/api/version")
    async def version() -> Json:
        """Of this server."""
        return {"version": __version__}

    @router.post("/api/show", **body_of(ShowAsked))
    async def show(request: Request) -> Json:
        """One model."""
        body, _ = await reported(request, ShowAsked, desk)
        entry = desk.shelf.entry(_plain(body.model, desk))
        return {**_listed(entry), "modelfile": "", "parameters": "", "template": "", "capabilities": ["completion"]}

    @router.post("/api/generate", **body_of(GenerateAsked))
    async def generate(request: Request) -> Response:
        """The continuation of a prompt; put to the model by its chat template unless `raw`."""
        body, headers = await reported(request, GenerateAsked, desk)
        body.model = body.model or _only(desk)
        options, structure, template = body.sampling(), body.structure(), desk.settings.chat_template
        turns: list[dict[str, object]] = [{"role": "system", "content": body.system}] if body.system else []
        turns.append({"role": "user", "content": body.prompt})

        def make(llm: Model, service: Service) -> Sequence[Any]:
            if body.raw or not (template or llm.tokenizer.chat_template):
                return [llm.prepare(body.prompt, service=service, structure=structure, **options)]
            return [llm.prepare(messages=turns, template=template, service=service, structure=structure, **options)]

        return await _answer(desk, request, body, make, lambda text: {"response": text}, headers, [])

    @router.post("/api/chat", **body_of(ChatAsked))
    async def chat(request: Request) -> Response:
        """The next message of a conversation."""
        body, headers = await reported(request, ChatAsked, desk)
        options, structure, template = body.sampling(), body.structure(), desk.settings.chat_template
        messages = [m.plain() for m in body.messages]

        def make(llm: Model, service: Service) -> Sequence[Any]:
            return [
                llm.prepare(
                    messages=messages, tools=body.tools, template=template, service=service, structure=structure, **options
                )
            ]

        names = [f["name"] for f in functions_of(body.tools)]
        return await _answer(
            desk, request, body, make, lambda text: {"message": {"role": "assistant", "content": text}}, headers, names
        )

    @router.post("/api/embed", **body_of(EmbedAsked))
    async def embed(request: Request) -> Response:
        """Vectors of texts."""
        body, headers = await reported(request, EmbedAsked, desk)
        texts = [body.input] if isinstance(body.input, str) else body.input
        async with desk.shelf.use(_plain(body.model, desk)) as (name, llm):
            made = await unless_gone(request, desk.embed(request.state.caller, llm, texts, body.dimensions))
        rows = [[float(x) for x in v] for v in made.vectors]
        return JSONResponse({"model": name, "embeddings": rows, "prompt_eval_count": made.total_tokens}, headers=headers)

    @router.post("/api/embeddings", **body_of(EmbeddingAsked))
    async def embedding(request: Request) -> Response:
        """The vector of one text."""
        body, headers = await reported(request, EmbeddingAsked, desk)
        async with desk.shelf.use(_plain(body.model, desk)) as (_, llm):
            made = await unless_gone(request, desk.embed(request.state.caller, llm, [body.prompt], None))
        return JSONResponse({"embedding": [float(x) for x in made.vectors[0]]}, headers=headers)

    return router


async def _answer(
    desk: Desk,
    request: Request,
    body: Asked,
    make: Make,
    show: Callable[[str], Json],
    headers: dict[str, str],
    names: Sequence[str],
) -> Response:
    caller, limit, model = request.state.caller, desk.settings.timeout, _plain(body.model, desk)
    if not body.stream:

        async def whole() -> Json:
            async with desk.job(caller, model, make, request.url.path, stream=False) as job:
                (result,) = await results(job, limit)
                return _last(result, job, body.model, _shown(result.text, show, names))

        return JSONResponse(await unless_gone(request, whole()), headers=headers)
    stack = AsyncExitStack()
    job = await stack.enter_async_context(desk.job(caller, model, make, request.url.path))

    async def lines() -> AsyncIterator[str]:
        try:
            async for chunk in chunks(job, 0, limit):
                text = "" if names else chunk.text
                if chunk.result is not None:
                    row = _last(
                        chunk.result, job, body.model, _shown(chunk.result.text, show, names) if names else show(text)
                    )
                else:
                    row = {"model": body.model, "created_at": _now(), **show(text), "done": False}
                yield json.dumps(row, ensure_ascii=False) + "\n"
        except QuarrelError as error:
            yield json.dumps({"error": str(refused(error))}) + "\n"

    return Streamed(stack, lines(), "application/x-ndjson", headers)


def _shown(text: str, show: Callable[[str], Json], names: Sequence[str]) -> Json:
    rest, calls = split_calls(text, names) if names else (text, [])
    row = show(rest)
    if calls:
        row["message"]["tool_calls"] = [{"function": {"name": c.name, "arguments": json.loads(c.arguments)}} for c in calls]
    return row


def _last(result: Result, job: Job, model: str, row: Json) -> Json:
    t = result.timings
    return {
        "model": model,
        "created_at": _now(),
        **row,
        "done": True,
        "done_reason": "length" if result.finish_reason == "length" else "stop",
        "total_duration": int((time.perf_counter() - job.began) * 1e9),
        "load_duration": 0,
        "prompt_eval_count": result.usage.prompt_tokens,
        "prompt_eval_duration": int(t.prefill * 1e9),
        "eval_count": result.usage.completion_tokens,
        "eval_duration": int(t.decode * 1e9),
    }


def _only(desk: Desk) -> str:
    """The model that is meant where none is named: the only one that is loaded, or offered."""
    offered = desk.shelf.entries()
    loaded = [e for e in offered if e.held is not None]
    for some in (loaded, offered):
        if len(some) == 1:
            return some[0].name
    count = f"{len(loaded)} of {len(offered)} models are loaded"
    raise Refused(
        400, "invalid_request", f"model is missing, and {count}: name one, as /api/tags tells them", param="model"
    )


def _plain(name: str, desk: Desk) -> str:
    """Ollama's clients put `:latest` behind names without a tag."""
    known = {e.name for e in desk.shelf.entries()}
    return name.removesuffix(":latest") if name not in known else name


def _listed(entry: Entry) -> Json:
    row: Json = {"name": entry.name, "model": entry.name, "modified_at": _now(entry.created), "size": 0}
    row["digest"] = _digest(entry.source)
    details: Json = {"format": "gguf", "family": "", "families": None, "parameter_size": "", "quantization_level": ""}
    if entry.held is not None:
        e = entry.held.llm.explain()
        details["family"] = e.architecture
        details["parameter_size"] = f"{e.parameters / 1e9:.1f}B" if e.parameters >= 1e8 else f"{e.parameters / 1e6:.1f}M"
        details["quantization_level"] = e.quantization
        row["size"] = e.memory.weights
    return {**row, "details": details}


def _digest(source: str) -> str:
    """Stands for the model until its file changes; the file itself, which may be large, is not read."""
    try:
        found = Path(source).stat()
        told = f"{source}\0{found.st_size}\0{found.st_mtime_ns}"
    except (OSError, ValueError):  # a name
        told = source
    return hashlib.sha256(told.encode("utf-8", "surrogateescape")).hexdigest()


def _now(at: float | None = None) -> str:
    return datetime.fromtimestamp(time.time() if at is None else at, UTC).isoformat().replace("+00:00", "Z")
