"""What is asked of a model, checked before anything runs: a text, ids or messages become a `Request`."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace

from quarrel.engine import Request, Sampling, SamplingParams, Service, merged, token_id
from quarrel.errors import ContextOverflow, RequestError, TokenizerError, UnsupportedModel
from quarrel.llm.adapters import place
from quarrel.llm.structured import Grammars, Structure
from quarrel.llm.texts import VocabularyTexts
from quarrel.models import EncoderSpec, ModelSpec
from quarrel.tokenizer import Tokenizer

Message = Mapping[str, object]


class Requests:
    """Makes the requests of one model. drafts: it has a draft model. recurrent: it keeps a state."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        spec: ModelSpec | EncoderSpec,
        *,
        n_ctx: int,
        adapters: tuple[str, ...],
        drafts: bool,
        recurrent: bool,
        load_seconds: float,
    ) -> None:
        self._tokenizer, self._spec, self._n_ctx = tokenizer, spec, n_ctx
        self._adapters, self._drafts, self._recurrent = adapters, drafts, recurrent
        self._load_seconds = load_seconds
        self._grammars = Grammars(tokenizer, spec.n_vocab)
        self._greeted = False

    def must_continue_texts(self) -> None:
        """Raises UnsupportedModel for an encoder."""
        if isinstance(self._spec, EncoderSpec):
            raise UnsupportedModel(
                f"a {self._spec.architecture} model is an encoder, which continues no text: use its `embed`, or load a"
                " language model"
            )

    def params(self, defaults: SamplingParams, params: SamplingParams | None, options: Sampling) -> SamplingParams:
        """What holds for one call: keywords before `params` before the defaults."""
        self.must_continue_texts()
        if params is not None and not isinstance(params, SamplingParams):
            raise RequestError(f"params is a {type(params).__name__}, wanted a SamplingParams")
        settled = merged(params or defaults, options)
        settled.check_vocabulary(self._spec.n_vocab)
        return settled

    def of_prompt(
        self,
        prompt: object,
        params: SamplingParams,
        parse_special: bool,
        service: Service,
        structure: Structure | None,
        adapter: str | None,
    ) -> Request:
        """To continue a text, or token ids."""
        if isinstance(prompt, str):
            ids = self._tokenizer.encode(prompt, parse_special=parse_special)
        else:
            ids = self._ids(prompt)
        return self._made(ids, params, service, structure, adapter, continues=True)

    def of_messages(
        self,
        system: str | None,
        messages: Sequence[Message],
        params: SamplingParams,
        tools: Sequence[Mapping[str, object]] | None,
        template: str | None,
        template_kwargs: Mapping[str, bool | str] | None,
        service: Service,
        structure: Structure | None,
        adapter: str | None,
    ) -> Request:
        """To answer a conversation; `system` is put in front where it has none."""
        if system is not None and _lacks_system(messages):
            messages = [{"role": "system", "content": system}, *messages]
        if template is None and not self._greeted:
            self._greeted = True
            # Its warning; what is wrong with these messages is said below.
            with suppress(TokenizerError):
                self._tokenizer.check_chat_template()
        ids = self._tokenizer.apply_chat(messages, tools=tools, template=template, kwargs=template_kwargs)
        return self._made(ids, params, service, structure, adapter, continues=False)

    def checked(self, ids: object) -> list[int]:
        """Token ids that the model can read at once."""
        checked = self._ids(ids)
        self._fits(len(checked))
        return checked

    def _made(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        service: Service,
        structure: Structure | None,
        adapter: str | None,
        *,
        continues: bool,
    ) -> Request:
        if not isinstance(service, Service):
            raise RequestError(f"service is a {type(service).__name__}, wanted a Service")
        if structure is not None and not isinstance(structure, Structure):
            raise RequestError(f"structure is a {type(structure).__name__}, wanted a Structure")
        if structure is not None and params.ignore_eos:
            raise RequestError("ignore_eos and a structure exclude each other: the structure says where the text may end")
        if self._recurrent:
            service = replace(service, speculate=0)  # what was guessed wrong cannot be taken out of a state
        self._fits(len(ids))
        own = frozenset() if params.ignore_eos else self._tokenizer.stop_ids
        return Request(
            tokens=tuple(ids),
            params=params,
            seed=secrets.randbits(32) if params.seed is None else params.seed,
            stop_ids=own | frozenset(params.stop_token_ids),
            n_ctx=self._n_ctx,
            n_vocab=self._spec.n_vocab,
            texts=VocabularyTexts(self._tokenizer, continues),
            load_seconds=self._load_seconds,
            service=service,
            guide=None if structure is None else self._grammars.compile(structure),
            drafts=self._drafts,
            adapter=place(self._adapters, adapter),
        )

    def _ids(self, given: object) -> list[int]:
        # A collection, so that its length is known before each entry is looked at; an iterator could be endless.
        if not isinstance(given, Collection) or isinstance(given, str | bytes | bytearray | Mapping | Set):
            raise RequestError(f"the prompt is a {type(given).__name__}, wanted a text or a list of token ids")
        self._fits(len(given))
        ids = [token_id("the prompt", id) for id in given]
        for id in ids:
            if id >= self._spec.n_vocab:
                raise RequestError(f"the prompt holds the token id {id}, wanted ids from 0 to {self._spec.n_vocab - 1}")
        return ids

    def _fits(self, count: int) -> None:
        if not count:
            raise RequestError("the prompt is empty, and the model has no token to begin a text with; give it some text")
        if count > self._n_ctx:
            raise ContextOverflow(
                f"the prompt has {count} tokens and the context holds {self._n_ctx}: shorten it, or load the model with a"
                f" larger n_ctx (it was made for {self._spec.context_length})"
            )


def _lacks_system(messages: Sequence[Message]) -> bool:
    """False also for what are no messages at all, which the template's checks refuse."""
    if not isinstance(messages, list | tuple) or not messages or not all(isinstance(m, Mapping) for m in messages):
        return False
    return all(m.get("role") != "system" for m in messages)
