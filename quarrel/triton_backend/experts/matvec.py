"""The chosen experts of one token: matvecs that read only their rows, in two launches.

Up: a program owns R rows of one chosen expert's gate and up matrices and applies the activation. Down: a program owns R
outputs and walks the chosen experts one after the other, so that their weighted sum has one order and no second launch.
Which rows these are is known only when the router is done: up loads nothing before its wait, and lets down start only then,
which so can have its first tile on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl

from quarrel.ops.contract import Value
from quarrel.ops.moe import EXPERT_DOWN, EXPERT_UP, ExpertDownSpec, ExpertUpSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.triton_backend.elementwise.activation import activate, oai
from quarrel.triton_backend.experts import experts
from quarrel.triton_backend.formats.dots import load_tile, tile_products
from quarrel.triton_backend.formats.int8x2 import int8x2_rows, store_int8x2, words
from quarrel.triton_backend.formats.table import FLOATS, entry_columns, has_matvec, matvec_planes, word_columns
from quarrel.triton_backend.linear.matvec_tiles import narrow_tile_for
from quarrel.triton_backend.runtime.arrays import Planes, Slot
from quarrel.triton_backend.runtime.launch import INTERPRETED, cdiv
from quarrel.triton_backend.runtime.site import Batch, Launch, Site, starts_early

_BLOCKS = 16


@triton.jit
def _planes_from(FORMAT: tl.constexpr, w, row, K: tl.constexpr):
    """The planes from this row (int64) on."""
    KE: tl.constexpr = K // entry_columns(FORMAT)
    top = w.top + row * (K // 256)
    return Planes(w.codes + row * KE, w.bits + row * (K // 32), w.scale + row * (K // 32), top)


@triton.jit
def up_of_experts(
    y, to, arrived, x, ids, w, up, bias, bias_up, N,
    K: tl.constexpr, F: tl.constexpr, FORMAT: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr,
    R: tl.constexpr, W: tl.constexpr, FIXED: tl.constexpr, INT8X2: tl.constexpr, PDL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles, chosen experts); y [chosen, N]. FIXED: all experts in order, whatever `ids` says. INT8X2: whichever
    program of 32 rows comes to its end last, by an integer counter, writes the int8x2 to `to`; needs whole blocks of whole
    programs, 32 % R == N % 32 == 0. F is N, or 32."""
    KW: tl.constexpr = K // word_columns(FORMAT)
    C: tl.constexpr = W if word_columns(FORMAT) == 1 else W // 4
    # Whoever comes next may start when all programs here know their experts, and so knows them too.
    first = tl.program_id(0) * R
    if FIXED:
        stacked = tl.program_id(1).to(tl.int64) * N
    else:
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        stacked = tl.load(ids + tl.program_id(1)).to(tl.int64) * N
    n = tl.minimum(first + tl.arange(0, R), N - 1).to(tl.int64)
    w_up = _planes_from(FORMAT, up, stacked, K)
    TILES: tl.constexpr = (KW + W - 1) // W
    u_acc = tl.zeros([R, C], tl.float32)
    qu, hu, su, tu = load_tile(FORMAT, w_up, n, first, N, 0, K, R, W, ASM)
    if GATED:
        w_gate = _planes_from(FORMAT, w, stacked, K)
        g_acc = tl.zeros([R, C], tl.float32)
        qg, hg, sg, tg = load_tile(FORMAT, w_gate, n, first, N, 0, K, R, W, ASM)
    if FIXED and PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if GATED:
        for start in tl.range(0, (TILES - 1) * W, W, num_stages=1):
            qg1, hg1, sg1, tg1 = load_tile(FORMAT, w_gate, n, first, N, start + W, K, R, W, ASM)
            qu1, hu1, su1, tu1 = load_tile(FORMAT, w_up, n, first, N, start + W, K, R, W, ASM)
            g_acc += tile_products(FORMAT, qg, hg, sg, tg, x, start, K, R, W, ASM)
            u_acc += tile_products(FORMAT, qu, hu, su, tu, x, start, K, R, W, ASM)
            qg, hg, sg, tg = qg1, hg1, sg1, tg1
            qu, hu, su, tu = qu1, hu1, su1, tu1
        g_acc += tile_products(FORMAT, qg, hg, sg, tg, x, (TILES - 1) * W, K, R, W, ASM)
    else:
        for start in tl.range(0, (TILES - 1) * W, W, num_stages=1):
            qu1, hu1, su1, tu1 = load_tile(FORMAT, w_up, n, first, N, start + W, K, R, W, ASM)
            u_acc += tile_products(FORMAT, qu, hu, su, tu, x, start, K, R, W, ASM)
            qu, hu, su, tu = qu1, hu1, su1, tu1
    u_acc += tile_products(FORMAT, qu, hu, su, tu, x, (TILES - 1) * W, K, R, W, ASM)
    u = tl.sum(u_acc, 1)
    r = first + tl.arange(0, R)
    ok = r < N
    if BIAS:
        u += tl.load(bias_up + stacked + r, mask=ok, other=0.0)
    if GATED:
        g = tl.sum(g_acc, 1)
        if BIAS:
            g += tl.load(bias + stacked + r, mask=ok, other=0.0)
        if KIND == "oai":
            v = oai(g, u)
        else:
            v = activate(g, KIND) * u
    else:
        v = activate(u, KIND)
    p_y = y + tl.program_id(1).to(tl.int64) * N
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
def down_of_experts(
    out, x, ids, shares, w, bias, residual, alpha, N, X_STRIDE: tl.constexpr,
    K: tl.constexpr, USED: tl.constexpr, FORMAT: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, R: tl.constexpr,
    W: tl.constexpr, PDL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """out [N] float32: the sum over chosen experts of share * (W x + bias), x [USED, ..] with X_STRIDE values a row; with
    ADD, residual + alpha * that."""
    KW: tl.constexpr = K // word_columns(FORMAT)
    C: tl.constexpr = W if word_columns(FORMAT) == 1 else W // 4
    TILES: tl.constexpr = (KW + W - 1) // W
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.program_id(0) * R
    n = tl.minimum(first + tl.arange(0, R), N - 1).to(tl.int64)
    acc = tl.zeros([R, C], tl.float32)
    w0 = _planes_from(FORMAT, w, tl.load(ids).to(tl.int64) * N, K)
    q, u, s, t = load_tile(FORMAT, w0, n, first, N, 0, K, R, W, ASM)
    if PDL:
        tl.extra.cuda.gdc_wait()
    # Experts and their tiles in one loop, so that the next expert's first tile is on its way too.
    for i in tl.range(0, USED * TILES, num_stages=1):
        following = tl.minimum(i + 1, USED * TILES - 1)
        expert = tl.load(ids + following // TILES).to(tl.int64)
        w1 = _planes_from(FORMAT, w, expert * N, K)
        q1, u1, s1, t1 = load_tile(FORMAT, w1, n, first, N, following % TILES * W, K, R, W, ASM)
        share = tl.load(shares + i // TILES)
        acc += share * tile_products(FORMAT, q, u, s, t, x + i // TILES * X_STRIDE, i % TILES * W, K, R, W, ASM)
        q, u, s, t = q1, u1, s1, t1
    total = tl.sum(acc, 1)
    r = first + tl.arange(0, R)
    if BIAS:
        for j in tl.static_range(USED):
            offset = tl.load(bias + tl.load(ids + j).to(tl.int64) * N + r, mask=r < N, other=0.0)
            total += tl.load(shares + j) * offset
    if ADD:
        total = tl.load(residual + r, mask=r < N, other=0.0) + alpha * total
    tl.store(out + r, total, mask=r < N)


def takes(site: Site, spec: ExpertUpSpec | ExpertDownSpec) -> bool:
    """Whether one token's experts have a matvec."""
    return site.compute != "float32" and not site.deterministic and has_matvec(spec.type, spec.k)


def _as_int8x2(site: Site, value: Value, rows: int, k: int, format: str) -> tuple[Slot | torch.Tensor, Launch | None]:
    """What a matvec of this format reads of a value `[1, .., k]` of so many rows, and the launch that makes it, if any."""
    source = site.slot(value)
    if format in FLOATS:
        return source, None
    made = site.int8x2(value)
    if made is not None:
        return made, None
    to = site.scratch("one", rows * words(k), torch.int32)

    def prepare(batch: Batch) -> None:
        _to_int8x2(site, to.tensor, source.tensor, rows, k)

    return to, prepare


def _to_int8x2(site: Site, to: torch.Tensor, source: torch.Tensor, rows: int, k: int) -> None:
    grid = (rows, cdiv(k // 32, _BLOCKS))
    site.launch(int8x2_rows, grid, to, source, K=k, B=_BLOCKS, early=starts_early(site))


def _tensor(x: Slot | torch.Tensor) -> torch.Tensor:
    return x.tensor if isinstance(x, Slot) else x


def build_expert_up(site: Site, node: Node) -> experts.ExpertLaunch:
    """EXPERT_UP: x `[T, k]`, ids `[T, used]`, stacks of matrices, to y `[T, used, n]`."""
    many = experts.build_expert_up(site, node)
    stacks = [site.weight(r) for r in node.inputs[2 : 3 + node.spec.gated]]  # type: ignore[arg-type]
    if not (takes(site, node.spec) and experts.one_format(stacks)):
        return many
    return replace(many, one_row=matvec_up(site, node, site.slot(node.inputs[1])))  # type: ignore[arg-type]


def matvec_up(site: Site, node: Node, ids: Slot | None) -> Launch:
    """EXPERT_UP of one token, whose experts stand in `ids`; without them it takes all."""
    spec: ExpertUpSpec = node.spec
    x_value, _, *refs = node.inputs
    count = 1 + spec.gated
    stacks = [site.weight(r) for r in refs[:count]]  # type: ignore[arg-type]
    biases = [site.vector(r) for r in refs[count:]]  # type: ignore[arg-type]
    planes = [matvec_planes(s) for s in stacks]
    format = stacks[0].format
    x, prepare = _as_int8x2(site, x_value, 1, spec.k, format)  # type: ignore[arg-type]
    target = node.outputs[0]
    y = site.slot(target)
    to, _ = site.int8x2_target(target)
    tile = narrow_tile_for(format, spec.n, spec.k)
    # A launch less a layer, for a counter that each program adds to.
    inside = to is not None and 32 % tile.rows == 0
    arrived = site.zeros("one", spec.used * (spec.n // 32)) if inside else y

    def matvec(batch: Batch) -> None:
        if prepare is not None:
            prepare(batch)
        none = y.tensor
        site.launch(
            up_of_experts, (cdiv(spec.n, tile.rows), spec.used), y.tensor, to if inside else none, arrived.tensor,
            _tensor(x), none if ids is None else ids.tensor, planes[0], planes[-1], biases[0] if biases else none,
            biases[-1] if biases else none, spec.n, K=spec.k, F=spec.n if inside else 32, FORMAT=format, GATED=spec.gated,
            KIND=spec.activation, BIAS=spec.bias, R=tile.rows, W=tile.words, FIXED=ids is None, INT8X2=inside,
            ASM=not INTERPRETED, warps=tile.warps, early=starts_early(site),
        )  # fmt: skip
        if to is not None and not inside:
            _to_int8x2(site, to, y.tensor, spec.used, spec.n)

    return matvec


def build_expert_down(site: Site, node: Node) -> experts.ExpertLaunch:
    """EXPERT_DOWN: y `[T, used, k]`, ids and weights `[T, used]`, a stack of matrices, to out `[T, n]` float32."""
    many = experts.build_expert_down(site, node)
    if not takes(site, node.spec):
        return many
    return replace(many, one_row=matvec_down(site, node, node.outputs[0], None, 1.0))


def matvec_down(site: Site, node: Node, target: Value, residual: Value | None, alpha: float) -> Launch:
    """EXPERT_DOWN of one token into `target`, added to a residual stream if there is one."""
    spec: ExpertDownSpec = node.spec
    y, ids_value, shares_value, down, *rest = node.inputs
    stack = site.weight(down)  # type: ignore[arg-type]
    bias = site.vector(rest[0]) if spec.bias else None  # type: ignore[arg-type]
    planes = matvec_planes(stack)
    x, prepare = _as_int8x2(site, y, spec.used, spec.k, stack.format)  # type: ignore[arg-type]
    ids, shares, out = site.slot(ids_value), site.slot(shares_value), site.slot(target)  # type: ignore[arg-type]
    added = None if residual is None else site.slot(residual)
    tile = narrow_tile_for(stack.format, spec.n, spec.k)
    stride = spec.k if stack.format in FLOATS else words(spec.k)

    def matvec(batch: Batch) -> None:
        if prepare is not None:
            prepare(batch)
        site.launch(
            down_of_experts, (cdiv(spec.n, tile.rows),), out.tensor, _tensor(x), ids.tensor, shares.tensor, planes,
            out.tensor if bias is None else bias, out.tensor if added is None else added.tensor, alpha, spec.n,
            X_STRIDE=stride, K=spec.k, USED=spec.used, FORMAT=stack.format, BIAS=spec.bias, ADD=added is not None,
            R=tile.rows, W=tile.words, ASM=not INTERPRETED, warps=tile.warps,
            early=starts_early(site),
        )  # fmt: skip

    return matvec


def _bodies(name: str) -> Sequence[Implementation]:
    return [i for i in experts.IMPLEMENTATIONS if i.op.name == name]


IMPLEMENTATIONS = (
    Implementation(EXPERT_UP, "matvecs of the chosen, or grouped tiles", build_expert_up, _bodies("expert_up")[0].accepts),
    Implementation(EXPERT_DOWN, "matvecs of the chosen, added in order, or grouped tiles", build_expert_down),
)
