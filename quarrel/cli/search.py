"""`quarrel search`: the texts of a vector store that are nearest to one."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

from quarrel.cli.flags import UsageError, load_options
from quarrel.cli.prompt import model_and_text
from quarrel.cli.store import DATA, client_of, condition_of, dataset_of
from quarrel.cli.terminal import line, note, table, tidy, visible, write_json
from quarrel.llm import load_with

if TYPE_CHECKING:
    from quarrel.flight import Hits, LongbowClient

SHOWN = ("doc_id", "text")
UNIT = 0.01
"""How far from 1 the length of a vector may be."""


def run(args: argparse.Namespace) -> int:
    model, text = model_and_text(args)
    if not text.strip():
        raise UsageError("there is no text to look for: it is empty")
    filters = [condition_of(given) for given in args.filter or ()]
    dataset = dataset_of(args)
    with client_of(args, args.source or DATA) as client:
        client.info(dataset)  # whether it is there, before a model is loaded
        with load_with(model, load_options(args)) as llm:
            made = llm.embed(
                text, pooling=args.pooling, dimensions=args.dimensions, prefix=args.prefix, normalize=args.normalize
            )
        query: list[float] = made.vectors[0].tolist()
        hits = client.search(dataset, query, args.k, filters=filters, fresh=args.fresh, rerank=args.rerank)
        rows = _rows(client, dataset, hits)
        if args.rerank is None and any(abs(math.hypot(*vector) - 1) > UNIT for vector, _ in rows.values()):
            hits = client.search(dataset, query, args.k, filters=filters, fresh=args.fresh, rerank="cosine")
            rows = _rows(client, dataset, hits)
    found = [_hit(hits, i, query, *rows.get(int(id), (None, {}))) for i, id in enumerate(hits.ids)]
    if args.json:
        write_json({"dataset": dataset, "model": model, "text": text, "ranked_by": hits.by, "hits": found})
        return 0
    if not found:
        note("nothing was found")
        return 0
    shown = "score" if hits.by == "dot_product" else "cosine"
    lines = [[f"{hit[shown]:.4f}", str(hit["id"]), *(tidy(str(hit.get(n) or ""), 100) for n in SHOWN)] for hit in found]
    for text in table(lines, right=(0, 1)):
        line(visible(text))
    return 0


def _hit(hits: Hits, i: int, query: list[float], vector: list[float] | None, columns: dict[str, object]) -> dict[str, Any]:
    """A hit as it is shown, its cosine and distance from its vector where that is there."""
    cosine, distance = float(hits.cosines[i]), float(hits.distances[i])
    if vector is not None and (lengths := math.hypot(*vector) * math.hypot(*query)):
        cosine = sum(a * b for a, b in zip(vector, query, strict=True)) / lengths
        distance = math.dist(vector, query)
    numbers = {"id": int(hits.ids[i]), "score": float(hits.scores[i]), "cosine": cosine}
    return numbers | {"distance": distance} | columns


def _rows(client: LongbowClient, dataset: str, hits: Hits) -> dict[int, tuple[list[float], dict[str, object]]]:
    """Each hit's vector, and its columns to show: searches return numbers alone."""
    rows: dict[int, tuple[list[float], dict[str, object]]] = {}
    for id in hits.ids.tolist():
        for batch in client.rows(dataset, [id]):
            for row in batch.to_pylist():
                vector = row.pop("vector")
                del row["id"]
                rows[id] = vector, {n: v if isinstance(v, int | float | str) else str(v) for n, v in row.items()}
    return rows
