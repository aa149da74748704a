"""Rows a second into a Flight server: the client's put and ingest beside a bare pyarrow loop, on the stand-in.

    python -m bench.serve.flight [--rows 200000] [--dim 384] [--batch 4096] [--rounds 5]

Rounds rotate over the three, and the fastest of each counts, so that other load on the machine matters least; the last line
is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
import pyarrow as pa
from pyarrow import flight

from quarrel.flight import LongbowClient, vector_batch
from quarrel.flight.local_server import LocalServer


def bare(address: str, name: str, batches: list[pa.RecordBatch]) -> None:
    """As little as the protocol allows."""
    client = flight.FlightClient(address)
    writer, reader = client.do_put(flight.FlightDescriptor.for_path(name), batches[0].schema)
    for batch in batches:
        writer.write_batch(batch)
    writer.done_writing()
    while reader.read() is not None:
        pass
    writer.close()
    client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    vectors = np.random.default_rng(0).standard_normal((args.rows, args.dim)).astype(np.float32)
    cuts = range(0, args.rows, args.batch)

    def made() -> list[pa.RecordBatch]:
        return [vector_batch(np.arange(i, min(i + args.batch, args.rows)), vectors[i : i + args.batch]) for i in cuts]

    with LocalServer() as server, LongbowClient(server.data, server.meta) as client:
        ways: dict[str, Callable[[str], object]] = {
            "pyarrow put": lambda name: bare(server.data, name, made()),
            "client put": lambda name: client.put(name, made()),
            "client ingest": lambda name: client.ingest(name, made()),
        }
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(args.rounds + 1):
            for way, send in ways.items():
                began = time.perf_counter()
                send("bench")
                if turn:  # the first warms up
                    taken[way].append(time.perf_counter() - began)
                client.delete("bench")
    rates = {way: round(args.rows / min(seconds)) for way, seconds in taken.items()}
    shares = {way: round(rate / rates["pyarrow put"], 3) for way, rate in rates.items()}
    facts = {"rows": args.rows, "dim": args.dim, "batch": args.batch, "rounds": args.rounds}
    print(json.dumps(facts | {"rows_s": rates, "share_of_pyarrow": shares}))


if __name__ == "__main__":
    main()
