"""Anthropic's protocol: /v1/messages and /v1/messages/count_tokens, as coding agents speak it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from quarrel.engine import Result, Service
from quarrel.errors import ContextOverflow
from quarrel.llm import Model
from quarrel.server.anthropic_bodies import CountBody, MessagesBody
from quarrel.server.body import body_of, read_body
from quarrel.server.call_parts import CallPart
from quarrel.server.conversation import chat_request
from quarrel.server.dispatch import Dispatcher, Generation, answer_stream, answer_whole, bursts
from quarrel.server.errors import Refused, anthropic_body
from quarrel.server.formats import Call
from quarrel.server.lines import SSE, event
from quarrel.server.reader import Pieces, Reader

Json = dict[str, Any]
PING_SECONDS = 10.0
"""Nobody waits longer than that without a sign of life."""
THEIRS = "claude-"
"""How their models are called: agents ask for several by name. That is the first model here, if none is so called."""


def routes(dispatcher: Dispatcher) -> APIRouter:
    """The two routes."""
    router = APIRouter(prefix="/v1")

    def named(body: CountBody) -> str | None:
        model, adapter = dispatcher.models.parts(body.model)
        if adapter is not None and isinstance(body, MessagesBody) and body.adapter is None:
            body.adapter = adapter
        return None if model is not None and model.startswith(THEIRS) and not dispatcher.models.has(model) else model

    def request_of(llm: Model, body: CountBody, **options: Any) -> Any:
        messages, begun = body.conversation()
        template = dispatcher.settings.chat_template
        made = chat_request(llm, template, messages, body.reading(), effort=body.effort, **options)
        if not begun:
            return made
        names = body.reading().names
        return llm.prepare([*made.tokens, *llm.tokenize(begun, False)], names=names, **options)

    @router.post("/messages", **body_of(MessagesBody))
    async def create(request: Request) -> Response:
        """The next message of a conversation."""
        body, headers = await read_body(request, MessagesBody, dispatcher)
        model = named(body)
        options: Any = {"structure": body.structure(), "adapter": body.adapter, **body.sampling()}
        options["thinking_budget"] = body.thinking_budget
        body.conversation()  # what is wrong with it is said before a model is loaded

        def prepare(llm: Model, service: Service) -> Sequence[Any]:
            return [request_of(llm, body, service=service, **options)]

        limit, stream = dispatcher.settings.timeout, bool(body.stream)
        admission = dispatcher.admit(request.state.caller, model, prepare, request.url.path, stream=stream)
        answer = _Answer(body)
        headers = {**headers, "request-id": request.state.request_id}
        if not stream:

            def whole(generation: Generation, found: list[Result]) -> Json:
                return answer.whole(generation, found[0])

            return await answer_whole(request, admission, limit, whole, headers)

        async def events(generation: Generation) -> AsyncIterator[str]:
            yield "".join(answer.opening(generation))
            async for burst in bursts(generation, 0, limit):
                if rows := [row for chunk in burst for row in answer.push(chunk.text, chunk.result)]:
                    yield "".join(rows)

        def failure(error: Refused) -> str:
            return event(anthropic_body(error), "error")

        def pieces(generation: Generation) -> AsyncIterator[str]:
            return with_pings(events(generation), PING_SECONDS)

        return await answer_stream(admission, pieces, failure, "text/event-stream", {**SSE, **headers})

    @router.post("/messages/count_tokens", **body_of(CountBody))
    async def count(request: Request) -> Response:
        """The tokens of a prompt, which is not run."""
        body, headers = await read_body(request, CountBody, dispatcher)

        def work(llm: Model) -> int:
            try:
                return len(request_of(llm, body).tokens)
            except ContextOverflow as error:
                if not error.tokens:
                    raise
                return error.tokens

        async with dispatcher.models.use(named(body)) as (_, llm):
            return JSONResponse({"input_tokens": await asyncio.to_thread(work, llm)}, headers=headers)

    return router


async def with_pings(source: AsyncIterator[str], every: float) -> AsyncIterator[str]:
    """The pieces, and an event where none comes for so many seconds."""
    while True:
        waiting = asyncio.ensure_future(anext(source, None))
        try:
            while not (await asyncio.wait({waiting}, timeout=every))[0]:
                yield _event("ping")
            piece = waiting.result()
        finally:
            if not waiting.done():
                waiting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await waiting
        if piece is None:
            return
        yield piece


class _Answer:
    """One message as it comes to be: blocks of thoughts, text and calls."""

    def __init__(self, body: MessagesBody) -> None:
        self._body, self._reading = body, body.reading()
        self._shows = body.effort is not False and (body.thinking is None or body.thinking.display != "omitted")
        self._id = "msg_" + secrets.token_hex(12)
        self._reader = Reader(self._reading)
        self._blocks: list[Json] = []
        self._open = False
        """Whether the last block goes on."""
        self._arguments = ""
        """What there is of the last call's."""

    def opening(self, generation: Generation) -> list[str]:
        """The first events."""
        tokens, in_parts = generation.requests[0].tokens, bool(self._body.stream)
        self._reader = self._reading.reader(generation.llm, tokens, in_parts=in_parts)
        self._generation = generation
        usage = {"input_tokens": generation.prompt_tokens, "output_tokens": 0, **_CACHE}
        return [_event("message_start", message=self._message([], None, usage)), _event("ping")]

    def push(self, text: str, result: Result | None) -> list[str]:
        """The events of a piece of text, or of the last one with the result."""
        events = self._take(self._reader.push(text, last=result is not None))
        if result is None:
            return events
        if not self._blocks:  # many callers look at the first one
            events += self._begin({"type": "text", "text": ""})
        reason, stopped = self._reason(result)
        delta = {"stop_reason": reason, "stop_sequence": stopped}
        events += [*self._end(), _event("message_delta", delta=delta, usage=self._usage(result))]
        return [*events, _event("message_stop")]

    def whole(self, generation: Generation, result: Result) -> Json:
        """The answer in one piece."""
        self.opening(generation)
        self.push(result.text, result)
        return self._message(self._blocks, result, self._usage(result))

    def _take(self, pieces: Pieces) -> list[str]:
        events = []
        if pieces.thought and self._shows:
            events += self._say("thinking", {"signature": "unsigned"}, pieces.thought)
        if pieces.text:
            events += self._say("text", {}, pieces.text)
        for part in pieces.parts:
            events += self._call(part)
        return events

    def _say(self, kind: str, more: Json, text: str) -> list[str]:
        """kind: of the block, and its field that holds the text."""
        events = []
        if not self._open or self._blocks[-1]["type"] != kind:
            events = self._begin({"type": kind, kind: "", **more})
        self._blocks[-1][kind] += text
        return [*events, self._delta({"type": f"{kind}_delta", kind: text})]

    def _call(self, part: CallPart) -> list[str]:
        """A piece of a call, which is a block of its own."""
        events = []
        if part.begins:
            id = part.id.replace("call_", "toolu_", 1) if part.id.startswith("call_") else part.id
            events, self._arguments = self._begin({"type": "tool_use", "id": id, "name": part.name, "input": {}}), ""
        self._arguments += part.arguments
        events.append(self._delta({"type": "input_json_delta", "partial_json": part.arguments}))
        if part.ends:
            self._blocks[-1]["input"] = Call(part.name, self._arguments).parsed
            events += self._end()
        return events

    def _begin(self, block: Json) -> list[str]:
        events = self._end()
        self._blocks.append(block)
        self._open = True
        # What is signed is known at its end.
        shown = {**block, "signature": ""} if "signature" in block else block
        return [*events, _event("content_block_start", index=len(self._blocks) - 1, content_block=shown)]

    def _delta(self, delta: Json) -> str:
        return _event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _end(self) -> list[str]:
        if not self._open:
            return []
        self._open = False
        block = self._blocks[-1]
        signed = {"type": "signature_delta", "signature": block["signature"]} if "signature" in block else None
        return [*([self._delta(signed)] if signed else []), _event("content_block_stop", index=len(self._blocks) - 1)]

    def _reason(self, result: Result) -> tuple[str, str | None]:
        if result.finish_reason == "length":
            full = result.usage.total_tokens >= self._generation.requests[0].n_ctx
            return "model_context_window_exceeded" if full else "max_tokens", None
        if self._reader.count:
            return "tool_use", None
        if isinstance(result.stopped_by, str):
            return "stop_sequence", result.stopped_by
        return "end_turn", None

    def _usage(self, result: Result) -> Json:
        used = result.usage
        read = {"input_tokens": used.prompt_tokens - used.cached_tokens, "output_tokens": used.completion_tokens}
        return {**_CACHE, **read, "cache_read_input_tokens": used.cached_tokens}

    def _message(self, blocks: list[Json], result: Result | None, usage: Json) -> Json:
        reason, stopped = (None, None) if result is None else self._reason(result)
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._generation.model,
            "content": blocks,
            "stop_reason": reason,
            "stop_sequence": stopped,
            "usage": usage,
        }


_CACHE = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


def _event(kind: str, **fields: Any) -> str:
    return event({"type": kind, **fields}, kind)
