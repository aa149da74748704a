"""Kernels of one row of activations: every byte of a weight is read once, 16 bytes a thread, straight into registers.

A program owns R rows and walks K in tiles of W words, of which it loads one ahead, or two (DEEP). With PDL it starts before
the kernel that makes its activations is over, and waits for that one only when its first tiles are on their way. Asking the
L2 cache for whole rows at that point made a step of Mistral-7B slower (H200, 1.92 ms for 1.69). The residual is read beside
the first of x, not when the sums are there: 8 layers of Mistral-7B 444.9 us for 449.3 (H200, 2026-11-27).

    y          [N], the compute type or float32
    x          one row of K, int8x2 (`formats/int8x2.py`) as int32, or for F16 and BF16 the compute type
    w, up      Planes of a weight [N, K], as `formats/table.py: matvec_planes` views them; `up` beside a gate w
    bias       [N] float32, read if BIAS; any pointer else
    residual   [N] float32, read if ADD: y = residual + alpha * (W x + bias)
    FORMAT     name of the weight's format;  R, W  rows and words of a tile;  ASM  false in the interpreter
"""

from __future__ import annotations

import triton
import triton.language as tl

from quarrel.triton_backend.elementwise.activation import activate
from quarrel.triton_backend.formats.dots import load_tile, products, tile_products
from quarrel.triton_backend.formats.table import word_columns
from quarrel.triton_backend.linear.maps import Maps, Serves
from quarrel.triton_backend.runtime.arrays import Planes
from quarrel.triton_backend.runtime.site import Site


@triton.jit
def row_sums(
    FORMAT: tl.constexpr, w, x, first, N, K: tl.constexpr, R: tl.constexpr, W: tl.constexpr, PDL: tl.constexpr,
    DEEP: tl.constexpr, ASM: tl.constexpr, residual=None, ADD: tl.constexpr = False,
):  # fmt: skip
    """Products of rows first.. [R] with x, and the residual of these rows if ADD, else zeros; waits for both itself."""
    KW: tl.constexpr = K // word_columns(FORMAT)
    C: tl.constexpr = W if word_columns(FORMAT) == 1 else W // 4
    n = tl.minimum(first + tl.arange(0, R), N - 1).to(tl.int64)
    q, u, s, t = load_tile(FORMAT, w, n, first, N, 0, K, R, W, ASM)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    TILES: tl.constexpr = (KW + W - 1) // W
    acc = tl.zeros([R, C], tl.float32)
    if DEEP and TILES > 1:
        # Two tiles ahead.
        q1, u1, s1, t1 = load_tile(FORMAT, w, n, first, N, W, K, R, W, ASM)
        if PDL:
            tl.extra.cuda.gdc_wait()
        add = _residual(residual, first, N, ADD, R)
        for start in tl.range(0, (TILES - 2) * W, W, num_stages=1):
            q2, u2, s2, t2 = load_tile(FORMAT, w, n, first, N, start + 2 * W, K, R, W, ASM)
            acc += tile_products(FORMAT, q, u, s, t, x, start, K, R, W, ASM)
            q, u, s, t = q1, u1, s1, t1
            q1, u1, s1, t1 = q2, u2, s2, t2
        acc += tile_products(FORMAT, q, u, s, t, x, (TILES - 2) * W, K, R, W, ASM)
        q, u, s, t = q1, u1, s1, t1
    else:
        if PDL:
            tl.extra.cuda.gdc_wait()
        add = _residual(residual, first, N, ADD, R)
        for start in tl.range(0, (TILES - 1) * W, W, num_stages=1):
            q1, u1, s1, t1 = load_tile(FORMAT, w, n, first, N, start + W, K, R, W, ASM)
            acc += tile_products(FORMAT, q, u, s, t, x, start, K, R, W, ASM)
            q, u, s, t = q1, u1, s1, t1
    acc += tile_products(FORMAT, q, u, s, t, x, (TILES - 1) * W, K, R, W, ASM)
    return tl.sum(acc, 1), add


@triton.jit
def _residual(residual, first, N, ADD: tl.constexpr, R: tl.constexpr):
    n = first + tl.arange(0, R)
    add = tl.zeros([R], tl.float32)
    if ADD:
        add = tl.load(residual + n, mask=n < N, other=0.0)
    return add


@triton.jit
def store_row(y, sums, bias, add, first, N, alpha, BIAS: tl.constexpr, ADD: tl.constexpr, R: tl.constexpr):
    n = first + tl.arange(0, R)
    if BIAS:
        sums += tl.load(bias + n, mask=n < N, other=0.0)
    if ADD:
        sums = add + alpha * sums
    tl.store(y + n, sums.to(y.dtype.element_ty), mask=n < N)


@triton.jit
def matvec(
    y, x, w, bias, residual, alpha, N,
    K: tl.constexpr, FORMAT: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    PDL: tl.constexpr, DEEP: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Grid (N / R)."""
    first = tl.program_id(0) * R
    sums, add = row_sums(FORMAT, w, x, first, N, K, R, W, PDL, DEEP, ASM, residual, ADD)
    store_row(y, sums, bias, add, first, N, alpha, BIAS, ADD, R)


@triton.jit
def _map_rows(
    y, x, w, bias, n, tile, K: tl.constexpr, FORMAT: tl.constexpr, BIAS: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    PDL: tl.constexpr, DEEP: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A tile's rows of one of several maps."""
    first = tile * R
    sums, add = row_sums(FORMAT, w, x, first, n, K, R, W, PDL, DEEP, ASM)
    store_row(y, sums, bias, add, first, n, 1.0, BIAS, False, R)


@triton.jit
def matvecs(
    ys, xs, ws, biases, ns,
    K: tl.constexpr, FORMATS: tl.constexpr, BIAS: tl.constexpr, R: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
    DEEP: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Three maps of one row, or four: of each argument a tuple of so many; the programs of the first map come first."""
    # Parts of a constant are constants by annotation only (Triton 3.6).
    FOUR: tl.constexpr = len(FORMATS) == 4
    F0: tl.constexpr = FORMATS[0]
    F1: tl.constexpr = FORMATS[1]
    F2: tl.constexpr = FORMATS[2]
    F3: tl.constexpr = FORMATS[3 if FOUR else 2]
    W0: tl.constexpr = WORDS[0]
    W1: tl.constexpr = WORDS[1]
    W2: tl.constexpr = WORDS[2]
    W3: tl.constexpr = WORDS[3 if FOUR else 2]
    tile = tl.program_id(0)
    t_1 = tl.cdiv(ns[0], R)
    t_2 = t_1 + tl.cdiv(ns[1], R)
    t_3 = t_2 + tl.cdiv(ns[2], R)
    if tile < t_1:
        _map_rows(ys[0], xs[0], ws[0], biases[0], ns[0], tile, K, F0, BIAS, R, W0, PDL, DEEP, ASM)
    elif tile < t_2:
        _map_rows(ys[1], xs[1], ws[1], biases[1], ns[1], tile - t_1, K, F1, BIAS, R, W1, PDL, DEEP, ASM)
    elif tile < t_3:
        _map_rows(ys[2], xs[2], ws[2], biases[2], ns[2], tile - t_2, K, F2, BIAS, R, W2, PDL, DEEP, ASM)
    elif FOUR:
        _map_rows(ys[3], xs[3], ws[3], biases[3], ns[3], tile - t_3, K, F3, BIAS, R, W3, PDL, DEEP, ASM)


@triton.jit
def gate_up(
    y, x, w, up, bias, bias_up, N,
    K: tl.constexpr, FORMAT: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    PDL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """act(w x) * up x; both of one format. Grid (N / R)."""
    first = tl.program_id(0) * R
    KW: tl.constexpr = K // word_columns(FORMAT)
    C: tl.constexpr = W if word_columns(FORMAT) == 1 else W // 4
    n = tl.minimum(first + tl.arange(0, R), N - 1).to(tl.int64)
    qg, ug, sg, tg = load_tile(FORMAT, w, n, first, N, 0, K, R, W, ASM)
    qu, uu, su, tu = load_tile(FORMAT, up, n, first, N, 0, K, R, W, ASM)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    TILES: tl.constexpr = (KW + W - 1) // W
    g_acc = tl.zeros([R, C], tl.float32)
    u_acc = tl.zeros([R, C], tl.float32)
    for start in tl.range(0, (TILES - 1) * W, W, num_stages=1):
        qg1, ug1, sg1, tg1 = load_tile(FORMAT, w, n, first, N, start + W, K, R, W, ASM)
        qu1, uu1, su1, tu1 = load_tile(FORMAT, up, n, first, N, start + W, K, R, W, ASM)
        g_acc += tile_products(FORMAT, qg, ug, sg, tg, x, start, K, R, W, ASM)
        u_acc += tile_products(FORMAT, qu, uu, su, tu, x, start, K, R, W, ASM)
        qg, ug, sg, tg = qg1, ug1, sg1, tg1
        qu, uu, su, tu = qu1, uu1, su1, tu1
    g_acc += tile_products(FORMAT, qg, ug, sg, tg, x, (TILES - 1) * W, K, R, W, ASM)
    u_acc += tile_products(FORMAT, qu, uu, su, tu, x, (TILES - 1) * W, K, R, W, ASM)
    g, u = tl.sum(g_acc, 1), tl.sum(u_acc, 1)
    r = first + tl.arange(0, R)
    if BIAS:
        g += tl.load(bias + r, mask=r < N, other=0.0)
        u += tl.load(bias_up + r, mask=r < N, other=0.0)
    tl.store(y + r, (activate(g, KIND) * u).to(y.dtype.element_ty), mask=r < N)


@triton.jit
def norm_gate_up(
    y, x, gain, eps, gate, up, bias, bias_up, N,
    K: tl.constexpr, FORMAT: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    PDL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """act(gate norm(x)) * up norm(x), the norm inside, in programs that walk rows; gate and up [N, K] are floats, x and
    gain [K] float32.

    A tile is a whole row of W (so K is at most W), so that a thread has the same columns of every row: activations are read
    and normalised once a program, and the next R rows are on their way while these are summed. Programs take rows in turns;
    how many programs there are changes no result.
    """
    w, up = Planes(gate, gate, gate, gate), Planes(up, up, up, up)
    first = tl.program_id(0) * R
    step = tl.num_programs(0) * R
    n = tl.minimum(first + tl.arange(0, R), N - 1).to(tl.int64)
    b_gate, _, _, _ = load_tile(FORMAT, w, n, first, N, 0, K, R, W, ASM)
    b_up, _, _, _ = load_tile(FORMAT, up, n, first, N, 0, K, R, W, ASM)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    i = tl.arange(0, W)
    weight = tl.load(gain + i, mask=i < K, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    v = tl.load(x + i, mask=i < K, other=0.0).to(tl.float32)
    v = v * (1.0 / tl.sqrt(tl.sum(v * v, 0) / K + eps)) * weight
    row = (v[None, :],)
    for at in tl.range(first, N, step, num_stages=1):
        n = tl.minimum(at + step + tl.arange(0, R), N - 1).to(tl.int64)
        next_gate, _, _, _ = load_tile(FORMAT, w, n, at + step, N, 0, K, R, W, ASM)
        next_up, _, _, _ = load_tile(FORMAT, up, n, at + step, N, 0, K, R, W, ASM)
        g = tl.sum(products(FORMAT, b_gate, 0, 0, 0, row, R, W, ASM), 1)
        u = tl.sum(products(FORMAT, b_up, 0, 0, 0, row, R, W, ASM), 1)
        r = at + tl.arange(0, R)
        if BIAS:
            g += tl.load(bias + r, mask=r < N, other=0.0)
            u += tl.load(bias_up + r, mask=r < N, other=0.0)
        tl.store(y + r, (activate(g, KIND) * u).to(y.dtype.element_ty), mask=r < N)
        b_gate, b_up = next_gate, next_up


def declines(site: Site, maps: Maps) -> str | None:
    """Takes what `matvec.py` has built for one row."""
    return None if maps.matvec is not None else "no integer products of this format, or float32 or deterministic steps"


def build(site: Site, maps: Maps) -> Serves:
    assert maps.matvec is not None
    return Serves(maps.matvec, 1, 1, norms=True)
