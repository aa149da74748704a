"""The next token of each row, by the contract of ops/sample.py: thresholds found exactly, ties kept, no sort.

Three launches: the best logit of each of P chunks of a row; weights e = exp((logit - best) / temperature); and one program
a row that finds thresholds and draws. A logit is ordered by its bits (`rank`), so top_k and top_p are a search for the
largest 32-bit rank whose tail still holds enough, four bits a pass. Ties are of logits: unequal ones within 1e-16 of the
best, whose probabilities agree to the last bit of a float64, are told apart. Sums of weights are float64, in token order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.ops.sample import SAMPLE
from quarrel.triton_backend.runtime.launch import cdiv, power_of_two
from quarrel.triton_backend.runtime.site import Batch, Launch, Site, starts_early

_CHUNK = 4096
_BLOCK = 2048
_NARROW = 512  # a search compares with 16 floors at once: 32 comparisons a thread
_NOBODY: tl.constexpr = tl.constexpr(2147483647)


@triton.jit
def finite(x):
    """x, or -inf in place of NaN and both infinities."""
    return tl.where(tl.abs(x) < float("inf"), x, float("-inf"))


@triton.jit
def rank(x):
    """A 32-bit integer (in int64) in the order of finite float32 values; -inf is below all of them, and -0 is 0."""
    x = tl.where(x == 0.0, 0.0, x)
    bits = x.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits < 0, 0x7FFFFFFF - (bits & 0x7FFFFFFF), bits + 0x80000000)


@triton.jit
def best_of_chunks(best, where, logits, N, P: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    given = tl.load(logits + row * N + i, mask=i < N, other=float("-inf"))
    x = finite(given)
    top = tl.max(x, 0)
    # Padded lanes can never win: they are not among the tokens, even where all logits are -inf.
    first = tl.min(tl.where((x == top) & (i < N), i, _NOBODY), 0)
    # No finite logit is infinite, so this marks a row with a NaN.
    broken = tl.max((given != given).to(tl.int32), 0)
    tl.store(best + row * P + chunk, tl.where(broken > 0, float("inf"), top))
    tl.store(where + row * P + chunk, first)


@triton.jit
def best_of_row(best, where, row, P: tl.constexpr, PADDED: tl.constexpr):
    c = tl.arange(0, PADDED)
    tops = tl.load(best + row * P + c, mask=c < P, other=float("-inf"))
    top = tl.max(tops, 0)
    ids = tl.load(where + row * P + c, mask=c < P, other=_NOBODY)
    return top, tl.min(tl.where(tops == top, ids, _NOBODY), 0)


@triton.jit
def weigh(
    weights, logits, best, where, temperature, N, P: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    t = tl.load(temperature + row)
    top, _ = best_of_row(best, where, row, P, PADDED)
    if (t > 0.0) & (tl.abs(top) < float("inf")):
        i = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        x = finite(tl.load(logits + row * N + i, mask=i < N, other=float("-inf")))
        # The exponent in float64: with many tokens of like weight, a float32 one moves the edges of the draw.
        e = tl.exp((x.to(tl.float64) - top.to(tl.float64)) / t.to(tl.float64))
        tl.store(weights + row * N + i, e.to(tl.float32), mask=i < N)


@triton.jit
def threshold(logits, weights, N, wanted, least, BY_COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The largest rank at or above which lie `wanted` tokens, or as much weight in weights of at least `least`; or zero."""
    found = tl.zeros([1], tl.int64)
    digit = tl.arange(0, 16).to(tl.int64)
    for step in range(8):
        shift = 28 - 4 * step
        floor = (found + (digit << shift))[None, :]
        above = tl.zeros([16], tl.int32) if BY_COUNT else tl.zeros([16], tl.float64)
        for start in range(0, N, BLOCK):
            i = start + tl.arange(0, BLOCK)
            r = rank(finite(tl.load(logits + i, mask=i < N, other=float("-inf"))))
            inside = (r[:, None] >= floor) & (i < N)[:, None]
            if BY_COUNT:
                above += tl.sum(inside.to(tl.int32), 0)
            else:
                e = tl.load(weights + i, mask=i < N, other=0.0)
                e = tl.where(e >= least, e, 0.0).to(tl.float64)
                above += tl.sum(tl.where(inside, e[:, None], 0.0), 0)
        found += tl.max(tl.where((above >= wanted) | (digit == 0), digit, 0), 0) << shift
    return tl.max(found, 0)


@triton.jit
def draw(
    tokens, logits, weights, best, where, temperature, top_k, top_p, min_p, uniform, N,
    P: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, NARROW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    top, first = best_of_row(best, where, row, P, PADDED)
    if tl.abs(top) == float("inf"):
        tl.store(tokens + row, -1)
        return
    if tl.load(temperature + row) <= 0.0:
        tl.store(tokens + row, first)
        return
    logits += row * N
    weights += row * N
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    least = tl.load(min_p + row)  # the best weight is 1
    floor = tl.zeros([], tl.int64)
    if (k > 0) & (k < N):
        floor = threshold(logits, weights, N, k, 0.0, True, NARROW)
    if p < 1.0:
        # Without top_k the share is of all tokens; with it, of those that top_k and min_p leave.
        bound = tl.where(k > 0, least, 0.0)
        whole = tl.zeros([], tl.float64)
        for start in range(0, N, BLOCK):
            i = start + tl.arange(0, BLOCK)
            r = rank(finite(tl.load(logits + i, mask=i < N, other=float("-inf"))))
            e = tl.load(weights + i, mask=i < N, other=0.0)
            whole += tl.sum(tl.where((r >= floor) & (e >= bound), e, 0.0).to(tl.float64), 0)
        edge = threshold(logits, weights, N, p.to(tl.float64) * whole, bound, False, NARROW)
        floor = tl.maximum(floor, tl.minimum(edge, rank(top)))
    total = tl.zeros([], tl.float64)
    for start in range(0, N, BLOCK):
        i = start + tl.arange(0, BLOCK)
        r = rank(finite(tl.load(logits + i, mask=i < N, other=float("-inf"))))
        e = tl.load(weights + i, mask=i < N, other=0.0)
        total += tl.sum(tl.where((r >= floor) & (e >= least), e, 0.0).to(tl.float64), 0)
    goal = tl.load(uniform + row).to(tl.float64) * total
    before = tl.zeros([], tl.float64)
    drawn = tl.full([], 2147483647, tl.int32)
    final = first
    for start in range(0, N, BLOCK):
        i = start + tl.arange(0, BLOCK)
        r = rank(finite(tl.load(logits + i, mask=i < N, other=float("-inf"))))
        e = tl.load(weights + i, mask=i < N, other=0.0)
        kept = tl.where((r >= floor) & (e >= least), e, 0.0).to(tl.float64)
        running = before + tl.cumsum(kept, 0)
        drawn = tl.minimum(drawn, tl.min(tl.where((running > goal) & (kept > 0), i, _NOBODY), 0))
        final = tl.maximum(final, tl.max(tl.where(kept > 0, i, 0), 0))
        before += tl.sum(kept, 0)
    # Rounding can leave the goal just out of reach: then it is the last token that may be drawn.
    tl.store(tokens + row, tl.where(drawn == _NOBODY, final, drawn))


def build_sample(site: Site, node: Node) -> Launch:
    """SAMPLE: logits `[R, n]` float32 and five `[R]` controls to tokens `[R]` int32."""
    logits, temperature, top_k, top_p, min_p, uniform = (site.slot(i) for i in node.inputs)  # type: ignore[arg-type]
    tokens = site.slot(node.outputs[0])
    n: int = node.spec.n
    axis = node.outputs[0].dims[0]
    assert isinstance(axis, str)
    chunks = cdiv(n, _CHUNK)
    padded = power_of_two(chunks)
    best, where = site.scratch(axis, chunks), site.scratch(axis, chunks, torch.int32)
    weights = site.scratch(axis, n)

    def run(batch: Batch) -> None:
        rows = batch.count(axis)
        partial, early = (best.tensor, where.tensor), starts_early(site)
        site.launch(best_of_chunks, (rows, chunks), *partial, logits.tensor, n, P=chunks, CHUNK=_CHUNK, early=early)
        site.launch(
            weigh, (rows, chunks), weights.tensor, logits.tensor, *partial, temperature.tensor, n,
            P=chunks, PADDED=padded, CHUNK=_CHUNK, early=early,
        )  # fmt: skip
        site.launch(
            draw, (rows,), tokens.tensor, logits.tensor, weights.tensor, *partial, temperature.tensor, top_k.tensor,
            top_p.tensor, min_p.tensor, uniform.tensor, n, P=chunks, PADDED=padded, BLOCK=_BLOCK, NARROW=_NARROW,
            warps=8, stages=1, early=early,
        )  # fmt: skip

    return run


IMPLEMENTATIONS = (Implementation(SAMPLE, "threshold search", build_sample),)
