"""Routers: the logits of experts, and the choice from them (`choose.py`), of one token a row.

A step of one row takes both in one launch, in which the program that is last to finish a logit chooses, or leaves the
choice to the experts' kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from quarrel.ops.moe import ROUTE, RouteSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.triton_backend.experts.choose import Choice, Chooses, Left, Shape, choose
from quarrel.triton_backend.formats.int8x2 import store_int8x2
from quarrel.triton_backend.runtime.arrays import Slot
from quarrel.triton_backend.runtime.launch import cdiv, power_of_two
from quarrel.triton_backend.runtime.site import Batch, Launch, Site, dims, starts_early

ROUTED = 128
"""Rows up to which logits have a kernel of their own: a tile of `linear.py` is one program for all experts, which took 13
to 21 us on an H200 for 1 to 8 rows of 1536 to 4096 columns."""
_GATE_ROWS, _GATE_COLUMNS = 2, 1024
_ALL_COLUMNS, _ALL_WARPS = 4096, 8
"""Of one row's logits alone, which no warp chooses from: a layer of gpt-oss is 0.6 us shorter than with 1024 in four."""
_NORM_BLOCKS: tl.constexpr = tl.constexpr(16)
_MANY_TOKENS, _MANY_COLUMNS = 4, 512
_SMALL_LOGITS, _SMALL_COLUMNS, _SMALL_WARPS = 2048, 4096, 8
"""Of several rows: up to so many logits, an expert and all of its columns to a program of so many warps. Steps of cut
models on an H200 (2026-11-27): Mixtral x8 991 us for 1,002, x32 1,285 for 1,291; gpt-oss 742 for 748 and 978 for 984;
Granite-4-h-tiny x32 772 for 781. With the 4096 logits of Nemotron x32 nothing is gained."""


@triton.jit(do_not_specialize=["tokens"])
def route_rows(
    choice, real_tokens, logits, bias, gains, tokens, scale, S: tl.constexpr, PADDED: tl.constexpr, G: tl.constexpr,
    E: tl.constexpr, R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The experts of each token; a program takes R tokens.

    real_tokens  int32 `[1]`, tokens that do not pad a batch, read with PADDED: the others are not counted
    logits       float32 `[tokens, S.EXPERTS]`
    bias, gains  float32 `[S.EXPERTS]`, read with S.BIAS and S.GAINS
    scale        of all weights
    G, E         S.GROUPS and S.EXPERTS, padded to powers of two
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)[:, None]
    expert = tl.arange(0, E)[None, :]
    ok = (row < tokens) & (expert < S.EXPERTS)
    z = tl.load(logits + row * S.EXPERTS + expert, mask=ok, other=0.0).to(tl.float64)
    real = tl.load(real_tokens) if PADDED else tokens
    choose(choice, row, z, bias, gains, tokens, real, scale, S, G, E, False)


class Normed(NamedTuple):
    """The norm of a row, and where it is stored."""

    to: Any  # int32 [words(K)], int8x2
    plain: Any  # act [K]
    gain: Any  # float32 [K]
    eps: Any


class Rate(NamedTuple):
    """One more logit of a token, which nobody chooses by: the gate of a shared expert."""

    gate: Any  # float32 [K]
    to: Any  # float32 [1]


@triton.jit
def _normed_part(normed, x, first, K: tl.constexpr, W: tl.constexpr, ROUNDS: tl.constexpr, PDL: tl.constexpr):
    """Some blocks of the norm of x; as int8x2, too, if ROUNDS."""
    block = first + tl.arange(0, _NORM_BLOCKS)
    ok = block < K // 32
    at = block[:, None, None] * 32 + tl.arange(0, 2)[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    weight = tl.load(normed.gain + at, mask=ok[:, None, None], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    v = tl.load(x + at, mask=ok[:, None, None], other=0.0).to(tl.float32)
    column = tl.arange(0, W)
    square = tl.zeros([W], tl.float32)
    for start in tl.static_range(0, K, W):
        u = tl.load(x + start + column, mask=start + column < K, other=0.0).to(tl.float32)
        square += u * u
    v = v * (1.0 / tl.sqrt(tl.sum(square, 0) / K + normed.eps)) * weight
    tl.store(normed.plain + at, v.to(normed.plain.dtype.element_ty), mask=ok[:, None, None])
    if ROUNDS:
        store_int8x2(normed.to, v, block, ok, K)


@triton.jit
def _gate_tile(p_gate, normed, column, K: tl.constexpr, NORM: tl.constexpr):
    """Some columns of a logit's row, with NORM times the norm's gain."""
    tile = tl.load(p_gate + column, mask=column < K, other=0.0)
    if NORM:
        tile *= tl.load(normed.gain + column, mask=column < K, other=0.0)
    return tile


@triton.jit
def route_one(
    choice, logits, arrived, x, gate, gate_bias, bias, gains, scale, normed, rate, S: tl.constexpr, K: tl.constexpr,
    GATE_BIAS: tl.constexpr, G: tl.constexpr, E: tl.constexpr, W: tl.constexpr, NORM: tl.constexpr, ROUNDS: tl.constexpr,
    RATED: tl.constexpr, CHOOSES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Logits and experts of one token; a program computes a logit, and the last one to finish chooses, if CHOOSES.

    logits     float32 `[S.EXPERTS]`
    arrived    int32 `[1]`, programs that are done; zero before and after
    x          act or float32 `[K]`; gate: float32 `[S.EXPERTS, K]`; gate_bias: float32 `[S.EXPERTS]`, read with GATE_BIAS
    bias, gains, scale, G, E  as `route_rows`'s
    normed     with NORM: x is not normed, and what other kernels read of its norm is made beside the logits, 16 blocks of
               32 columns in each of the programs that follow theirs; `to` is written with ROUNDS
    rate       with RATED: the program behind the logits' computes this one, and takes no part in the choice
    W          columns at a time
    """
    mine = tl.program_id(0)
    column = tl.arange(0, W)
    if NORM and mine >= S.EXPERTS + RATED:
        _normed_part(normed, x, (mine - S.EXPERTS - RATED) * _NORM_BLOCKS, K, W, ROUNDS, PDL)
        return
    p_gate = gate + mine * K
    if RATED and mine == S.EXPERTS:
        p_gate = rate.gate
    # More of them do not fit the registers of a warp.
    MOST: tl.constexpr = K if K < 4 * W else 4 * W
    tiles = ()
    for start in tl.static_range(0, MOST, W):
        tiles += (_gate_tile(p_gate, normed, start + column, K, NORM),)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([W], tl.float32)
    square = acc
    for start in tl.static_range(0, K, W):
        v = tl.load(x + start + column, mask=start + column < K, other=0.0).to(tl.float32)
        if start < MOST:
            acc += tiles[start // W] * v
        else:
            acc += _gate_tile(p_gate, normed, start + column, K, NORM) * v
        if NORM:
            square += v * v
    total = tl.sum(acc, 0)
    if NORM:
        total *= 1.0 / tl.sqrt(tl.sum(square, 0) / K + normed.eps)
    if RATED and mine == S.EXPERTS:
        tl.store(rate.to, total)
        return
    if GATE_BIAS:
        total += tl.load(gate_bias + mine)
    tl.store(logits + mine, total)
    before = -1
    if CHOOSES:
        tl.debug_barrier()
        before = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu")
    if before == S.EXPERTS - 1:
        tl.store(arrived, 0)
        expert = tl.arange(0, E)[None, :]
        z = tl.load(logits + expert, mask=expert < S.EXPERTS, other=0.0, cache_modifier=".cg").to(tl.float64)
        row = tl.zeros([1, 1], tl.int64)
        choose(choice, row, z, bias, gains, 1, 1, scale, S, G, E, False)


@triton.jit(do_not_specialize=["tokens"])
def gate_rows(
    logits, x, gate, gate_bias, tokens, EXPERTS: tl.constexpr, K: tl.constexpr, GATE_BIAS: tl.constexpr, R: tl.constexpr,
    T: tl.constexpr, W: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Logits of R experts for T tokens; grid (EXPERTS / R, tokens / T).

    logits  float32 `[tokens, EXPERTS]`
    x       act `[tokens, K]`; gate: float32 `[EXPERTS, K]`; gate_bias: float32 `[EXPERTS]`, read with GATE_BIAS
    """
    r = tl.program_id(0) * R + tl.arange(0, R)
    token = tl.program_id(1) * T + tl.arange(0, T)
    column = tl.arange(0, W)
    p_gate = gate + tl.minimum(r, EXPERTS - 1)[:, None] * K + column[None, :]
    p_x = x + tl.minimum(token, tokens - 1).to(tl.int64)[:, None] * K + column[None, :]
    acc = tl.zeros([T, R, W], tl.float32)
    tile = tl.load(p_gate, mask=(column < K)[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # Unrolled, so that all loads are on their way at once.
    for start in tl.static_range(0, K, W):
        inside = (start + column < K)[None, :]
        rows = tl.load(p_x + start, mask=inside, other=0.0).to(tl.float32)
        if start > 0:
            tile = tl.load(p_gate + start, mask=inside, other=0.0)
        acc += rows[:, None, :] * tile[None, :, :]
    z = tl.sum(acc, 2)
    if GATE_BIAS:
        z += tl.load(gate_bias + r, mask=r < EXPERTS, other=0.0)[None, :]
    at = token.to(tl.int64)[:, None] * EXPERTS + r[None, :]
    tl.store(logits + at, z, mask=(token < tokens)[:, None] & (r < EXPERTS)[None, :])


class More(NamedTuple):
    """Where a choice goes to which experts are added that every token has."""

    ids: Slot
    weights: Slot
    count: int


def build_router(
    site: Site,
    linear: Node,
    route: Node,
    norm: tuple[Node, Launch] | None = None,
    chooses: bool = True,
    more: More | None = None,
    rate: tuple[Node, Slot] | None = None,
) -> Launch:
    """LINEAR with a float32 matrix, then ROUTE: logits, ids and weights, of one token in one launch, of more in two.

    With the NORM before them, and its launch for more tokens than one. Unless it `chooses`, one token's logits alone.
    `more`: see `build_route`; then there are several tokens. `rate`: a LINEAR of the same x with one float32 row, and
    where one token's goes, in the same launch.
    """
    spec: RouteSpec = route.spec
    x, gate, *gate_bias = linear.inputs
    rows, matrix = site.slot(x), site.weight(gate)  # type: ignore[arg-type]
    shift = site.vector(gate_bias[0]) if gate_bias else None  # type: ignore[arg-type]
    bias, gains = _vectors(site, route)
    logits = site.slot(linear.outputs[0])
    ids, weights = (site.slot(v) for v in route.outputs)
    counts, arrived = site.counter(route.path, spec.n_experts), site.zeros("one", 1)

    choose = build_route(site, route, more)
    eps = 0.0 if norm is None else norm[0].spec.eps
    source = rows if norm is None else site.slot(norm[0].inputs[0])  # type: ignore[arg-type]
    gain = None if norm is None else site.vector(norm[0].inputs[1])  # type: ignore[arg-type]
    to = None if norm is None else site.int8x2(x)  # type: ignore[arg-type]
    parts = 0 if norm is None else cdiv(matrix.k // 32, _NORM_BLOCKS.value)
    beside = None if rate is None else site.weight(rate[0].inputs[1]).planes[0]  # type: ignore[arg-type]
    shared: dict[str, Any] = {"gate": matrix.planes[0], "K": matrix.k, "GATE_BIAS": shift is not None}

    def matmul(batch: Batch) -> None:
        if norm is not None:
            norm[1](batch)
        small = batch.T * spec.n_experts <= _SMALL_LOGITS
        each, columns, warps = (1, _SMALL_COLUMNS, _SMALL_WARPS) if small else (_GATE_ROWS, _MANY_COLUMNS, 4)
        grid = (cdiv(spec.n_experts, each), cdiv(batch.T, _MANY_TOKENS))
        site.launch(
            gate_rows, grid, logits=logits.tensor, x=rows.tensor, gate_bias=logits.tensor if shift is None else shift,
            tokens=batch.T, EXPERTS=spec.n_experts, R=each, T=_MANY_TOKENS, W=min(columns, power_of_two(matrix.k)),
            warps=warps, early=starts_early(site), **shared,
        )  # fmt: skip
        choose(batch)

    warps = (4 if spec.n_experts <= 32 else 1) if chooses else _ALL_WARPS

    def matvec(batch: Batch) -> None:
        unread = logits.tensor
        one_more = Rate(unread if beside is None else beside, unread if rate is None else rate[1].tensor)
        site.launch(
            route_one, (spec.n_experts + (rate is not None) + parts,),
            choice=Choice(ids.tensor, weights.tensor, counts), logits=logits.tensor,
            normed=Normed(unread if to is None else to, rows.tensor, unread if gain is None else gain, eps), NORM=parts > 0,
            rate=one_more, RATED=rate is not None, ROUNDS=to is not None, CHOOSES=chooses, arrived=arrived.tensor,
            x=source.tensor, gate_bias=unread if shift is None else shift, bias=unread if bias is None else bias,
            gains=unread if gains is None else gains, scale=spec.scale,
            W=min(_GATE_COLUMNS if chooses else _ALL_COLUMNS, power_of_two(matrix.k)), warps=warps,
            early=starts_early(site), **shared, **_constants(spec),
        )  # fmt: skip

    return lambda batch: (matvec if batch.T == 1 else matmul)(batch)


def may_leave(spec: RouteSpec) -> bool:
    """Whether each expert's logit and bias alone say its place, so that `best_experts` finds it: a softmax with a bias
    would be summed in each kernel's own order. `best_experts` takes two parts of 128 scores, with a bias one."""
    if spec.bias:
        return spec.gate == "sigmoid" and spec.n_groups == 1 and spec.n_experts <= 128
    return spec.n_groups == 1 and spec.n_experts <= 256


def left_to_experts(site: Site, linear: Node, route: Node) -> Chooses:
    """What a router leaves to the experts' kernels."""
    spec: RouteSpec = route.spec
    logits = site.slot(linear.outputs[0])
    ids, weights = (site.slot(v) for v in route.outputs)
    counts, (bias, gains) = site.counter(route.path, spec.n_experts), _vectors(site, route)

    def left() -> Left:
        unread = logits.tensor
        choice, given = Choice(ids.tensor, weights.tensor, counts), (unread if v is None else v for v in (bias, gains))
        return Left(logits.tensor, choice, *given, spec.scale)

    return left, _constants(spec)


def _constants(spec: RouteSpec, more: int = 0) -> dict[str, Any]:
    """What a choice is compiled for."""
    choice = (spec.n_experts, spec.used, spec.gate, spec.renormalise)
    shape = Shape(*choice, spec.bias, spec.n_groups, spec.groups_used, spec.gains, more)
    sizes = (("G", spec.n_groups), ("E", spec.n_experts))
    return {"S": shape} | {name: power_of_two(size) for name, size in sizes}


def _vectors(site: Site, route: Node) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The bias and the gains of a ROUTE, as far as there are."""
    spec, (_, *refs) = route.spec, route.inputs
    bias = site.vector(refs[0]) if spec.bias else None  # type: ignore[arg-type]
    return bias, site.vector(refs[-1]) if spec.gains else None  # type: ignore[arg-type]


def takes_router(spec: RouteSpec) -> bool:
    """Whether `build_router` does it."""
    return _accepts(spec) is None


def build_route(site: Site, node: Node, more: More | None = None) -> Launch:
    """ROUTE: logits `[T, n_experts]` float32 to ids int32 and weights float32, `[T, used]`, or with `more` to those."""
    spec: RouteSpec = node.spec
    source = site.slot(node.inputs[0])  # type: ignore[arg-type]
    ids, weights = (site.slot(v) for v in node.outputs) if more is None else (more.ids, more.weights)
    bias, gains = _vectors(site, node)
    axis, _ = dims(node.outputs[0])
    counts, real = site.counter(node.path, spec.n_experts), site.tables.tokens

    def run(batch: Batch) -> None:
        count = batch.count(axis)
        site.launch(
            route_rows, (count,), choice=Choice(ids.tensor, weights.tensor, counts),
            real_tokens=counts if real is None else real.tensor, logits=source.tensor,
            bias=source.tensor if bias is None else bias, gains=source.tensor if gains is None else gains, tokens=count,
            scale=spec.scale, PADDED=real is not None, R=1, warps=1, early=starts_early(site),
            **_constants(spec, 0 if more is None else more.count),
        )  # fmt: skip

    return run


def _accepts(spec: RouteSpec) -> str | None:
    if spec.gate not in ("softmax", "softmax_topk", "sigmoid"):
        return f"needs a softmax, softmax_topk or sigmoid gate, got {spec.gate}"
    left = spec.n_experts // spec.n_groups * spec.groups_used if spec.n_groups > 1 else spec.n_experts
    return None if spec.used <= left else f"needs at least {spec.used} experts to choose from, got {left}"


IMPLEMENTATIONS = (Implementation(ROUTE, "rows", build_route, _accepts),)
