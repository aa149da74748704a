"""Kernels of the chosen experts of one token: matvecs that read only their rows.

Up: a program owns rows of one chosen expert's gate and up matrices and applies the activation. Down: a program owns outputs
and walks the chosen experts one after the other, so that their weighted sum has one order and no second launch. Both walk a
row in tiles of W words, of which D are loaded at once and D more before those are multiplied: bytes on their way are what
bounds them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quarrel.triton_backend.elementwise.activation import activate, oai
from quarrel.triton_backend.experts.choose import best_experts, choose_left, expert_at
from quarrel.triton_backend.formats.dots import load_tile, tile_products
from quarrel.triton_backend.formats.int8x2 import store_int8x2
from quarrel.triton_backend.formats.table import entry_columns, word_columns
from quarrel.triton_backend.runtime.arrays import Planes


@triton.jit
def _planes_from(FORMAT: tl.constexpr, w, row, K: tl.constexpr):
    """The planes from this row (int64) on."""
    KE: tl.constexpr = K // entry_columns(FORMAT)
    top = w.top + row * (K // 256)
    return Planes(w.codes + row * KE, w.bits + row * (K // 32), w.scale + row * (K // 32), top)


@triton.jit
def _load(
    FORMAT: tl.constexpr, w, first, N, at, K: tl.constexpr, R: tl.constexpr, W: tl.constexpr, D: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Tiles at.. [D] of rows first.. [R]."""
    n = tl.minimum(first + tl.arange(0, R), N - 1).to(tl.int64)
    tiles = ()
    for j in tl.static_range(D):
        tiles += (load_tile(FORMAT, w, n, first, N, (at + j) * W, K, R, W, ASM),)
    return tiles


@triton.jit
def _sum(
    FORMAT: tl.constexpr, acc, tiles, x, at, K: tl.constexpr, R: tl.constexpr, W: tl.constexpr, D: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """acc with their products added."""
    for j in tl.static_range(D):
        q, u, s, t = tiles[j]
        acc += tile_products(FORMAT, q, u, s, t, x, (at + j) * W, K, R, W, ASM)
    return acc


@triton.jit
def up_of_experts(
    y, to, arrived, x, ids, left, w, up, bias, bias_up, N, S: tl.constexpr, G: tl.constexpr, E: tl.constexpr,
    K: tl.constexpr, F: tl.constexpr, FORMAT: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr,
    R: tl.constexpr, W: tl.constexpr, D: tl.constexpr, FIXED: tl.constexpr, INT8X2: tl.constexpr, LEFT: tl.constexpr,
    PDL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles, chosen experts); y [chosen, N]. LEFT: each program finds its expert itself, and one more in each row
    of the grid has none: the first stores the choice. FIXED: all experts in order, whatever `ids` says. INT8X2: whichever
    program of 32 rows comes to its end last, by an integer counter, writes the int8x2 to `to`; needs whole blocks of whole
    programs, 32 % R == N % 32 == 0. F is N, or 32. D divides a row's tiles.

    Which rows these are is known only when the router is done: nothing is loaded before the wait, and whoever comes next
    may start when all programs here know their experts, and so knows them too.
    """
    KW: tl.constexpr = K // word_columns(FORMAT)
    C: tl.constexpr = W if word_columns(FORMAT) == 1 else W // 4
    LAST: tl.constexpr = (KW + W - 1) // W - D
    first = tl.program_id(0) * R
    if FIXED:
        stacked = tl.program_id(1).to(tl.int64) * N
    else:
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        if LEFT:
            if first >= N:
                if tl.program_id(1) == 0:
                    choose_left(left, S, G, E)
                return
            mine = expert_at(left, tl.program_id(1), S)
        else:
            mine = tl.load(ids + tl.program_id(1))
        stacked = mine.to(tl.int64) * N
    w_up = _planes_from(FORMAT, up, stacked, K)
    p_y = y + tl.program_id(1).to(tl.int64) * N
    qu = _load(FORMAT, w_up, first, N, 0, K, R, W, D, ASM)
    if GATED:
        w_gate = _planes_from(FORMAT, w, stacked, K)
        qg = _load(FORMAT, w_gate, first, N, 0, K, R, W, D, ASM)
    if FIXED and PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    g_acc, u_acc = tl.zeros([R, C], tl.float32), tl.zeros([R, C], tl.float32)
    for at in tl.range(0, LAST, D, num_stages=1):
        qu1 = _load(FORMAT, w_up, first, N, at + D, K, R, W, D, ASM)
        if GATED:
            qg1 = _load(FORMAT, w_gate, first, N, at + D, K, R, W, D, ASM)
            g_acc = _sum(FORMAT, g_acc, qg, x, at, K, R, W, D, ASM)
            qg = qg1
        u_acc = _sum(FORMAT, u_acc, qu, x, at, K, R, W, D, ASM)
        qu = qu1
    u_acc = _sum(FORMAT, u_acc, qu, x, LAST, K, R, W, D, ASM)
    u = tl.sum(u_acc, 1)
    r = first + tl.arange(0, R)
    ok = r < N
    if BIAS:
        u += tl.load(bias_up + stacked + r, mask=ok, other=0.0)
    if GATED:
        g = tl.sum(_sum(FORMAT, g_acc, qg, x, LAST, K, R, W, D, ASM), 1)
        if BIAS:
            g += tl.load(bias + stacked + r, mask=ok, other=0.0)
        if KIND == "oai":
            v = oai(g, u)
        else:
            v = activate(g, KIND) * u
    else:
        v = activate(u, KIND)
    tl.store(p_y + r, v.to(y.dtype.element_ty), mask=ok)
    if INT8X2:
        tl.debug_barrier()
        p_arrived = arrived + tl.program_id(1) * (N // 32) + first // 32
        before = tl.atomic_add(p_arrived, 1, sem="acq_rel", scope="gpu")
        if before == 32 // R - 1:
            tl.store(p_arrived, 0)
            block = first // 32 + tl.arange(0, 1)
            column = block[:, None, None] * 32 + tl.arange(0, 2)[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
            h = tl.load(p_y + column, cache_modifier=".cg").to(tl.float32)
            store_int8x2(to + tl.program_id(1).to(tl.int64) * (F // 2 + F // 32 * 3), h, block, block >= 0, F)


@triton.jit
def _load_of_experts(
    FORMAT: tl.constexpr, w, ids, first, N, at, K: tl.constexpr, R: tl.constexpr, W: tl.constexpr, D: tl.constexpr,
    TILES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Tiles at.. [D] of rows first.. [R], the experts' TILES tiles one after the other."""
    n = tl.minimum(first + tl.arange(0, R), N - 1).to(tl.int64)
    tiles = ()
    for j in tl.static_range(D):
        w_j = _planes_from(FORMAT, w, tl.load(ids + (at + j) // TILES).to(tl.int64) * N, K)
        tiles += (load_tile(FORMAT, w_j, n, first, N, (at + j) % TILES * W, K, R, W, ASM),)
    return tiles


@triton.jit
def _first_of_experts(
    FORMAT: tl.constexpr, w, left, first, N, S: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    W: tl.constexpr, D: tl.constexpr, TILES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The first tiles, of the experts that are found here."""
    n = tl.minimum(first + tl.arange(0, R), N - 1).to(tl.int64)
    found = best_experts(left, S, (D + TILES - 1) // TILES)
    tiles = ()
    for j in tl.static_range(D):
        w_j = _planes_from(FORMAT, w, found[j // TILES].to(tl.int64) * N, K)
        tiles += (load_tile(FORMAT, w_j, n, first, N, j % TILES * W, K, R, W, ASM),)
    return tiles


@triton.jit
def _sum_of_experts(
    FORMAT: tl.constexpr, acc, tiles, x, shares, at, X_STRIDE: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    W: tl.constexpr, D: tl.constexpr, TILES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """acc with the products of tiles at.. [D] added, each times its expert's share."""
    for j in tl.static_range(D):
        q, u, s, t = tiles[j]
        expert = (at + j) // TILES
        row = x + expert * X_STRIDE
        acc += tl.load(shares + expert) * tile_products(FORMAT, q, u, s, t, row, (at + j) % TILES * W, K, R, W, ASM)
    return acc


@triton.jit
def down_of_experts(
    out, x, ids, shares, left, w, bias, residual, alpha, N,
    LEFT: tl.constexpr, S: tl.constexpr, X_STRIDE: tl.constexpr, K: tl.constexpr, USED: tl.constexpr,
    FORMAT: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, R: tl.constexpr, W: tl.constexpr, D: tl.constexpr,
    PDL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """out [N] float32: the sum over chosen experts of share * (W x + bias), x [USED, ..] with X_STRIDE values a row; with
    ADD, residual + alpha * that. D divides the tiles of all experts together, so the next expert's are on their way too.
    LEFT: the first experts are found here, as `ids` may be stored by the launch ahead."""
    KW: tl.constexpr = K // word_columns(FORMAT)
    C: tl.constexpr = W if word_columns(FORMAT) == 1 else W // 4
    TILES: tl.constexpr = (KW + W - 1) // W
    LAST: tl.constexpr = USED * TILES - D
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.program_id(0) * R
    if LEFT:
        q = _first_of_experts(FORMAT, w, left, first, N, S, K, R, W, D, TILES, ASM)
    else:
        q = _load_of_experts(FORMAT, w, ids, first, N, 0, K, R, W, D, TILES, ASM)
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([R, C], tl.float32)
    for at in tl.range(0, LAST, D, num_stages=1):
        q1 = _load_of_experts(FORMAT, w, ids, first, N, at + D, K, R, W, D, TILES, ASM)
        acc = _sum_of_experts(FORMAT, acc, q, x, shares, at, X_STRIDE, K, R, W, D, TILES, ASM)
        q = q1
    acc = _sum_of_experts(FORMAT, acc, q, x, shares, LAST, X_STRIDE, K, R, W, D, TILES, ASM)
    total = tl.sum(acc, 1)
    r = first + tl.arange(0, R)
    if BIAS:
        for j in tl.static_range(USED):
            offset = tl.load(bias + tl.load(ids + j).to(tl.int64) * N + r, mask=r < N, other=0.0)
            total += tl.load(shares + j) * offset
    if ADD:
        total = tl.load(residual + r, mask=r < N, other=0.0) + alpha * total
    tl.store(out + r, total, mask=r < N)
