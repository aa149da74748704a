"""A loaded model: text or token ids in, continuations out."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, Unpack, overload

import numpy.typing as npt

from quarrel.engine import (
    Activity,
    AsyncStream,
    Chunk,
    Delivery,
    Loop,
    Request,
    Result,
    Sampling,
    SamplingParams,
    Service,
    Stats,
    Stream,
    TokenLogprob,
    deliver,
    start,
    start_async,
)
from quarrel.engine.service import DEFAULT_SERVICE
from quarrel.errors import QuarrelError, QueueFull, RequestError
from quarrel.gguf import GGUFFile
from quarrel.llm.adapters import place
from quarrel.llm.embed import Progress
from quarrel.llm.embedder import Embedder
from quarrel.llm.embeddings import Chunking, Embeddings, Pooling
from quarrel.llm.explain import Explanation
from quarrel.llm.requests import Message, Requests
from quarrel.llm.score import logprobs, score
from quarrel.llm.structured import Structure
from quarrel.models import EncoderSpec, ModelSpec
from quarrel.ops.step import CountsExperts
from quarrel.tokenizer import Tokenizer

MAX_TOP = 20
Prompt = str | Sequence[int]
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Loaded:
    """What `load` puts together for an `LLM`."""

    loop: Loop
    file: GGUFFile
    files: ExitStack
    """Closes it, and all others that are read from."""
    spec: ModelSpec | EncoderSpec
    tokenizer: Tokenizer
    explanation: Explanation
    load_seconds: float
    defaults: SamplingParams
    system: str | None = None
    adapters: tuple[str, ...] = ()


class LLM:
    """A model in memory, made by `quarrel.load`. Safe for threads; requests that meet share steps.

    `spec`: its architecture. `tokenizer`. `n_ctx`: tokens that prompt and continuation may fill together. `defaults`: the
    sampling parameters that hold where a call gives none. `system`: a system text that came with the model, which `chat`
    puts in front where the messages have none. `adapters`: the names of its LoRA adapters.

    Sampling is asked for by keyword (`temperature=0`, `max_tokens=100`: the fields of `SamplingParams`), or by a
    `SamplingParams` as `params`, or both: keywords replace its fields. All calls raise RequestError for arguments out of
    range and ContextOverflow for a prompt longer than the context, before anything runs. An encoder (BERT) has `embed`,
    `hidden` and the tokenizer; the rest raises UnsupportedModel.
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
        step_tokens = parts.explanation.plan.limits.max_tokens
        self._embedder = Embedder(parts.loop, parts.file, parts.spec, parts.tokenizer, self.n_ctx, step_tokens)
        self._asked = Requests(
            parts.tokenizer,
            parts.spec,
            n_ctx=self.n_ctx,
            adapters=parts.adapters,
            drafts=parts.explanation.draft is not None,
            recurrent=parts.loop.engine is not None and parts.loop.engine.cache.rules.recurrent,
            load_seconds=parts.load_seconds,
        )
        self._close = weakref.finalize(self, _shut, parts.loop, parts.files)

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
        *,
        parse_special: bool = False,
        service: Service = DEFAULT_SERVICE,
        structure: Structure | None = None,
        adapter: str | None = None,
        **options: Unpack[Sampling],
    ) -> Result: ...

    @overload
    def generate(
        self,
        prompt: list[str] | list[list[int]],
        params: SamplingParams | None = None,
        *,
        parse_special: bool = False,
        service: Service = DEFAULT_SERVICE,
        structure: Structure | None = None,
        adapter: str | None = None,
        **options: Unpack[Sampling],
    ) -> list[Result]: ...

    def generate(
        self,
        prompt: Prompt | list[str] | list[list[int]],
        params: SamplingParams | None = None,
        *,
        parse_special: bool = False,
        service: Service = DEFAULT_SERVICE,
        structure: Structure | None = None,
        adapter: str | None = None,
        **options: Unpack[Sampling],
    ) -> Result | list[Result]:
        """The continuation of a text or of token ids; a list of prompts runs together and gives a list of results.

        parse_special: names of control tokens in the text become those tokens; not for text from outside. A failure
        while generating raises QuarrelError for a single prompt, and is in the `Result` of its prompt in a list.
        service: priority, deadlines, cache salt, speculation; QueueFull is raised when too many requests wait already.
        structure: a JSON schema, regular expression or grammar that the text keeps to. adapter: one of `adapters`, by name.
        Ctrl-C cancels the work and is raised on.
        """
        settled = self._params(params, options)
        if _is_batch(prompt):
            requests = []
            for i, one in enumerate(prompt):
                try:
                    requests.append(self._asked.of_prompt(one, settled, parse_special, service, structure, adapter))
                except RequestError as error:  # among hundreds it matters which; nothing has run yet
                    raise type(error)(f"prompts[{i}]: {error}") from None
            return self._gather(requests)
        return _sound(self._gather([self._asked.of_prompt(prompt, settled, parse_special, service, structure, adapter)])[0])

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        parse_special: bool = False,
        service: Service = DEFAULT_SERVICE,
        structure: Structure | None = None,
        adapter: str | None = None,
        **options: Unpack[Sampling],
    ) -> Stream:
        """As `generate`, chunk by chunk: an iterator, and a context manager that cancels what is not done.

        The last chunk of each continuation carries its `Result`, also one that failed or was cancelled.
        """
        return start(
            self._loop,
            self._asked.of_prompt(prompt, self._params(params, options), parse_special, service, structure, adapter),
            stream=True,
            owner=self,
        )

    async def agenerate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        parse_special: bool = False,
        service: Service = DEFAULT_SERVICE,
        structure: Structure | None = None,
        adapter: str | None = None,
        **options: Unpack[Sampling],
    ) -> Result:
        """As `generate` for one prompt, for an event loop. Cancelling the task stops the work."""
        request = self._asked.of_prompt(prompt, self._params(params, options), parse_special, service, structure, adapter)
        return _sound(await start_async(self._loop, request, stream=False).wait())

    def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        parse_special: bool = False,
        service: Service = DEFAULT_SERVICE,
        structure: Structure | None = None,
        adapter: str | None = None,
        **options: Unpack[Sampling],
    ) -> AsyncStream:
        """As `stream`, for an event loop: `async for chunk in llm.astream(...)`. Cancelling the task stops the work."""
        request = self._asked.of_prompt(prompt, self._params(params, options), parse_special, service, structure, adapter)
        return start_async(self._loop, request, stream=True, owner=self)

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        template: str | None = None,
        template_kwargs: Mapping[str, bool | str] | None = None,
        service: Service = DEFAULT_SERVICE,
        structure: Structure | None = None,
        adapter: str | None = None,
        **options: Unpack[Sampling],
    ) -> Result: ...

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stream: Literal[True],
        tools: Sequence[Mapping[str, object]] | None = None,
        template: str | None = None,
        template_kwargs: Mapping[str, bool | str] | None = None,
        service: Service = DEFAULT_SERVICE,
        structure: Structure | None = None,
        adapter: str | None = None,
        **options: Unpack[Sampling],
    ) -> Stream: ...

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        template: str | None = None,
        template_kwargs: Mapping[str, bool | str] | None = None,
        service: Service = DEFAULT_SERVICE,
        structure: Structure | None = None,
        adapter: str | None = None,
        **options: Unpack[Sampling],
    ) -> Result | Stream:
        """The model's answer to messages such as `{"role": "user", "content": "Hello"}`, written by its chat template.

        tools: JSON schemas of functions, for templates that know them; calls come back as the model writes them, in
        the text. template: a named or literal template instead of the file's. template_kwargs: its further variables.
        """
        settled = self._params(params, options)
        request = self._asked.of_messages(
            self.system, messages, settled, tools, template, template_kwargs, service, structure, adapter
        )
        if stream:
            return start(self._loop, request, stream=True, owner=self)
        return _sound(self._gather([request])[0])

    def achat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        template: str | None = None,
        template_kwargs: Mapping[str, bool | str] | None = None,
        service: Service = DEFAULT_SERVICE,
        structure: Structure | None = None,
        adapter: str | None = None,
        **options: Unpack[Sampling],
    ) -> AsyncStream:
        """As `chat` with `stream=True`, for an event loop; `await llm.achat(...).wait()` gives the `Result`."""
        settled = self._params(params, options)
        request = self._asked.of_messages(
            self.system, messages, settled, tools, template, template_kwargs, service, structure, adapter
        )
        return start_async(self._loop, request, stream=True, owner=self)

    def prepare(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Message] | None = None,
        params: SamplingParams | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        template: str | None = None,
        template_kwargs: Mapping[str, bool | str] | None = None,
        service: Service = DEFAULT_SERVICE,
        structure: Structure | None = None,
        adapter: str | None = None,
        **options: Unpack[Sampling],
    ) -> Request:
        """What `generate` (of a prompt) or `chat` (of messages) would run, checked and tokenized, for `submit`.

        Takes milliseconds for a long prompt, so an event loop calls it on a thread.
        """
        settled = self._params(params, options)
        if (prompt is None) == (messages is None):
            raise RequestError("a request has either a prompt or messages")
        if messages is not None:
            return self._asked.of_messages(
                self.system, messages, settled, tools, template, template_kwargs, service, structure, adapter
            )
        return self._asked.of_prompt(prompt, settled, False, service, structure, adapter)

    def submit(self, request: Request, *, stream: bool = True) -> AsyncStream:
        """Starts a prepared request for the event loop that is running. Cancelling the task that reads it stops it.

        stream: False for the last chunk of each continuation alone.
        """
        return start_async(self._loop, request, stream=stream, owner=self)

    def deliver(
        self, request: Request, row: Callable[[Chunk], Any], give: Callable[[list[Any]], None], *, stream: bool = True
    ) -> Delivery:
        """As `submit`, with what `row` makes of the chunks handed to `give`, those of a step together.

        Both are called on the engine's thread, which waits for them: they must be quick.
        """
        outbox = self._loop.outbox
        return deliver(self._loop, request, lambda chunk: outbox.give(give, row(chunk)), stream=stream)

    @property
    def fault(self) -> str | None:
        """Why the engine has ended for good, unless it was closed: the model must be loaded again."""
        return self._loop.fault

    @property
    def busy_since(self) -> float | None:
        """When (`time.perf_counter`) the engine began what it is at; None while it has nothing to do."""
        return self._loop.busy_since

    @property
    def thread(self) -> int | None:
        """The number of the engine's thread."""
        return self._loop.thread

    def logits(self, ids: Sequence[int], *, adapter: str | None = None) -> Array:
        """float32 `[T, V]`: row t holds the logits of the token behind `ids[: t + 1]`. At most `n_ctx` ids."""
        self._asked.must_continue_texts()
        return score(
            self._loop, self._asked.checked(ids), "logits", self.spec.n_vocab, adapter=place(self.adapters, adapter)
        )

    def logprobs(self, ids: Sequence[int], top: int = 0, *, adapter: str | None = None) -> list[TokenLogprob]:
        """How likely each token of a text is behind those before it, natural logarithms; one for each but the first.

        top: 0 to 20 best alternatives with each. At most `n_ctx` ids; the logits are not kept, so long texts cost little.
        """
        self._asked.must_continue_texts()
        if isinstance(top, bool) or not isinstance(top, int) or not 0 <= top <= MAX_TOP:
            raise RequestError(f"top is {top!r}, wanted a whole number from 0 to {MAX_TOP}")
        return logprobs(self._loop, self._asked.checked(ids), top, place(self.adapters, adapter))

    def hidden(self, ids: Sequence[int]) -> Array:
        """float32 `[T, E]`: the state of each position after the last norm, before an output layer or an encoder's pooling.

        At most `n_ctx` ids.
        """
        return score(
            self._loop, self._asked.checked(ids), "hidden", self.spec.n_embd, whole=isinstance(self.spec, EncoderSpec)
        )

    @property
    def embedding_dim(self) -> int:
        """Length of the rows that `embed` gives."""
        return self._embedder.dim

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        normalize: bool = True,
        pooling: Pooling | None = None,
        dimensions: int | None = None,
        prefix: str | None = None,
        chunk: Chunking | int | None = None,
        progress: bool | Progress = False,
    ) -> Embeddings:
        """One vector a text, float32, in the order given; they run together, without padding.

        normalize: to length 1. pooling: "mean", "cls", "last" or "rank" (a reranker's scores, never normalised) in place of
        what the file says; a decoder whose file says nothing is read at its last token. dimensions: keep only so many
        (Matryoshka). prefix: put in front of every text; the names of the model's own tasks ("search_query") will do.
        chunk: texts of more tokens than this are cut into overlapping pieces with a row each, see `Embeddings.texts`;
        without it a text that does not fit raises ContextOverflow. progress: True for a bar, or a function of pieces done
        and in all.
        """
        return self._embedder.embed(
            texts,
            normalize=normalize,
            pooling=pooling,
            dimensions=dimensions,
            prefix=prefix,
            chunk=chunk,
            progress=progress,
        )

    async def aembed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        normalize: bool = True,
        pooling: Pooling | None = None,
        dimensions: int | None = None,
        prefix: str | None = None,
        chunk: Chunking | int | None = None,
    ) -> Embeddings:
        """As `embed`, for an event loop. Cancelling the task stops the work."""
        return await self._embedder.aembed(
            texts, normalize=normalize, pooling=pooling, dimensions=dimensions, prefix=prefix, chunk=chunk
        )

    def embedding_prefix(self, prefix: str | None) -> str:
        """What `embed` puts in front of a text for this `prefix`."""
        return self._embedder.prefixed(prefix)

    def token_embeddings(self, text: Prompt) -> Array:
        """float32 `[T, E]`: the last states of a text's tokens, special ones included, before pooling."""
        return self.hidden(self.tokenizer.encode(text) if isinstance(text, str) else text)

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """The ids of a text; see `Tokenizer.encode`."""
        return self.tokenizer.encode(text, add_special, parse_special)

    def detokenize(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of ids; see `Tokenizer.decode`."""
        return self.tokenizer.decode(ids, skip_special)

    def explain(self) -> Explanation:
        """What was chosen when the model was loaded: device, operations, memory."""
        return self._parts.explanation

    def stats(self) -> Stats:
        """What has happened since it was loaded, in counters that go on growing; `quarrel.metrics` names them."""
        engine = self._loop.engine
        assert engine is not None
        return engine.stats

    def expert_counts(self) -> dict[str, list[int]]:
        """Tokens that each expert took since the model was loaded, by the path of its layer; waits for the running step.
        Nothing where there are no experts, or the model is closed."""
        engine = self._loop.engine
        assert engine is not None

        def read() -> dict[str, list[int]]:
            step = engine.step
            counts = step.expert_counts() if isinstance(step, CountsExperts) else {}
            return {path: [int(n) for n in found] for path, found in counts.items()}

        try:
            return self._loop.run(read)
        except QuarrelError:
            return {}

    def activity(self) -> Activity:
        """How busy the model is right now."""
        engine = self._loop.engine
        assert engine is not None
        return engine.activity()

    def _params(self, params: SamplingParams | None, options: Sampling) -> SamplingParams:
        return self._asked.params(self.defaults, params, options)

    def _gather(self, requests: Sequence[Request]) -> list[Result]:
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


def _sound(result: Result) -> Result:
    if result.finish_reason == "error":
        raise result.failure or QuarrelError(result.error)
    return result


def _shut(loop: Loop, files: ExitStack) -> None:
    loop.close()
    files.close()
