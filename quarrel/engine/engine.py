"""The engine without its thread: one step at a time, and what it does to the sequences in it.

Where a backend's launch returns before its step is over, the next one is prepared and launched meanwhile: the tokens that
it continues from are still on the device (`from_last`), and reach their sequences one step late. A sequence that turns out
to be over is in one step too many; that token is nobody's, and its blocks may be given away at once, because launches run
in order. A step whose draws must be known here, because the host draws them or guesses what follows, is waited for.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from quarrel.engine.cache import DEFAULT_RULES, Cache, CacheRules
from quarrel.engine.draft import Drafter, MakeDrafter
from quarrel.engine.images import EncodesImages, ImageRows, SightRules
from quarrel.engine.inputs import Inputs
from quarrel.engine.packed import laid_out
from quarrel.engine.results import FinishReason
from quarrel.engine.scheduler import DRAIN, Batch, Part, Scheduler
from quarrel.engine.sequence import Array, Sequence
from quarrel.engine.stats import Stats
from quarrel.errors import DeadlineExceeded, Diverged, EngineFault, OutOfMemory, QuarrelError
from quarrel.ops.profile import Profiles
from quarrel.ops.step import Done, KeepsStates, Pending, Rows, Step, StepInputs, StepOutputs, Want

log = logging.getLogger(__name__)

ROW_BUDGET = 1 << 26
"""What one step returns at most, counted in numbers (256 MiB)."""
MAX_FAULTS = 3
"""Steps that may break one after the other; then the device is given up."""
RECOVERY = 64
"""Steps without a fault after which a token budget that was halved when memory ran out is doubled again."""


@dataclass(frozen=True)
class Activity:
    """How busy it is."""

    running: int
    waiting: int
    free_blocks: int
    n_blocks: int
    kept_blocks: int
    snapshots: int = 0
    preempted: int = 0
    """So many times, since it was loaded."""
    evictions: int = 0


@dataclass
class _InFlight:
    batch: Batch
    pending: Pending
    launched: float
    again: set[Sequence] = field(default_factory=set)
    """Sequences that begin again: what this launch says of them is not wanted."""


class Engine:
    """Runs sequences on a step. Not safe for threads: `Loop` owns it.

    make_step: makes the step, and makes it again when one broke. width: of the widest row that may be wanted. ended: called
    with each sequence that has finished. make_drafter: makes the draft model's part, likewise. profile_steps: one step in
    so many is timed by its parts, if the step can do that; 0 is none. beside: as the scheduler's. sight: how the model
    takes images. make_encoder: makes what encodes them.
    """

    def __init__(
        self,
        make_step: Callable[[], Step],
        width: int,
        rules: CacheRules = DEFAULT_RULES,
        *,
        ended: Callable[[Sequence], None] = lambda sequence: None,
        clock: Callable[[], float] = time.perf_counter,
        make_drafter: MakeDrafter | None = None,
        profile_steps: int = 0,
        beside: int | None = None,
        sight: SightRules | None = None,
        make_encoder: Callable[[], EncodesImages] | None = None,
    ) -> None:
        self.step = make_step()
        self.images = None if make_encoder is None or sight is None else ImageRows(make_encoder(), sight.width)
        self._make_encoder = make_encoder
        self.drafter = None if make_drafter is None else make_drafter()
        self._make_drafter = make_drafter
        self.stats = Stats()
        self.cache = Cache(self.step.limits, self._copy_blocks, self._copy_states, rules)
        rows = ROW_BUDGET // width
        self.scheduler = Scheduler(
            self.step.limits, self.cache, max_rows=rows, clock=clock, propose=self._propose, beside=beside
        )
        self._make_step, self._ended, self._clock = make_step, ended, clock
        self._inputs = Inputs(self.step.limits, self.cache, sight)
        self._in_flight: _InFlight | None = None
        self._deadlines: list[tuple[float, int, Sequence, bool]] = []
        self._broken, self._good_steps = 0, 1
        self._counted = 0.0
        self._profile_steps, self._launches = profile_steps, 0

    def add(self, sequence: Sequence, waited: float = 0.0) -> None:
        """waited: seconds for which a step kept it from coming here; they count against its deadlines."""
        self.scheduler.add(sequence)
        if len(self._deadlines) > 4 * (len(self.scheduler.running) + len(self.scheduler.waiting)) + 64:
            # Most are of sequences that are over: nobody should keep those until their deadline.
            self._deadlines = [d for d in self._deadlines if not d[2].finished]
            heapq.heapify(self._deadlines)
        for seconds, whole in ((sequence.queue_seconds, False), (sequence.total_seconds, True)):
            if seconds is not None:
                end = self._clock() - waited + seconds
                heapq.heappush(self._deadlines, (end, 2 * sequence.order + whole, sequence, whole))

    def cancel(self, sequence: Sequence) -> None:
        """Ends it as cancelled, unless it is over."""
        if not sequence.finished:
            self._end(sequence, "cancelled")

    def end_all(self, reason: FinishReason, failure: QuarrelError | None = None) -> None:
        """Ends whatever waits or runs."""
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            self._end(sequence, reason, failure)

    def close(self) -> None:
        """Waits for the step in flight, and frees the step's memory. All sequences must have finished."""
        flight, self._in_flight = self._in_flight, None
        if flight is not None:
            try:
                flight.pending.result()
            except Exception:
                log.info("the last step broke", exc_info=True)
        self.cache.prefixes.clear()
        self._close_drafter()
        if self.images is not None:
            self.images.close()
        self.step.close()

    def advance(self) -> bool:
        """Launches a step and handles the results of the one before; False if there was nothing to do."""
        if self._deadlines:
            self._expire()
        if self._in_flight is not None and self._in_flight.batch.waits and not _whole(self._in_flight.batch):
            self.finish()
        batch = self.scheduler.next(drained=self._in_flight is None)
        if batch is DRAIN:
            self.finish()
            batch = self.scheduler.next()
        if batch is None:
            busy = self._in_flight is not None or len(self.scheduler.waiting) > 0
            self.finish()
            return busy
        self._launch(batch)
        return True

    def activity(self) -> Activity:
        s, cache = self.scheduler, self.cache
        return Activity(
            running=len(s.running),
            waiting=len(s.waiting),
            free_blocks=cache.pool.free,
            n_blocks=cache.pool.n_blocks,
            kept_blocks=cache.prefixes.kept,
            snapshots=len(cache.snapshots),
            preempted=s.preempted,
            evictions=cache.prefixes.evictions,
        )

    def _launch(self, batch: Batch) -> None:
        now = time.perf_counter()
        try:
            inputs = laid_out(self._inputs.of(batch, self._rows(batch)), batch.parts, self.step.limits.block_size)
            self.cache.guard([p.sequence for p in batch.parts if p.draft])
            pending = self._start(inputs, batch.want)
        except Exception as error:
            restarts = self.stats.restarts
            self.finish()  # the step in flight is not concerned, if it returns
            if self.stats.restarts == restarts:
                soft = isinstance(error, QuarrelError) and not isinstance(error, EngineFault)
                self._fail([batch], error, soft=soft)
            return
        self._advance(batch, now)
        if batch.waits:
            self._prepare(batch)
        before, self._in_flight = self._in_flight, _InFlight(batch, pending, now)
        if before is not None:
            self._finish_step(before)
        if isinstance(pending, Done):
            self.finish()

    def _rows(self, batch: Batch) -> Mapping[bytes, Rows]:
        """Of the batch's images; those that running sequences still have before them are encoded with them."""
        if self.images is None:
            return {}
        seen = [(p.sequence.sight, p.start, p.start + p.count) for p in batch.parts]
        wanted = [image for sight, start, end in seen if sight is not None for image in sight.between(start, end)]
        running = ((s.sight, s.computed, s.n_prompt) for s in self.scheduler.running)
        soon = (image for sight, start, end in running if sight is not None for image in sight.between(start, end))
        return self.images.of(wanted, soon) if wanted else {}

    def _start(self, inputs: StepInputs, want: Want) -> Pending:
        self._launches += 1
        if not self._profile_steps or self._launches % self._profile_steps or not isinstance(self.step, Profiles):
            return self.step.launch(inputs, want)
        profiled = self.step.profile(inputs, want)
        self.stats.timed(profiled)
        return Done(profiled.outputs)

    def _prepare(self, batch: Batch) -> None:
        for part in batch.parts:
            if part.rows and part.sequence.waits:
                try:
                    part.sequence.prepare()
                except Exception as error:
                    log.info("a sequence could not be prepared", exc_info=error)
                    self._end(part.sequence, "error", _failure(error))

    def _advance(self, batch: Batch, now: float) -> None:
        row = 0
        for part in batch.parts:
            s = part.sequence
            if not s.started:
                s.started, s.reused = now, part.start
                self.stats.queue_seconds.add(now - s.submitted)
                self.stats.known_tokens += part.start
            s.computed = at = part.start + part.count
            if at > s.furthest:
                s.furthest = at
            self.cache.commit(s)
            if part.rows and not batch.waits:
                s.drawn += 1
                s.row = row
            row += part.rows

    def computes(self, blocks: Collection[int]) -> bool:
        """Whether a sequence with one of these blocks is in the step in flight."""
        flight = self._in_flight
        return flight is not None and any(_may_share(part, set(blocks)) for part in flight.batch.parts)

    def finish(self) -> None:
        """Waits for the step in flight and handles its results."""
        flight, self._in_flight = self._in_flight, None
        if flight is not None:
            self._finish_step(flight)

    def _finish_step(self, flight: _InFlight) -> None:
        try:
            outputs = flight.pending.result()
        except Exception as error:
            later, self._in_flight = self._in_flight, None
            self._fail([flight.batch, *([later.batch] if later else [])], error, soft=False)
            return
        self._count(flight)
        row, now = 0, time.perf_counter()
        gaps: list[float] = []
        token = 0
        for part in flight.batch.parts:
            again, run = part.sequence in flight.again, part.count
            if part.rows and not flight.batch.waits and not again:
                part.sequence.drawn -= 1
            if part.rows and not part.sequence.finished and not again:
                if part.sequence.cache.found and _diverges(part, outputs, row):
                    self._begin_again(part.sequence)
                    again = True
                else:
                    run -= self._settle(part, outputs, row, now, gaps)
            if outputs.stream is not None and part.sequence.drafts and not part.sequence.finished and not again:
                self._observe(part, outputs.stream[token : token + run])
            if not part.rows and not part.sequence.finished and not again:
                part.sequence.ran(part.start + part.count)
            row, token = row + part.rows, token + part.count
        # Most have waited since the same step.
        for seconds, times in Counter(gaps).items():
            self.stats.token_seconds.add(seconds, times)

    def _begin_again(self, sequence: Sequence) -> None:
        """Without the prefix that it found: it may be that of a text that diverged, whose wrong numbers reach back within a
        tile of keys to rows before the token that they came from."""
        log.info("a sequence diverged behind a cached prefix; it runs again without one")
        self.cache.invalidate(sequence)
        if self._in_flight is not None:
            self._in_flight.again.add(sequence)
        sequence.drawn = 0
        self.scheduler.preempt(sequence)

    def _settle(self, part: Part, outputs: StepOutputs, row: int, now: float, gaps: list[float]) -> int:
        """Hands the results over, and says how many tokens of a draft were wrong."""
        sequence = part.sequence
        before = len(sequence.tokens)
        try:
            right = sequence.accept(outputs, row, part.rows, part.draft)
        except Exception as error:
            # A caller's sink that raises, or a text that cannot be decoded, concerns this sequence alone.
            log.exception("a sequence failed behind its step")
            if part.draft:
                self._take_back(part, 0)
            self._end(sequence, "error", _failure(error))
            return 0
        if part.draft:
            self._take_back(part, right)
            self.stats.guesses += 1
            self.stats.guessed_tokens += len(part.draft)
            self.stats.right_tokens += right
            if part.drafted:
                self.stats.drafted_tokens += len(part.draft)
                self.stats.drafted_right += right
        new = len(sequence.tokens) - before
        if new:
            self.stats.drawn_tokens += new
            if sequence.last_token:
                gaps.append((now - sequence.last_token) / new)
            else:
                self.stats.first_token_seconds.add(now - sequence.submitted)
            sequence.last_token = now
        if sequence.finished:
            self._end(sequence, "stop")
        elif sequence.full:
            self._shorten(sequence)
        return len(part.draft) - right

    def _shorten(self, sequence: Sequence) -> None:
        """Its context is full: it goes on with fewer tokens. No step with it is in flight, as none was left to run."""
        with self._drafting() as drafter:
            if drafter is not None:
                drafter.forget(sequence)
        self._inputs.leave(sequence)
        self.scheduler.preempt(sequence)
        self.scheduler.preempted -= 1
        sequence.shorten()

    def _take_back(self, part: Part, right: int) -> None:
        """Behind a draft so many of whose tokens were right. Others are in the cache behind them, and will be overwritten;
        a state that has seen them is taken back to where the launch began, and the right ones run again."""
        if right == len(part.draft) or not self.cache.roll_back(part.sequence, part.start):
            part.sequence.computed = part.start + part.count - len(part.draft) + right

    def _count(self, flight: _InFlight) -> None:
        stats, parts = self.stats, flight.batch.parts
        now = time.perf_counter()
        stats.steps += 1
        stats.step_seconds.add(now - flight.launched)
        # Launches overlap: the time of a step is what has passed since the one before it was over.
        seconds, self._counted = now - max(flight.launched, self._counted), now
        stats.batch_sequences.add(len(parts))
        tokens = sum(p.count for p in parts)
        stats.batch_tokens.add(tokens)
        prompt = sum(p.count for p in parts if p.start < p.sequence.n_prompt)
        stats.prompt_tokens += prompt
        if prompt:
            stats.prefill_seconds += seconds
        else:
            stats.decode_seconds += seconds
            stats.decode_steps += 1
            stats.decode_tokens += tokens
        self._broken, self._good_steps = 0, self._good_steps + 1
        if self._good_steps % RECOVERY == 0:
            self.scheduler.max_tokens = min(2 * self.scheduler.max_tokens, self.step.limits.max_tokens)

    def _fail(self, batches: list[Batch], error: Exception, *, soft: bool) -> None:
        """What follows from a step that broke: inputs that were refused (soft) end their requests; so does a fault of the
        device, which takes the cache with it; where memory was short, smaller steps are tried."""
        again, self._good_steps = self._good_steps == 0, 0
        sequences = {id(p.sequence): p.sequence for batch in batches for p in batch.parts}
        for sequence in sequences.values():
            sequence.drawn = 0
        alive = [s for s in sequences.values() if not s.finished]
        short = _is_out_of_memory(error)
        least = sum(p.sequence.pieces(p.start, p.start + p.count) for p in batches[0].parts) == 1
        if short and not (again and least):
            log.warning("a step of %d sequences ran out of memory; smaller ones follow", len(alive))
            self.scheduler.max_tokens = max(1, self.scheduler.max_tokens // 2)
            self._requeue(alive)
            return
        self.stats.faults += 1
        # What was launched behind a step that can be no smaller was not short of memory.
        lost = [p.sequence for p in batches[0].parts if not p.sequence.finished] if short else alive
        log.log(logging.INFO if soft else logging.ERROR, "a step of %d sequences failed", len(lost), exc_info=error)
        for sequence in lost:
            self.cache.invalidate(sequence)
            self._end(sequence, "error", _failure(error))
        if short:
            self._requeue([s for s in alive if not s.finished])
        elif not soft:
            self._restart(error)

    def _restart(self, error: Exception) -> None:
        self._broken += 1
        if self._broken > MAX_FAULTS:
            raise EngineFault(f"{self._broken} steps failed one after the other, the last one so: {error}") from error
        self._requeue(list(self.scheduler.running))
        self.cache.prefixes.clear()
        self._close_drafter()
        try:
            self.step.close()
        except Exception:
            log.exception("a broken step could not be closed")
        self.step = self._make_step()
        self._make_images_again()
        self.stats.restarts += 1
        if self._make_drafter is not None:
            try:
                self.drafter = self._make_drafter()
            except Exception:
                log.exception("the draft model could not be made again; the engine goes on without drafts")

    def _make_images_again(self) -> None:
        if self.images is not None and self._make_encoder is not None:
            try:
                self.images.close()
            except Exception:
                log.exception("a tower could not be closed")
            self.images = ImageRows(self._make_encoder(), self.images.width)

    def _propose(self, wanted: Mapping[Sequence, int]) -> Mapping[Sequence, tuple[int, ...]]:
        """What the draft model proposes. One that breaks is not used again before a restart: no request depends on it."""
        found: dict[Sequence, tuple[int, ...]] = {}
        with self._drafting() as drafter:
            if drafter is not None:
                found = drafter.propose(wanted)
        return found

    def _observe(self, part: Part, rows: Array) -> None:
        with self._drafting() as drafter:
            if drafter is not None:
                drafter.observe(part.sequence, part.start, rows)

    @contextmanager
    def _drafting(self) -> Iterator[Drafter | None]:
        try:
            yield self.drafter
        except Exception:
            log.exception("the draft model broke; the engine goes on without drafts")
            self._close_drafter()

    def _close_drafter(self) -> None:
        drafter, self.drafter = self.drafter, None
        if drafter is None:
            return
        try:
            drafter.close()
        except Exception:
            log.exception("the draft model could not be closed")

    def _requeue(self, sequences: list[Sequence]) -> None:
        """Back to the queue, to begin again with nothing of what is on the device."""
        for sequence in sequences:
            keeps, sequence.keeps_prefix = sequence.keeps_prefix, False
            if sequence.slot >= 0:
                self.scheduler.preempt(sequence)
            sequence.keeps_prefix = keeps

    def _expire(self) -> None:
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, sequence, whole = heapq.heappop(self._deadlines)
            if sequence.finished or not (whole or not sequence.started):
                continue
            seconds = sequence.total_seconds if whole else sequence.queue_seconds
            what = "was not done" if whole else "had not begun"
            sentence = f"the request {what} after the {seconds:g} seconds that it was given: give it more time"
            self._end(sequence, "error", DeadlineExceeded(sentence))

    def _end(self, sequence: Sequence, reason: FinishReason, failure: QuarrelError | None = None) -> None:
        failure = sequence.failure or failure
        if isinstance(failure, Diverged):
            self._look_at_states(sequence)
            self.cache.invalidate(sequence)
        self.scheduler.remove(sequence)
        self._ended(sequence)  # first: its caller may send the next one at once
        try:
            sequence.end(reason, failure)
        except Exception:
            log.exception("a caller could not receive the end of its sequence")
        sequence.finished = True
        now = time.perf_counter()
        self.stats.ended(now, sequence.submitted)
        self.stats.ends[type(failure).__name__ if failure is not None else sequence.outcome or reason] += 1
        self.stats.request_seconds.add(now - sequence.submitted)

    def _look_at_states(self, sequence: Sequence) -> None:
        """A state that is not finite spoils the logits of the same step, so this is soon enough."""
        if sequence.slot < 0 or not isinstance(self.step, KeepsStates):
            return
        try:
            self.stats.diverged_states += not self.step.finite_states(sequence.slot)
        except Exception:
            log.info("the states of a sequence that diverged could not be read", exc_info=True)

    def _copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        self.step.copy_blocks(pairs)

    def _copy_states(self, pairs: list[tuple[int, int]]) -> None:
        self.step.copy_states(pairs)


def _diverges(part: Part, outputs: StepOutputs, row: int) -> bool:
    """Whether a result that the part wants is no number; behind a draft the first, as others may be of wrong tokens."""
    rows = slice(row, row + (1 if part.draft else part.rows))
    if part.sequence.want == "logits":
        return outputs.logits is not None and bool(np.isnan(outputs.logits[rows]).any())
    return outputs.tokens is not None and bool((outputs.tokens[rows] < 0).any())


def _whole(batch: Batch) -> bool:
    """Whether all in it ends with it, so that no step behind it waits for its results."""
    return all(p.sequence.whole for p in batch.parts)


def _is_out_of_memory(error: Exception) -> bool:
    # A framework's own type, such as torch.OutOfMemoryError, is known by its name: no framework is named here.
    return isinstance(error, MemoryError | OutOfMemory) or type(error).__name__ in ("OutOfMemoryError", "CudaOutOfMemory")


def _failure(error: Exception) -> QuarrelError:
    if isinstance(error, QuarrelError):
        return error
    if _is_out_of_memory(error):
        return OutOfMemory(f"the smallest step found too little memory ({error!r}): free some, or load the model for less")
    return EngineFault(f"the step failed: {type(error).__name__}: {error}")


def _may_share(part: Part, blocks: set[int]) -> bool:
    """Whether its sequence has one of these, or had to give its own away."""
    own = part.sequence.cache.blocks
    return not own or not blocks.isdisjoint(own)
