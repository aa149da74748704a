"""Rows gathered for the ring of experts, which stacks it takes, and how scales are kept within float16."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from quarrel.gguf import GGMLType
from quarrel.ops import draw
from quarrel.ops.contract import Compute, WeightRef
from quarrel.triton_backend.backend import TritonBackend
from quarrel.triton_backend.experts import ring
from quarrel.triton_backend.experts.maps import ExpertMaps
from quarrel.triton_backend.formats.pack import blank, put
from quarrel.triton_backend.formats.table import RING
from quarrel.triton_backend.formats.weights import META
from quarrel.triton_backend.linear import ring as linear_ring
from quarrel.triton_backend.linear.ring import Cut
from quarrel.triton_backend.runtime.arrays import Packed, Planes
from quarrel.triton_backend.runtime.launch import INTERPRETED, launch
from tests.triton_backend.test_fuse import program
from tests.triton_backend.test_step import LIMITS, Weights


def packed(type: GGMLType, rows: int, k: int, scale: float = 1.0) -> Packed:
    weight = draw.weight(np.random.default_rng(1), type, rows, k, scale)
    made = blank(type, rows, k, torch.device("cpu"))
    put(made, type, 0, torch.from_numpy(np.ascontiguousarray(weight.raw)))
    return made


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize(("k", "used", "block"), [(256, 2, 8), (672, 3, 16), (2880, 1, 8)])
def test_rows_lie_by_expert_in_the_order_of_columns_that_lanes_decode(k: int, used: int, block: int, groups: bool) -> None:
    rng = np.random.default_rng(k)
    tokens, experts, padded = 11, 5, -(-k // 256) * 256
    ids = rng.integers(0, experts, tokens * used)
    order = np.argsort(ids, kind="stable").astype(np.int32)
    starts = np.searchsorted(ids[order], np.arange(experts + 1)).astype(np.int32)
    x = rng.standard_normal((tokens, k)).astype(np.float32)
    rows = torch.full((tokens * used, padded), float("nan"), dtype=torch.float16)
    items = torch.full((1 + 4 * (tokens * used + experts),), -1, dtype=torch.int32)
    device = "cpu" if INTERPRETED else "cuda"
    known = [torch.from_numpy(order), torch.from_numpy(starts)]
    filled = [torch.full_like(t, -1) for t in known] if groups else known
    own = torch.from_numpy(ids.astype(np.int32))
    arguments = [t.to(device) for t in (rows, items, torch.from_numpy(x), *filled, own)]
    launch(
        ring.gather_by_expert, (len(ids) + 1, -(-padded // 512)), *arguments, len(ids), k, EXPERTS=experts, PADDED=8,
        PER_TOKEN=used, KP=padded, BT=block, C=512, GROUPS=64 if groups else 0, early=False,
    )  # fmt: skip
    for made, right in zip(arguments[3:5], known, strict=True):
        np.testing.assert_array_equal(made.cpu().numpy(), right.numpy())
    place = np.arange(padded)
    # Bits of a place of 128: word (2), next, upper, block (2), one.
    word, next, upper, lane, one = place // 32 % 4, place // 16 % 2, place // 8 % 2, place // 2 % 4, place % 2
    column = place // 128 * 128 + lane * 32 + upper * 16 + word * 4 + one * 2 + next
    assert sorted(column) == list(range(padded))
    want = np.pad(x, ((0, 0), (0, padded - k)))[order // used][:, column].astype(np.float16)
    np.testing.assert_array_equal(arguments[0].cpu().numpy(), want)
    table = arguments[1].cpu().numpy()
    listed = table[1 : 1 + 4 * table[0]].reshape(-1, 4)[:, :3]
    counts = np.bincount(ids, minlength=experts)
    expected = [
        (e, starts[e] + first, min(block, count - first))
        for e, count in enumerate(counts)
        for first in range(0, count, block)
    ]
    assert sorted(map(tuple, listed.tolist())) == [tuple(map(int, item)) for item in expected]


@dataclass
class Site:
    """What `declines` asks of a plan."""

    generation: int = 9
    compute: Compute = "float16"
    deterministic: bool = False


@pytest.mark.parametrize(
    ("site", "format", "k", "taken"),
    [
        (Site(), "Q4_K", 4096, True),
        (Site(), "MXFP4", 2880, True),
        (Site(), "Q5_0", 2688, True),
        (Site(), "Q5_0", 1856, True),
        (Site(), "Q5_0", 2650, False),
        (Site(), "Q2_K", 4096, False),
        (Site(), "F16", 4096, False),
        (Site(generation=8), "Q4_K", 4096, False),
        (Site(generation=12), "Q4_K", 4096, False),
        (Site(compute="bfloat16"), "Q4_K", 4096, False),
        (Site(deterministic=True), "Q4_K", 4096, True),
    ],
)
def test_which_stacks_it_takes(site: Any, format: str, k: int, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_ring, "INTERPRETED", False)
    empty = torch.empty(0)
    weight = Packed(format, 64, k, empty, Planes(*(empty,) * 4))
    assert (ring.declines(site, ExpertMaps([weight], [], 2, 1, "none")) is None) is taken
    assert ring.declines(site, ExpertMaps([replace(weight, reused=True)], [], 2, 1, "none")) is not None


@pytest.mark.parametrize(
    ("type", "k", "whole"),
    [
        (GGMLType.Q4_K, 4096, 4),
        (GGMLType.Q6_K, 256, 4),
        (GGMLType.Q8_0, 2048, 1),
        (GGMLType.Q8_0, 1856, 8),
        (GGMLType.Q5_0, 1856, 8),
        (GGMLType.MXFP4, 2880, 16),
    ],
)
def test_copies_of_each_matrix_of_a_stack_begin_at_whole_16_bytes(type: GGMLType, k: int, whole: int) -> None:
    """Others stop an H200 with an illegal instruction."""

    def taken(n: int) -> bool:
        return linear_ring.declines_stacks([blank(type, 4 * n, k, META)], n) is None

    assert linear_ring.rows_of_stack(type, k) == whole
    assert taken(whole)
    assert taken(3 * whole)
    assert whole == 1 or not (taken(whole // 2) or taken(whole + 1))


@pytest.mark.parametrize(
    ("type", "n", "k", "experts", "each", "cut"),
    [
        (GGMLType.MXFP4, 2880, 2880, 32, 4.0, Cut(8, 3, 4)),
        (GGMLType.Q5_0, 1856, 2688, 128, 1.5, Cut(8, 4, 4)),
        (GGMLType.Q4_K, 1536, 512, 64, 3.0, Cut(8, 3, 4)),
        # Smaller tiles would have a second turn for a few units.
        (GGMLType.Q4_K, 4096, 14336, 8, 2.0, Cut(8, 2, 8, 2)),
        (GGMLType.Q4_K, 4096, 14336, 8, 8.0, Cut(16, 2, 8, 2)),
        (GGMLType.Q6_K, 4096, 14336, 8, 8.0, Cut(16, 1, 8, 2)),
        (GGMLType.MXFP4, 2880, 2880, 32, 16.0, Cut(32, 2)),
        (GGMLType.MXFP4, 2880, 2880, 32, 64.0, Cut(64, 1)),
    ],
)
def test_how_products_are_cut(
    type: GGMLType, n: int, k: int, experts: int, each: float, cut: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_ring.Product, "multiprocessors", 132)
    made = linear_ring.Product(Site(), [blank(type, experts * n, k, META)], n, "none", ())  # type: ignore[arg-type]
    assert ring.cut_of(made, each, experts) == cut


@pytest.mark.parametrize(
    ("type", "k", "lying"),
    [
        (GGMLType.Q4_K, 4096, ("top",)),
        (GGMLType.Q6_K, 4096, ("top",)),
        (GGMLType.Q8_0, 2048, ()),
        (GGMLType.Q8_0, 1856, ("scale",)),
        (GGMLType.Q5_0, 2688, ("scale",)),
        (GGMLType.Q5_0, 1856, ("scale", "bits")),
        (GGMLType.MXFP4, 2880, ("scale",)),
        (GGMLType.MXFP4, 4096, ("scale",)),
    ],
)
def test_what_is_transposed(type: GGMLType, k: int, lying: tuple[str, ...]) -> None:
    weight = packed(type, 40, k)
    made = linear_ring.Matrices.of(weight)
    assert made is linear_ring.Matrices.of(weight)  # copied once, whoever reads it
    _, scale, bits, top = (tile.base for tile in made.descriptors(32))
    planes = {"scale": (scale, weight.planes.scale), "bits": (bits, weight.planes.bits), "top": (top, weight.planes.top)}
    for name in lying:
        tile, plane = planes[name]
        want = plane.reshape(40, -1).view(torch.uint8)
        if name == "top" and type is GGMLType.Q6_K:
            want = want.view(torch.int16).to(torch.int32).view(torch.uint8)
        size = tile.element_size()
        got = tile.view(torch.int32 if size == 4 else torch.int16 if size == 2 else torch.uint8).T.contiguous()
        np.testing.assert_array_equal(got.view(torch.uint8).numpy(), want.numpy())
        assert tile.stride(0) * size % 16 == 0
    room = sum(tile.untyped_storage().nbytes() for tile, plane in planes.values() if tile.shape[1] == 40)
    assert room == linear_ring.transposed_bytes(type, 40, k)
    assert (scale.shape[1] == 40) is ("scale" in lying)


@pytest.mark.parametrize("type", [GGMLType[name] for name in RING])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_scales_fit_float16(type: GGMLType, scale: float) -> None:
    weight = packed(type, 32, 512, scale)
    down = 2.0 ** -linear_ring.shift_of(weight)
    dense = np.abs(draw.weight(np.random.default_rng(1), type, 32, 512, scale).dense())
    # What a code of one is worth is at least a 127th of the largest value of a block, and below all of it.
    ceiling = dense.max() * 2.0**24 if type is not GGMLType.MXFP4 else dense.max() / 6 * 2.0**6
    if type is GGMLType.MXFP4:
        assert ceiling * down <= 65504
    else:
        assert down == 1.0 or ceiling * down >= 16384
        assert dense.max() / 127 * 2.0**24 * down <= 65504


@pytest.mark.skipif(not INTERPRETED, reason="a GPU has further kernels")
def test_explain_says_which_kernels_multiply(backend: TritonBackend) -> None:
    step = backend.compile(program("silu"), Weights(), LIMITS, "float16")
    (up,) = [t for t in step.explain() if t.op == "expert_up"]
    assert up.implementation.endswith("grouped tiles: matvec 1 row, grouped to 479 pairs, decoded from 480 pairs")
    assert any(reason.startswith("ring: needs compute capability 9") for reason in up.declined)
    step.close()
    step = backend.compile(program("silu"), Weights(), LIMITS, "float32")
    (up,) = [t for t in step.explain() if t.op == "expert_up"]
    assert up.implementation.endswith("exact tiles")
    assert "grouped: needs 16-bit arithmetic, got float32" in up.declined
    step.close()


def test_what_is_copied_is_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_ring, "INTERPRETED", False)
    refs = [
        WeightRef("a", GGMLType.Q4_K, 64, 512),
        WeightRef("b", GGMLType.MXFP4, 30, 96),
        WeightRef("c", GGMLType.F16, 64, 512),
    ]
    # Two words to a super-block and row; one byte to a block, in rows of 32.
    assert linear_ring.copies_bytes(refs, "float16", 9) == 64 * 2 * 4 + 32 * 3
    assert linear_ring.copies_bytes(refs, "bfloat16", 9) == linear_ring.copies_bytes(refs, "float16", 12) == 0
