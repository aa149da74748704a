"""OpenAI's newer protocol, /v1/responses: text, calls of functions, events. Nothing is kept between requests."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field, StrictBool, StrictInt, StrictStr
from starlette.responses import Response

from quarrel.engine import Result, Sampling, Service
from quarrel.llm import Model, Structure
from quarrel.server.body import body_of, read_body
from quarrel.server.dispatch import Dispatcher, Generation, answer_stream, answer_whole, chunks
from quarrel.server.errors import Refused
from quarrel.server.fields import Adapter, Body, Text
from quarrel.server.lines import SSE, event
from quarrel.server.messages import Part, joined
from quarrel.server.schemas import Samplers
from quarrel.server.tools import Call, cut_call, required_call, split_calls
from quarrel.server.variants import chat_template

Json = dict[str, Any]
PARTS = ("input_text", "output_text", "text")


class Item(Body):
    """A message, a call that the model made, or what came of one. `id` and `status` come back with answers."""

    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: StrictStr | None = None
    content: Text | list[Part] | None = None
    name: StrictStr | None = None
    arguments: StrictStr | None = None
    call_id: StrictStr | None = None
    output: StrictStr | list[Part] | None = None
    id: StrictStr | None = None
    status: StrictStr | None = None

    def message(self) -> Json:
        """For the chat template."""
        if self.type == "function_call":
            if self.name is None:
                raise Refused(400, "invalid_request", "an item of type function_call has no name", param="input")
            call = {"id": self.call_id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        if self.type == "function_call_output":
            return {"role": "tool", "content": joined(self.output, PARTS, "input"), "tool_call_id": self.call_id}
        return {"role": self.role or "user", "content": joined(self.content, PARTS, "input")}


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


class ResponsesBody(Samplers):
    model: StrictStr | None = None
    input: Annotated[Text, Field(min_length=1)] | Annotated[list[Item], Field(min_length=1, max_length=4096)]
    instructions: Text | None = None
    max_output_tokens: Annotated[StrictInt, Field(ge=1, lt=2**31)] | None = None
    stream: StrictBool | None = False
    store: StrictBool | None = None
    """Accepted; nothing is kept, so `previous_response_id` is refused."""
    previous_response_id: None = None
    text: TextOptions | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedCall | None = None
    user: StrictStr | None = None
    adapter: Adapter | None = None

    def sampling(self) -> Sampling:
        options = super().sampling()
        options["max_tokens"] = self.max_output_tokens
        return options

    def messages(self) -> list[Json]:
        before: list[Json] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*before, {"role": "user", "content": self.input}]
        return [*before, *(item.message() for item in self.input)]

    def functions(self) -> list[Json]:
        """In the form that chat templates know."""
        found = []
        for tool in self.tools or [] if self.tool_choice != "none" else []:
            if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
                kind = str(tool.get("type"))[:40]
                raise Refused(
                    400, "unsupported", f"a tool is of type {kind!r}: only functions are understood", param="tools"
                )
            found.append({"type": "function", "function": {k: v for k, v in tool.items() if k not in ("type", "strict")}})
        return found

    def structure(self) -> Structure | None:
        form, choice = self._form(), self.tool_choice
        if choice in (None, "none", "auto"):
            return form
        return required_call(self.functions(), choice.name if isinstance(choice, NamedCall) else None, form)

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
    """The one route."""
    router = APIRouter(prefix="/v1")

    @router.post("/responses", **body_of(ResponsesBody))
    async def respond(request: Request) -> Response:
        """An answer to a text or a conversation."""
        body, headers = await read_body(request, ResponsesBody, dispatcher)
        options, structure, messages, tools = body.sampling(), body.structure(), body.messages(), body.functions()

        def prepare(llm: Model, service: Service) -> Sequence[Any]:
            template = chat_template(llm, dispatcher.settings.chat_template)
            more = {"structure": structure, "adapter": body.adapter}
            return [
                llm.prepare(messages=messages, tools=tools or None, template=template, service=service, **more, **options)  # type: ignore[arg-type]
            ]

        admission = dispatcher.admit(request.state.caller, body.model, prepare, request.url.path, stream=bool(body.stream))
        answer, limit = _Answer(body, [t["function"]["name"] for t in tools]), dispatcher.settings.timeout
        if not body.stream:

            def whole(generation: Generation, found: list[Result]) -> Json:
                answer.model = generation.model
                (result,) = found
                return answer.ended(result)

            return await answer_whole(request, admission, limit, whole, headers)

        async def events(generation: Generation) -> AsyncIterator[str]:
            answer.model = generation.model
            for each in answer.opening():
                yield each
            async for chunk in chunks(generation, 0, limit):
                if chunk.text and not answer.names:
                    yield answer.delta(chunk.text)
                if chunk.result is not None:
                    for each in answer.closing(chunk.result):
                        yield each

        return await answer_stream(admission, events, answer.failed, "text/event-stream", {**SSE, **headers})

    return router


class _Answer:
    """One response as it comes to be; its events are numbered."""

    def __init__(self, body: ResponsesBody, names: Sequence[str]) -> None:
        self.names, self.model = names, body.model or ""
        self._body = body
        self._id, self._item = "resp_" + secrets.token_hex(12), "msg_" + secrets.token_hex(12)
        self._created = int(time.time())
        self._next = 0

    def opening(self) -> list[str]:
        started = self._event("response.created", response=self._row("in_progress", []))
        going = self._event("response.in_progress", response=self._row("in_progress", []))
        if self.names:  # whether it is a call is known at its end
            return [started, going]
        return [started, going, *self._begun()]

    def delta(self, text: str) -> str:
        return self._event("response.output_text.delta", **self._place(), delta=text, logprobs=[])

    def closing(self, result: Result) -> list[str]:
        whole = self.ended(result)
        events = []
        for index, item in enumerate(whole["output"]):
            if item["type"] == "message":
                text = item["content"][0]["text"]
                if self.names:
                    events += [*self._begun(), self.delta(text)]
                events.append(self._event("response.output_text.done", **self._place(), text=text, logprobs=[]))
                events.append(self._event("response.content_part.done", **self._place(), part=item["content"][0]))
            else:
                begun = {**item, "arguments": "", "status": "in_progress"}
                place = {"item_id": item["id"], "output_index": index}
                events.append(self._event("response.output_item.added", output_index=index, item=begun))
                events.append(self._event("response.function_call_arguments.delta", **place, delta=item["arguments"]))
                events.append(
                    self._event(
                        "response.function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"]
                    )
                )
            events.append(self._event("response.output_item.done", output_index=index, item=item))
        return [*events, self._event(f"response.{whole['status']}", response=whole)]

    def failed(self, error: Refused) -> str:
        row = self._row("failed", [])
        row["error"] = {"code": error.code, "message": str(error)}
        return self._event("response.failed", response=row)

    def ended(self, result: Result) -> Json:
        split = split_calls if self._body.tool_choice in (None, "none", "auto") else cut_call
        text, calls = split(result.text, self.names) if self.names else (result.text, [])
        status = "incomplete" if result.finish_reason == "length" else "completed"
        output = [self._message(text, status)] if text or not calls else []
        row = self._row(status, [*output, *map(_call, calls)])
        if status == "incomplete":
            row["incomplete_details"] = {"reason": "max_output_tokens"}
        used = result.usage
        row["usage"] = {
            "input_tokens": used.prompt_tokens,
            "input_tokens_details": {"cached_tokens": used.cached_tokens},
            "output_tokens": used.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": used.total_tokens,
        }
        return row

    def _begun(self) -> list[str]:
        item = {**self._message("", "in_progress"), "content": []}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        added = self._event("response.output_item.added", output_index=0, item=item)
        return [added, self._event("response.content_part.added", **self._place(), part=part)]

    def _message(self, text: str, status: str) -> Json:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return {"id": self._item, "type": "message", "role": "assistant", "status": status, "content": [part]}

    def _place(self) -> Json:
        return {"item_id": self._item, "output_index": 0, "content_index": 0}

    def _row(self, status: str, output: list[Json]) -> Json:
        choice = self._body.tool_choice
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": self._body.instructions,
            "max_output_tokens": self._body.max_output_tokens,
            "model": self.model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": self._body.temperature,
            "top_p": self._body.top_p,
            "tool_choice": choice.model_dump() if isinstance(choice, NamedCall) else choice or "auto",
            "tools": self._body.tools or [],
            "metadata": {},
        }

    def _event(self, kind: str, **fields: Any) -> str:
        row = {"type": kind, "sequence_number": self._next, **fields}
        self._next += 1
        return event(row, kind)


def _call(call: Call) -> Json:
    id = secrets.token_hex(12)
    row = {"id": "fc_" + id, "type": "function_call", "call_id": "call_" + id, "status": "completed"}
    return {**row, "name": call.name, "arguments": call.arguments}
