"""The store that the client is tested on: the stand-in, or a real one where LONGBOW_ADDR names its data port."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa

from quarrel.flight import Access, LongbowClient, Retry
from quarrel.flight.local_server import LocalServer
from quarrel.flight.store import Store
from quarrel.flight.tickets import passing

REAL = os.environ.get("LONGBOW_ADDR", "")
"""Such as grpc://127.0.0.1:3000; the meta port is LONGBOW_META_ADDR, or the next one."""

QUICK = Retry(attempts=3, first=0.01, longest=0.02)


def real_meta() -> str:
    host, _, port = REAL.rpartition(":")
    return os.environ.get("LONGBOW_META_ADDR", f"{host}:{int(port) + 1}")


@contextmanager
def a_store(store: Store | None = None) -> Iterator[LongbowClient]:
    """A client of the real store, or of a stand-in with all of its faults, unless `store` is another one."""
    if REAL:
        with LongbowClient(REAL, real_meta()) as client:
            yield client
        return
    with LocalServer(store=store) as server:
        with LongbowClient(server.data, server.meta, access=Access(timeout=10), retry=QUICK) as client:
            yield client


class Swapped(Store):
    """Compares in blocks of 8 rows the wrong way round, and the rest of each batch rightly, as a Longbow does with AVX-512:
    of 300 rows, `id < 10` gives 285, and none of those below 10."""

    def table(self, name: str, filters: Any, *, indexed: bool = False) -> pa.Table:
        rows = super().table(name, [], indexed=indexed)
        other = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
        wrong = [f | {"operator": other.get(f["operator"], f["operator"])} for f in filters]
        parts = [rows.schema.empty_table()]
        for batch in rows.to_batches():
            blocks = batch.num_rows // 8 * 8
            for part, said in ((batch.slice(0, blocks), wrong), (batch.slice(blocks), filters)):
                parts.append(passing(pa.Table.from_batches([part]), said, silent=True))
        return pa.concat_tables(parts)


def a_name() -> str:
    """Of a dataset that nobody else has."""
    return f"quarrel-test-{uuid.uuid4().hex[:12]}"


def some_vectors(n: int, dim: int = 16, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, dim)).astype(np.float32)
