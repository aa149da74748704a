"""Rotation of query and key heads, and the write of keys and values into the paged cache."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import reduce
from operator import add

from quarrel.cpu_backend.attention.cache import Kind, block_place, head_bytes, rounded, store_codes, value_bytes
from quarrel.cpu_backend.lowering import Lowering
from quarrel.cpu_backend.runtime.abi import Fields, KernelDef
from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import F32, F64, I32, I64, Kernel, Val, vec
from quarrel.cpu_backend.runtime.vector import each, f32s
from quarrel.ops.attention import KV_APPEND, ROPE_APPEND, RopeAppendSpec
from quarrel.ops.kv import TOP
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.ops.rope import ROPE

_PI_2 = math.pi / 2
_PI_2_HIGH = 1.5707963267341256  # the first 33 bits of pi/2: times any integer below 2^20 it is exact
_PI_2_LOW = 6.077100506506192e-11
_SIN = (-1.0 / 6, 1.0 / 120, -1.0 / 5040, 1.0 / 362880, -1.0 / 39916800, 1.0 / 6227020800, -1.0 / 1307674368000)
_COS = (-0.5, 1.0 / 24, -1.0 / 720, 1.0 / 40320, -1.0 / 3628800, 1.0 / 479001600, -1.0 / 87178291200)


def sin_cos(k: Kernel, angle: Val) -> tuple[Val, Val]:
    """Sine and cosine of float32 angles below 2^20 in float64 arithmetic, exact to float32 rounding."""
    x = angle.to(F64)
    magic = 6755399441055744.0  # 1.5 * 2^52: rounds to an integer whose low bits can be read
    shifted = x * (1.0 / _PI_2) + magic
    quarters = shifted - magic
    r = x - quarters * _PI_2_HIGH - quarters * _PI_2_LOW
    square = r * r
    sin, cos = k.lift(_SIN[-1], x.type), k.lift(_COS[-1], x.type)
    for s, c in zip(_SIN[-2::-1], _COS[-2::-1]):
        sin, cos = sin * square + s, cos * square + c
    sin, cos = sin * square * r + r, cos * square + 1.0
    quarter = shifted.bitcast(vec(I64, x.lanes)) & 3
    swap = (quarter & 1).ne(0)
    s, c = k.select(swap, cos, sin), k.select(swap, sin, cos)
    s = k.select((quarter & 2).ne(0), -s, s)
    c = k.select(((quarter + 1) & 2).ne(0), -c, c)
    return s.to(F32), c.to(F32)


def _tables(k: Kernel, a: Fields, token: Val, axes: int, scratch: Val) -> tuple[Val, Val]:
    """cos and sin times the magnitude for every pair, in scratch memory."""
    pairs = a.pairs
    cos_at, sin_at = scratch, scratch + (pairs << 2)
    places = [k.load(a.positions + token * (4 * axes), I32, 4 * axis).to(F32) for axis in range(axes)]

    def one(offset: Val, lanes: int) -> None:
        # A pair has a frequency on one axis: the other products are zero, and the sum is exact.
        each_angle = [
            k.load(a.freq + pairs * (4 * axis) + offset, f32s(lanes)) * k.lift(at, f32s(lanes))
            for axis, at in enumerate(places)
        ]
        angle = reduce(add, each_angle)
        sin, cos = sin_cos(k, angle)
        scale = k.lift(a.f32("magnitude"), sin.type)
        k.store(cos * scale, cos_at + offset)
        k.store(sin * scale, sin_at + offset)

    each(k, pairs, one, lanes=8)
    return cos_at, sin_at


def _rotate_head(k: Kernel, style: str, a: Fields, x: Val, y: Val, cos_at: Val, sin_at: Val) -> None:
    """One head of `dim` values from x to y."""
    pairs, dim = a.pairs, a.dim

    def pairs_apart(offset: Val, lanes: int) -> None:
        type = f32s(lanes)
        c, s = k.load(cos_at + offset, type), k.load(sin_at + offset, type)
        u, v = k.load(x + offset, type), k.load(x + (pairs << 2) + offset, type)
        k.store(u * c - v * s, y + offset)
        k.store(u * s + v * c, y + (pairs << 2) + offset)

    def pairs_together(offset: Val, lanes: int) -> None:
        type = f32s(lanes)
        c, s = k.load(cos_at + offset, type), k.load(sin_at + offset, type)
        at = x + (offset << 1)
        first, second = k.load(at, type), k.load(at, type, 4 * lanes)
        if lanes == 1:
            u, v = first, second
        else:
            u, v = first.shuffle(range(0, 2 * lanes, 2), second), first.shuffle(range(1, 2 * lanes, 2), second)
        a_out, b_out = u * c - v * s, u * s + v * c
        if lanes > 1:
            order = [i // 2 + i % 2 * lanes for i in range(2 * lanes)]
            a_out, b_out = a_out.shuffle(order[:lanes], b_out), a_out.shuffle(order[lanes:], b_out)
        k.store(a_out, y + (offset << 1))
        k.store(b_out, y + (offset << 1), 4 * lanes)

    each(k, pairs, pairs_apart if style == "neox" else pairs_together)
    rest = pairs << 3
    each(k, dim - (pairs << 1), lambda o, lanes: k.store(k.load(x + rest + o, f32s(lanes)), y + rest + o))


def _rotate_row(k: Kernel, style: str, a: Fields, x: Val, y: Val, heads: Val, cos_at: Val, sin_at: Val) -> None:
    with k.range(0, heads) as h:
        at = h * (a.dim << 2)
        _rotate_head(k, style, a, x + at, y + at, cos_at, sin_at)


def rope(style: str, pairs: int, axes: int) -> KernelDef:
    """Chunk t rotates row t from x to y."""

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        cos_at, sin_at = _tables(k, a, chunk, axes, scratch)
        row = chunk * (a.heads * a.dim << 2)
        _rotate_row(k, style, a, a.x + row, a.y + row, a.heads, cos_at, sin_at)

    fields = ("x", "y", "positions", "freq", "heads", "dim", "pairs", "magnitude")
    return KernelDef(f"rope/{style}{_on(axes)}", fields, body, scratch=8 * pairs + 64)


def _append(
    k: Kernel, level: Level, kind: Kind, heads: Val, block_size: Val, dim: Val, x: Val, cache: Val, slot: Val, key: bool
) -> None:
    """One token's key or value, `heads * dim` float32 at x, into its slot."""
    size, each_token = value_bytes(kind), head_bytes(kind, dim)
    block, between = slot.udiv(block_size), block_size * size
    token = slot - block * block_size
    with k.range(0, heads) as h:
        head = x + h * (dim << 2)
        at = cache + block_place(block, h, heads, block_size, each_token) + token * (size if key else each_token)

        def put(stored: Val, d: Val) -> None:
            if not key:
                k.store(stored, at + d * size)
                return
            first = at + d * between
            for lane in range(stored.lanes):
                k.store(stored[lane] if stored.lanes > 1 else stored, first + between * lane)

        if kind in TOP:
            store_codes(k, kind, head, dim, put)
        else:
            each(k, dim, lambda o, lanes: put(rounded(k, level, kind, k.load(head + o, f32s(lanes))), o >> 2))


def kv_append(level: Level, kind: Kind) -> KernelDef:
    """Chunk t writes row t of k and v to slot slots[t]."""

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        slot = k.load(a.slots + (chunk << 2), I32).to(I64)
        for x, cache, dim, key in ((a.k, a.k_cache, a.dim, True), (a.v, a.v_cache, a.value_dim, False)):
            _append(k, level, kind, a.heads, a.block_size, dim, x + chunk * (a.heads * dim << 2), cache, slot, key)

    fields = ("k", "v", "slots", "k_cache", "v_cache", "block_size", "heads", "dim", "value_dim")
    return KernelDef(f"kv_append/{kind}", fields, body)


def rope_append(style: str, level: Level, kind: Kind, pairs: int, width: int, axes: int) -> KernelDef:
    """Chunk t rotates query and key of row t, and writes key and value to slot slots[t]."""

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        cos_at, sin_at = _tables(k, a, chunk, axes, scratch)
        q_row = chunk * (a.heads * a.dim << 2)
        _rotate_row(k, style, a, a.q + q_row, a.y + q_row, a.heads, cos_at, sin_at)
        key = scratch + (a.pairs << 3)
        row = chunk * (a.kv_heads * a.dim << 2)
        _rotate_row(k, style, a, a.k + row, key, a.kv_heads, cos_at, sin_at)
        slot = k.load(a.slots + (chunk << 2), I32).to(I64)
        for x, cache, is_key in ((key, a.k_cache, True), (a.v + row, a.v_cache, False)):
            _append(k, level, kind, a.kv_heads, a.block_size, a.dim, x, cache, slot, is_key)

    operands = ("q", "k", "v", "y", "positions", "freq", "slots", "k_cache", "v_cache", "block_size")
    fields = (*operands, "heads", "kv_heads", "dim", "pairs", "magnitude")
    name = f"rope_append/{style}/{kind}{_on(axes)}"
    return KernelDef(name, fields, body, scratch=8 * pairs + 4 * width + 64)


def _on(axes: int) -> str:
    return f"/{axes} axes" if axes > 1 else ""


def build_rope(e: Lowering, node: Node) -> None:
    s, (x, positions, freq), (y,) = node.spec, node.inputs, node.outputs
    sizes = {"heads": s.n_heads, "dim": s.head_dim, "pairs": s.half, "magnitude": float(s.magnitude)}
    e.stage(rope(s.style, s.half, s.axes), y, x=x, y=y, positions=positions, freq=freq, **sizes)


def build_kv_append(e: Lowering, node: Node) -> None:
    s, (k, v, slots, cache) = node.spec, node.inputs
    kind, block_size = e.caches[cache.layer].kind, e.caches[cache.layer].block_size
    sizes = {"block_size": block_size, "heads": s.n_kv, "dim": s.head_dim, "value_dim": s.latent or s.head_dim}
    e.stage(kv_append(e.plan.level, kind), k, k=k, v=v, slots=slots, **sizes, **e.cache(cache))


def build_rope_append(e: Lowering, node: Node) -> None:
    s, (q, k, v, positions, freq, slots, cache), (y,) = node.spec, node.inputs, node.outputs
    kernel = rope_append(s.q.style, e.plan.level, e.caches[cache.layer].kind, s.q.half, s.k.width, s.q.axes)
    sizes = {"block_size": e.caches[cache.layer].block_size, "heads": s.q.n_heads, "kv_heads": s.k.n_heads}
    sizes |= {"dim": s.q.head_dim, "pairs": s.q.half}
    fields = {"positions": positions, "freq": freq, "slots": slots, "magnitude": float(s.q.magnitude), **sizes}
    e.stage(kernel, y, q=q, k=k, v=v, y=y, **e.cache(cache), **fields)


def _same_rotation(s: RopeAppendSpec) -> str | None:
    q, k = s.q, s.k
    same = replace(q, n_heads=k.n_heads) == k
    return None if same else f"query and key must rotate alike, got {q} and {k}"


IMPLEMENTATIONS = (
    Implementation(ROPE, "vector rope", build_rope),
    Implementation(KV_APPEND, "paged append", build_kv_append),
    Implementation(ROPE_APPEND, "rope + paged append", build_rope_append, _same_rotation),
)
