"""OpenAI's newer protocol, /v1/responses: text, calls of functions, events; what was answered is kept for a while."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field, StrictBool, StrictInt, StrictStr
from starlette.responses import Response

from quarrel.engine import Result, Sampling, SamplingParams, Service
from quarrel.llm import Model, Structure
from quarrel.server.body import body_of, read_body
from quarrel.server.call_parts import CallPart
from quarrel.server.conversation import chat_request
from quarrel.server.dispatch import Dispatcher, Generation, answer_stream, answer_whole, chunks
from quarrel.server.errors import Refused
from quarrel.server.fields import Adapter, Body, Text
from quarrel.server.lines import SSE, event
from quarrel.server.messages import Part, joined, with_images
from quarrel.server.reader import Reader, Reading
from quarrel.server.schemas import ReasoningEffort, Samplers
from quarrel.server.stored import Responses
from quarrel.server.tools import call_or, required_call

Json = dict[str, Any]
PARTS = ("input_text", "output_text", "text", "refusal")
CHATS = {"input_text": "text", "output_text": "text", "input_image": "image_url"}
"""What parts are called in chats."""
LEFT_OUT = ("item_reference",)


class Item(Body):
    """A message, a call that the model made, or what came of one. `id` and `status` come back with answers.

    References to what nobody keeps here stand in histories from elsewhere: they are left out, and reported; so are thoughts
    that only their writer can read.
    """

    type: Literal["message", "function_call", "function_call_output", "reasoning", "item_reference"] = "message"
    role: StrictStr | None = None
    content: Text | list[Part] | None = None
    name: StrictStr | None = None
    arguments: StrictStr | None = None
    call_id: StrictStr | None = None
    output: StrictStr | list[Part] | None = None
    summary: list[Part] | None = None
    encrypted_content: StrictStr | None = None
    id: StrictStr | None = None
    status: StrictStr | None = None

    @property
    def thought(self) -> str:
        """Of an item of type reasoning: the text itself, or what was said of it."""
        given = self.content or self.summary or ""
        return joined(given, ("reasoning_text", "summary_text"), "input") if self.type == "reasoning" else ""

    def unknown(self) -> list[str]:
        left_out = self.type in LEFT_OUT or (self.type == "reasoning" and not self.thought)
        return [self.type] if left_out else super().unknown()

    def message(self) -> Json:
        """For the chat template."""
        if self.type == "function_call":
            if self.name is None:
                raise Refused(400, "invalid_request", "an item of type function_call has no name", param="input")
            call = {"id": self.call_id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        if self.type == "function_call_output":
            return {"role": "tool", "content": joined(self.output, PARTS, "input"), "tool_call_id": self.call_id}
        given = self.content
        if isinstance(given, list) and any(part.type == "input_image" for part in given):
            given = [part.model_copy(update={"type": CHATS.get(part.type or "", part.type)}) for part in given]
            return {"role": self.role or "user", "content": with_images(given, "input")}
        return {"role": self.role or "user", "content": joined(given, PARTS, "input")}


class Form(Body):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: StrictStr | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: StrictBool | None = None


class TextOptions(Body):
    format: Form | None = None


class NamedCall(Body):
    type: Literal["function"]
    name: StrictStr


class AllowedTools(Body):
    """Of the tools, those that may be called; mode: whether one has to be."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: list[NamedCall]


class ReasoningOptions(Body):
    effort: ReasoningEffort | None = None
    summary: StrictStr | None = None
    """Accepted: thoughts come whole."""


class ResponsesBody(Samplers):
    model: StrictStr | None = None
    input: Annotated[Text, Field(min_length=1)] | Annotated[list[Item], Field(min_length=1, max_length=4096)]
    instructions: Text | None = None
    max_output_tokens: Annotated[StrictInt, Field(ge=1, lt=2**31)] | None = None
    stream: StrictBool | None = False
    store: StrictBool | None = None
    """Whether the response is kept, so that it can be looked at and gone on from; it is unless this is false."""
    previous_response_id: StrictStr | None = None
    text: TextOptions | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedCall | AllowedTools | None = None
    parallel_tool_calls: StrictBool | None = None
    truncation: Literal["disabled"] | None = None
    metadata: Annotated[dict[StrictStr, StrictStr], Field(max_length=16)] | None = None
    """Comes back with the answer, as the next one does."""
    reasoning: ReasoningOptions | None = None
    user: StrictStr | None = None
    adapter: Adapter | None = None

    def unknown(self) -> list[str]:
        # False is not kept to.
        return sorted([*super().unknown(), *(["parallel_tool_calls"] if self.parallel_tool_calls is False else [])])

    def sampling(self) -> Sampling:
        options = super().sampling()
        options["max_tokens"] = self.max_output_tokens
        return options

    def items(self) -> list[Item]:
        """What is to be answered."""
        return [Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    def messages(self, earlier: Sequence[Json] = ()) -> list[Json]:
        """For the chat template. earlier: items of the responses before."""
        before: list[Json] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        made, thought = list[Json](), ""
        for item in [*(Item.model_validate(row) for row in earlier), *self.items()]:
            if item.type in (*LEFT_OUT, "reasoning"):
                thought += item.thought
                continue
            message = item.message()
            if thought and message["role"] == "assistant":
                message["reasoning_content"], thought = thought, ""
            # A turn's text and calls are one message.
            if item.type == "function_call" and made and made[-1]["role"] == "assistant":
                made[-1]["tool_calls"] = [*made[-1].get("tool_calls", ()), *message["tool_calls"]]
            else:
                made.append(message)
        return [*before, *made]

    def functions(self) -> list[Json]:
        """In the form that chat templates know."""
        found = []
        allowed = [t.name for t in self.tool_choice.tools] if isinstance(self.tool_choice, AllowedTools) else None
        for tool in self.tools or [] if self.tool_choice != "none" else []:
            if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
                kind = str(tool.get("type"))[:40]
                raise Refused(
                    400, "unsupported", f"a tool is of type {kind!r}: only functions are understood", param="tools"
                )
            if allowed is not None and tool["name"] not in allowed:
                continue
            found.append({"type": "function", "function": {k: v for k, v in tool.items() if k not in ("type", "strict")}})
        return found

    @property
    def forced(self) -> bool:
        """Whether the answer has to be a call."""
        choice = self.tool_choice
        return choice.mode == "required" if isinstance(choice, AllowedTools) else choice not in (None, "none", "auto")

    def structure(self) -> Structure | None:
        if not self.forced:
            return call_or(self._form(), self.functions())
        return required_call(self.functions(), self.tool_choice.name if isinstance(self.tool_choice, NamedCall) else None)

    def reading(self) -> Reading:
        """How the answer is read."""
        form = self.text.format if self.text is not None else None
        shaped = self.forced or (form is not None and form.type != "text")
        return Reading(self.functions(), forced=self.forced, shaped=shaped)

    def _form(self) -> Structure | None:
        form = self.text.format if self.text is not None else None
        if form is None or form.type == "text":
            return None
        if form.type == "json_object":
            return Structure.json({"type": "object"})
        if form.schema_ is None:
            raise Refused(400, "invalid_request", "text.format json_schema has no object schema", param="text")
        return Structure.json(form.schema_)


def routes(dispatcher: Dispatcher) -> APIRouter:
    """To answer, and to look at what was answered."""
    router, stored = APIRouter(prefix="/v1"), Responses()

    @router.post("/responses", **body_of(ResponsesBody))
    async def respond(request: Request) -> Response:
        """An answer to a text or a conversation."""
        body, headers = await read_body(request, ResponsesBody, dispatcher)
        caller, before = request.state.caller, body.previous_response_id
        last = None if before is None else stored.find(caller, before, "previous_response_id")
        earlier = [] if last is None else [*last.items, *last.row["output"]]
        messages, reading, options = body.messages(earlier), body.reading(), body.sampling()
        effort = None if body.reasoning is None else body.reasoning.effort
        more: Any = {"structure": body.structure(), "adapter": body.adapter, "effort": effort, **options}

        def prepare(llm: Model, service: Service) -> Sequence[Any]:
            return [chat_request(llm, dispatcher.settings.chat_template, messages, reading, service=service, **more)]

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
            "truncation": "disabled",
            "user": body.user,
            "metadata": body.metadata or {},
        }

    def _event(self, kind: str, **fields: Any) -> str:
        row = {"type": kind, "sequence_number": self._next, **fields}
        self._next += 1
        return event(row, kind)
