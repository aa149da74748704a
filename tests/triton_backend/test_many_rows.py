"""Which weights 33 to 128 rows read by warpgroups, in which tiles, and what runs where they are not taken."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from quarrel.ops.contract import Compute
from quarrel.triton_backend import linear, many_rows, rows
from quarrel.triton_backend.many_rows import Tile
from quarrel.triton_backend.pack import Packed
from quarrel.triton_backend.runtime import Alone, Live, Slot

META = torch.device("meta")
EMPTY = torch.empty(0, device=META)


@dataclass
class Site(Alone):
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
    monkeypatch.setattr(many_rows, "INTERPRETED", False)


def weight(n: int, k: int, format: str = "Q4_K") -> Packed:
    return Packed(format, n, k, EMPTY, (EMPTY,) * 4)


def live(count: int) -> Live:
    return Live(count, count, count, True, False, count)


def test_tiles_are_those_that_were_measured() -> None:
    shapes = (([14336], 4096), ([4096], 14336), ([4096, 1024, 1024], 4096), ([32000], 4096))
    assert [many_rows.tile_for(*shape, 128) for shape in shapes] == [Tile(64, 1), Tile(64, 4), Tile(64, 2), Tile(64, 1)]
    assert [many_rows.tile_for(*shape, 64) for shape in shapes] == [Tile(128, 1), Tile(128, 4), Tile(64, 2), Tile(64, 1)]
    assert [many_rows.tile_for([14336], 4096, w, gated=True, wide=True) for w in (64, 128)] == [Tile(64, 1), Tile(128, 1)]
    assert many_rows.tile_for([64], 512, 128).parts == 1


def test_what_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    large = [weight(4096, 14336)]
    assert many_rows.takes(Site(), large)  # type: ignore[arg-type]
    others = (Site(generation=8), Site(generation=12), Site(compute="bfloat16"), Site(deterministic=True))
    assert not any(many_rows.takes(site, large) for site in others)  # type: ignore[arg-type]
    for other in (weight(4096, 4096), weight(4096, 14336, "Q3_K"), weight(4096, 14400, "Q8_0")):
        assert not many_rows.takes(Site(), [other])  # type: ignore[arg-type]
    monkeypatch.setattr(many_rows, "warpgroup", None)
    assert not many_rows.takes(Site(), large)  # type: ignore[arg-type]


def test_rows_are_put_in_order_then_multiplied() -> None:
    site, slot = Site(), Slot(EMPTY)
    made = many_rows.linear(site, slot, slot, weight(4096, 14336), None, slot, 1.0, "T")  # type: ignore[arg-type]
    assert made is not None
    assert (made.least, made.most, made.alone) == (33, 128, False)
    for count, width, tiles in ((33, 64, 32), (64, 64, 32), (65, 128, 64), (128, 128, 64)):
        site.launched.clear()
        made.run(live(count))
        (first, grid, _), (second, programs, told) = site.launched
        assert (first, grid) == ("arrange", (112, width // 16))
        assert (second, programs, told["BT"], told["ADD"]) == ("warpgroup_one", (tiles, 4), width, True)


def test_a_norm_puts_them_there_itself() -> None:
    site, slot = Site(), Slot(EMPTY)

    def fill(to: Slot, live: Live, width: int) -> None:
        site.launch(None, (width,))

    maps = [weight(n, 4096, f) for n, f in ((4096, "Q4_K"), (1024, "Q8_0"), (1000, "Q6_K"))]
    three = many_rows.linears(site, slot, [slot] * 3, maps, [EMPTY] * 3, "T", fill)  # type: ignore[arg-type]
    assert three is not None
    assert three.alone
    three.run(live(100))
    assert [(name, grid) for name, grid, _ in site.launched] == [("fill", (128,)), ("warpgroup_three", (96, 2))]
    assert site.launched[1][2]["BIAS"]


def test_each_count_has_one_kernel() -> None:
    ran: list[str] = []

    def go(name: str) -> Any:
        return lambda live: ran.append(name)

    few, many = rows.Few(go("rows"), 16), rows.Few(go("warpgroups"), 128, True, 33)
    made = linear.Made(go("norm"), None)
    run = linear._by_count("T", go("one"), [few, None, many], go("tiles"), go("decoded"), made)
    for count in (1, 2, 16, 17, 32, 33, 128, 129):
        run(live(count))
    assert " ".join(ran) == (
        "norm one norm rows norm rows norm tiles norm tiles warpgroups warpgroups norm decoded"
    )  # fmt: skip
