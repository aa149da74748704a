"""A whole mixer of a gated delta net: convolution; delta rule; norm and gate of every head.

One new token of each sequence is two launches. `conv_step` makes the rows of queries, keys and values; a program of
`delta_step` then streams some rows of a head's state once, in and out, and whichever program of a head comes to its end
last, by an integer counter, normalises and gates what the others left in memory before they counted. Which program that is
changes no sum. With the convolution in the second launch too, as in `mamba2_step.py`, every program made the query and the
key anew, which took longer than the state: 234 us for 128 sequences on an H200, of which 127 copy as many bytes.
Prompts take the launches of conv, the chunks and the norm.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quarrel.ops.delta import DELTA_MIX, DeltaMixSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.triton_backend.elementwise.activation import activate
from quarrel.triton_backend.formats.int8x2 import store_int8x2
from quarrel.triton_backend.recurrent.conv_scan2 import conv_prompts, conv_steps, conv_weights
from quarrel.triton_backend.recurrent.delta import Delta, delta_token, heads_of
from quarrel.triton_backend.recurrent.delta_chunks import key_of
from quarrel.triton_backend.recurrent.records import DeltaWeights, Stored
from quarrel.triton_backend.runtime.arrays import DTYPES, Output, Slot
from quarrel.triton_backend.runtime.launch import cdiv, power_of_two
from quarrel.triton_backend.runtime.site import Batch, Launch, Site, starts_early

_TILE = (2048, 4)  # state values to a program, 16 a thread; warps
_NORM = 2048  # values to a program of norm_gate_rows


@triton.jit
def delta_step(
    output, heads_y, counts, qkv, alpha, beta, z, weights, sequences, state_slots, state, eps, norm_eps, S: tl.constexpr,
    SCALE: tl.constexpr, PARTS: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, FORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The delta rule, norm and gate of the sequences with one new token; others are left alone.

    Grid (NV * PARTS, sequences). `weights` and `sequences` are records (`records.py`), `output` is one too
    (`runtime/arrays.py`); T counts the step's rows.

    output      `[T, NV * V]`
    heads_y     float32 `[sequences, NV * V]`, before the norm: what programs leave for the last of their head
    counts      int32 `[sequences, NV]`, programs that are done; zero before and after
    qkv         act `[T, 2 * NK * K + NV * V]`, behind the convolution
    alpha, beta act `[T, NV]`; z: act `[T, NV * V]`, the gate
    state_slots int32 `[sequences]`
    state       float32 `[slots, NV, V, K]`
    PARTS       programs of a head, BV rows each; BK: K, padded; BD: V, padded
    """
    # Nothing but the same kernel of the step before writes the state, so it is on its way before the wait.
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    seq = tl.program_id(1)
    head = tl.program_id(0) // PARTS
    KEYS: tl.constexpr = S.NK * S.K
    INNER: tl.constexpr = S.NV * S.V
    WIDTH: tl.constexpr = 2 * KEYS + INNER
    row = tl.load(sequences.query_start + seq).to(tl.int64)
    if tl.load(sequences.query_start + seq + 1) - row != 1:
        if PDL:
            tl.extra.cuda.gdc_wait()
        return
    slot = tl.load(state_slots + seq).to(tl.int64)
    p = (tl.program_id(0) % PARTS) * BV + tl.arange(0, BV)
    n = tl.arange(0, BK)
    p_ok, n_ok = p < S.V, n < S.K
    ok = p_ok[:, None] & n_ok[None, :]
    past = tl.load(sequences.kv_len + seq) - 1
    at = ((slot * S.NV + head) * S.V + p)[:, None] * S.K + n[None, :]
    m = tl.load(state + at, mask=ok & (past + 0 * n > 0)[None, :], other=0.0)  # [BV, BK]
    shift, decay = tl.load(weights.dt_bias + head), tl.load(weights.a + head)
    if PDL:
        tl.extra.cuda.gdc_wait()
    p_q = qkv + row * WIDTH + key_of(head, S) * S.K + n
    q = tl.load(p_q, mask=n_ok, other=0.0).to(tl.float32)
    k = tl.load(p_q + KEYS, mask=n_ok, other=0.0).to(tl.float32)
    v = tl.load(qkv + row * WIDTH + 2 * KEYS + head * S.V + p, mask=p_ok, other=0.0).to(tl.float32)
    size = tl.load(alpha + row * S.NV + head).to(tl.float32) + shift
    rate = tl.load(beta + row * S.NV + head).to(tl.float32)
    # All loads stand above the first store, which the compiler would not move them over.
    m, y = delta_token(m, q, k, v, size, rate, decay, eps, SCALE)
    tl.store(state + at, m, mask=ok)
    p_y = heads_y + seq.to(tl.int64) * INNER + head * S.V
    tl.store(p_y + p, y, mask=p_ok)
    tl.debug_barrier()
    count = tl.atomic_add(counts + seq * S.NV + head, 1, sem="acq_rel", scope="gpu")
    if count == PARTS - 1:
        tl.store(counts + seq * S.NV + head, 0)
        column = tl.arange(0, BD)
        inside = column < S.V
        there = row * INNER + head * S.V + column
        u = tl.load(p_y + column, mask=inside, other=0.0, cache_modifier=".cg")
        gate = tl.load(z + there, mask=inside, other=0.0).to(tl.float32)
        gain = tl.load(weights.gain + column, mask=inside, other=0.0)
        u = u * (1.0 / tl.sqrt(tl.sum(u * u, 0) / S.V + norm_eps)) * gain * activate(gate, "silu")
        if FORM != "int8x2":
            tl.store(output.plain + there, u.to(output.plain.dtype.element_ty), mask=inside)
        if FORM != "plain":  # a step of one row: row is 0; V is BD
            block = tl.arange(0, BD // 32)
            values = tl.reshape(u, (BD // 32, 2, 16))
            store_int8x2(output.int8x2, values, head * (S.V // 32) + block, block >= 0, INNER)


@triton.jit(do_not_specialize=["runs"])
def norm_gate_rows(out, y, z, gain, runs, K, eps, R: tl.constexpr, C: tl.constexpr):
    """RMS norm of each run of K values, times the silu of its gate. Grid (runs / R)."""
    run = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    column = tl.arange(0, C)
    at = run[:, None] * K + column[None, :]
    ok = (run < runs)[:, None] & (column < K)[None, :]
    u = tl.load(y + at, mask=ok, other=0.0).to(tl.float32)
    gate = tl.load(z + at, mask=ok, other=0.0).to(tl.float32)
    u = u * (1.0 / tl.sqrt(tl.sum(u * u, 1) / K + eps))[:, None] * tl.load(gain + column, mask=column < K, other=0.0)
    tl.store(out + at, (u * activate(gate, "silu")).to(out.dtype.element_ty), mask=ok)


def _norm_gate(site: Site, spec: DeltaMixSpec, batch: Batch, out: Slot, y: Slot, z: Slot, gain: torch.Tensor) -> None:
    columns, runs = power_of_two(spec.v_dim), batch.T * spec.n_v
    each = max(1, _NORM // columns)
    site.launch(
        norm_gate_rows, (cdiv(runs, each),), out.tensor, y.tensor, z.tensor, gain, runs, spec.v_dim, spec.eps, R=each,
        C=columns,
    )  # fmt: skip


def build_delta_mix(site: Site, node: Node) -> Launch:
    """DELTA_MIX: qkv `[T, width]`, alpha and beta `[T, n_v]`, z `[T, d_inner]`, weights, two states, out like z."""
    spec: DeltaMixSpec = node.spec
    rule = spec.delta
    qkv, alpha, beta, z, *weights, starts, keys, slots, conv_state, state = node.inputs
    ragged = (starts, keys, slots)
    rows, sizes, rates, gate = (site.slot(v) for v in (qkv, alpha, beta, z))  # type: ignore[arg-type]
    target = site.slot(node.outputs[0])
    whole = rule.v_dim >= 32 and rule.v_dim == power_of_two(rule.v_dim)
    int8x2, plain = site.int8x2_target(node.outputs[0]) if whole and not site.deterministic else (None, True)
    conv = Stored.of(site, conv_weights(spec.conv, weights), (*ragged, conv_state))
    delta = Stored.of(site, weights[-3:-1], (*ragged, state))
    gain = site.vector(weights[-1])  # type: ignore[arg-type]
    prompts = Delta(site, rule, delta)
    act = DTYPES[site.compute]
    mixed, y = site.scratch("T", spec.width, act), site.scratch("T", spec.d_inner, act)
    heads_y = site.scratch("S", spec.d_inner)
    counts = site.zeros("S", rule.n_v)
    key_values = power_of_two(rule.k_dim)
    values = min(power_of_two(rule.v_dim), max(1, _TILE[0] // key_values))
    parts = cdiv(rule.v_dim, values)

    def run(batch: Batch) -> None:
        if batch.prefill or site.deterministic:
            conv_prompts(site, spec.conv, batch, mixed, rows, conv, 1 if site.deterministic else 2)
            prompts.prompts(batch, y, mixed, sizes, rates)
            _norm_gate(site, spec, batch, target, y, gate, gain)
        if batch.decode and not site.deterministic:  # after the rest, which writes nothing of use to these rows
            form = "plain" if int8x2 is None or batch.T > 1 else "both" if plain else "int8x2"
            out = target.tensor
            conv_steps(site, spec.conv, batch, mixed, rows, conv)
            site.launch(
                delta_step, (rule.n_v * parts, batch.S), output=Output(out, out if form == "plain" else int8x2),
                heads_y=heads_y.tensor, counts=counts.tensor, qkv=mixed.tensor, alpha=sizes.tensor, beta=rates.tensor,
                z=gate.tensor, weights=DeltaWeights(*delta.weights, gain), **delta.sequences(), state=delta.state,
                eps=rule.eps, norm_eps=spec.eps, S=heads_of(rule), SCALE=rule.k_dim**-0.5, PARTS=parts, BV=values,
                BK=key_values, BD=power_of_two(rule.v_dim), FORM=form, warps=_TILE[1], early=starts_early(site),
            )  # fmt: skip

    return run


def _accepts(spec: DeltaMixSpec) -> str | None:
    return None if spec.delta.k_dim <= 256 else f"needs keys of at most 256 values, got {spec.delta.k_dim}"


IMPLEMENTATIONS = (Implementation(DELTA_MIX, "two launches a step, chunks for prompts", build_delta_mix, _accepts),)
