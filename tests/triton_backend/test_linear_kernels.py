"""Which kernel serves which rows of which maps: the table, and what 33 to 128 rows read by warpgroups, in which tiles."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from quarrel.ops.contract import Compute
from quarrel.triton_backend.linear import kernels, wgmma
from quarrel.triton_backend.linear.kernels import ByRows
from quarrel.triton_backend.linear.maps import UNLIMITED, Maps, Serves
from quarrel.triton_backend.linear.wgmma import Tile
from quarrel.triton_backend.runtime.arrays import Packed, Planes, Slot
from quarrel.triton_backend.runtime.kernel import Kernel
from quarrel.triton_backend.runtime.site import Batch, Site

META = torch.device("meta")
EMPTY = torch.empty(0, device=META)


@dataclass
class Recorder(Site):
    """What a builder asks of a plan; launches are kept."""

    generation: int = 9
    compute: Compute = "float16"
    deterministic: bool = False
    launched: list[tuple[Any, ...]] = field(default_factory=list)

    def launch(self, kernel: Any, grid: Any, *args: Any, **told: Any) -> None:
        self.launched.append((getattr(kernel, "__name__", "fill"), grid, told))

    def scratch(self, dim: str, width: int, dtype: torch.dtype = torch.float32) -> Slot:
        return Slot(torch.empty(width, dtype=dtype, device=META))

    def zeros(self, dim: str, width: int) -> Slot:
        return Slot(torch.empty(width, dtype=torch.int32, device=META))


@pytest.fixture(autouse=True)
def _as_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wgmma, "INTERPRETED", False)


def weight(n: int, k: int, format: str = "Q4_K") -> Packed:
    return Packed(format, n, k, EMPTY, Planes(*(EMPTY,) * 4))


def batch(count: int) -> Batch:
    return Batch(count, count, count, True, False, count)


def test_tiles_are_those_that_were_measured() -> None:
    shapes = (([14336], 4096), ([4096], 14336), ([4096, 1024, 1024], 4096), ([32000], 4096))
    assert [wgmma.tile_for(*shape, 128) for shape in shapes] == [Tile(64, 1), Tile(64, 4), Tile(64, 2), Tile(64, 1)]
    assert [wgmma.tile_for(*shape, 64) for shape in shapes] == [Tile(128, 1), Tile(128, 4), Tile(64, 2), Tile(64, 1)]
    assert [wgmma.tile_for([14336], 4096, w, gated=True, wide=True) for w in (64, 128)] == [Tile(64, 1), Tile(128, 1)]
    assert wgmma.tile_for([64], 512, 128).parts == 1


def one(w: Packed, **more: Any) -> Maps:
    slot = Slot(EMPTY)
    return Maps(slot, [slot], [w], [None], "T", **more)


def test_what_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    large = one(weight(4096, 14336))
    assert wgmma.declines(Recorder(), large) is None
    others = (Recorder(generation=8), Recorder(generation=12), Recorder(compute="bfloat16"), Recorder(deterministic=True))
    assert all(wgmma.declines(site, large) for site in others)
    for other in (weight(4096, 4096), weight(4096, 14336, "Q3_K"), weight(4096, 14400, "Q8_0")):
        assert wgmma.declines(Recorder(), one(other))
    assert "got 16777216" in str(wgmma.declines(Recorder(), one(weight(4096, 4096))))
    assert "got Q3_K of 14336" in str(wgmma.declines(Recorder(), one(weight(4096, 14336, "Q3_K"))))
    two = replace(large, weights=large.weights * 2, biases=[None] * 2)
    assert "got 2 maps" in str(wgmma.declines(Recorder(), two))
    monkeypatch.setattr(wgmma, "wgmma_kernels", None)
    assert wgmma.declines(Recorder(), large)


def test_rows_are_put_in_order_then_multiplied() -> None:
    site = Recorder()
    made = wgmma.build(site, one(weight(4096, 14336), residual=Slot(EMPTY)))
    assert (made.least, made.most, made.norms) == (33, 128, False)
    for count, width, tiles_of in ((33, 64, 32), (64, 64, 32), (65, 128, 64), (128, 128, 64)):
        site.launched.clear()
        made.run(batch(count))
        (first, grid, _), (second, programs, told) = site.launched
        assert (first, grid) == ("arrange", (112, width // 16))
        assert (second, programs, told["BT"], told["ADD"]) == ("warpgroup_one", (tiles_of, 4), width, True)


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


def test_each_count_has_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr(kernels, "KERNELS", table)
    run = ByRows(Recorder(), one(weight(64, 256), norm=lambda batch: ran.append("norm")))
    for count in (1, 2, 16, 17, 32, 33, 128, 129):
        run(batch(count))
    assert " ".join(ran) == (
        "norm tiles norm mma norm mma norm matmul norm matmul wgmma wgmma norm decoded"
    )  # fmt: skip
    assert run.describe() == "tiles 1, mma 2 to 16, matmul 17 to 32, wgmma 33 to 128, decoded from 129 rows"
    assert run.declined == ["matvec: no matvec"]


def test_a_deterministic_step_has_one_kernel_for_any_number_of_rows() -> None:
    site = Recorder(deterministic=True)
    assert ByRows(site, one(weight(4096, 14336))).describe() == "matmul from 1 rows"
    assert ByRows(replace(site, compute="float32"), one(weight(64, 256))).describe() == "exact tiles from 1 rows"
