"""`attend_latent_head` by itself: float64, and `attend_latent_one`, at the edges of tiles and splits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl

from quarrel.ops.contract import Array, rel_error
from quarrel.triton_backend.attention import latent, latent_head
from quarrel.triton_backend.attention.decode import LOG2E
from quarrel.triton_backend.attention.records import Append, Keys, Partial, Rotation, Sequences
from quarrel.triton_backend.attention.splits import MOST_SPLITS, splits_of_one
from quarrel.triton_backend.backend import TritonBackend
from quarrel.triton_backend.runtime.launch import INTERPRETED, launch
from tests.triton_backend import test_latent

HEADS, DIM, RANK, SIZE = 3, 64, 512, 16
SCALE, MAGNITUDE, EPS = 0.05, 1.2, 1e-6
DEVICE = "cpu" if INTERPRETED else "cuda"
LENGTHS = (1, 2, 31, 32, 33, 100, 300)
FACTORS = {"int8": (torch.int8, 128), "fp8": (torch.float8_e4m3fn, 256), "fp8_e5m2": (torch.float8_e5m2, 256)}


@dataclass
class Layer:
    """One sequence's keys among blocks of others, which nobody may read, and its new token."""

    keys: int
    style: str
    normed: bool
    kind: str = "plain"

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.keys)
        blocks = -(-self.keys // SIZE)
        self.table = torch.randperm(2 * blocks, generator=g)[:blocks].to(torch.int32)
        self.slots = (self.table[:, None].long() * SIZE + torch.arange(SIZE)).reshape(-1)[: self.keys]
        self.whole = {n: torch.randn(self.keys, n, generator=g) for n in (DIM, RANK)}
        self.q = torch.randn(HEADS, DIM + RANK, generator=g).half()
        self.new = {n: torch.randn(n, generator=g).half() for n in (DIM, RANK)}
        self.gain = torch.randn(RANK, generator=g)
        self.freq = 10000.0 ** (-2.0 * torch.arange(DIM // 2) / DIM)

    def cache(self) -> Keys:
        """With NaN wherever no key is."""
        made: dict[int, torch.Tensor] = {}
        scales: dict[int, torch.Tensor] = {}
        for n, x in self.whole.items():
            rows = 2 * len(self.table) * SIZE
            scales[n] = torch.full((rows,), float("nan"))
            if self.kind == "plain":
                made[n] = torch.full((rows, n), float("nan"), dtype=torch.float16)
                made[n][self.slots] = x.half()
            else:
                type, factor = FACTORS[self.kind]
                made[n] = torch.full((rows, n), 0x7F, dtype=torch.uint8)
                made[n][self.slots] = (x * 25).to(type).view(torch.uint8)
                scales[n][self.slots] = factor / 25
            if self.style:
                made[n][self.slots[-1]] = float("nan")
        return Keys(*(t.to(DEVICE) for t in (made[DIM], made[RANK], scales[DIM], scales[RANK])))

    def rotated(self, x: Array) -> Array:
        """Rows [.., DIM], rotated to the last position."""
        if not self.style:
            return x
        angle = (np.float32(self.keys - 1) * self.freq.numpy()).astype(np.float64)
        at = np.arange(DIM).reshape(2, -1) if self.style == "neox" else np.arange(DIM).reshape(-1, 2).T
        a, b, y = x[..., at[0]], x[..., at[1]], np.empty_like(x)
        y[..., at[0]], y[..., at[1]] = a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)
        return y * MAGNITUDE

    def want(self) -> Array:
        q = self.q.double().numpy()
        k, v = (x.half().double().numpy() for x in self.whole.values())
        if self.kind != "plain":
            type, _ = FACTORS[self.kind]
            k, v = ((x * 25).to(type).double().numpy() / 25 for x in self.whole.values())
        if self.style:
            k[-1], v[-1] = self.rotated(self.new[DIM].double().numpy()), self.new[RANK].double().numpy()
            if self.normed:
                v[-1] *= self.gain.double().numpy() / np.sqrt(np.square(v[-1]).mean() + EPS)
        score = (self.rotated(q[:, :DIM]) @ k.T + q[:, DIM:] @ v.T) * SCALE
        p = np.exp(score - score.max(1, keepdims=True))
        return p @ v / p.sum(1, keepdims=True)

    def run(self, splits: int, tile: tuple[int, int] | None) -> tuple[Array, Keys]:
        """By `attend_latent_head` in such a tile, or by `attend_latent_one`; the cache after it, too."""

        def ints(*values: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=DEVICE)

        cache, q, new, items = self.cache(), self.q.to(DEVICE), self.new, splits + 1
        out = torch.full((HEADS, RANK), float("nan"), dtype=torch.float16, device=DEVICE)
        sums, tops = (torch.full((items * HEADS * n,), float("nan"), device=DEVICE) for n in (RANK, 2))
        starts, shape = ints(0, splits), latent.LatentShape(HEADS, DIM, RANK, SIZE, self.kind)
        turn = ints(self.keys - 1), self.freq.to(DEVICE), ints(int(self.slots[-1])), MAGNITUDE, MAGNITUDE
        rotation = Rotation(new[DIM].to(DEVICE), new[RANK].to(DEVICE), *turn)
        common: dict[str, Any] = {"out": out, "partial": Partial(sums, tops, starts), "item_start": starts, "S": shape}
        given = common | {"q": q, "append": Append(rotation, self.gain.to(DEVICE), EPS), "cache": cache}
        given |= {"sequences": Sequences(ints(0, 1), ints(self.keys), self.table.to(DEVICE), ints(len(self.table)))}
        given |= {"scale": SCALE * LOG2E, "ROTATE": self.style, "NORMS": self.normed, "COMPUTE": tl.float16}
        if tile is None:
            own = {"seqs": 1, "BLOCK_M": 16, "BLOCK_N": 32, "EARLY": True}
            launch(latent.attend_latent_one, (items, 1), **given, **own, warps=4, early=False)
        else:
            keys, warps = tile
            own = {"KEYS": keys // warps, "WARPS": warps}
            launch(latent_head.attend_latent_head, (items, HEADS), **given, **own, warps=warps, early=False)
        launch(latent.combine_latent, (1, HEADS), **common, query_start=ints(0, 1), early=False)
        return out.cpu().double().numpy(), cache

    def check(self, splits: int, tile: tuple[int, int]) -> None:
        got, cache = self.run(splits, tile)
        other, kept = self.run(splits, None)
        assert rel_error(got, self.want()) < 1e-3
        assert rel_error(got, other) < 1e-3
        for one, two in zip(cache[:2], kept[:2], strict=True):
            # A GPU's threads may add the squares of a norm in another order.
            bits = 0.0 if INTERPRETED and not self.normed else 1e-3
            assert torch.allclose(one.double(), two.double(), rtol=bits, atol=bits, equal_nan=True)


@pytest.mark.parametrize(("style", "normed"), [("", False), ("norm", True), ("neox", True), ("norm", False)])
@pytest.mark.parametrize("keys", LENGTHS)
def test_every_length(keys: int, style: str, normed: bool) -> None:
    Layer(keys, style, normed).check(splits_of_one(keys, short=MOST_SPLITS), (16, 4))


@pytest.mark.parametrize("tile", [(16, 4), (32, 8), (16, 8), (8, 4)])
@pytest.mark.parametrize("splits", [1, 2, 5])
def test_every_tile_and_splits_of_several_tiles(tile: tuple[int, int], splits: int) -> None:
    Layer(300, "norm", True).check(splits, tile)


@pytest.mark.parametrize("kind", FACTORS)
@pytest.mark.parametrize(("keys", "splits"), [(1, 1), (33, 2), (100, 1), (300, 10)])
def test_codes(kind: str, keys: int, splits: int) -> None:
    Layer(keys, "", False, kind).check(splits, (16, 4))


def test_one_sequence_with_few_splits_has_it(backend: TritonBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    program, steps = test_latent.latent(), test_latent.EDGES
    alone = sum(new == 1 for ((_, _, new),) in steps)
    outputs, names, _ = test_latent.run(backend, program, steps=steps, filler=float("nan"))
    monkeypatch.setattr(latent_head, "HEAD_PROGRAMS", 0)
    others, names_others, _ = test_latent.run(backend, program, steps=steps, filler=float("nan"))
    hopper = INTERPRETED or torch.cuda.get_device_capability()[0] == 9
    heads, others_alone = sum(n["attend_latent_head"] for n in names), sum(n["attend_latent_one"] for n in names_others)
    if INTERPRETED:
        assert heads == others_alone == 2 * alone
    else:  # graphs repeat launches that nobody counts
        assert (heads > 0) == hopper
        assert others_alone > 0
    assert all(rel_error(a, b) < 1e-3 for a, b in zip(outputs, others, strict=True))
