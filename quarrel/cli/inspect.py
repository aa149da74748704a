"""`quarrel inspect`: what a GGUF file says about itself, without loading a weight."""

from __future__ import annotations

import argparse
import fnmatch
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from quarrel.cli.terminal import amount, count, line, quoted, table, tidy, visible, write_json
from quarrel.convert import open_file
from quarrel.gguf import GGUFFile, Metadata, TensorInfo
from quarrel.llm import find

SHOWN = 6
"""Elements of an array that are shown without --full."""


def run(args: argparse.Namespace) -> int:
    with open_file(find(args.model).paths) as file:
        keys = _matching(file.metadata, args.keys)
        tensors = [file.tensors[name] for name in _matching(file.tensors, args.tensors)]
        if args.json:
            write_json(_document(file, keys, tensors, args.full))
            return 0
        both = args.keys is None and args.tensors is None
        if both:
            _print_summary(file)
        if both or args.keys is not None:
            _print_keys(file.metadata, keys, args.full)
        if both or args.tensors is not None:
            _print_tensors(tensors)
    return 0


def _matching(names: Iterable[str], pattern: str | None) -> list[str]:
    """Names that hold the text, or fit it where it has wildcards."""
    if pattern is None:
        return list(names)
    if not any(c in pattern for c in "*?["):
        pattern = f"*{pattern}*"
    return [name for name in names if fnmatch.fnmatchcase(name, pattern)]


def _print_summary(file: GGUFFile) -> None:
    metadata = file.metadata
    tensors = file.tensors.values()
    nbytes, parameters = _totals(tensors)
    rows = [
        ["file", visible(str(file.paths[0])) + (f" and {len(file.paths) - 1} more" if len(file.paths) > 1 else "")],
        ["format", f"GGUF {file.version}, aligned to {file.alignment} bytes"],
        ["model", tidy(metadata.str("general.name", "(no name)"))],
        ["architecture", tidy(metadata.str("general.architecture", "(not given)"))],
        ["weights", f"{len(tensors)} tensors, {count(parameters)} parameters, {amount(nbytes)}"],
        ["types", _types(tensors)],
    ]
    if parameters:
        rows[4][1] += f", {8 * nbytes / parameters:.2f} bits per weight"
    for text in table(rows, indent=""):
        line(text)


def _types(tensors: Iterable[TensorInfo]) -> str:
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[tensor.type.name] += tensor.nbytes
    return ", ".join(f"{name} {amount(nbytes)}" for name, nbytes in sizes.most_common()) or "none"


def _totals(tensors: Iterable[TensorInfo]) -> tuple[int, int]:
    sizes = [(tensor.nbytes, math.prod(tensor.dims)) for tensor in tensors]
    return sum(nbytes for nbytes, _ in sizes), sum(elements for _, elements in sizes)


def _print_keys(metadata: Metadata, keys: list[str], full: bool) -> None:
    line(f"\n{len(keys)} of {len(metadata)} keys" if len(keys) < len(metadata) else f"\n{len(keys)} keys")
    rows = [[tidy(key), _kind(metadata, key), _value(metadata, key, full)] for key in keys]
    for text in table(rows) if rows else ():
        line(text)


def _kind(metadata: Metadata, key: str) -> str:
    kind, length = metadata.kind(key), metadata.length(key)
    name = kind.name.lower() if kind is not None else "?"
    return name if length is None else f"{name}[{length}]"


def _value(metadata: Metadata, key: str, full: bool) -> str:
    value = metadata[key]
    width = 1 << 30 if full else 100
    if not isinstance(value, list):
        return tidy(value, width) if isinstance(value, str) else str(value)
    shown = value if full else value[:SHOWN]
    items = [quoted(item, width) if isinstance(item, str) else str(item) for item in shown]
    return f"[{', '.join(items)}{'' if len(shown) == len(value) else ', …'}]"


def _print_tensors(tensors: list[TensorInfo]) -> None:
    line(f"\n{len(tensors)} tensors")
    rows = [
        [
            tidy(tensor.name, 127),
            tensor.type.name,
            " x ".join(map(str, tensor.shape)),
            amount(tensor.nbytes),
            f"{8 * tensor.nbytes / math.prod(tensor.dims):.2f}",
        ]
        for tensor in tensors
    ]
    for text in table([["name", "type", "shape", "size", "bits per weight"], *rows], right=(3, 4)) if rows else ():
        line(text)


def _document(file: GGUFFile, keys: list[str], tensors: list[TensorInfo], full: bool) -> dict[str, Any]:
    nbytes, parameters = _totals(file.tensors.values())
    return {
        "files": [str(path) for path in file.paths],
        "version": file.version,
        "alignment": file.alignment,
        "parameters": parameters,
        "bytes": nbytes,
        "bits_per_weight": 8 * nbytes / parameters if parameters else None,
        "metadata": {key: _entry(file.metadata, key, full) for key in keys},
        "tensors": [
            {
                "name": tensor.name,
                "type": tensor.type.name,
                "shape": list(tensor.shape),
                "bytes": tensor.nbytes,
                "offset": tensor.offset,
                "file": tensor.shard,
            }
            for tensor in tensors
        ],
    }


def _entry(metadata: Metadata, key: str, full: bool) -> dict[str, Any]:
    kind, length, value = metadata.kind(key), metadata.length(key), metadata[key]
    entry: dict[str, Any] = {"type": kind.name.lower() if kind is not None else None}
    if isinstance(value, list):
        entry["length"] = length
        value = value if full else value[:SHOWN]
    return {**entry, "value": value}
