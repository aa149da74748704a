"""The Mamba-2 scan of prompts, in chunks of BT tokens (Dao and Gu 2024, section 6): matrix products on tensor cores.

With c_i the sum of step * A up to token i of its chunk, S the state before it and M_ij = (C_i . B_j) exp(c_i - c_j) step_j:

    y_i = sum_{j <= i} M_ij x_j + exp(c_i) C_i S + D x_i          S' = exp(c_end) S + sum_j exp(c_end - c_j) step_j B_j x_j

All chunks run at once, in four launches: `ssd_scores` makes C_i . B_j of every chunk and group and c of every head,
`ssd_ends` what each chunk adds to a state of zero, `ssd_join` the states between chunks, one after the other, and
`ssd_rows` the results. Chunks begin at multiples of BT of a sequence's positions, so a prompt that is cut there gives the
same bits however it is cut. Sums c reach thousands while differences near zero matter: they are made in float64 and kept as
two float32. Products are TF32, rounded to nearest here; the activations are exact in it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from quarrel.ops.state import Scan2Spec
from quarrel.triton_backend.recurrent.records import Heads, Stored
from quarrel.triton_backend.runtime.arrays import Slot
from quarrel.triton_backend.runtime.launch import cdiv, power_of_two
from quarrel.triton_backend.runtime.site import Batch, Site

_TILE = (64, 32, 4)  # tokens of a chunk, channels of a head to a program, warps
_HEADS = 16  # heads whose sums one program makes
_BLOCK = 1024  # state values to a program of ssd_join
_MOST_STATES = 256


class States(NamedTuple):
    """The states of chunks, float32; a state has heads * head_dim * n_state values."""

    edges: Any  # [S, 2, state], of a sequence's first and last chunk
    between: Any  # [T, WIDE], the others: at WIDE values a token from the chunk's first token on


@triton.jit
def softplus(x):
    """log(1 + exp(x)), through log(1 + e) = 2 atanh(e / (2 + e)): adding 1 to a small e would lose it."""
    e = tl.exp(-tl.abs(x))
    s = e / (2.0 + e)  # at most 1/3
    z = s * s
    series = 1.0 / 3 + z * (1.0 / 5 + z * (1.0 / 7 + z * (1.0 / 9 + z * (1.0 / 11 + z * (1.0 / 13)))))
    return tl.maximum(x, 0.0) + 2.0 * s * (1.0 + z * series)


@triton.jit
def tf32(x):
    """float32 with 10 bits of fraction, half away from zero: the tensor cores cut off. NaN stays what it is."""
    bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)


@triton.jit
def find_chunk(query_start, seqs, item, BT: tl.constexpr):
    """The sequence of `item`: s begins at item query_start[s] // BT + 2 s, room for a short chunk at each end."""
    low = item * 0
    high = seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // BT + 2 * middle <= item:
            low = middle
        else:
            high = middle
    return low


@triton.jit(do_not_specialize=["seqs", "tokens"])
def ssd_scores(
    scores, sums, xbc, dt, dt_bias, a, sequences, seqs, tokens, S: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    """C_i . B_j of every chunk and group, and the sums c of every head.

    Along the grid's second axis lie the groups and then, BH at a time, the heads. WIDTH = heads * head_dim + 2 groups * N.

    scores  float32 `[T, groups, BT]`
    sums    float32 `[3, heads, T]`: high and low part of c, and the step
    xbc     act `[T, WIDTH]`; dt: act `[T, heads]`
    dt_bias, a  float32 `[heads]`
    """
    item = tl.program_id(0)
    WIDTH: tl.constexpr = S.HEADS * S.DIM + 2 * S.GROUPS * S.N
    seq = find_chunk(sequences.query_start, seqs, item, BT)
    begin = tl.load(sequences.query_start + seq)
    new = tl.load(sequences.query_start + seq + 1) - begin
    past = tl.load(sequences.kv_len + seq) - new
    first = (item - (begin // BT + 2 * seq)) * BT - past % BT
    if (first >= new) | (new < 2):
        return
    i = tl.arange(0, BT)
    ok = (first + i >= 0) & (first + i < new)
    row = begin.to(tl.int64) + first
    if tl.program_id(1) < S.GROUPS:
        group = tl.program_id(1)
        n = tl.arange(0, BN)
        p_b = xbc + row * WIDTH + S.HEADS * S.DIM + group * S.N
        b = tl.load(p_b + i[None, :] * WIDTH + n[:, None], mask=ok[None, :] & (n < S.N)[:, None], other=0.0)
        c = tl.load(
            p_b + S.GROUPS * S.N + i[:, None] * WIDTH + n[None, :], mask=ok[:, None] & (n < S.N)[None, :], other=0.0
        )
        found = tl.dot(c, b)  # [BT, BT]
        tl.store(
            scores + (row * S.GROUPS + group) * BT + i[:, None] * (S.GROUPS * BT) + i[None, :], found, mask=ok[:, None]
        )
    else:
        head = (tl.program_id(1) - S.GROUPS) * BH + tl.arange(0, BH)
        both = ok[:, None] & (head < S.HEADS)[None, :]
        size = tl.load(dt + row * S.HEADS + i[:, None] * S.HEADS + head[None, :], mask=both, other=0.0).to(tl.float32)
        step = tl.where(both, softplus(size + tl.load(dt_bias + head, mask=head < S.HEADS, other=0.0)[None, :]), 0.0)
        decay = tl.load(a + head, mask=head < S.HEADS, other=0.0)[None, :]
        total = tl.cumsum(step.to(tl.float64) * decay.to(tl.float64), 0)  # [BT, BH]
        high = total.to(tl.float32)
        low = (total - high.to(tl.float64)).to(tl.float32)
        at = sums + row + head[None, :].to(tl.int64) * tokens + i[:, None]
        plane = tokens.to(tl.int64) * S.HEADS
        tl.store(at, high, mask=both)
        tl.store(at + plane, low, mask=both)
        tl.store(at + 2 * plane, step, mask=both)


@triton.jit
def _sums_of(p_sums, plane, first, new, i, BT: tl.constexpr):
    """High and low part of c for a chunk's tokens, and at its end.

    Tokens in front of the sequence have the sum zero; those behind its end go on with the last one.
    """
    end = tl.minimum(BT, new - first) - 1
    last = tl.minimum(i, end)
    high = tl.load(p_sums + last, mask=first + i >= 0, other=0.0)
    low = tl.load(p_sums + plane + last, mask=first + i >= 0, other=0.0)
    return high, low, tl.load(p_sums + end), tl.load(p_sums + plane + end)


@triton.jit
def _chunk_state(states, begin, first, new, seq, SIZE: tl.constexpr, WIDE: tl.constexpr, BT: tl.constexpr):
    """Where a chunk's state lies in `States`."""
    p_state = states.between + (begin.to(tl.int64) + first) * WIDE
    if first <= 0:
        p_state = states.edges + seq.to(tl.int64) * (2 * SIZE)
    elif first + BT > new:
        p_state = states.edges + seq.to(tl.int64) * (2 * SIZE) + SIZE
    return p_state


@triton.jit(do_not_specialize=["seqs", "tokens"])
def ssd_ends(
    states, xbc, sums, sequences, seqs, tokens, S: tl.constexpr, PARTS: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
    BT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """What each chunk adds to a state of zero, into `states` (`States`). Grid (room for chunks, heads * PARTS)."""
    item = tl.program_id(0)
    head = tl.program_id(1) // PARTS
    seq = find_chunk(sequences.query_start, seqs, item, BT)
    begin = tl.load(sequences.query_start + seq)
    new = tl.load(sequences.query_start + seq + 1) - begin
    past = tl.load(sequences.kv_len + seq) - new
    first = (item - (begin // BT + 2 * seq)) * BT - past % BT
    if (first >= new) | (new < 2):
        return
    WIDTH: tl.constexpr = S.HEADS * S.DIM + 2 * S.GROUPS * S.N
    p = (tl.program_id(1) % PARTS) * BP + tl.arange(0, BP)
    n = tl.arange(0, BN)
    i = tl.arange(0, BT)
    p_ok, n_ok = p < S.DIM, n < S.N
    ok = (first + i >= 0) & (first + i < new)
    row = begin.to(tl.int64) + first
    plane = tokens.to(tl.int64) * S.HEADS
    p_sums = sums + head.to(tl.int64) * tokens + row
    high, low, end_high, end_low = _sums_of(p_sums, plane, first, new, i, BT)
    step = tl.load(p_sums + 2 * plane + i, mask=ok, other=0.0)
    p_row = xbc + row * WIDTH
    x = tl.load(p_row + i[:, None] * WIDTH + (head * S.DIM + p)[None, :], mask=ok[:, None] & p_ok[None, :], other=0.0)
    p_b = p_row + S.HEADS * S.DIM + head // (S.HEADS // S.GROUPS) * S.N
    b = tl.load(p_b + i[None, :] * WIDTH + n[:, None], mask=ok[None, :] & n_ok[:, None], other=0.0)
    left = step * tl.exp((end_high - high) + (end_low - low))
    added = tl.dot(b.to(tl.float32), tf32(x.to(tl.float32) * left[:, None]), input_precision="tf32")  # [BN, BP]
    p_state = _chunk_state(states, begin, first, new, seq, S.HEADS * S.DIM * S.N, WIDE, BT) + head * (S.DIM * S.N)
    tl.store(p_state + p[None, :] * S.N + n[:, None], added, mask=p_ok[None, :] & n_ok[:, None])


@triton.jit(do_not_specialize=["tokens"])
def ssd_join(
    states, sums, sequences, state_slots, state, tokens, HEADS: tl.constexpr, SIZE: tl.constexpr, BT: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Puts the state before each chunk in the place of what the chunk adds, and the state at the end into its slot.

    state  float32 `[slots, SIZE]`, SIZE = heads * head_dim * n_state
    """
    seq = tl.program_id(1)
    begin = tl.load(sequences.query_start + seq)
    new = tl.load(sequences.query_start + seq + 1) - begin
    if new < 2:
        return
    past = tl.load(sequences.kv_len + seq) - new
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = at < SIZE
    p_slot = state + tl.load(state_slots + seq).to(tl.int64) * SIZE + at
    h = tl.load(p_slot, mask=ok & (past + 0 * at > 0), other=0.0)
    p_sums = sums + (at // (SIZE // HEADS)).to(tl.int64) * tokens + begin
    first = 0 - past % BT
    p_state = _chunk_state(states, begin, first, new, seq, SIZE, WIDE, BT) + at
    added = tl.load(p_state, mask=ok, other=0.0)
    for here in range(first, new, BT):
        # The next chunk is loaded before anything is stored, which would hold the load back.
        p_next = _chunk_state(states, begin, here + BT, new, seq, SIZE, WIDE, BT) + at
        next_added = tl.load(p_next, mask=ok & (here + BT + 0 * at < new), other=0.0)
        left = tl.exp(tl.load(p_sums + tl.minimum(here + BT, new) - 1, mask=ok, other=0.0))
        tl.store(p_state, h, mask=ok)
        h = left * h + added
        p_state, added = p_next, next_added
    tl.store(p_slot, h, mask=ok)


@triton.jit(do_not_specialize=["seqs", "tokens"])
def ssd_rows(
    y, xbc, scores, sums, d, states, sequences, seqs, tokens, S: tl.constexpr, PARTS: tl.constexpr, BP: tl.constexpr,
    BN: tl.constexpr, BT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The results of each chunk. Grid (room for chunks, heads * PARTS).

    y  float32 or act `[T, heads * head_dim]`; d: float32 `[heads]`; the others as the launches before leave them
    """
    item = tl.program_id(0)
    head = tl.program_id(1) // PARTS
    seq = find_chunk(sequences.query_start, seqs, item, BT)
    begin = tl.load(sequences.query_start + seq)
    new = tl.load(sequences.query_start + seq + 1) - begin
    past = tl.load(sequences.kv_len + seq) - new
    first = (item - (begin // BT + 2 * seq)) * BT - past % BT
    if (first >= new) | (new < 2):
        return
    group = head // (S.HEADS // S.GROUPS)
    INNER: tl.constexpr = S.HEADS * S.DIM
    WIDTH: tl.constexpr = INNER + 2 * S.GROUPS * S.N
    p = (tl.program_id(1) % PARTS) * BP + tl.arange(0, BP)
    n = tl.arange(0, BN)
    i = tl.arange(0, BT)
    p_ok, n_ok = p < S.DIM, n < S.N
    t_ok = (first + i >= 0) & (first + i < new)
    both = t_ok[:, None] & p_ok[None, :]
    row = begin.to(tl.int64) + first
    plane = tokens.to(tl.int64) * S.HEADS
    p_sums = sums + head.to(tl.int64) * tokens + row
    high, low, _, _ = _sums_of(p_sums, plane, first, new, i, BT)
    step = tl.load(p_sums + 2 * plane + i, mask=t_ok, other=0.0)
    p_row = xbc + row * WIDTH
    c = tl.load(
        p_row + INNER + (S.GROUPS + group) * S.N + i[:, None] * WIDTH + n[None, :],
        mask=t_ok[:, None] & n_ok[None, :], other=0.0,
    )  # fmt: skip
    p_state = _chunk_state(states, begin, first, new, seq, INNER * S.N, WIDE, BT) + head * (S.DIM * S.N)
    h = tl.load(p_state + p[None, :] * S.N + n[:, None], mask=p_ok[None, :] & n_ok[:, None], other=0.0)  # [BN, BP]
    out = tl.dot(c.to(tl.float32), tf32(h), input_precision="tf32") * tl.exp(high)[:, None]  # [BT, BP]
    p_score = scores + (row * S.GROUPS + group) * BT
    score = tl.load(p_score + i[:, None] * (S.GROUPS * BT) + i[None, :], mask=t_ok[:, None], other=0.0)
    between_ij = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    mixed = tl.where(i[:, None] >= i[None, :], score * tl.exp(between_ij) * step[None, :], 0.0)
    x = tl.load(p_row + i[:, None] * WIDTH + (head * S.DIM + p)[None, :], mask=both, other=0.0).to(tl.float32)
    out = tl.dot(tf32(mixed), x, out, input_precision="tf32") + tl.load(d + head) * x
    p_y = y + row * INNER + head * S.DIM
    tl.store(p_y + i[:, None] * INNER + p[None, :], out.to(y.dtype.element_ty), mask=both)


def takes(spec: Scan2Spec, compute: str) -> bool:
    """Whether the chunks' tiles suit; float32 wants sums that the tensor cores do not give."""
    return compute != "float32" and spec.n_state <= _MOST_STATES


class Chunks:
    """Launches of the sequences with several new tokens; those with one are left alone."""

    def __init__(self, site: Site, spec: Scan2Spec, stored: Stored) -> None:
        self._site, self._spec, self._stored = site, spec, stored
        self._chunk, self._channels, self._warps = _TILE
        self._size = spec.d_inner * spec.n_state
        self._scores = site.scratch("T", spec.n_groups * self._chunk)
        self._sums = site.scratch("T", 3 * spec.n_heads)
        self._edges, self._between = site.scratch("S", 2 * self._size), site.scratch("T", cdiv(self._size, self._chunk))

    def __call__(self, batch: Batch, y: Slot, xbc: Slot, dt: Slot) -> None:
        s, chunk, launch = self._spec, self._chunk, self._site.launch
        dt_bias, a, d = self._stored.weights
        # Sixteen channels and eight warps were an illegal access on an H200 with Triton 3.6.
        channels = min(self._channels, max(32, power_of_two(s.head_dim)))
        parts, items = cdiv(s.head_dim, channels), batch.T // chunk + 2 * batch.S
        chunks: dict[str, Any] = {"sums": self._sums.tensor, "tokens": batch.T}
        slotted = self._stored.sequences()
        chunks |= {"sequences": slotted["sequences"], "BT": chunk}
        states = {"states": States(self._edges.tensor, self._between.tensor), "WIDE": cdiv(self._size, chunk)}
        shape: dict[str, Any] = {"S": Heads(s.n_heads, s.head_dim, s.n_groups, s.n_state), "seqs": batch.S}
        shape |= {"xbc": xbc.tensor, "BN": max(16, power_of_two(s.n_state)), "warps": self._warps}
        tile = {"PARTS": parts, "BP": channels}
        launch(
            ssd_scores, (items, s.n_groups + cdiv(s.n_heads, _HEADS)), scores=self._scores.tensor, dt=dt.tensor,
            dt_bias=dt_bias, a=a, BH=_HEADS, **chunks, **shape,
        )  # fmt: skip
        launch(ssd_ends, (items, s.n_heads * parts), **chunks, **states, **shape, **tile)
        launch(
            ssd_join, (cdiv(self._size, _BLOCK), batch.S), state_slots=slotted["state_slots"],
            state=self._stored.state, HEADS=s.n_heads, SIZE=self._size,
            BLOCK=_BLOCK, **chunks, **states,
        )  # fmt: skip
        launch(
            ssd_rows, (items, s.n_heads * parts), y=y.tensor, scores=self._scores.tensor, d=d, **chunks, **states, **shape,
            **tile,
        )  # fmt: skip
