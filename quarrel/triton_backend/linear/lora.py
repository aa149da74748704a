"""CHOSEN_LINEAR: one of some small matrices for each row (`ops/lora.py`).

    y[t] = base[t] + W_i x[t],  i = ids[t];  W [count, N, K] float32, W_0 = 0

Grid (tokens / 16, N / BN). A program has 16 rows and goes through the adapters that any of them names: rows of others are
zeros there, which add nothing, so that a row's result does not depend on who is beside it. One number an adapter is too
little to read to be worth a packed format; adapters that no row names are not read at all.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quarrel.ops.lora import CHOSEN_LINEAR, ChosenLinearSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.triton_backend.linear.matmul import TL_TYPES
from quarrel.triton_backend.runtime.launch import cdiv, power_of_two
from quarrel.triton_backend.runtime.site import Batch, Launch, Site, dims

ROWS = 16


@triton.jit
def chosen_rows(
    y, x, ids, weight, base, tokens, N, K, count,
    BASE: tl.constexpr, COMPUTE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    o_t = tl.program_id(0) * BM + tl.arange(0, BM)
    o_n = tl.program_id(1) * BN + tl.arange(0, BN)
    o_k = tl.arange(0, BK)
    m_t, m_n = o_t < tokens, o_n < N
    b_id = tl.load(ids + o_t, mask=m_t, other=0)  # [BM]
    acc = tl.zeros((BM, BN), tl.float32)
    p_x = x + o_t.to(tl.int64)[:, None] * K
    for e in range(1, count):
        mine = m_t & (b_id == e)
        if tl.max(mine.to(tl.int32), 0) > 0:
            p_w = weight + (o_n + e * N).to(tl.int64)[None, :] * K
            for k in range(0, K, BK):
                m_k = o_k + k < K
                b_x = tl.load(p_x + (o_k + k)[None, :], mask=mine[:, None] & m_k[None, :], other=0.0).to(COMPUTE)
                b_w = tl.load(p_w + (o_k + k)[:, None], mask=m_k[:, None] & m_n[None, :], other=0.0).to(COMPUTE)
                acc = tl.dot(b_x, b_w, acc, input_precision="ieee")
    at = o_t.to(tl.int64)[:, None] * N + o_n[None, :]
    ok = m_t[:, None] & m_n[None, :]
    if BASE:
        acc += tl.load(base + at, mask=ok, other=0.0)
    tl.store(y + at, acc.to(y.dtype.element_ty), mask=ok)


def build_chosen(site: Site, node: Node) -> Launch:
    """x `[T, k]`, ids `[T]`, perhaps base `[T, n]`; y `[T, n]`."""
    spec: ChosenLinearSpec = node.spec
    x, ids, ref, *rest = node.inputs
    source, chosen, target = site.slot(x), site.slot(ids), site.slot(node.outputs[0])  # type: ignore[arg-type]
    base = site.slot(rest[0]) if rest else target  # type: ignore[arg-type]
    weight = site.vector(ref)  # type: ignore[arg-type]
    axis, _ = dims(node.outputs[0])
    # On an H200, one token from 4096 to 16: 20.8 us by 256 columns, 28.9 by 128, 32.9 by 64; 2048 tokens from 16 to 4096:
    # 45 us by 128 rows of the matrix, 57 by 64, 140 by 16.
    most = 128 if site.compute == "float32" else 256
    wide = most // 2 if spec.n >= most // 2 else 16
    deep = min(most, max(16, power_of_two(spec.k)))
    compute = TL_TYPES[site.compute]

    def run(batch: Batch) -> None:
        tokens = batch.count(axis)
        site.launch(
            chosen_rows, (cdiv(tokens, ROWS), cdiv(spec.n, wide)),
            target.tensor, source.tensor, chosen.tensor, weight, base.tensor, tokens, spec.n, spec.k, spec.count,
            BASE=spec.base, COMPUTE=compute, BM=ROWS, BN=wide, BK=deep, stages=3,
        )  # fmt: skip

    return run


IMPLEMENTATIONS = (Implementation(CHOSEN_LINEAR, "by adapter", build_chosen),)
