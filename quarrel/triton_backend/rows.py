"""Linear maps of 2 to 16 rows of activations: weights from memory to registers to the matrix units, each read once.

A program owns `BM` outputs; its warps take 256 columns of K each, turn by turn, and add their sums at the end, always in
the same order. The next codes are on their way while these are decoded. How K is dealt out follows from the weight's shape;
the number of rows only says how many of them `mma` is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quarrel.ops.contract import Compute
from quarrel.triton_backend import elementwise
from quarrel.triton_backend.fragments import GROUP, STEP, TAKEN, arrange, fetch_words, pairs, words_layout
from quarrel.triton_backend.pack import Packed
from quarrel.triton_backend.runtime import INTERPRETED, Launch, Live, Site, Slot, cdiv, starts_early
from quarrel.triton_backend.tuned import Kind, key, table

WIDTHS = (8, 16, 32)
"""Rows of x that `mma` is given."""

_WARPS = {8: 1500, 16: 800, 32: 1000}
"""Warps that keep an H200 busy, by width."""
MOST_FOR_32 = 16384
"""Outputs from which tiles are the better for 32 rows: 74 us against 87 for 32000 x 4096 in Q6_K; 31 against 47 for 4096 x
14336, 55 against 63 for gate and up of 14336 x 4096."""

_activate = gluon.jit(elementwise.activate.fn)


@dataclass(frozen=True)
class Deal:
    """`rows` of W a program: `tall` warps have rows of their own, `turns` of them share K; `deep` two steps ahead."""

    rows: int
    tall: int
    turns: int
    deep: bool = False

    @property
    def warps(self) -> int:
        return self.tall * self.turns


def takes(site: Site, weights: Sequence[Packed]) -> bool:
    """Whether these kernels read the weights: float16 arithmetic, whole super-blocks, a device with `mma`."""
    read = all(w.format in TAKEN and w.k % STEP == 0 for w in weights)
    compute: Compute = site.compute
    return read and compute == "float16" and site.generation >= 8 and not site.deterministic and not INTERPRETED


@dataclass(frozen=True)
class Few:
    """A launch for `least` to `most` rows; `alone` if it makes x itself, by a `Fill`."""

    run: Launch
    most: int
    alone: bool = False
    least: int = 2


Fill = Callable[[Slot, Live, int], None]
"""Puts x in the kernels' order into scratch, for a width of rows."""


def deals(site: Site, kind: Kind, weights: Sequence[Packed]) -> dict[int, Deal]:
    """By width of rows, ascending: as the device's table has it, or by `deal`."""
    ns, k = [w.n for w in weights], weights[0].k
    known, name = table(site.generation), key(kind, [w.format for w in weights], ns, k)
    tiled = known.tiles.get(name, {})
    n = sum(ns) if kind == "three" else ns[0]
    widths = [w for w in WIDTHS if w not in tiled and (w < 32 or n < MOST_FOR_32)]
    tall = all(w.format != "Q5_K" for w in weights)  # gate and up spill 32 bytes
    found = {width: deal(n, k, width, tall) for width in widths}
    for width, (rows, high, turns, deep) in known.rows.get(name, {}).items():
        found[width] = Deal(rows, high, turns, bool(deep))
    return dict(sorted(found.items()))


def deal(n: int, k: int, width: int, tall: bool = True) -> Deal:
    """By the weight's shape and a width of rows.

    Warps share K until there are enough to keep an H200's memory busy, and no further, for each then has less to stream:
    14336 x 4096 in Q4_K took 18.5 us for 8 rows with 2 of them (4: 24.7, 8: 27.8), 4096 x 14336 20.1 with 8 (4: 23.9, 16:
    28.2). From 9 to 16 rows two tiles of outputs to a warp pay (26.3 us against 42); beyond, or if not `tall`, there is no
    room for them in registers.
    """
    rows = 32 if width == 16 and tall else 16
    turns = 1
    while turns < 8 and cdiv(n, rows) * turns < _WARPS[width] and k // STEP >= 2 * turns:
        turns *= 2
    return Deal(rows, 1, turns)


@gluon.jit
def _walk(
    FORMAT: gl.constexpr, codes, bits, scale, top, x, first, N, K: gl.constexpr, W: gl.constexpr, M: gl.constexpr,
    BM: gl.constexpr, BT: gl.constexpr, DEEP: gl.constexpr, MMA: gl.constexpr, WAIT: gl.constexpr,
):  # fmt: skip
    """Sums `[BM, BT]` for outputs from `first` on."""
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 16)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 16)
    L4: gl.constexpr = words_layout(W, M, BM)
    L3: gl.constexpr = gl.SliceLayout(3, L4)
    EACH: gl.constexpr = 256 * W
    STEPS: gl.constexpr = (K + EACH - 1) // EACH
    super = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, L3)))[:, None]
    row = first + gl.arange(0, BM, gl.SliceLayout(0, gl.SliceLayout(2, L3)))
    row = gl.minimum(row, N - 1).to(gl.int64)[None, :]
    within = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, L3)))[None, None, :]
    # x as `arrange` left it: sixteen columns of a block, eight at a time.
    k = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(2, B)))
    turn = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, B)))
    token = gl.arange(0, BT, gl.SliceLayout(0, gl.SliceLayout(1, B)))
    token = gl.expand_dims(gl.expand_dims(token // 8 * (K * 8) + token % 8 * 32, 0), 1)
    place = gl.expand_dims(gl.expand_dims(k // 64 * 512 + k // 8 % 2 * 256 + k // 16 % 4 * 8 + k % 8, 0), 2)
    turn = gl.expand_dims(gl.expand_dims(turn, 1), 2)
    p_x = x + turn * 2048 + token + place
    # Two sums, as each product waits for the one before it.
    acc = gl.zeros([W, BM, BT], gl.float32, layout=MMA)
    acc_high = gl.zeros([W, BM, BT], gl.float32, layout=MMA)
    last = K // 256 - 1
    now = gl.minimum(super, last)
    q, a, b, s, t = fetch_words(FORMAT, codes, bits, scale, top, row, (now * 8)[:, :, None] + within, now, K, L4)
    if DEEP:
        now = gl.minimum(W + super, last)
        q1, a1, b1, s1, t1 = fetch_words(FORMAT, codes, bits, scale, top, row, (now * 8)[:, :, None] + within, now, K, L4)
    if WAIT:  # weights are there since the model was loaded, x comes from the kernel before
        gdc_wait()
    for step in range(STEPS):
        if K % EACH:  # columns beyond the last are those of the last super-block again, times zero
            x_ok = (turn < K // 256 - step * W) & (token + place >= 0)
            x_low = gl.load(p_x + step * (2048 * W), mask=x_ok, other=0.0)
            x_high = gl.load(p_x + step * (2048 * W) + 1024, mask=x_ok, other=0.0)
        else:
            x_low = gl.load(p_x + step * (2048 * W))
            x_high = gl.load(p_x + step * (2048 * W) + 1024)
        now = gl.minimum((step + 1 + DEEP) * W + super, last)
        q2, a2, b2, s2, t2 = fetch_words(FORMAT, codes, bits, scale, top, row, (now * 8)[:, :, None] + within, now, K, L4)
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
    y, acc, acc_b, bias, bias_b, residual, first, tokens, alpha, N, BIAS: gl.constexpr, ADD: gl.constexpr,
    GATED: gl.constexpr, KIND: gl.constexpr, BM: gl.constexpr, BT: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """Bias, activation or residual, and the store."""
    row = first + gl.arange(0, BM, gl.SliceLayout(1, OUT))
    token = gl.arange(0, BT, gl.SliceLayout(0, OUT))
    row_ok = row < N
    if BIAS:
        acc += gl.load(bias + row, mask=row_ok, other=0.0)[:, None]
        if GATED:
            acc_b += gl.load(bias_b + row, mask=row_ok, other=0.0)[:, None]
    if GATED:
        acc = _activate(acc, KIND) * acc_b
    at = token[None, :] * N + row[:, None]
    ok = row_ok[:, None] & (token < tokens)[None, :]
    if ADD:
        acc = gl.load(residual + at, mask=ok, other=0.0).to(gl.float32) + alpha * acc
    gl.store(y + at, acc.to(y.dtype.element_ty), mask=ok)


@gluon.jit(do_not_specialize=["tokens"])
def rows_one(
    y, x, a_codes, a_bits, a_scale, a_top, b_codes, b_bits, b_scale, b_top, bias, bias_b, residual, tokens, alpha, N,
    K: gl.constexpr, FORMAT: gl.constexpr, BIAS: gl.constexpr, ADD: gl.constexpr, GATED: gl.constexpr, KIND: gl.constexpr,
    W: gl.constexpr, M: gl.constexpr, BM: gl.constexpr, BT: gl.constexpr, DEEP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[W, M, 1], instr_shape=[1, 16, 8])
    if PDL:
        gdc_launch_dependents()
    first = gl.program_id(0) * BM
    acc = _walk(FORMAT, a_codes, a_bits, a_scale, a_top, x, first, N, K, W, M, BM, BT, DEEP, MMA, PDL)
    acc_b = acc
    if GATED:  # one after the other: together they leave a device half its warps
        acc_b = _walk(FORMAT, b_codes, b_bits, b_scale, b_top, x, first, N, K, W, M, BM, BT, DEEP, MMA, False)
    finish(
        y, acc, acc_b, bias, bias_b, residual, first, tokens, alpha, N, BIAS, ADD, GATED, KIND, BM, BT,
        gl.SliceLayout(0, MMA),
    )  # fmt: skip


@gluon.jit(do_not_specialize=["tokens"])
def rows_three(
    y0, y1, y2, x, a_codes, a_bits, a_scale, a_top, b_codes, b_bits, b_scale, b_top, c_codes, c_bits, c_scale, c_top,
    bias0, bias1, bias2, tokens, N0, N1, N2, K: gl.constexpr, FORMAT0: gl.constexpr, FORMAT1: gl.constexpr,
    FORMAT2: gl.constexpr, BIAS: gl.constexpr, W: gl.constexpr, M: gl.constexpr, BM: gl.constexpr,
    BT: gl.constexpr, DEEP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    # Outputs of the first matrix, then of the second, then of the third.
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[W, M, 1], instr_shape=[1, 16, 8])
    OUT: gl.constexpr = gl.SliceLayout(0, MMA)
    if PDL:
        gdc_launch_dependents()
    tile = gl.program_id(0)
    tiles0, tiles1 = gl.cdiv(N0, BM), gl.cdiv(N1, BM)
    if tile < tiles0:
        first = tile * BM
        acc = _walk(FORMAT0, a_codes, a_bits, a_scale, a_top, x, first, N0, K, W, M, BM, BT, DEEP, MMA, PDL)
        finish(y0, acc, acc, bias0, bias0, y0, first, tokens, 1.0, N0, BIAS, False, False, "none", BM, BT, OUT)
    elif tile < tiles0 + tiles1:
        first = (tile - tiles0) * BM
        acc = _walk(FORMAT1, b_codes, b_bits, b_scale, b_top, x, first, N1, K, W, M, BM, BT, DEEP, MMA, PDL)
        finish(y1, acc, acc, bias1, bias1, y1, first, tokens, 1.0, N1, BIAS, False, False, "none", BM, BT, OUT)
    else:
        first = (tile - tiles0 - tiles1) * BM
        acc = _walk(FORMAT2, c_codes, c_bits, c_scale, c_top, x, first, N2, K, W, M, BM, BT, DEEP, MMA, PDL)
        finish(y2, acc, acc, bias2, bias2, y2, first, tokens, 1.0, N2, BIAS, False, False, "none", BM, BT, OUT)


def linear(
    site: Site, x: Slot, y: Slot, weight: Packed, bias: torch.Tensor | None, residual: Slot | None, alpha: float, axis: str
) -> Few | None:
    """y = W x + bias, or residual + alpha * that, for a few rows of `axis`; None if these kernels do not read it."""
    return _one(site, x, y, (weight,), () if bias is None else (bias,), residual, alpha, axis, "none", None)


def gate_up(
    site: Site, x: Slot, y: Slot, gate: Packed, up: Packed, biases: Sequence[torch.Tensor], activation: str, axis: str,
    fill: Fill | None,
) -> Few | None:  # fmt: skip
    """y = activation(gate x) * up x; both matrices have one format and shape, biases are two or none."""
    return _one(site, x, y, (gate, up), biases, None, 1.0, axis, activation, fill)


def _arranged(
    site: Site, x: Slot, k: int, axis: str, widths: Iterable[int], fill: Fill | None
) -> tuple[Slot, Callable[[Live, int], None]]:  # fmt: skip
    """Scratch for x as the kernels read it, and what fills it for a width of rows."""
    to = site.scratch("one", max(widths, default=0) * k, torch.float16)

    def prepare(live: Live, width: int) -> None:
        if fill is not None:
            fill(to, live, width)
        else:
            grid = (k // STEP, width // GROUP)
            site.launch(arrange, grid, to.tensor, x.tensor, live.count(axis), K=k, early=starts_early(site))

    return to, prepare


def _one(
    site: Site, x: Slot, y: Slot, weights: Sequence[Packed], biases: Sequence[torch.Tensor], residual: Slot | None,
    alpha: float, axis: str, kind: str, fill: Fill | None,
) -> Few | None:  # fmt: skip
    if not takes(site, weights):
        return None
    a, b, gated = weights[0], weights[-1], len(weights) == 2
    by_width = deals(site, "gated" if gated else "one", weights)
    arranged, prepare = _arranged(site, x, a.k, axis, by_width, fill)

    def run(live: Live) -> None:
        count, none = live.count(axis), y.tensor
        width, how = next((w, d) for w, d in by_width.items() if count <= w)
        prepare(live, width)
        site.launch(
            rows_one, (cdiv(a.n, how.rows),), y.tensor, arranged.tensor, *a.planes, *b.planes,
            biases[0] if biases else none, biases[-1] if biases else none, none if residual is None else residual.tensor,
            count, alpha, a.n, K=a.k, FORMAT=a.format, BIAS=bool(biases), ADD=residual is not None, GATED=gated, KIND=kind,
            W=how.turns, M=how.tall, BM=how.rows, BT=width, DEEP=how.deep, warps=how.warps, stages=1,
            early=starts_early(site),
        )  # fmt: skip

    return Few(run, max(by_width, default=0), fill is not None)


def linears(
    site: Site, x: Slot, ys: Sequence[Slot], weights: Sequence[Packed], biases: Sequence[torch.Tensor], axis: str,
    fill: Fill | None,
) -> Few | None:  # fmt: skip
    """Three maps of one x in one launch; their formats may differ. Biases are three or none."""
    if not takes(site, weights):
        return None
    ns, k = [w.n for w in weights], weights[0].k
    planes = [p for w in weights for p in w.planes]
    by_width = deals(site, "three", weights)
    arranged, prepare = _arranged(site, x, k, axis, by_width, fill)

    def run(live: Live) -> None:
        count, outs = live.count(axis), [y.tensor for y in ys]
        width, how = next((w, d) for w, d in by_width.items() if count <= w)
        prepare(live, width)
        site.launch(
            rows_three, (sum(cdiv(n, how.rows) for n in ns),), *outs, arranged.tensor, *planes, *(biases or outs), count,
            *ns, K=k, FORMAT0=weights[0].format, FORMAT1=weights[1].format, FORMAT2=weights[2].format, BIAS=bool(biases),
            W=how.turns, M=how.tall, BM=how.rows, BT=width, DEEP=how.deep, warps=how.warps, stages=1,
            early=starts_early(site),
        )  # fmt: skip

    return Few(run, max(by_width, default=0), fill is not None)
