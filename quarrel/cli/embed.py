"""`quarrel embed`: the texts of a file into a vector store or a file."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quarrel.cli.flags import UsageError, load_options
from quarrel.cli.prompt import model_of
from quarrel.cli.store import client_of, dataset_of
from quarrel.cli.terminal import note, write_json
from quarrel.errors import RequestError
from quarrel.llm import LLM, Chunking, load_with
from quarrel.llm.embeddings import EmbedOptions

if TYPE_CHECKING:
    from quarrel.embed.pipeline import Pipeline, Summary

SOME_BAD = 3
WAIT_SECONDS = 10.0
"""Between two lines about the index, where standard error is no terminal."""


def run(args: argparse.Namespace) -> int:
    from quarrel.flight.requirement import need_arrow

    need_arrow()
    chunk = _chunk(args)
    if not args.input or not args.to:
        raise UsageError("name a file by --input and where its vectors go by --to")
    if not 1 <= args.block <= 65536:
        raise UsageError(f"--block is {args.block}, wanted 1 to 65536")
    if args.wait and "://" not in args.to:
        raise UsageError(f"--wait is for the index of a store, and {args.to} is none")
    if args.first_id < 0:
        raise UsageError(f"--first-id is {args.first_id}, wanted 0 or more")
    if "://" in args.to and not args.normalize and args.metric != "euclidean":
        note(f"quarrel: Longbow ranks by L2, whatever --metric says: search vectors like these by --rerank {args.metric}")
    with load_with(model_of(args), load_options(args, max_seqs=64)) as llm:
        letters = _letters(args)
        with _shown(args) as progress:
            try:
                summary = _pipeline(args, llm, chunk, letters, progress).run()
            except KeyboardInterrupt:
                note(f"quarrel: interrupted; what is done is in {_checkpoint(args)}: the same command resumes there")
                raise
    _report(args, summary, letters)
    if args.wait and summary.vectors:  # without any there is no dataset
        _wait(args, summary.vectors)
    return SOME_BAD if summary.bad else 0


def _pipeline(
    args: argparse.Namespace,
    llm: LLM,
    chunk: Chunking | None,
    letters: Path,
    progress: Callable[[int, int, int], None] | None,
) -> Pipeline:
    from quarrel.embed.checkpoint import Checkpoint
    from quarrel.embed.pipeline import Layout, Pipeline
    from quarrel.embed.sinks import FILES, FileSink, FlightSink, Sink
    from quarrel.embed.source import Wanted, open_source

    source = open_source(args.input, Wanted(args.text_column, args.id_column, tuple(args.column or ())))
    options = EmbedOptions(args.normalize, args.pooling, args.dimensions, args.prefix, chunk)
    sink: Sink
    if "://" in args.to:
        sink = FlightSink(client_of(args, args.to), dataset_of(args), args.first_id)
    elif Path(args.to).suffix.lower() in FILES:
        sink = FileSink(Path(args.to).expanduser())
    else:
        raise UsageError(f"--to is {args.to!r}, wanted grpc://host:port or a file that ends in {', '.join(FILES)}")
    layout = Layout(args.first_id, args.keep_text, args.metric)
    checkpoint = Checkpoint(_checkpoint(args), _job(args, llm))
    return Pipeline(llm, source, options, sink, layout, checkpoint, letters, args.block, progress)


def _job(args: argparse.Namespace, llm: LLM) -> dict[str, Any]:
    """All that the vectors and their ids depend on."""
    path = Path(args.input).expanduser()
    if not path.is_file():
        raise RequestError(f"the input {path} is no file")
    names = ("to", "dataset", "text_column", "id_column", "column", "first_id", "pooling", "dimensions", "prefix", "chunk")
    rope = ("rope_scaling", "rope_scale", "yarn_orig_ctx")
    of_args = {name: getattr(args, name) for name in (*names, *rope, "overlap", "normalize", "keep_text", "metric")}
    explained = llm.explain()
    return {
        "input": str(path.resolve()),
        "input_bytes": path.stat().st_size,
        "model": explained.model,
        "n_ctx": llm.n_ctx,
        **of_args,
    }


def _chunk(args: argparse.Namespace) -> Chunking | None:
    if args.chunk is None:
        if args.overlap is not None:
            raise UsageError("--overlap is of chunks; give --chunk too")
        return None
    return Chunking(args.chunk, args.chunk // 8 if args.overlap is None else args.overlap)


def _checkpoint(args: argparse.Namespace) -> Path:
    if args.checkpoint:
        return Path(args.checkpoint).expanduser()
    path = Path(args.input).expanduser()
    name = args.dataset if "://" in args.to else Path(args.to).name
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in str(name))
    return path.with_name(f"{path.name}.to-{safe}.checkpoint")


def _letters(args: argparse.Namespace) -> Path:
    if args.dead_letters:
        return Path(args.dead_letters).expanduser()
    checkpoint = _checkpoint(args)
    return checkpoint.with_name(f"{checkpoint.name.removesuffix('.checkpoint')}.bad.jsonl")


@contextmanager
def _shown(args: argparse.Namespace, doing: str = "embedding") -> Iterator[Callable[[int, int, int], None] | None]:
    """A bar with the time left, where standard error is a terminal."""
    if args.quiet or not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(desc=doing, unit="", unit_scale=True, leave=False, file=sys.stderr) as bar:

        def show(position: int, total: int, vectors: int) -> None:
            bar.total = total
            bar.set_postfix(vectors=vectors, refresh=False)
            bar.update(position - bar.n)

        yield show


def _wait(args: argparse.Namespace, vectors: int) -> None:
    """Until the store has indexed them, however long that takes."""
    from quarrel.flight import Readiness

    with client_of(args, args.to) as client, _shown(args, "indexing") as show:
        said = -WAIT_SECONDS

        def progress(now: Readiness) -> None:
            nonlocal said
            if show is not None:
                show(min(now.indexed, vectors), vectors, now.indexed)
            elif not args.quiet and now.status == "BUSY" and time.monotonic() - said >= WAIT_SECONDS:
                note(f"indexing: {now.indexed} of {vectors} vectors{f' ({now.reason})' if now.reason else ''}")
                said = time.monotonic()

        client.wait_ready(dataset_of(args), vectors, timeout=math.inf, progress=progress)
    if not args.quiet and not args.json:
        note(f"{vectors} vectors are indexed")


def _report(args: argparse.Namespace, s: Summary, letters: Path) -> None:
    if args.json:
        write_json(dataclasses.asdict(s) | {"dead_letters": str(letters) if s.bad else None})
        return
    if args.quiet:
        return
    speed = f"{s.sent} vectors of {s.tokens} tokens in {s.seconds:.1f} s"
    if s.seconds > 0:
        speed += f", {s.sent / s.seconds:.0f} vectors/s"
    before = f"; {s.resumed} rows were done before" if s.resumed else ""
    there = f"; {s.present} vectors were there already" if s.present else ""
    bad = f"; {s.bad} bad rows are in {letters}" if s.bad else ""
    note(f"{s.rows} rows: {speed}{before}{there}{bad}")
