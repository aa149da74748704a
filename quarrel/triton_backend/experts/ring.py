"""Products with the chosen experts for a few hundred rows on Hopper: rows gathered by expert, weights streamed once.

`gather_by_expert` copies each pair's row of x behind those of the same expert, in the column order that `linear/ring.py`
reads, and lists the items: an expert and up to BT of its pairs. An expert with one pair wastes columns of tensor cores,
not bytes.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from quarrel.triton_backend.elementwise.ring_x import column_at
from quarrel.triton_backend.experts.grouped import DECODE_FROM
from quarrel.triton_backend.experts.maps import ExpertMaps, Grouping, Serves
from quarrel.triton_backend.linear.maps import UNLIMITED
from quarrel.triton_backend.linear.ring import LONG_ROWS, WIDTHS, Cut, Product, Rows, declines_device, declines_stacks
from quarrel.triton_backend.runtime.arrays import Slot
from quarrel.triton_backend.runtime.launch import cdiv, power_of_two
from quarrel.triton_backend.runtime.site import Site, starts_early

MOST_PAIRS = 8192
"""Pairs of a token and an expert in one launch: rows of x are gathered into scratch of so many."""
GROUPS = 256
"""Pairs that the gathering programs group themselves, each by looking at all of them; all pairs of stacks with a bound."""
_COLUMNS = 1024
LIKELY, LARGE = 0.7, 1 << 24
"""Pairs an expert on average from which most experts have one, and values of a matrix from which nothing is brought to L2
for that: steps of Mixtral, whose matrices are 14336 x 4096, take half a percent longer with it."""


@triton.jit(do_not_specialize=["pairs"])
def gather_by_expert(
    rows, items, x, order, starts, ids, pairs, K, EXPERTS: tl.constexpr, PADDED: tl.constexpr, PER_TOKEN: tl.constexpr,
    KP: tl.constexpr, BT: tl.constexpr, C: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """rows `[pairs, KP]` float16: row order[i] / PER_TOKEN of x `[tokens, K]`, columns by `column_at`, zero from K on.

    order `[pairs]` and starts `[EXPERTS + 1]` int32 are those of `group_pairs`; with GROUPS, at least the number of pairs,
    they are filled here from ids `[pairs]`. items int32: how many there are, then for each
    expert, first row, rows, unused. Grid (pairs + 1, KP / C): the last programs list the items; (pairs, KP / C) where an
    earlier launch has.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i = tl.program_id(0)
    if i < pairs:
        place = tl.program_id(1) * C + tl.arange(0, C)
        column = column_at(place)
        to = i
        pair = i
        if GROUPS:
            other = tl.arange(0, GROUPS)
            chosen = tl.load(ids + other, mask=other < pairs, other=EXPERTS)
            mine = tl.load(ids + i)
            before = (chosen < mine) | ((chosen == mine) & (other < i))
            to = tl.sum(before.to(tl.int32), 0)
            if tl.program_id(1) == 0:
                tl.store(order + to, i)
        else:
            pair = tl.load(order + i)
        row = (pair // PER_TOKEN).to(tl.int64)
        v = tl.load(x + row * K + column, mask=column < K, other=0.0)
        tl.store(rows + to.to(tl.int64) * KP + place, v.to(tl.float16), mask=place < KP)
    elif tl.program_id(1) == 0:
        expert = tl.arange(0, PADDED)
        ok = expert < EXPERTS
        if GROUPS:
            other = tl.arange(0, GROUPS)
            chosen = tl.load(ids + other, mask=other < pairs, other=0)
            count = tl.where(ok, tl.histogram(chosen, PADDED, mask=other < pairs), 0)
            first = tl.cumsum(count, 0) - count
            tl.store(starts + expert, first, mask=ok)
            tl.store(starts + EXPERTS, pairs)
        else:
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


_CUTS = ((3, 4, 1), (4, 4, 1), (2, 8, 1))
"""Programs to a multiprocessor, warps and super-blocks to a stage, for items of few rows."""
_LONG = {"Q4_K": ((2, 8, 2), (3, 4, 2)), "Q6_K": ((1, 8, 2), (3, 4, 1))}
"""The same for formats that gain from long stages, with rows of so many columns that there are some."""


_FAVOURED = 0.85
"""Of the experts that would be chosen if all were as likely, so many are, as `bench.ops.grouped_prompt` draws them."""


def cut_of(product: Product, each: float, experts: int) -> Cut:
    """For so many pairs an expert on average.

    Programs that share a multiprocessor share its bandwidth, so a launch takes as long as the units that one of them has in
    turn, times warps and programs. us of one product with 8 / 32 tokens on an H200 (2026-11-29):

    | | 3 programs of 4 warps | 4 of 4 | 2 of 8 | 2 of 8, long stages |
    |---|---|---|---|---|
    | gpt-oss, down | 26.6 / 45.1 | 33.0 / 45.4 | 34.1 / 45.9 | 32.3 / 44.6 |
    | Nemotron, up | 41.7 / 77.0 | 39.3 / 78.7 | 41.6 / 83.4 | 41.4 / 84.6 |
    | Granite-4-h-tiny, down in Q6_K | 9.6 / 13.5 | 10.8 / 14.4 | 11.4 / 14.9 | 12.1 / 15.7 |
    | Mixtral, down in Q4_K | 89.5 / 103.1 | 69.1 / 76.4 | 70.6 / 75.9 | 63.4 / 72.0 |
    """
    width = next((w for w in WIDTHS if w >= 1.5 * each), WIDTHS[-1])
    if width > 16:
        return Cut.of(width)
    items = experts * (1 - math.exp(-each))  # as many are chosen if all are as likely; with favourites there are fewer

    def time(cut: Cut) -> int:
        programs = cut.residents * product.multiprocessors
        in_turn = sum(cdiv(round(share * items * product.tiles(cut)), programs) for share in (1.0, _FAVOURED))
        return in_turn * cut.residents * cut.warps

    kinds = _LONG.get(product.format, _CUTS) if product.k >= LONG_ROWS else _CUTS
    return min((Cut(width, *kind) for kind in kinds), key=time)


def declines(site: Site, maps: ExpertMaps) -> str | None:
    """Why these kernels do not multiply with the stacks on this device, or None."""
    return declines_device(site) or declines_stacks(maps.stacks, maps.n)


def build(site: Site, maps: ExpertMaps) -> Serves:
    made = Ring(site, maps)
    return Serves(made, UNLIMITED if site.deterministic else made.most, max(GROUPS, maps.most or 0))


class Ring:
    """How to multiply with stacks of matrices."""

    def __init__(self, site: Site, maps: ExpertMaps) -> None:
        self._site, self._experts, self._size = site, maps.n_experts, maps.n * maps.k
        self._product = Product(site, maps.stacks, maps.n, maps.activation, maps.biases)
        self.most = min(MOST_PAIRS, DECODE_FROM * maps.n_experts) if maps.most is None else maps.most
        """Pairs that it serves, but for a deterministic step: others would add in another order."""
        padded = self._product.padded
        if site.deterministic:
            self._rows = site.scratch("T", maps.used * padded, torch.float16)
            self._items = site.scratch("T", 1 + 4 * (maps.used + maps.n_experts), torch.int32)
        else:
            self._rows = site.scratch("one", self.most * padded, torch.float16)
            width = 1 + 4 * (MOST_PAIRS // WIDTHS[0] + maps.n_experts)
            self._items = site.lasting(f"items of {maps.used}", width, torch.int32)

    def __call__(self, y: Slot, x: Slot, group: Grouping, pairs: int, per_token: int) -> None:
        """y `[pairs, n]` from rows of x `[tokens, k]`, of which `per_token` pairs share one."""
        site, each, product = self._site, pairs / self._experts, self._product
        cut = cut_of(product, each, self._experts)
        width = cut.width
        rows, listed = self._rows.tensor, group.listed
        order, starts, ids = group.order.tensor, group.starts.tensor, group.ids.tensor
        # The product down reads the items that the product up has listed, so its first weights need not wait.
        before = listed.items if group.known and listed.rows == width and not site.deterministic else None
        known, items = before is not None, before or self._items
        listed.items, listed.rows = items, width
        likely = self._experts if each >= LIKELY and not known and self._size < LARGE else 0
        site.launch(
            gather_by_expert, (pairs + (not known), cdiv(product.padded, _COLUMNS)), rows, items.tensor, x.tensor, order,
            starts, order if group.known else ids, pairs, product.k, EXPERTS=self._experts,
            PADDED=power_of_two(self._experts), PER_TOKEN=per_token, KP=product.padded, BT=width, C=_COLUMNS,
            GROUPS=0 if group.known else max(16, power_of_two(pairs)), early=starts_early(site),
        )  # fmt: skip
        product.launch(y.tensor, Rows(product.rows(rows, pairs, width), items.tensor, order, 0, known, likely), cut)
