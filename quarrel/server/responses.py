"""OpenAI's newer protocol, /v1/responses: text, calls of functions, events; what was answered is kept for a while."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from quarrel.engine import Result, SamplingParams, Service
from quarrel.errors import ContextOverflow
from quarrel.llm import Model
from quarrel.server.body import body_of, read_body
from quarrel.server.call_parts import CallPart
from quarrel.server.conversation import chat_request
from quarrel.server.dispatch import Dispatcher, Generation, Prepare, answer_stream, answer_whole, chunks
from quarrel.server.errors import Refused
from quarrel.server.fields import Body
from quarrel.server.lines import SSE, event
from quarrel.server.reader import Reader, Reading
from quarrel.server.response_bodies import ResponsesBody
from quarrel.server.stored import Responses

Json = dict[str, Any]


def routes(dispatcher: Dispatcher) -> APIRouter:
    """To answer, and to look at what was answered."""
    router, stored = APIRouter(prefix="/v1"), Responses()

    def prepared(caller: str, body: ResponsesBody) -> tuple[list[Any], Prepare, Reading]:
        """What was said before, and what makes the request of it and of the body."""
        before = body.previous_response_id
        last = None if before is None else stored.find(caller, before, "previous_response_id")
        earlier = [] if last is None else [*last.items, *last.row["output"]]
        messages, reading, options = body.messages(earlier), body.reading(), body.sampling()
        effort = None if body.reasoning is None else body.reasoning.effort
        more: Any = {"structure": body.structure(), "adapter": body.adapter, "effort": effort, **options}
        more |= {"overflow": "shift"} if body.truncation == "auto" else {}

        def prepare(llm: Model, service: Service) -> Sequence[Any]:
            return [chat_request(llm, dispatcher.settings.chat_template, messages, reading, service=service, **more)]

        return earlier, prepare, reading

    @router.post("/responses/input_tokens", **body_of(ResponsesBody))
    async def count(request: Request) -> Response:
        """The tokens of a prompt, which is not run."""
        body, headers = await read_body(request, ResponsesBody, dispatcher)
        caller = request.state.caller
        _, prepare, _ = prepared(caller, body)

        def work(llm: Model) -> int:
            try:
                return sum(len(made.tokens) for made in prepare(llm, dispatcher.service(caller)))
            except ContextOverflow as error:
                if not error.tokens:
                    raise
                return error.tokens

        async with dispatcher.models.use(body.model) as (_, llm):
            tokens = await asyncio.to_thread(work, llm)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": tokens}, headers=headers)

    @router.post("/responses", **body_of(ResponsesBody))
    async def respond(request: Request) -> Response:
        """An answer to a text or a conversation."""
        body, headers = await read_body(request, ResponsesBody, dispatcher)
        caller = request.state.caller
        earlier, prepare, reading = prepared(caller, body)
        admission = dispatcher.admit(caller, body.model, prepare, request.url.path, stream=bool(body.stream))
        answer, limit = _Answer(body, reading), dispatcher.settings.timeout

        def keep() -> None:
            if body.store is not False and answer.row is not None:
                items = [item.model_dump(exclude_unset=True) for item in body.items()]
                stored.keep(caller, answer.row, [*earlier, *({"id": _id("msg_"), **row} for row in items)])

        if not body.stream:

            def whole(generation: Generation, found: list[Result]) -> Json:
                answer.begin(generation)
                (result,) = found
                row = answer.ended(result)
                keep()
                return row

            return await answer_whole(request, admission, limit, whole, headers)

        async def events(generation: Generation) -> AsyncIterator[str]:
            answer.begin(generation)
            yield "".join(answer.opening())
            async for chunk in chunks(generation, 0, limit):
                if events := answer.push(chunk.text, chunk.result):
                    yield "".join(events)
            keep()

        return await answer_stream(admission, events, answer.failed, "text/event-stream", {**SSE, **headers})

    @router.get("/responses/{id}")
    async def look(id: str, request: Request) -> Json:
        """A response that was kept."""
        return stored.find(request.state.caller, id).row

    @router.get("/responses/{id}/input_items")
    async def items(
        id: str, request: Request, limit: int = 20, order: Literal["asc", "desc"] = "desc", after: str = ""
    ) -> Json:
        """What it answered."""
        rows = [_shown(row) for row in stored.find(request.state.caller, id).items]
        rows = rows if order == "asc" else rows[::-1]
        start = next((at + 1 for at, row in enumerate(rows) if row.get("id") == after), 0)
        page = rows[start : start + max(1, min(limit, 100))]
        ends = {"first_id": page[0].get("id"), "last_id": page[-1].get("id")} if page else {}
        return {"object": "list", "data": page, "has_more": start + len(page) < len(rows), **ends}

    @router.delete("/responses/{id}")
    async def forget(id: str, request: Request) -> Json:
        """Forgets it."""
        stored.forget(request.state.caller, id)
        return {"id": id, "object": "response", "deleted": True}

    return router


def _shown(row: Json) -> Json:
    """An item as clients read it: its type is said, and its text is a part."""
    made, kind = {"type": "message", **row}, "output_text" if row.get("role") == "assistant" else "input_text"
    if isinstance(row.get("content"), str):
        made["content"] = [{"type": kind, "text": row["content"], **({"annotations": []} if kind == "output_text" else {})}]
    return made


def _id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)


@dataclass(frozen=True)
class Kind:
    """Of items that hold a text: how they and their events are called."""

    item: str
    prefix: str
    event: str
    part_type: str
    more: Json
    part_more: Json
    logprobs: Json

    def part(self, text: str) -> Json:
        return {"type": self.part_type, "text": text, **self.part_more}


SAID = Kind(
    *("message", "msg_", "output_text", "output_text", {"role": "assistant"}),
    part_more={"annotations": [], "logprobs": []},
    logprobs={"logprobs": []},
)
_ADDED = "response.output_item.added"
THOUGHT = Kind("reasoning", "rs_", "reasoning_text", "reasoning_text", {"summary": []}, {}, {})


class _Answer:
    """One response as it comes to be; its events are numbered."""

    def __init__(self, body: ResponsesBody, reading: Reading) -> None:
        self.model = body.model or ""
        self._body, self._params = body, SamplingParams()
        self._reading, self._reader = reading, Reader(reading)
        self._model: Model | None = None
        self._id, self._created, self._next = _id("resp_"), int(time.time()), 0
        self.row: Json | None = None
        """The whole answer, when it has ended."""
        self._items: list[Json] = []
        self._open: Json | None = None
        self._kind = SAID
        """The message or the thought that is being written, the last item."""
        self._open_call: Json | None = None
        """Or the call."""

    def begin(self, generation: Generation) -> None:
        """What the answer says of its request."""
        self.model, self._params = generation.model, generation.requests[0].params
        tokens, in_parts = generation.requests[0].tokens, bool(self._body.stream)
        self._model, self._reader = generation.llm, self._reading.reader(generation.llm, tokens, in_parts=in_parts)

    def opening(self) -> list[str]:
        started = self._event("response.created", response=self._row("in_progress", []))
        going = self._event("response.in_progress", response=self._row("in_progress", []))
        return [started, going]  # what it begins with is known later

    def push(self, text: str, result: Result | None) -> list[str]:
        """The events of a piece of text, or of the last one with the result."""
        found = self._reader.push(text, last=result is not None)
        events = self._text(found.thought, THOUGHT) if found.thought else []
        events += self._text(found.text, SAID) if found.text else []
        for part in found.parts:
            events += self._called(part)
        if result is None:
            return events
        status = "incomplete" if result.finish_reason == "length" else "completed"
        if not self._items:
            events += self._begun(SAID)
        events += self._closed(status)
        whole = self._finished(status, result)
        return [*events, self._event(f"response.{status}", response=whole)]

    def failed(self, error: Refused) -> str:
        row = self._row("failed", [])
        row["error"] = {"code": error.code, "message": str(error)}
        return self._event("response.failed", response=row)

    def ended(self, result: Result) -> Json:
        """The whole answer, of a result alone."""
        self.push(result.text, result)
        return self._finished("incomplete" if result.finish_reason == "length" else "completed", result)

    def _finished(self, status: str, result: Result) -> Json:
        row, used = self._row(status, self._items), result.usage
        thought = 0 if self._model is None else self._reader.thought_tokens(self._model)
        if status == "incomplete":
            row["incomplete_details"] = {"reason": "max_output_tokens"}
        row["usage"] = {
            "input_tokens": used.prompt_tokens,
            "input_tokens_details": {"cached_tokens": used.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": used.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": used.total_tokens,
        }
        self.row = row
        return row

    def _begun(self, kind: Kind) -> list[str]:
        """Begins a message or a thought."""
        item = {"id": _id(kind.prefix), "type": kind.item, "status": "in_progress", **kind.more}
        added = self._event(_ADDED, output_index=len(self._items), item={**item, "content": []})
        self._open, self._kind = {**item, "content": [kind.part("")]}, kind
        self._items.append(self._open)
        return [added, self._event("response.content_part.added", **self._place(), part=kind.part(""))]

    def _text(self, text: str, kind: Kind) -> list[str]:
        events = []
        if self._open is None or self._kind is not kind:
            events = [*self._closed("completed"), *self._begun(kind)]
        assert self._open is not None
        self._open["content"][0]["text"] += text
        return [*events, self._event(f"response.{kind.event}.delta", **self._place(), delta=text, **kind.logprobs)]

    def _closed(self, status: str) -> list[str]:
        """Ends the message, the thought or the call that is open, if one is."""
        if self._open is None:
            return self._closed_call(status)
        item, place, kind = self._open, self._place(), self._kind
        item["status"], part = status, item["content"][0]
        self._open = None
        return [
            self._event(f"response.{kind.event}.done", **place, text=part["text"], **kind.logprobs),
            self._event("response.content_part.done", **place, part=part),
            self._event("response.output_item.done", output_index=place["output_index"], item=item),
        ]

    def _called(self, part: CallPart) -> list[str]:
        """A piece of a call, which is an item of its own."""
        events = []
        if part.begins:
            item: Json = {"id": _id("fc_"), "type": "function_call", "call_id": part.id, "name": part.name, "arguments": ""}
            item["status"] = "in_progress"
            events = [*self._closed("completed"), self._event(_ADDED, output_index=len(self._items), item=item)]
            self._open_call = item
            self._items.append(item)
        assert self._open_call is not None
        self._open_call["arguments"] += part.arguments
        place = {"item_id": self._open_call["id"], "output_index": len(self._items) - 1}
        if part.arguments:
            events.append(self._event("response.function_call_arguments.delta", **place, delta=part.arguments))
        return [*events, *(self._closed("completed") if part.ends else ())]

    def _closed_call(self, status: str) -> list[str]:
        item, self._open_call = self._open_call, None
        if item is None:
            return []
        item["status"], index = status, len(self._items) - 1
        more = {"item_id": item["id"], "output_index": index, "name": item["name"], "arguments": item["arguments"]}
        return [
            self._event("response.function_call_arguments.done", **more),
            self._event("response.output_item.done", output_index=index, item=item),
        ]

    def _place(self) -> Json:
        """Of the message that is open."""
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self._items) - 1, "content_index": 0}

    def _row(self, status: str, output: list[Json]) -> Json:
        body, choice = self._body, self._body.tool_choice
        form = body.text.format if body.text is not None else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
            "store": body.store is not False,
            "temperature": self._params.temperature,
            "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_unset=True)},
            "top_p": self._params.top_p,
            "tool_choice": choice.model_dump() if isinstance(choice, Body) else choice or "auto",
            "tools": body.tools or [],
            "truncation": body.truncation or "disabled",
            "user": body.user,
            "metadata": body.metadata or {},
        }

    def _event(self, kind: str, **fields: Any) -> str:
        row = {"type": kind, "sequence_number": self._next, **fields}
        self._next += 1
        return event(row, kind)
