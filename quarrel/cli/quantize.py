"""`quarrel quantize`: a model's file once more, with weights of other types."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from quarrel.cli.terminal import amount, line, progress, write_json
from quarrel.gguf import GGUFFile, requantize
from quarrel.llm import find


def run(args: argparse.Namespace) -> int:
    target = Path(args.target)
    with GGUFFile.open(find(args.model).paths) as source, progress(target.name) as show:
        weights = sum(math.prod(t.dims) for t in source.tensors.values())
        size = requantize(source, target, args.type, again=args.again, progress=show)
    if args.json:
        write_json({"file": str(target), "type": args.type.lower(), "bytes": size, "bits_per_weight": 8 * size / weights})
    else:
        line(f"{target}: {amount(size)}, {8 * size / weights:.2f} bits a weight")
    return 0
