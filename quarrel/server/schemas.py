"""The bodies of requests, as data: types and ranges, from which the OpenAPI document is made too."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    WithJsonSchema,
)

from quarrel.engine import Sampling
from quarrel.llm import Structure
from quarrel.server.errors import Refused
from quarrel.server.tools import required_call

Number = StrictFloat
"""Whole numbers too; neither texts nor true and false."""
Text = Annotated[StrictStr, Field(max_length=4 << 20)]
Ids = Annotated[list[Annotated[StrictInt, Field(ge=0, lt=2**31)]], Field(min_length=1, max_length=1 << 20)]

TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]
Stop = Annotated[StrictStr, Field(min_length=1, max_length=256)]

Adapter = Annotated[StrictStr, Field(min_length=1, max_length=64)]
"""One of the model's LoRA adapters, by name."""


def _off_or_second(value: int) -> int:
    if value not in (0, 2):
        raise ValueError("0 or 2")
    return value


# Python holds False, 0.0 and 0 for equal, so a Literal would take them all.
Mirostat = Annotated[StrictInt, AfterValidator(_off_or_second), WithJsonSchema({"type": "integer", "enum": [0, 2]})]


class Body(BaseModel):
    """Keeps fields that it does not know, so that they can be reported."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    def unknown(self) -> list[str]:
        return sorted(self.model_extra or {})


class Samplers(Body):
    """What every way to generate takes. Ranges are those of `SamplingParams`; null is the model's default."""

    temperature: Annotated[Number, Field(ge=0, le=100)] | None = None
    top_k: Annotated[StrictInt, Field(ge=0, le=2**31 - 1)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    seed: Annotated[StrictInt, Field(ge=0, lt=2**64)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-100, le=100)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-100, le=100)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=100)] | None = None
    dry_multiplier: Annotated[Number, Field(ge=0, le=100)] | None = None
    dry_base: Annotated[Number, Field(ge=1, le=100)] | None = None
    dry_allowed_length: Annotated[StrictInt, Field(ge=1, lt=2**31)] | None = None
    xtc_probability: Annotated[Number, Field(ge=0, le=1)] | None = None
    xtc_threshold: Annotated[Number, Field(ge=0, le=1)] | None = None
    mirostat: Mirostat | None = None
    mirostat_tau: Annotated[Number, Field(gt=0, le=100)] | None = None
    mirostat_eta: Annotated[Number, Field(gt=0, le=1)] | None = None
    ignore_eos: StrictBool | None = None

    def sampling(self) -> Sampling:
        """The fields that were given, as keyword arguments of the engine."""
        fields = Samplers.model_fields
        return {name: getattr(self, name) for name in fields if getattr(self, name) is not None}  # type: ignore[return-value]


class StreamOptions(Body):
    include_usage: StrictBool = False


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class OpenAIBody(Samplers):
    model: StrictStr | None = None
    stream: StrictBool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[StrictInt, Field(ge=1, le=8)] | None = None
    logit_bias: Annotated[dict[TokenId, Annotated[Number, Field(ge=-100, le=100)]], Field(max_length=1024)] | None = None
    response_format: ResponseFormat | None = None
    user: StrictStr | None = None
    """Accepted for compatibility; nothing is done with it."""
    adapter: Adapter | None = None

    def sampling(self) -> Sampling:
        options = super().sampling()
        if self.n is not None:
            options["n"] = self.n
        if self.logit_bias:
            options["logit_bias"] = {int(id): bias for id, bias in self.logit_bias.items()}
        return options

    def structure(self) -> Structure | None:
        """The grammar that every token of the answer keeps to."""
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return Structure.json({"type": "object"})
        schema = (wanted.json_schema or {}).get("schema")
        if not isinstance(schema, dict):
            message = "response_format json_schema has no object json_schema.schema"
            raise Refused(400, "invalid_request", message, param="response_format")
        return Structure.json(schema)


class ChatMessage(Body):
    role: StrictStr
    content: StrictStr | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: StrictStr | None = None
    name: StrictStr | None = None

    def plain(self) -> dict[str, object]:
        """For the chat template: parts of text are joined, any other part is refused, and so is what says nothing."""
        if self.content is None and not self.tool_calls and self.role != "assistant":
            found = f"a message of role {self.role[:40]!r} has no content"
            raise Refused(400, "invalid_request", f"{found}, wanted a text or parts of text", param="messages")
        message: dict[str, object] = {"role": self.role, "content": self._text()}
        for name in ("tool_calls", "tool_call_id", "name"):
            if getattr(self, name) is not None:
                message[name] = getattr(self, name)
        return message

    def _text(self) -> str:
        if not isinstance(self.content, list):
            return self.content or ""
        texts = []
        for part in self.content:
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = str(part.get("type"))[:40]
                raise Refused(400, "unsupported", f"a message holds a part of type {kind!r}: only text is understood")
            texts.append(part["text"])
        return "".join(texts)


class NamedFunction(Body):
    name: StrictStr


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class ChatBody(OpenAIBody):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]
    max_tokens: Annotated[StrictInt, Field(ge=0, lt=2**31)] | None = None
    max_completion_tokens: Annotated[StrictInt, Field(ge=0, lt=2**31)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    """required: the answer is a call of one of the functions; or of the one that is named."""
    chat_template_kwargs: dict[str, StrictBool | StrictStr] | None = None

    def sampling(self) -> Sampling:
        options = super().sampling()
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        options["max_tokens"] = limit
        if self.top_logprobs is not None and not self.logprobs:
            raise Refused(400, "invalid_request", "top_logprobs is given without logprobs: true", param="top_logprobs")
        if self.logprobs:
            options["logprobs"] = self.top_logprobs or 0
        return options

    def structure(self) -> Structure | None:
        form, choice = super().structure(), self.tool_choice
        if choice in (None, "none", "auto"):
            return form
        return required_call(self.tools, choice.function.name if isinstance(choice, NamedTool) else None, form)


class CompletionBody(OpenAIBody):
    prompt: Text | Ids | Annotated[list[Text], Field(min_length=1, max_length=64)]
    max_tokens: Annotated[StrictInt, Field(ge=0, lt=2**31)] | None = 16
    logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    echo: StrictBool | None = False

    def sampling(self) -> Sampling:
        options = super().sampling()
        options["max_tokens"] = self.max_tokens
        if self.logprobs is not None:
            options["logprobs"] = self.logprobs
        return options

    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], str):
            return list(self.prompt)
        return [self.prompt]


class EmbeddingsBody(Body):
    model: StrictStr | None = None
    input: Text | Ids | Annotated[list[Text], Field(min_length=1, max_length=2048)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[StrictInt, Field(ge=1)] | None = None
    user: StrictStr | None = None


class GenerateBody(Samplers):
    """`/api/generate`, `/api/stream` and the WebSocket's inference message."""

    prompt: Annotated[Text, Field(min_length=1)]
    model: StrictStr | None = None
    max_tokens: Annotated[StrictInt, Field(ge=0, lt=2**31)] | None = 1024
    stream: StrictBool | None = None
    topk: Annotated[StrictInt, Field(ge=0, lt=2**31)] | None = None
    topp: Annotated[Number, Field(ge=0, le=1)] | None = None
    request_id: Annotated[StrictStr, Field(max_length=128)] | None = None
    system: Text | None = None
    messages: Annotated[list[ChatMessage], Field(max_length=4096)] | None = None
    """Earlier turns of a conversation, which `prompt` goes on; the prompt is then put to the model by its chat template."""
    chat: StrictBool = False
    """Put the prompt to the model by its chat template."""
    priority: Literal["high", "low"] = "high"
    adapter: Adapter | None = None

    def sampling(self) -> Sampling:
        options = super().sampling()
        options["max_tokens"] = self.max_tokens
        if self.topk is not None:
            options["top_k"] = self.topk
        if self.topp is not None:
            options["top_p"] = self.topp
        return options

    def turns(self) -> list[dict[str, object]] | None:
        """The conversation, or None for a plain text to go on."""
        if not (self.chat or self.messages or self.system):
            return None
        before: list[dict[str, object]] = [{"role": "system", "content": self.system}] if self.system else []
        return [*before, *(m.plain() for m in self.messages or []), {"role": "user", "content": self.prompt}]


class TokenizeBody(Body):
    model: StrictStr | None = None
    text: Text
    add_special: StrictBool = True


class DetokenizeBody(Body):
    model: StrictStr | None = None
    tokens: Annotated[list[Annotated[StrictInt, Field(ge=0, lt=2**31)]], Field(max_length=1 << 20)]
