"""A small encoder, a store that can be killed, and pipelines between them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from quarrel.embed.checkpoint import Checkpoint
from quarrel.embed.pipeline import Layout, Pipeline
from quarrel.embed.sinks import FlightSink, Sink
from quarrel.embed.source import Wanted, open_source
from quarrel.flight import Access, LongbowClient, Retry
from quarrel.flight.local_server import LocalServer
from quarrel.flight.store import Store
from quarrel.llm import LLM
from quarrel.llm.embeddings import EmbedOptions

QUICK = Retry(attempts=2, first=0.01, longest=0.02)


class Town:
    """A stand-in that may be killed and begin again; what it holds stays, as Longbow's log does."""

    def __init__(self) -> None:
        self.store = Store()
        self._server = LocalServer(store=self.store)
        self.data, self.meta = self._server.data, self._server.meta

    def client(self) -> LongbowClient:
        return LongbowClient(self.data, self.meta, access=Access(timeout=10), retry=QUICK)

    def down(self) -> None:
        self._server.kill()

    def up(self) -> None:
        self._server.restart()

    def rows(self, name: str = "d") -> dict[int, dict[str, Any]]:
        """All rows by id; fails where one is there twice."""
        table = self.store.table(name, [])
        rows = table.to_pylist()
        by_id = {row["id"]: row for row in rows}
        assert len(by_id) == len(rows), "a row is there twice"
        return by_id


def pipeline(
    llm: LLM,
    path: Path,
    sink: Sink | LongbowClient,
    *,
    options: EmbedOptions | None = None,
    wanted: Wanted | None = None,
    layout: Layout | None = None,
    size: int = 16,
    patience: float = 20.0,
    progress: Callable[[int, int, int], None] | None = None,
) -> Pipeline:
    layout = layout or Layout()
    to: Sink = FlightSink(sink, "d", layout.first_id, patience) if isinstance(sink, LongbowClient) else sink
    checkpoint = Checkpoint(path.with_name("checkpoint"), {"input": str(path)})
    letters = path.with_name("bad.jsonl")
    source = open_source(str(path), wanted or Wanted())
    return Pipeline(llm, source, options or EmbedOptions(), to, layout, checkpoint, letters, size, progress)
