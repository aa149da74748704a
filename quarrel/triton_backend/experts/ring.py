"""Products with the chosen experts for a few hundred rows on Hopper: rows gathered by expert, weights streamed once.

`gather_by_expert` copies each pair's row of x behind those of the same expert, in the column order that `linear/ring.py`
reads, and lists the items: an expert and up to BT of its pairs. An expert with one pair wastes columns of tensor cores,
not bytes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from quarrel.triton_backend.experts.grouped import DECODE_FROM
from quarrel.triton_backend.experts.maps import ExpertMaps, Serves
from quarrel.triton_backend.formats.table import RING, by_name
from quarrel.triton_backend.linear.matvec_tiles import multiprocessors
from quarrel.triton_backend.runtime.arrays import Packed, Slot
from quarrel.triton_backend.runtime.launch import INTERPRETED, cdiv, power_of_two
from quarrel.triton_backend.runtime.site import Site, starts_early

try:  # Gluon is no stable interface: without the names of Triton 3.6 to 3.9 other kernels run
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from quarrel.triton_backend.linear import ring as kernels
except (ImportError, AttributeError):  # pragma: no cover
    kernels = None  # type: ignore[assignment]

MOST_PAIRS = 8192
"""Pairs of a token and an expert in one launch: rows of x are gathered into scratch of so many."""
WIDTHS = (8, 16, 32, 64)
"""Rows of x to an item."""
_WARPS = 8
_COLUMNS = 1024
_SHARED = 227 << 10
_MOST_DESCRIPTORS = 256


@triton.jit
def column_at(i):
    """The column that stands at place i of x: of 128, bits (word 2)(next)(upper)(t 2)(one) of the place."""
    r = i % 128
    return i // 128 * 128 + r // 2 % 4 * 32 + r // 8 % 2 * 16 + r // 32 * 4 + r % 2 * 2 + r // 16 % 2


@triton.jit(do_not_specialize=["pairs"])
def gather_by_expert(
    rows, items, x, order, starts, pairs, K, EXPERTS: tl.constexpr, PADDED: tl.constexpr, PER_TOKEN: tl.constexpr,
    KP: tl.constexpr, BT: tl.constexpr, C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """rows `[pairs, KP]` float16: row order[i] / PER_TOKEN of x `[tokens, K]`, columns by `column_at`, zero from K on.

    order `[pairs]` and starts `[EXPERTS + 1]` int32 are those of `group_pairs`. items int32: how many there are,
    then for each
    expert, first row, rows, unused. Grid (pairs + 1, KP / C): the last programs list the items.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i = tl.program_id(0)
    if i < pairs:
        place = tl.program_id(1) * C + tl.arange(0, C)
        column = column_at(place)
        row = (tl.load(order + i) // PER_TOKEN).to(tl.int64)
        v = tl.load(x + row * K + column, mask=column < K, other=0.0)
        tl.store(rows + i.to(tl.int64) * KP + place, v.to(tl.float16), mask=place < KP)
    elif tl.program_id(1) == 0:
        expert = tl.arange(0, PADDED)
        ok = expert < EXPERTS
        first = tl.load(starts + expert, mask=ok, other=0)
        count = tl.load(starts + expert + 1, mask=ok, other=0) - first
        tiles = (count + BT - 1) // BT
        base = tl.cumsum(tiles, 0) - tiles
        tl.store(items, tl.sum(tiles, 0))
        for j in range(tl.max(tiles, 0)):
            p = items + 1 + (base + j) * 4
            more = j < tiles
            tl.store(p, expert, mask=more)
            tl.store(p + 1, first + j * BT, mask=more)
            tl.store(p + 2, tl.minimum(count - j * BT, BT), mask=more)


def declines(site: Site, maps: ExpertMaps) -> str | None:
    """Why these kernels do not multiply with the stacks on this device, or None."""
    format = maps.stacks[0].format
    if kernels is None or INTERPRETED or site.generation != 9:
        return "needs compute capability 9"
    if site.compute != "float16" or site.deterministic:
        return f"needs float16 and any order of sums, got {'deterministic ' if site.deterministic else ''}{site.compute}"
    if format not in RING:
        return f"needs {', '.join(RING)}, got {format}"
    if maps.k % _whole(format):
        return f"needs rows of a multiple of {_whole(format)} columns, got {maps.k}"
    if any(s.reused for s in maps.stacks):
        return "needs matrices that stay in their place"
    return None


def build(site: Site, maps: ExpertMaps) -> Serves:
    made = Ring(site, maps)
    return Serves(made, made.most)


def _whole(format: str) -> int:
    """Columns of which a row is a whole number: of a super-block, or of what a copy's 16 bytes of upper bits hold."""
    made = by_name(format)
    return made.top.columns if made.top else 128 if made.bits else 32


def shift_of(weight: Packed) -> int:
    """The power of two that its scales are divided by (`formats/ring_codes.py`)."""
    scale, top = weight.planes.scale, weight.planes.top
    ring = by_name(weight.format).ring
    assert ring is not None, weight.format
    return 0 if scale.device.type == "meta" else ring.shift(scale, top)


class Matrices:
    """A stack of packed matrices as TMA reads it."""

    def __init__(self, weight: Packed) -> None:
        codes, bits, self.scale, self.top = weight.planes
        made = by_name(weight.format)
        self.planes = codes.element_size() * codes.numel() // weight.n * 256 // (128 * weight.k)
        self.bits = made.bits.count if made.bits else 0
        self._codes = codes.reshape(-1).view(torch.int32).view(weight.n, -1)
        self._bits = bits.reshape(-1).view(torch.int32).view(weight.n, -1) if self.bits else self._codes
        # A copy's rows are whole numbers of 16 bytes apart.
        self.copied = self.scale.element_size() * self.scale.numel() // weight.n % 16 == 0 and weight.format != "MXFP4"
        if self.copied:
            self._scale = self.scale.reshape(-1).view(torch.int16).view(weight.n, -1)
        self._made: dict[int, tuple[Any, Any, Any]] = {}

    def descriptors(self, rows: int) -> tuple[Any, Any, Any]:
        """Of codes, scales (the scales themselves where they cannot be copied) and upper bits, in boxes of so many rows."""
        if rows not in self._made:
            codes = TensorDescriptor.from_tensor(self._codes, [rows, 32], gl.NVMMASharedLayout(128, 32, 2))
            scale, bits = self.scale, codes
            if self.copied:
                scale = TensorDescriptor.from_tensor(self._scale, [rows, 8], gl.NVMMASharedLayout(0, 16, 2))
            if self.bits:
                layout = gl.NVMMASharedLayout(32 * self.bits, 32, 2)
                bits = TensorDescriptor.from_tensor(self._bits, [rows, 8 * self.bits], layout)
            self._made[rows] = codes, scale, bits
        return self._made[rows]


class Ring:
    """How to multiply with stacks of matrices."""

    def __init__(self, site: Site, maps: ExpertMaps) -> None:
        self._site, self._biases, self._kind, self._experts = site, maps.biases, maps.activation, maps.n_experts
        self._format, self._n, self._k = maps.stacks[0].format, maps.n, maps.k
        self._stacks = [Matrices(s) for s in maps.stacks]
        self._shift = max(shift_of(s) for s in maps.stacks)
        self._padded = cdiv(self._k, 256) * 256
        self.most = min(MOST_PAIRS, DECODE_FROM * maps.n_experts)
        """Pairs that it serves."""
        self._rows = site.scratch("one", self.most * self._padded, torch.float16)
        self._items = site.scratch("one", 1 + 4 * (self.most // WIDTHS[0] + maps.n_experts), torch.int32)
        self._x: dict[tuple[int, int, int], Any] = {}

    def __call__(self, y: Slot, x: Slot, order: Slot, starts: Slot, pairs: int, per_token: int) -> None:
        """y `[pairs, n]` from rows of x `[tokens, k]`, of which `per_token` pairs share one."""
        site, each = self._site, pairs / self._experts
        width = next((w for w in WIDTHS if w >= 1.5 * each), WIDTHS[-1])
        early = starts_early(site)
        site.launch(
            gather_by_expert, (pairs + 1, cdiv(self._padded, _COLUMNS)), self._rows.tensor, self._items.tensor, x.tensor,
            order.tensor, starts.tensor, pairs, self._k, EXPERTS=self._experts, PADDED=power_of_two(self._experts),
            PER_TOKEN=per_token, KP=self._padded, BT=width, C=_COLUMNS, early=early,
        )  # fmt: skip
        gated, one = len(self._stacks) == 2, self._stacks[0]
        groups = 2 if width == 64 else 1
        warps = _WARPS // groups
        residents = 1 if width == 64 else 2
        tile = 8 * warps if gated else 16 * warps
        (codes, scale, bits), (up_codes, up_scale, up_bits) = (s.descriptors(tile) for s in (one, self._stacks[-1]))
        bias = self._biases or (one.top,)
        site.launch(
            kernels.ring, (residents * multiprocessors(one.top.device),), y.tensor, codes, up_codes, scale, up_scale, bits,
            up_bits, self._rows_of(pairs, width), (one.top, self._stacks[-1].top), (self._items.tensor, order.tensor),
            (bias[0], bias[-1], 2.0**-self._shift, 2.0**self._shift), self._n, 0, K=self._k, PARTS=1, COPIED=one.copied,
            FORMAT=self._format, GATED=gated, KIND=self._kind, BIAS=bool(self._biases), BT=width,
            STAGES=self._stages(width, residents), TILES=cdiv(self._n, tile * groups), NC=groups, T=warps,
            REGISTERS=104 if residents == 2 else 232, warps=warps, early=early, maxnreg=80 if residents == 2 else 168,
        )  # fmt: skip

    def _rows_of(self, pairs: int, width: int) -> Any:
        """The gathered rows, as TMA reads them."""
        tensor = self._rows.tensor
        key = (tensor.data_ptr() if tensor.device.type != "meta" else 0, pairs, width)
        if key not in self._x:
            if len(self._x) == _MOST_DESCRIPTORS:
                self._x.clear()
            rows = tensor.reshape(-1)[: pairs * self._padded].view(pairs, self._padded)
            self._x[key] = TensorDescriptor.from_tensor(rows, [width, 64], gl.NVMMASharedLayout(128, 16, 2))
        return self._x[key]

    def _stages(self, width: int, residents: int) -> int:
        """As many as fit, beside the exchange of an activation's rows."""
        one = self._stacks[0]
        stage = 16 * _WARPS * (128 * one.planes + (16 if one.copied else 0) + 32 * one.bits) + 512 * width
        room = _SHARED // residents - 1024 - (512 * width if len(self._stacks) == 2 else 0)
        return max(2, min(12, room // stage))
