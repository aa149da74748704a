"""The bodies of llama-server's protocol. Its numbers have no range there: what is off, or outside ours, is brought in."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr, ValidationError

from quarrel.engine import Sampling
from quarrel.llm import Structure
from quarrel.server.errors import Refused
from quarrel.server.fields import Body, Number, Text
from quarrel.server.llama.lora import Scale
from quarrel.server.reader import Reading
from quarrel.server.schemas import ChatBody as OpenAIChatBody
from quarrel.server.validation import first_fault

MOST_STOPS, MOST_PROBS = 16, 20
MARKER = "<__media__>"
TextOrIds = Text | Annotated[list[StrictInt | Text], Field(max_length=1 << 20)]
Int = Annotated[StrictInt, Field(ge=-(2**31), lt=2**31)]
_BRINGS: tuple[tuple[str, str, float, float], ...] = (
    ("temperature", "temperature", 0.0, 100.0),
    ("dynatemp_range", "dynatemp_range", 0.0, 100.0),
    ("dynatemp_exponent", "dynatemp_exponent", 0.0, 100.0),
    ("top_p", "top_p", 0.0, 1.0),
    ("min_p", "min_p", 0.0, 1.0),
    ("typical_p", "typical_p", 1e-6, 1.0),
    ("top_n_sigma", "top_n_sigma", 0.0, 100.0),
    ("repeat_penalty", "repetition_penalty", 1e-6, 100.0),
    ("presence_penalty", "presence_penalty", -100.0, 100.0),
    ("frequency_penalty", "frequency_penalty", -100.0, 100.0),
    ("dry_multiplier", "dry_multiplier", 0.0, 100.0),
    ("dry_base", "dry_base", 1.0, 100.0),
    ("xtc_probability", "xtc_probability", 0.0, 1.0),
    ("xtc_threshold", "xtc_threshold", 0.0, 1.0),
    ("mirostat_tau", "mirostat_tau", 1e-6, 100.0),
    ("mirostat_eta", "mirostat_eta", 1e-6, 1.0),
    ("adaptive_target", "adaptive_target", -1.0, 1.0),
    ("adaptive_decay", "adaptive_decay", 0.0, 0.99),
)
"""Real numbers: llama-server's name, ours, and our range."""
_WHOLE = (
    ("top_k", "top_k", 0),
    ("repeat_last_n", "penalty_last_n", -1),
    ("dry_allowed_length", "dry_allowed_length", 1),
    ("dry_penalty_last_n", "dry_last_n", -1),
)
"""Whole numbers, and the least of ours."""
_NAMES = (
    "penalties e; dry d; top_n_sigma top-n-sigma s; top_k top-k k; typical_p typ_p typical typ-p y; top_p top-p nucleus p;"
    "min_p min-p m; xtc x; temperature temp t; adaptive_p adaptive-p a"
)
SAMPLERS = {name: names[0] for names in map(str.split, _NAMES.split(";")) for name in names}
"""llama.cpp's names of samplers, and what they are called here."""


class Samplers(Body):
    """Its sampling parameters."""

    temperature: Number | None = None
    dynatemp_range: Number | None = None
    dynatemp_exponent: Number | None = None
    top_k: Int | None = None
    top_p: Number | None = None
    min_p: Number | None = None
    typical_p: Number | None = None
    top_n_sigma: Number | None = None
    repeat_penalty: Number | None = None
    repeat_last_n: Int | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    dry_multiplier: Number | None = None
    dry_base: Number | None = None
    dry_allowed_length: Int | None = None
    dry_penalty_last_n: Int | None = None
    dry_sequence_breakers: Annotated[list[StrictStr], Field(max_length=64)] | None = None
    xtc_probability: Number | None = None
    xtc_threshold: Number | None = None
    mirostat: Int | None = None
    mirostat_tau: Number | None = None
    mirostat_eta: Number | None = None
    adaptive_target: Number | None = None
    adaptive_decay: Number | None = None
    samplers: Annotated[list[StrictStr], Field(max_length=64)] | StrictStr | None = None
    seed: StrictInt | None = None
    ignore_eos: StrictBool | None = None
    logit_bias: dict[str, Any] | list[Any] | None = None
    n_predict: Int | None = None
    max_tokens: Int | None = None
    n_keep: Int | None = None
    """With context shift: how many tokens of the prompt stay."""
    stop: StrictStr | list[StrictStr] | None = None
    grammar: Text | None = None
    json_schema: dict[str, Any] | StrictBool | None = None
    cache_prompt: StrictBool | None = None
    id_slot: Int | None = None
    """Under which number the text is kept, modulo their count; below 0, and None, is any. A text's beginning is found
    wherever it was computed."""
    return_progress: StrictBool | None = None
    """Of a stream: events say how much of the prompt has been read; and each one what the request has cost so far."""
    timings_per_token: StrictBool | None = None
    preserved_tokens: list[StrictStr] | None = None
    """Control tokens whose names are kept in the text."""
    lora: Annotated[list[Scale], Field(max_length=64)] | None = None
    """Scales of adapters, by number, in place of the server's."""

    def shared(self) -> Sampling:
        """What chat and completions have in common, in the engine's words: what was given, and nothing else."""
        options: Any = {}
        if (limit := self.limit) is not None:
            options["max_tokens"] = limit if limit >= 0 else None
        for theirs, ours, low, high in _BRINGS:
            if (value := getattr(self, theirs)) is not None:
                options[ours] = min(max(float(value), low), high)
        for theirs, ours, least in _WHOLE:
            if (value := getattr(self, theirs)) is not None:
                options[ours] = max(value, least)
        if self.typical_p is not None and self.typical_p <= 0:
            options["typical_p"] = 1.0
        if self.repeat_penalty is not None and self.repeat_penalty <= 0:
            options["repetition_penalty"] = 1.0
        if self.mirostat is not None:
            options["mirostat"] = self.mirostat if self.mirostat in (1, 2) else 0
        if self.dry_sequence_breakers is not None:
            options["dry_sequence_breakers"] = [b for b in self.dry_sequence_breakers if b]
        if self.samplers is not None:
            options["samplers"] = tuple(SAMPLERS[name] for name in self.samplers if name in SAMPLERS)
        if self.seed is not None:
            options["seed"] = self.seed % 2**64 if self.seed >= 0 and self.seed != 2**32 - 1 else None
        if self.ignore_eos is not None:
            options["ignore_eos"] = self.ignore_eos
        if self.stop is not None:
            given = [self.stop] if isinstance(self.stop, str) else self.stop
            options["stop"] = [text for text in given if text][:MOST_STOPS]
        return options  # type: ignore[no-any-return]

    @property
    def limit(self) -> int | None:
        """Tokens to generate at most; below 0 there is none."""
        return self.n_predict if self.n_predict is not None else self.max_tokens

    def form(self) -> Structure | None:
        """The grammar that the text keeps to."""
        if self.grammar and self.json_schema is not None:
            message = 'Either "json_schema" or "grammar" can be specified, but not both'
            raise Refused(400, "invalid_request", message, param="grammar")
        if self.json_schema is not None:
            return Structure.json(self.json_schema)
        return Structure.gbnf(self.grammar) if self.grammar else None

    def unknown(self) -> list[str]:
        """What is not done as it was asked for, besides what is not understood."""
        more = []
        names = self.samplers or ()
        if any(name not in SAMPLERS for name in names):
            more.append("samplers")
        return sorted([*super().unknown(), *more])


class Multimodal(Body):
    prompt_string: Text
    multimodal_data: list[StrictStr] | None = None
    """In base64: one for each of the server's media markers in the text."""


class CompletionBody(Samplers):
    prompt: TextOrIds | Multimodal | Annotated[list[TextOrIds | Multimodal], Field(min_length=1, max_length=64)] = ""
    model: StrictStr | None = None
    stream: StrictBool | None = None
    n_probs: Int | None = None
    return_tokens: StrictBool | None = None
    response_fields: list[StrictStr] | None = None
    """All that is wanted of the answer, in paths such as generation_settings/seed."""

    def prompts(self, marker: str = MARKER) -> list[Any]:
        """Each a text, a list of ids and texts, or parts where there are images. marker: what stands for an image."""
        given = self.prompt
        if isinstance(given, list) and any(not isinstance(entry, int) for entry in given):
            nested = any(isinstance(entry, list | Multimodal) for entry in given)
            texts = all(isinstance(entry, str) for entry in given)
            if nested or texts:
                return [_plain(entry, marker) for entry in given]
        return [_plain(given, marker)]

    def unknown(self) -> list[str]:
        more = ["n_probs"] if (self.n_probs or 0) > MOST_PROBS else []
        return sorted([*super().unknown(), *more])


def _plain(given: Any, marker: str) -> Any:
    if not isinstance(given, Multimodal):
        return given
    texts, images = given.prompt_string.split(marker), given.multimodal_data
    if images is None or (len(texts) == 1 and not images):
        return given.prompt_string
    if len(texts) - 1 != len(images):
        found = f"Failed to tokenize prompt: {len(texts) - 1} media markers {marker} in prompt_string"
        raise Refused(400, "invalid_request", f"{found}, and {len(images)} entries of multimodal_data", param="prompt")
    pairs = zip(images, texts[1:], strict=True)
    return [_text(texts[0]), *(part for i, t in pairs for part in ({"type": "image", "data": i}, _text(t)))]


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def defaults_of(given: dict[str, Any]) -> Sampling:
    """Sampling parameters that no request has given, in the engine's words. Raises Refused."""
    try:
        return CompletionBody(**given).shared()
    except ValidationError as error:
        field, sentence = first_fault(error)
        raise Refused(400, "invalid_request", sentence, param=field) from None


class InfillBody(CompletionBody):
    input_prefix: Text = ""
    input_suffix: Text = ""
    input_extra: list[dict[str, Any]] | None = None


class TokenizeBody(Body):
    content: Text | Annotated[list[StrictInt | Text], Field(max_length=1 << 20)] = ""
    add_special: StrictBool | None = None
    parse_special: StrictBool | None = None
    with_pieces: StrictBool | None = None
    model: StrictStr | None = None


class DetokenizeBody(Body):
    tokens: Annotated[list[Annotated[StrictInt, Field(ge=0, lt=2**31)]], Field(max_length=1 << 20)]
    model: StrictStr | None = None


_OURS = ("n", "repetition_penalty", "penalty_last_n", "dry_last_n", "min_tokens", "stop_token_ids")
"""What chat understands besides, in our words."""


class ChatBody(Samplers, OpenAIChatBody):  # type: ignore[misc]
    """OpenAI's, with llama-server's sampling parameters."""

    verbose: StrictBool | None = None
    reasoning_format: StrictStr | None = None
    """none: thoughts stay in the text, between their tags."""

    def variables(self) -> dict[str, Any]:
        """A conversation that ends with the assistant's words goes on from them."""
        roles = [m.role for m in self.messages[-2:]]
        if roles == ["assistant", "assistant"]:
            text = "Cannot have 2 or more assistant messages at the end of the list."
            raise Refused(400, "invalid_request", text, param="messages")
        begun = len(self.messages) > 1 and roles[-1] == "assistant" and self.messages[-1].tool_calls is None
        plain = self.continue_final_message is None and self.add_generation_prompt is None
        return {**({"continue_final_message": True} if begun and plain else {}), **super().variables()}

    def sampling(self) -> Sampling:
        ours: Any = {name: value for name in _OURS if (value := getattr(self, name)) is not None}
        options: Any = {**ours, **self.shared()}
        if self.logprobs:
            options["logprobs"] = min(self.top_logprobs or 0, MOST_PROBS)
        return options  # type: ignore[no-any-return]

    @property
    def limit(self) -> int | None:
        if self.n_predict is None and self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return super().limit

    def reading(self) -> Reading:
        shown = tuple(self.preserved_tokens or ())
        return replace(super().reading(), shown=shown, thoughts=self.reasoning_format != "none")

    def form(self) -> Structure | None:
        return super().form() or OpenAIChatBody.form(self)


class TextPart(Body):
    type: Literal["text"]
    text: Text


class Words(Body):
    """A text as an object."""

    prompt_string: Text | None = None
    content: Annotated[list[TextPart], Field(max_length=4096)] | None = None

    def text(self) -> str:
        if "multimodal_data" in (self.model_extra or {}):
            raise Refused(400, "unsupported", "vectors are made of texts alone: leave multimodal_data out", param="input")
        if self.prompt_string is None and self.content is None:
            raise Refused(400, "invalid_request", 'an entry of the input has neither "prompt_string" nor "content"')
        return "".join(part.text for part in self.content or ()) if self.prompt_string is None else self.prompt_string


Entry = TextOrIds | Words
Entries = Entry | Annotated[list[Entry], Field(min_length=1, max_length=2048)]


class EmbeddingBody(Body):
    content: Entries | None = None
    input: Entries | None = None
    model: StrictStr | None = None
    embd_normalize: Int | None = None
    """-1: vectors as the model makes them; all else: of length 1."""
    encoding_format: StrictStr | None = None
    dimensions: Annotated[StrictInt, Field(ge=1)] | None = None
