"""Rotary embedding, alone or together with the append to the cache.

    (a, b) -> (a cos - b sin, a sin + b cos) * magnitude,   angle = position * freq[i] rounded to float32

A program takes heads of one token, so an angle is computed once for all of them. It is reduced in float64, where a quarter
turn is exact to 1e-10 at position 2^20, and sine and cosine are short polynomials: the library's sine keeps a table in
local memory for large angles.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

from quarrel.ops.attention import ATTENTION, KV_APPEND, ROPE_APPEND, RopeAppendSpec
from quarrel.ops.contract import Value
from quarrel.ops.norm import NormSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.ops.rope import ROPE, RopeSpec
from quarrel.triton_backend.attention.kv_codes import code_of, factors, largest
from quarrel.triton_backend.attention.records import Keys, RopeShape, Rotation
from quarrel.triton_backend.runtime.arrays import DTYPES, Cache
from quarrel.triton_backend.runtime.launch import cdiv, power_of_two
from quarrel.triton_backend.runtime.site import Batch, Launch, Site, dims, starts_early

_TILE = 2048  # values that a program takes at a time

# Taylor remainders below 4e-8 on [-pi/4, pi/4].
_S3, _S5, _S7, _S9 = (tl.constexpr(v) for v in (-1.0 / 6, 1.0 / 120, -1.0 / 5040, 1.0 / 362880))
_C2, _C4, _C6, _C8, _C10 = (tl.constexpr(v) for v in (-0.5, 1.0 / 24, -1.0 / 720, 1.0 / 40320, -1.0 / 3628800))


@triton.jit
def sin_cos(angle):
    """Sine and cosine of a float32 angle of any size up to 2^30, to 1e-7."""
    wide = angle.to(tl.float64)
    quarter = tl.floor(wide * 0.6366197723675814 + 0.5)
    r = (wide - quarter * 1.5707963267948966).to(tl.float32)
    s = r * r
    sine = r * (1.0 + s * (_S3 + s * (_S5 + s * (_S7 + s * _S9))))
    cosine = 1.0 + s * (_C2 + s * (_C4 + s * (_C6 + s * (_C8 + s * _C10))))
    turn = quarter.to(tl.int64) & 3
    swap = (turn & 1) == 1
    sin = tl.where(swap, cosine, sine)
    cos = tl.where(swap, sine, cosine)
    return tl.where(turn >= 2, -sin, sin), tl.where((turn == 1) | (turn == 2), -cos, cos)


@triton.jit
def rotate_pairs(a, b, sin, cos, magnitude):
    """Pairs after their rotation; no compiler chooses which product to round, so every kernel has these bits."""
    sin, cos = tl.broadcast_to(sin, a.shape), tl.broadcast_to(cos, a.shape)
    return tl.fma(a, cos, -(b * sin)) * magnitude, tl.fma(a, sin, b * cos) * magnitude


@triton.jit
def cache_row(slot, head, HEADS: tl.constexpr, SIZE: tl.constexpr):
    """Index of a head's row in a cache `[blocks, HEADS, SIZE, head_dim]`; slot is block * SIZE + offset, int64."""
    return (slot // SIZE * HEADS + head) * SIZE + slot % SIZE


@triton.jit
def _load_pairs(p, ok, S: tl.constexpr):
    """Pairs of the rotated columns of rows at p `[R, 1]`: two of `[R, S.HALF]`, float32.

    Neighbours are loaded together and split: by two loads of every other value a layer of Mistral-7B took four times as
    long as one whose halves are paired.
    """
    i = tl.arange(0, S.HALF)[None, :]
    if S.NEOX:
        mask = ok[:, None] & (i < S.ROT // 2)
        a, b = tl.load(p + i, mask=mask, other=0.0), tl.load(p + i + S.ROT // 2, mask=mask, other=0.0)
    else:
        j = tl.arange(0, 2 * S.HALF)[None, :]
        both = tl.load(p + j, mask=ok[:, None] & (j < S.ROT), other=0.0)
        a, b = tl.split(tl.reshape(both, [both.shape[0], S.HALF, 2]))
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def _store_pairs(p, low, high, ok, S: tl.constexpr):
    i = tl.arange(0, S.HALF)[None, :]
    if S.NEOX:
        mask = ok[:, None] & (i < S.ROT // 2)
        tl.store(p + i, low, mask=mask)
        tl.store(p + i + S.ROT // 2, high, mask=mask)
    else:
        j = tl.arange(0, 2 * S.HALF)[None, :]
        both = tl.reshape(tl.join(low, high), [low.shape[0], 2 * S.HALF])
        tl.store(p + j, both, mask=ok[:, None] & (j < S.ROT))


@triton.jit
def _sin_cos_of(positions, freq, token, S: tl.constexpr):
    """Of a token, for each pair: `[1, S.HALF]`. A pair has a frequency on one axis, so the sum of angles is exact."""
    i = tl.arange(0, S.HALF)[None, :]
    in_half = i < S.ROT // 2
    angle = tl.load(positions + token * S.AXES).to(tl.float32) * tl.load(freq + i, mask=in_half, other=0.0)
    AXES: tl.constexpr = S.AXES
    for axis in tl.static_range(1, AXES):
        position = tl.load(positions + token * S.AXES + axis).to(tl.float32)
        angle += position * tl.load(freq + axis * (S.ROT // 2) + i, mask=in_half, other=0.0)
    return sin_cos(angle)


@triton.jit
def _rotate(to, x, sin, cos, magnitude, source, target, ok, S: tl.constexpr):
    """Rows `source` of x `[.., S.DIM]`, rotated into rows `target` of `to`; all [R]. sin, cos: `[1, S.HALF]`."""
    p_x, p_to = x + source[:, None] * S.DIM, to + target[:, None] * S.DIM
    a, b = _load_pairs(p_x, ok, S)
    low, high = rotate_pairs(a, b, sin, cos, magnitude)
    _store_pairs(p_to, low.to(to.dtype.element_ty), high.to(to.dtype.element_ty), ok, S)
    if S.ROT < S.DIM:
        j = S.ROT + tl.arange(0, S.REST)[None, :]
        mask = ok[:, None] & (j < S.DIM)
        tl.store(p_to + j, tl.load(p_x + j, mask=mask, other=0.0).to(to.dtype.element_ty), mask=mask)


@triton.jit
def _rotate_to_codes(to, scales, x, sin, cos, magnitude, source, target, ok, S: tl.constexpr):
    """As `_rotate`, into codes and their scales."""
    KIND: tl.constexpr = S.KIND
    p_x, p_to = x + source[:, None] * S.DIM, to + target[:, None] * S.DIM
    a, b = _load_pairs(p_x, ok, S)
    low, high = rotate_pairs(a, b, sin, cos, magnitude)
    most, bad = largest(low)
    most_high, bad_high = largest(high)
    most, bad = tl.maximum(most, most_high), bad + bad_high
    if S.ROT < S.DIM:
        j = S.ROT + tl.arange(0, S.REST)[None, :]
        rest_ok = ok[:, None] & (j < S.DIM)
        rest = tl.load(p_x + j, mask=rest_ok, other=0.0).to(tl.float32)
        most_rest, bad_rest = largest(rest)
        most, bad = tl.maximum(most, most_rest), bad + bad_rest
    factor, scale = factors(most, bad, KIND)
    tl.store(scales + target, scale, mask=ok)
    _store_pairs(p_to, code_of(low, factor, KIND), code_of(high, factor, KIND), ok, S)
    if S.ROT < S.DIM:
        tl.store(p_to + j, code_of(rest, factor, KIND), mask=rest_ok)


@triton.jit
def _copy_to_codes(to, scales, x, source, target, ok, S: tl.constexpr):
    """Rows `source` of x into rows `target` of codes, and their scales."""
    KIND: tl.constexpr = S.KIND
    i = tl.arange(0, S.WIDE)[None, :]
    mask = ok[:, None] & (i < S.DIM)
    value = tl.load(x + source[:, None] * S.DIM + i, mask=mask, other=0.0).to(tl.float32)
    most, bad = largest(value)
    factor, scale = factors(most, bad, KIND)
    tl.store(scales + target, scale, mask=ok)
    tl.store(to + target[:, None] * S.DIM + i, code_of(value, factor, KIND), mask=mask)


@triton.jit
def _copy(to, x, source, target, ok, S: tl.constexpr):
    i = tl.arange(0, S.WIDE)[None, :]
    mask = ok[:, None] & (i < S.DIM)
    value = tl.load(x + source[:, None] * S.DIM + i, mask=mask, other=0.0)
    tl.store(to + target[:, None] * S.DIM + i, value.to(to.dtype.element_ty), mask=mask)


@triton.jit
def _normalise_and_rotate(to, x, gain, eps, sin, cos, magnitude, row, ok, S: tl.constexpr):
    """`_rotate` of whole heads behind their RMS norm, which is rounded as if it were kept."""
    i = tl.arange(0, S.WIDE)[None, :]
    p_x, p_to = x + row[:, None] * S.DIM, to + row[:, None] * S.DIM
    value = tl.load(p_x + i, mask=ok[:, None], other=0.0).to(tl.float32)
    by = 1.0 / tl.sqrt(tl.sum(value * value, 1)[:, None] / S.DIM + eps)
    a, b = _load_pairs(p_x, ok, S)
    one = tl.arange(0, 1)
    gain_a, gain_b = _load_pairs(gain + one[:, None], one < 1, S)
    a, b = (a * by * gain_a).to(to.dtype.element_ty), (b * by * gain_b).to(to.dtype.element_ty)
    low, high = rotate_pairs(a.to(tl.float32), b.to(tl.float32), sin, cos, magnitude)
    _store_pairs(p_to, low.to(to.dtype.element_ty), high.to(to.dtype.element_ty), ok, S)


@triton.jit
def rope_rows(
    y, x, positions, freq, gain, eps, magnitude, S: tl.constexpr, R: tl.constexpr, NORMS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Rotates heads, with NORMS behind their RMS norm. Grid (tokens, heads / R).

    y, x       act `[tokens, S.HEADS * S.DIM]`
    positions  int32 `[tokens, S.AXES]`
    freq       float32 `[S.AXES, S.ROT / 2]`, radians a position
    gain       float32 `[S.DIM]`, read with NORMS only: S.DIM is a power of two then, and S.ROT
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * R + tl.arange(0, R)
    row = token * S.HEADS + head
    sin, cos = _sin_cos_of(positions, freq, token, S)
    if NORMS:
        _normalise_and_rotate(y, x, gain, eps, sin, cos, magnitude, row, head < S.HEADS, S)
    else:
        _rotate(y, x, sin, cos, magnitude, row, row, head < S.HEADS, S)


@triton.jit(do_not_specialize=["tokens"])
def append_rows(cache, k, v, slots, tokens, S: tl.constexpr, V: tl.constexpr, R: tl.constexpr):
    """Copies keys and values into the cache (`records.Keys`); a program takes R pairs of a token and a key head. S and V
    are the shapes of keys and of values.

    k, v   act `[tokens, S.KV_HEADS * S.DIM]`, of V.DIM for values
    slots  int32 `[tokens]`, block * block_size + offset
    """
    KV_HEADS: tl.constexpr = S.KV_HEADS
    SIZE: tl.constexpr = S.SIZE
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    token, head, ok = row // KV_HEADS, row % KV_HEADS, row < tokens.to(tl.int64) * KV_HEADS
    target = cache_row(tl.load(slots + token, mask=ok, other=0).to(tl.int64), head, KV_HEADS, SIZE)
    if S.KIND == "plain":
        _copy(cache.k, k, row, target, ok, S)
        _copy(cache.v, v, row, target, ok, V)
    else:
        _copy_to_codes(cache.k, cache.k_scale, k, row, target, ok, S)
        _copy_to_codes(cache.v, cache.v_scale, v, row, target, ok, V)


@triton.jit
def rope_append_rows(
    y, cache, q, rotation, S: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, PDL: tl.constexpr
):
    """Rotates queries into y, and keys into the cache beside values; S, K and V are the shapes of a head of each.

    Grid (tokens, 3); the second axis is the role: queries, keys, values. A program takes R heads of its token at a time.
    `cache` and `rotation` are `records.Keys` and `records.Rotation`.

    y, q  act `[tokens, S.HEADS * S.DIM]`
    """
    HEADS: tl.constexpr = S.HEADS
    KV_HEADS: tl.constexpr = S.KV_HEADS
    SIZE: tl.constexpr = S.SIZE
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token, role = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if role == 0:
        sin, cos = _sin_cos_of(rotation.positions, rotation.freq, token, S)
        for first in tl.static_range(0, HEADS, R):
            head = first + tl.arange(0, R)
            row = token * HEADS + head
            _rotate(y, q, sin, cos, rotation.q_magnitude, row, row, head < HEADS, S)
    else:
        slot = tl.load(rotation.slots + token).to(tl.int64)
        if role == 1:
            sin, cos = _sin_cos_of(rotation.positions, rotation.freq, token, K)
            for first in tl.static_range(0, KV_HEADS, R):
                head = first + tl.arange(0, R)
                row, target, ok = token * KV_HEADS + head, cache_row(slot, head, KV_HEADS, SIZE), head < KV_HEADS
                if S.KIND == "plain":
                    _rotate(cache.k, rotation.k, sin, cos, rotation.k_magnitude, row, target, ok, K)
                else:
                    _rotate_to_codes(cache.k, cache.k_scale, rotation.k, sin, cos, rotation.k_magnitude, row, target, ok, K)
        else:
            for first in tl.static_range(0, KV_HEADS, R):
                head = first + tl.arange(0, R)
                row, target, ok = token * KV_HEADS + head, cache_row(slot, head, KV_HEADS, SIZE), head < KV_HEADS
                if S.KIND == "plain":
                    _copy(cache.v, rotation.v, row, target, ok, V)
                else:
                    _copy_to_codes(cache.v, cache.v_scale, rotation.v, row, target, ok, V)


def _shape(spec: RopeSpec, heads: int, n_kv: int, size: int, kind: str = "plain") -> RopeShape:
    half, rest = power_of_two(spec.half), power_of_two(spec.head_dim - spec.n_rot)
    wide = power_of_two(spec.head_dim)
    return RopeShape(heads, n_kv, size, spec.style == "neox", spec.head_dim, spec.n_rot, half, rest, wide, kind, spec.axes)


def _copied(n_kv: int, cache: Cache, dim: int) -> RopeShape:
    """Of heads that are not rotated."""
    return RopeShape(0, n_kv, cache.block_size, False, dim, 0, 1, 1, power_of_two(dim), cache.kind, 1)


def _rows_each(head_dim: int, heads: int | None = None) -> int:
    most = max(1, _TILE // power_of_two(head_dim))
    return most if heads is None else min(most, power_of_two(heads))


def build_rope(site: Site, node: Node, norm: Node | None = None) -> Launch:
    """ROPE: x `[T, heads * head_dim]`, positions `[T]` int32, or one on each axis, freq `[n_rot / 2]` float32; with the
    NORM before it."""
    spec: RopeSpec = node.spec
    x, positions, freq = node.inputs
    if norm is not None:
        x = norm.inputs[0]
    source, position, target = site.slot(x), site.slot(positions), site.slot(node.outputs[0])  # type: ignore[arg-type]
    table = site.const(freq)  # type: ignore[arg-type]
    axis, _ = dims(node.outputs[0])
    rows, shape = _rows_each(spec.head_dim, spec.n_heads), _shape(spec, spec.n_heads, 0, 0)
    gain, eps = (table, 0.0) if norm is None else (site.vector(norm.inputs[1]), norm.spec.eps)  # type: ignore[arg-type]

    def run(batch: Batch) -> None:
        site.launch(
            rope_rows, (batch.count(axis), cdiv(spec.n_heads, rows)), y=target.tensor, x=source.tensor,
            positions=position.tensor, freq=table, gain=gain, eps=eps, magnitude=spec.magnitude, S=shape, R=rows,
            NORMS=norm is not None, early=starts_early(site),
        )  # fmt: skip

    return run


def takes_norm(spec: RopeSpec, norm: NormSpec) -> bool:
    """Whether ROPE may begin with this norm, of the same heads."""
    whole = spec.head_dim == spec.n_rot == power_of_two(spec.head_dim) == norm.k
    return norm.kind == "rms" and norm.out == "act" and whole and norm.groups == spec.n_heads


def build_kv_append(site: Site, node: Node) -> Launch:
    """KV_APPEND: k and v `[T, n_kv * head_dim]`, slots `[T]` int32 inside the cache."""
    k, v, slots = (site.slot(i) for i in node.inputs[:3])  # type: ignore[arg-type]
    cache = site.cache(node.inputs[3])  # type: ignore[arg-type]
    n_kv, dim = node.spec.n_kv, node.spec.head_dim
    axis, _ = dims(node.inputs[0])  # type: ignore[arg-type]
    value_dim = node.spec.latent or dim
    rows, into = _rows_each(max(dim, value_dim)), Keys(cache.k, cache.v, *cache.both_scales)
    shape, values = (_copied(n_kv, cache, d) for d in (dim, value_dim))

    def run(batch: Batch) -> None:
        count = batch.count(axis)
        site.launch(
            append_rows, (cdiv(count * n_kv, rows),), cache=into, k=k.tensor, v=v.tensor, slots=slots.tensor, tokens=count,
            S=shape, V=values, R=rows,
        )  # fmt: skip

    return run


def build_rope_append(site: Site, node: Node) -> Launch:
    """ROPE_APPEND: rotates q into y, and k into the cache beside v, in one launch."""
    spec: RopeAppendSpec = node.spec
    q, k, v, positions = (site.slot(i) for i in node.inputs[:4])  # type: ignore[arg-type]
    table = site.const(node.inputs[4])  # type: ignore[arg-type]
    slots = site.slot(node.inputs[5])  # type: ignore[arg-type]
    cache = site.cache(node.inputs[6])  # type: ignore[arg-type]
    target = site.slot(node.outputs[0])
    axis, _ = dims(node.outputs[0])
    rows = _rows_each(spec.q.head_dim, max(spec.q.n_heads, spec.k.n_heads))
    into = Keys(cache.k, cache.v, *cache.both_scales)
    sizes = (spec.q.n_heads, spec.k.n_heads, cache.block_size, cache.kind)
    shape, keys = _shape(spec.q, *sizes), _shape(spec.k, *sizes)
    values = _copied(spec.k.n_heads, cache, spec.latent) if spec.latent else shape
    left = joined(site, node.outputs[0], cache) is not None

    def run(batch: Batch) -> None:
        if left and not batch.prefill:
            return
        rotation = Rotation(k.tensor, v.tensor, positions.tensor, table, slots.tensor, spec.q.magnitude, spec.k.magnitude)
        site.launch(
            rope_append_rows, (batch.count(axis), 3), y=target.tensor, cache=into, q=q.tensor, rotation=rotation, S=shape,
            K=keys, V=values, R=rows, early=starts_early(site),
        )  # fmt: skip

    return run


def left_to_attention(nodes: Sequence[Node], kept: set[int]) -> list[tuple[int, int]]:
    """ROPE_APPENDs whose queries one attention over the same cache reads and nobody else: places of both among the nodes.
    A cache may serve several layers, each with a block table of its own.

    In a step without prompts that attention does their work: heads of a power of two, whole and of one axis, but for those
    of more than 128 values, of which `attend_one` and `attend_head` take any.
    """
    found = []
    for i, node in enumerate(nodes):
        if node.op is not ROPE_APPEND or node.outputs[0].id in kept:
            continue
        q, k = node.spec.q, node.spec.k
        readers = [j for j, n in enumerate(nodes) if any(v is node.outputs[0] for v in n.inputs)]
        if len(readers) != 1 or nodes[readers[0]].op is not ATTENTION:
            continue
        table, cache = nodes[readers[0]].inputs[3:5]
        over = [n for n in nodes if n.op is ATTENTION and n.inputs[3] is table and n.inputs[4] == node.inputs[6]]
        sizes = q.n_rot == k.n_rot and q.head_dim == power_of_two(q.head_dim) and q.head_dim >= 16
        whole = q.n_rot == q.head_dim and q.axes == 1
        if sizes and (whole or q.head_dim > 128) and cache == node.inputs[6] and len(over) == 1:
            found.append((i, readers[0]))
    return found


def joined(site: Site, value: Value, cache: Cache) -> Node | None:
    """The ROPE_APPEND of these queries that leaves its work to the attention behind it in a step without prompts."""
    narrow = site.compute != "float32" or cache.k.shape[3] <= 128
    return site.rope_of(value) if narrow and cache.k.dtype == DTYPES[site.compute] else None


def _accepts_append(spec: RopeAppendSpec) -> str | None:
    def shape(s: RopeSpec) -> tuple[str, int, int, int]:
        return s.style, s.head_dim - (spec.latent if s is spec.q else 0), s.n_rot, s.axes

    if shape(spec.q) != shape(spec.k):
        return f"needs query and key rotated alike, got {shape(spec.q)} and {shape(spec.k)}"
    return None


IMPLEMENTATIONS = (
    Implementation(ROPE, "rows", build_rope),
    Implementation(KV_APPEND, "rows", build_kv_append),
    Implementation(ROPE_APPEND, "one launch", build_rope_append, _accepts_append),
)
