"""Recurrent mixers: causal convolution and the selective scans of Mamba-1 and Mamba-2, with state in slots, float32.

A sequence whose keys are all new starts from zero, whatever its slot holds. A scan here is one program for a block of
channels of a sequence, which keeps the state in registers and takes one token after the other: exact and independent of the
batch. The next token is loaded while the state takes this one: its way from memory is longer than its arithmetic.
Prompts in Mamba-2 take the chunks of ssd.py instead, except in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

from quarrel.ops.contract import ConstRef, Operand
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.ops.state import CONV, SCAN2, ConvSpec, Scan2Spec
from quarrel.triton_backend.attention.decode import find
from quarrel.triton_backend.elementwise.activation import activate
from quarrel.triton_backend.recurrent.records import Heads, Stored
from quarrel.triton_backend.recurrent.ssd import Chunks, softplus, takes
from quarrel.triton_backend.runtime.arrays import Slot
from quarrel.triton_backend.runtime.launch import cdiv, power_of_two
from quarrel.triton_backend.runtime.site import Batch, Launch, Site, starts_early

_CHANNELS = 128
_TOKENS = 16
_STEP = 256  # channels to a program of conv_step
# State values to a scan program, 8 a thread. On an H200, 2048 tokens of 64 heads of 64 x 128 take 0.91 ms with these, 1.02
# with twice and 1.19 with half as many; of 5120 channels of 16, 0.97, 1.07 and 0.99.
_STATES = 1024
_ALL = 1 << 30


@triton.jit(do_not_specialize=["seqs"])
def conv_rows(
    y, x, weight, bias, sequences, state_slots, state, seqs, C: tl.constexpr, W: tl.constexpr, BT: tl.constexpr,
    BC: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Causal convolution of each channel with W taps, then an activation. Grid (room for tiles of BT tokens, C / BC).

    y, x    act `[T, C]`
    weight  float32 `[C, W]`; bias: float32 `[C]`
    sequences, state_slots  as in `records.py`
    state   float32 `[slots, W - 1, C]`, the rows before a sequence's first new one; `conv_state` renews it
    """
    item = tl.program_id(0)
    seq = find(sequences.query_start, seqs, item, BT)
    begin = tl.load(sequences.query_start + seq)
    new = tl.load(sequences.query_start + seq + 1) - begin
    tile = item - (begin // BT + seq)
    if tile * BT >= new:
        return
    past = tl.load(sequences.kv_len + seq) - new
    slot = tl.load(state_slots + seq).to(tl.int64)
    local = tl.arange(0, BT)[:, None]
    channel = tl.program_id(1) * BC + tl.arange(0, BC)[None, :]
    ok = (tile * BT + local < new) & (channel < C)
    c_ok = channel < C
    first = begin.to(tl.int64) + tile * BT
    p_x = x + first * C
    acc = tl.zeros([BT, BC], tl.float32) + tl.load(bias + channel, mask=c_ok, other=0.0)
    for j in tl.static_range(W):
        back = j - (W - 1)
        tap = tl.load(weight + channel * W + j, mask=c_ok, other=0.0)
        if tile * BT >= W - 1:
            acc += tl.load(p_x + (local + back) * C + channel, mask=ok, other=0.0).to(tl.float32) * tap
        else:
            at = tile * BT + local + back  # before the sequence's first new token lies the state
            from_state = ok & (at < 0) & (past + 0 * at > 0)
            old = tl.load(state + (slot * (W - 1) + at + W - 1) * C + channel, mask=from_state, other=0.0)
            value = tl.load(p_x + (local + back) * C + channel, mask=ok & (at >= 0), other=0.0).to(tl.float32)
            acc += tl.where(at < 0, old, value) * tap
    tl.store(y + first * C + local * C + channel, activate(acc, KIND).to(y.dtype.element_ty), mask=ok)


@triton.jit
def conv_state(
    x, sequences, state_slots, state, C: tl.constexpr, W: tl.constexpr, BC: tl.constexpr, LEAST: tl.constexpr,
    BW: tl.constexpr,
):  # fmt: skip
    """The last W - 1 rows of sequences with LEAST new tokens or more, into the state of `conv_rows`."""
    # A second launch, once nobody reads the old rows; here all threads read before any writes.
    seq = tl.program_id(0)
    begin = tl.load(sequences.query_start + seq)
    new = tl.load(sequences.query_start + seq + 1) - begin
    if new < LEAST:
        return
    past = tl.load(sequences.kv_len + seq) - new
    slot = tl.load(state_slots + seq).to(tl.int64)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)[None, :]
    j = tl.arange(0, BW)[:, None]
    ok = (channel < C) & (j < W - 1)
    at = new + j - (W - 1)
    from_state = ok & (at < 0) & (past + 0 * at > 0)
    old = tl.load(state + (slot * (W - 1) + new + j) * C + channel, mask=from_state, other=0.0)
    value = tl.load(x + (begin.to(tl.int64) + at) * C + channel, mask=ok & (at >= 0), other=0.0).to(tl.float32)
    tl.debug_barrier()
    tl.store(state + (slot * (W - 1) + j) * C + channel, tl.where(at < 0, old, value), mask=ok)


@triton.jit
def conv_before(channel, weight, bias, sequences, state_slots, state, seq, C: tl.constexpr, W: tl.constexpr):
    """What the rows before a sequence's one new token add to some channels of the convolution: the token's row, where its
    channels' state lies, which channels have a token and which of those a state, the sum, and the new row's tap."""
    row = tl.load(sequences.query_start + seq).to(tl.int64)
    single = tl.load(sequences.query_start + seq + 1) - row == 1
    past = tl.load(sequences.kv_len + seq) - 1
    slot = tl.load(state_slots + seq).to(tl.int64)
    ok = (channel < C) & (row * 0 + single + 0 * channel > 0)
    known = ok & (past + 0 * channel > 0)
    acc = tl.load(bias + channel, mask=ok, other=0.0)
    p_state = state + slot * (W - 1) * C + channel
    for j in tl.static_range(W - 1):
        acc += tl.load(p_state + j * C, mask=known, other=0.0) * tl.load(weight + channel * W + j, mask=ok, other=0.0)
    return row, p_state, ok, known, acc, tl.load(weight + channel * W + W - 1, mask=ok, other=0.0)


@triton.jit
def conv_renew(p_state, new, ok, known, C: tl.constexpr, W: tl.constexpr):
    """Moves the rows of some channels up by one. A thread has all of its channels' rows before it writes any."""
    for j in tl.static_range(W - 2):
        tl.store(p_state + j * C, tl.load(p_state + (j + 1) * C, mask=known, other=0.0), mask=ok)
    tl.store(p_state + (W - 2) * C, new, mask=ok)


@triton.jit
def conv_step(
    y, x, weight, bias, sequences, state_slots, state, C: tl.constexpr, W: tl.constexpr, BC: tl.constexpr,
    KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`conv_rows` and `conv_state` of the sequences with one new token, in one launch. Grid (C / BC, sequences)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    channel = tl.program_id(0) * BC + tl.arange(0, BC)
    seq = tl.program_id(1)
    row, p_state, ok, known, acc, tap = conv_before(channel, weight, bias, sequences, state_slots, state, seq, C, W)
    if PDL:
        tl.extra.cuda.gdc_wait()
    new = tl.load(x + row * C + channel, mask=ok, other=0.0).to(tl.float32)
    tl.store(y + row * C + channel, activate(acc + new * tap, KIND).to(y.dtype.element_ty), mask=ok)
    conv_renew(p_state, new, ok, known, C, W)


@triton.jit
def _scan2_token(p_x, p_b, p_dt, row, end, p, n, p_ok, n_ok, WIDTH: tl.constexpr, HEADS: tl.constexpr, GN: tl.constexpr):
    # Blocks of conditions throughout: the interpreter makes an integer of a scalar one and a block.
    n_ok = n_ok & (row + 0 * n < end)
    x = tl.load(p_x + row * WIDTH, mask=p_ok & (row + 0 * p < end), other=0.0).to(tl.float32)
    b = tl.load(p_b + row * WIDTH, mask=n_ok, other=0.0).to(tl.float32)
    c = tl.load(p_b + row * WIDTH + GN, mask=n_ok, other=0.0).to(tl.float32)
    return x, b, c, tl.load(p_dt + row * HEADS, mask=row < end, other=0.0).to(tl.float32)


@triton.jit
def scan2_rows(
    y, xbc, dt, dt_bias, a, d, sequences, state_slots, state, S: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
    LEAST: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """The scan of Mamba-2, a token after the other, of sequences with LEAST to MOST new tokens.

    Grid (sequences, heads, head_dim / BP). WIDTH = heads * head_dim + 2 * groups * n_state.

    y      act or float32 `[T, heads * head_dim]`
    xbc    act `[T, WIDTH]`; dt: act `[T, heads]`
    dt_bias, a, d           float32 `[heads]`
    sequences, state_slots  as in `records.py`
    state  float32 `[slots, heads, head_dim, n_state]`
    """
    seq = tl.program_id(0)
    head = tl.program_id(1)
    INNER: tl.constexpr = S.HEADS * S.DIM
    WIDTH: tl.constexpr = INNER + 2 * S.GROUPS * S.N
    begin = tl.load(sequences.query_start + seq)
    new = tl.load(sequences.query_start + seq + 1) - begin
    if (new < LEAST) | (new > MOST):
        return
    past = tl.load(sequences.kv_len + seq) - new
    p = tl.program_id(2) * BP + tl.arange(0, BP)
    n = tl.arange(0, BN)
    p_ok, n_ok = p < S.DIM, n < S.N
    at = ((tl.load(state_slots + seq).to(tl.int64) * S.HEADS + head) * S.DIM + p)[:, None] * S.N + n[None, :]
    ok = p_ok[:, None] & n_ok[None, :]
    h = tl.load(state + at, mask=ok & (past + 0 * n > 0)[None, :], other=0.0)  # [BP, BN]
    decay, skip, shift = tl.load(a + head), tl.load(d + head), tl.load(dt_bias + head)
    p_x = xbc + head * S.DIM + p
    p_b = xbc + INNER + head // (S.HEADS // S.GROUPS) * S.N + n
    p_dt = dt + head
    first = tl.cast(begin, tl.int64)
    end = first + new
    x, b, c, size = _scan2_token(p_x, p_b, p_dt, first, end, p, n, p_ok, n_ok, WIDTH, S.HEADS, S.GROUPS * S.N)
    for t in range(new):
        row = first + t
        next_x, next_b, next_c, next_size = _scan2_token(
            p_x, p_b, p_dt, row + 1, end, p, n, p_ok, n_ok, WIDTH, S.HEADS, S.GROUPS * S.N
        )
        step = softplus(size + shift)
        h = tl.exp(step * decay) * h + (step * x)[:, None] * b[None, :]
        out = tl.sum(h * c[None, :], 1) + skip * x
        tl.store(y + row * INNER + head * S.DIM + p, out.to(y.dtype.element_ty), mask=p_ok)
        x, b, c, size = next_x, next_b, next_c, next_size
    tl.store(state + at, h, mask=ok & (new + 0 * n > 0)[None, :])


def conv_prompts(site: Site, spec: ConvSpec, batch: Batch, y: Slot, x: Slot, stored: Stored, least: int) -> None:
    """Two launches: the rows, then the state of the sequences with at least `least` new tokens."""
    blocks = cdiv(spec.channels, _CHANNELS)
    weight, bias = stored.weights
    shared = {**stored.sequences(), "x": x.tensor, "state": stored.state, "C": spec.channels, "W": spec.width}
    shared |= {"BC": _CHANNELS}
    site.launch(
        conv_rows, (batch.T // _TOKENS + batch.S, blocks), y=y.tensor, weight=weight, bias=bias, seqs=batch.S, BT=_TOKENS,
        KIND=spec.activation, **shared,
    )  # fmt: skip
    site.launch(conv_state, (batch.S, blocks), LEAST=least, BW=power_of_two(spec.width - 1), **shared)


def conv_steps(site: Site, spec: ConvSpec, batch: Batch, y: Slot, x: Slot, stored: Stored) -> None:
    """One launch: rows and state of the sequences with one new token."""
    weight, bias = stored.weights
    site.launch(
        conv_step, (cdiv(spec.channels, _STEP), batch.S), y=y.tensor, x=x.tensor, weight=weight, bias=bias,
        **stored.sequences(), state=stored.state, C=spec.channels, W=spec.width, BC=_STEP, KIND=spec.activation,
        early=starts_early(site),
    )  # fmt: skip


def conv_weights(spec: ConvSpec, weights: Sequence[Operand]) -> tuple[Operand, Operand]:
    """Taps and bias at the beginning of `weights`; zeros for a convolution without a bias."""
    return weights[0], weights[1] if spec.bias else ConstRef("no_bias", (0.0,) * spec.channels)


def build_conv(site: Site, node: Node) -> Launch:
    """CONV: x `[T, channels]`, taps `[channels, width]`, bias `[channels]` if any, state `[slots, width - 1, channels]`."""
    x, target = site.slot(node.inputs[0]), site.slot(node.outputs[0])  # type: ignore[arg-type]
    stored = Stored.of(site, conv_weights(node.spec, node.inputs[1:]), node.inputs[-4:])

    def run(batch: Batch) -> None:
        if batch.prefill or site.deterministic:
            conv_prompts(site, node.spec, batch, target, x, stored, 1 if site.deterministic else 2)
        if batch.decode and not site.deterministic:  # after the rest, which writes nothing of use to these rows
            conv_steps(site, node.spec, batch, target, x, stored)

    return run


def build_scan2(site: Site, node: Node) -> Launch:
    """SCAN2: xbc `[T, width]`, dt `[T, heads]`, three `[heads]`, state `[slots, heads, head_dim, n_state]`."""
    spec: Scan2Spec = node.spec
    xbc, dt, target = (site.slot(i) for i in (*node.inputs[:2], node.outputs[0]))  # type: ignore[arg-type]
    stored = Stored.of(site, node.inputs[2:5], node.inputs[5:])
    return Scan2(site, spec, stored).launch(target, xbc, dt)


class Scan2:
    """Chunks for prompts where they suit, else and for steps one token after the other."""

    def __init__(self, site: Site, spec: Scan2Spec, stored: Stored) -> None:
        self._site, self._spec, self._stored = site, spec, stored
        self._chunks = Chunks(site, spec, stored) if takes(spec, site.compute) else None

    def launch(self, y: Slot, xbc: Slot, dt: Slot) -> Launch:
        def run(batch: Batch) -> None:
            if batch.prefill or self._site.deterministic:
                self.prompts(batch, y, xbc, dt)
            if batch.decode and not self._site.deterministic:
                self._tokens(batch, y, xbc, dt, 1, 1)

        return run

    def prompts(self, batch: Batch, y: Slot, xbc: Slot, dt: Slot) -> None:
        """The sequences with several new tokens; all, where a row's bits may not depend on how a prompt is cut."""
        if self._site.deterministic:
            self._tokens(batch, y, xbc, dt, 1, _ALL)
        elif self._chunks is not None:
            self._chunks(batch, y, xbc, dt)
        else:
            self._tokens(batch, y, xbc, dt, 2, _ALL)

    def _tokens(self, batch: Batch, y: Slot, xbc: Slot, dt: Slot, least: int, most: int) -> None:
        spec, stored = self._spec, self._stored
        states = power_of_two(spec.n_state)
        channels = min(power_of_two(spec.head_dim), max(1, _STATES // states))
        dt_bias, a, d = stored.weights
        self._site.launch(
            scan2_rows, (batch.S, spec.n_heads, cdiv(spec.head_dim, channels)), y=y.tensor, xbc=xbc.tensor, dt=dt.tensor,
            dt_bias=dt_bias, a=a, d=d, **stored.sequences(), state=stored.state,
            S=Heads(spec.n_heads, spec.head_dim, spec.n_groups, spec.n_state), BP=channels, BN=states, LEAST=least,
            MOST=most,
        )  # fmt: skip


IMPLEMENTATIONS = (
    Implementation(CONV, "rows, then state", build_conv),
    Implementation(SCAN2, "chunks, or token by token", build_scan2),
)
