"""Rotation by position, and the append to the paged cache behind it.

MLX's `fast.rope` takes one position for a whole sequence and inverse frequencies, which it inverts again: at position 2^20
that moves an angle by a tenth. Ours takes a position a token and the frequencies themselves, rotates query and key and
writes the key and its value to their slots, all in one launch. A thread rotates one pair of values in up to 4 heads, so
that one sine and cosine serve four: 4 bytes in, 4 bytes out a pair and head, about 20 registers, no threadgroup memory. A
decode step's 10 kB are bound by the launch; prefill reaches 70 to 80% of the bus, next to products that take 100 times as
long.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx

from quarrel.mlx_backend.attention.kv_codes import encoded
from quarrel.mlx_backend.runtime.cache import keep
from quarrel.mlx_backend.runtime.kernel import Kernel
from quarrel.mlx_backend.runtime.launch import Batch, Cache, Launch, Operand, Site, cdiv
from quarrel.ops.attention import KV_APPEND, ROPE_APPEND, KVAppendSpec, RopeAppendSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.ops.rope import ROPE, RopeSpec

_THREADS = 64
_HEADS_EACH = 4

# The first ROT / 2 pairs of a head are rotated, the values after them are passed on two by two.
_HEADER = """
template <class T, int ROT, int D, bool NEOX, class In, class Out>
inline void rotate_heads(
    In x, Out y, ulong row, ulong to, int heads, int first, int last, int pair, float cosine, float sine) {
  const bool rotated = pair < ROT / 2;
  int a = rotated && NEOX ? pair : 2 * pair;
  int b = rotated && NEOX ? pair + ROT / 2 : a + 1;
  for (int head = first; head < last && head < heads; head++) {
    const ulong at = (row * heads + head) * D;
    const float left = float(x[at + a]), right = b < D ? float(x[at + b]) : 0.0f;
    const ulong out = (to * heads + head) * D;
    y[out + a] = T(left * cosine - right * sine);
    if (b < D) y[out + b] = T(left * sine + right * cosine);
  }
}

// A pair has a frequency on one of the axes, so the sum is exact.
template <int ROT, int AXES, class Positions, class Freq>
inline float2 angle_of(Positions positions, ulong row, Freq freq, int pair, float magnitude) {
  if (pair >= ROT / 2) return float2(1.0f, 0.0f);
  float angle = 0.0f;
  UNROLL for (int i = 0; i < AXES; i++) angle += float(positions[row * AXES + i]) * freq[i * (ROT / 2) + pair];
  return float2(precise::cos(angle), precise::sin(angle)) * magnitude;
}
"""

_PLACE = """
  constexpr int PAIRS = ROT / 2 + (D - ROT + 1) / 2;
  const int pair = int(thread_position_in_grid.x) % PAIRS, chunk = int(thread_position_in_grid.x) / PAIRS;
  const ulong row = threadgroup_position_in_grid.y;
  const float2 rotation = angle_of<ROT, AXES>(positions, row, freq, pair, magnitude[0]);
"""

_ROPE = Kernel(
    "quarrel_rope",
    ("x", "positions", "freq", "magnitude"),
    ("y",),
    _PLACE
    + """
  rotate_heads<T, ROT, D, NEOX>(x, y, row, row, HEADS, chunk * EACH, (chunk + 1) * EACH, pair, rotation.x, rotation.y);
""",
    _HEADER,
)

_ROPE_BOTH = Kernel(
    "quarrel_rope_both",
    ("q", "k", "positions", "freq", "magnitude"),
    ("q_rotated", "k_rotated"),
    _PLACE
    + """
  constexpr int CHUNKS = (HEADS + EACH - 1) / EACH;
  if (chunk < CHUNKS) {
    const int first = chunk * EACH;
    rotate_heads<T, ROT, D, NEOX>(q, q_rotated, row, row, HEADS, first, first + EACH, pair, rotation.x, rotation.y);
  } else {
    const int first = (chunk - CHUNKS) * EACH;
    rotate_heads<T, ROT, D, NEOX>(k, k_rotated, row, row, KV_HEADS, first, first + EACH, pair, rotation.x, rotation.y);
  }
""",
    _HEADER,
)

_ROPE_KEEP = Kernel(
    "quarrel_rope_keep",
    ("q", "k", "v", "positions", "freq", "magnitude", "slots", "after", "into_keys", "into_values"),
    ("q_rotated", "written"),
    _PLACE
    + """
  constexpr int CHUNKS = (HEADS + EACH - 1) / EACH;
  if (row == 0 && thread_position_in_grid.x == 0) written[0] = 1;
  if (chunk < CHUNKS) {
    const int first = chunk * EACH, last = first + EACH;
    rotate_heads<T, ROT, D, NEOX>(q, q_rotated, row, row, HEADS, first, last, pair, rotation.x, rotation.y);
    return;
  }
  const int first = (chunk - CHUNKS) * EACH, last = metal::min(first + EACH, KV_HEADS);
  const ulong slot = ulong(slots[row]);
  rotate_heads<T, ROT, D, NEOX>(k, (device T*)into_keys, row, slot, KV_HEADS, first, last, pair, rotation.x, rotation.y);
  for (int head = first; head < last; head++) {
    for (int d = 2 * pair; d < metal::min(2 * pair + 2, D); d++) {
      ((device T*)into_values)[(slot * KV_HEADS + head) * D + d] = T(v[(row * KV_HEADS + head) * D + d]);
    }
  }
""",
    _HEADER,
)


def _template(s: RopeSpec, act: mx.Dtype) -> list[tuple[str, Any]]:
    return [("T", act), ("ROT", s.n_rot), ("D", s.head_dim), ("NEOX", s.style == "neox"), ("HEADS", s.n_heads),
            ("EACH", _HEADS_EACH), ("AXES", s.axes)]  # fmt: skip


def _groups(s: RopeSpec, chunks: int, tokens: int) -> tuple[int, int]:
    pairs = s.half + cdiv(s.head_dim - s.n_rot, 2)
    return cdiv(pairs * chunks, _THREADS), tokens


def build_rope(site: Site, node: Node) -> Launch:
    """ROPE: x `[T, heads * head_dim]`, positions `[T]` or `[T, axes]`, freq `[axes * n_rot / 2]`."""
    spec: RopeSpec = node.spec
    freq, magnitude = site.const(node.inputs[2]), mx.array([spec.magnitude], mx.float32)  # type: ignore[arg-type]
    template = _template(spec, site.act)
    chunks = cdiv(spec.n_heads, _HEADS_EACH)

    def run(batch: Batch, x: mx.array, positions: mx.array) -> list[mx.array]:
        groups = _groups(spec, chunks, x.shape[0])
        return _ROPE([x, positions, freq, magnitude], [x.shape], [site.act], groups, (_THREADS,), template)

    return run


def build_kv_append(site: Site, node: Node) -> Launch:
    """KV_APPEND: k and v `[T, n_kv * head_dim]`, slots `[T]`."""
    spec: KVAppendSpec = node.spec

    def run(batch: Batch, k: mx.array, v: mx.array, slots: mx.array, cache: Cache) -> list[Operand]:
        return [_append(spec, batch, k, v, slots, cache)]

    return run


def build_rope_append(site: Site, node: Node) -> Launch:
    """ROPE_APPEND: q and k rotated, k and v appended."""
    spec: RopeAppendSpec = node.spec
    freq, magnitude = site.const(node.inputs[4]), mx.array([spec.q.magnitude], mx.float32)  # type: ignore[arg-type]
    template = [*_template(spec.q, site.act), ("KV_HEADS", spec.k.n_heads)]
    chunks = cdiv(spec.q.n_heads, _HEADS_EACH) + cdiv(spec.k.n_heads, _HEADS_EACH)

    def run(
        batch: Batch, q: mx.array, k: mx.array, v: mx.array, positions: mx.array, slots: mx.array, cache: Cache
    ) -> list[Operand]:
        groups = _groups(spec.q, chunks, q.shape[0])
        if cache.k.dtype == site.act and cache.k.shape == cache.v.shape:
            inputs = [q, k, v, positions, freq, magnitude, slots, cache.written, cache.k, cache.v]
            outputs = [q.shape, (1,)], [site.act, mx.int32]
            q, written = _ROPE_KEEP(inputs, *outputs, groups, (_THREADS,), template)
            return [q, cache._replace(written=written)]
        shapes, types = [q.shape, k.shape], [site.act, site.act]
        q, k = _ROPE_BOTH([q, k, positions, freq, magnitude], shapes, types, groups, (_THREADS,), template)
        return [q, _append(spec.append, batch, k, v, slots, cache)]

    return run


def _append(spec: KVAppendSpec, batch: Batch, k: mx.array, v: mx.array, slots: mx.array, cache: Cache) -> Cache:
    k, v = (encoded(a.reshape(a.shape[0], spec.n_kv, -1), batch.kv_cache) for a in (k, v))
    return keep(cache, k, v, slots)


def _alike(spec: RopeAppendSpec) -> str | None:
    q, k = spec.q, spec.k
    if replace(q, n_heads=k.n_heads) == k:
        return None
    return f"needs query and key rotated alike, got {q} and {k}"


IMPLEMENTATIONS = (
    Implementation(ROPE, "a thread a pair", build_rope),
    Implementation(KV_APPEND, "in place", build_kv_append),
    Implementation(ROPE_APPEND, "both and the append in one launch", build_rope_append, _alike),
)
