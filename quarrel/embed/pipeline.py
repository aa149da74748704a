"""The whole run: rows in, vectors out, a checkpoint of what is safe, a file of the bad rows."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from quarrel.embed.blocks import Block, Embedded
from quarrel.embed.checkpoint import Checkpoint, DeadLetters, State
from quarrel.embed.lock import alone
from quarrel.embed.sinks import Sink
from quarrel.embed.source import Source
from quarrel.flight.rows import Metric, vector_batch
from quarrel.llm import Embeddings
from quarrel.llm.embeddings import EmbedOptions

if TYPE_CHECKING:
    from quarrel.llm import LLM

SAVE_SECONDS = 0.5

Progress = Callable[[int, int, int], None]
"""Called with the position in the input, its size, and the vectors that are safe."""


@dataclass(frozen=True)
class Summary:
    """What a run did. rows, vectors: of the input and in the target, in all runs together; the rest is of this one.
    resumed: input rows that an earlier run had done. present: vectors that the target had, and the checkpoint not."""

    rows: int
    bad: int
    vectors: int
    sent: int
    present: int
    tokens: int
    resumed: int
    seconds: float
    finished: bool


@dataclass(frozen=True)
class Layout:
    """What rows look like: the first id, whether texts go along, and the store's measure."""

    first_id: int = 0
    keep_text: bool = True
    metric: Metric = "cosine"


class Pipeline:
    """Runs once. `size`: input rows of a block."""

    def __init__(
        self,
        llm: LLM,
        source: Source,
        options: EmbedOptions,
        sink: Sink,
        layout: Layout,
        checkpoint: Checkpoint,
        letters: Path,
        size: int = 256,
        progress: Progress | None = None,
    ) -> None:
        self._llm, self._source, self._options, self._sink, self._layout = llm, source, options, sink, layout
        self._checkpoint, self._letters_path, self._size, self._progress = checkpoint, letters, size, progress
        self._pending: deque[tuple[int, State, int]] = deque()  # vectors up to a block, the state then, its position
        self._tokens = 0
        self._saved = 0.0

    def run(self) -> Summary:
        """Everything, from the checkpoint on. What is safe is saved whichever way it ends. RequestError where another
        process is filling the same target."""
        with alone(self._sink.target):
            return self._run()

    def _run(self) -> Summary:
        began = time.perf_counter()
        resumed = self._checkpoint.path.exists()
        state = start = self._checkpoint.load()
        if start.done:
            self._sink.verify(start.sent)
        else:
            keywords: Any = vars(self._options)  # refused here, if at all, before a checkpoint remembers them
            self._llm.embed([], **keywords)
            self._sink.begin(start.sent, resumed)
            self._checkpoint.save(start)
            state = self._all(start)
        return Summary(
            rows=state.rows,
            bad=state.bad,
            vectors=state.sent,
            sent=state.sent - start.sent,
            present=getattr(self._sink, "present", 0),
            tokens=self._tokens,
            resumed=start.rows,
            seconds=time.perf_counter() - began,
            finished=state.done,
        )

    def _all(self, start: State) -> State:
        self._state = start
        self._letters = DeadLetters(self._letters_path, start.letters)
        blocks = Embedded(self._llm, self._source, self._options, self._size, start.rows)
        try:
            self._sink.write(self._batches(blocks, start), self._save_safe)
            self._save_safe(force=True)
            self._sink.finish()
            self._save(replace(self._state, done=True))
            self._sink.tidy()
        finally:
            try:
                self._save_safe(force=True)
            finally:
                blocks.close()
                self._letters.close()
        return self._state

    def _batches(self, blocks: Embedded, state: State) -> Iterator[pa.RecordBatch]:
        for block, embeddings in blocks:
            for row in block.bad:
                self._letters.add(row.number, row.fault or "", row.text)
            batch = self._batch(block, embeddings, state.sent)
            self._tokens += block.tokens
            bad = state.bad + len(block.bad)
            state = State(block.end, state.sent + batch.num_rows, bad, self._letters.length)
            self._pending.append((state.sent, state, block.position))
            if batch.num_rows:
                yield batch

    def _batch(self, block: Block, embeddings: Embeddings, sent: int) -> pa.RecordBatch:
        first = self._layout.first_id + sent
        rows = [block.rows[i] for i in embeddings.texts.tolist()]
        columns: dict[str, pa.Array] = {}
        if self._layout.keep_text:
            columns["text"] = pa.array([r.text for r in rows], pa.string())
        for name in self._source.wanted.others:
            columns[name] = pa.array([r.columns.get(name) for r in rows], pa.string())
        if self._options.chunk is not None:
            columns["chunk"] = pa.array(_piece_numbers(embeddings.texts), pa.int64())
        return vector_batch(
            np.arange(first, first + len(rows)),
            embeddings.vectors,
            doc_ids=[r.doc_id if r.doc_id is not None else str(r.number) for r in rows],
            columns=columns,
            metric=self._layout.metric,
        )

    def _save_safe(self, force: bool = False) -> None:
        """Saves the state after the last safe block, now and then; a block without rows is safe with its predecessor."""
        state, position = self._state, 0
        while self._pending and self._pending[0][0] <= self._sink.safe:
            _, state, position = self._pending.popleft()
        self._state = state
        if position and self._progress is not None:
            self._progress(position, self._source.total, state.sent)
        if force or time.monotonic() - self._saved > SAVE_SECONDS:
            self._save(state)

    def _save(self, state: State) -> None:
        self._letters.flush()
        self._checkpoint.save(state)
        self._state, self._saved = state, time.monotonic()


def _piece_numbers(texts: np.ndarray[tuple[int], np.dtype[np.int32]]) -> list[int]:
    """Which piece of its text each row is: rows of a text stand together."""
    numbers: list[int] = []
    for i, text in enumerate(texts):
        numbers.append(numbers[-1] + 1 if i and texts[i - 1] == text else 0)
    return numbers
