"""The chosen experts of one token: matvecs that read only their rows, in two launches.

Up: a program owns R rows of one chosen expert's gate and up matrices and applies the activation. Down: a program owns R
outputs and walks the chosen experts one after the other, so that their weighted sum has one order and no second launch.
Which rows these are is known only when the router is done: up loads nothing before its wait, and lets down start only then,
which so can have its first tile on the way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from quarrel.ops.contract import Value
from quarrel.ops.moe import EXPERT_DOWN, EXPERT_UP, ExpertDownSpec, ExpertUpSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.triton_backend import experts
from quarrel.triton_backend.dots import FLOATS, WORDS, load_tile, tile_products
from quarrel.triton_backend.elementwise import activate
from quarrel.triton_backend.few_tiles import narrow_tile_for
from quarrel.triton_backend.halved import halve_rows, store_halved, words
from quarrel.triton_backend.matvec import wide
from quarrel.triton_backend.runtime import INTERPRETED, Launch, Live, Site, Slot, cdiv, starts_early

_HALVE_BLOCKS = 16


@triton.jit
def _plane_rows(FORMAT: tl.constexpr, codes, bits, scale, top, row, K: tl.constexpr):
    """The planes from this row (int64) on."""
    FLOAT: tl.constexpr = FORMAT == "F16" or FORMAT == "BF16"
    KW: tl.constexpr = K if FLOAT else (K // 4 if FORMAT == "Q8_0" else K // 8)
    return codes + row * KW, bits + row * (K // 32), scale + row * (K // 32), top + row * (K // 256)


@triton.jit
def up_of_experts(
    y, to, arrived, x, ids, gc, gb, gs, gt, uc, ub, us, ut, g_bias, u_bias, N,
    K: tl.constexpr, F: tl.constexpr, FORMAT: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr,
    R: tl.constexpr, W: tl.constexpr, FIXED: tl.constexpr, HALVED: tl.constexpr, PDL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles, chosen experts); y [chosen, N]. FIXED: all experts in order, whatever `ids` says. HALVED: whichever
    program of 32 rows comes to its end last, by an integer counter, halves them into `to`; needs whole blocks of whole
    programs, 32 % R == N % 32 == 0. F is N, or 32."""
    FLOAT: tl.constexpr = FORMAT == "F16" or FORMAT == "BF16"
    KW: tl.constexpr = K if FLOAT else (K // 4 if FORMAT == "Q8_0" else K // 8)
    C: tl.constexpr = W if FLOAT else W // 4
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
    uc, ub, us, ut = _plane_rows(FORMAT, uc, ub, us, ut, stacked, K)
    TILES: tl.constexpr = (KW + W - 1) // W
    up = tl.zeros([R, C], tl.float32)
    qu, hu, su, tu = load_tile(FORMAT, uc, ub, us, ut, n, first, N, 0, K, R, W, ASM)
    if GATED:
        gc, gb, gs, gt = _plane_rows(FORMAT, gc, gb, gs, gt, stacked, K)
        gate = tl.zeros([R, C], tl.float32)
        qg, hg, sg, tg = load_tile(FORMAT, gc, gb, gs, gt, n, first, N, 0, K, R, W, ASM)
    if FIXED and PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if GATED:
        for start in tl.range(0, (TILES - 1) * W, W, num_stages=1):
            qg1, hg1, sg1, tg1 = load_tile(FORMAT, gc, gb, gs, gt, n, first, N, start + W, K, R, W, ASM)
            qu1, hu1, su1, tu1 = load_tile(FORMAT, uc, ub, us, ut, n, first, N, start + W, K, R, W, ASM)
            gate += tile_products(FORMAT, qg, hg, sg, tg, x, start, K, R, W, ASM)
            up += tile_products(FORMAT, qu, hu, su, tu, x, start, K, R, W, ASM)
            qg, hg, sg, tg = qg1, hg1, sg1, tg1
            qu, hu, su, tu = qu1, hu1, su1, tu1
        gate += tile_products(FORMAT, qg, hg, sg, tg, x, (TILES - 1) * W, K, R, W, ASM)
    else:
        for start in tl.range(0, (TILES - 1) * W, W, num_stages=1):
            qu1, hu1, su1, tu1 = load_tile(FORMAT, uc, ub, us, ut, n, first, N, start + W, K, R, W, ASM)
            up += tile_products(FORMAT, qu, hu, su, tu, x, start, K, R, W, ASM)
            qu, hu, su, tu = qu1, hu1, su1, tu1
    up += tile_products(FORMAT, qu, hu, su, tu, x, (TILES - 1) * W, K, R, W, ASM)
    u = tl.sum(up, 1)
    r = first + tl.arange(0, R)
    ok = r < N
    if BIAS:
        u += tl.load(u_bias + stacked + r, mask=ok, other=0.0)
    if GATED:
        g = tl.sum(gate, 1)
        if BIAS:
            g += tl.load(g_bias + stacked + r, mask=ok, other=0.0)
        if KIND == "oai":
            g = tl.minimum(g, 7.0)
            v = g / (1.0 + tl.exp(-1.702 * g)) * (tl.minimum(tl.maximum(u, -7.0), 7.0) + 1.0)
        else:
            v = activate(g, KIND) * u
    else:
        v = activate(u, KIND)
    p_y = y + tl.program_id(1).to(tl.int64) * N
    tl.store(p_y + r, v.to(y.dtype.element_ty), mask=ok)
    if HALVED:
        tl.debug_barrier()
        p_arrived = arrived + tl.program_id(1) * (N // 32) + first // 32
        before = tl.atomic_add(p_arrived, 1, sem="acq_rel", scope="gpu")
        if before == 32 // R - 1:
            tl.store(p_arrived, 0)
            block = first // 32 + tl.arange(0, 1)
            column = block[:, None, None] * 32 + tl.arange(0, 2)[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
            h = tl.load(p_y + column, cache_modifier=".cg").to(tl.float32)
            store_halved(to + tl.program_id(1).to(tl.int64) * (F // 2 + F // 32 * 3), h, block, block >= 0, F)


@triton.jit
def down_of_experts(
    out, x, ids, shares, codes, bits, scale, top, bias, residual, alpha, N, X_STRIDE: tl.constexpr,
    K: tl.constexpr, USED: tl.constexpr, FORMAT: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, R: tl.constexpr,
    W: tl.constexpr, PDL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """out [N] float32: the sum over chosen experts of share * (W x + bias), x [USED, ..] with X_STRIDE values a row; with
    ADD, residual + alpha * that."""
    FLOAT: tl.constexpr = FORMAT == "F16" or FORMAT == "BF16"
    KW: tl.constexpr = K if FLOAT else (K // 4 if FORMAT == "Q8_0" else K // 8)
    C: tl.constexpr = W if FLOAT else W // 4
    TILES: tl.constexpr = (KW + W - 1) // W
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.program_id(0) * R
    n = tl.minimum(first + tl.arange(0, R), N - 1).to(tl.int64)
    acc = tl.zeros([R, C], tl.float32)
    c0, b0, s0, t0 = _plane_rows(FORMAT, codes, bits, scale, top, tl.load(ids).to(tl.int64) * N, K)
    q, u, s, t = load_tile(FORMAT, c0, b0, s0, t0, n, first, N, 0, K, R, W, ASM)
    if PDL:
        tl.extra.cuda.gdc_wait()
    # Experts and their tiles in one loop, so that the next expert's first tile is on its way too.
    for i in tl.range(0, USED * TILES, num_stages=1):
        following = tl.minimum(i + 1, USED * TILES - 1)
        expert = tl.load(ids + following // TILES).to(tl.int64)
        c1, b1, s1, t1 = _plane_rows(FORMAT, codes, bits, scale, top, expert * N, K)
        q1, u1, s1, t1 = load_tile(FORMAT, c1, b1, s1, t1, n, first, N, following % TILES * W, K, R, W, ASM)
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
    name = spec.type.name
    here = site.compute != "float32" and not site.deterministic
    return here and (name in FLOATS or (name in WORDS and spec.k % 32 == 0))


def _halved(site: Site, value: Value, rows: int, k: int, format: str) -> tuple[Slot | torch.Tensor, Launch | None]:
    """What a matvec of this format reads of a value `[1, .., k]` of so many rows, and the launch that makes it, if any."""
    source = site.slot(value)
    if format in FLOATS:
        return source, None
    made = site.halved(value)
    if made is not None:
        return made, None
    to = site.scratch("one", rows * words(k), torch.int32)

    def halve(live: Live) -> None:
        _halve(site, to.tensor, source.tensor, rows, k)

    return to, halve


def _halve(site: Site, to: torch.Tensor, source: torch.Tensor, rows: int, k: int) -> None:
    grid = (rows, cdiv(k // 32, _HALVE_BLOCKS))
    site.launch(halve_rows, grid, to, source, K=k, B=_HALVE_BLOCKS, early=starts_early(site))


def _tensor(x: Slot | torch.Tensor) -> torch.Tensor:
    return x.tensor if isinstance(x, Slot) else x


def build_expert_up(site: Site, node: Node) -> Launch:
    """EXPERT_UP: x `[T, k]`, ids `[T, used]`, stacks of matrices, to y `[T, used, n]`."""
    many = experts.build_expert_up(site, node)
    stacks = [site.weight(r) for r in node.inputs[2 : 3 + node.spec.gated]]  # type: ignore[arg-type]
    if not (takes(site, node.spec) and experts.one_format(stacks)):
        return many
    return one_row(few_up(site, node, site.slot(node.inputs[1])), many)  # type: ignore[arg-type]


def few_up(site: Site, node: Node, ids: Slot | None) -> Launch:
    """EXPERT_UP of one token, whose experts stand in `ids`; without them it takes all."""
    spec: ExpertUpSpec = node.spec
    x_value, _, *refs = node.inputs
    count = 1 + spec.gated
    stacks = [site.weight(r) for r in refs[:count]]  # type: ignore[arg-type]
    biases = [site.vector(r) for r in refs[count:]]  # type: ignore[arg-type]
    planes = [wide(s.format, s.planes) for s in stacks]
    format = stacks[0].format
    x, halve = _halved(site, x_value, 1, spec.k, format)  # type: ignore[arg-type]
    target = node.outputs[0]
    y = site.slot(target)
    to, _ = site.to_halve(target)
    tile = narrow_tile_for(format, spec.n, spec.k)
    # A launch less a layer, for a counter that each program adds to.
    inside = to is not None and 32 % tile.rows == 0
    arrived = site.zeros("one", spec.used * (spec.n // 32)) if inside else y

    def few(live: Live) -> None:
        if halve is not None:
            halve(live)
        none = y.tensor
        site.launch(
            up_of_experts, (cdiv(spec.n, tile.rows), spec.used), y.tensor, to if inside else none, arrived.tensor,
            _tensor(x), none if ids is None else ids.tensor, *planes[0], *planes[-1], biases[0] if biases else none,
            biases[-1] if biases else none, spec.n, K=spec.k, F=spec.n if inside else 32, FORMAT=format, GATED=spec.gated,
            KIND=spec.activation, BIAS=spec.bias, R=tile.rows, W=tile.words, FIXED=ids is None, HALVED=inside,
            ASM=not INTERPRETED, warps=tile.warps, early=starts_early(site),
        )  # fmt: skip
        if to is not None and not inside:
            _halve(site, to, y.tensor, spec.used, spec.n)

    return few


def build_expert_down(site: Site, node: Node) -> Launch:
    """EXPERT_DOWN: y `[T, used, k]`, ids and weights `[T, used]`, a stack of matrices, to out `[T, n]` float32."""
    many = experts.build_expert_down(site, node)
    if not takes(site, node.spec):
        return many
    return one_row(few_down(site, node, node.outputs[0], None, 1.0), many)


def few_down(site: Site, node: Node, target: Value, residual: Value | None, alpha: float) -> Launch:
    """EXPERT_DOWN of one token into `target`, added to a residual stream if there is one."""
    spec: ExpertDownSpec = node.spec
    y, ids_value, shares_value, down, *rest = node.inputs
    stack = site.weight(down)  # type: ignore[arg-type]
    bias = site.vector(rest[0]) if spec.bias else None  # type: ignore[arg-type]
    planes = wide(stack.format, stack.planes)
    x, halve = _halved(site, y, spec.used, spec.k, stack.format)  # type: ignore[arg-type]
    ids, shares, out = site.slot(ids_value), site.slot(shares_value), site.slot(target)  # type: ignore[arg-type]
    added = None if residual is None else site.slot(residual)
    tile = narrow_tile_for(stack.format, spec.n, spec.k)
    stride = spec.k if stack.format in FLOATS else words(spec.k)

    def few(live: Live) -> None:
        if halve is not None:
            halve(live)
        site.launch(
            down_of_experts, (cdiv(spec.n, tile.rows),), out.tensor, _tensor(x), ids.tensor, shares.tensor, *planes,
            out.tensor if bias is None else bias, out.tensor if added is None else added.tensor, alpha, spec.n,
            X_STRIDE=stride, K=spec.k, USED=spec.used, FORMAT=stack.format, BIAS=spec.bias, ADD=added is not None,
            R=tile.rows, W=tile.words, ASM=not INTERPRETED, warps=tile.warps,
            early=starts_early(site),
        )  # fmt: skip

    return few


def one_row(few: Launch, many: Launch) -> Launch:
    """The first for a step of one row, the second for others."""

    def run(live: Live) -> None:
        (few if live.T == 1 else many)(live)

    return run


def _bodies(name: str) -> Sequence[Implementation]:
    return [i for i in experts.IMPLEMENTATIONS if i.op.name == name]


IMPLEMENTATIONS = (
    Implementation(EXPERT_UP, "matvecs of the chosen, or grouped tiles", build_expert_up, _bodies("expert_up")[0].accepts),
    Implementation(EXPERT_DOWN, "matvecs of the chosen, added in order, or grouped tiles", build_expert_down),
)
