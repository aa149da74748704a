"""Linear maps of 2 to 16 rows of activations: weights from memory to registers to the matrix units, each read once.

A program owns `BM` outputs; its warps take 256 columns of K each, turn by turn, and add their sums at the end, always in
the same order. The next codes are on their way while these are decoded. How K is dealt out follows from the weight's shape;
the number of rows only says how many of them `mma` is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quarrel.triton_backend.elementwise import activation as elementwise
from quarrel.triton_backend.formats.fragments import GROUP, STEP, arrange, fetch_words, pairs, words_layout
from quarrel.triton_backend.formats.table import FRAGMENTS, by_name
from quarrel.triton_backend.linear.maps import Maps, Serves
from quarrel.triton_backend.linear.matmul import Epilogue
from quarrel.triton_backend.linear.tuned import Kind, key, table
from quarrel.triton_backend.runtime.arrays import Packed
from quarrel.triton_backend.runtime.launch import INTERPRETED, cdiv
from quarrel.triton_backend.runtime.site import Batch, Site, starts_early

WIDTHS = (8, 16, 32)
"""Rows of x that `mma` is given."""

_WARPS = {8: 1500, 16: 800, 32: 1000}
"""Warps that keep an H200 busy, by width."""
MOST_FOR_32 = 16384
"""Outputs from which tiles are the better for 32 rows: 74 us against 87 for 32000 x 4096 in Q6_K; 31 against 47 for 4096 x
14336, 55 against 63 for gate and up of 14336 x 4096. They are so for any outputs where rows are no whole super-blocks: 16.6
us against 17.1 for query, key and value of gpt-oss, which take 11.2 against 13.5 for 8 rows."""

_activate = gluon.jit(elementwise.activate.fn)


@dataclass(frozen=True)
class KSplit:
    """`rows` of W a program: `tall` warps have rows of their own, `turns` of them share K; `deep` two steps ahead."""

    rows: int
    tall: int
    turns: int
    deep: bool = False

    @property
    def warps(self) -> int:
        return self.tall * self.turns


def declines(site: Site, maps: Maps) -> str | None:
    """Takes float16 arithmetic on whole super-blocks of some formats, on a device with `mma`."""
    for w in maps.weights:
        whole = STEP if by_name(w.format).top else 32
        if w.format not in FRAGMENTS or w.k % whole:
            return f"needs {', '.join(FRAGMENTS)} in rows of whole {whole} columns, got {w.format} of {w.k}"
    if site.compute != "float16" or site.generation < 8 or site.deterministic or INTERPRETED:
        return "needs float16 arithmetic, compute capability 8.0 or higher, and steps that need not be deterministic"
    return maps.together() or (None if splits_of(site, maps) else "these shapes are measured to be faster by matmul")


def splits_by_width(site: Site, kind: Kind, weights: Sequence[Packed]) -> dict[int, KSplit]:
    """By width of rows, ascending: as the device's table has it, or by `k_split`."""
    ns, k = [w.n for w in weights], weights[0].k
    known, name = table(site.generation), key(kind, [w.format for w in weights], ns, k)
    tiled = known.tiles.get(name, {})
    n = sum(ns) if kind == "three" else ns[0]
    most = MOST_FOR_32 if k % STEP == 0 else 0
    widths = [w for w in WIDTHS if w not in tiled and (w < 32 or n < most)]
    tall = all(w.format != "Q5_K" for w in weights)  # gate and up spill 32 bytes
    found = {width: k_split(n, k, width, tall) for width in widths}
    for width, (rows, high, turns, deep) in known.rows.get(name, {}).items():
        found[width] = KSplit(rows, high, turns, bool(deep))
    return dict(sorted(found.items()))


def k_split(n: int, k: int, width: int, tall: bool = True) -> KSplit:
    """By the weight's shape and a width of rows.

    Warps share K until there are enough to keep an H200's memory busy, and no further, for each then has less to stream:
    14336 x 4096 in Q4_K took 18.5 us for 8 rows with 2 of them (4: 24.7, 8: 27.8), 4096 x 14336 20.1 with 8 (4: 23.9, 16:
    28.2). From 9 to 16 rows two tiles of outputs to a warp pay (26.3 us against 42); beyond, or if not `tall`, there is no
    room for them in registers.
    """
    rows = 32 if width == 16 and tall else 16
    turns = 1
    while turns < 8 and cdiv(n, rows) * turns < _WARPS[width] and cdiv(k, STEP) >= 2 * turns:
        turns *= 2
    return KSplit(rows, 1, turns)


@gluon.jit
def _blocks(super, within, K: gl.constexpr):
    """Blocks of super-blocks; beyond the last of a row that one again, as x is zero there."""
    block = (super * 8)[:, :, None] + within
    if K % 256:
        block = gl.minimum(block, K // 32 - 1)
    return block


@gluon.jit
def _walk(
    FORMAT: gl.constexpr, w, x, first, N, K: gl.constexpr, W: gl.constexpr, M: gl.constexpr,
    BM: gl.constexpr, BT: gl.constexpr, DEEP: gl.constexpr, MMA: gl.constexpr, WAIT: gl.constexpr,
):  # fmt: skip
    """Sums `[BM, BT]` for outputs from `first` on."""
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 16)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 16)
    L4: gl.constexpr = words_layout(W, M, BM)
    L3: gl.constexpr = gl.SliceLayout(3, L4)
    SUPERS: gl.constexpr = (K + 255) // 256
    STEPS: gl.constexpr = (SUPERS + W - 1) // W
    super = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, L3)))[:, None]
    row = first + gl.arange(0, BM, gl.SliceLayout(0, gl.SliceLayout(2, L3)))
    row = gl.minimum(row, N - 1).to(gl.int64)[None, :]
    within = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, L3)))[None, None, :]
    # x as `arrange` left it: sixteen columns of a block, eight at a time.
    k = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(2, B)))
    turn = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, B)))
    token = gl.arange(0, BT, gl.SliceLayout(0, gl.SliceLayout(1, B)))
    token = gl.expand_dims(gl.expand_dims(token // 8 * (SUPERS * 2048) + token % 8 * 32, 0), 1)
    place = gl.expand_dims(gl.expand_dims(k // 64 * 512 + k // 8 % 2 * 256 + k // 16 % 4 * 8 + k % 8, 0), 2)
    turn = gl.expand_dims(gl.expand_dims(turn, 1), 2)
    p_x = x + turn * 2048 + token + place
    # Two sums, as each product waits for the one before it.
    acc = gl.zeros([W, BM, BT], gl.float32, layout=MMA)
    acc_high = gl.zeros([W, BM, BT], gl.float32, layout=MMA)
    last = SUPERS - 1
    now = gl.minimum(super, last)
    q, a, b, s, t = fetch_words(FORMAT, w, row, _blocks(now, within, K), now, K, L4)
    if DEEP:
        now = gl.minimum(W + super, last)
        q1, a1, b1, s1, t1 = fetch_words(FORMAT, w, row, _blocks(now, within, K), now, K, L4)
    if WAIT:  # weights are there since the model was loaded, x comes from the kernel before
        gdc_wait()
    for step in range(STEPS):
        if SUPERS % W:  # columns beyond the last are those of the last super-block again, times zero
            x_ok = (turn < SUPERS - step * W) & (token + place >= 0)
            x_low = gl.load(p_x + step * (2048 * W), mask=x_ok, other=0.0)
            x_high = gl.load(p_x + step * (2048 * W) + 1024, mask=x_ok, other=0.0)
        else:
            x_low = gl.load(p_x + step * (2048 * W))
            x_high = gl.load(p_x + step * (2048 * W) + 1024)
        now = gl.minimum((step + 1 + DEEP) * W + super, last)
        q2, a2, b2, s2, t2 = fetch_words(FORMAT, w, row, _blocks(now, within, K), now, K, L4)
        low, high = pairs(FORMAT, q, a, b, s, t, W, BM, L4, A)
        acc = mma_v2(low, x_low, acc)
        acc_high = mma_v2(high, x_high, acc_high)
        if DEEP:
            q, a, b, s, t = q1, a1, b1, s1, t1
            q1, a1, b1, s1, t1 = q2, a2, b2, s2, t2
        else:
            q, a, b, s, t = q2, a2, b2, s2, t2
    return gl.sum(acc + acc_high, 0)


@gluon.jit
def finish(
    y, acc, acc_up, more, first, tokens, alpha, N, BIAS: gl.constexpr, ADD: gl.constexpr,
    GATED: gl.constexpr, KIND: gl.constexpr, BM: gl.constexpr, BT: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """Bias, activation or residual (`more` is an Epilogue), and the store."""
    row = first + gl.arange(0, BM, gl.SliceLayout(1, OUT))
    token = gl.arange(0, BT, gl.SliceLayout(0, OUT))
    row_ok = row < N
    if BIAS:
        acc += gl.load(more.bias + row, mask=row_ok, other=0.0)[:, None]
        if GATED:
            acc_up += gl.load(more.bias_up + row, mask=row_ok, other=0.0)[:, None]
    if GATED:
        acc = _activate(acc, KIND) * acc_up
    at = token[None, :] * N + row[:, None]
    ok = row_ok[:, None] & (token < tokens)[None, :]
    if ADD:
        acc = gl.load(more.residual + at, mask=ok, other=0.0).to(gl.float32) + alpha * acc
    gl.store(y + at, acc.to(y.dtype.element_ty), mask=ok)


@gluon.jit(do_not_specialize=["tokens"])
def rows_one(
    y, x, w, up, more, tokens, alpha, N,
    K: gl.constexpr, FORMAT: gl.constexpr, BIAS: gl.constexpr, ADD: gl.constexpr, GATED: gl.constexpr, KIND: gl.constexpr,
    W: gl.constexpr, M: gl.constexpr, BM: gl.constexpr, BT: gl.constexpr, DEEP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One map, or gate and up. Grid (N / BM).

    y       [tokens, N], float32 or the compute type
    x       float16, as `fragments.arrange` puts BT rows of K columns
    w, up   Planes of weights [N, K] of one format; `up` is w again unless GATED
    more    Epilogue: y = act(w x + bias) * (up x + bias_up), or residual + alpha * (w x + bias)
    W, M    warps that share the columns of K; that have rows of their own;  DEEP  two steps ahead
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[W, M, 1], instr_shape=[1, 16, 8])
    if PDL:
        gdc_launch_dependents()
    first = gl.program_id(0) * BM
    acc = _walk(FORMAT, w, x, first, N, K, W, M, BM, BT, DEEP, MMA, PDL)
    acc_up = acc
    if GATED:  # one after the other: together they leave a device half its warps
        acc_up = _walk(FORMAT, up, x, first, N, K, W, M, BM, BT, DEEP, MMA, False)
    finish(
        y, acc, acc_up, more, first, tokens, alpha, N, BIAS, ADD, GATED, KIND, BM, BT, gl.SliceLayout(0, MMA)
    )  # fmt: skip


@gluon.jit
def _one_of_three(
    y, x, w, bias, first, tokens, N, K: gl.constexpr, FORMAT: gl.constexpr, BIAS: gl.constexpr, W: gl.constexpr,
    M: gl.constexpr, BM: gl.constexpr, BT: gl.constexpr, DEEP: gl.constexpr, MMA: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    acc = _walk(FORMAT, w, x, first, N, K, W, M, BM, BT, DEEP, MMA, PDL)
    more = Epilogue(bias, bias, y)
    finish(y, acc, acc, more, first, tokens, 1.0, N, BIAS, False, False, "none", BM, BT, gl.SliceLayout(0, MMA))


@gluon.jit(do_not_specialize=["tokens"])
def rows_three(
    ys, x, ws, biases, tokens, ns, K: gl.constexpr, FORMATS: gl.constexpr, BIAS: gl.constexpr, W: gl.constexpr,
    M: gl.constexpr, BM: gl.constexpr, BT: gl.constexpr, DEEP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Three maps of one x, as `rows_one`: ys, ws, biases, ns and FORMATS are tuples of three.

    Outputs of the first matrix, then of the second, then of the third.
    """
    # Parts of a constant are constants by annotation only (Triton 3.6).
    F0: gl.constexpr = FORMATS[0]
    F1: gl.constexpr = FORMATS[1]
    F2: gl.constexpr = FORMATS[2]
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[W, M, 1], instr_shape=[1, 16, 8])
    if PDL:
        gdc_launch_dependents()
    tile = gl.program_id(0)
    tiles0, tiles1 = gl.cdiv(ns[0], BM), gl.cdiv(ns[1], BM)
    if tile < tiles0:
        _one_of_three(
            ys[0], x, ws[0], biases[0], tile * BM, tokens, ns[0], K, F0, BIAS, W, M, BM, BT, DEEP, MMA, PDL
        )  # fmt: skip
    elif tile < tiles0 + tiles1:
        first = (tile - tiles0) * BM
        _one_of_three(ys[1], x, ws[1], biases[1], first, tokens, ns[1], K, F1, BIAS, W, M, BM, BT, DEEP, MMA, PDL)
    else:
        first = (tile - tiles0 - tiles1) * BM
        _one_of_three(ys[2], x, ws[2], biases[2], first, tokens, ns[2], K, F2, BIAS, W, M, BM, BT, DEEP, MMA, PDL)


def splits_of(site: Site, maps: Maps) -> dict[int, KSplit]:
    """By width of rows, for these maps."""
    kind: Kind = "gated" if maps.gated else "one" if len(maps.weights) == 1 else "three"
    return splits_by_width(site, kind, maps.weights)


def build(site: Site, maps: Maps) -> Serves:
    """From 2 rows to the widest; x is put in the kernel's order first, by the norm if there is one that can."""
    by_width = splits_of(site, maps)
    a, b = maps.weights[0], maps.weights[-1]
    ns, k, gated, biases = tuple(w.n for w in maps.weights), a.k, maps.gated, maps.given
    planes, formats = tuple(w.planes for w in maps.weights), tuple(w.format for w in maps.weights)
    steps = cdiv(k, STEP)
    arranged = site.scratch("one", max(by_width) * steps * STEP, torch.float16)

    def prepare(batch: Batch, width: int) -> None:
        if maps.arrange is not None:
            maps.arrange(arranged, batch, width)
        else:
            grid = (steps, width // GROUP)
            site.launch(
                arrange, grid, arranged.tensor, maps.x.tensor, batch.count(maps.axis), K=k, early=starts_early(site)
            )

    def one(batch: Batch) -> None:
        y, count = maps.ys[0].tensor, batch.count(maps.axis)
        width, how = next((w, d) for w, d in by_width.items() if count <= w)
        prepare(batch, width)
        more = Epilogue(
            *(biases[i] if biases else y for i in (0, -1)), y if maps.residual is None else maps.residual.tensor
        )
        site.launch(
            rows_one, (cdiv(a.n, how.rows),), y, arranged.tensor, a.planes, b.planes, more, count, maps.alpha, a.n, K=k,
            FORMAT=a.format, BIAS=bool(biases), ADD=maps.residual is not None, GATED=gated, KIND=maps.activation,
            W=how.turns, M=how.tall, BM=how.rows, BT=width, DEEP=how.deep, warps=how.warps, stages=1,
            early=starts_early(site),
        )  # fmt: skip

    def three(batch: Batch) -> None:
        count, outs = batch.count(maps.axis), tuple(y.tensor for y in maps.ys)
        width, how = next((w, d) for w, d in by_width.items() if count <= w)
        prepare(batch, width)
        site.launch(
            rows_three, (sum(cdiv(n, how.rows) for n in ns),), outs, arranged.tensor, planes, biases or outs, count,
            ns, K=k, FORMATS=formats, BIAS=bool(biases), W=how.turns, M=how.tall, BM=how.rows, BT=width, DEEP=how.deep,
            warps=how.warps, stages=1, early=starts_early(site),
        )  # fmt: skip

    return Serves(three if len(planes) == 3 else one, 2, max(by_width), maps.arrange is not None)
