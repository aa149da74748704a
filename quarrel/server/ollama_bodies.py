"""The bodies of Ollama's requests."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, StrictInt, StrictStr

from quarrel.engine import Sampling
from quarrel.llm import Structure
from quarrel.server.errors import Refused
from quarrel.server.fields import Body, Ids, Number, Text
from quarrel.server.messages import ChatMessage
from quarrel.server.schemas import Samplers

Off = Annotated[Number, Field(ge=0, le=1), AfterValidator(lambda value: value or None)]
"""Of a cut that 0 turns off."""
_UNITS = {"": 1.0, "ns": 1e-9, "us": 1e-6, "\u00b5s": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
# A unit ends each part, so that there is one way to read digits: with several, no match would take for ever to find.
_DURATION = re.compile(r"[+-]?(\d+(\.\d+)?|(\d+(\.\d+)?(ns|us|\u00b5s|ms|s|m|h)){1,8})", re.ASCII)


def _seconds(given: object) -> object:
    """A duration in Go's words, or seconds."""
    if not isinstance(given, str):
        if isinstance(given, bool):
            raise ValueError("seconds or a duration such as 5m")
        return given
    if not _DURATION.fullmatch(given):
        raise ValueError("seconds or a duration such as 5m")
    parts = re.findall(r"([\d.]+)(ns|us|\u00b5s|ms|s|m|h)?", given)
    return (-1 if given.startswith("-") else 1) * sum(float(n) * _UNITS[unit] for n, unit in parts)


class Options(Samplers):
    """Sampling parameters in Ollama's words. What a load fixes (`num_ctx`, `num_gpu`) is reported as not understood."""

    typical_p: Off | None = None
    num_predict: Annotated[StrictInt, Field(ge=-2)] | None = None
    repeat_penalty: Annotated[Number, Field(gt=0, le=100)] | None = None
    repeat_last_n: Annotated[StrictInt, Field(ge=-1)] | None = None

    def sampling(self) -> Sampling:
        options: Any = dict(super().sampling())
        if self.num_predict is not None:
            options["max_tokens"] = None if self.num_predict < 0 else self.num_predict
        if self.repeat_penalty is not None:
            options["repetition_penalty"] = self.repeat_penalty
        if self.repeat_last_n is not None:
            options["penalty_last_n"] = self.repeat_last_n
        return options  # type: ignore[no-any-return]


class NamedBody(Body):
    """`name` is what older clients send."""

    model: StrictStr = ""
    name: StrictStr = ""

    def named(self) -> str:
        """Raises `Refused` where no model is named."""
        if not (self.model or self.name):
            raise Refused(400, "invalid_request", "model is required", param="model")
        return self.model or self.name


class KeptBody(NamedBody):
    """keep_alive: the seconds that the model stays in memory behind the request; below 0, and None, is for ever."""

    keep_alive: Annotated[float, BeforeValidator(_seconds)] | None = None


class GeneratingBody(KeptBody):
    stream: StrictBool = True
    options: Options = Options()
    format: StrictStr | dict[str, Any] | None = None
    think: StrictBool | Literal["high", "medium", "low"] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    shift: StrictBool | None = None
    """Where it is given: what is longer than the context is shortened, and an answer goes on past it."""

    def sampling(self) -> Any:
        options = {"max_tokens": None, **self.options.sampling()}
        if self.shift:
            options["overflow"] = "shift"
        if self.top_logprobs is not None and not self.logprobs:
            raise Refused(400, "invalid_request", "top_logprobs is given without logprobs: true", param="top_logprobs")
        return {**options, "logprobs": self.top_logprobs or 0} if self.logprobs else options

    def structure(self) -> Structure | None:
        """The grammar of the answer."""
        if not self.format:
            return None
        if isinstance(self.format, str) and self.format != "json":
            raise Refused(
                400, "invalid_request", f"format is {self.format[:40]!r}, wanted json or a schema", param="format"
            )
        return Structure.json({"type": "object"} if isinstance(self.format, str) else self.format)


class OllamaGenerate(GeneratingBody):
    prompt: Text = ""
    """Nothing only loads the model, or unloads it."""
    system: Text | None = None
    raw: StrictBool = False
    context: Ids | Annotated[list[StrictInt], Field(max_length=0)] | None = None
    """The ids of what was said before, as an earlier answer ended with them; many clients begin with none."""
    template: Text | None = None
    suffix: Text | None = None
    images: list[Any] | None = None

    def unknown(self) -> list[str]:
        return sorted([*super().unknown(), *(["template"] if self.template else [])])


class OllamaChat(GeneratingBody):
    messages: list[ChatMessage] = Field(default_factory=list, max_length=4096)
    """None only load the model, or unload it."""
    tools: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None


class OllamaEmbed(KeptBody):
    input: Text | Annotated[list[Text], Field(max_length=2048)] = Field(default_factory=list)
    dimensions: Annotated[StrictInt, Field(ge=1)] | None = None
    truncate: StrictBool = True
    """Whether the end of a text is left out that does not fit."""
    options: Options = Options()


class OllamaEmbedding(KeptBody):
    """As clients older than /api/embed send it."""

    prompt: Text = ""
    options: Options = Options()


class OllamaShow(NamedBody):
    verbose: StrictBool = False
    """With the vocabulary and other lists."""


class OllamaCopy(Body):
    source: StrictStr
    destination: StrictStr


class OllamaCreate(NamedBody):
    """The fields of a Modelfile."""

    from_: Annotated[StrictStr, Field(alias="from")] = ""
    files: dict[StrictStr, StrictStr] = Field(default_factory=dict)
    """Names of GGUF files and their digests, instead of `from`."""
    adapters: dict[StrictStr, StrictStr] = Field(default_factory=dict)
    system: Text | None = None
    template: Text | None = None
    parameters: dict[StrictStr, Any] = Field(default_factory=dict)
    messages: Annotated[list[ChatMessage], Field(max_length=4096)] = Field(default_factory=list)
    license: Text | list[Text] = ""
    quantize: StrictStr = ""
    stream: StrictBool = True


class OllamaPull(NamedBody):
    stream: StrictBool = True
    insecure: StrictBool = False
