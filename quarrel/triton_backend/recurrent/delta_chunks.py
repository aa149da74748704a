"""The gated delta rule of prompts, in chunks of BT tokens (Yang et al. 2024, section 3.3): matrix products on tensor cores.

With c_i the sum of step * a up to token i of its chunk, M the state before it, and q and k normalised, the chunk's updates
are M' = exp(c_end) M + sum_i exp(c_end - c_i) d_i k_i^T, where the d_i solve a triangular system:

    d_i = beta_i (v_i - exp(c_i) M k_i - sum_{j < i} exp(c_i - c_j) (k_i . k_j) d_j),  that is  D = T (V - exp(c) K M^T)
    y_i = exp(c_i) M q_i + sum_{j <= i} exp(c_i - c_j) (q_i . k_j) d_j

`delta_pairs` makes T and the scores of all chunks at once; `delta_scan` walks over a sequence's chunks with some rows of a
head's state, which never leave the registers. So no state is written between chunks, where Mamba-2's are (`ssd.py`): there
the walk needs no matrix product, here it needs two, and a chunk's state is larger than its queries, keys and values.
Chunks begin at multiples of BT of a sequence's positions, so a prompt that is cut there gives the same bits however it is
cut.

Rounding: the operands of products are in the step's arithmetic, sums and the state in float32, c in float64. The entries of
T are at most beta, as updates only shrink a state, so rounding them costs what rounding an activation costs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from quarrel.ops.delta import DeltaSpec
from quarrel.triton_backend.recurrent.records import DeltaHeads, Stored
from quarrel.triton_backend.recurrent.ssd import find_chunk, softplus
from quarrel.triton_backend.runtime.arrays import DTYPES, Slot
from quarrel.triton_backend.runtime.launch import cdiv, power_of_two
from quarrel.triton_backend.runtime.site import Batch, Site

_CHUNK = 64
_PAIRS = 4  # warps of delta_pairs
# Rows of a state to a program of delta_scan, warps, stages. On an H200, 4096 tokens of 32 heads of 128 took 152 us with
# these, with 64 rows and 2, 3 or 4 stages 183, 228 and 329, with 128 rows and 8 warps 243.
_SCAN = (32, 4, 3)
_MOST = 128  # values of a query or key: a chunk's operands must fit into shared memory


class Pairs(NamedTuple):
    """What `delta_pairs` leaves for `delta_scan`."""

    units: Any  # act [T, 2, NK * K], normalised queries, times 1 / sqrt(K), and keys
    solve: Any  # act [T, NV, BT], rows of T, times beta
    scores: Any  # act [T, NV, BT], q_i . k_j with its decay
    decays: Any  # float32 [2, NV, T]: exp(c_i), and exp(c_end - c_i)


@triton.jit
def key_of(head, S: tl.constexpr):
    """The head of queries and keys that a value head reads."""
    if S.GROUPED:
        key = head // (S.NV // S.NK)
    else:
        key = head % S.NK
    return key


@triton.jit
def unit_inverse(a, BT: tl.constexpr):
    """(I + a)^-1 of a strictly lower triangular a [BT, BT], float32.

    Of blocks of 2 on the diagonal, then of 4, 8 and so on: with D the inverse of blocks of a size and L what lies between
    two of them, that of blocks twice as large is D - D L D. Powers of a itself would grow as binomials where keys repeat;
    here nothing is larger than 1.
    """
    i = tl.arange(0, BT)
    same = i[:, None] // 2 == i[None, :] // 2
    whole = tl.where(i[:, None] == i[None, :], 1.0, 0.0) - tl.where(same, a, 0.0)
    for level in tl.static_range(1, 6):
        inner = i[:, None] // (1 << level) == i[None, :] // (1 << level)
        outer = i[:, None] // (2 << level) == i[None, :] // (2 << level)
        rounded = whole.to(tl.float16)
        between = tl.dot(tl.where(outer, tl.where(inner, 0.0, a), 0.0).to(tl.float16), rounded)
        whole -= tl.dot(rounded, between.to(tl.float16))
    return whole


@triton.jit(do_not_specialize=["seqs", "tokens"])
def delta_pairs(
    pairs, qkv, alpha, beta, dt_bias, a, sequences, eps, seqs, tokens, S: tl.constexpr, SCALE: tl.constexpr,
    BK: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """What tokens of a chunk have to do with each other, into `pairs`. Grid (room for chunks, NV).

    qkv    act `[T, 2 * NK * K + NV * V]`; alpha and beta: act `[T, NV]`
    dt_bias, a  float32 `[NV]`
    """
    item = tl.program_id(0)
    head = tl.program_id(1)
    seq = find_chunk(sequences.query_start, seqs, item, BT)
    begin = tl.load(sequences.query_start + seq)
    new = tl.load(sequences.query_start + seq + 1) - begin
    past = tl.load(sequences.kv_len + seq) - new
    first = (item - (begin // BT + 2 * seq)) * BT - past % BT
    if (first >= new) | (new < 2):
        return
    key = key_of(head, S)
    KEYS: tl.constexpr = S.NK * S.K
    WIDTH: tl.constexpr = 2 * KEYS + S.NV * S.V
    i = tl.arange(0, BT)
    n = tl.arange(0, BK)
    ok = (first + i >= 0) & (first + i < new)
    both = ok[:, None] & (n < S.K)[None, :]
    row = begin.to(tl.int64) + first
    p_q = qkv + row * WIDTH + key * S.K + i[:, None] * WIDTH + n[None, :]
    q = tl.load(p_q, mask=both, other=0.0).to(tl.float32)
    k = tl.load(p_q + KEYS, mask=both, other=0.0).to(tl.float32)
    q = (q * (SCALE / tl.sqrt(tl.sum(q * q, 1) + eps))[:, None]).to(pairs.units.dtype.element_ty)
    k = (k * (1.0 / tl.sqrt(tl.sum(k * k, 1) + eps))[:, None]).to(pairs.units.dtype.element_ty)
    if S.GROUPED:
        writes = head % (S.NV // S.NK) == 0
    else:
        writes = head < S.NK
    if writes:
        p_unit = pairs.units + row * (2 * KEYS) + key * S.K + i[:, None] * (2 * KEYS) + n[None, :]
        tl.store(p_unit, q, mask=both)
        tl.store(p_unit + KEYS, k, mask=both)
    at = row * S.NV + i * S.NV + head
    size = tl.load(alpha + at, mask=ok, other=0.0).to(tl.float32) + tl.load(dt_bias + head)
    rate = tl.load(beta + at, mask=ok, other=0.0).to(tl.float32)
    rate = tl.where(ok, 1.0 / (1.0 + tl.exp(-rate)), 0.0)
    step = tl.where(ok, softplus(size), 0.0).to(tl.float64) * tl.load(a + head).to(tl.float64)
    total = tl.cumsum(step, 0)
    end = tl.sum(tl.where(i == BT - 1, total, 0.0), 0)
    high = total.to(tl.float32)
    low = (total - high.to(tl.float64)).to(tl.float32)
    p_decay = pairs.decays + head.to(tl.int64) * tokens + row + i
    tl.store(p_decay, tl.exp(high), mask=ok)
    tl.store(p_decay + tokens.to(tl.int64) * S.NV, tl.exp((end - total).to(tl.float32)), mask=ok)
    left = tl.exp((high[:, None] - high[None, :]) + (low[:, None] - low[None, :]))
    p_pair = (row * S.NV + head) * BT + i[:, None] * (S.NV * BT) + i[None, :]
    # The scores first: what they need is then out of the registers.
    score = tl.where(i[:, None] >= i[None, :], tl.dot(q, tl.trans(k)) * left, 0.0)
    tl.store(pairs.scores + p_pair, score.to(pairs.scores.dtype.element_ty), mask=ok[:, None])
    alike = tl.dot(k, tl.trans(k)) * left * rate[:, None]
    solve = unit_inverse(tl.where(i[:, None] > i[None, :], alike, 0.0), BT) * rate[None, :]
    tl.store(pairs.solve + p_pair, solve.to(pairs.solve.dtype.element_ty), mask=ok[:, None])


@triton.jit(do_not_specialize=["tokens"])
def delta_scan(
    y, qkv, pairs, sequences, state_slots, state, tokens, S: tl.constexpr, PARTS: tl.constexpr, BV: tl.constexpr,
    BK: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """The results of all chunks and the states behind them. Grid (NV * PARTS, sequences).

    y      act `[T, NV * V]`
    state  float32 `[slots, NV, V, K]`
    """
    seq = tl.program_id(1)
    head = tl.program_id(0) // PARTS
    begin = tl.load(sequences.query_start + seq)
    new = tl.load(sequences.query_start + seq + 1) - begin
    if new < 2:
        return
    past = tl.load(sequences.kv_len + seq) - new
    KEYS: tl.constexpr = S.NK * S.K
    INNER: tl.constexpr = S.NV * S.V
    WIDTH: tl.constexpr = 2 * KEYS + INNER
    p = (tl.program_id(0) % PARTS) * BV + tl.arange(0, BV)
    n = tl.arange(0, BK)
    i = tl.arange(0, BT)
    p_ok, n_ok = p < S.V, n < S.K
    at = ((tl.load(state_slots + seq).to(tl.int64) * S.NV + head) * S.V + p)[:, None] * S.K + n[None, :]
    ok = p_ok[:, None] & n_ok[None, :]
    m = tl.load(state + at, mask=ok & (past + 0 * n > 0)[None, :], other=0.0)  # [BV, BK]
    # Scalar pointers and small offsets: a pointer of 64 bits for every eight values would not fit the registers.
    o_unit = i[:, None] * (2 * KEYS) + n[None, :]
    o_pair = i[:, None] * (S.NV * BT) + i[None, :]
    p_decay = pairs.decays + head.to(tl.int64) * tokens
    plane = tokens.to(tl.int64) * S.NV
    for here in range(0 - past % BT, new, BT):
        row = begin.to(tl.int64) + here
        t_ok = (here + i >= 0) & (here + i < new)
        keyed = t_ok[:, None] & n_ok[None, :]
        valued = t_ok[:, None] & p_ok[None, :]
        p_unit = pairs.units + (row * (2 * KEYS) + key_of(head, S) * S.K)
        q = tl.load(p_unit + o_unit, mask=keyed, other=0.0)  # [BT, BK]
        k = tl.load(p_unit + KEYS + o_unit, mask=keyed, other=0.0)
        at_pair = (row * S.NV + head) * BT
        solve = tl.load(pairs.solve + at_pair + o_pair, mask=t_ok[:, None], other=0.0)  # [BT, BT]
        score = tl.load(pairs.scores + at_pair + o_pair, mask=t_ok[:, None], other=0.0)
        p_v = qkv + (row * WIDTH + 2 * KEYS + head * S.V)
        v = tl.load(p_v + i[:, None] * WIDTH + p[None, :], mask=valued, other=0.0)  # [BT, BV]
        since = tl.load(p_decay + row + i, mask=t_ok, other=0.0)
        until = tl.load(p_decay + plane + row + i, mask=t_ok, other=0.0)
        whole = tl.load(p_decay + row + tl.minimum(BT, new - here) - 1)
        rounded = m.to(q.dtype)
        wrong = tl.trans(v).to(tl.float32) - tl.dot(rounded, tl.trans(k)) * since[None, :]  # [BV, BT]
        d = tl.dot(wrong.to(q.dtype), tl.trans(solve))
        out = tl.dot(rounded, tl.trans(q)) * since[None, :]
        out = tl.dot(d.to(q.dtype), tl.trans(score), out)
        m = tl.dot((d * until[None, :]).to(q.dtype), k, m * whole)
        p_y = y + (row * INNER + head * S.V)
        tl.store(p_y + i[:, None] * INNER + p[None, :], tl.trans(out).to(y.dtype.element_ty), mask=valued)
    tl.store(state + at, m, mask=ok)


def takes(spec: DeltaSpec, compute: str) -> bool:
    """Whether the chunks' tiles suit; float32 wants sums that the tensor cores do not give."""
    return compute != "float32" and spec.k_dim <= _MOST


class DeltaChunks:
    """Launches of the sequences with several new tokens; those with one are left alone."""

    def __init__(self, site: Site, spec: DeltaSpec, stored: Stored, heads: DeltaHeads) -> None:
        self._site, self._spec, self._stored, self._heads = site, spec, stored, heads
        act: torch.dtype = DTYPES[site.compute]
        self._units = site.scratch("T", 2 * spec.n_k * spec.k_dim, act)
        self._solve, self._scores = (site.scratch("T", spec.n_v * _CHUNK, act) for _ in range(2))
        self._decays = site.scratch("T", 2 * spec.n_v)

    def __call__(self, batch: Batch, y: Slot, qkv: Slot, alpha: Slot, beta: Slot) -> None:
        spec, launch = self._spec, self._site.launch
        rows, warps, stages = _SCAN
        dt_bias, a = self._stored.weights
        slotted = self._stored.sequences()
        pairs = Pairs(self._units.tensor, self._solve.tensor, self._scores.tensor, self._decays.tensor)
        shared: dict[str, Any] = {"pairs": pairs, "qkv": qkv.tensor, "tokens": batch.T, "S": self._heads, "BT": _CHUNK}
        shared |= {"sequences": slotted["sequences"], "BK": max(16, power_of_two(spec.k_dim))}
        launch(
            delta_pairs, (batch.T // _CHUNK + 2 * batch.S, spec.n_v), alpha=alpha.tensor, beta=beta.tensor,
            dt_bias=dt_bias, a=a, eps=spec.eps, seqs=batch.S, SCALE=spec.k_dim**-0.5, warps=_PAIRS, **shared,
        )  # fmt: skip
        parts = cdiv(spec.v_dim, rows)
        launch(
            delta_scan, (spec.n_v * parts, batch.S), y=y.tensor, state_slots=slotted["state_slots"],
            state=self._stored.state, PARTS=parts, BV=rows, warps=warps, stages=stages, **shared,
        )  # fmt: skip
