"""HEAD_LINEAR: a matrix of each head's own, y[t, h] = (x[t, h, k:], W_h x[t, h, :k]).

A program owns BN rows of one head's matrix and BT tokens. Weights are read once for up to 64 tokens, in their own format,
and decoded in registers; what they meet is short (128 to 512 columns), so that nothing is cut along K. The `rest` of a head
is copied by the program of its first rows. Of one token, programs also leave their rows as int8x2 where a matvec reads it,
and add the splits that attention has left of their head.
"""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl

from quarrel.ops.heads import HEAD_LINEAR, HeadLinearSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.triton_backend.attention.records import Partial
from quarrel.triton_backend.attention.splits import combine_head
from quarrel.triton_backend.formats.exact import decode_blocks
from quarrel.triton_backend.formats.float16 import is_fast
from quarrel.triton_backend.formats.int8x2 import store_int8x2
from quarrel.triton_backend.linear.matmul import TL_TYPES, takes, walk
from quarrel.triton_backend.runtime.launch import cdiv, power_of_two
from quarrel.triton_backend.runtime.site import Batch, Launch, Site, dims, starts_early

ROWS = 64
"""Of every tile: the units that multiply follow from it, and so do a row's bits."""


@triton.jit(do_not_specialize=["tokens"])
def head_tiles(
    y, to, x, w, partial, item_start, tokens, N: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr, REST: tl.constexpr,
    WIDE_REST: tl.constexpr, FORMAT: tl.constexpr, FAST: tl.constexpr, COMPUTE: tl.constexpr, EXACT: tl.constexpr,
    COMBINES: tl.constexpr, FORM: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, NB: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows of a head / BN, heads, tokens / BT).

    y      act `[tokens, HEADS * (REST + N)]`
    to     int32, y of one token as int8x2: N is a multiple of 32 then, and REST is 0
    x      act `[tokens, HEADS * (K + REST)]`
    w      Planes of a weight `[HEADS * N, K]`
    FORM   what is written: y ("plain"), `to` ("int8x2") or "both"
    EXACT  for any K and any weight, in products that are exact in float32; else K is a multiple of 32 * NB

    COMBINES: x is the result of attention for one token, whose splits are in `partial` (a `records.Partial`), from
    item_start[0] to item_start[1]. All programs of a head add them, and write the same x.
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
    if COMBINES:
        if PDL:
            tl.extra.cuda.gdc_wait()
        combine_head(x + head * K, partial, item_start, 0, head, HEADS, K)
        tl.debug_barrier()  # the program's own loads below read what it has stored
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
    if FORM != "int8x2":
        tl.store(p_y[None, :] + REST + row[:, None], acc, mask=row_ok[:, None] & token_ok[None, :])
    if FORM != "plain":
        first = tl.sum(tl.where(tl.arange(0, BT)[None, :] == 0, acc.to(tl.float32), 0.0), 1)  # [BN]
        block = tl.program_id(0) * (BN // 32) + tl.arange(0, BN // 32)
        v = tl.reshape(first, (BN // 32, 2, 16))
        store_int8x2(to, v, head * (N // 32) + block, block < N // 32, HEADS * N)
    if REST > 0 and tl.program_id(0) == 0:
        r = tl.arange(0, WIDE_REST)
        ok = token_ok[:, None] & (r < REST)[None, :]
        tl.store(p_y[:, None] + r[None, :], tl.load(p_x[:, None] + K + r[None, :], mask=ok, other=0.0), mask=ok)


def build_head_linear(site: Site, node: Node, splits: Callable[[], Partial] | None = None) -> Launch:
    """x `[T, heads * (k + rest)]`, weight `[heads * n, k]`, to `[T, heads * (rest + n)]`; x of one token, from `splits`."""
    spec: HeadLinearSpec = node.spec
    x, target = site.slot(node.inputs[0]), site.slot(node.outputs[0])  # type: ignore[arg-type]
    weight = site.weight(node.inputs[1])  # type: ignore[arg-type]
    axis, _ = dims(node.outputs[0])
    exact = not takes(weight, site.compute)
    blocks = 4 if exact else next(b for b in (4, 2, 1) if spec.k // 32 % b == 0)
    fixed = {
        "N": spec.n, "K": spec.k, "HEADS": spec.n_heads, "REST": spec.rest, "WIDE_REST": power_of_two(spec.rest),
        "FORMAT": weight.format, "FAST": not exact and is_fast(weight.format, site.compute, blocks),
        "COMPUTE": TL_TYPES[site.compute], "EXACT": exact, "BN": ROWS, "NB": blocks, "STAGES": 2,
    }  # fmt: skip
    to, plain = site.int8x2_target(node.outputs[0]) if spec.n % 32 == 0 and not spec.rest else (None, True)

    def run(batch: Batch) -> None:
        count = batch.count(axis)
        tokens = 16 if exact or count <= 16 else 32 if count <= 32 else 64
        partial = None if splits is None else splits()
        form = "plain" if to is None or count > 1 else "both" if plain else "int8x2"
        site.launch(
            head_tiles, (cdiv(spec.n, ROWS), spec.n_heads, cdiv(count, tokens)), target.tensor,
            target.tensor if to is None else to, x.tensor, weight.planes, partial or Partial(*(x.tensor,) * 3),
            site.tables.item_start.tensor, count, **fixed, COMBINES=partial is not None, FORM=form, BT=tokens, warps=4,
            stages=2, early=starts_early(site),
        )  # fmt: skip

    return run


IMPLEMENTATIONS = (Implementation(HEAD_LINEAR, "tiles of a head", build_head_linear),)
