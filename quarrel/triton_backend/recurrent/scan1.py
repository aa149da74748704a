"""The Mamba-1 scan, alone or with the gate behind it: one token after the other, with the state in registers.

Steps are one launch. Prompts are cut into chunks of BT tokens, which all run at once, in three launches: what a chunk adds
to a state of zero, and the sum of its step sizes, as a chunk decays by exp(A sum); the states between chunks, one after the
other; then every chunk again, from the state before it. Chunks begin at multiples of BT of a sequence's positions.
The next token is loaded while the state takes this one: its way from memory is longer than its arithmetic.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from quarrel.ops.mixer import SCAN1_GATE
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.ops.state import SCAN1, Scan1Spec
from quarrel.triton_backend.elementwise.activation import activate
from quarrel.triton_backend.recurrent.records import Sequences
from quarrel.triton_backend.recurrent.ssd import find_chunk, softplus
from quarrel.triton_backend.runtime.launch import cdiv, power_of_two
from quarrel.triton_backend.runtime.site import Batch, Launch, Site

_CHUNK = 64
_ALL = 1 << 30
_STATES = 1024  # to a program, 8 a thread


@triton.jit
def _token(x, dt, b, c, row, end, channel, n, c_ok, n_ok, C: tl.constexpr, N: tl.constexpr):
    # Blocks of conditions throughout: the interpreter makes an integer of a scalar one and a block.
    c_ok = c_ok & (row + 0 * channel < end)
    n_ok = n_ok & (row + 0 * n < end)
    value = tl.load(x + row * C + channel, mask=c_ok, other=0.0).to(tl.float32)
    size = tl.load(dt + row * C + channel, mask=c_ok, other=0.0).to(tl.float32)
    b_t = tl.load(b + row * N + n, mask=n_ok, other=0.0).to(tl.float32)
    return value, size, b_t, tl.load(c + row * N + n, mask=n_ok, other=0.0).to(tl.float32)


class Chunks(NamedTuple):
    """Where chunks meet. So no program reads the state that another one writes."""

    between: Any  # float32 [T, WIDE]: at its first token the state behind each whole chunk, but for a sequence's first
    firsts: Any  # float32 [S, ..]: behind a sequence's first chunk the state and the sum of steps; the state before


class Shape(NamedTuple):
    """Constants of a scan."""

    C: int
    """Channels."""
    N: int
    """States of a channel."""
    BC: int
    """Channels to a program."""
    BN: int
    """N, padded to a power of two."""
    BT: int
    """Tokens of a chunk."""
    WIDE: int
    """Floats of `between` for a token."""


@triton.jit(do_not_specialize=["seqs"])
def scan1_rows(
    y, z, x, dt, b, c, a, d, sequences, state_slots, state, chunks, seqs, S: tl.constexpr, WHAT: tl.constexpr,
    GATE: tl.constexpr,
):  # fmt: skip
    """The scan of Mamba-1 by sequence ("steps", "all") or by chunk ("ends", "rows"), S.BC channels a program.

    Grid (sequences, or room for their chunks, channels / S.BC). `sequences` is a record (`records.py`); T counts the step's
    rows.

    y      act `[T, channels]`; z: the gate of the same shape, read with GATE only
    x, dt  act `[T, channels]`; b, c: act `[T, n_state]`
    a      float32 `[channels, n_state]`, negative; d: float32 `[channels]`
    state  float32 `[slots, channels, n_state]`
    chunks where chunks meet (`Chunks`)
    WHAT   "steps" of the sequences with one new token, "all" (steps of any number of tokens), "ends" (what a chunk adds)
           or "rows" (its results)
    """
    C: tl.constexpr = S.C
    N: tl.constexpr = S.N
    BC: tl.constexpr = S.BC
    BN: tl.constexpr = S.BN
    BT: tl.constexpr = S.BT
    item = tl.program_id(0)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    n = tl.arange(0, BN)
    c_ok, n_ok = channel < C, n < N
    ok = c_ok[:, None] & n_ok[None, :]
    STEPS: tl.constexpr = WHAT == "steps" or WHAT == "all"
    seq = item
    if not STEPS:
        seq = find_chunk(sequences.query_start, seqs, item, BT)
    begin = tl.load(sequences.query_start + seq)
    new = tl.load(sequences.query_start + seq + 1) - begin
    past = tl.load(sequences.kv_len + seq) - new
    first = begin * 0
    if STEPS:
        if (new != 1) & ((new < 1) | (WHAT == "steps")):
            return
    else:
        first = (item - (begin // BT + 2 * seq)) * BT - past % BT
        if (new < 2) | (first >= new):
            return
        if (WHAT == "ends") & (first + BT > new):
            return
    cell = channel[:, None] * N + n[None, :]
    p_state = state + tl.load(state_slots + seq).to(tl.int64) * (C * N) + cell
    decay = tl.load(a + cell, mask=ok, other=0.0)
    skip = tl.load(d + channel, mask=c_ok, other=0.0)
    total = tl.zeros([BC], tl.float32)
    h = tl.zeros([BC, BN], tl.float32)
    p_first = chunks.firsts + seq.to(tl.int64) * (2 * C * N + C)
    if STEPS:
        h = tl.load(p_state, mask=ok & (past + 0 * n > 0)[None, :], other=0.0)
    if WHAT == "rows":
        if first <= 0:
            h = tl.load(p_first + C * N + C + cell, mask=ok, other=0.0)
        elif first <= BT:
            h = tl.load(p_first + cell, mask=ok, other=0.0)
        else:
            h = tl.load(chunks.between + (begin.to(tl.int64) + first - BT) * S.WIDE + cell, mask=ok, other=0.0)
    start = begin.to(tl.int64) + tl.maximum(first, 0)
    end = begin.to(tl.int64) + tl.minimum(first + BT, new)
    value, size, b_t, c_t = _token(x, dt, b, c, start, end, channel, n, c_ok, n_ok, C, N)
    for t in range((end - start).to(tl.int32)):
        row = start + t
        next_value, next_size, next_b, next_c = _token(x, dt, b, c, row + 1, end, channel, n, c_ok, n_ok, C, N)
        step = softplus(size)
        h = tl.exp(step[:, None] * decay) * h + (step * value)[:, None] * b_t[None, :]
        if WHAT == "ends":
            total += step
        else:
            out = tl.sum(h * c_t[None, :], 1) + skip * value
            if GATE:
                out *= activate(tl.load(z + row * C + channel, mask=c_ok, other=0.0).to(tl.float32), "silu")
            tl.store(y + row * C + channel, out.to(y.dtype.element_ty), mask=c_ok)
        value, size, b_t, c_t = next_value, next_size, next_b, next_c
    if WHAT == "ends":
        p_end = chunks.between + (begin.to(tl.int64) + first) * S.WIDE
        if first <= 0:
            p_end = p_first
        tl.store(p_end + cell, h, mask=ok)
        tl.store(p_end + C * N + channel, total, mask=c_ok)
    elif first + BT > new:
        tl.store(p_state, h, mask=ok)


@triton.jit
def scan1_join(a, sequences, state_slots, state, chunks, S: tl.constexpr):
    """Adds the state before each chunk, decayed, to what the chunk adds; the last is the sequence's own if whole."""
    seq = tl.program_id(0)
    channel = tl.program_id(1) * S.BC + tl.arange(0, S.BC)
    n = tl.arange(0, S.BN)
    c_ok = channel < S.C
    ok = c_ok[:, None] & (n < S.N)[None, :]
    begin = tl.load(sequences.query_start + seq)
    new = tl.load(sequences.query_start + seq + 1) - begin
    past = tl.load(sequences.kv_len + seq) - new
    if new < 2:
        return
    cell = channel[:, None] * S.N + n[None, :]
    p_state = state + tl.load(state_slots + seq).to(tl.int64) * (S.C * S.N) + cell
    h = tl.load(p_state, mask=ok & (past + 0 * n > 0)[None, :], other=0.0)
    decay = tl.load(a + cell, mask=ok, other=0.0)
    first = 0 - past % S.BT
    p_end = chunks.firsts + seq.to(tl.int64) * (2 * S.C * S.N + S.C)
    tl.store(p_end + S.C * S.N + S.C + cell, h, mask=ok)
    added = tl.load(p_end + cell, mask=ok & (first + S.BT + 0 * n <= new)[None, :], other=0.0)
    total = tl.load(p_end + S.C * S.N + channel, mask=c_ok & (first + S.BT + 0 * channel <= new), other=0.0)
    for at in range(first, new - S.BT + 1, S.BT):
        p_next = chunks.between + (begin.to(tl.int64) + at + S.BT) * S.WIDE
        next_added = tl.load(p_next + cell, mask=ok & (at + 2 * S.BT + 0 * n <= new)[None, :], other=0.0)
        next_total = tl.load(p_next + S.C * S.N + channel, mask=c_ok & (at + 2 * S.BT + 0 * channel <= new), other=0.0)
        h = tl.exp(decay * total[:, None]) * h + added
        tl.store(p_end + cell, h, mask=ok)
        p_end, added, total = p_next, next_added, next_total
    if (past + new) % S.BT == 0:
        tl.store(p_state, h, mask=ok)


def build_scan1(site: Site, node: Node) -> Launch:
    """SCAN1: x, dt `[T, channels]`, b, c `[T, n_state]`, a `[channels, n_state]`, state `[slots, channels, n_state]`.

    SCAN1_GATE: the same behind z `[T, channels]`.
    """
    spec: Scan1Spec = node.spec
    gate = node.op is SCAN1_GATE
    *before, x, dt, b, c, a, d, query_start, kv_len, slots, state = node.inputs
    rows = [site.slot(i) for i in (*before, x, dt, b, c)]  # type: ignore[arg-type]
    weights = [site.vector(i) for i in (a, d)]  # type: ignore[arg-type]
    starts = [site.slot(i) for i in (query_start, kv_len, slots)]  # type: ignore[arg-type]
    states, target = site.state(state), site.slot(node.outputs[0])  # type: ignore[arg-type]
    wide = power_of_two(spec.n_state)
    channels = min(power_of_two(spec.channels), max(1, _STATES // wide))
    blocks = cdiv(spec.channels, channels)
    size = spec.channels * (spec.n_state + 1)
    between, firsts = site.scratch("T", cdiv(size, _CHUNK)), site.scratch("S", size + spec.channels * spec.n_state)
    chunk = _ALL if site.deterministic else _CHUNK
    shape = Shape(spec.channels, spec.n_state, channels, wide, chunk, cdiv(size, _CHUNK))

    def run(batch: Batch) -> None:
        z, x, dt, b, c = [r.tensor for r in rows] if gate else [target.tensor, *(r.tensor for r in rows)]
        shared: dict[str, Any] = {
            "a": weights[0], "sequences": Sequences(starts[0].tensor, starts[1].tensor), "state_slots": starts[2].tensor,
            "state": states,
            "chunks": Chunks(between.tensor, firsts.tensor), "S": shape,
        }  # fmt: skip

        def scan(items: int, what: str) -> None:
            site.launch(
                scan1_rows, (items, blocks), y=target.tensor, z=z, x=x, dt=dt, b=b, c=c, d=weights[1], seqs=batch.S,
                WHAT=what, GATE=gate, **shared,
            )  # fmt: skip

        if site.deterministic:  # a chunk's sums, and where it is cut, would be seen in the last bits
            scan(batch.S, "all")
            return
        if batch.prefill:
            items = batch.T // _CHUNK + 2 * batch.S
            scan(items, "ends")
            site.launch(scan1_join, (batch.S, blocks), **shared)
            scan(items, "rows")
        if batch.decode:
            scan(batch.S, "steps")

    return run


IMPLEMENTATIONS = (
    Implementation(SCAN1, "chunks of tokens, in order", build_scan1),
    Implementation(SCAN1_GATE, "chunks of tokens, in order", build_scan1),
)
