"""A continuation that is being generated: a request, its tokens so far, and the text that was sent."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

import numpy as np

from quarrel.engine import rng
from quarrel.engine.chain import HostChain, Peaks, token_logprob
from quarrel.engine.images import Sight
from quarrel.engine.listed import Listed
from quarrel.engine.params import SamplingParams
from quarrel.engine.results import Chunk, FinishReason, Result, Timings, TokenLogprob, Usage
from quarrel.engine.sequence import Array, Sequence
from quarrel.engine.service import DEFAULT_SERVICE, Service
from quarrel.engine.speculate import Lookup, Pace
from quarrel.engine.text import MakeGuide, StopText, Texts
from quarrel.errors import Diverged, EngineFault, QuarrelError, RequestError
from quarrel.ops.adjust import packed
from quarrel.ops.step import StepOutputs

Sink = Callable[[Chunk], None]
_AGAIN = 1 << 20
"""Of a text that goes on with fewer tokens: the index of its next seed, which no continuation has."""


@dataclass(frozen=True)
class Request:
    """One prompt, checked. `seed` is settled; `stop_ids` are the model's own unless they are ignored, and the caller's."""

    tokens: tuple[int, ...]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    n_ctx: int
    n_vocab: int
    texts: Texts = field(repr=False)
    load_seconds: float = 0.0
    service: Service = DEFAULT_SERVICE
    guide: MakeGuide | None = field(default=None, repr=False)
    drafts: bool = False
    """Whether there is a draft model to propose tokens for it."""
    adapter: int = 0
    """Which of the model's adapters it runs with; 0 is none."""
    prompt_logprobs: bool = False
    """Whether those of the prompt's tokens are wanted, too; `params.logprobs` says how many alternatives."""
    dropped: int = 0
    """How many messages, or tokens of a plain prompt, were left out of it because the context is too short."""
    sight: Sight | None = field(default=None, repr=False)
    """The prompt's images."""
    keep: int | None = None
    """The text goes on where its context is full: with so many first tokens, and the newer half of the others. None: it
    ends there."""

    @property
    def room(self) -> int:
        """Tokens that may be generated: those requested, as far as the context goes."""
        return self.room_behind(len(self.tokens), 0)

    def room_behind(self, tokens: int, generated: int) -> int:
        """Likewise, the generated ones included, where so many tokens stand in the context."""
        most = generated + self.n_ctx - tokens
        return most if self.params.max_tokens is None else min(most, self.params.max_tokens)

    @property
    def kept(self) -> int:
        """Of the first tokens, those that stay whatever is left out: an eighth of the context is for others."""
        return min(self.keep or 0, len(self.tokens), self.n_ctx - max(4, self.n_ctx // 8))


def salt_of(service: Service, adapter: int) -> bytes:
    """Of a request's blocks in the cache: what one adapter has computed is wrong for another, so none finds another's."""
    return b"%d:" % adapter + service.salt


class Generation(Sequence):
    """The `index`-th continuation of a request. `sink` gets every chunk, or the last one only."""

    keeps_prefix = True

    def __init__(self, request: Request, index: int, sink: Sink, *, stream: bool) -> None:
        # The last token drawn never runs, so it needs no slot.
        length = len(request.tokens) + max(0, request.room - 1)
        super().__init__(request.tokens, length, family=request, siblings=request.params.n)
        self.request, self.index = request, index
        service = request.service
        self.adapter, self.salt = request.adapter, salt_of(service, request.adapter)
        self.rank, self.sight = service.rank, request.sight
        self.queue_seconds, self.total_seconds = service.queue_seconds, service.total_seconds
        self._lookup = Lookup(service.speculate) if service.speculate else None
        self._pace = Pace(service.draft) if service.draft and request.drafts else None
        self.drafts = self._pace is not None
        self._looked_up = False
        self._guide = None if request.guide is None else request.guide()
        self.want = "logits"
        listed = Listed(request.params, request.stop_ids, self.n_prompt)
        guided = self._guide is not None
        # With bans a grammar may leave nothing to draw, which the host alone tells from a number that diverged. A draft's
        # masks are known where it was right, and log probabilities are to be the same with drafts and without.
        drafts = self._lookup is not None or self._pace is not None
        free = not guided or not (listed.forbids or drafts or request.params.logprobs is not None)
        if request.params.on_device and listed.fits and free:
            self.listed = None if listed.empty else listed
            self.want = "tokens" if request.params.logprobs is None else "logprobs"
        self.every_row = request.prompt_logprobs  # until the prompt is read
        if self.every_row:
            self.want, self.keeps_prefix = "logits", False
        self.waits = self.want == "logits" or drafts or guided
        self.seed = rng.alternative_seed(request.seed, index)
        p = request.params
        # More than any vocabulary is no limit, and every whole number below this is exact in float32.
        self.draws = (p.temperature, float(min(p.top_k, 1 << 23)), p.top_p, p.min_p)
        self._sink, self._stream = sink, stream
        self._room, self._n_vocab = request.room, request.n_vocab
        self._stop_ids, self._min_tokens = request.stop_ids, p.min_tokens
        self._chain = HostChain(request.params, request.stop_ids, request.texts)
        self._text = StopText(request.texts.detokenizer(), request.params.stop)
        self._texts_sent: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: list[TokenLogprob] | None = [] if self.every_row else None
        self._read = 0  # rows of the prompt
        self._first_token = 0.0
        self._guessed = self._right = 0
        self._left_out = 0  # of its tokens, behind the kept ones
        self._all = self.tokens  # with those
        self._last: Chunk | None = None

    @property
    def generated(self) -> int:
        return len(self.tokens) + self._left_out - len(self.request.tokens)

    def shorten(self) -> None:
        kept, tokens = self.request.kept, self.tokens
        out = max(1, (len(tokens) - kept) // 2)
        if self._all is tokens:
            self._all = list(tokens)
        self.tokens = [*tokens[:kept], *tokens[kept + out :]]
        self._left_out += out
        self.full, self.n_prompt = False, len(self.tokens)
        self._room = self.request.room_behind(len(self.tokens), self.generated)
        self.length = len(self.tokens) + self._room - self.generated - 1
        # Random numbers belong to places, which come again.
        self.seed = rng.alternative_seed(self.seed, _AGAIN)
        if self.listed is not None:
            self.listed = Listed(self.request.params, self._stop_ids, len(self.request.tokens) - self._left_out)

    def uniform(self, lane: int = rng.DRAW) -> float:
        """The random number of the next token."""
        return rng.uniform(self.seed, len(self.tokens), lane)

    def mask(self) -> Array | None:
        if self._guide is None or self.want == "logits":
            return None
        try:
            return packed(self._guide.allowed())
        except QuarrelError:  # raised again, for this sequence alone, when it is prepared
            return packed(np.ones(self._n_vocab, bool))

    def prepare(self) -> None:
        if self._guide is not None:
            self._guide.allowed()

    def ran(self, end: int) -> None:
        if self._stream and self.request.service.progress and not self.generated:
            self._sink(Chunk("", None, self.index, read=end, cached=self.reused))

    def draft(self, room: int) -> Tokens[int]:
        found = self._lookup.draft(self._all, room) if self._lookup is not None else ()
        self._looked_up = len(found) > 0
        return found

    def ahead(self) -> int:
        return self._pace.ahead() if self._pace is not None else 0

    def rows(self, end: int) -> int:
        # After a preemption some rows that were read run again.
        return max(0, end - max(self.computed, self._read)) if self.every_row else super().rows(end)

    def accept(self, outputs: StepOutputs, first: int, count: int, draft: Tokens[int]) -> int:
        if self.every_row:
            self._read_prompt(outputs, first, count)
            return 0
        right = 0
        self._guessed += len(draft)
        for row in range(first, first + count):
            self._draw(outputs, row)
            # Each row has what follows if the draft is right so far, and its random number is its position's: the same
            # tokens as one by one.
            if self.finished or self.full or right == len(draft) or self.tokens[-1] != draft[right]:
                break
            right += 1
            self._right += 1
        if draft and self._looked_up and self._lookup is not None:
            self._lookup.observe(right)
        elif draft and self._pace is not None:
            self._pace.observe(len(draft), right)
        return right

    def _read_prompt(self, outputs: StepOutputs, first: int, count: int) -> None:
        """Each row of the prompt says how likely its next token was; the last one is drawn from."""
        top, found = self.request.params.logprobs, self._prompt_logprobs
        assert outputs.logits is not None
        assert top is not None
        assert found is not None
        for row in outputs.logits[first : first + count]:
            self._read += 1
            if self._read < self.n_prompt:
                peaks = Peaks(row)
                if math.isnan(peaks.top):
                    self._finish("error", failure=self._diverged())
                    return
                found.append(token_logprob(row, self.tokens[self._read], top, peaks))
        if self._read == self.n_prompt:
            self.every_row = False
            if self._stream:
                self._sink(Chunk("", None, self.index, prompt_logprobs=tuple(found)))
            self._draw(outputs, first + count - 1)

    def _draw(self, outputs: StepOutputs, first: int) -> None:
        if self._room == 0:
            self._finish("length")
            return
        logprob = None
        if self.want != "logits":
            assert outputs.tokens is not None
            token = int(outputs.tokens[first])
            if self.want == "logprobs":
                logprob = self._delivered(outputs, first, token)
        else:
            assert outputs.logits is not None
            row = outputs.logits[first]
            allowed = None if self._guide is None else self._guide.allowed()
            peaks = Peaks(row)
            if math.isnan(peaks.top):
                self._finish("error", failure=self._diverged())
                return
            numbers = self.uniform(), self.uniform(rng.XTC)
            token = self._chain.draw(row, self._all, self.generated, *numbers, allowed, peaks)
            if token >= 0 and self.request.params.logprobs is not None:
                logprob = self._chain.logprob(row, token, peaks)
        if not 0 <= token < self._n_vocab:
            self._finish("error", failure=self._no_token(token))
        else:
            self._accept(token, logprob)

    def _delivered(self, outputs: StepOutputs, row: int, token: int) -> TokenLogprob:
        top = self.request.params.logprobs
        assert top is not None
        assert outputs.logprobs is not None
        assert outputs.best is not None
        own, *others = outputs.logprobs[row, : 1 + top].tolist()
        return TokenLogprob(token, own, tuple(zip(outputs.best[row, :top].tolist(), others)))

    def end(self, reason: FinishReason, failure: QuarrelError | None = None) -> None:
        if self._last is None:
            self._finish(reason, failure=failure)
        assert self._last is not None
        self._sink(self._last)

    def _accept(self, token: int, logprob: TokenLogprob | None) -> None:
        count = self.generated + 1
        if count == 1:
            self._first_token = time.perf_counter()
            if self.index == 0:
                self.ran(len(self.request.tokens))
        if token in self._stop_ids or (self._guide is not None and token in self._guide.ends):
            self.stop_token = token
            self._finish("stop", stopped_by=token)
            return
        self.tokens.append(token)
        if self._all is not self.tokens:
            self._all.append(token)
        if logprob is not None:
            self._logprobs.append(logprob)
        text = self._text.push(token, armed=count > self._min_tokens)
        if self._text.stopped_by is not None:
            self._finish("stop", text, token, logprob, stopped_by=self._text.stopped_by)
        elif self._guide is not None and self._guide.take(token):
            self._finish("stop", text, token, logprob)
        elif count == self._room and (self.request.keep is None or count == self.request.params.max_tokens):
            self._finish("length", text, token, logprob)
        else:
            self.full = count == self._room
            self._texts_sent.append(text)
            if self._stream:
                self._sink(Chunk(text, token, self.index, logprob))

    def _finish(
        self,
        reason: FinishReason,
        text: str = "",
        token: int | None = None,
        logprob: TokenLogprob | None = None,
        stopped_by: int | str | None = None,
        failure: QuarrelError | None = None,
    ) -> None:
        self.finished = True
        self.outcome, self.failure = reason, failure
        if self._text.stopped_by is None:
            text += self._text.flush()
        self._texts_sent.append(text)
        result = Result(
            text="".join(self._texts_sent),
            token_ids=tuple(self._all[len(self.request.tokens) :]),
            finish_reason=reason,
            usage=Usage(len(self.request.tokens), self.generated, self.reused),
            timings=self._timings(),
            seed=rng.alternative_seed(self.request.seed, self.index),
            stopped_by=stopped_by,
            logprobs=None if self.request.params.logprobs is None else tuple(self._logprobs),
            prompt_logprobs=None if self._prompt_logprobs is None else tuple(self._prompt_logprobs),
            error=None if failure is None else str(failure),
            failure=failure,
            dropped=self.request.dropped,
            shifted=self._left_out,
        )
        self._last = Chunk(text, token, self.index, logprob, result)

    def _timings(self) -> Timings:
        now = time.perf_counter()
        started = self.started or now
        first = self._first_token or now
        return Timings(
            load=self.request.load_seconds,
            queued=started - self.submitted,
            prefill=first - started,
            decode=now - first,
            prefill_tokens=max(0, min(self.furthest, len(self.request.tokens)) - self.reused),
            decode_tokens=max(0, self.generated - 1),
            guessed_tokens=self._guessed,
            right_tokens=self._right,
        )

    def _no_token(self, token: int) -> QuarrelError:
        if token >= self.request.n_vocab:
            return EngineFault(
                f"the backend drew token {token} of a vocabulary of {self.request.n_vocab}; this is a fault in the backend"
            )
        if self.want != "logits" and not (self.listed and self.listed.bans(self._n_vocab)):
            return self._diverged()
        return RequestError(
            f"no token can be drawn behind {len(self.tokens)} tokens: every logit is banned or not a finite number; check"
            " logit_bias, or the model file",
            "logit_bias",
        )

    def _diverged(self) -> Diverged:
        return Diverged(
            f"no token can be drawn behind {len(self.tokens)} tokens: the model's numbers diverged (NaN); check the model"
            " file, or use compute='float32'",
            "compute",
        )
