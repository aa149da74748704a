"""A whole Mamba-2 mixer. One new token of each sequence is two launches: convolution, scan, skip and gate; then the norm.

A program of `mamba2_step` takes some channels of a head of a sequence, and leaves when it has stored them. All of them read
the convolution's rows of their group's B and C, so `mamba2_norm`, a program a group, moves those. Of many sequences the
convolution is a launch of its own, which moves all rows.
Prompts take the launches of conv, the chunks and the norm; rows of a step are computed alike beside them and without them.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from quarrel.ops.mixer import MAMBA2_MIX, Mamba2MixSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.triton_backend.elementwise.activation import activate
from quarrel.triton_backend.elementwise.norm import gated_norm
from quarrel.triton_backend.formats.int8x2 import store_int8x2
from quarrel.triton_backend.recurrent.conv_scan2 import Scan2, conv_prompts, conv_steps, conv_weights
from quarrel.triton_backend.recurrent.records import Heads, Mamba2Weights, Stored
from quarrel.triton_backend.recurrent.ssd import softplus
from quarrel.triton_backend.runtime.arrays import DTYPES, Output
from quarrel.triton_backend.runtime.launch import cdiv, power_of_two
from quarrel.triton_backend.runtime.site import Batch, Launch, Site, starts_early

_TILE, _TILE_MANY = (2048, 4), (4096, 4)  # state values of a head to a program, warps: of few sequences, of _MANY and more
_MANY = 16


@triton.jit
def _rows_before(conv_state, slot, known, channel, ok, C: tl.constexpr, W: tl.constexpr):
    """The W - 1 rows of some channels in the state."""
    rows = ()
    for j in tl.static_range(W - 1):
        rows += (tl.load(conv_state + (slot * (W - 1) + j) * C + channel, mask=ok & known, other=0.0),)
    return rows


@triton.jit
def _conv_old(rows, taps, offset, channel, ok, W: tl.constexpr):
    """What these rows add to the convolution at the sequence's only new row, and that row's tap."""
    acc = tl.load(offset + channel, mask=ok, other=0.0)
    for j in tl.static_range(W - 1):
        acc += rows[j] * tl.load(taps + channel * W + j, mask=ok, other=0.0)
    return acc, tl.load(taps + channel * W + W - 1, mask=ok, other=0.0)


@triton.jit
def _conv_shift(conv_state, rows, new, slot, channel, ok, C: tl.constexpr, W: tl.constexpr):
    """Moves the rows of some channels up by one. Several threads may hold one value: all have read before any writes."""
    tl.debug_barrier()
    for j in tl.static_range(W - 1):
        if j < W - 2:
            tl.store(conv_state + (slot * (W - 1) + j) * C + channel, rows[j + 1], mask=ok)
        else:
            tl.store(conv_state + (slot * (W - 1) + j) * C + channel, new, mask=ok)


@triton.jit
def mamba2_step(
    gated_y, xbc, dt, z, weights, sequences, state_slots, conv_state, state, S: tl.constexpr, W: tl.constexpr,
    PARTS: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A Mamba-2 mixer before its norm for the sequences with one new token; others are left alone.

    Grid (heads * PARTS, sequences). `weights` and `sequences` are records (`records.py`); T counts the step's rows,
    WIDTH = heads * head_dim + 2 * groups * n_state.

    gated_y     float32 `[sequences, heads * head_dim]`
    xbc         act `[T, WIDTH]`, before the convolution: x, then B and C of each group
    dt          act `[T, heads]`; z: act `[T, heads * head_dim]`, the gate
    state_slots int32 `[sequences]`
    conv_state  float32 `[slots, W - 1, WIDTH]`, the rows before the new one; those of B and C are only read
    state       float32 `[slots, heads, head_dim, n_state]`
    W           taps of the convolution
    PARTS       programs of a head, BP channels each; BN: n_state, padded
    """
    # Nothing but the launches of the step before write the states, so they are on their way before the wait.
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    seq = tl.program_id(1)
    head = tl.program_id(0) // PARTS
    PER: tl.constexpr = S.HEADS // S.GROUPS
    INNER: tl.constexpr = S.HEADS * S.DIM
    WIDTH: tl.constexpr = INNER + 2 * S.GROUPS * S.N
    group = head // PER
    row = tl.load(sequences.query_start + seq).to(tl.int64)
    end = tl.load(sequences.query_start + seq + 1)
    slot = tl.load(state_slots + seq).to(tl.int64)
    past = tl.load(sequences.kv_len + seq) - 1
    if end - row != 1:
        if PDL:
            tl.extra.cuda.gdc_wait()
        return
    p = (tl.program_id(0) % PARTS) * BP + tl.arange(0, BP)
    n = tl.arange(0, BN)
    p_ok, n_ok = p < S.DIM, n < S.N
    ok = p_ok[:, None] & n_ok[None, :]
    at = ((slot * S.HEADS + head) * S.DIM + p)[:, None] * S.N + n[None, :]
    h = tl.load(state + at, mask=ok & (past + 0 * n > 0)[None, :], other=0.0)  # [BP, BN]
    channel = head * S.DIM + p
    b_channel = INNER + group * S.N + n
    c_channel = b_channel + S.GROUPS * S.N
    p_known, n_known = past + 0 * p > 0, past + 0 * n > 0
    x_rows = _rows_before(conv_state, slot, p_known, channel, p_ok, WIDTH, W)
    x, x_tap = _conv_old(x_rows, weights.taps, weights.offset, channel, p_ok, W)
    b_rows = _rows_before(conv_state, slot, n_known, b_channel, n_ok, WIDTH, W)
    b, b_tap = _conv_old(b_rows, weights.taps, weights.offset, b_channel, n_ok, W)
    c_rows = _rows_before(conv_state, slot, n_known, c_channel, n_ok, WIDTH, W)
    c, c_tap = _conv_old(c_rows, weights.taps, weights.offset, c_channel, n_ok, W)
    shift, decay, skip = tl.load(weights.dt_bias + head), tl.load(weights.a + head), tl.load(weights.d + head)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x_new = tl.load(xbc + row * WIDTH + channel, mask=p_ok, other=0.0).to(tl.float32)
    b_new = tl.load(xbc + row * WIDTH + b_channel, mask=n_ok, other=0.0).to(tl.float32)
    c_new = tl.load(xbc + row * WIDTH + c_channel, mask=n_ok, other=0.0).to(tl.float32)
    gate = tl.load(z + row * INNER + channel, mask=p_ok, other=0.0).to(tl.float32)
    size = tl.load(dt + row * S.HEADS + head).to(tl.float32)
    # All loads stand above the first store, which the compiler would not move them over.
    x = activate(x + x_new * x_tap, "silu")
    b = activate(b + b_new * b_tap, "silu")
    c = activate(c + c_new * c_tap, "silu")
    step = softplus(size + shift)
    h = tl.exp(step * decay) * h + (step * x)[:, None] * b[None, :]
    tl.store(state + at, h, mask=ok)
    y = tl.sum(h * c[None, :], 1) + skip * x
    tl.store(gated_y + seq.to(tl.int64) * INNER + channel, y * activate(gate, "silu"), mask=p_ok)
    _conv_shift(conv_state, x_rows, x_new, slot, channel, p_ok, WIDTH, W)


@triton.jit
def mamba2_scan(
    gated_y, u, dt, z, weights, sequences, state_slots, state, S: tl.constexpr, PARTS: tl.constexpr, BP: tl.constexpr,
    BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`mamba2_step` behind the convolution of all channels, u act `[T, WIDTH]`: with nothing in registers but its part of
    the state, a multiprocessor has the parts of more programs on their way."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    seq = tl.program_id(1)
    head = tl.program_id(0) // PARTS
    INNER: tl.constexpr = S.HEADS * S.DIM
    WIDTH: tl.constexpr = INNER + 2 * S.GROUPS * S.N
    row = tl.load(sequences.query_start + seq).to(tl.int64)
    end = tl.load(sequences.query_start + seq + 1)
    slot = tl.load(state_slots + seq).to(tl.int64)
    past = tl.load(sequences.kv_len + seq) - 1
    if end - row != 1:
        if PDL:
            tl.extra.cuda.gdc_wait()
        return
    p = (tl.program_id(0) % PARTS) * BP + tl.arange(0, BP)
    n = tl.arange(0, BN)
    p_ok, n_ok = p < S.DIM, n < S.N
    ok = p_ok[:, None] & n_ok[None, :]
    at = ((slot * S.HEADS + head) * S.DIM + p)[:, None] * S.N + n[None, :]
    h = tl.load(state + at, mask=ok & (past + 0 * n > 0)[None, :], other=0.0)  # [BP, BN]
    shift, decay, skip = tl.load(weights.dt_bias + head), tl.load(weights.a + head), tl.load(weights.d + head)
    if PDL:
        tl.extra.cuda.gdc_wait()
    channel = head * S.DIM + p
    b_channel = INNER + head // (S.HEADS // S.GROUPS) * S.N + n
    x = tl.load(u + row * WIDTH + channel, mask=p_ok, other=0.0).to(tl.float32)
    b = tl.load(u + row * WIDTH + b_channel, mask=n_ok, other=0.0).to(tl.float32)
    c = tl.load(u + row * WIDTH + b_channel + S.GROUPS * S.N, mask=n_ok, other=0.0).to(tl.float32)
    gate = tl.load(z + row * INNER + channel, mask=p_ok, other=0.0).to(tl.float32)
    step = softplus(tl.load(dt + row * S.HEADS + head).to(tl.float32) + shift)
    h = tl.exp(step * decay) * h + (step * x)[:, None] * b[None, :]
    tl.store(state + at, h, mask=ok)
    y = tl.sum(h * c[None, :], 1) + skip * x
    tl.store(gated_y + seq.to(tl.int64) * INNER + channel, y * activate(gate, "silu"), mask=p_ok)


@triton.jit
def mamba2_norm(
    output, gated_y, xbc, gain, sequences, state_slots, conv_state, eps, S: tl.constexpr, W: tl.constexpr,
    BN: tl.constexpr, B: tl.constexpr, FORM: tl.constexpr, SHIFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Behind `mamba2_step`: its groups' norms, and with SHIFT the rows of their B and C moved up. Grid (groups, sequences).

    output  `[T, heads * head_dim]`, a record (`runtime/arrays.py`)
    gain    float32 `[heads * head_dim]`
    B       blocks of 32 channels, at least a group's
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    group, seq = tl.program_id(0), tl.program_id(1)
    INNER: tl.constexpr = S.HEADS * S.DIM
    WIDTH: tl.constexpr = INNER + 2 * S.GROUPS * S.N
    K: tl.constexpr = INNER // S.GROUPS
    row = tl.load(sequences.query_start + seq).to(tl.int64)
    end = tl.load(sequences.query_start + seq + 1)
    slot = tl.load(state_slots + seq).to(tl.int64)
    past = tl.load(sequences.kv_len + seq) - 1
    block = tl.arange(0, B)
    column = block[:, None, None] * 32 + tl.arange(0, 2)[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    inside = column < K
    channel = group * K + column
    weight = tl.load(gain + channel, mask=inside, other=0.0)
    if SHIFT:
        n = tl.arange(0, BN)
        n_ok = n < S.N
        known = past + 0 * n > 0
        b_channel = INNER + group * S.N + n
        c_channel = b_channel + S.GROUPS * S.N
        b_rows = _rows_before(conv_state, slot, known, b_channel, n_ok, WIDTH, W)
        c_rows = _rows_before(conv_state, slot, known, c_channel, n_ok, WIDTH, W)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if end - row != 1:
        return
    if SHIFT:
        b_new = tl.load(xbc + row * WIDTH + b_channel, mask=n_ok, other=0.0).to(tl.float32)
        c_new = tl.load(xbc + row * WIDTH + c_channel, mask=n_ok, other=0.0).to(tl.float32)
    u = tl.load(gated_y + seq.to(tl.int64) * INNER + channel, mask=inside, other=0.0)
    square = tl.sum(tl.sum(tl.sum(u * u, 2), 1), 0)
    u = u * (1.0 / tl.sqrt(square / K + eps)) * weight
    if FORM != "int8x2":
        tl.store(output.plain + row * INNER + channel, u.to(output.plain.dtype.element_ty), mask=inside)
    if FORM != "plain":  # a step of one row: row is 0
        store_int8x2(output.int8x2, u, group * (K // 32) + block, block < K // 32, INNER)
    if SHIFT:
        _conv_shift(conv_state, b_rows, b_new, slot, b_channel, n_ok, WIDTH, W)
        _conv_shift(conv_state, c_rows, c_new, slot, c_channel, n_ok, WIDTH, W)


def build_mamba2(site: Site, node: Node) -> Launch:
    """MAMBA2_MIX: xbc `[T, width]`, dt `[T, heads]`, z `[T, d_inner]`, five or six weights, two states, out like z."""
    spec: Mamba2MixSpec = node.spec
    xbc, dt, z, *weights, starts, keys, slots, conv_state, state = node.inputs
    ragged = (starts, keys, slots)
    rows, steps, gate = (site.slot(v) for v in (xbc, dt, z))  # type: ignore[arg-type]
    target = site.slot(node.outputs[0])
    whole = spec.group_width % 32 == 0
    int8x2, plain = site.int8x2_target(node.outputs[0]) if whole and not site.deterministic else (None, True)
    conv = Stored.of(site, conv_weights(spec.conv, weights), (*ragged, conv_state))
    scan = Stored.of(site, weights[-4:-1], (*ragged, state))
    gain = site.vector(weights[-1])  # type: ignore[arg-type]
    shape = Heads(spec.n_heads, spec.head_dim, spec.n_groups, spec.n_state)
    prompts = Scan2(site, spec.scan, scan)
    mixed = site.scratch("T", spec.width, DTYPES[site.compute])
    y = site.scratch("T", spec.d_inner)  # float32: what the norm brings back into range may lie outside float16's
    gated_y = site.scratch("S", spec.d_inner)
    states = power_of_two(spec.n_state)

    def run(batch: Batch) -> None:
        if batch.prefill or site.deterministic:
            conv_prompts(site, spec.conv, batch, mixed, rows, conv, 1 if site.deterministic else 2)
            prompts.prompts(batch, y, mixed, steps)
            gated_norm(site, spec.norm, batch.T, target, y, gate, gain)
        if batch.decode and not site.deterministic:  # after the rest, which writes nothing of use to these rows
            form = "plain" if int8x2 is None or batch.T > 1 else "both" if plain else "int8x2"
            out = target.tensor
            many = batch.S >= _MANY
            values, warps = _TILE_MANY if many else _TILE
            channels = min(power_of_two(spec.head_dim), max(1, values // states))
            parts = cdiv(spec.head_dim, channels)
            taken: dict[str, Any] = {
                "gated_y": gated_y.tensor, "S": shape, "BN": states, "early": starts_early(site), **scan.sequences(),
            }  # fmt: skip
            convolved: dict[str, Any] = {"xbc": rows.tensor, "conv_state": conv.state, "W": spec.taps}
            scanned: dict[str, Any] = {
                "dt": steps.tensor, "z": gate.tensor, "weights": Mamba2Weights(*conv.weights, *scan.weights),
                "state": scan.state, "PARTS": parts, "BP": channels, "warps": warps,
            }  # fmt: skip
            grid = (spec.n_heads * parts, batch.S)
            if many:
                conv_steps(site, spec.conv, batch, mixed, rows, conv)
                site.launch(mamba2_scan, grid, u=mixed.tensor, **scanned, **taken)
            else:
                site.launch(mamba2_step, grid, **scanned, **convolved, **taken)
            blocks = power_of_two(cdiv(spec.group_width, 32))
            site.launch(
                mamba2_norm, (spec.n_groups, batch.S), output=Output(out, out if form == "plain" else int8x2), gain=gain,
                eps=spec.eps, B=blocks, FORM=form, SHIFT=not many, warps=min(8, max(1, blocks // 16)), **convolved, **taken,
            )  # fmt: skip

    return run


IMPLEMENTATIONS = (Implementation(MAMBA2_MIX, "one launch a step, chunks for prompts", build_mamba2),)
