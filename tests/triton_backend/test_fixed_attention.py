"""Attention of deterministic steps: a row has the same bits by itself, in a prompt, and in one that is cut anywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from quarrel.ops import reference
from quarrel.ops.attention import ATTENTION, AttentionSpec
from quarrel.ops.compare import errors
from quarrel.ops.contract import Array, CacheRef, Compute, RawWeight, Value, WeightRef
from quarrel.ops.program import Node, Program
from quarrel.ops.registry import lower
from quarrel.triton_backend.attention import fixed
from quarrel.triton_backend.backend import REGISTRY
from quarrel.triton_backend.formats.weights import Weights
from quarrel.triton_backend.inputs import item_starts
from quarrel.triton_backend.plan import Plan
from quarrel.triton_backend.runtime.arrays import DTYPES, Slot
from quarrel.triton_backend.runtime.cache import from_host
from quarrel.triton_backend.runtime.site import Batch, Tables
from tests.triton_backend.test_attention import SPEC, batch

SPECS = {
    "plain": SPEC,
    "window": replace(SPEC, window=150),
    "short window": replace(SPEC, window=33),
    "cap": replace(SPEC, cap=10.0),
    "groups of 3": AttentionSpec(6, 2, 80, 0.11),
}


@pytest.fixture(autouse=True)
def _short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed, "SPLIT", 128)


class _NoWeights:
    def raw(self, ref: WeightRef) -> RawWeight:
        raise AssertionError(ref)


def attend(spec: AttentionSpec, inputs: tuple[Any, ...], compute: Compute) -> Array:
    """The rows of a deterministic step."""
    q, starts, kv_len, table, cache = inputs
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    values = [Value(0, "act", ("T", spec.width), "q")]
    values += [Value(1 + i, "i32", ("S",), name) for i, name in enumerate(("query_start", "kv_len", "block_table"))]
    y = Value(9, "act", ("T", spec.width), "y")
    node = Node(ATTENTION, spec, (*values, CacheRef(0)), (y,))
    held = from_host(cache, DTYPES[compute], device)
    given = [torch.from_numpy(q.reshape(-1).copy()).to(DTYPES[compute])]
    given += [torch.from_numpy(a.reshape(-1).astype(np.int32)) for a in (starts, kv_len, table)]
    items, new = item_starts(starts, kv_len, same=True), np.diff(starts)
    tables = (items, np.array([table.shape[1]], np.int32))
    work = Tables(*(Slot(torch.from_numpy(a).to(device)) for a in tables))
    rows = {"T": len(q), "S": len(kv_len), "R": len(kv_len), "items": max(1, int(items[-1]))}
    plan = Plan(
        lower(Program((node,), {v.name: v for v in values}, {}, ()), REGISTRY),
        {v.id: Slot(t.to(device)) for v, t in zip(values, given, strict=True)},
        {y.id}, rows, Weights(_NoWeights(), device, compute), [held], [], work, compute, device, deterministic=True,
    )  # fmt: skip
    plan.fill(255)
    for go in plan.launches:
        go(Batch(len(q), len(kv_len), len(kv_len), bool((new == 1).any()), bool((new > 1).any()), int(items[-1])))
    return plan.slots[y.id].tensor[: q.size].float().cpu().numpy().reshape(q.shape)


def part(inputs: tuple[Any, ...], begin: int, end: int) -> tuple[Any, ...]:
    """Rows begin to end of a batch of one prompt, as a step of their own."""
    q, _, kv_len, table, cache = inputs
    left = int(kv_len[0]) - len(q)
    return q[begin:end].copy(), np.array([0, end - begin], np.int32), np.array([left + end], np.int32), table, cache


@pytest.mark.parametrize("name", SPECS)
def test_a_row_has_the_same_bits_however_its_prompt_is_cut(name: str) -> None:
    spec, inputs = SPECS[name], batch(SPECS[name], [(150, 300)])
    whole = attend(spec, inputs, "float16")
    for begin, end in ((0, 1), (0, 101), (105, 106), (106, 107), (107, 108), (101, 150), (149, 150)):
        assert np.array_equal(attend(spec, part(inputs, begin, end), "float16"), whole[begin:end]), (begin, end)


@pytest.mark.parametrize("compute", ["float16", "float32"])
@pytest.mark.parametrize("name", SPECS)
def test_rows_are_right(name: str, compute: Compute) -> None:
    spec = SPECS[name]
    inputs = batch(spec, [(1, 401), (40, 200), (1, 128), (1, 129), (1, 1), (2, 130), (0, 20)])
    found = (attend(spec, inputs, compute),)
    worst = errors(ATTENTION, spec, found, reference.run_op(ATTENTION, spec, inputs))
    assert max(worst.values()) <= ATTENTION.tolerance[compute]


def test_splits_lie_at_fixed_keys() -> None:
    starts, kv_len = np.array([0, 1, 3, 4, 4], np.int32), np.array([129, 300, 128, 0], np.int32)
    assert item_starts(starts, kv_len, same=True).tolist() == [0, 2, 2, 3, 3]
