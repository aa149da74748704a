"""The gated delta rule, a token after the other: a program keeps some rows of a head's state in registers.

The prediction M k and the reading M q are both taken of the decayed state, so that one walk over it gives both sums:
(M + d k^T) q = M q + (k q) d. The next token is loaded while the state takes this one. Prompts in half precision take the
chunks of `delta_chunks.py` instead.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quarrel.ops.delta import DELTA, DeltaSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.triton_backend.recurrent.delta_chunks import DeltaChunks, key_of, takes
from quarrel.triton_backend.recurrent.records import DeltaHeads, Stored
from quarrel.triton_backend.recurrent.ssd import softplus
from quarrel.triton_backend.runtime.arrays import Slot
from quarrel.triton_backend.runtime.launch import cdiv, power_of_two
from quarrel.triton_backend.runtime.site import Batch, Launch, Site

_STATES = 2048  # state values to a program, 16 a thread
_ALL = 1 << 30


@triton.jit
def delta_token(m, q, k, v, size, rate, decay, eps, SCALE: tl.constexpr):
    """A token's update of some rows m [BV, BK] of a state, and what it reads of them.

    q, k  [BK], not yet normalised; v: [BV]; size: the step before its bias was added and softplus taken; rate: beta
    """
    q = q * (SCALE / tl.sqrt(tl.sum(q * q, 0) + eps))
    k = k * (1.0 / tl.sqrt(tl.sum(k * k, 0) + eps))
    m = m * tl.exp(softplus(size) * decay)
    d = (v - tl.sum(m * k[None, :], 1)) / (1.0 + tl.exp(-rate))
    y = tl.sum(m * q[None, :], 1) + d * tl.sum(q * k, 0)
    return m + d[:, None] * k[None, :], y


@triton.jit
def _load_token(p_q, p_v, p_alpha, p_beta, row, end, p, n, p_ok, n_ok, S: tl.constexpr):
    # Blocks of conditions throughout: the interpreter makes an integer of a scalar one and a block.
    WIDTH: tl.constexpr = 2 * S.NK * S.K + S.NV * S.V
    n_ok = n_ok & (row + 0 * n < end)
    q = tl.load(p_q + row * WIDTH, mask=n_ok, other=0.0).to(tl.float32)
    k = tl.load(p_q + S.NK * S.K + row * WIDTH, mask=n_ok, other=0.0).to(tl.float32)
    v = tl.load(p_v + row * WIDTH, mask=p_ok & (row + 0 * p < end), other=0.0).to(tl.float32)
    size = tl.load(p_alpha + row * S.NV, mask=row < end, other=0.0).to(tl.float32)
    return q, k, v, size, tl.load(p_beta + row * S.NV, mask=row < end, other=0.0).to(tl.float32)


@triton.jit
def delta_rows(
    y, qkv, alpha, beta, dt_bias, a, sequences, state_slots, state, eps, S: tl.constexpr, SCALE: tl.constexpr,
    BV: tl.constexpr, BK: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """The delta rule, a token after the other, of sequences with LEAST to MOST new tokens.

    Grid (sequences, NV, V / BV). WIDTH = 2 * NK * K + NV * V.

    y      act `[T, NV * V]`
    qkv    act `[T, WIDTH]`; alpha and beta: act `[T, NV]`
    dt_bias, a  float32 `[NV]`
    sequences, state_slots  as in `records.py`
    state  float32 `[slots, NV, V, K]`
    """
    seq = tl.program_id(0)
    head = tl.program_id(1)
    begin = tl.load(sequences.query_start + seq)
    new = tl.load(sequences.query_start + seq + 1) - begin
    if (new < LEAST) | (new > MOST):
        return
    past = tl.load(sequences.kv_len + seq) - new
    p = tl.program_id(2) * BV + tl.arange(0, BV)
    n = tl.arange(0, BK)
    p_ok, n_ok = p < S.V, n < S.K
    at = ((tl.load(state_slots + seq).to(tl.int64) * S.NV + head) * S.V + p)[:, None] * S.K + n[None, :]
    ok = p_ok[:, None] & n_ok[None, :]
    m = tl.load(state + at, mask=ok & (past + 0 * n > 0)[None, :], other=0.0)  # [BV, BK]
    decay, shift = tl.load(a + head), tl.load(dt_bias + head)
    p_q = qkv + key_of(head, S) * S.K + n
    p_v = qkv + 2 * S.NK * S.K + head * S.V + p
    first = tl.cast(begin, tl.int64)
    end = first + new
    q, k, v, size, rate = _load_token(p_q, p_v, alpha + head, beta + head, first, end, p, n, p_ok, n_ok, S)
    for t in range(new):
        row = first + t
        q_next, k_next, v_next, size_next, rate_next = _load_token(
            p_q, p_v, alpha + head, beta + head, row + 1, end, p, n, p_ok, n_ok, S
        )
        m, out = delta_token(m, q, k, v, size + shift, rate, decay, eps, SCALE)
        tl.store(y + row * (S.NV * S.V) + head * S.V + p, out.to(y.dtype.element_ty), mask=p_ok)
        q, k, v, size, rate = q_next, k_next, v_next, size_next, rate_next
    tl.store(state + at, m, mask=ok & (new + 0 * n > 0)[None, :])


def heads_of(spec: DeltaSpec) -> DeltaHeads:
    """The kernels' constants."""
    return DeltaHeads(spec.n_k, spec.n_v, spec.k_dim, spec.v_dim, spec.grouped)


class Delta:
    """Chunks for prompts where they suit, else and for steps one token after the other."""

    def __init__(self, site: Site, spec: DeltaSpec, stored: Stored) -> None:
        self._site, self._spec, self._stored = site, spec, stored
        self._chunks = DeltaChunks(site, spec, stored, heads_of(spec)) if takes(spec, site.compute) else None

    def prompts(self, batch: Batch, y: Slot, qkv: Slot, alpha: Slot, beta: Slot) -> None:
        """The sequences with several new tokens; all, where a row's bits may not depend on how a prompt is cut."""
        if self._site.deterministic:
            self.tokens(batch, y, qkv, alpha, beta, 1, _ALL)
        elif self._chunks is not None:
            self._chunks(batch, y, qkv, alpha, beta)
        else:
            self.tokens(batch, y, qkv, alpha, beta, 2, _ALL)

    def tokens(self, batch: Batch, y: Slot, qkv: Slot, alpha: Slot, beta: Slot, least: int, most: int) -> None:
        """The sequences with `least` to `most` new tokens, a token after the other."""
        spec, stored = self._spec, self._stored
        keys = power_of_two(spec.k_dim)
        values = min(power_of_two(spec.v_dim), max(1, _STATES // keys))
        dt_bias, a = stored.weights
        self._site.launch(
            delta_rows, (batch.S, spec.n_v, cdiv(spec.v_dim, values)), y=y.tensor, qkv=qkv.tensor, alpha=alpha.tensor,
            beta=beta.tensor, dt_bias=dt_bias, a=a, **stored.sequences(), state=stored.state, eps=spec.eps,
            S=heads_of(spec), SCALE=spec.k_dim**-0.5, BV=values, BK=keys, LEAST=least, MOST=most,
        )  # fmt: skip


def build_delta(site: Site, node: Node) -> Launch:
    """DELTA: qkv `[T, width]`, alpha and beta `[T, n_v]`, two `[n_v]`, state `[slots, n_v, v_dim, k_dim]`."""
    rows = [site.slot(v) for v in (node.outputs[0], *node.inputs[:3])]  # type: ignore[arg-type]
    rule = Delta(site, node.spec, Stored.of(site, node.inputs[3:5], node.inputs[5:]))

    def run(batch: Batch) -> None:
        if batch.prefill or site.deterministic:
            rule.prompts(batch, *rows)
        if batch.decode and not site.deterministic:
            rule.tokens(batch, *rows, 1, 1)

    return run


def _accepts(spec: DeltaSpec) -> str | None:
    return None if spec.k_dim <= 256 else f"needs keys of at most 256 values, got {spec.k_dim}"


IMPLEMENTATIONS = (Implementation(DELTA, "chunks, or token by token", build_delta, _accepts),)
