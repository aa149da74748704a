"""The kernels that `bench/attend_batch.py` would time, on small loads: where they are wrong, time on a device is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quarrel.ops.attention import ATTENTION, AttentionSpec
from quarrel.ops.contract import Case
from quarrel.ops.kv import KV_TYPES

LIMIT = ATTENTION.tolerance["float16"]


@pytest.fixture(name="bench")
def _bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Loaded here and not above: the interpreter takes kernels that are defined while it is on."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "bench"))
    import attend_batch

    return attend_batch


def variant(bench: Any, name: str) -> Any:
    (found,) = (v for v in bench.VARIANTS if v.name == name)
    return found


@pytest.mark.parametrize(
    ("name", "window"),
    [
        ("four heads of 16, 3 stages", 0),
        ("two warps, 3 stages, tail first", 80),
        ("two warps, 3 stages, tail through", 0),
    ],
)
def test_rows_and_appended_keys_are_the_shipped_kernels_whatever_others_keep(bench: Any, name: str, window: int) -> None:
    """NaN past the end of each sequence, and in blocks behind its window."""
    load = bench.Load(AttentionSpec(4, 4, 32, 0.2, window), 2, 40, 180)
    bed = bench.Bed(load, 1)
    table = bed.ints["block_table"].view(load.seqs, -1).long()
    for row, keys in enumerate(load.lengths()):
        behind = max(keys - window, 0) // bench.SIZE if window else 0
        block, offset = table[row, (keys - 1) // bench.SIZE], keys % bench.SIZE
        for tensor in bed.caches[0].tensors:
            tensor[block, :, offset:] = torch.nan
            tensor[table[row, (keys - 1) // bench.SIZE + 1 :]] = torch.nan
            tensor[table[row, :behind]] = torch.nan
    assert bed.error(variant(bench, name)) <= LIMIT


@pytest.mark.parametrize("kind", ["auto", "int8", "fp8"])
def test_windows_sinks_caps_and_codes_over_several_splits(bench: Any, kind: Any) -> None:
    spec = (
        AttentionSpec(4, 2, 32, 0.2, cap=20.0)
        if kind == "int8"
        else AttentionSpec(4, 2, 32, 0.2, 150, sinks=kind == "auto")
    )
    case = Case(spec, {"S": 1, "Q": 1, "KV": 200, "block_size": 32, "kv": KV_TYPES.index(kind)})
    for name in ("one warp of 16, 5 stages", "two warps, 3 stages, tail through"):
        error, taken = bench.against_reference(variant(bench, name), case)
        assert taken == 1
        assert error <= LIMIT, name


def test_what_a_variant_declines_runs_on_the_shipped_kernel(bench: Any) -> None:
    case = Case(AttentionSpec(2, 1, 32, 0.2), {"S": 1, "Q": 1, "KV": 20, "block_size": 16})
    error, taken = bench.against_reference(variant(bench, "one warp, 3 stages"), case)
    assert taken == 0
    assert error <= LIMIT
