"""Products with the chosen experts only: pairs of a token and an expert, grouped by expert, tiles of one expert each.

`group_pairs` lists the pairs of every expert in token order, so nothing is added in an order that depends on the batch; a
kernel of `kernels.py` multiplies. The down product writes each pair's row and `mix_pairs` adds them in the order of choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quarrel.errors import UnsupportedOp
from quarrel.ops.contract import Value
from quarrel.ops.moe import EXPERT_DOWN, EXPERT_UP, ExpertDownSpec, ExpertUpSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.triton_backend.elementwise.activation import BLOCK, activate, gated_flat
from quarrel.triton_backend.experts.kernels import ByPairs
from quarrel.triton_backend.experts.maps import ExpertMaps, Grouping
from quarrel.triton_backend.linear.left_parts import MOST_ROWS, LeftParts, Parts, leaves
from quarrel.triton_backend.runtime.arrays import DTYPES, Packed, Slot
from quarrel.triton_backend.runtime.launch import Launcher, cdiv
from quarrel.triton_backend.runtime.site import Batch, Launch, Site, starts_early

_SCAN, _LONG_SCAN = 1024, 8192
"""Pairs that are looked at together, of few and of many."""
_COLUMNS = 512
ACTIVATIONS = ("silu", "relu2", "oai", "gelu_tanh")


@triton.jit(do_not_specialize=["pairs"])
def group_pairs(order, starts, ids, pairs, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """starts [EXPERTS + 1]: where each expert's pairs begin in order [pairs]. A program an expert, in token order."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert = tl.program_id(0)
    before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, pairs, BLOCK):
        i = start + tl.arange(0, BLOCK)
        chosen = tl.load(ids + i, mask=i < pairs, other=EXPERTS)
        before += (chosen < expert).to(tl.int32)
    at = tl.sum(before, 0)
    tl.store(starts + expert, at)
    for start in range(0, pairs, BLOCK):
        i = start + tl.arange(0, BLOCK)
        mine = (tl.load(ids + i, mask=i < pairs, other=EXPERTS) == expert).to(tl.int32)
        tl.store(order + at + tl.cumsum(mine, 0) - 1, i, mask=mine == 1)
        at += tl.sum(mine, 0)
    if expert == EXPERTS - 1:
        tl.store(starts + EXPERTS, pairs)


def group_launch(
    launch: Launcher,
    order: torch.Tensor,
    starts: torch.Tensor,
    ids: torch.Tensor,
    pairs: int,
    n_experts: int,
    early: bool = False,
) -> None:
    """Fills order and starts; of no pairs nothing."""
    block = _SCAN if pairs <= 2 * _SCAN else _LONG_SCAN
    grid = (n_experts if pairs else 0,)
    launch(
        group_pairs, grid, order, starts, ids, pairs, EXPERTS=n_experts, BLOCK=block, warps=4 if block == _SCAN else 16,
        early=early,
    )  # fmt: skip


@triton.jit
def mix_pairs(
    out, rows, weights, residual, alpha, rate, N, USED: tl.constexpr, ADD: tl.constexpr, RATED: tl.constexpr,
    C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [tokens, N] float32: the weighted sum of each token's rows, or residual + alpha times that. RATED: the last row's
    weight is also multiplied with the sigmoid of rate [tokens]."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * C + tl.arange(0, C)
    ok = column < N
    total = tl.zeros([C], tl.float32)
    if RATED:
        last = activate(tl.load(rate + token).to(tl.float32), "sigmoid")
    for j in range(USED):
        weight = tl.load(weights + token * USED + j)
        if RATED:
            weight *= tl.where(j == USED - 1, last, 1.0)
        total += weight * tl.load(rows + (token * USED + j) * N + column, mask=ok, other=0.0)
    if ADD:
        total = tl.load(residual + token * N + column, mask=ok, other=0.0) + alpha * total
    tl.store(out + token * N + column, total, mask=ok)


def _grouping(site: Site, value: Value, n_experts: int, used: int) -> Callable[[Batch], Grouping]:
    """The pairs of a step by expert; a node before may have put them there."""
    order, starts, listed, known = site.grouped(value, used, n_experts)
    ids = site.slot(value)

    def fill(pairs: int) -> None:
        group_launch(site.launch, order.tensor, starts.tensor, ids.tensor, pairs, n_experts, starts_early(site))

    # One token's experts may have had kernels that need no groups.
    return lambda batch: Grouping(order, starts, ids, known and batch.T > 1, fill, listed)


@dataclass(frozen=True)
class ExpertLaunch:
    """An op of experts, and what `explain` says of it."""

    run: Launch
    products: Sequence[ByPairs]
    one_row: Launch | None = None
    """A step of one row, if it has a kernel of its own."""
    onto: Callable[[Slot, Slot, float, LeftParts | None], Launch] | None = None
    """Makes the launch, of any rows, that writes into the first the second, a stream, and the sum times a factor, or leaves
    it to a norm."""

    def __call__(self, batch: Batch) -> None:
        (self.one_row if self.one_row is not None and batch.T == 1 else self.run)(batch)

    @property
    def declined(self) -> Sequence[str]:
        return tuple(dict.fromkeys(reason for product in self.products for reason in product.declined))

    def describe(self) -> str:
        many = " and ".join(dict.fromkeys(product.describe() for product in self.products))
        return many if self.one_row is None else f"matvec 1 row, {many}"


def build_expert_up(site: Site, node: Node) -> ExpertLaunch:
    """EXPERT_UP: x `[T, k]`, ids `[T, used]`, stacks of matrices, to y `[T, used, n]`."""
    spec: ExpertUpSpec = node.spec
    x, ids, *refs = node.inputs
    source, target = site.slot(x), site.slot(node.outputs[0])  # type: ignore[arg-type]
    count = 1 + spec.gated
    stacks = [site.weight(r) for r in refs[:count]]  # type: ignore[arg-type]
    biases = [site.vector(r) for r in refs[count:]]  # type: ignore[arg-type]
    group = _grouping(site, ids, spec.n_experts, spec.used)  # type: ignore[arg-type]
    if one_format(stacks):
        together = ByPairs(site, ExpertMaps(stacks, biases, spec.n_experts, spec.used, spec.activation))

        def run(batch: Batch) -> None:
            together(target, source, group(batch), batch.T * spec.used, spec.used)

        return ExpertLaunch(run, [together])
    if spec.activation == "oai":
        formats = " and up ".join(s.format for s in stacks)
        raise UnsupportedOp("triton", node.op.name, str(spec), [f"this activation needs one format, got gate {formats}"])
    other = site.scratch("T", spec.used * spec.n, DTYPES[site.compute])
    apart = [
        (y, ByPairs(site, ExpertMaps([stack], biases[i : i + 1], spec.n_experts, spec.used, "none")))
        for i, (y, stack) in enumerate(zip((other, target), stacks, strict=True))
    ]

    def one_by_one(batch: Batch) -> None:
        pairs, groups = batch.T * spec.used, group(batch)
        for y, product in apart:
            product(y, source, groups, pairs, spec.used)
            groups = groups._replace(known=True)
        size, tensors = pairs * spec.n, (target.tensor, other.tensor, target.tensor)
        site.launch(
            gated_flat, (cdiv(size, BLOCK),), *tensors, size, KIND=spec.activation, SHARE=1, BLOCK=BLOCK,
            early=starts_early(site),
        )  # fmt: skip

    return ExpertLaunch(one_by_one, [product for _, product in apart])


def one_format(stacks: Sequence[Packed]) -> bool:
    """As files have them, but for those that were told a type for each tensor."""
    return len({s.format for s in stacks}) == 1


class Sum(NamedTuple):
    """A weighted sum of each token's rows."""

    rows: Slot  # float32 [T, used, n]
    shares: Slot  # float32 [T, used]
    used: int
    n: int
    rate: Slot | None = None  # act [T]: the last share times its sigmoid


def build_mix(site: Site, sum: Sum, out: Slot, stream: Slot | None, scale: float, left: LeftParts | None = None) -> Launch:
    """The sum, or a stream and the sum times a factor, into out `[T, n]`, or `left` to a norm."""
    left = None if stream is None or sum.rate is not None else left

    def run(batch: Batch) -> None:
        if left is None or stream is None:
            add(batch)
        else:
            parts = Parts(sum.rows.tensor, sum.shares.tensor, stream.tensor, sum.n, scale)
            left.leave(parts, "shares", sum.used, lambda: add(batch))

    def add(batch: Batch) -> None:
        site.launch(
            mix_pairs, (batch.T, cdiv(sum.n, _COLUMNS)), out.tensor, sum.rows.tensor, sum.shares.tensor,
            out.tensor if stream is None else stream.tensor, scale, out.tensor if sum.rate is None else sum.rate.tensor,
            sum.n, USED=sum.used, ADD=stream is not None, RATED=sum.rate is not None, C=_COLUMNS, early=starts_early(site),
        )  # fmt: skip

    return run


def build_expert_down(site: Site, node: Node) -> ExpertLaunch:
    """EXPERT_DOWN: y `[T, used, k]`, ids and weights `[T, used]`, a stack of matrices, to out `[T, n]` float32."""
    spec: ExpertDownSpec = node.spec
    y, ids, weights, down, *rest = node.inputs
    source, shares, target = site.slot(y), site.slot(weights), site.slot(node.outputs[0])  # type: ignore[arg-type]
    stack = site.weight(down)  # type: ignore[arg-type]
    biases = [site.vector(r) for r in rest]  # type: ignore[arg-type]
    group = _grouping(site, ids, spec.n_experts, spec.used)  # type: ignore[arg-type]
    rows = site.scratch("T", spec.used * spec.n)
    product = ByPairs(site, ExpertMaps([stack], biases, spec.n_experts, spec.used, "none"))

    def into(out: Slot, stream: Slot | None, scale: float, left: LeftParts | None = None) -> Launch:
        kept = rows if left is None else site.lasting("rows", MOST_ROWS * spec.used * spec.n, torch.float32)
        many = Sum(rows, shares, spec.used, spec.n)
        mix = build_mix(site, many, out, stream, scale)
        leave = build_mix(site, many._replace(rows=kept), out, stream, scale, left)

        def run(batch: Batch) -> None:
            to, end = (kept, leave) if left is not None and leaves(batch.T) else (rows, mix)
            product(to, source, group(batch), batch.T * spec.used, 1)
            end(batch)

        return run

    return ExpertLaunch(into(target, None, 1.0), [product], onto=into)


def _accepts(spec: ExpertUpSpec) -> str | None:
    if spec.activation not in ACTIVATIONS or spec.gated != (spec.activation != "relu2"):
        got = f"{'gated' if spec.gated else 'plain'} {spec.activation}"
        return f"needs gated silu, gelu_tanh or oai, or plain relu2, got {got}"
    return None


IMPLEMENTATIONS = (
    Implementation(EXPERT_UP, "grouped tiles", build_expert_up, _accepts),
    Implementation(EXPERT_DOWN, "grouped tiles, then added in order", build_expert_down),
)
