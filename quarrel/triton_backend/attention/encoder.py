"""Attention of encoders: every token of a sequence sees every other, and nothing is kept; and means of a sequence's rows.

A program takes BLOCK_M queries of one head and walks the sequence's keys in tiles from its first, so a row's result does
not depend on the rest of the batch. Softmax and sums are float32. In 16 bits a tower's images are attended to by PyTorch:
FlashAttention takes all of a step side by side, cuDNN large ones of one size.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from quarrel.ops.contract import Compute
from quarrel.ops.encode import ENCODE, MEAN_ROWS, EncodeSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.triton_backend.attention.cudnn import preferred
from quarrel.triton_backend.attention.decode import find
from quarrel.triton_backend.attention.paged import Tile
from quarrel.triton_backend.runtime.launch import INTERPRETED, cdiv, power_of_two
from quarrel.triton_backend.runtime.site import Batch, Launch, Site

MAX_HEAD_DIM = 256
LEAST = 2048
"""Patches from which images of one size are cuDNN's, which makes a plan for each number and size that it has not met, in
some 60 ms. On an H200, 16 heads of 72: 820 us for FlashAttention's 1360 (4 images of 4096) and 207 for 354 (one), and 245
for 325 (20 of 784), which is too little; our own tiles take 2136, 592 and 465."""


@triton.jit(do_not_specialize=["seqs"])
def encode_rows(
    out, q, k, v, query_start, seqs, scale, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, REACH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0)
    head = tl.program_id(1)
    seq = find(query_start, seqs, item, BLOCK_M)
    begin = tl.load(query_start + seq)
    length = tl.load(query_start + seq + 1) - begin
    tile = item - (begin // BLOCK_M + seq)
    if tile * BLOCK_M >= length:
        return
    query = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, WIDE)
    d_ok = d < DIM
    row = ((begin + query).to(tl.int64) * HEADS + head) * DIM
    mask_q = (query < length)[:, None] & d_ok[None, :]
    b_q = tl.load(q + row[:, None] + d[None, :], mask=mask_q, other=0.0)
    acc = tl.zeros([BLOCK_M, WIDE], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    kv_head = head // (HEADS // KV_HEADS)
    first = begin * 0
    last = length
    if REACH:
        first = tl.maximum(tile * BLOCK_M - REACH, 0) // BLOCK_N * BLOCK_N
        last = tl.minimum(length, tile * BLOCK_M + BLOCK_M + REACH)
    for start in range(first, last, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        key_ok = key < length
        at = ((begin + key).to(tl.int64) * KV_HEADS + kv_head) * DIM
        b_k = tl.load(k + at[None, :] + d[:, None], mask=key_ok[None, :] & d_ok[:, None], other=0.0)
        score = tl.dot(b_q, b_k, input_precision="ieee") * scale
        if REACH:
            away = query[:, None] - key[None, :]
            score = tl.where(key_ok[None, :] & (away <= REACH) & (away >= -REACH), score, float("-inf"))
        else:
            score = tl.where(key_ok[None, :], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        base = new_top
        if REACH:
            # A row that has seen no key yet keeps -inf; else every tile has a key.
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp(score - base[:, None])
        fade = tl.exp(top - base)
        total = total * fade + tl.sum(p, 1)
        b_v = tl.load(v + at[:, None] + d[None, :], mask=key_ok[:, None] & d_ok[None, :], other=0.0)
        acc = tl.dot(p.to(v.dtype.element_ty), b_v, acc * fade[:, None], input_precision="ieee")
        top = new_top
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + row[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=mask_q)


@triton.jit
def mean_of_rows(y, x, query_start, K, R: tl.constexpr, C: tl.constexpr):
    # Sums of every R-th row, then of those: the same order in every batch.
    seq = tl.program_id(0)
    column = tl.program_id(1) * C + tl.arange(0, C)
    begin = tl.load(query_start + seq)
    end = tl.load(query_start + seq + 1)
    total = tl.zeros([R, C], tl.float32)
    for start in range(begin, end, R):
        row = start + tl.arange(0, R)
        at = row.to(tl.int64)[:, None] * K + column[None, :]
        total += tl.load(x + at, mask=(row < end)[:, None] & (column < K)[None, :], other=0.0)
    mean = tl.sum(total, 0) / tl.maximum(end - begin, 1).to(tl.float32)
    tl.store(y + seq.to(tl.int64) * K + column, mean, mask=column < K)


def tile(compute: Compute, head_dim: int) -> Tile:
    """As attention's for prefill."""
    wide = power_of_two(head_dim)
    if compute == "float32":
        return Tile(16, 16, 8 if wide == 128 else 4, 1)
    return Tile(64, 64 if wide < 128 else 32, 4 if wide <= 128 else 8, 2)


def library_refusal(compute: Compute, spec: EncodeSpec) -> str | None:
    """Why PyTorch's attention never takes this, or None."""
    if compute == "float32" or spec.reach or spec.head_dim % 8:
        return "needs 16-bit arithmetic, head_dim in eights, and no limit of what is seen"
    if not INTERPRETED and not torch.backends.cuda.is_flash_attention_available():
        return "this PyTorch has no attention over sequences side by side"
    return None


def _by_library(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, query_start: torch.Tensor, longest: int, scale: float
) -> torch.Tensor:
    """q `[T, heads, head_dim]`, k and v `[T, key heads, head_dim]`, sequences side by side as query_start says."""
    if q.device.type == "cpu":  # the interpreter's
        out, starts = torch.zeros_like(q), query_start.tolist()
        for begin, end in pairwise(starts):
            parts = [x[None, begin:end].transpose(1, 2).float() for x in (q, k, v)]
            found = F.scaled_dot_product_attention(*parts, scale=scale, enable_gqa=True)
            out[begin:end] = found[0].transpose(0, 1)
        return out
    tokens, seqs = len(q), len(query_start) - 1
    if longest >= LEAST and longest * seqs == tokens:
        parts = [x.unflatten(0, (seqs, longest)).transpose(1, 2) for x in (q, k, v)]
        with preferred():
            each = F.scaled_dot_product_attention(*parts, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        return each.transpose(1, 2).flatten(0, 1)
    # What torch.nn.attention.varlen calls, without its copies.
    attend = torch.ops.aten._flash_attention_forward
    made = attend(q, k, v, query_start, query_start, longest, longest, 0.0, False, False, scale=scale)
    found: torch.Tensor = made[0]
    return found


def build_encode(site: Site, node: Node) -> Launch:
    """ENCODE: q, k, v `[T, heads * head_dim]`, query_start `[S + 1]` int32."""
    spec: EncodeSpec = node.spec
    q, k, v, query_start = (site.slot(i) for i in node.inputs)  # type: ignore[arg-type]
    target = site.slot(node.outputs[0])
    shape = tile(site.compute, spec.head_dim)
    by_library = library_refusal(site.compute, spec) is None

    def run(batch: Batch) -> None:
        if batch.longest and by_library:
            if q.tensor.device.type == "meta":  # kernels are being listed; the library's are not ours
                return
            heads = ((q, spec.n_heads), (k, spec.key_heads), (v, spec.key_heads))
            views = [x.tensor[: batch.T * n * spec.head_dim].view(batch.T, n, spec.head_dim) for x, n in heads]
            found = _by_library(*views, query_start.tensor[: batch.S + 1], batch.longest, spec.scale)
            target.tensor[: batch.T * spec.width].view(found.shape).copy_(found)
            return
        site.launch(
            encode_rows, (batch.T // shape.rows + batch.S, spec.n_heads),
            target.tensor, q.tensor, k.tensor, v.tensor, query_start.tensor, batch.S, spec.scale,
            HEADS=spec.n_heads, KV_HEADS=spec.key_heads, REACH=spec.reach, DIM=spec.head_dim,
            WIDE=max(16, power_of_two(spec.head_dim)),
            BLOCK_M=shape.rows, BLOCK_N=shape.keys, warps=shape.warps, stages=shape.stages,
        )  # fmt: skip

    return run


def build_mean_rows(site: Site, node: Node) -> Launch:
    """MEAN_ROWS: x `[T, k]` float32, query_start `[S + 1]` int32."""
    x, query_start = (site.slot(i) for i in node.inputs)  # type: ignore[arg-type]
    target = site.slot(node.outputs[0])
    k: int = node.spec.k
    columns = min(128, power_of_two(k))

    def run(batch: Batch) -> None:
        grid = (batch.S, cdiv(k, columns))
        site.launch(mean_of_rows, grid, target.tensor, x.tensor, query_start.tensor, k, R=16, C=columns)

    return run


def _accepts(spec: EncodeSpec) -> str | None:
    fits = spec.head_dim <= MAX_HEAD_DIM
    return None if fits else f"needs head_dim up to {MAX_HEAD_DIM}, got {spec.head_dim}"


IMPLEMENTATIONS = (
    Implementation(ENCODE, "tiles", build_encode, _accepts),
    Implementation(MEAN_ROWS, "rows side by side", build_mean_rows),
)
