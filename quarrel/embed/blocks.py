"""Rows in blocks: read and tokenized on one thread, embedded on two, yielded in order, a bounded number at a time."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from quarrel.embed.source import Row, Source
from quarrel.errors import RequestError
from quarrel.llm import Embeddings
from quarrel.llm.embeddings import EmbedOptions

if TYPE_CHECKING:
    from quarrel.llm import LLM

AHEAD = 2
"""Blocks tokenized, and blocks being embedded: one runs while the next is prepared."""


@dataclass
class Block:
    """Consecutive input rows up to `end`: the good ones with their ids, and what is wrong with the others."""

    rows: list[Row] = field(default_factory=list)
    ids: list[Sequence[int]] = field(default_factory=list)
    bad: list[Row] = field(default_factory=list)
    end: int = 0
    position: int = 0
    tokens: int = 0


class Embedded:
    """Blocks of a source after its first `skip` rows, with their embeddings. Iterate, and close."""

    def __init__(self, llm: LLM, source: Source, options: EmbedOptions, size: int, skip: int) -> None:
        self._llm, self._source, self._options, self._size, self._skip = llm, source, options, size, skip
        self._ready: queue.Queue[Block | BaseException | None] = queue.Queue(AHEAD)
        self._stop = threading.Event()
        self._prefix = llm.embedding_prefix(options.prefix)
        self._reader = threading.Thread(target=self._read, name="quarrel-embed-read", daemon=True)
        self._pool = ThreadPoolExecutor(AHEAD, "quarrel-embed")
        self._reader.start()

    def __iter__(self) -> Iterator[tuple[Block, Embeddings]]:
        running: deque[tuple[Block, Future[Embeddings]]] = deque()
        over = False
        while running or not over:
            while not over and len(running) < AHEAD:
                item = self._ready.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    over = True
                else:
                    running.append((item, self._pool.submit(self._embed, item)))
            if running:
                block, future = running.popleft()
                yield block, future.result()

    def close(self) -> None:
        """Ends the threads. What is being embedded runs to its end."""
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        while self._reader.is_alive():
            try:
                self._ready.get(timeout=0.05)
            except queue.Empty:
                continue

    def _embed(self, block: Block) -> Embeddings:
        keywords: Any = vars(replace(self._options, prefix=None))  # the ids begin with it already
        embeddings = self._llm.embed(list(block.ids), **keywords)
        block.tokens = embeddings.total_tokens
        return embeddings

    def _read(self) -> None:
        try:
            block = Block()
            for row in self._source.rows():
                if row.number < self._skip:
                    continue
                self._add(block, row)
                if len(block.rows) + len(block.bad) >= self._size:
                    self._put(block)
                    block = Block()
                if self._stop.is_set():
                    return
            if block.end:
                self._put(block)
            self._put(None)
        except BaseException as error:
            self._put(error)

    def _add(self, block: Block, row: Row) -> None:
        ids: list[int] = []
        fault = row.fault
        if fault is None:
            try:
                ids = self._llm.tokenize(self._prefix + row.text)
            except RequestError as error:
                fault = str(error)
            fault = fault or self._unfit(len(ids))
        block.end, block.position = row.number + 1, row.position
        if fault is None:
            block.rows.append(row)
            block.ids.append(ids)
        else:
            block.bad.append(Row(row.number, row.text, row.position, row.doc_id, row.columns, fault))

    def _unfit(self, tokens: int) -> str | None:
        if not tokens:
            return "it has no tokens"
        if tokens > self._llm.n_ctx and self._options.chunk is None:
            return f"it has {tokens} tokens and the context holds {self._llm.n_ctx}; --chunk cuts long texts"
        return None

    def _put(self, item: Block | BaseException | None) -> None:
        while not self._stop.is_set():
            try:
                self._ready.put(item, timeout=0.1)
                return
            except queue.Full:
                continue
