"""What /v1/responses is asked: items of a conversation, tools, and how the answer is to look."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr

from quarrel.engine import Sampling
from quarrel.llm import Structure
from quarrel.server.errors import Refused
from quarrel.server.fields import Adapter, Body, Text
from quarrel.server.messages import Part, joined, with_images
from quarrel.server.reader import Reading
from quarrel.server.schemas import ReasoningEffort, Samplers
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
    truncation: Literal["disabled", "auto"] | None = None
    """auto: the oldest turns are left out where the conversation is too long."""
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
