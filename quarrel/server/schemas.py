"""The bodies of requests, as data: types and ranges, from which the OpenAPI document is made too."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StrictBool, StrictInt, StrictStr

from quarrel.engine import Sampling
from quarrel.llm import Structure
from quarrel.server.errors import Refused
from quarrel.server.fields import Adapter, Body, Input, Mirostat, Number, Stop, Text, TokenId
from quarrel.server.messages import ChatMessage
from quarrel.server.reader import Reading
from quarrel.server.tools import call_or, required_call

Seed = Annotated[
    StrictInt, Field(ge=-(2**63), lt=2**64), AfterValidator(lambda seed: None if seed == -1 else seed & (2**64 - 1))
]
"""-1 draws one, as in llama-server and Ollama; other negative ones are seeds too, as in OpenAI's API."""

TopK = Annotated[StrictInt, Field(ge=-1, le=2**31 - 1), AfterValidator(lambda k: max(k, 0))]
"""-1 is no cut too, as in vLLM, llama-server and Ollama."""


Budget = Annotated[StrictInt, Field(ge=0, lt=2**31)]
LastTokens = Annotated[StrictInt, Field(ge=-1, lt=2**31)]
THEIRS = {"repeat_penalty": "repetition_penalty", "repeat_last_n": "penalty_last_n", "dry_penalty_last_n": "dry_last_n"}
_GUIDED = ("json", "regex", "choice", "grammar", "whitespace_pattern")


class Samplers(Body):
    """What every way to generate takes. Ranges are those of `SamplingParams`; null is the model's default."""

    temperature: Annotated[Number, Field(ge=0, le=100)] | None = None
    top_k: TopK | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    seed: Seed | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-100, le=100)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-100, le=100)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=100)] | None = None
    dry_multiplier: Annotated[Number, Field(ge=0, le=100)] | None = None
    dry_base: Annotated[Number, Field(ge=1, le=100)] | None = None
    dry_allowed_length: Annotated[StrictInt, Field(ge=1, lt=2**31)] | None = None
    xtc_probability: Annotated[Number, Field(ge=0, le=1)] | None = None
    xtc_threshold: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_n_sigma: Annotated[Number, Field(ge=0, le=100)] | None = None
    dynatemp_range: Annotated[Number, Field(ge=0, le=100)] | None = None
    dynatemp_exponent: Annotated[Number, Field(ge=0, le=100)] | None = None
    adaptive_target: Annotated[Number, Field(ge=-1, le=1)] | None = None
    adaptive_decay: Annotated[Number, Field(ge=0, le=0.99)] | None = None
    samplers: Annotated[list[StrictStr], Field(max_length=20)] | None = None
    mirostat: Mirostat | None = None
    mirostat_tau: Annotated[Number, Field(gt=0, le=100)] | None = None
    mirostat_eta: Annotated[Number, Field(gt=0, le=1)] | None = None
    ignore_eos: StrictBool | None = None
    penalty_last_n: LastTokens | None = None
    dry_last_n: LastTokens | None = None
    dry_sequence_breakers: Annotated[list[StrictStr], Field(max_length=64)] | None = None
    repeat_penalty: Annotated[Number, Field(gt=0, le=100)] | None = None
    """llama.cpp's words for three of them, as the next two are."""
    repeat_last_n: LastTokens | None = None
    dry_penalty_last_n: LastTokens | None = None

    def sampling(self) -> Sampling:
        """The fields that were given, as keyword arguments of the engine."""
        given = {name: value for name in Samplers.model_fields if (value := getattr(self, name)) is not None}
        for theirs, ours in THEIRS.items():
            if theirs in given:
                given.setdefault(ours, given.pop(theirs))
        return given  # type: ignore[return-value]


class StreamOptions(Body):
    include_usage: StrictBool = False


class NamedSchema(Body):
    """`name`, `description` and `strict` say nothing here: every schema is kept to."""

    name: StrictStr | None = None
    description: StrictStr | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: StrictBool | None = None


class ResponseFormat(Body):
    """The schema stands in `json_schema`, as OpenAI has it, or in `schema`, as llama-server has it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None

    def structure(self) -> Structure | None:
        """The grammar that every token of the answer keeps to."""
        named = None if self.json_schema is None else self.json_schema.schema_
        given = [s for s in (self.schema_, named) if s is not None]
        wrong = ""
        if len(given) > 1:
            wrong = "response_format has two schemas: leave one of them out"
        elif self.type == "text" and given:
            wrong = "response_format is text and has a schema, wanted the type json_schema"
        elif self.type == "json_schema" and not given:
            wrong = "response_format json_schema has no object json_schema.schema"
        if wrong:
            raise Refused(400, "invalid_request", wrong, param="response_format")
        if self.type == "text":
            return None
        return Structure.json(given[0] if given else {"type": "object"})


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StructuredOutputs(Body):
    """vLLM's: one form that the answer keeps to. A grammar is GBNF, or Lark where it has no `::=`."""

    json_: Annotated[dict[str, Any] | StrictStr | None, Field(alias="json")] = None
    json_object: StrictBool | None = None
    whitespace_pattern: Text | None = None
    """Between the parts of the JSON, in place of some spaces."""
    regex: Text | None = None
    choice: Annotated[list[Text], Field(min_length=1, max_length=256)] | None = None
    grammar: Text | None = None

    def structures(self) -> list[Structure]:
        """Those that are given."""
        made = [] if self.json_ is None else [self._spaced(self.json_)]
        made += [self._spaced({"type": "object"})] if self.json_object else []
        made += [] if self.regex is None else [Structure.regex(self.regex)]
        made += [] if self.choice is None else [Structure.lark("start: " + " | ".join(map(json.dumps, self.choice)))]
        if self.grammar is not None:
            made.append(Structure.gbnf(self.grammar) if "::=" in self.grammar else Structure.lark(self.grammar))
        return made

    def _spaced(self, schema: dict[str, Any] | str) -> Structure:
        if self.whitespace_pattern is None:
            return Structure.json(schema)
        try:
            read = json.loads(schema) if isinstance(schema, str) else schema
        except (ValueError, RecursionError):
            read = schema
        guidance = {"whitespace_pattern": self.whitespace_pattern}
        return Structure.json({**read, "x-guidance": guidance} if isinstance(read, dict) else schema)


class OpenAIBody(Samplers):
    model: StrictStr | None = None
    stream: StrictBool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[StrictInt, Field(ge=1, le=8)] | None = None
    logit_bias: Annotated[dict[TokenId, Annotated[Number, Field(ge=-100, le=100)]], Field(max_length=1024)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | StrictStr | None = None
    guided_regex: Text | None = None
    guided_choice: Annotated[list[Text], Field(min_length=1, max_length=256)] | None = None
    guided_grammar: Text | None = None
    """vLLM's older words for the same."""
    guided_whitespace_pattern: Text | None = None
    guided_decoding_backend: StrictStr | None = None
    """Accepted: here there is one."""
    grammar: Text | None = None
    """GBNF, as llama-server has it."""
    min_tokens: Annotated[StrictInt, Field(ge=0, lt=2**31)] | None = None
    stop_token_ids: Annotated[list[Annotated[StrictInt, Field(ge=0, lt=2**31)]], Field(max_length=64)] | None = None
    user: StrictStr | None = None
    """Accepted for compatibility; nothing is done with it."""
    adapter: Adapter | None = None
    overflow: Literal["stop", "shift", "summary"] | None = None
    """Where the context is too short for the prompt and its answer: stop, the default, refuses a prompt that does not fit
    at all; shift leaves out the oldest turns, and lets an answer go on past the context; summary, of messages, has the
    model sum them up. The answer's field `overflow` says how many messages it was (tokens, of a plain prompt), and how many
    tokens an answer left out to go on (`shifted`)."""

    def sampling(self) -> Sampling:
        options = super().sampling()
        for name in ("n", "min_tokens", "stop_token_ids"):
            if (value := getattr(self, name)) is not None:
                options[name] = value
        if self.logit_bias:
            options["logit_bias"] = {int(id): bias for id, bias in self.logit_bias.items()}
        return options

    def fitting(self) -> dict[str, str]:
        """`overflow` as an argument of the model's calls."""
        return {} if self.overflow is None else {"overflow": self.overflow}

    def structure(self) -> Structure | None:
        """The grammar that every token of the answer keeps to."""
        return self.form()

    def form(self) -> Structure | None:
        """What the text of the answer keeps to, in whichever protocol's words."""
        made = [None if self.response_format is None else self.response_format.structure()]
        made += [] if self.structured_outputs is None else self.structured_outputs.structures()
        older = {name: getattr(self, f"guided_{name}") for name in _GUIDED}
        made += StructuredOutputs.model_validate(older).structures()
        made += [Structure.gbnf(self.grammar)] if self.grammar else []
        given = [structure for structure in made if structure is not None]
        if len(given) > 1:
            text = (
                "several forms of the answer are given (response_format, structured_outputs, guided_*, grammar): leave one"
            )
            raise Refused(400, "invalid_request", text, param="response_format")
        return given[0] if given else None


class NamedFunction(Body):
    name: StrictStr


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class AllowedFunctions(Body):
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class AllowedTools(Body):
    """Of the tools, those that may be called; mode: whether one has to be."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


class ChatBody(OpenAIBody):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]
    max_tokens: Annotated[StrictInt, Field(ge=0, lt=2**31)] | None = None
    max_completion_tokens: Annotated[StrictInt, Field(ge=0, lt=2**31)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    """required: the answer is a call of one of the functions; or of the one that is named."""
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: Budget | None = None
    """Tokens that a thought may have, as vLLM calls it; and as llama-server does, where below 0 is no limit."""
    thinking_budget_tokens: Annotated[StrictInt, Field(ge=-1, lt=2**31)] | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = None
    """The last message, which is the assistant's, begins the answer."""
    reasoning_effort: ReasoningEffort | None = None
    """How much to think, for templates that know it; none: not at all."""
    modalities: list[Literal["text"]] | None = None
    """What the answer may be: no model here speaks."""

    def sampling(self) -> Sampling:
        options = super().sampling()
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        options["max_tokens"] = limit
        if self.top_logprobs is not None and not self.logprobs:
            raise Refused(400, "invalid_request", "top_logprobs is given without logprobs: true", param="top_logprobs")
        if self.logprobs:
            options["logprobs"] = self.top_logprobs or 0
        return options

    @property
    def thinking_budget(self) -> int | None:
        """Tokens that a thought may have."""
        theirs = self.thinking_budget_tokens
        return self.thinking_token_budget if theirs is None or theirs < 0 else theirs

    def variables(self) -> dict[str, Any]:
        """Those that the template has beside messages and tools."""
        if self.continue_final_message and self.add_generation_prompt:
            text = "add_generation_prompt and continue_final_message are both true: wanted one of them at most"
            raise Refused(400, "invalid_request", text, param="continue_final_message")
        given = self.chat_template_kwargs or {}
        return {**given, "continue_final_message": True} if self.continue_final_message else given

    def structure(self) -> Structure | None:
        form = self.form()
        if not self.forced:
            return call_or(form, self.callable())
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        return required_call(self.callable(), named)

    @property
    def forced(self) -> bool:
        """Whether the answer has to be a call."""
        choice = self.tool_choice
        required = isinstance(choice, AllowedTools) and choice.allowed_tools.mode == "required"
        return required or choice == "required" or isinstance(choice, NamedTool)

    def reading(self) -> Reading:
        """How the answer is read."""
        return Reading(self.callable(), forced=self.forced, shaped=self.forced or self.form() is not None)

    def callable(self) -> list[dict[str, Any]] | None:
        """The tools that the model may call."""
        if self.tool_choice == "none" or not isinstance(self.tool_choice, AllowedTools):
            return None if self.tool_choice == "none" else self.tools
        names = [tool.function.name for tool in self.tool_choice.allowed_tools.tools]
        return [t for t in self.tools or [] if isinstance(f := t.get("function"), dict) and f.get("name") in names]


class CompletionBody(OpenAIBody):
    prompt: Input | Annotated[list[Input], Field(min_length=1, max_length=64)]
    max_tokens: Annotated[StrictInt, Field(ge=0, lt=2**31)] | None = 16
    logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    echo: StrictBool | None = False

    def sampling(self) -> Sampling:
        options = super().sampling()
        options["max_tokens"] = self.max_tokens
        if self.logprobs is not None:
            options["logprobs"] = self.logprobs
        return options


class EmbeddingsBody(Body):
    model: StrictStr | None = None
    input: Input | Annotated[list[Input], Field(min_length=1, max_length=2048)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[StrictInt, Field(ge=1)] | None = None
    user: StrictStr | None = None


class GenerateBody(Samplers):
    """`/api/generate`, `/api/stream` and the WebSocket's inference message."""

    prompt: Annotated[Text, Field(min_length=1)]
    model: StrictStr | None = None
    max_tokens: Annotated[StrictInt, Field(ge=0, lt=2**31)] | None = 1024
    stream: StrictBool | None = None
    topk: TopK | None = None
    topp: Annotated[Number, Field(ge=0, le=1)] | None = None
    request_id: Annotated[StrictStr, Field(max_length=128)] | None = None
    system: Text | None = None
    messages: Annotated[list[ChatMessage], Field(max_length=4096)] | None = None
    """Earlier turns of a conversation, which `prompt` goes on; the prompt is then put to the model by its chat template."""
    chat: StrictBool = False
    """Put the prompt to the model by its chat template."""
    reasoning_effort: ReasoningEffort | None = None
    """Of conversations: how much to think, for templates that know it; none: not at all."""
    thinking_token_budget: Budget | None = None
    """Tokens that a thought may have."""
    priority: Literal["high", "low"] = "high"
    adapter: Adapter | None = None
    overflow: Literal["stop", "shift"] | None = None
    """As in OpenAI's routes; how many messages or tokens were left out is said by `dropped` at the end."""

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
