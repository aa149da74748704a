"""A loaded model: text or token ids in, continuations out."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast, overload

import numpy.typing as npt

from quarrel.child.phase import PhaseClock
from quarrel.engine import (
    Activity,
    AsyncStream,
    Chunk,
    Delivery,
    Loop,
    Request,
    Result,
    SamplingParams,
    Stats,
    Stream,
    TokenLogprob,
    deliver,
    start,
    start_async,
)
from quarrel.errors import QuarrelError, QueueFull, RequestError
from quarrel.llm.adapters import adapter_index
from quarrel.llm.embeddings import Embeddings, EmbedKeywords, EmbedOptions, Progress
from quarrel.llm.explain import Explanation
from quarrel.llm.loaded import Loaded
from quarrel.llm.memory import give_back
from quarrel.llm.overflow import asking, summarised
from quarrel.llm.requests import (
    ChatKeywords,
    GenerateRequest,
    Message,
    PrepareKeywords,
    Preparer,
    Prompt,
    PromptKeywords,
    RequestKeywords,
)
from quarrel.llm.score import logprobs, score
from quarrel.models import EncoderSpec
from quarrel.ops.step import CountsExperts

if TYPE_CHECKING:
    from quarrel.llm.embedder import Embedder, Text
    from quarrel.llm.prefill import Prefillers
    from quarrel.llm.saved import Prefixes

MAX_TOP = 20
Array = npt.NDArray[Any]


class LLM:
    """A model in memory, made by `quarrel.load`. Safe for threads; requests that meet share steps.

    `spec`: its architecture. `tokenizer`. `n_ctx`: tokens that prompt and continuation may fill together. `defaults`: the
    sampling parameters of calls that give none. `system`: a system message that came with the model, which `chat` puts
    before messages without one. `adapters`: the names of its LoRA adapters.

    Sampling is set by keyword (`temperature=0`, `max_tokens=100`: the fields of `SamplingParams`), or by a
    `SamplingParams` as `params`, or both: keywords replace its fields. Further keywords of calls that generate are
    `service` (priority, deadlines, cache salt, drafts; QueueFull is raised when too many requests wait already),
    `structure` (a JSON schema, regular expression or grammar that the text keeps to), `adapter` (one of `adapters`, by
    name) and `prompt_logprobs` (True: with `logprobs`, those of the prompt's tokens, too). All calls raise RequestError for
    arguments out of range and ContextOverflow for a prompt longer than the context, before anything runs. An encoder (BERT)
    has `embed`, `hidden` and the tokenizer; the rest raises UnsupportedModel.
    """

    def __init__(self, parts: Loaded) -> None:
        self.spec = parts.spec
        self.tokenizer = parts.tokenizer
        self.n_ctx = parts.explanation.n_ctx
        self.defaults = parts.defaults
        self.system = parts.system
        self.adapters = parts.adapters
        self._parts = parts
        self._loop = parts.loop
        if isinstance(parts.spec, EncoderSpec) or f"{parts.spec.architecture}.pooling_type" in parts.file.metadata:
            _ = self._embedder  # what is wrong with how it embeds is told at once
        self._preparer = Preparer(parts)
        self._close = weakref.finalize(self, _shut, parts.loop, parts.files)
        self._prefillers: Prefillers | None = None
        if parts.options.prefill is not None:
            from quarrel.llm.prefill import Prefillers

            try:
                self._prefillers = Prefillers(parts.options.prefill, self.prefixes, self.adapters)
            except BaseException:
                self.close()
                raise
            parts.files.callback(self._prefillers.close)

    def __repr__(self) -> str:
        e = self._parts.explanation
        return f"LLM({e.model!r}, {e.architecture}, {e.backend}, n_ctx={self.n_ctx})"

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancels what runs and gives the memory back. May be called twice."""
        self._close()

    @overload
    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        **keywords: Unpack[PromptKeywords],
    ) -> Result: ...

    @overload
    def generate(
        self,
        prompt: list[str] | list[list[int]],
        params: SamplingParams | None = None,
        **keywords: Unpack[PromptKeywords],
    ) -> list[Result]: ...

    def generate(
        self,
        prompt: Prompt | list[str] | list[list[int]],
        params: SamplingParams | None = None,
        **keywords: Unpack[PromptKeywords],
    ) -> Result | list[Result]:
        """The continuation of a text or of token ids; a list of prompts runs together and gives a list of results.

        keywords: sampling, `service`, `structure`, `adapter`, and `parse_special`: names of control tokens in the text
        become those tokens; not for text from outside. A failure while generating raises QuarrelError for a single prompt,
        and is in the `Result` of its prompt in a list. Ctrl-C cancels the work and is raised again.
        """
        if not _is_batch(prompt):
            return _raised(self._run([self._prompt_request(cast("Prompt", prompt), params, keywords)])[0])
        request = self._request(PromptKeywords, keywords, params, prompt="")
        prepared = []
        for i, one in enumerate(prompt):
            try:
                prepared.append(self.prepare_request(replace(request, prompt=cast("Prompt", one))))
            except RequestError as error:  # among hundreds it matters which; nothing has run yet
                raise type(error)(f"prompts[{i}]: {error}", *error.fields) from None
        return self._run(prepared)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **keywords: Unpack[PromptKeywords]) -> Stream:
        """As `generate`, chunk by chunk: an iterator, and a context manager that cancels what is not done.

        The last chunk of each continuation carries its `Result`, also one that failed or was cancelled.
        """
        return start(self._loop, self._prompt_request(prompt, params, keywords), stream=True, owner=self)

    async def agenerate(
        self, prompt: Prompt, params: SamplingParams | None = None, **keywords: Unpack[PromptKeywords]
    ) -> Result:
        """As `generate` for one prompt, for an event loop. Cancelling the task stops the work."""
        return _raised(await start_async(self._loop, self._prompt_request(prompt, params, keywords), stream=False).wait())

    def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, **keywords: Unpack[PromptKeywords]
    ) -> AsyncStream:
        """As `stream`, for an event loop: `async for chunk in llm.astream(...)`. Cancelling the task stops the work."""
        return self.submit(self._prompt_request(prompt, params, keywords))

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        **keywords: Unpack[ChatKeywords],
    ) -> Result: ...

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stream: Literal[True],
        **keywords: Unpack[ChatKeywords],
    ) -> Stream: ...

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        **keywords: Unpack[ChatKeywords],
    ) -> Result | Stream:
        """The model's answer to messages such as `{"role": "user", "content": "Hello"}`, written by its chat template.

        keywords: sampling, `service`, `structure`, `adapter`, and: `tools`, JSON schemas of functions, for templates that
        know them; calls come back as the model writes them, in the text. `template`, a named or literal template in place
        of the file's. `template_kwargs`, further variables of it.
        """
        request = self._summed_up(messages, params, keywords)
        return start(self._loop, request, stream=True, owner=self) if stream else _raised(self._run([request])[0])

    def _summed_up(self, messages: Sequence[Message], params: SamplingParams | None, keywords: ChatKeywords) -> Request:
        """As `prepare`; what does not fit is summed up by the model first, where that is wanted."""
        request = self.prepare(messages=messages, params=params, **keywords)
        if keywords.get("overflow") != "summary" or not request.dropped:
            return request
        wanted, tokens = asking(messages, request.dropped, self.n_ctx)
        own: ChatKeywords = {"max_tokens": tokens, "temperature": 0.0, "overflow": "shift"}
        own |= {"template": keywords.get("template"), "service": replace(request.service, progress=False)}
        summary = self.chat(wanted, **own)
        shorter = summarised(messages, request.dropped, summary.text)
        again = self.prepare(messages=shorter, params=params, **keywords)
        return replace(again, dropped=request.dropped + again.dropped)

    def achat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **keywords: Unpack[ChatKeywords]
    ) -> AsyncStream:
        """As `chat` with `stream=True`, for an event loop; `await llm.achat(...).wait()` gives the `Result`.

        Nothing is summed up here: `overflow="summary"` leaves turns out as "shift" does.
        """
        return self.submit(self.prepare(messages=messages, params=params, **keywords))

    def prepare(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Message] | None = None,
        params: SamplingParams | None = None,
        **keywords: Unpack[PrepareKeywords],
    ) -> Request:
        """What `generate` (of a prompt) or `chat` (of messages) would run, checked and tokenized, for `submit`.

        Takes milliseconds for a long prompt, longer if another process reads it (`prefill`): for a thread of an event loop.
        """
        return self.prepare_request(self._request(PrepareKeywords, keywords, params, prompt=prompt, messages=messages))

    def prepare_request(self, request: GenerateRequest) -> Request:
        """As `prepare`, of a request that was made elsewhere."""
        made = self._preparer.prepare(request, self.system)
        if self._prefillers is not None:
            self._prefillers.fetch(made)
        return made

    @property
    def sees(self) -> bool:
        """Whether messages may hold images."""
        return self._parts.eyes is not None

    def start(self, request: Request) -> Stream:
        """Starts a prepared request."""
        return start(self._loop, request, stream=True, owner=self)

    def submit(self, request: Request, *, stream: bool = True) -> AsyncStream:
        """Starts a prepared request for the event loop that is running. Cancelling the task that reads it stops it.

        stream: False for the last chunk of each continuation alone.
        """
        return start_async(self._loop, request, stream=stream, owner=self)

    def deliver(
        self, request: Request, row: Callable[[Chunk], Any], send: Callable[[list[Any]], None], *, stream: bool = True
    ) -> Delivery:
        """As `submit`, with what `row` makes of the chunks handed to `send`, those of a step together.

        Both are called on the engine's thread, which waits for them: they must be quick.
        """
        outputs = self._loop.outputs
        return deliver(self._loop, request, lambda chunk: outputs.put_to(send, row(chunk)), stream=stream)

    @property
    def fault(self) -> str | None:
        """Why the engine has ended for good, unless it was closed: the model must be loaded again."""
        return self._loop.fault

    @property
    def phase(self) -> PhaseClock:
        """What the engine's thread does, and since when."""
        return self._loop.phase

    def when_lost(self, callback: Callable[[], None]) -> None:
        """Never calls it: a model in this process is not lost without it."""

    def logits(self, ids: Sequence[int], *, adapter: str | None = None) -> Array:
        """float32 `[T, V]`: row t holds the logits of the token after `ids[: t + 1]`. At most `n_ctx` ids."""
        self._preparer.check_generates()
        index, ids = adapter_index(self.adapters, adapter), self._preparer.checked(ids)
        return score(self._loop, ids, "logits", self.spec.n_vocab, adapter=index)

    def logprobs(self, ids: Sequence[int], top: int = 0, *, adapter: str | None = None) -> list[TokenLogprob]:
        """How likely each token of a text is after those before it, natural logarithms; one for each but the first.

        top: 0 to 20 best alternatives with each. At most `n_ctx` ids; the logits are not kept, so long texts cost little.
        """
        self._preparer.check_generates()
        if isinstance(top, bool) or not isinstance(top, int) or not 0 <= top <= MAX_TOP:
            raise RequestError(f"top is {top!r}, wanted a whole number from 0 to {MAX_TOP}", "top")
        return logprobs(self._loop, self._preparer.checked(ids), top, adapter_index(self.adapters, adapter))

    def hidden(self, ids: Sequence[int]) -> Array:
        """float32 `[T, E]`: the state of each position after the last norm, before an output layer or an encoder's pooling.

        At most `n_ctx` ids.
        """
        whole = isinstance(self.spec, EncoderSpec)
        return score(self._loop, self._preparer.checked(ids), "hidden", self.spec.n_embd, whole=whole)

    @cached_property
    def _embedder(self) -> Embedder:
        from quarrel.llm.embedder import Embedder  # only here: most models embed nothing

        return Embedder(self._parts)

    @property
    def embedding_dim(self) -> int:
        """Length of the rows that `embed` gives."""
        return self._embedder.dim

    def embed(
        self,
        texts: Text | Sequence[Text],
        *,
        progress: bool | Progress = False,
        **keywords: Unpack[EmbedKeywords],
    ) -> Embeddings:
        """One vector a text, float32, in the order of the texts; they run together, without padding.

        keywords: `normalize`, to length 1, on by default. `pooling`: "mean", "cls", "last" or "rank" (a reranker's scores,
        never normalised) in place of what the file says; a decoder whose file says nothing is read at its last token.
        `dimensions`: keep only so many (Matryoshka). `prefix`: put before every text; the names of the model's own tasks
        ("search_query") will do. `chunk`: texts of more tokens than this are cut into overlapping pieces with a row each,
        see `Embeddings.texts`; without it a text that does not fit raises ContextOverflow.
        progress: True for a bar, or a function of pieces done and in all.
        """
        return self._embedder.embed(texts, EmbedOptions.of(keywords), progress)

    async def aembed(self, texts: Text | Sequence[Text], **keywords: Unpack[EmbedKeywords]) -> Embeddings:
        """As `embed`, for an event loop. Cancelling the task stops the work."""
        return await self._embedder.aembed(texts, EmbedOptions.of(keywords))

    def embedding_prefix(self, prefix: str | None) -> str:
        """What `embed` puts in front of a text for this `prefix`."""
        return self._embedder.prefixed(prefix)

    def token_embeddings(self, text: Text) -> Array:
        """float32 `[T, E]`: the last states of a text's tokens, special ones included, before pooling."""
        return self.hidden(self.tokenizer.encode(text) if isinstance(text, str) else text)

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """The ids of a text; see `Tokenizer.encode`."""
        return self.tokenizer.encode(text, add_special, parse_special)

    def detokenize(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of ids; see `Tokenizer.decode`."""
        return self.tokenizer.decode(ids, skip_special)

    @cached_property
    def prefixes(self) -> Prefixes:
        """What the cache has of texts, into files and back."""
        from quarrel.llm.saved import Prefixes  # only here: most models save nothing

        return Prefixes(self._parts)

    def explain(self) -> Explanation:
        """What was chosen when the model was loaded: device, operations, memory."""
        return self._parts.explanation

    def stats(self) -> Stats:
        """What has happened since it was loaded, in counters that go on growing; `quarrel.metrics` names them."""
        engine = self._loop.engine
        assert engine is not None
        return engine.stats

    def expert_counts(self, *, wait: bool = True) -> dict[str, list[int]]:
        """Tokens that each expert took since the model was loaded, by the path of its layer; waits for the running step.

        Empty where there are no experts, or the model is closed. wait: False for what is known at once: nothing, here.
        """
        engine = self._loop.engine
        assert engine is not None

        def read() -> dict[str, list[int]]:
            step = engine.step
            counts = step.expert_counts() if isinstance(step, CountsExperts) else {}
            return {path: [int(n) for n in found] for path, found in counts.items()}

        try:
            return self._loop.run(read) if wait else {}
        except QuarrelError:
            return {}

    def activity(self) -> Activity:
        """How busy the model is right now."""
        engine = self._loop.engine
        assert engine is not None
        return engine.activity()

    def _request(
        self,
        kind: type[RequestKeywords],
        keywords: Mapping[str, Any],
        params: SamplingParams | None,
        **input: Any,
    ) -> GenerateRequest:
        self._preparer.check_generates()
        return GenerateRequest.of(kind, keywords, params, self.defaults, **input)

    def _prompt_request(self, prompt: Prompt, params: SamplingParams | None, keywords: PromptKeywords) -> Request:
        return self.prepare_request(self._request(PromptKeywords, keywords, params, prompt=prompt))

    def _run(self, requests: Sequence[Request]) -> list[Result]:
        """The results in order. No more are queued at once than the engine takes: the list may be longer than its queue."""
        streams: list[Stream] = []
        results: list[Result] = []
        try:
            for request in requests:
                while True:
                    try:
                        streams.append(start(self._loop, request, stream=False))
                        break
                    except QueueFull:
                        if len(results) == len(streams):
                            raise  # it is full of others' requests
                        results.append(streams[len(results)].wait())
            results += [stream.wait() for stream in streams[len(results) :]]
        except BaseException:
            for stream in streams:
                stream.cancel()
            raise
        return results


def _is_batch(prompt: object) -> bool:
    """A list whose first entry is a prompt itself, not a token id; an empty list is no prompts."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, str | bytes | bytearray):
        return False
    return isinstance(prompt[0], Sequence) if prompt else isinstance(prompt, list)


def _raised(result: Result) -> Result:
    if result.finish_reason == "error":
        raise result.failure or QuarrelError(result.error)
    return result


def _shut(loop: Loop, files: ExitStack) -> None:
    loop.close()
    files.close()
    give_back()
