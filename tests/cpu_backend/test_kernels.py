"""The table of linear kernels: what is chosen for a weight, and the sentences of those that decline."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quarrel.cpu_backend.experts import experts
from quarrel.cpu_backend.formats.table import BLOCKS
from quarrel.cpu_backend.linear.floats import tiles
from quarrel.cpu_backend.linear.kernels import KERNELS, Choice, choose
from quarrel.cpu_backend.runtime import features
from quarrel.gguf import FORMATS, GGMLType
from quarrel.ops.linear import LinearSpec


def chosen(type: str, exact: bool, table: Any = KERNELS) -> Choice[Any]:
    weights = SimpleNamespace(stored_as=lambda t: t.name)
    e: Any = SimpleNamespace(weights=weights, plan=SimpleNamespace(exact=exact, level=features.level()))
    return choose(e, table, LinearSpec(GGMLType[type], 64, 256))


def test_blocks_go_to_the_int8_kernels() -> None:
    choice = chosen("Q4_K", False)
    assert str(choice) == "int8 matvec for few rows, int8 tile for more rows"
    assert (choice.forms, choice.declined) == ({"q"}, ())


@pytest.mark.parametrize(
    ("type", "exact", "reason"),
    [
        ("Q4_K", True, "rounds activations to 8 bits, and float32 arithmetic was requested"),
        ("BF16", False, "needs a block format, got BF16"),
        ("F32", True, "needs a block format, got F32"),
    ],
)
def test_what_declines_says_why(type: str, exact: bool, reason: str) -> None:
    choice = chosen(type, exact)
    assert str(choice) == "float32 tile for any rows"
    assert choice.forms == {"f32"}
    assert choice.declined == (f"int8 matvec: {reason}", f"int8 tile: {reason}")


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("type", [*BLOCKS, "F32", "F16", "BF16"])
def test_every_number_of_rows_has_one_kernel(type: str, exact: bool) -> None:
    for table in (KERNELS, experts.KERNELS):
        rows = [kernel.rows for kernel in chosen(type, exact, table).kernels]
        assert rows in (["few rows", "more rows"], ["any rows"])


def test_formats_have_the_sizes_of_the_file() -> None:
    for name, fmt in BLOCKS.items():
        assert (fmt.elements, fmt.nbytes) == (FORMATS[GGMLType[name]].elements, FORMATS[GGMLType[name]].nbytes)
        assert sorted(fmt.lane_groups) == list(range(fmt.groups))


def test_a_small_batch_reads_a_float_matrix_at_most_twice() -> None:
    wide = next(level for level in features.LEVELS.values() if level.registers >= 32)
    for rows in range(2, 9):
        left, passes = rows, 0
        for _, width in (*tiles(wide), (1, 1)):
            passes, left = passes + left // width, left % width
        assert passes <= 2, rows
