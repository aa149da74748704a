"""The table of linear kernels: what is chosen for a weight, and the sentences of those that decline."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from quarrel.cpu_backend.experts import experts
from quarrel.cpu_backend.formats.table import BLOCKS
from quarrel.cpu_backend.linear.floats import skipped, tiles
from quarrel.cpu_backend.linear.kernels import KERNELS, Choice, choose
from quarrel.cpu_backend.runtime import features
from quarrel.gguf import FORMATS, GGMLType
from quarrel.ops.linear import LinearSpec

PAIRS, NO_PAIRS = (features.LEVELS[name] for name in ("avx512bf16", "avx512vnni"))


def chosen(type: str, exact: bool, table: Any = KERNELS, level: features.Level = NO_PAIRS, k: int = 256) -> Choice[Any]:
    weights = SimpleNamespace(stored_as=lambda t: t.name)
    e: Any = SimpleNamespace(weights=weights, plan=SimpleNamespace(exact=exact, level=level))
    return choose(e, table, LinearSpec(GGMLType[type], 64, k))


def test_blocks_go_to_the_int8_kernels() -> None:
    choice = chosen("Q4_K", False)
    assert str(choice) == "int8 matvec for few rows, int8 tile for more rows"
    assert (choice.forms, choice.declined) == ({"q"}, ())


def test_bfloat16_goes_to_pairs_where_the_cpu_has_them() -> None:
    for table, name in ((KERNELS, "bfloat16 tile"), (experts.KERNELS, "bfloat16 tile by expert")):
        choice = chosen("BF16", False, table, PAIRS)
        assert (str(choice), choice.forms) == (f"{name} for any rows", {"f32"})


@pytest.mark.parametrize(
    ("type", "exact", "level", "k", "reason", "no_pairs"),
    [
        ("Q4_K", True, PAIRS, 256, "rounds activations to 8 bits, and float32 arithmetic was requested",
         "needs BF16, got Q4_K"),
        ("F32", True, PAIRS, 256, "needs a block format, got F32", "needs BF16, got F32"),
        ("BF16", True, PAIRS, 256, "needs a block format, got BF16",
         "rounds activations to bfloat16, and float32 arithmetic was requested"),
        ("BF16", False, NO_PAIRS, 256, "needs a block format, got BF16",
         "needs an instruction for pairs of bfloat16, which avx512vnni lacks"),
        ("BF16", False, PAIRS, 77, "needs a block format, got BF16", "needs rows of pairs, got 77 values"),
    ],
)  # fmt: skip
def test_what_declines_says_why(type: str, exact: bool, level: features.Level, k: int, reason: str, no_pairs: str) -> None:
    choice = chosen(type, exact, level=level, k=k)
    assert str(choice) == "float32 tile for any rows"
    assert choice.forms == {"f32"}
    assert choice.declined == (f"int8 matvec: {reason}", f"int8 tile: {reason}", f"bfloat16 tile: {no_pairs}")


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("type", [*BLOCKS, "F32", "F16", "BF16"])
def test_every_number_of_rows_has_one_kernel(type: str, exact: bool) -> None:
    for table, level in product((KERNELS, experts.KERNELS), features.LEVELS.values()):
        rows = [kernel.rows for kernel in chosen(type, exact, table, level).kernels]
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
            while left >= width and left not in skipped(wide, width):
                passes, left = passes + 1, left - width
        assert (left, passes <= 2) == (0, True), rows
