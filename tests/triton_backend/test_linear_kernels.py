"""Which kernel serves which rows of which maps: the table, and what 33 to 128 rows read by warpgroups, in which tiles."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quarrel.gguf import GGMLType
from quarrel.ops.contract import Compute
from quarrel.triton_backend.formats.pack import blank, rows_of
from quarrel.triton_backend.linear import invariant, mma, ring, ring_sums, wgmma
from quarrel.triton_backend.linear.kernels import KERNELS, WITHOUT_COPIES, ByRows
from quarrel.triton_backend.linear.maps import UNLIMITED, Maps, Serves
from quarrel.triton_backend.linear.wgmma import Tile
from quarrel.triton_backend.runtime.arrays import Packed, Planes, Slot
from quarrel.triton_backend.runtime.kernel import Kernel
from quarrel.triton_backend.runtime.launch import INTERPRETED, launch
from quarrel.triton_backend.runtime.site import Batch, Site

META = torch.device("meta")
EMPTY = torch.empty(0, device=META)


@dataclass
class Recorder(Site):
    """What a builder asks of a plan; launches are kept."""

    generation: int = 9
    compute: Compute = "float16"
    deterministic: bool = False
    float8: bool = False
    launched: list[tuple[Any, ...]] = field(default_factory=list)

    def launch(self, kernel: Any, grid: Any, *args: Any, **told: Any) -> None:
        self.launched.append((getattr(kernel, "__name__", "fill"), grid, told))

    def scratch(self, dim: str, width: int, dtype: torch.dtype = torch.float32) -> Slot:
        return Slot(torch.empty(width, dtype=dtype, device=META))

    def zeros(self, dim: str, width: int) -> Slot:
        return Slot(torch.empty(width, dtype=torch.int32, device=META))


@pytest.fixture(autouse=True)
def _as_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (mma, ring, wgmma):
        monkeypatch.setattr(module, "INTERPRETED", False)
    monkeypatch.setattr(ring.Product, "multiprocessors", 132)


def weight(n: int, k: int, format: str = "Q4_K") -> Packed:
    return Packed(format, n, k, EMPTY, Planes(*(EMPTY,) * 4))


def packed(n: int, k: int, format: str = "Q4_K") -> Packed:
    """With planes of the right sizes."""
    return blank(GGMLType[format], n, k, META)


def batch(count: int) -> Batch:
    return Batch(count, count, count, True, False, count)


def test_tiles_are_those_that_were_measured() -> None:
    assert [wgmma.tile_for([4096, 1024, 1024], 4096, width) for width in (64, 128)] == [Tile(64, 2), Tile(64, 2)]
    assert [wgmma.tile_for([8192, 2048, 2048], 4096, 64, wide) for wide in (False, True)] == [Tile(64, 1), Tile(64, 1)]
    assert [wgmma.tile_for([8192, 4096, 1024], 4096, 64, wide) for wide in (False, True)] == [Tile(128, 1), Tile(64, 1)]
    assert wgmma.tile_for([64], 512, 128).parts == 1


def one(w: Packed, **more: Any) -> Maps:
    slot = Slot(EMPTY)
    return Maps(slot, [slot], [w], [None], "T", **more)


def three(*weights: Packed) -> Maps:
    slot = Slot(EMPTY)
    return Maps(slot, [slot] * 3, weights, [None] * 3, "T")


def test_what_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    large = three(*(weight(n, 4096) for n in (4096, 1024, 1024)))
    assert wgmma.declines(Recorder(), large) is None
    others = (Recorder(generation=8), Recorder(generation=12), Recorder(compute="bfloat16"), Recorder(deterministic=True))
    assert all(wgmma.declines(site, large) for site in others)
    for other in (weight(4096, 4096, "Q3_K"), weight(4096, 4128, "Q8_0")):
        assert wgmma.declines(Recorder(), three(other, other, other))
    small = weight(1024, 4096)
    assert "got 12582912" in str(wgmma.declines(Recorder(), three(small, small, small)))
    assert "got 1 maps" in str(wgmma.declines(Recorder(), one(weight(4096, 14336))))
    monkeypatch.setattr(wgmma, "wgmma_kernels", None)
    assert wgmma.declines(Recorder(), large)


def test_rows_are_put_in_order_then_multiplied() -> None:
    site = Recorder()
    made = wgmma.build(site, three(*(weight(n, 4096) for n in (4096, 1024, 1024))))
    assert (made.least, made.most, made.norms) == (33, 128, False)
    for count, width in ((33, 64), (64, 64), (65, 128), (128, 128)):
        site.launched.clear()
        made.run(batch(count))
        (first, grid, _), (second, programs, told) = site.launched
        assert (first, grid) == ("arrange", (32, width // 16))
        assert (second, programs, told["BT"], told["BIAS"]) == ("warpgroup_three", (96, 2), width, False)


def test_a_norm_puts_them_there_itself() -> None:
    site, slot = Recorder(), Slot(EMPTY)

    def fill(to: Slot, batch: Batch, width: int) -> None:
        site.launch(None, (width,))

    weights = [weight(n, 4096, f) for n, f in ((4096, "Q4_K"), (1024, "Q8_0"), (1000, "Q6_K"))]
    maps = Maps(slot, [slot] * 3, weights, [EMPTY] * 3, "T", norm=lambda batch: None, arrange=fill)
    assert wgmma.declines(site, maps) is None
    three = wgmma.build(site, maps)
    assert three.norms
    three.run(batch(100))
    assert [(name, grid) for name, grid, _ in site.launched] == [("fill", (128,)), ("warpgroup_three", (96, 2))]
    assert site.launched[1][2]["BIAS"]


def test_a_large_map_streams_through_the_ring() -> None:
    """In tiles of as many rows as there are, and in parts of K where there would be fewer units than programs."""
    site = Recorder()
    maps = one(packed(4096, 14336), residual=Slot(EMPTY))
    made = ring.build(site, maps)
    assert (made.least, made.most, made.norms) == (2, 512, False)
    cuts = (
        (8, 8, 2, 7, 2),
        (9, 16, 2, 7, 2),
        (32, 32, 2, 8, 1),
        (64, 64, 1, 4, 1),
        (65, 128, 1, 4, 1),
        (512, 128, 1, 1, 1),
    )
    for count, width, residents, parts, span in cuts:
        site.launched.clear()
        made.run(batch(count))
        (first, rows, _), (second, programs, told), (third, _, added) = site.launched
        assert (first, rows) == ("arrange", (count, 14))
        assert (second, programs) == ("ring", (132 * residents,))
        assert (told["BT"], told["PARTS"], told["TILES"], told["SPAN"]) == (width, parts, 32, span)
        assert (third, added["PARTS"], added["ADD"]) == ("add_parts", parts, True)
    head = ring.build(site, one(packed(32000, 4096, "Q6_K")))
    site.launched.clear()
    head.run(batch(32))
    assert [name for name, _, _ in site.launched] == ["arrange", "ring"]
    assert ring.build(site, one(packed(4096, 4096))).least == 33
    assert ring.build(site, one(packed(2880, 4096, "Q8_0"))).least == 8
    assert ring.build(site, one(packed(201088, 2880, "Q8_0"))).least == 2  # rows of no whole super-blocks, which mma needs
    # Of few outputs from 8 rows on, smaller ones too.
    for n, k, least, most in ((2688, 4096, 8, 512), (1536, 3072, 8, 32), (3072, 4096, 33, 512)):
        made = ring.build(site, one(packed(n, k)))
        assert (made.least, made.most) == (least, most)


def beside(*ns: int, k: int = 2880, format: str = "Q8_0") -> list[Packed]:
    """Matrices that lie in one."""
    whole = packed(sum(ns), k, format)
    return [rows_of(whole, sum(ns[:i]), n) for i, n in enumerate(ns)]


def test_three_maps_in_one_matrix_stream_through_the_ring_as_one() -> None:
    site, parts = Recorder(), beside(4096, 512, 512)
    made = ring.build(site, three(*parts))
    assert (made.least, made.most) == (2, 128)
    for count, width, cut in ((2, 8, 6), (17, 32, 6), (32, 32, 6), (64, 64, 3), (128, 128, 3)):
        site.launched.clear()
        made.run(batch(count))
        (first, rows, _), (second, _, told), (third, programs, added) = site.launched
        assert (first, rows) == ("arrange", (count, 3))
        assert (second, told["BT"], told["PARTS"], told["TILES"], told["BIAS"]) == ("ring", width, cut, 40, False)
        assert (third, programs, added["PARTS"], added["BIAS"]) == ("add_parts_of_three", (count, 20), (cut,) * 3, False)
    mamba = ring.build(site, three(*beside(4096, 6144, 64, k=2688, format="Q5_0")))
    site.launched.clear()
    mamba.run(batch(8))
    (_, _, told), (_, programs, _) = site.launched[1:]
    assert (told["TILES"], programs) == (81, (8, 41))  # the last of 64 rows is a tile, and columns, of its own
    by_rows = ByRows(site, three(*parts))
    assert by_rows.describe().startswith("exact tiles 1, ring 2 to 128, dequantize")
    whole_blocks = three(*beside(4096, 1024, 1024, k=4096, format="Q4_K"))
    assert ByRows(site, whole_blocks).describe().startswith("exact tiles 1, ring 2 to 128, dequantize")
    others = [[*parts[:2], packed(512, 2880, "Q8_0")], parts[:1] * 3, [packed(n, 2880, "Q8_0") for n in (4096, 512, 512)]]
    for some in others:
        assert "in one matrix" in str(ring.declines(site, three(*some)))


def test_three_maps_of_several_formats_are_a_launch_to_each_matrix() -> None:
    q, k = beside(4096, 1024, k=4096, format="Q4_K")
    v = packed(1024, 4096, "Q6_K")
    site = Recorder()
    made = ring.build(site, three(q, k, v))
    assert (made.least, made.most) == (17, 64)
    made.run(batch(32))
    (first, *_), (_, _, both), (_, _, last), (third, programs, added) = site.launched
    assert (first, third, programs) == ("arrange", "add_parts_of_three", (32, 24))
    assert [(told["FORMAT"], told["TILES"]) for told in (both, last)] == [("Q4_K", 40), ("Q6_K", 8)]
    assert added["PARTS"] == (both["PARTS"], both["PARTS"], last["PARTS"])
    assert ring.declines(site, three(q, k, packed(1024, 4096, "Q2_K"))) is not None
    assert ring.declines(site, three(q, packed(1000, 4096, "Q4_K"), v)) is not None
    assert ring.declines(site, three(*beside(2048, 256, k=2048, format="Q4_K"), packed(256, 2048, "Q6_K"))) is not None
    lonely = beside(4096, 1024, k=4096, format="Q4_K")[0]
    assert ring.matrices([lonely, q, k]) == [(lonely, 1), (q.whole, 2)]


@pytest.mark.parametrize("together", [3, 2, 1])
@pytest.mark.parametrize("ns", [(512, 256, 256), (512, 256, 48), (256, 256, 300)])
def test_columns_of_three_results_are_added_and_parted(ns: tuple[int, int, int], together: int) -> None:
    """The first so many of them are columns of one matrix."""
    rng, (tokens, parts) = np.random.default_rng(3), (3, 4)
    sums = rng.standard_normal((parts, tokens, sum(ns))).astype(np.float32)
    biases = [rng.standard_normal(n).astype(np.float32) for n in ns]
    device = "cpu" if INTERPRETED else "cuda"
    for given in (True, False):
        ys = tuple(torch.full((tokens, n), float("nan"), device=device) for n in ns)
        made, at = [], 0
        for width in (sum(ns[:together]), *ns[together:]):
            made.append(torch.from_numpy(sums[:, :, at : at + width].copy()).to(device).reshape(-1))
            at += width
        of = [max(0, i + 1 - together) for i in range(3)]
        widths = [made[j].numel() // (tokens * parts) for j in of]
        three = [
            ring_sums.Sums(made[j], width, parts, sum(ns[:i]) if i < together else 0)
            for i, (j, width) in enumerate(zip(of, widths, strict=True))
        ]
        site: Any = SimpleNamespace(launch=launch, generation=0)
        ring_sums.add_three(site, ys, ns, three, [torch.from_numpy(b).to(device) for b in biases] if given else [], tokens)
        want = np.split(sums.sum(0), np.cumsum(ns)[:-1], axis=1)
        for y, exact, bias in zip(ys, want, biases, strict=True):
            np.testing.assert_allclose(y.cpu().numpy(), exact + bias * given, rtol=1e-5, atol=1e-5)


def test_which_maps_stream_through_the_ring() -> None:
    gated = replace(one(packed(14336, 4096)), weights=[packed(14336, 4096)] * 2, biases=[None] * 2, activation="silu")
    taken = {"Q4_K": True, "Q8_0": True, "MXFP4": True, "Q2_K": False}
    assert {f: ring.declines(Recorder(), one(packed(4096, 14336, f))) is None for f in taken} == taken
    assert ring.declines(Recorder(), gated) is None
    assert "got 2 maps" in str(ring.declines(Recorder(), replace(gated, activation="none")))
    assert "in one matrix" in str(ring.declines(Recorder(), three(*[packed(1024, 4096)] * 3)))
    assert "needs 4194304 weights or more, got 3145728" in str(ring.declines(Recorder(), one(packed(1024, 3072))))
    assert "needs 8388608 weights or more, got 6291456" in str(ring.declines(Recorder(), one(packed(3072, 2048))))
    assert ring.declines(Recorder(), one(replace(packed(4096, 14336), reused=True)))
    by_rows = ByRows(Recorder(), replace(gated, norm=lambda batch: None, arrange=lambda to, batch, width: None))
    assert by_rows.describe().startswith("exact tiles 1, ring 2 to 512, dequantize")


def test_maps_that_no_launch_computes_together_go_three_at_a_time_and_one_by_one() -> None:
    """Four of a gated delta net, and of three the one that has a bias."""
    site, normed = Recorder(), []
    arrange = lambda to, batch, width: normed.append(width)  # noqa: E731
    ns = (8192, 4096, 32, 32)
    four = replace(
        three(*[packed(n, 2048) for n in ns]),
        ys=[Slot(EMPTY) for n in ns], biases=[None] * 4,
        norm=lambda batch: normed.append(0), arrange=arrange,
    )  # fmt: skip
    by_rows = ByRows(site, four)
    assert by_rows.describe().startswith("exact tiles 1, separate launches 2 to 128, dequantize, then the library's")
    by_rows(batch(8))
    assert [name for name, *_ in site.launched] == ["rows_three", "rows_one"]
    assert normed == [8, 8]  # each puts the norm where it reads it
    site.launched.clear()
    biased = replace(four, weights=four.weights[:3], ys=four.ys[:3], biases=[None, EMPTY, None])  # type: ignore[arg-type]
    ByRows(site, biased)(batch(8))
    assert [name for name, *_ in site.launched] == ["rows_one"] * 3
    assert ByRows(Recorder(deterministic=True, generation=8), four).describe() == "separate launches from 1 rows"


def test_rows_that_are_no_whole_super_blocks_take_mma_where_it_is_faster() -> None:
    attention = [packed(n, 2880, "Q8_0") for n in (4096, 512, 512)]
    assert list(mma.splits_by_width(Recorder(), "three", attention)) == [8, 16]
    assert mma.declines(Recorder(), one(attention[0])) is None
    assert "whole 256 columns" in str(mma.declines(Recorder(), one(weight(64, 2880))))


def test_maps_of_short_steps_keep_no_copy_of_their_weights() -> None:
    """It would be a second one, beside those of the maps that long steps run by themselves."""
    others = [kernel.name for kernel in KERNELS if kernel not in WITHOUT_COPIES]
    assert others == ["e4m3", "dequantize, then the library's matmul"]


def test_each_count_has_one_kernel() -> None:
    ran: list[str] = []

    def kernel(name: str, least: int, most: int, norms: bool = False, reason: str | None = None) -> Kernel:
        serves = Serves(lambda batch: ran.append(name), least, most, norms)
        return Kernel(name, lambda site, maps: reason, lambda site, maps: serves)

    table = (
        kernel("matvec", 1, 1, reason="no matvec"),
        kernel("mma", 2, 16),
        kernel("wgmma", 33, 128, norms=True),
        kernel("matmul", 2, 128),
        kernel("decoded", 129, UNLIMITED),
        kernel("tiles", 0, UNLIMITED),
    )
    run = ByRows(Recorder(), one(weight(64, 256), norm=lambda batch: ran.append("norm")), table)
    for count in (1, 2, 16, 17, 32, 33, 128, 129):
        run(batch(count))
    assert " ".join(ran) == (
        "norm tiles norm mma norm mma norm matmul norm matmul wgmma wgmma norm decoded"
    )  # fmt: skip
    assert run.describe() == "tiles 1, mma 2 to 16, matmul 17 to 32, wgmma 33 to 128, decoded from 129 rows"
    assert run.declined == ["matvec: no matvec"]


def test_a_deterministic_step_has_one_kernel_for_any_number_of_rows() -> None:
    site = Recorder(deterministic=True)
    assert ByRows(site, one(packed(4096, 14336))).describe() == "invariant ring from 1 rows"
    assert ByRows(site, one(packed(4096, 14336, "Q2_K"))).describe() == "matmul from 1 rows"
    assert ByRows(replace(site, generation=8), one(weight(4096, 14336))).describe() == "matmul from 1 rows"
    assert ByRows(replace(site, compute="float32"), one(weight(64, 256))).describe() == "exact tiles from 1 rows"


def test_parts_of_k_do_not_follow_from_the_number_of_rows() -> None:
    """Whether parts are apart or in turn, and how wide an item is, may."""
    site = Recorder(deterministic=True)
    down = invariant.build(site, one(packed(4096, 14336), residual=Slot(torch.empty(1 << 24, device=META))))
    seen = set()
    for count in (1, 8, 9, 32, 33, 64, 65, 128, 129, 512, 1024):
        site.launched.clear()
        down.run(batch(count))
        ((name, _, told),) = [launch for launch in site.launched if launch[0] == "ring"]
        assert (name, told["PARTS"]) == ("ring", 4)
        adds = [told["PARTS"] for name, _, told in site.launched if name == "add_parts"]
        assert adds == ([] if told["IN_TURN"] else [4])
        assert told["ADD"] is told["IN_TURN"]
        seen.add((told["BT"], told["IN_TURN"]))
    assert seen == {(8, False), (16, False), (32, False), (64, False), (128, False), (128, True)}


def test_long_prompts_are_cut_into_equal_launches() -> None:
    assert invariant.pieces(0) == []
    assert invariant.pieces(1024) == [(0, 1024)]
    assert invariant.pieces(1030) == [(0, 640), (640, 390)]
    assert invariant.pieces(4096) == [(i * 1024, 1024) for i in range(4)]


def test_three_maps_of_an_invariant_ring() -> None:
    """Those in one matrix are one product; others, as of two formats, share x."""
    site = Recorder(deterministic=True)
    whole = packed(6144, 4096)
    beside = three(*(rows_of(whole, at, n) for at, n in ((0, 4096), (4096, 1024), (5120, 1024))))
    apart = three(packed(4096, 4096), packed(1024, 4096), packed(1024, 4096, "Q6_K"))
    for maps, want in (
        (beside, ["arrange", "ring", "add_parts_of_three"]),
        (apart, ["arrange", *["ring", "add_parts"] * 3]),
    ):
        site.launched.clear()
        maps.ys[0].tensor = torch.empty(1 << 20, device=META)
        invariant.build(site, maps).run(batch(1))
        assert [name for name, *_ in site.launched] == want
    site.launched.clear()
    invariant.build(site, beside).run(batch(1024))
    (_, (_, _, told)) = site.launched
    assert told["THREE"] is told["IN_TURN"] is True


def test_a_weight_in_the_compute_type_is_the_library_s_whatever_its_columns() -> None:
    """As 4304 columns, which are no whole blocks of 32, of a tower of SigLIP."""
    odd = ByRows(Recorder(), one(packed(1152, 4304, "F16"), residual=Slot(EMPTY)))
    assert odd.describe().endswith("dequantize, then the library's matmul from 2 rows")
    assert "exact tiles from 1 rows" in ByRows(Recorder(), one(packed(1152, 588, "F32"))).describe()
    assert "exact tiles" in ByRows(Recorder(deterministic=True), one(packed(1152, 4304, "F16"))).describe()


@pytest.mark.parametrize("format", ["MXFP4", "Q4_K"])
def test_parts_of_sums_have_room_with_any_number_of_rows(format: str) -> None:
    """Items of MXFP4 are half as wide, so that 257 to 320 rows may be apart where 256 and 384 are not."""
    for tiles in range(1, 140, 3):
        for steps in (4, 8, 16, 56):
            parts = invariant.parts_for(tiles, steps, 132)
            plans = [invariant.plan_for(n, tiles, steps, parts, 132, format) for n in range(1, invariant.AT_ONCE + 1)]
            most = invariant.most_apart(tiles, steps, parts, 132, format)
            assert most >= max((n for n, plan in enumerate(plans, 1) if plan.apart), default=0)
