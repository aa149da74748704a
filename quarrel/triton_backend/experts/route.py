"""Choosing experts: scores of one token a row, the best taken one after the other, the lower id among equals.

Scores are float64, as in the reference: a float32 sigmoid makes ties of experts that are not. A NaN score is the last
choice, so an id is always an expert's. A step of one row takes its logits and their choice in one launch: the program that
is last to finish a logit ranks all of them at once, each by how many are before it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from quarrel.ops.moe import ROUTE, SMALLEST_SUM, RouteSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.triton_backend.runtime.launch import cdiv, power_of_two
from quarrel.triton_backend.runtime.site import Batch, Launch, Site, dims, starts_early

_TILE = 512  # scores to a program
RANKED = 128
"""Experts that one program ranks: it compares every pair."""
ROUTED = 128
"""Rows up to which logits have a kernel of their own: a tile of `linear.py` is one program for all experts, which took 13
to 21 us on an H200 for 1 to 8 rows of 1536 to 4096 columns."""
_GATE_ROWS, _GATE_COLUMNS = 2, 1024
_MANY_TOKENS, _MANY_COLUMNS = 4, 512
_SMALLEST_SUM: tl.constexpr = tl.constexpr(SMALLEST_SUM)


@triton.jit
def _best(score, free, lane):
    """The highest score among free lanes and the first lane that has it; [R, 1] each."""
    best = tl.max(tl.where(free, score, float("-inf")), 1)[:, None]
    return best, tl.min(tl.where(free & (score == best), lane, 1 << 30), 1)[:, None]


@triton.jit
def _group_scores(score, expert_ok, expert, group, PER: tl.constexpr, GROUPS: tl.constexpr, G: tl.constexpr):
    """[R, G]: the sum of each group's two best scores."""
    found = tl.full([score.shape[0], G], float("-inf"), tl.float64)
    for g in tl.static_range(GROUPS):
        inside = expert_ok & (expert // PER == g)
        first, where = _best(score, inside, expert)
        both = first
        if PER > 1:
            second, _ = _best(score, inside & (expert != where), expert)
            both = first + second
        found = tl.where(group == g, both, found)
    return found


class Shape(NamedTuple):
    """Constants of a choice of experts."""

    EXPERTS: int
    USED: int
    GATE: str
    """"softmax", "softmax_topk" (of those that are chosen) or "sigmoid"."""
    RENORMALISE: bool
    """Weights are divided by their sum."""
    BIAS: bool
    """A bias is added to the scores that choose, not to the weights."""
    GROUPS: int
    """Of experts; the best GROUPS_USED of them, by their two best scores, have experts to choose from."""
    GROUPS_USED: int
    GAINS: bool
    """Each weight is multiplied with its expert's gain."""


class Choice(NamedTuple):
    """Where a choice is stored."""

    ids: Any  # int32 [tokens, USED]
    weights: Any  # float32 [tokens, USED]
    counts: Any  # int64 [EXPERTS], of every token so far


@triton.jit(do_not_specialize=["tokens"])
def route_rows(
    choice, real_tokens, logits, bias, gains, tokens, scale, S: tl.constexpr, PADDED: tl.constexpr, G: tl.constexpr,
    U: tl.constexpr, E: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """The experts of each token; a program takes R tokens.

    real_tokens  int32 `[1]`, tokens that do not pad a batch, read with PADDED: the others are not counted
    logits       float32 `[tokens, S.EXPERTS]`
    bias, gains  float32 `[S.EXPERTS]`, read with S.BIAS and S.GAINS
    scale        of all weights
    G, U, E      S.GROUPS, S.USED and S.EXPERTS, padded to powers of two
    """
    EXPERTS: tl.constexpr = S.EXPERTS
    USED: tl.constexpr = S.USED
    GROUPS: tl.constexpr = S.GROUPS
    GROUPS_USED: tl.constexpr = S.GROUPS_USED
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)[:, None]
    expert = tl.arange(0, E)[None, :]
    ok = (row < tokens) & (expert < EXPERTS)
    z = tl.load(logits + row * EXPERTS + expert, mask=ok, other=0.0).to(tl.float64)
    p = z
    if S.GATE == "sigmoid":
        p = 1.0 / (1.0 + tl.exp(-z))
    elif S.GATE == "softmax":
        e = tl.where(expert < EXPERTS, tl.exp(z - tl.max(tl.where(expert < EXPERTS, z, float("-inf")), 1)[:, None]), 0.0)
        p = e / tl.sum(e, 1)[:, None]
    score = p
    if S.BIAS:
        score += tl.load(bias + expert, mask=expert < EXPERTS, other=0.0)
    score = tl.where(score == score, score, -1e300)
    free = (expert < EXPERTS) & (row == row)  # [R, E]
    if GROUPS > 1:
        PER: tl.constexpr = EXPERTS // GROUPS
        group = tl.arange(0, G)[None, :]
        sums = _group_scores(score, free, expert, group, PER, GROUPS, G)
        open_groups = (group < GROUPS) & (row == row)
        allowed = (expert < 0) & (row == row)
        for _ in tl.static_range(GROUPS_USED):
            _, chosen = _best(sums, open_groups, group)
            allowed = allowed | (expert // PER == chosen)
            open_groups = open_groups & (group != chosen)
        free = free & allowed
    place = tl.arange(0, U)[None, :]
    chosen_ids = tl.zeros([R, U], tl.int32)
    chosen = tl.zeros([R, U], tl.float64)
    taken = tl.zeros([R, E], tl.int32)
    for j in tl.static_range(USED):
        _, where = _best(score, free, expert)
        value = tl.sum(tl.where(expert == where, p, 0.0), 1)[:, None]
        chosen_ids = tl.where(place == j, where, chosen_ids)
        chosen = tl.where(place == j, value, chosen)
        free = free & (expert != where)
        taken += (expert == where).to(tl.int32)
    used = place < USED
    if S.GATE == "softmax_topk":
        e = tl.where(used, tl.exp(chosen - tl.max(tl.where(used, chosen, float("-inf")), 1)[:, None]), 0.0)
        chosen = e / tl.sum(e, 1)[:, None]
    elif S.RENORMALISE:
        chosen = chosen / tl.maximum(tl.sum(tl.where(used, chosen, 0.0), 1)[:, None], _SMALLEST_SUM)
    at = row * USED + place
    keep = used & (row < tokens)
    if S.GAINS:
        chosen = chosen * tl.load(gains + chosen_ids, mask=used, other=0.0)
    tl.store(choice.ids + at, chosen_ids, mask=keep)
    tl.store(choice.weights + at, (chosen * scale).to(tl.float32), mask=keep)
    # Sums of whole numbers: their order changes nothing. Rows that pad a batch are nobody's.
    real = tl.load(real_tokens) if PADDED else tokens
    found = tl.sum(tl.where(row < real, taken, 0), 0)
    every = tl.arange(0, E)
    tl.atomic_add(choice.counts + every, found.to(tl.int64), mask=(every < EXPERTS) & (found > 0), sem="relaxed")


@triton.jit
def route_one(
    choice, logits, arrived, x, gate, gate_bias, bias, gains, scale, S: tl.constexpr, K: tl.constexpr,
    GATE_BIAS: tl.constexpr, E: tl.constexpr, R: tl.constexpr, W: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Logits and experts of one token; a program computes R logits, and the last one to finish chooses.

    logits     float32 `[S.EXPERTS]`
    arrived    int32 `[1]`, programs that are done; zero before and after
    x          act `[K]`; gate: float32 `[S.EXPERTS, K]`; gate_bias: float32 `[S.EXPERTS]`, read with GATE_BIAS
    bias, scale  as `route_rows`'s
    E          S.EXPERTS, padded; W: columns at a time
    """
    r = tl.program_id(0) * R + tl.arange(0, R)
    p_gate = gate + tl.minimum(r, S.EXPERTS - 1)[:, None] * K
    column = tl.arange(0, W)
    tile = tl.load(p_gate + column[None, :], mask=(column < K)[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([R, W], tl.float32)
    for start in tl.static_range(0, K, W):
        row = tl.load(x + start + column, mask=start + column < K, other=0.0).to(tl.float32)
        acc += tile * row[None, :]
        if start + W < K:
            ahead = start + W + column
            tile = tl.load(p_gate + ahead[None, :], mask=(ahead < K)[None, :], other=0.0)
    z = tl.sum(acc, 1)
    if GATE_BIAS:
        z += tl.load(gate_bias + r, mask=r < S.EXPERTS, other=0.0)
    tl.store(logits + r, z, mask=r < S.EXPERTS)
    tl.debug_barrier()
    before = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu")
    if before == tl.num_programs(0) - 1:
        tl.store(arrived, 0)
        expert = tl.arange(0, E)
        ok = expert < S.EXPERTS
        v = tl.load(logits + expert, mask=ok, other=0.0, cache_modifier=".cg").to(tl.float64)
        p = v
        if S.GATE == "sigmoid":
            p = 1.0 / (1.0 + tl.exp(-v))
        elif S.GATE == "softmax":
            e = tl.where(ok, tl.exp(v - tl.max(tl.where(ok, v, float("-inf")), 0)), 0.0)
            p = e / tl.sum(e, 0)
        score = p
        if S.BIAS:
            score += tl.load(bias + expert, mask=ok, other=0.0)
        score = tl.where(score == score, score, -1e300)
        score = tl.where(ok, score, float("-inf"))
        mine, other = score[:, None], score[None, :]
        better = (other > mine) | ((other == mine) & (expert[None, :] < expert[:, None]))
        rank = tl.sum(better.to(tl.int32), 1)
        chosen = ok & (rank < S.USED)
        if S.GATE == "softmax_topk":
            e = tl.where(chosen, tl.exp(p - tl.max(tl.where(chosen, p, float("-inf")), 0)), 0.0)
            p = e / tl.sum(e, 0)
        elif S.RENORMALISE:
            p = p / tl.maximum(tl.sum(tl.where(chosen, p, 0.0), 0), _SMALLEST_SUM)
        if S.GAINS:
            p = p * tl.load(gains + expert, mask=ok, other=0.0)
        tl.store(choice.ids + rank, expert, mask=chosen)
        tl.store(choice.weights + rank, (p * scale).to(tl.float32), mask=chosen)
        count = tl.load(choice.counts + expert, mask=chosen, other=0)
        tl.store(choice.counts + expert, count + 1, mask=chosen)


@triton.jit(do_not_specialize=["tokens"])
def gate_rows(
    logits, x, gate, gate_bias, tokens, EXPERTS: tl.constexpr, K: tl.constexpr, GATE_BIAS: tl.constexpr, R: tl.constexpr,
    T: tl.constexpr, W: tl.constexpr,
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
    for start in range(0, K, W):
        inside = (start + column < K)[None, :]
        rows = tl.load(p_x + start, mask=inside, other=0.0).to(tl.float32)
        tile = tl.load(p_gate + start, mask=inside, other=0.0)
        acc += rows[:, None, :] * tile[None, :, :]
    z = tl.sum(acc, 2)
    if GATE_BIAS:
        z += tl.load(gate_bias + r, mask=r < EXPERTS, other=0.0)[None, :]
    at = token.to(tl.int64)[:, None] * EXPERTS + r[None, :]
    tl.store(logits + at, z, mask=(token < tokens)[:, None] & (r < EXPERTS)[None, :])


def build_router(site: Site, linear: Node, route: Node) -> Launch:
    """LINEAR with a float32 matrix, then ROUTE: logits, ids and weights, of one token in one launch, of more in two."""
    spec: RouteSpec = route.spec
    x, gate, *gate_bias = linear.inputs
    rows, matrix = site.slot(x), site.weight(gate)  # type: ignore[arg-type]
    shift = site.vector(gate_bias[0]) if gate_bias else None  # type: ignore[arg-type]
    bias, gains = _vectors(site, route)
    logits = site.slot(linear.outputs[0])
    ids, weights = (site.slot(v) for v in route.outputs)
    counts, arrived = site.counter(route.path, spec.n_experts), site.zeros("one", 1)

    choose = build_route(site, route)
    shared: dict[str, Any] = {"gate": matrix.planes[0], "K": matrix.k, "R": _GATE_ROWS, "GATE_BIAS": shift is not None}

    def matmul(batch: Batch) -> None:
        grid = (cdiv(spec.n_experts, _GATE_ROWS), cdiv(batch.T, _MANY_TOKENS))
        site.launch(
            gate_rows, grid, logits=logits.tensor, x=rows.tensor, gate_bias=logits.tensor if shift is None else shift,
            tokens=batch.T, EXPERTS=spec.n_experts, T=_MANY_TOKENS, W=min(_MANY_COLUMNS, power_of_two(matrix.k)), **shared,
        )  # fmt: skip
        choose(batch)

    def matvec(batch: Batch) -> None:
        none = logits.tensor
        site.launch(
            route_one, (cdiv(spec.n_experts, _GATE_ROWS),), choice=Choice(ids.tensor, weights.tensor, counts),
            logits=logits.tensor, arrived=arrived.tensor, x=rows.tensor, gate_bias=none if shift is None else shift,
            bias=none if bias is None else bias, gains=none if gains is None else gains, scale=spec.scale, S=_shape(spec),
            E=power_of_two(spec.n_experts),
            W=min(_GATE_COLUMNS, power_of_two(matrix.k)), warps=8 if spec.n_experts > 64 else 4, early=starts_early(site),
            **shared,
        )  # fmt: skip

    return lambda batch: (matvec if batch.T == 1 else matmul)(batch)


def _shape(spec: RouteSpec) -> Shape:
    choice = (spec.n_experts, spec.used, spec.gate, spec.renormalise)
    return Shape(*choice, spec.bias, spec.n_groups, spec.groups_used, spec.gains)


def _vectors(site: Site, route: Node) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The bias and the gains of a ROUTE, as far as there are."""
    spec, (_, *refs) = route.spec, route.inputs
    bias = site.vector(refs[0]) if spec.bias else None  # type: ignore[arg-type]
    return bias, site.vector(refs[-1]) if spec.gains else None  # type: ignore[arg-type]


def takes_router(spec: RouteSpec) -> bool:
    """Whether `build_router` does it."""
    return _accepts(spec) is None and spec.n_experts <= RANKED and spec.n_groups == 1


def build_route(site: Site, node: Node) -> Launch:
    """ROUTE: logits `[T, n_experts]` float32 to ids int32 and weights float32, `[T, used]`."""
    spec: RouteSpec = node.spec
    source = site.slot(node.inputs[0])  # type: ignore[arg-type]
    ids, weights = (site.slot(v) for v in node.outputs)
    bias, gains = _vectors(site, node)
    axis, _ = dims(node.outputs[0])
    experts = power_of_two(spec.n_experts)
    rows = max(1, _TILE // experts)
    counts, real = site.counter(node.path, spec.n_experts), site.tables.tokens

    def run(batch: Batch) -> None:
        count = batch.count(axis)
        site.launch(
            route_rows, (cdiv(count, rows),), choice=Choice(ids.tensor, weights.tensor, counts),
            real_tokens=counts if real is None else real.tensor, logits=source.tensor,
            bias=source.tensor if bias is None else bias, gains=source.tensor if gains is None else gains, tokens=count,
            scale=spec.scale, S=_shape(spec), PADDED=real is not None, G=power_of_two(spec.n_groups),
            U=power_of_two(spec.used), E=experts, R=rows,
        )  # fmt: skip

    return run


def _accepts(spec: RouteSpec) -> str | None:
    if spec.gate not in ("softmax", "softmax_topk", "sigmoid"):
        return f"needs a softmax, softmax_topk or sigmoid gate, got {spec.gate}"
    left = spec.n_experts // spec.n_groups * spec.groups_used if spec.n_groups > 1 else spec.n_experts
    return None if spec.used <= left else f"needs at least {spec.used} experts to choose from, got {left}"


IMPLEMENTATIONS = (Implementation(ROUTE, "rows", build_route, _accepts),)
