"""Bugs that a review of the kernels planted, and others of their classes: each makes a trial fail, or breaks a rule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest

from quarrel.mlx_backend.formats import layout
from tests.mlx_backend.cases import running
from tests.mlx_backend.emulated import FAST
from tests.mlx_backend.trials import LARGE, TRIALS, Trial
from tools.metal_emulator import MetalFindings, Mode, Settings, metal_kernel

pytestmark = pytest.mark.skipif(mx.metal.is_available(), reason="bugs are planted in the emulator's kernels")
TYPES = Settings(mode=Mode.TYPECHECK, typecheck=True)


@dataclass(frozen=True)
class Bug:
    """`old` becomes `new` in every kernel that has it; `trial` is one that must notice."""

    what: str
    trial: str
    old: str
    new: str


WRONG = (
    Bug(
        "two groups read the sums of another",
        "linear, two groups share rows",
        "place / PARTS * PARTS + i",
        "place / PARTS + i",
    ),
    Bug("the columns that are no whole block", "linear, a tail", "(K + 31) / 32 * 2", "K / 32 * 2"),
    Bug("the same of gate and up", "norm_gate_up, a tail", "(K + 31) / 32 * 2", "K / 32 * 2"),
    Bug("the same of a prompt", "linear, a tail, prompt", "column < K; column += 32", "column < K - 31; column += 32"),
    Bug("the last column", "linear_add, a tail", "column + i < K", "column + i + 1 < K"),
    Bug("the norm of another row", "norm_linear, two groups share rows", "* R * NT + t))", "* R * NT))"),
    Bug("up of another row", "norm_gate_up, two groups share rows", "(lane + R * NT) % 32", "(lane + R) % 32"),
    Bug("splits before a window are added", "decode, window 300", "/ size - oldest / size;", "/ size;"),
    Bug("the oldest key of a window", "decode, window 256", "metal::max(from, oldest)", "metal::max(from, oldest + 1)"),
    Bug("the oldest key of a chunk", "decode, chunks of 300", "position / SIZE * SIZE;", "position / SIZE * SIZE + 1;"),
    Bug(
        "the newest key of a split",
        "decode, window 600",
        "metal::min(from + size, n_keys)",
        "metal::min(from + size, n_keys - 1)",
    ),
    Bug("the last head of a group", "decode, groups of 7", "first_head + h >= GROUP", "first_head + h >= GROUP - 1"),
    Bug(
        "a window's first tile, a key late",
        "prompt, window at every place",
        "start = oldest / KEYS * KEYS",
        "start = (oldest + 1) / KEYS * KEYS",
    ),
    Bug("the newest key of a tile", "prompt, groups of 5", "(tile_row + 31) / GROUP", "(tile_row / GROUP + 31 / GROUP)"),
    Bug("an infinite logit wins", "sample, every cut", "metal::abs(x) < INFINITY", "metal::abs(x) <= INFINITY"),
    Bug("min_p before a top_p of all tokens", "sample, every cut", "k > 0 ? least", "k >= 0 ? least"),
    Bug("a scale's upper bits, of the block beside", "linear_add, two groups share rows", "odd ? 48 : 3", "odd ? 3 : 48"),
    Bug("the oldest key of a tile", "prompt, chunks", "key >= oldest && key", "key > oldest && key"),
)
RULES = (
    Bug(
        "x of a row", "linear", "ulong(metal::min(token + t, T - 1)) * ulong(K)", "ulong(metal::min(token + t, T - 1) * K)"
    ),
    Bug("y of a row", "linear", "ulong(token + lane % NT) * ulong(rows0)", "ulong((token + lane % NT) * rows0)"),
    Bug("a row of a result", "a prompt's rows", "ulong(to) * ulong(N)", "ulong(to * N)"),
    Bug("a query's head", "attention", "(ulong(begin) * HEADS + head) * D + d", "ulong((begin * HEADS + head) * D + d)"),
    Bug("a run of a norm", "gated norm", "(mine ? ulong(run) : runs - 1) * ulong(K)", "ulong(run * K)"),
    Bug("a pointer of another space", "linear", "(device const Eight<E>*)", "(threadgroup const Eight<E>*)"),
)


@contextmanager
def planted(bug: Bug) -> Iterator[list[str]]:
    """Kernels are made with the bug in them; their names."""
    changed: list[str] = []

    class Changed(metal_kernel):
        def __init__(self, name: str, source: str, header: str, **rest: Any) -> None:
            texts = [source, header]
            if any(bug.old in text for text in texts):
                changed.append(name)
            source, header = (text.replace(bug.old, bug.new) for text in texts)
            super().__init__(name=name, source=source, header=header, **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.fast, "metal_kernel", Changed)
        yield changed


def noticed(trial: Trial) -> bool:
    try:
        return not trial.error() <= 1
    except MetalFindings:
        return True


@pytest.mark.parametrize("bug", WRONG, ids=lambda bug: bug.what)
def test_a_wrong_result_is_noticed(bug: Bug) -> None:
    with running(FAST), planted(bug) as changed:
        assert noticed(TRIALS[bug.trial])
    assert changed


@pytest.mark.parametrize("name", LARGE)
def test_no_product_passes_32_bits_and_no_pointer_its_address_space(name: str) -> None:
    with running(TYPES):
        LARGE[name].error()


@pytest.mark.parametrize("bug", RULES, ids=lambda bug: bug.what)
def test_a_broken_rule_is_noticed(bug: Bug) -> None:
    with running(TYPES), planted(bug) as changed, pytest.raises(MetalFindings, match="32-bit|memory"):
        LARGE[bug.trial].error()
    assert changed


def test_planes_too_small_for_device_memory_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX puts fewer than 8 values into constant memory, which the kernels' pointers are not to."""
    monkeypatch.setattr(layout, "LEAST", 1)
    with running(TYPES), pytest.raises(MetalFindings, match="a pointer to constant memory becomes one to device memory"):
        TRIALS["linear, one block"].error()
