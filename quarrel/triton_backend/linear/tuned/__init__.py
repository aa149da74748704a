"""Which tiles a shape takes, as `bench/tune/tune.py` measured them: a JSON file for each family of devices.

It is read when a model loads. Nothing is searched while serving, and nothing depends on more than the weight's shape, its
format and a width of rows, so a model has the same kernels in every process. A shape that was never measured takes
`widths`, which serve all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Literal

Kind = Literal["one", "gated", "three"]
Widths = tuple[tuple[int, int, int, int, int], ...]
"""Tokens, rows, blocks of a step, warps, stages."""
Measured = Mapping[int, tuple[int, ...]]
"""By width of rows."""


@dataclass(frozen=True)
class Table:
    """`widths` by kind of launch. Of a measured shape (`key`), `tiles` are rows, blocks, parts, warps and stages of
    `matmul.py`, `rows` are rows, tall, turns and deep of `rows.py`."""

    widths: Mapping[str, Widths]
    tiles: Mapping[str, Measured] = field(default_factory=dict)
    rows: Mapping[str, Measured] = field(default_factory=dict)


def key(kind: Kind, formats: Sequence[str], ns: Sequence[int], k: int) -> str:
    """The name of a shape: `one Q4_K 14336x4096`."""
    return f"{kind} {'+'.join(formats)} {'+'.join(map(str, ns))}x{k}"


@cache
def table(generation: int) -> Table:
    """The table of a device of this major compute capability."""
    name = "sm_90" if generation == 9 else "other"
    found = json.loads(resources.files(__package__).joinpath(f"{name}.json").read_text(encoding="utf-8"))
    widths = {kind: tuple(tuple(row) for row in rows) for kind, rows in found["widths"].items()}
    return Table(widths, _shapes(found.get("tiles", {}), 5), _shapes(found.get("rows", {}), 4))


def _shapes(found: Mapping[str, Mapping[str, Sequence[int]]], length: int) -> dict[str, dict[int, tuple[int, ...]]]:
    shapes = {name: {int(width): tuple(row) for width, row in rows.items()} for name, rows in found.items()}
    assert all(len(row) == length for rows in shapes.values() for row in rows.values()), "a row of another length"
    return shapes
