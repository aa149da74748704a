"""`quarrel search`: the texts of a vector store that are nearest to one."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

from quarrel.cli.flags import UsageError, load_options
from quarrel.cli.prompt import model_and_text
from quarrel.cli.store import DATA, client_of
from quarrel.cli.terminal import line, note, table, tidy, visible, write_json
from quarrel.llm import load_with

if TYPE_CHECKING:
    from quarrel.flight import LongbowClient

SHOWN = ("doc_id", "text")
CONDITION = re.compile(r"\s*([^=!<>]+?)\s*(==|!=|>=|<=|=|>|<)\s*(.*?)\s*")


def run(args: argparse.Namespace) -> int:
    model, text = model_and_text(args)
    if not text.strip():
        raise UsageError("there is no text to look for: it is empty")
    filters = [_condition(given) for given in args.filter or ()]
    with client_of(args, args.source or DATA) as client:
        client.readiness(args.dataset)  # whether anybody is there, before a model is loaded
        with load_with(model, load_options(args)) as llm:
            made = llm.embed(
                text, pooling=args.pooling, dimensions=args.dimensions, prefix=args.prefix, normalize=args.normalize
            )
        hits = client.search(args.dataset, made.vectors[0], args.k, filters=filters, fresh=args.fresh)
        found: list[dict[str, object]] = [
            {"id": int(id), "score": float(score)} for id, score in zip(hits.ids, hits.scores)
        ]
        for hit in found:
            hit |= _row(client, args.dataset, int(str(hit["id"])))
    if args.json:
        write_json({"dataset": args.dataset, "model": model, "text": text, "hits": found})
        return 0
    if not found:
        note("nothing was found")
        return 0
    rows = [[f"{hit['score']:.4f}", str(hit["id"]), *(tidy(str(hit.get(n) or ""), 100) for n in SHOWN)] for hit in found]
    for shown in table(rows, right=(0, 1)):
        line(visible(shown))
    return 0


def _condition(given: str) -> tuple[str, str, str]:
    match = CONDITION.fullmatch(given)
    if not match:
        raise UsageError(f"--filter takes a column, a comparison and a value, such as year>=1990, got {given!r}")
    return match[1], match[2], match[3]


def _row(client: LongbowClient, dataset: str, id: int) -> dict[str, object]:
    """The columns of a row to show: searches return numbers alone."""
    for batch in client.get(dataset, filters=[("id", "==", id)], limit=1):
        names = [n for n in batch.schema.names if n not in ("id", "vector")]
        for row in batch.select(names).to_pylist():
            return {name: value if isinstance(value, int | float | str) else str(value) for name, value in row.items()}
    return {}
