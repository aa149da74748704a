"""Texts to one row each: which tokens run, in which order, and how their rows are pooled.

An encoder's texts are packed into steps as they are tokenized, and its step makes the row of each. A decoder's run through
the scheduler, longest first, and are pooled here.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from quarrel.engine import Deliver, Loop, Packed, Scoring
from quarrel.errors import ContextOverflow, QuarrelError, QueueFull, RequestError
from quarrel.llm.embeddings import Chunking, Pooling, Progress
from quarrel.tokenizer import Tokenizer

Array = npt.NDArray[Any]
Finish = Callable[[Array, int], Array]
"""Turns pooled rows into vectors; the number of rows before them is for its errors."""

IN_FLIGHT = 512
"""Pieces queued with the engine at a time: some steps of them, so that it never waits, whatever the number of texts."""
STEPS_AHEAD = 4
"""Packed steps queued with it: one or two run, the others wait for the device and not for the tokenizer."""


@dataclass(frozen=True)
class Piece:
    """Token ids of a text, or of a part of it."""

    text: int
    ids: Sequence[int]


def pieces_of(text: int, ids: Sequence[int], tokenizer: Tokenizer, chunk: Chunking | None, n_ctx: int) -> Iterator[Piece]:
    """The text as one piece, or as overlapping ones, each with the special tokens around it that the whole has."""
    if not len(ids):
        raise RequestError(f"text {text} has no tokens, and the model has none to begin a text with; give it some text")
    size = n_ctx if chunk is None else chunk.size
    if len(ids) <= size:
        yield Piece(text, ids)
        return
    if chunk is None:
        raise ContextOverflow(
            f"text {text} is too large: {len(ids)} tokens, and the context holds {n_ctx}: shorten it, or ask for chunks"
            f" (chunk={n_ctx})",
            "chunk",
        )
    head = 1 if tokenizer.add_bos and ids[0] == tokenizer.bos_id else 0
    tail = 1 if tokenizer.add_eos and ids[-1] in (tokenizer.eos_id, tokenizer.sep_id) else 0
    middle, step = ids[head : len(ids) - tail], size - head - tail - chunk.overlap
    if step < 1:
        raise RequestError(
            f"chunks of {size} tokens leave no room beside {head + tail} special ones and an overlap of {chunk.overlap}:"
            " make them longer, or the overlap smaller"
        )
    for start in range(0, max(1, len(middle) - chunk.overlap), step):
        part = middle[start : start + step + chunk.overlap]
        yield Piece(text, [*ids[:head], *part, *ids[len(ids) - tail :]])


class _Pool(Deliver):
    """Makes one row of the rows of a piece, in float64 where it adds."""

    def __init__(self, pooling: Pooling, tokens: int, out: Array, done: Callable[[QuarrelError | None], None]) -> None:
        self._pooling, self._tokens, self._out, self._done = pooling, tokens, out, done
        self._sum: Array | None = None

    def rows(self, start: int, rows: Array) -> None:
        if self._pooling == "cls":
            if start == 0:
                self._out[:] = rows[0]
        elif self._pooling == "last":
            if start + len(rows) == self._tokens:
                self._out[:] = rows[-1]
        else:
            part = rows.sum(axis=0, dtype=np.float64)
            self._sum = part if self._sum is None else self._sum + part
            if start + len(rows) == self._tokens:
                self._out[:] = self._sum / self._tokens

    def end(self, failure: QuarrelError | str | None) -> None:
        self._done(QuarrelError(failure) if isinstance(failure, str) else failure)


class _Parcel(Deliver):
    """The rows of packed texts; `first` is the index of the first."""

    def __init__(self, first: int, done: Callable[[_Parcel, QuarrelError | None], None]) -> None:
        self.first, self._done = first, done
        self.out: Array | None = None

    def rows(self, start: int, rows: Array) -> None:
        rows = np.array(rows, np.float32)
        self.out = rows if self.out is None else np.concatenate([self.out, rows])

    def end(self, failure: QuarrelError | None) -> None:
        self._done(self, failure)


class PackedRun:
    """Runs pieces as they come, packed into steps."""

    def __init__(
        self,
        loop: Loop,
        pieces: Iterator[tuple[Piece, int]],
        width: int,
        pooling: Pooling,
        finish: Finish,
        step_tokens: int,
    ) -> None:
        """pieces: each with the number of texts from its own on, for the progress."""
        self._loop, self._pieces, self._width, self._most = loop, pieces, width, step_tokens
        self._finish = finish
        self._left = 0
        self._row: Literal["mean", "first", "last"] = {"mean": "mean", "last": "last"}.get(pooling, "first")  # type: ignore[assignment]
        self._ended: queue.SimpleQueue[tuple[_Parcel | None, QuarrelError | None]] = queue.SimpleQueue()

    def cancel(self) -> None:
        """From any thread: `result` raises soon."""
        self._ended.put((None, QuarrelError("the run was cancelled")))

    def result(self, progress: Progress | None = None) -> Array:
        """The finished rows in the pieces' order. When it raises, the rest is cancelled."""
        parcels: list[_Parcel] = []
        running: dict[_Parcel, Packed] = {}
        done = packed_texts = 0

        def finish_one() -> None:
            nonlocal done
            parcel, error = self._ended.get()
            if error is not None:
                raise error
            assert parcel is not None
            assert parcel.out is not None
            # Now and not at the end: the device runs the next ones meanwhile.
            parcel.out = self._finish(parcel.out, parcel.first)
            done += len(parcel.out)
            del running[parcel]
            if progress is not None:
                progress(done, packed_texts + self._left)

        try:
            for pack in self._packs():
                parcel = _Parcel(packed_texts, lambda parcel, error: self._ended.put((parcel, error)))
                packed = Packed(pack, self._row, parcel)
                packed_texts += len(pack)
                while len(running) >= STEPS_AHEAD or not self._ended.empty():
                    finish_one()
                while True:
                    try:
                        self._loop.add(packed)
                        break
                    except QueueFull:
                        if not running:
                            raise  # it is full of others' texts
                        finish_one()
                parcels.append(parcel)
                running[parcel] = packed  # only what was queued needs to be cancelled
            while running:
                finish_one()
        except BaseException:
            self._loop.cancel(*running.values())
            raise
        rows = [parcel.out for parcel in parcels if parcel.out is not None]
        return np.concatenate(rows) if rows else self._finish(np.empty((0, self._width), np.float32), 0)

    def _packs(self) -> Iterator[list[Sequence[int]]]:
        """Consecutive pieces that fit one step."""
        pack: list[Sequence[int]] = []
        room = self._most
        for piece, left in self._pieces:
            self._left = left
            if len(piece.ids) > room:
                yield pack
                pack, room = [], self._most
            pack.append(piece.ids)
            room -= len(piece.ids)
        self._left = 0
        if pack:
            yield pack


class Run:
    """Runs pieces longest first, a bounded number queued, each pooled as its rows come."""

    def __init__(self, loop: Loop, pieces: Sequence[Piece], width: int, pooling: Pooling, finish: Finish) -> None:
        self.rows = np.empty((len(pieces), width), np.float32)
        self._loop, self._pieces, self._pooling, self._finish = loop, pieces, pooling, finish
        self._ended: queue.SimpleQueue[tuple[int, QuarrelError | None]] = queue.SimpleQueue()

    def cancel(self) -> None:
        """From any thread: `result` raises soon."""
        self._ended.put((-1, QuarrelError("the run was cancelled")))

    def result(self, progress: Progress | None = None) -> Array:
        """The finished rows in the pieces' order. When it raises, the rest is cancelled."""
        order = sorted(range(len(self._pieces)), key=lambda i: -len(self._pieces[i].ids))
        running: dict[int, Scoring] = {}
        total, done, queued, most = len(order), 0, 0, IN_FLIGHT
        try:
            while done < total:
                if queued < total and len(running) <= most // 2:
                    fresh = {i: self._sequence(i) for i in order[queued : queued + most - len(running)]}
                    try:
                        self._loop.add(*fresh.values())
                    except QueueFull:
                        if len(fresh) > 1:
                            most = len(running) + len(fresh) // 2
                            continue
                        if not running:
                            raise  # it is full of others' texts
                    else:
                        running |= fresh  # only what was queued needs to be cancelled
                        queued += len(fresh)
                index, error = self._ended.get()
                if error is not None:
                    raise error
                del running[index]
                done += 1
                if progress is not None:
                    progress(done, total)
        except BaseException:
            self._loop.cancel(*running.values())
            raise
        return self._finish(self.rows, 0)

    def _sequence(self, i: int) -> Scoring:
        ids = self._pieces[i].ids
        pool = _Pool(self._pooling, len(ids), self.rows[i], lambda error: self._ended.put((i, error)))
        return Scoring(ids, "hidden", pool)
