"""What a user wants of a model, and what the engine runs of it: a text, ids or messages, checked and tokenized."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, get_args

from quarrel.engine import MakeGuide, Request, Sampling, SamplingParams, Service, merged, token_id
from quarrel.engine.images import Sight
from quarrel.engine.prefix import common_prefix
from quarrel.engine.service import DEFAULT_SERVICE
from quarrel.errors import ContextOverflow, RequestError, TokenizerError, UnsupportedModel
from quarrel.llm.adapters import adapter_index
from quarrel.llm.image_parts import IdsWithImages, check_media, has_images
from quarrel.llm.loaded import Loaded
from quarrel.llm.overflow import SINKS, Overflow, head_of, limit, shift_ids, shift_messages
from quarrel.llm.structured import Grammars, Structure
from quarrel.llm.texts import VocabularyTexts
from quarrel.llm.thinking import thinking_guide
from quarrel.models import EncoderSpec

if TYPE_CHECKING:
    from quarrel.llm.images import Decoded, Eyes

Message = Mapping[str, object]
Prompt = str | Sequence[int] | Sequence[Message]
"""A text, ids, or parts of a message's content, texts and images."""
JSON: Mapping[str, Any] = {"json": True}
"""Of a field: its value travels to a model's process as it is."""


class RequestKeywords(Sampling, total=False):
    """Keyword arguments of every call that generates: the fields of `SamplingParams`, and these.

    service: priority, deadlines, cache salt, drafts. structure: a JSON schema, regular expression or grammar that the text
    keeps to. adapter: the name of one of the model's adapters. prompt_logprobs: `logprobs` of the prompt's tokens, too.
    names: control tokens that the answer shows by their names; those that the vocabulary lacks are passed over.
    overflow: what becomes of a prompt that leaves too little room in the context for an answer: "stop", the default,
    refuses it if it does not fit at all; "shift" leaves out the oldest turns, or of a plain prompt without images what lies
    behind its first few tokens; "summary", of messages, has the model sum them up. With "shift" an answer also goes on
    where the context is full, up to `max_tokens` or as many as the context holds, without the older half of what is not the
    system message or, of a plain prompt, its first few tokens (`Result.shifted`). keep: the same whatever `overflow` says,
    with so many first tokens in their place, -1 is the prompt; without `max_tokens` it then has no end. thinking_budget:
    tokens that a thought may have before its end is drawn for it; a structure leaves no thoughts.
    """

    service: Service
    structure: Structure | None
    adapter: str | None
    prompt_logprobs: bool
    overflow: Overflow
    keep: int | None
    thinking_budget: int | None
    names: Sequence[str]


class PromptKeywords(RequestKeywords, total=False):
    """Of calls that continue a prompt. parse_special: names of control tokens in the text become those tokens."""

    parse_special: bool


class ChatKeywords(RequestKeywords, total=False):
    """Of calls that answer messages. tools: JSON schemas of functions, for templates that know them. template: a named or
    literal template in place of the file's. template_kwargs: further variables of it."""

    tools: Sequence[Mapping[str, object]] | None
    template: str | None
    template_kwargs: Mapping[str, object] | None


class PrepareKeywords(PromptKeywords, ChatKeywords, total=False):
    """Of `prepare`, which takes a prompt or messages."""


@dataclass(frozen=True)
class GenerateRequest:
    """A prompt to continue or messages to answer, and how: the same for every call, in this process or in the model's own.

    Raises RequestError for a value of another type; what depends on the model is checked by its `Preparer`.
    """

    params: SamplingParams
    prompt: Prompt | None = field(default=None, metadata=JSON)
    messages: Sequence[Message] | None = field(default=None, metadata=JSON)
    service: Service = DEFAULT_SERVICE
    structure: Structure | None = None
    adapter: str | None = None
    prompt_logprobs: bool = False
    overflow: Overflow = "stop"
    keep: int | None = None
    """An answer goes on where its context is full, with so many of its first tokens, -1 is the whole prompt, and the newer
    half of the others. None: it ends there, unless `overflow` is "shift"."""
    thinking_budget: int | None = None
    names: Sequence[str] = field(default=(), metadata=JSON)
    parse_special: bool = False
    tools: Sequence[Mapping[str, object]] | None = field(default=None, metadata=JSON)
    template: str | None = None
    template_kwargs: Mapping[str, object] | None = field(default=None, metadata=JSON)

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("a request has either a prompt or messages")
        if not isinstance(self.service, Service):
            raise RequestError(f"service is a {type(self.service).__name__}, wanted a Service")
        if self.structure is not None and not isinstance(self.structure, Structure):
            raise RequestError(f"structure is a {type(self.structure).__name__}, wanted a Structure")
        if self.overflow not in get_args(Overflow):
            wanted = ", ".join(get_args(Overflow))
            raise RequestError(f"overflow is {str(self.overflow)[:40]!r}, wanted one of {wanted}", "overflow")
        if self.keep is not None and (isinstance(self.keep, bool) or not isinstance(self.keep, int) or self.keep < -1):
            raise RequestError(
                f"keep is {self.keep!r}, wanted a count of tokens, -1 for all of the prompt, or None", "keep"
            )
        budget = self.thinking_budget
        if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 0):
            raise RequestError(f"thinking_budget is {budget!r}, wanted a count of tokens, or None", "thinking_budget")
        if self.overflow == "summary" and self.messages is None:
            raise RequestError("overflow is 'summary', which sums up messages, and this is a plain prompt", "overflow")
        if self.prompt_logprobs and self.params.logprobs is None:
            raise RequestError("prompt_logprobs is given without logprobs, wanted 0 or more alternatives", "logprobs")

    @classmethod
    def of(
        cls,
        kind: type[RequestKeywords],
        keywords: Mapping[str, Any],
        params: SamplingParams | None,
        defaults: SamplingParams,
        *,
        prompt: Prompt | None = None,
        messages: Sequence[Message] | None = None,
    ) -> GenerateRequest:
        """From the arguments of a call, whose keywords are of this kind and replace fields of `params` or the defaults."""
        if params is not None and not isinstance(params, SamplingParams):
            raise RequestError(f"params is a {type(params).__name__}, wanted a SamplingParams")
        own = kind.__annotations__.keys() - Sampling.__annotations__.keys()
        sampling: Any = {name: value for name, value in keywords.items() if name not in own}
        rest = {name: value for name, value in keywords.items() if name in own}
        return cls(merged(params or defaults, sampling), prompt, messages, **rest)


class Preparer:
    """Checks and tokenizes the requests of one model."""

    def __init__(self, model: Loaded) -> None:
        self._tokenizer, self._spec, self._n_ctx = model.tokenizer, model.spec, model.explanation.n_ctx
        self._eyes, self._sight = model.eyes, model.sight
        self._adapters, self._load_seconds = model.adapters, model.load_seconds
        self._drafts = model.explanation.draft is not None
        self._guesses = model.loop.engine is None or model.loop.engine.cache.rules.drafts
        self._grammars = Grammars(model.tokenizer, model.spec.n_vocab)
        self._template_checked = False

    def check_generates(self) -> None:
        """Raises UnsupportedModel for an encoder."""
        if isinstance(self._spec, EncoderSpec):
            raise UnsupportedModel(
                f"a {self._spec.architecture} model is an encoder, which continues no text: use its `embed`, or load a"
                " language model"
            )

    def prepare(self, request: GenerateRequest, system: str | None = None) -> Request:
        """What the engine runs. system: a system message for conversations without one."""
        self.check_generates()
        request.params.check_vocabulary(self._spec.n_vocab)
        ids, dropped = self._fitting_ids(request, system)
        params, service, structure = request.params, request.service, request.structure
        if structure is not None and params.ignore_eos:
            message = "ignore_eos and a structure exclude each other: the structure says where the text may end"
            raise RequestError(message, "ignore_eos")
        if not self._guesses:
            service = replace(service, speculate=0)  # a state cannot be rolled back to before a wrong token
        self._check_length(len(ids))
        sight = None
        if isinstance(ids, IdsWithImages) and self._sight is not None:
            sight = Sight(ids.images, ids, self._sight)
        keep = None if sight is not None else self._kept(request, ids, system)
        if keep is not None and request.keep is None and params.max_tokens is None:
            params = replace(params, max_tokens=self._n_ctx)  # a model that finds no end would not end
        stop_ids = frozenset() if params.ignore_eos else self._tokenizer.stop_ids
        known = (self._tokenizer.token_id(name) for name in request.names)
        names = frozenset(id for id in known if id is not None)
        return Request(
            tokens=tuple(ids),
            params=params,
            seed=secrets.randbits(32) if params.seed is None else params.seed,
            stop_ids=stop_ids | frozenset(params.stop_token_ids),
            n_ctx=self._n_ctx,
            n_vocab=self._spec.n_vocab,
            texts=VocabularyTexts(self._tokenizer, continues=request.messages is None, names=names),
            load_seconds=self._load_seconds,
            service=service,
            guide=self._guide(request, ids),
            drafts=self._drafts,
            adapter=adapter_index(self._adapters, request.adapter),
            prompt_logprobs=request.prompt_logprobs,
            dropped=dropped,
            sight=sight,
            keep=keep,
        )

    def _guide(self, request: GenerateRequest, ids: Sequence[int]) -> MakeGuide | None:
        if request.structure is not None:
            return self._grammars.compile(request.structure)
        if request.thinking_budget is None:
            return None
        return thinking_guide(self._tokenizer, self._spec.n_vocab, ids, request.thinking_budget)

    def checked(self, ids: object) -> list[int]:
        """Token ids that the model can read at once."""
        checked = self._ids(ids)
        self._check_length(len(checked))
        return checked

    def _prompt_ids(self, request: GenerateRequest) -> Sequence[int]:
        if isinstance(request.prompt, str):
            return self._tokenizer.encode(request.prompt, parse_special=request.parse_special)
        if has_images([{"content": request.prompt}]):
            return self._seeing("prompt").prompt_ids(request.prompt or (), self._tokenizer, request.parse_special)
        return self._ids(request.prompt)

    def _seeing(self, field: str) -> Eyes:
        if self._eyes is None:
            message = f"the {field} hold{'s' * (field == 'prompt')} images, and the model was loaded without a projector:"
            raise UnsupportedModel(f"{message} give its mmproj-*.gguf as mmproj, or put it beside the model", field)
        return self._eyes

    def _fitting_ids(self, request: GenerateRequest, system: str | None) -> tuple[Sequence[int], int]:
        """The prompt, and how many messages or tokens were left out of it."""
        most = limit(self._n_ctx, request.params.max_tokens)
        if request.messages is None:
            ids = self._prompt_ids(request)
            shifts = request.overflow == "shift" and not isinstance(ids, IdsWithImages)
            return shift_ids(ids, most) if shifts else (ids, 0)
        decoded: Decoded = {}
        if request.overflow == "stop" or not isinstance(request.messages, list | tuple):
            return self._chat_ids(request, request.messages, system, decoded), 0
        return shift_messages(request.messages, lambda found: self._chat_ids(request, found, system, decoded), most)

    def _kept(self, request: GenerateRequest, ids: Sequence[int], system: str | None) -> int | None:
        """How many first tokens stay where the context is full while it is answered; None where it ends there."""
        if request.keep is not None:
            return len(ids) if request.keep < 0 else request.keep
        if request.overflow != "shift":
            return None
        if request.messages is None:
            return SINKS
        # The system messages: what the prompt has in common with one that says nothing else.
        bare = [*request.messages[: head_of(request.messages)], {"role": "user", "content": ""}]
        try:
            return max(SINKS, common_prefix(ids, self._chat_ids(request, bare, system, {})))
        except TokenizerError:
            return SINKS

    def _chat_ids(
        self, request: GenerateRequest, messages: Sequence[Message], system: str | None, decoded: Decoded
    ) -> Sequence[int]:
        if system is not None and _lacks_system(messages):
            messages = [{"role": "system", "content": system}, *messages]
        if request.template is None and not self._template_checked:
            self._template_checked = True
            # For its warning; what is wrong with these messages is an error below.
            with suppress(TokenizerError):
                self._tokenizer.check_chat_template()
        options: Any = {"tools": request.tools, "template": request.template, "kwargs": request.template_kwargs}
        check_media(messages)
        if not has_images(messages):
            return self._tokenizer.apply_chat(messages, **options)
        return self._seeing("messages").ids(messages, self._tokenizer, decoded, **options)

    def _ids(self, ids: object) -> list[int]:
        # A collection, so that its length is known before each entry is looked at; an iterator could be endless.
        if not isinstance(ids, Collection) or isinstance(ids, str | bytes | bytearray | Mapping | Set):
            raise RequestError(f"the prompt is a {type(ids).__name__}, wanted a text or a list of token ids")
        self._check_length(len(ids))
        checked = [token_id("the prompt", id) for id in ids]
        for id in checked:
            if id >= self._spec.n_vocab:
                raise RequestError(f"the prompt holds the token id {id}, wanted ids from 0 to {self._spec.n_vocab - 1}")
        return checked

    def _check_length(self, count: int) -> None:
        if not count:
            raise RequestError("the prompt is empty, and the model has no token to begin a text with; give it some text")
        if count > self._n_ctx:
            raise ContextOverflow(
                f"the prompt has {count} tokens and the context holds {self._n_ctx}: shorten it, or load the model with a"
                f" larger n_ctx (it was made for {self._spec.context_length})",
                "n_ctx",
                tokens=count,
                n_ctx=self._n_ctx,
            )


def _lacks_system(messages: Sequence[Message]) -> bool:
    """False also for what are no messages at all, which the template's checks refuse."""
    if not isinstance(messages, list | tuple) or not messages or not all(isinstance(m, Mapping) for m in messages):
        return False
    return all(m.get("role") != "system" for m in messages)
