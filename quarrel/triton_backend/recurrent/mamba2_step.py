"""A whole Mamba-2 mixer. One new token of each sequence is one launch: convolution, scan, skip, gate and grouped norm.

A program of `mamba2_step` takes some channels of a head of a sequence. Whichever program of a group comes to its end last,
by an integer counter, normalises the group's channels, which the others left in memory before they counted; then it moves
the convolution's rows of the group's B and C, which all of them have read. Which program that is changes no sum.
Prompts take the launches of conv, the chunks and the norm; rows of a step are computed alike beside them and without them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quarrel.ops.mixer import MAMBA2_MIX, Mamba2MixSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.triton_backend.elementwise.activation import activate
from quarrel.triton_backend.elementwise.norm import gated_norm
from quarrel.triton_backend.formats.int8x2 import store_int8x2
from quarrel.triton_backend.recurrent.conv_scan2 import Scan2, conv_prompts, conv_weights
from quarrel.triton_backend.recurrent.records import Heads, Mamba2Weights, Stored
from quarrel.triton_backend.recurrent.ssd import softplus
from quarrel.triton_backend.runtime.arrays import DTYPES, Output
from quarrel.triton_backend.runtime.launch import cdiv, power_of_two
from quarrel.triton_backend.runtime.site import Batch, Launch, Site, starts_early

_TILE, _TILE_MANY = (2048, 4), (4096, 4)  # state values of a head to a program, warps: of few sequences, of _MANY and more
_MANY = 16
_COLUMNS = 4096  # of a group that the norm takes at a time


@triton.jit
def _conv_old(taps, offset, conv_state, slot, known, channel, ok, C: tl.constexpr, W: tl.constexpr):
    """What the rows in the state add to the convolution at the sequence's only new row, and that row's tap."""
    acc = tl.load(offset + channel, mask=ok, other=0.0)
    for j in tl.static_range(W - 1):
        old = tl.load(conv_state + (slot * (W - 1) + j) * C + channel, mask=ok & known, other=0.0)
        acc += old * tl.load(taps + channel * W + j, mask=ok, other=0.0)
    return acc, tl.load(taps + channel * W + W - 1, mask=ok, other=0.0)


@triton.jit
def _conv_new(acc, tap, xbc, row, channel, ok, C: tl.constexpr):
    return activate(acc + tl.load(xbc + row * C + channel, mask=ok, other=0.0).to(tl.float32) * tap, "silu")


@triton.jit
def _conv_shift(xbc, conv_state, row, slot, known, channel, ok, C: tl.constexpr, W: tl.constexpr):
    """Moves the rows of some channels up by one. Several threads may hold one value: all read before any writes."""
    for j in tl.static_range(W - 1):
        if j < W - 2:
            value = tl.load(conv_state + (slot * (W - 1) + j + 1) * C + channel, mask=ok & known, other=0.0)
        else:
            value = tl.load(xbc + row * C + channel, mask=ok, other=0.0).to(tl.float32)
        tl.debug_barrier()
        tl.store(conv_state + (slot * (W - 1) + j) * C + channel, value, mask=ok)


@triton.jit
def mamba2_step(
    output, gated_y, counts, xbc, dt, z, weights, sequences, state_slots, conv_state, state, eps, S: tl.constexpr,
    W: tl.constexpr, PARTS: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, FORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A Mamba-2 mixer for the sequences with one new token; others are left alone.

    Grid (heads * PARTS, sequences). `weights` and `sequences` are records (`records.py`), `output` is one too
    (`runtime/arrays.py`); T counts the step's rows, WIDTH = heads * head_dim + 2 * groups * n_state.

    output      `[T, heads * head_dim]`
    gated_y     float32 `[sequences, heads * head_dim]`, before its norm: what programs leave for the last of their group
    counts      int32 `[sequences, groups]`, programs that are done; zero before and after
    xbc         act `[T, WIDTH]`, before the convolution: x, then B and C of each group
    dt          act `[T, heads]`; z: act `[T, heads * head_dim]`, the gate
    state_slots int32 `[sequences]`
    conv_state  float32 `[slots, W - 1, WIDTH]`, the rows before the new one
    state       float32 `[slots, heads, head_dim, n_state]`
    W           taps of the convolution
    PARTS       programs of a head, BP channels each; BN: n_state, padded; BC: columns that the norm takes at a time
    """
    # Nothing but the same kernel of the step before writes the states, so they are on their way before the wait.
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    seq = tl.program_id(1)
    head = tl.program_id(0) // PARTS
    PER: tl.constexpr = S.HEADS // S.GROUPS
    INNER: tl.constexpr = S.HEADS * S.DIM
    WIDTH: tl.constexpr = INNER + 2 * S.GROUPS * S.N
    K: tl.constexpr = PER * S.DIM
    group = head // PER
    row = tl.load(sequences.query_start + seq).to(tl.int64)
    if tl.load(sequences.query_start + seq + 1) - row != 1:
        if PDL:
            tl.extra.cuda.gdc_wait()
        return
    slot = tl.load(state_slots + seq).to(tl.int64)
    p = (tl.program_id(0) % PARTS) * BP + tl.arange(0, BP)
    n = tl.arange(0, BN)
    p_ok, n_ok = p < S.DIM, n < S.N
    ok = p_ok[:, None] & n_ok[None, :]
    past = tl.load(sequences.kv_len + seq) - 1
    at = ((slot * S.HEADS + head) * S.DIM + p)[:, None] * S.N + n[None, :]
    h = tl.load(state + at, mask=ok & (past + 0 * n > 0)[None, :], other=0.0)  # [BP, BN]
    channel = head * S.DIM + p
    b_channel = INNER + group * S.N + n
    p_known, n_known = past + 0 * p > 0, past + 0 * n > 0
    c_channel = b_channel + S.GROUPS * S.N
    x, x_tap = _conv_old(weights.taps, weights.offset, conv_state, slot, p_known, channel, p_ok, WIDTH, W)
    b, b_tap = _conv_old(weights.taps, weights.offset, conv_state, slot, n_known, b_channel, n_ok, WIDTH, W)
    c, c_tap = _conv_old(weights.taps, weights.offset, conv_state, slot, n_known, c_channel, n_ok, WIDTH, W)
    shift, decay, skip = tl.load(weights.dt_bias + head), tl.load(weights.a + head), tl.load(weights.d + head)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = _conv_new(x, x_tap, xbc, row, channel, p_ok, WIDTH)
    b = _conv_new(b, b_tap, xbc, row, b_channel, n_ok, WIDTH)
    c = _conv_new(c, c_tap, xbc, row, c_channel, n_ok, WIDTH)
    gate = tl.load(z + row * INNER + channel, mask=p_ok, other=0.0).to(tl.float32)
    size = tl.load(dt + row * S.HEADS + head).to(tl.float32)
    # All loads stand above the first store, which the compiler would not move them over.
    step = softplus(size + shift)
    h = tl.exp(step * decay) * h + (step * x)[:, None] * b[None, :]
    tl.store(state + at, h, mask=ok)
    y = tl.sum(h * c[None, :], 1) + skip * x
    tl.store(gated_y + seq.to(tl.int64) * INNER + channel, y * activate(gate, "silu"), mask=p_ok)
    _conv_shift(xbc, conv_state, row, slot, p_known, channel, p_ok, WIDTH, W)
    tl.debug_barrier()
    count = tl.atomic_add(counts + seq * S.GROUPS + group, 1, sem="acq_rel", scope="gpu")
    if count == PER * PARTS - 1:
        tl.store(counts + seq * S.GROUPS + group, 0)
        column = tl.arange(0, BC)
        p_y = gated_y + seq.to(tl.int64) * INNER + group * K
        square = tl.zeros([BC], tl.float32)
        for start in tl.static_range(0, K, BC):
            u = tl.load(p_y + start + column, mask=start + column < K, other=0.0, cache_modifier=".cg")
            square += u * u
        scale = 1.0 / tl.sqrt(tl.sum(square, 0) / K + eps)
        for start in tl.static_range(0, K, BC):
            inside = start + column < K
            u = tl.load(p_y + start + column, mask=inside, other=0.0, cache_modifier=".cg")
            weight = tl.load(weights.gain + group * K + start + column, mask=inside, other=0.0)
            u = u * scale * weight
            if FORM != "int8x2":
                tl.store(
                    output.plain + row * INNER + group * K + start + column,
                    u.to(output.plain.dtype.element_ty),
                    mask=inside,
                )
            if FORM != "plain":  # a step of one row: row is 0
                block = (group * K + start) // 32 + tl.arange(0, BC // 32)
                inside = start // 32 + tl.arange(0, BC // 32) < K // 32
                store_int8x2(output.int8x2, tl.reshape(u, (BC // 32, 2, 16)), block, inside, INNER)
        _conv_shift(xbc, conv_state, row, slot, n_known, b_channel, n_ok, WIDTH, W)
        _conv_shift(xbc, conv_state, row, slot, n_known, c_channel, n_ok, WIDTH, W)


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
    counts = site.zeros("S", spec.n_groups)
    states = power_of_two(spec.n_state)

    def run(batch: Batch) -> None:
        if batch.prefill or site.deterministic:
            conv_prompts(site, spec.conv, batch, mixed, rows, conv, 1 if site.deterministic else 2)
            prompts.prompts(batch, y, mixed, steps)
            gated_norm(site, spec.norm, batch.T, target, y, gate, gain)
        if batch.decode and not site.deterministic:  # after the rest, which writes nothing of use to these rows
            form = "plain" if int8x2 is None or batch.T > 1 else "both" if plain else "int8x2"
            out = target.tensor
            values, warps = _TILE if batch.S < _MANY else _TILE_MANY
            channels = min(power_of_two(spec.head_dim), max(1, values // states))
            parts = cdiv(spec.head_dim, channels)
            site.launch(
                mamba2_step, (spec.n_heads * parts, batch.S), output=Output(out, out if form == "plain" else int8x2),
                gated_y=gated_y.tensor, counts=counts.tensor, xbc=rows.tensor, dt=steps.tensor, z=gate.tensor,
                weights=Mamba2Weights(*conv.weights, *scan.weights, gain), **scan.sequences(),
                conv_state=conv.state, state=scan.state, eps=spec.eps, S=shape, W=spec.taps, PARTS=parts, BP=channels,
                BN=states, BC=min(_COLUMNS, power_of_two(spec.group_width)), FORM=form, warps=warps,
                early=starts_early(site),
            )  # fmt: skip

    return run


IMPLEMENTATIONS = (Implementation(MAMBA2_MIX, "one launch a step, chunks for prompts", build_mamba2),)
