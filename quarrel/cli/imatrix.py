"""`quarrel imatrix`: what a text puts into each map of a model, for `quarrel quantize --imatrix`."""

from __future__ import annotations

import argparse
from pathlib import Path

from quarrel.cli.flags import UsageError, load_options
from quarrel.cli.terminal import line, progress, some, write_json
from quarrel.quality.importance import collect


def run(args: argparse.Namespace) -> int:
    if args.chunks is not None and args.chunks < 1:
        raise UsageError(f"--chunks is {args.chunks}, wanted 1 or more")
    if args.chunk_size < 4:
        raise UsageError(f"--chunk-size is {args.chunk_size}, wanted 4 or more")
    target = Path(args.target)
    with progress(target.name, unit="chunk") as show:
        made = collect(
            args.model,
            Path(args.text),
            target,
            load_options(args),
            size=args.chunk_size,
            most=args.chunks,
            progress=show,
        )
    missed = sum(int((entry.counts == 0).sum()) for entry in made.entries.values())
    if args.json:
        maps = {"maps": len(made.entries), "experts_never_chosen": missed}
        write_json({"file": str(target), "chunks": made.chunks, "chunk_size": made.chunk_size, **maps})
        return 0
    never = f", {missed} of whose experts no token chose: a longer text is better" if missed else ""
    line(f"{target}: {some(made.chunks, 'chunk')} of {made.chunk_size} tokens, {len(made.entries)} maps{never}")
    return 0
