"""HEAD_LINEAR: a matrix of each head's own, y[t, h] = (x[t, h, k:], W_h x[t, h, :k]).

A program owns BN rows of one head's matrix and BT tokens. Weights are read once for up to 64 tokens, in their own format,
and decoded in registers; what they meet is short (128 to 512 columns), so that nothing is cut along K. The `rest` of a head
is copied by the program of its first rows.

Of one token there is less to multiply than to wait for (`head_rows`): a program decodes its weights, all of K, before the
kernel ahead is over, and has the plain units add their products with x in float32. It leaves its rows as int8x2 where a
matvec reads that, and adds the splits that attention has left of its head.
"""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl

from quarrel.ops.heads import HEAD_LINEAR, HeadLinearSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.triton_backend.attention.records import Partial
from quarrel.triton_backend.attention.splits import combined
from quarrel.triton_backend.formats.exact import decode_blocks
from quarrel.triton_backend.formats.float16 import is_fast
from quarrel.triton_backend.formats.int8x2 import store_int8x2
from quarrel.triton_backend.linear.matmul import TL_TYPES, takes, walk
from quarrel.triton_backend.runtime.launch import INTERPRETED, cdiv, power_of_two
from quarrel.triton_backend.runtime.site import Batch, Launch, Site, dims, starts_early

_ASM: tl.constexpr = tl.constexpr(not INTERPRETED)
_OR = " ".join(f"or.b32 t, t, ${i};" for i in range(9, 16))
_MOVE = " ".join(f"mov.b32 ${i}, ${i + 8};" for i in range(8))
_HOLD: tl.constexpr = tl.constexpr(
    f"{{ .reg .pred p; .reg .b32 t; mov.b32 t, $8; {_OR} setp.eq.b32 p, t, 1; @p nanosleep.u32 1; {_MOVE} }}"
)
_HOLD_ARGUMENTS: tl.constexpr = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 8))
ROWS = 64
"""Of every tile: the units that multiply follow from it, and so do a row's bits."""
VALUES, MOST_ROWS = 8192, 32
"""Weights of a program of `head_rows`, and its rows at most: 320 programs for 20 heads of 512 x 192 or 256 x 512. Rows that
are left as int8x2 are 32, a block of it."""
A_THREAD = 64
"""Of those, how many a thread has: eight warps for 32 rows of 512 columns, four for half of that."""
MOST_ROUNDED = 1024
"""Columns up to which 32 whole rows fit the registers of a program."""


@triton.jit(do_not_specialize=["tokens"])
def head_tiles(
    y, x, w, tokens, N: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr, REST: tl.constexpr,
    WIDE_REST: tl.constexpr, FORMAT: tl.constexpr, FAST: tl.constexpr, COMPUTE: tl.constexpr, EXACT: tl.constexpr,
    BN: tl.constexpr, BT: tl.constexpr, NB: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows of a head / BN, heads, tokens / BT).

    y      act `[tokens, HEADS * (REST + N)]`
    x      act `[tokens, HEADS * (K + REST)]`
    w      Planes of a weight `[HEADS * N, K]`
    EXACT  for any K and any weight, in products that are exact in float32; else K is a multiple of 32 * NB
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(1)
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    row_ok = row < N
    stacked = head.to(tl.int64) * N + tl.minimum(row, N - 1)
    token = (tl.program_id(2) * BT + tl.arange(0, BT)).to(tl.int64)
    token_ok = token < tokens
    p_x = x + (token * HEADS + head) * (K + REST)
    p_y = y + (token * HEADS + head) * (REST + N)
    if EXACT:
        if PDL:
            tl.extra.cuda.gdc_wait()
        part = tl.arange(0, NB * 16)
        within = part // 16 * 32 + part % 16  # columns of the low tile
        acc = tl.zeros([BN, BT], tl.float32)
        for start in range(0, K, NB * 32):
            low, high = decode_blocks(FORMAT, w, stacked, start // 32 + tl.arange(0, NB), row_ok, K)  # [BN, NB, 16]
            column = start + within
            p = p_x[None, :] + column[:, None]
            x_low = tl.load(p, mask=token_ok[None, :] & (column < K)[:, None], other=0.0).to(COMPUTE)
            x_high = tl.load(p + 16, mask=token_ok[None, :] & (column + 16 < K)[:, None], other=0.0).to(COMPUTE)
            w_low, w_high = tl.reshape(low, [BN, NB * 16]).to(COMPUTE), tl.reshape(high, [BN, NB * 16]).to(COMPUTE)
            acc = tl.dot(w_low, x_low, acc, input_precision="ieee")
            acc = tl.dot(w_high, x_high, acc, input_precision="ieee")
    else:
        acc, _ = walk(FORMAT, FAST, COMPUTE, False, w, w, stacked, p_x, token_ok, 0, K, K, BN, BT, NB, STAGES, PDL)
    acc = acc.to(y.dtype.element_ty)
    tl.store(p_y[None, :] + REST + row[:, None], acc, mask=row_ok[:, None] & token_ok[None, :])
    if REST > 0 and tl.program_id(0) == 0:
        r = tl.arange(0, WIDE_REST)
        ok = token_ok[:, None] & (r < REST)[None, :]
        tl.store(p_y[:, None] + r[None, :], tl.load(p_x[:, None] + K + r[None, :], mask=ok, other=0.0), mask=ok)


@triton.jit
def _decoded(v):
    """v, decoded before what follows. ptxas would sink the decoding behind the wait, to its first use; a predicated sleep
    that depends on all bits of v prevents that, and sleeps only where they are those of the smallest subnormal. Six layers
    of GLM-4.7-Flash take 327 us on an H200 with it, 334 without."""
    bits = v.to(tl.int32, bitcast=True)
    return tl.inline_asm_elementwise(_HOLD, _HOLD_ARGUMENTS, [bits], tl.int32, False, 8).to(tl.float32, bitcast=True)


@triton.jit
def head_rows(
    y, to, x, w, partial, item_start, N: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr, REST: tl.constexpr,
    WIDE_REST: tl.constexpr, FORMAT: tl.constexpr, COMBINES: tl.constexpr, FORM: tl.constexpr, BN: tl.constexpr,
    NB: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token. Grid (rows of a head / BN, heads); NB blocks of 32 columns are at least K.

    y         act `[HEADS * (REST + N)]`
    to        int32, y as int8x2: N and BN are multiples of 32 then, and REST is 0
    x         act `[HEADS * (K + REST)]`
    w         Planes of a weight `[HEADS * N, K]`
    FORM      what is written: y ("plain"), `to` ("int8x2") or "both"
    COMBINES  x is the result of attention, whose splits are in `partial` (a `records.Partial`), from item_start[0] to
              item_start[1]: all programs of a head add them. K is 32 * NB then, and REST is 0.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(1)
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    row_ok = row < N
    block = tl.arange(0, NB)
    stacked = head.to(tl.int64) * N + tl.minimum(row, N - 1)
    low, high = decode_blocks(FORMAT, w, stacked, block, row_ok, K)
    low, high = tl.reshape(low, (BN, NB * 16)), tl.reshape(high, (BN, NB * 16))
    if _ASM and PDL:
        low, high = _decoded(low), _decoded(high)
    if COMBINES:
        first_item = tl.load(item_start)
        splits = tl.load(item_start + 1) - first_item
    # What is above comes with the step, before its first kernel, or with the model.
    if PDL:
        tl.extra.cuda.gdc_wait()
    p_x = x + head * (K + REST)
    p_y = y + head * (REST + N)
    column = tl.arange(0, NB * 16) // 16 * 32 + tl.arange(0, NB * 16) % 16
    if COMBINES:
        whole = combined(x, partial, first_item, splits, head, HEADS, K)
        # By shared memory: to a layout that suits these sums, the compiler would bring the weights.
        x_low, x_high = tl.gather(whole, column, 0), tl.gather(whole, column + 16, 0)
    else:
        x_low = tl.load(p_x + column, mask=column < K, other=0.0)
        x_high = tl.load(p_x + column + 16, mask=column + 16 < K, other=0.0)
    if REST > 0:
        r = tl.arange(0, WIDE_REST)
        copied = r < tl.where(tl.program_id(0) == 0, REST, 0)
        rest = tl.load(p_x + K + r, mask=copied, other=0.0)
    products = low * x_low.to(tl.float32)[None, :] + high * x_high.to(tl.float32)[None, :]
    sums = tl.sum(products, 1).to(y.dtype.element_ty)  # [BN]
    if FORM != "int8x2":
        tl.store(p_y + REST + row, sums, mask=row_ok)
    if FORM != "plain":
        first = tl.program_id(0) * (BN // 32) + tl.arange(0, BN // 32)
        v = tl.reshape(sums.to(tl.float32), (BN // 32, 2, 16))
        store_int8x2(to, v, head * (N // 32) + first, first < N // 32, HEADS * N)
    if REST > 0:
        tl.store(p_y + r, rest, mask=copied)


def rows_alone(k: int, int8x2: bool) -> tuple[int, int, int]:
    """Of `head_rows`: rows of a program, blocks of 32 columns, and warps."""
    blocks = power_of_two(cdiv(k, 32))
    rows = MOST_ROWS if int8x2 else min(MOST_ROWS, max(1, VALUES // (32 * blocks)))
    return rows, blocks, min(16, max(1, rows * blocks // A_THREAD))


def build_head_linear(site: Site, node: Node, splits: Callable[[], Partial] | None = None) -> Launch:
    """x `[T, heads * (k + rest)]`, weight `[heads * n, k]`, to `[T, heads * (rest + n)]`; x of one token, from `splits`."""
    spec: HeadLinearSpec = node.spec
    x, target = site.slot(node.inputs[0]), site.slot(node.outputs[0])  # type: ignore[arg-type]
    weight = site.weight(node.inputs[1])  # type: ignore[arg-type]
    axis, _ = dims(node.outputs[0])
    exact = not takes(weight, site.compute)
    blocks = 4 if exact else next(b for b in (4, 2, 1) if spec.k // 32 % b == 0)
    common = {
        "N": spec.n, "K": spec.k, "HEADS": spec.n_heads, "REST": spec.rest, "WIDE_REST": power_of_two(spec.rest),
        "FORMAT": weight.format,
    }  # fmt: skip
    fixed = {
        "FAST": not exact and is_fast(weight.format, site.compute, blocks), "COMPUTE": TL_TYPES[site.compute],
        "EXACT": exact, "BN": ROWS, "NB": blocks, "STAGES": 2,
    }  # fmt: skip
    alone = site.compute != "float32" and not site.deterministic
    rounds = alone and spec.n % 32 == 0 and not spec.rest and spec.k <= MOST_ROUNDED
    to, plain = site.int8x2_target(node.outputs[0]) if rounds else (None, True)
    form = "plain" if to is None else "both" if plain else "int8x2"
    rows, wide, warps = rows_alone(spec.k, to is not None)
    assert splits is None or (alone and spec.k == 32 * wide and not spec.rest), spec

    def one() -> None:
        partial = None if splits is None else splits()
        site.launch(
            head_rows, (cdiv(spec.n, rows), spec.n_heads), target.tensor, target.tensor if to is None else to, x.tensor,
            weight.planes, partial or Partial(*(x.tensor,) * 3), site.tables.item_start.tensor, **common,
            COMBINES=partial is not None, FORM=form, BN=rows, NB=wide, warps=warps,
            early=starts_early(site),
        )  # fmt: skip

    def run(batch: Batch) -> None:
        count = batch.count(axis)
        if count == 1 and alone:
            one()
            return
        tokens = 16 if exact or count <= 16 else 32 if count <= 32 else 64
        site.launch(
            head_tiles, (cdiv(spec.n, ROWS), spec.n_heads, cdiv(count, tokens)), target.tensor, x.tensor, weight.planes,
            count, **common, **fixed, BT=tokens, warps=4, stages=2, early=starts_early(site),
        )  # fmt: skip

    return run


IMPLEMENTATIONS = (Implementation(HEAD_LINEAR, "tiles of a head, or rows", build_head_linear),)
