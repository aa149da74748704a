"""Activations as two int8 codes, x = s * (128 high + low) with a scale per 32 columns: 15 bits, an error of 4e-5.

A row of K columns is K / 2 + 3 K / 32 words of int32: the high codes of columns 0 to 15 of every block, their low codes,
both of columns 16 to 31, then the scales as float32 and the integer sums of the first and the last 16 columns of each
block. What is not finite makes its block's scale NaN, so it shows in every result.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import triton
import triton.language as tl

from quarrel.ops.contract import Compute, Value
from quarrel.ops.linear import LINEAR, LINEAR_ADD
from quarrel.ops.moe import EXPERT_DOWN, EXPERT_UP
from quarrel.ops.program import Node
from quarrel.triton_backend.formats.table import INTEGERS


def words(k: int) -> int:
    """int32s of a row."""
    return k // 2 + 3 * (k // 32)


def reads_int8x2(node: Node, compute: Compute) -> bool:
    """Whether a step of one row reads the int8x2 form of this node's activations."""
    if compute == "float32" or not any(node.op is op for op in (LINEAR, LINEAR_ADD, EXPERT_UP, EXPERT_DOWN)):
        return False
    spec = node.spec.linear if node.op is LINEAR_ADD else node.spec
    if node.op is EXPERT_UP and len({ref.type for ref in node.inputs[2 : 3 + spec.gated]}) > 1:  # type: ignore[union-attr]
        return False
    return spec.type.name in INTEGERS and spec.k % 32 == 0


def readers(nodes: Sequence[Node], compute: Compute, plain_only: Collection[int] = ()) -> tuple[set[int], set[int]]:
    """Ids of the values that a step of one row reads as int8x2, and of those that it reads as they are, as the nodes whose
    numbers are in `plain_only` read all of theirs."""
    int8x2: set[int] = set()
    plain: set[int] = set()
    for i, node in enumerate(nodes):
        reads = i not in plain_only and reads_int8x2(node, compute)
        x = (node.inputs[1] if node.op is LINEAR_ADD else node.inputs[0]) if reads else None
        for value in node.inputs:
            if isinstance(value, Value):
                (int8x2 if value is x else plain).add(value.id)
    return int8x2, plain


@triton.jit
def to_int8x2(v):
    """v [B, 2, 16] float32 as words of high and of low codes [B, 2, 4], scales [B], sums [B, 2]."""
    B: tl.constexpr = v.shape[0]
    largest = tl.max(tl.max(tl.abs(v), 2), 1)  # [B]
    bad = tl.sum(tl.sum(v * 0.0, 2), 1)
    s = largest * (1.0 / 16256)
    up = tl.where(largest > 1e-30, 16256.0 / largest, 0.0)
    q = tl.floor(v * up[:, None, None] + 0.5).to(tl.int32)
    high = (q + 64) >> 7
    low = q - high * 128
    sums = tl.sum(q, 2)  # [B, 2]
    # Four bytes to a word: the first column is the lowest.
    shift = tl.arange(0, 16)[None, None, :] % 4 * 8
    packed_high = tl.sum(tl.reshape((high & 255) << shift, (B, 2, 4, 4)), 3)  # [B, 2, 4]
    packed_low = tl.sum(tl.reshape((low & 255) << shift, (B, 2, 4, 4)), 3)
    return packed_high, packed_low, s + bad, sums


@triton.jit
def store_int8x2(to, v, block, ok, K: tl.constexpr):
    """Blocks `block` [B] of a row, from v [B, 2, 16] float32; `to` is where the row begins, as int32."""
    KW: tl.constexpr = K // 8
    KS: tl.constexpr = K // 32
    high, low, s, sums = to_int8x2(v)
    half = tl.arange(0, 2)[None, :]
    tl.store(to + 4 * KW + block, s.to(tl.int32, bitcast=True), mask=ok)
    tl.store(to + 4 * KW + KS + half * KS + block[:, None], sums, mask=ok[:, None])
    p = to + (half * (2 * KW))[:, :, None] + block[:, None, None] * 4 + tl.arange(0, 4)[None, None, :]
    tl.store(p, high, mask=ok[:, None, None])
    tl.store(p + KW, low, mask=ok[:, None, None])


@triton.jit
def int8x2_rows(to, x, K: tl.constexpr, B: tl.constexpr, PDL: tl.constexpr):
    """Grid (rows, blocks / B)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * B + tl.arange(0, B)
    ok = block < K // 32
    column = block[:, None, None] * 32 + tl.arange(0, 2)[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    v = tl.load(x + row * K + column, mask=ok[:, None, None], other=0.0).to(tl.float32)
    store_int8x2(to + row * (K // 2 + K // 32 * 3), v, block, ok, K)


@triton.jit
def norm_int8x2_rows(
    to, y, x, gain, eps, K: tl.constexpr, B: tl.constexpr, INT8X2: tl.constexpr, PLAIN: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """RMS norm of a row as int8x2 into `to`, as it is into y, or both; a program a row, B blocks at least K / 32."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, B)
    ok = block < K // 32
    within = tl.arange(0, 2)[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    column = block[:, None, None] * 32 + within
    weight = tl.load(gain + column, mask=ok[:, None, None], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    v = tl.load(x + row * K + column, mask=ok[:, None, None], other=0.0).to(tl.float32)
    square = tl.sum(tl.sum(tl.sum(v * v, 2), 1), 0)
    v = v * (1.0 / tl.sqrt(square / K + eps)) * weight
    if PLAIN:
        tl.store(y + row * K + column, v.to(y.dtype.element_ty), mask=ok[:, None, None])
    if INT8X2:
        store_int8x2(to + row * (K // 2 + K // 32 * 3), v, block, ok, K)
