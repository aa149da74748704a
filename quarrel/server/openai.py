"""OpenAI's protocol: /v1/models, /v1/chat/completions, /v1/completions, /v1/embeddings."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quarrel import __version__
from quarrel.engine import Chunk, Result, Service, TokenLogprob, Usage
from quarrel.llm import Model
from quarrel.server.body import body_of, read_body
from quarrel.server.conversation import chat_request
from quarrel.server.dispatch import (
    Dispatcher,
    Generation,
    Prepare,
    answer_stream,
    answer_whole,
    bursts,
    cancel_on_disconnect,
)
from quarrel.server.errors import Refused, openai_body
from quarrel.server.fields import inputs_of
from quarrel.server.lines import DONE, SSE, event
from quarrel.server.llama.progress import timings
from quarrel.server.logprobs import LogprobLists, chat_logprob, joined
from quarrel.server.overflow import summed_up
from quarrel.server.reader import Reader, Reading
from quarrel.server.schemas import ChatBody, CompletionBody, EmbeddingsBody, OpenAIBody

if TYPE_CHECKING:
    from fastapi import APIRouter

Json = dict[str, Any]
FINGERPRINT = f"quarrel-{__version__}"
"""Of what answers: with the same seed, another version may write another text."""


def routes(dispatcher: Dispatcher) -> APIRouter:
    """The /v1 routes."""
    from fastapi import APIRouter  # only here: llama-server's routes share the rest, and start without it

    router = APIRouter(prefix="/v1")

    @router.get("/models")
    async def list_models() -> Json:
        """Every model on offer, loaded or not."""
        return {"object": "list", "data": [_model(n.name, n.created) for n, _ in dispatcher.models.listed()]}

    @router.get("/models/{name:path}")
    async def one_model(name: str) -> Json:
        """One model."""
        made, _ = dispatcher.models.named(name)
        return _model(made.name, made.created)

    @router.post("/chat/completions", **body_of(ChatBody))
    async def chat(request: Request) -> Response:
        """The next message of a conversation."""
        body, headers = await read_body(request, ChatBody, dispatcher)
        _name_adapter(dispatcher, body)
        reading, options = body.reading(), body.sampling()
        messages: Sequence[Any] = [m.plain() for m in body.messages]
        more: Any = {"structure": body.structure(), "adapter": body.adapter, "effort": body.reasoning_effort}
        more |= {"thinking_budget": body.thinking_budget, **options, **body.fitting()}
        dropped = 0

        def prepare(llm: Model, service: Service) -> Sequence[Any]:
            template, given = dispatcher.settings.chat_template, body.variables()
            return [chat_request(llm, template, messages, reading, template_kwargs=given, service=service, **more)]

        if body.overflow == "summary":
            caller, where = request.state.caller, request.url.path
            messages, dropped = await summed_up(dispatcher, caller, body.model, where, messages, prepare)
        return await _answer(dispatcher, request, body, prepare, _Chat(reading), headers, dropped)

    @router.post("/completions", **body_of(CompletionBody))
    async def complete(request: Request) -> Response:
        """The continuation of a text, or of several."""
        body, headers = await read_body(request, CompletionBody, dispatcher)
        _name_adapter(dispatcher, body)
        options: Any = {**body.sampling(), "structure": body.structure(), "adapter": body.adapter, **body.fitting()}
        options["prompt_logprobs"] = bool(body.echo) and body.logprobs is not None

        def prepare(llm: Model, service: Service) -> Sequence[Any]:
            return [llm.prepare(p, service=service, **options) for p in inputs_of(body.prompt)]

        return await _answer(dispatcher, request, body, prepare, _Completion(body), headers)

    @router.post("/embeddings", **body_of(EmbeddingsBody))
    async def embed(request: Request) -> Response:
        """Vectors of texts, by a model that is made for them."""
        body, headers = await read_body(request, EmbeddingsBody, dispatcher)
        return await _embeddings(dispatcher, request, body, headers)

    return router


class _Form:
    """How results and chunks look in one of the two protocols."""

    object, prefix = "", ""

    def choice(self, result: Result, index: int, generation: Generation) -> Json:
        raise NotImplementedError  # pragma: no cover

    def delta(self, chunk: Chunk, index: int, generation: Generation) -> Json:
        raise NotImplementedError  # pragma: no cover

    def thought(self, generation: Generation) -> int:
        """Tokens of all answers that were thoughts."""
        return 0


class _Chat(_Form):
    object, prefix = "chat.completion", "chatcmpl-"

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._begun: set[int] = set()
        self._readers: dict[int, Reader] = {}

    def choice(self, result: Result, index: int, generation: Generation) -> Json:
        found = self._reader(index, generation).push(result.text, last=True)
        calls = found.calls
        message: Json = {"role": "assistant", "content": found.text or (None if calls else "")}
        if found.thought:
            message["reasoning_content"] = found.thought
        if calls:
            message["tool_calls"] = [{k: v for k, v in c.body(i).items() if k != "index"} for i, c in enumerate(calls)]
        reason = _reason_of_calls(result) if calls else _reason(result)
        logprobs = None if result.logprobs is None else _content(result.logprobs, generation)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def delta(self, chunk: Chunk, index: int, generation: Generation) -> Json:
        delta: Json = {}
        if index not in self._begun:
            self._begun.add(index)
            delta["role"] = "assistant"
        reason = None if chunk.result is None else _reason(chunk.result)
        reader = self._reader(index, generation, in_parts=True)
        found = reader.push(chunk.text, last=chunk.result is not None)
        if found.thought:
            delta["reasoning_content"] = found.thought
        if found.parts:
            delta["tool_calls"] = [part.body() for part in found.parts]
        if chunk.result is not None and reader.count:
            reason = _reason_of_calls(chunk.result)
        if found.text or "role" in delta:
            delta["content"] = found.text
        logprobs = None if chunk.logprob is None else _content([chunk.logprob], generation)
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def thought(self, generation: Generation) -> int:
        return sum(r.thought_tokens(generation.llm) for r in self._readers.values())

    def _reader(self, index: int, generation: Generation, *, in_parts: bool = False) -> Reader:
        if index not in self._readers:
            tokens = generation.requests[0].tokens
            self._readers[index] = self._reading.reader(generation.llm, tokens, in_parts=in_parts)
        return self._readers[index]


class _Completion(_Form):
    object, prefix = "text_completion", "cmpl-"

    def __init__(self, body: CompletionBody) -> None:
        self._prompts = [p if isinstance(p, str) else None for p in inputs_of(body.prompt)] if body.echo else []
        self._n = body.n or 1
        self._lists: dict[int, LogprobLists] = {}
        self._echoed: set[int] = set()

    def choice(self, result: Result, index: int, generation: Generation) -> Json:
        echo, logprobs = self._echo(index, generation, result.prompt_logprobs)
        if result.logprobs is not None:
            made = self._lists_of(index, generation).answer(result.logprobs)
            logprobs = made if logprobs is None else joined(logprobs, made)
        return {"index": index, "text": echo + result.text, "logprobs": logprobs, "finish_reason": _reason(result)}

    def delta(self, chunk: Chunk, index: int, generation: Generation) -> Json:
        echo, logprobs = self._echo(index, generation, chunk.prompt_logprobs)
        if chunk.logprob is not None:
            made = self._lists_of(index, generation).answer([chunk.logprob])
            logprobs = made if logprobs is None else joined(logprobs, made)
        reason = None if chunk.result is None else _reason(chunk.result)
        return {"index": index, "text": echo + chunk.text, "logprobs": logprobs, "finish_reason": reason}

    def _lists_of(self, index: int, generation: Generation) -> LogprobLists:
        if index not in self._lists:
            self._lists[index] = LogprobLists(generation.llm)
        return self._lists[index]

    def _echo(self, index: int, generation: Generation, entries: Sequence[TokenLogprob] | None) -> tuple[str, Json | None]:
        """The prompt, once, and its lists."""
        if not self._prompts or index in self._echoed:
            return "", None
        self._echoed.add(index)
        which = index // self._n
        prompt, tokens = self._prompts[which], generation.requests[which].tokens
        text = prompt if prompt is not None else generation.llm.detokenize(tokens)
        if entries is None:
            return text, None
        return text, self._lists_of(index, generation).prompt(tokens, entries, text)


def _name_adapter(dispatcher: Dispatcher, body: ChatBody | CompletionBody) -> None:
    """A model's name may say which of its adapters is meant, for clients that send nothing else."""
    model, adapter = dispatcher.models.parts(body.model)
    if adapter is not None and body.adapter is None:
        body.model, body.adapter = model, adapter


async def _answer(
    dispatcher: Dispatcher,
    request: Request,
    body: OpenAIBody,
    prepare: Prepare,
    form: _Form,
    headers: dict[str, str],
    dropped: int = 0,
) -> Response:
    """dropped: messages that a summary stands for."""
    limit, n = dispatcher.settings.timeout, body.n or 1
    head: Json = {"id": form.prefix + secrets.token_hex(12), "object": form.object, "created": int(time.time())}
    head["system_fingerprint"] = FINGERPRINT
    admission = dispatcher.admit(request.state.caller, body.model, prepare, request.url.path, stream=bool(body.stream))
    if not body.stream:

        def whole(generation: Generation, found: list[Result]) -> Json:
            listed = [r for first in found for r in (first, *first.alternatives)]
            choices = [form.choice(r, i, generation) for i, r in enumerate(listed)]
            return {
                **head,
                "model": generation.model,
                **_overflow(body, generation, dropped, listed),
                "choices": choices,
                "usage": _usage(listed, n, form.thought(generation)),
                "timings": timings(listed[0]),
            }

        return await answer_whole(request, admission, limit, whole, headers)
    options = body.stream_options
    with_usage = options is not None and options.include_usage
    more: Json = {"usage": None} if with_usage else {}
    head["object"] = form.object + (".chunk" if isinstance(form, _Chat) else "")

    async def events(generation: Generation) -> AsyncIterator[str]:
        head.update({"model": generation.model, **_overflow(body, generation, dropped)})
        ended: list[Result] = []
        for which in range(len(generation.streams)):
            async for burst in bursts(generation, which, limit):
                ended += [c.result for c in burst if c.result is not None]
                head.update(_overflow(body, generation, dropped, ended))
                rows = [(d, c.result) for c in burst for d in _parts(form.delta(c, which * n + c.index, generation))]
                yield "".join(event({**head, "choices": [d]} | more | _spent(d, result)) for d, result in rows)
        if with_usage:
            yield event({**head, "choices": [], "usage": _usage(ended, n, form.thought(generation))})
        yield DONE

    def failure(error: Refused) -> str:
        return event(openai_body(error)) + DONE

    return await answer_stream(admission, events, failure, "text/event-stream", {**SSE, **headers})


def _spent(choice: Json, result: Result | None) -> Json:
    """What an answer cost, as llama-server tells it with its end."""
    return {"timings": timings(result)} if result is not None and choice["finish_reason"] is not None else {}


def _overflow(body: OpenAIBody, generation: Generation, dropped: int, ended: Sequence[Result] = ()) -> Json:
    """What was left out of the prompts, and while it was answered, where that is anything."""
    dropped += sum(request.dropped for request in generation.requests)
    shifted = sum(result.shifted for result in ended)
    more = {"shifted": shifted} if shifted else {}
    return {"overflow": {"policy": body.overflow, "dropped": dropped, **more}} if dropped or shifted else {}


def _parts(choice: Json) -> list[Json]:
    """One choice of a chunk as those that clients expect: a text, calls, and the finish, each has a chunk of its own, and
    what says nothing has none."""
    reason, logprobs = choice["finish_reason"], choice["logprobs"]
    if "delta" in choice:
        delta = dict(choice["delta"])
        before, behind = ([{n: delta.pop(n)}] if n in delta else [] for n in ("reasoning_content", "tool_calls"))
        if before and "role" in delta:
            before = [{"role": delta.pop("role"), "content": ""}, *before]
            delta = {n: text for n, text in delta.items() if text}
        said = [delta] if delta or (logprobs is not None and not before and not behind) else []
        contents = [{"delta": d} for d in (*before, *said, *behind)]
        end: Json = {"delta": {}}
    else:
        contents, end = [{"text": choice["text"]}] if choice["text"] or logprobs is not None else [], {"text": ""}
    rows = [{**choice, **c, "logprobs": None, "finish_reason": None} for c in contents]
    if rows:
        rows[0]["logprobs"] = logprobs
    return [*rows, *([{**choice, **end, "logprobs": None}] if reason is not None else [])]


async def _embeddings(dispatcher: Dispatcher, request: Request, body: EmbeddingsBody, headers: dict[str, str]) -> Response:
    texts = inputs_of(body.input)
    async with dispatcher.models.use(body.model) as (name, llm):
        made = await cancel_on_disconnect(request, dispatcher.embed(request.state.caller, llm, texts, body.dimensions))
    data = [
        {"object": "embedding", "index": i, "embedding": _vector(v, body.encoding_format)}
        for i, v in enumerate(made.vectors)
    ]
    usage = {"prompt_tokens": made.total_tokens, "total_tokens": made.total_tokens}
    return JSONResponse({"object": "list", "model": name, "data": data, "usage": usage}, headers=headers)


def _vector(vector: Any, encoding: str) -> object:
    values = np.asarray(vector, "<f4")
    return base64.b64encode(values.tobytes()).decode() if encoding == "base64" else [float(x) for x in values]


def _model(name: str, created: int) -> Json:
    return {"id": name, "object": "model", "created": created, "owned_by": "quarrel"}


def _reason(result: Result) -> str:
    return "length" if result.finish_reason == "length" else "stop"


def _reason_of_calls(result: Result) -> str:
    """A call that is cut is no call to make."""
    return "length" if result.finish_reason == "length" else "tool_calls"


def _usage(results: Sequence[Result], n: int, thought: int = 0) -> Json:
    """Prompts count once, however many continuations they have, in whichever order these ended. thought: tokens that were
    thoughts."""
    used: list[Usage] = [r.usage for r in results]
    prompt = sum(u.prompt_tokens for u in used) // n
    made = sum(u.completion_tokens for u in used)
    # All but the first continuation of a prompt find what that has read.
    cached = sum(min(u.cached_tokens for u in used[i : i + n]) for i in range(0, len(used), n))
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": thought},
    }


def _content(entries: Sequence[TokenLogprob], generation: Generation) -> Json:
    return {"content": [chat_logprob(entry, generation.llm) for entry in entries]}
