"""`quarrel datasets`: what a vector store holds."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from quarrel.cli.flags import UsageError
from quarrel.cli.store import DATA, client_of, condition_of
from quarrel.cli.terminal import amount, line, note, some, table, visible, write_json
from quarrel.errors import RequestError

if TYPE_CHECKING:
    from quarrel.flight import Dataset, LongbowClient

EXPORT_SECONDS = 3600.0
ONLY = {"id": "delete", "output": "export", "filter": "export"}
"""Options, and the only action that has each."""


def run(args: argparse.Namespace) -> int:
    from quarrel.flight.requirement import need_arrow

    need_arrow()
    if args.action != "list" and not args.name:
        raise UsageError(f"{args.action} wants the name of a dataset")
    for option, action in ONLY.items():
        if getattr(args, option) is not None and args.action != action:
            raise UsageError(f"--{option} is of {action}, not of {args.action}")
    with client_of(args, args.source or DATA) as client:
        if args.action == "list":
            return _list(client, args)
        info = client.info(args.name)  # a sentence where there is none, whatever comes next
        return {"info": _info, "delete": _delete, "export": _export}[args.action](client, args, info)


def _list(client: LongbowClient, args: argparse.Namespace) -> int:
    found = client.list(args.name)
    if args.json:
        write_json([_row(dataset) for dataset in found])
        return 0
    if not found:
        note("there is no dataset" + (f" with {args.name!r} in its name" if args.name else ""))
        return 0
    rows = [[d.name, str(d.batches), amount(d.nbytes)] for d in found]
    for text in table([["name", "batches", "size"], *rows], right=(1, 2)):
        line(visible(text))
    return 0


def _info(client: LongbowClient, args: argparse.Namespace, info: Dataset) -> int:
    ready, schema = client.readiness(args.name), client.schema(args.name)
    columns = {field.name: str(field.type) for field in schema}
    if args.json:
        indexed = {"status": ready.status, "indexed": ready.indexed, "reason": ready.reason}
        write_json(_row(info) | indexed | {"columns": columns})
        return 0
    status = f"{ready.status}, {some(ready.indexed, 'row')} indexed" + (f" ({ready.reason})" if ready.reason else "")
    rows = [["name", info.name], ["size", f"{amount(info.nbytes)} in {info.batches} batches"], ["index", status]]
    for text in table([*rows, *([f"column {name}", kind] for name, kind in columns.items())]):
        line(visible(text))
    return 0


def _delete(client: LongbowClient, args: argparse.Namespace, info: Dataset) -> int:
    client.delete(args.name, args.id)
    if args.json:
        write_json({"deleted": info.name, "id": args.id})
    else:
        line(visible(f"{info.name} is deleted" if args.id is None else f"row {args.id} of {info.name} is deleted"))
    return 0


def _export(client: LongbowClient, args: argparse.Namespace, info: Dataset) -> int:
    from quarrel.embed.sinks import FILES, file_writer

    path = Path(args.output or "").expanduser()
    if path.suffix.lower() not in FILES:
        raise UsageError(f"--output is {args.output!r}, wanted a file that ends in {', '.join(FILES)}")
    if path.exists():
        raise RequestError(f"{path} exists: move it away, or name another by --output")
    filters = [condition_of(given) for given in args.filter or ()]
    rows, temporary = 0, path.with_name(f"{path.name}.new")
    batches = client.get(args.name, filters=filters, timeout=max(args.timeout, EXPORT_SECONDS))
    first = next(batches, None)
    try:
        with file_writer(temporary, path.suffix, client.schema(args.name) if first is None else first.schema) as writer:
            batch = first
            while batch is not None:
                writer.write_batch(batch)
                rows += batch.num_rows
                batch = next(batches, None)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    if args.json:
        write_json({"dataset": info.name, "file": str(path), "rows": rows})
    else:
        line(visible(f"{some(rows, 'row')} of {info.name} are in {path}"))
    return 0


def _row(dataset: Dataset) -> dict[str, object]:
    return {"name": dataset.name, "batches": dataset.batches, "bytes": dataset.nbytes}
