"""Kernels that `one_row.py` tries and the backend does not have: gate and up whose last program of 32 rows halves them."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from quarrel.ops.linear import NormGateUpSpec
from quarrel.ops.program import Node
from quarrel.triton_backend import few
from quarrel.triton_backend.dots import load_tile, tile_products
from quarrel.triton_backend.elementwise import activate
from quarrel.triton_backend.halved import store_halved
from quarrel.triton_backend.runtime import INTERPRETED, Launch, Live, cdiv, starts_early


@triton.jit
def gate_up_halved(
    y, to, arrived, xa, gc, gb, gs, gt, uc, ub, us, ut, g_bias, u_bias, N,
    K: tl.constexpr, F: tl.constexpr, FORMAT: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr, R: tl.constexpr,
    W: tl.constexpr, PDL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """`matvec.gate_up` of integers, and the halved form of its rows in `to` [F]."""
    first = tl.program_id(0) * R
    KW: tl.constexpr = K // 4 if FORMAT == "Q8_0" else K // 8
    n = tl.minimum(first + tl.arange(0, R), N - 1).to(tl.int64)
    qg, ug, sg, tg = load_tile(FORMAT, gc, gb, gs, gt, n, first, N, 0, K, R, W, ASM)
    qu, uu, su, tu = load_tile(FORMAT, uc, ub, us, ut, n, first, N, 0, K, R, W, ASM)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    TILES: tl.constexpr = (KW + W - 1) // W
    gate = tl.zeros([R, W // 4], tl.float32)
    up = tl.zeros([R, W // 4], tl.float32)
    for start in tl.range(0, (TILES - 1) * W, W, num_stages=1):
        qg1, ug1, sg1, tg1 = load_tile(FORMAT, gc, gb, gs, gt, n, first, N, start + W, K, R, W, ASM)
        qu1, uu1, su1, tu1 = load_tile(FORMAT, uc, ub, us, ut, n, first, N, start + W, K, R, W, ASM)
        gate += tile_products(FORMAT, qg, ug, sg, tg, xa, start, K, R, W, ASM)
        up += tile_products(FORMAT, qu, uu, su, tu, xa, start, K, R, W, ASM)
        qg, ug, sg, tg = qg1, ug1, sg1, tg1
        qu, uu, su, tu = qu1, uu1, su1, tu1
    gate += tile_products(FORMAT, qg, ug, sg, tg, xa, (TILES - 1) * W, K, R, W, ASM)
    up += tile_products(FORMAT, qu, uu, su, tu, xa, (TILES - 1) * W, K, R, W, ASM)
    g, u = tl.sum(gate, 1), tl.sum(up, 1)
    r = first + tl.arange(0, R)
    if BIAS:
        g += tl.load(g_bias + r, mask=r < N, other=0.0)
        u += tl.load(u_bias + r, mask=r < N, other=0.0)
    tl.store(y + r, (activate(g, KIND) * u).to(y.dtype.element_ty), mask=r < N)
    tl.debug_barrier()
    p_arrived = arrived + first // 32
    before = tl.atomic_add(p_arrived, 1, sem="acq_rel", scope="gpu")
    if before == 32 // R - 1:
        tl.store(p_arrived, 0)
        block = first // 32 + tl.arange(0, 1)
        column = block[:, None, None] * 32 + tl.arange(0, 2)[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
        store_halved(to, tl.load(y + column, cache_modifier=".cg").to(tl.float32), block, block >= 0, F)


def gate_up_inside(site: Any, spec: NormGateUpSpec, node: Node, gate: Any, up: Any, y: Any) -> Launch:
    """`few._gate_up`, after which nothing is left to halve."""
    w = gate.weight
    tile = few.gate_tile_for(w.format, w.n, w.k)
    halved, _ = site.to_halve(node.outputs[0])
    assert halved is not None
    assert gate.bias is None
    assert 32 % tile.rows == 0
    arrived = site.zeros("one", w.n // 32)
    row, normed = few._normed(site, spec.norm, node.inputs, [w.format])

    def run(live: Live) -> None:
        normed(live)
        site.launch(
            gate_up_halved, (cdiv(w.n, tile.rows),), y.tensor, halved, arrived.tensor, row.of(w.format), *gate.planes,
            *up.planes, y.tensor, y.tensor, w.n, K=w.k, F=w.n, FORMAT=w.format, KIND=spec.activation, BIAS=False,
            R=tile.rows, W=tile.words, ASM=not INTERPRETED, warps=tile.warps, early=starts_early(site),
        )  # fmt: skip

    return run
