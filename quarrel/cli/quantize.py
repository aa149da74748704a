"""`quarrel quantize` and `quarrel convert`: a model's file, with weights of other types."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from quarrel.cli.terminal import amount, line, progress, write_json
from quarrel.convert import open_file
from quarrel.gguf import GGUFFile, own_mix, read_importance
from quarrel.gguf.requantize import requantize
from quarrel.llm import find


def run(args: argparse.Namespace) -> int:
    with open_file(find(args.model).paths) as source:
        return write(args, source)


def write(args: argparse.Namespace, source: GGUFFile) -> int:
    """The model as the arguments want it, and a line about it."""
    target = Path(args.target)
    importance = None if args.imatrix is None else read_importance(args.imatrix)
    with progress(target.name) as show:
        mix = args.type or own_mix(source)
        weights = sum(math.prod(t.dims) for t in source.tensors.values())
        size = requantize(source, target, mix, again=args.again, importance=importance, progress=show)
    if args.json:
        write_json({"file": str(target), "type": mix.lower(), "bytes": size, "bits_per_weight": 8 * size / weights})
    else:
        line(f"{target}: {amount(size)}, {8 * size / weights:.2f} bits a weight")
    return 0
