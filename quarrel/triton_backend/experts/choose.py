"""Choosing experts by a token's logits: the best taken one after the other, the lower id among equals.

Scores are float64, as in the reference: a float32 sigmoid makes ties of experts that are not. A NaN score is the last
choice, so an id is always an expert's. A choice is one warp's, or each warp's alike: its reductions need no shared memory.

A router chooses (`route.py`), or leaves one token's choice to the kernels of the experts, each of whose programs finds the
expert that it computes by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from quarrel.ops.moe import SMALLEST_SUM
from quarrel.triton_backend.runtime.launch import INTERPRETED

_SMALLEST_SUM: tl.constexpr = tl.constexpr(SMALLEST_SUM)
_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)
_LEFT_AT_ONCE: tl.constexpr = tl.constexpr(128)
"""Experts that a warp has with one load of 16 bytes in each lane: the largest of them takes one instruction, of fewer
lanes it takes several."""
_TAKEN: tl.constexpr = tl.constexpr(-0x80000000)
_LAST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)
"""The score of a NaN: the least float32."""


@triton.jit
def _sigmoid(z):
    return 1.0 / (1.0 + tl.exp(-z))


@triton.jit
def _integers(score):
    """The order of numbers as that of two int32: a warp finds the largest of those in one instruction."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int64, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFFFFFFFFFF, bits)
    return (bits >> 32).to(tl.int32), (bits ^ 0x80000000).to(tl.int32)


@triton.jit
def _best(high, low, free, lane):
    """The first free lane of the highest score, [R, 1], by `_integers`."""
    LEAST: tl.constexpr = -0x80000000
    found = free & (high == tl.max(tl.where(free, high, LEAST), 1)[:, None])
    found = found & (low == tl.max(tl.where(found, low, LEAST), 1)[:, None])
    return tl.min(tl.where(found, lane, 1 << 30), 1)[:, None]


@triton.jit
def _group_scores(score, expert_ok, expert, group, PER: tl.constexpr, GROUPS: tl.constexpr, G: tl.constexpr):
    """[R, G]: the sum of each group's two best scores."""
    high, low = _integers(score)
    found = tl.full([score.shape[0], G], float("-inf"), tl.float64)
    for g in tl.static_range(GROUPS):
        inside = expert_ok & (expert // PER == g)
        where = _best(high, low, inside, expert)
        both = tl.sum(tl.where(expert == where, score, 0.0), 1)[:, None]
        if PER > 1:
            where = _best(high, low, inside & (expert != where), expert)
            both += tl.sum(tl.where(expert == where, score, 0.0), 1)[:, None]
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
    MORE: int = 0
    """Experts behind EXPERTS that every token has too, with a weight of 1: the shared one (`experts/joined.py`)."""


class Choice(NamedTuple):
    """Where a choice is stored."""

    ids: Any  # int32 [tokens, USED + MORE]
    weights: Any  # float32 [tokens, USED + MORE]
    counts: Any  # int64 [EXPERTS], of every token so far


@triton.jit
def choose(
    choice, row, z, bias, gains, tokens, real, scale, S: tl.constexpr, G: tl.constexpr, E: tl.constexpr,
    BY_LOGIT: tl.constexpr,
):  # fmt: skip
    """Stores the experts of tokens `row` [R, 1] by their logits z [R, E], float64. Of `tokens` the first `real` count.
    BY_LOGIT: logits choose, not what becomes of them; only a rounding tells them apart (`route.may_leave`)."""
    EXPERTS: tl.constexpr = S.EXPERTS
    USED: tl.constexpr = S.USED
    GROUPS: tl.constexpr = S.GROUPS
    GROUPS_USED: tl.constexpr = S.GROUPS_USED
    expert = tl.arange(0, E)[None, :]
    free = (expert < EXPERTS) & (row == row)  # [R, E]
    p = z
    if S.GATE == "sigmoid":
        p = _sigmoid(z)
    elif S.GATE == "softmax":
        e = tl.where(free, tl.exp(z - tl.max(tl.where(free, z, float("-inf")), 1)[:, None]), 0.0)
        p = e / tl.sum(e, 1)[:, None]
    score = z if BY_LOGIT else p
    if S.BIAS:
        score += tl.load(bias + expert, mask=expert < EXPERTS, other=0.0)
    score = tl.where(score == score, score, _LAST)
    if GROUPS > 1:
        PER: tl.constexpr = EXPERTS // GROUPS
        group = tl.arange(0, G)[None, :]
        high, low = _integers(_group_scores(score, free, expert, group, PER, GROUPS, G))
        open_groups = (group < GROUPS) & (row == row)
        allowed = (expert < 0) & (row == row)
        for _ in tl.static_range(GROUPS_USED):
            taken = _best(high, low, open_groups, group)
            allowed = allowed | (expert // PER == taken)
            open_groups = open_groups & (group != taken)
        free = free & allowed
    high, low = _integers(score)
    place = tl.full([z.shape[0], E], -1, tl.int32)
    for j in tl.static_range(USED):
        where = _best(high, low, free, expert)
        place = tl.where(expert == where, j, place)
        free = free & (expert != where)
    chosen = place >= 0
    if S.GATE == "softmax_topk":
        e = tl.where(chosen, tl.exp(p - tl.max(tl.where(chosen, p, float("-inf")), 1)[:, None]), 0.0)
        p = e / tl.sum(e, 1)[:, None]
    elif S.RENORMALISE:
        p = p / tl.maximum(tl.sum(tl.where(chosen, p, 0.0), 1)[:, None], _SMALLEST_SUM)
    if S.GAINS:
        p = p * tl.load(gains + expert, mask=expert < EXPERTS, other=0.0)
    at = row * (USED + S.MORE) + place
    keep = chosen & (row < tokens)
    tl.store(choice.ids + at, expert + tl.zeros_like(place), mask=keep)
    tl.store(choice.weights + at, (p * scale).to(tl.float32), mask=keep)
    if S.MORE:
        at = row * (USED + S.MORE) + USED + expert
        keep = (expert < S.MORE) & (row < tokens)
        tl.store(choice.ids + at, EXPERTS + expert + tl.zeros_like(place), mask=keep)
        tl.store(choice.weights + at, tl.zeros_like(place).to(tl.float32) + 1.0, mask=keep)
    # Sums of whole numbers: their order changes nothing. Rows that pad a batch are nobody's.
    found = tl.sum((chosen & (row < real)).to(tl.int32), 0)
    e1 = tl.arange(0, E)
    tl.atomic_add(choice.counts + e1, found.to(tl.int64), mask=(e1 < EXPERTS) & (found > 0), sem="relaxed")


class Left(NamedTuple):
    """A choice that the kernels of the chosen experts make themselves, from one token's logits."""

    logits: Any  # float32 [EXPERTS]
    choice: Any  # Choice
    bias: Any  # float32 [EXPERTS], as `route_rows` reads it; gains likewise
    gains: Any
    scale: Any


@triton.jit
def _left_scores(left, begin, S: tl.constexpr):
    """One token's experts begin.., [WARPS, _LEFT_AT_ONCE], each warp's alike, so that no warp waits for another: their
    numbers, and what `choose_left` chooses by, as integers; _TAKEN where there is no expert."""
    WARPS: tl.constexpr = 1 if _INTERPRETED else tl.extra.cuda.num_warps()
    expert = begin + tl.arange(0, _LEFT_AT_ONCE)[None, :] + tl.zeros([WARPS, _LEFT_AT_ONCE], tl.int32)
    there = expert < S.EXPERTS
    z = tl.load(left.logits + expert, mask=there, other=0.0)
    if S.BIAS:
        score = _sigmoid(z.to(tl.float64)) + tl.load(left.bias + expert, mask=there, other=0.0)
        high, low = _integers(tl.where(score == score, score, _LAST))
    else:
        # Logits themselves are float32, so one integer has their order.
        high = tl.where(z == 0.0, 0.0, tl.where(z == z, z, _LAST)).to(tl.int32, bitcast=True)
        high = tl.where(high < 0, high ^ 0x7FFFFFFF, high)
        low = high
    return expert, tl.where(there, high, _TAKEN), low


@triton.jit
def _best_left(parts, high, S: tl.constexpr):
    """The first expert of the highest score, [WARPS, 1], of one part or two; of one with a bias (`route.may_leave`)."""
    BOTH: tl.constexpr = len(high) == 2
    top = tl.max(tl.maximum(high[0], high[1]) if BOTH else high[0], 1)[:, None]
    found = high[0] == top
    if S.BIAS:
        found = found & (parts[0][2] == tl.max(tl.where(found, parts[0][2], _TAKEN), 1)[:, None])
    best = tl.where(found, parts[0][0], 1 << 30)
    if BOTH:
        best = tl.minimum(best, tl.where(high[1] == top, parts[1][0], 1 << 30))
    return tl.min(best, 1)[:, None]


@triton.jit
def _take(parts, high, expert):
    """Scores without this expert's."""
    first = tl.where(parts[0][0] == expert, _TAKEN, high[0])
    if len(high) == 2:
        return first, tl.where(parts[1][0] == expert, _TAKEN, high[1])
    else:
        return (first,)


@triton.jit
def _left_parts(left, S: tl.constexpr):
    """`_left_scores` of all, and the scores of each part."""
    first = _left_scores(left, 0, S)
    if S.EXPERTS > _LEFT_AT_ONCE:
        second = _left_scores(left, _LEFT_AT_ONCE, S)
        return (first, second), (first[1], second[1])
    else:
        return (first,), (first[1],)


@triton.jit
def best_experts(left, S: tl.constexpr, COUNT: tl.constexpr):
    """The ids of the first COUNT experts, in the order of `choose_left`."""
    parts, high = _left_parts(left, S)
    found = ()
    for _ in tl.static_range(COUNT):
        best = _best_left(parts, high, S)
        found += (tl.max(best, None),)
        high = _take(parts, high, best)
    return found


@triton.jit
def expert_at(left, place, S: tl.constexpr):
    """The id of the expert at this place of `best_experts`."""
    parts, high = _left_parts(left, S)
    for _ in range(place):
        high = _take(parts, high, _best_left(parts, high, S))
    return tl.max(_best_left(parts, high, S), None)


@triton.jit
def choose_left(left, S: tl.constexpr, G: tl.constexpr, E: tl.constexpr):
    """Stores the experts of one token."""
    expert = tl.arange(0, E)[None, :]
    z = tl.load(left.logits + expert, mask=expert < S.EXPERTS, other=0.0).to(tl.float64)
    BY_LOGIT: tl.constexpr = not S.BIAS
    choose(left.choice, tl.zeros([1, 1], tl.int64), z, left.bias, left.gains, 1, 1, left.scale, S, G, E, BY_LOGIT)


Chooses = tuple[Callable[[], Left], Mapping[str, Any]]
"""What the experts' kernels need to choose, at each call, and its constants."""


def no_choice(unread: torch.Tensor) -> Chooses:
    """For kernels whose experts are chosen before them."""
    left = Left(unread, Choice(unread, unread, unread), unread, unread, 1.0)
    return lambda: left, {"S": Shape(1, 1, "softmax_topk", False, False, 1, 1, False), "G": 1, "E": 1}
