"""The bodies of Anthropic's requests, and the conversations that they hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr

from quarrel.engine import Sampling
from quarrel.llm import Structure
from quarrel.server.conversation import Effort
from quarrel.server.errors import Refused
from quarrel.server.fields import Adapter, Body, Stop, Text
from quarrel.server.messages import WEB
from quarrel.server.reader import Reading
from quarrel.server.schemas import Samplers
from quarrel.server.tools import call_or, required_call

Json = dict[str, Any]
BILLING = "x-anthropic-billing-header:"
"""Claude Code begins its system blocks with a line for Anthropic's books, another one in each request. It is no word to a
model, and no prompt behind it would be found in the cache."""


class Block(Body):
    """A part of a message. `cache_control` is accepted: what was computed before is found without being asked for."""

    type: StrictStr
    text: Text | None = None
    thinking: Text | None = None
    signature: StrictStr | None = None
    data: StrictStr | None = None
    id: StrictStr | None = None
    name: StrictStr | None = None
    input: dict[str, Any] | None = None
    tool_use_id: StrictStr | None = None
    content: Text | list[Block] | None = None
    is_error: StrictBool | None = None
    source: dict[str, Any] | None = None
    title: StrictStr | None = None
    context: StrictStr | None = None
    cache_control: dict[str, Any] | None = None
    citations: Any = None
    caller: Any = None

    def said(self) -> str:
        """The text of a block that is one. Raises `Refused` for all else."""
        if self.type == "text" and self.text is not None:
            return self.text
        source = self.source or {}
        if self.type == "document" and source.get("type") == "text" and isinstance(text := source.get("data"), str):
            return "\n".join(filter(None, (self.title, self.context, text)))
        found = f"a message holds a block of type {self.type[:40]!r}"
        raise Refused(400, "unsupported", f"{found}: only text and images are understood", param="messages")

    def part(self) -> Json:
        """For `LLM.chat`: a text or an image. Raises `Refused` for all else, and for images that are to be fetched."""
        if self.type != "image":
            return {"type": "text", "text": self.said()}
        source = self.source or {}
        kind, data = source.get("media_type"), source.get("data")
        if source.get("type") == "url" and isinstance(url := source.get("url"), str) and url.lower().startswith(WEB):
            return {"type": "image_url", "image_url": {"url": url}}
        if source.get("type") != "base64" or not isinstance(kind, str) or not isinstance(data, str):
            text = "an image has no source of type base64 with media_type and data, or of type url with one of http"
            raise Refused(400, "unsupported", text, param="messages")
        return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}


Content = Text | list[Block]


class Turn(Body):
    role: Literal["user", "assistant", "system"]
    content: Content

    def messages(self) -> list[Json]:
        """For the chat template: results of tools are messages of their own, in their places."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        made: list[Json] = []
        said, thought, calls = list[Json](), list[str](), list[Json]()
        for block in self.content:
            if block.type in ("thinking", "redacted_thinking"):  # the latter only its writer can read
                thought += [block.thinking] if block.thinking else []
            elif block.type == "tool_use" and self.role == "assistant":
                if block.name is None:
                    raise Refused(400, "invalid_request", "a block of type tool_use has no name", param="messages")
                function = {"name": block.name, "arguments": block.input or {}}
                calls.append({"id": block.id, "type": "function", "function": function})
            elif block.type == "tool_result" and self.role == "user":
                if said:
                    made.append({"role": "user", "content": content_of(said)})
                    said = []
                inner = block.content or ""
                texts = inner if isinstance(inner, str) else [b for b in inner if b.type != "image"]
                text = ("Error: " if block.is_error else "") + joined(texts)
                made.append({"role": "tool", "content": text, "tool_call_id": block.tool_use_id})
                # Templates know images of people alone.
                said += [] if isinstance(inner, str) else [b.part() for b in inner if b.type == "image"]
            else:
                said.append(block.part())
        if said or calls or thought or not made:
            message: Json = {"role": self.role, "content": content_of(said)}
            message |= {"tool_calls": calls} if calls else {}
            made.append(message | ({"reasoning_content": "\n".join(thought)} if thought else {}))
        return made


def content_of(parts: Sequence[Json]) -> str | list[Json]:
    """One text, or texts and images in turn where there are any."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return list(parts)


def joined(content: Content) -> str:
    """The text of blocks."""
    return content if isinstance(content, str) else "\n".join(block.said() for block in content)


class Tool(Body):
    """One that the caller runs, by a schema of its own."""

    name: StrictStr
    type: StrictStr = "custom"
    description: Text | None = None
    input_schema: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    strict: StrictBool | None = None
    eager_input_streaming: StrictBool | None = None
    input_examples: list[Any] | None = None
    defer_loading: StrictBool | None = None
    allowed_callers: list[Any] | None = None

    def function(self) -> Json:
        """In the form that chat templates know. Raises `Refused` for tools that only Anthropic knows."""
        if self.type != "custom" or self.input_schema is None:
            found = f"the tool {self.name[:40]!r} is of type {self.type[:40]!r}"
            raise Refused(400, "unsupported", f"{found}: only tools with an input_schema are understood", param="tools")
        function = {"name": self.name, "description": self.description or "", "parameters": self.input_schema}
        return {"type": "function", "function": function}


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: StrictStr | None = None
    disable_parallel_tool_use: StrictBool | None = None

    def unknown(self) -> list[str]:
        # True is not kept to.
        return sorted([*super().unknown(), *(["disable_parallel_tool_use"] if self.disable_parallel_tool_use else [])])


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[StrictInt, Field(ge=0, lt=2**31)] | None = None
    """The most that is thought before the answer."""
    display: StrictStr | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(Body):
    user_id: StrictStr | None = None


class CountBody(Body):
    """What a prompt is made of."""

    model: StrictStr | None = None
    messages: Annotated[list[Turn], Field(min_length=1, max_length=4096)]
    system: Content | None = None
    tools: Annotated[list[Tool], Field(max_length=512)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    cache_control: dict[str, Any] | None = None

    def conversation(self) -> tuple[list[Json], str]:
        """Messages for the chat template, and the beginning of the answer, where the caller gives one."""
        system = self.system
        if isinstance(system, list):
            system = joined([b for b in system if not (b.text or "").startswith(BILLING)])
        made: list[Json] = [{"role": "system", "content": system}] if system else []
        for turn in self.messages:
            made += turn.messages()
        last = made[-1]
        if last["role"] == "assistant" and len(made) > 1 and not last.get("tool_calls"):
            if any(isinstance(message["content"], list) for message in made):
                text = "an answer that is begun already cannot follow images: leave the last message out"
                raise Refused(400, "unsupported", text, param="messages")
            return made[:-1], last["content"]
        return made, ""

    def callable(self) -> list[Json]:
        """The tools that the model may call."""
        none = self.tool_choice is not None and self.tool_choice.type == "none"
        return [] if none else [tool.function() for tool in self.tools or ()]

    @property
    def effort(self) -> Effort:
        """How much to think: not at all where the caller does not ask for it."""
        if self.thinking is None or self.thinking.type == "disabled":
            return False
        return (self.output_config.effort if self.output_config is not None else None) or True

    @property
    def thinking_budget(self) -> int | None:
        """Tokens that a thought may have."""
        enabled = self.thinking is not None and self.thinking.type == "enabled"
        return self.thinking.budget_tokens if self.thinking is not None and enabled else None

    @property
    def form(self) -> OutputFormat | None:
        """What the text of the answer keeps to."""
        inner = None if self.output_config is None else self.output_config.format
        return inner or self.output_format

    def reading(self) -> Reading:
        """How the answer is read."""
        forced = self.tool_choice is not None and self.tool_choice.type in ("any", "tool")
        return Reading(self.callable(), forced=forced, shaped=forced or self.form is not None)


class MessagesBody(Samplers, CountBody):
    max_tokens: Annotated[StrictInt, Field(ge=1, lt=2**31)]
    stop_sequences: Annotated[list[Stop], Field(max_length=16)] | None = None
    stream: StrictBool | None = False
    metadata: Metadata | None = None
    """Accepted for compatibility, as the next one is; nothing is done with them."""
    service_tier: StrictStr | None = None
    adapter: Adapter | None = None

    def sampling(self) -> Sampling:
        options = super().sampling()
        options["max_tokens"] = self.max_tokens
        if self.stop_sequences:
            options["stop"] = self.stop_sequences
        return options

    def structure(self) -> Structure | None:
        """The grammar that every token of the answer keeps to."""
        tools: Sequence[Json] = self.callable()
        choice = self.tool_choice
        if choice is not None and choice.type in ("any", "tool"):
            if choice.type == "tool" and choice.name is None:
                raise Refused(400, "invalid_request", "tool_choice is a tool without its name", param="tool_choice")
            return required_call(tools, choice.name if choice.type == "tool" else None)
        return call_or(None if self.form is None else Structure.json(self.form.schema_), tools)
