"""Attention of one sequence's new token over compressed keys, a program to a head and a split of its keys.

Where programs are few, none may have much to do one after the other, as in `decode_head.py`. A warp has whole keys of its
own and a softmax of its own, so nothing waits for another warp until all keys are done; there are no matrix units, whose
operands would go through shared memory, and products and weights stay float32. Each program normalises the new value and
rotates the new key by itself. Two tiles of keys are on their way before the kernel waits for the queries.

Every head reads the keys, which 16 share in `attend_latent_one`; splits, the new key and the sums of splits are as there,
and so are caches of codes.

    values         [KEYS * PARTS * WARPS, WIDE]    16 bytes a lane, so for 512 values of 16 bits 2 PARTS of 256; the warp is
                                                   the last part of a row's number
    rotated keys   [KEYS * WARPS, DIM]             BESIDE keys of a warp are rows one after the other, side by side in it
    key of a tile  k * WARPS + w                   for key k of warp w
    registers      171 a thread in tiles of 16 keys in 4 warps, 186 for 32 in 8, 127 for 16 in 8 (sm_90, float16)

Loads have two axes alone: along others, versions of Triton lay warps differently.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quarrel.triton_backend.attention.kv_codes import as_values
from quarrel.triton_backend.attention.rope import sin_cos
from quarrel.triton_backend.attention.splits import split_of

HEAD_PROGRAMS = 128
"""Programs up to which a step of one sequence has this kernel, by the items of its bucket: up to 128 keys of 20 heads. Six
layers of GLM-4.7-Flash take 289 us so on an H200, for 313. Behind 500 keys 320 programs take 331 us, `attend_latent_one`
329."""
TILE = (16, 4)
"""Keys, and warps. 32 keys in eight take 288 us, 16 in eight 293, 8 in four 291."""


@triton.jit
def _by_warp(x, KEYS: tl.constexpr, WARPS: tl.constexpr, BESIDE: tl.constexpr):
    """What rows of rotated keys have, `[KEYS, WARPS]`."""
    x = tl.permute(tl.reshape(x, (KEYS // BESIDE, WARPS, BESIDE)), (0, 2, 1))
    return tl.reshape(x, (KEYS, WARPS))


@triton.jit
def _load_tile(
    cache, p_table, begin, stop, S: tl.constexpr, KEYS: tl.constexpr, WARPS: tl.constexpr, BESIDE: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Rows of rotated keys and of values begin.. below `stop`, and the scales of codes, `[KEYS, WARPS]`; zeros beyond."""
    SIZE: tl.constexpr = S.SIZE
    PARTS: tl.constexpr = S.RANK // WIDE
    i = tl.arange(0, KEYS * WARPS)
    key = begin + (i // (BESIDE * WARPS) * BESIDE + i % BESIDE) * WARPS + i // BESIDE % WARPS
    row = tl.load(p_table + key // SIZE, mask=key < stop, other=0).to(tl.int64) * SIZE + key % SIZE
    d = tl.arange(0, S.DIM)
    b_k = tl.load(cache.k + row[:, None] * S.DIM + d[None, :], mask=(key < stop)[:, None], other=0)
    i = tl.arange(0, KEYS * PARTS * WARPS)
    key = begin + i // (PARTS * WARPS) * WARPS + i % WARPS
    row = tl.load(p_table + key // SIZE, mask=key < stop, other=0).to(tl.int64) * SIZE + key % SIZE
    at = row * S.RANK + i // WARPS % PARTS * WIDE
    b_v = tl.load(cache.v + at[:, None] + tl.arange(0, WIDE)[None, :], mask=(key < stop)[:, None], other=0)
    k_scale = tl.zeros([KEYS, WARPS], tl.float32)
    v_scale = k_scale
    if S.KIND != "plain":
        key = begin + tl.arange(0, KEYS)[:, None] * WARPS + tl.arange(0, WARPS)[None, :]
        row = tl.load(p_table + key // SIZE, mask=key < stop, other=0).to(tl.int64) * SIZE + key % SIZE
        k_scale = tl.load(cache.k_scale + row, mask=key < stop, other=0.0)
        v_scale = tl.load(cache.v_scale + row, mask=key < stop, other=0.0)
    return b_k, b_v, k_scale, v_scale


@triton.jit
def _add_tile(
    sums, q_key, q_rest, tile, begin, stop, scale, KIND: tl.constexpr, KEYS: tl.constexpr, BESIDE: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """Adds keys begin.. below `stop` to the sums of each warp: `[PARTS, WARPS, WIDE]`, and two `[WARPS]`."""
    acc, top, total = sums
    b_k, b_v, k_scale, v_scale = tile
    PARTS: tl.constexpr = acc.shape[0]
    WARPS: tl.constexpr = acc.shape[1]
    v = tl.reshape(as_values(b_v, KIND, COMPUTE).to(tl.float32), (KEYS, PARTS, WARPS, acc.shape[2]))
    of_keys = _by_warp(tl.sum(as_values(b_k, KIND, COMPUTE).to(tl.float32) * q_key, 1), KEYS, WARPS, BESIDE)
    products = tl.sum(tl.sum(v * q_rest[None, :, :, :], 1), 2)  # [KEYS, WARPS]
    if KIND != "plain":
        of_keys, products = of_keys * k_scale, products * v_scale
    key = begin + tl.arange(0, KEYS)[:, None] * WARPS + tl.arange(0, WARPS)[None, :]
    products = tl.where(key < stop, (products + of_keys) * scale, float("-inf"))
    new_top = tl.maximum(top, tl.max(products, 0))
    # Where no key has been seen yet -inf stays; zero in its place leaves every power zero.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp2(products - base[None, :])
    fade = tl.exp2(top - base)
    total = total * fade + tl.sum(p, 0)
    if KIND != "plain":
        p *= v_scale
    return acc * fade[None, :, None] + tl.sum(v * p[:, None, :, None], 0), new_top, total


@triton.jit
def _pairs(p, N: tl.constexpr, DIM: tl.constexpr, NEOX: tl.constexpr):
    """Of what is to be rotated at p, for every one of its values: the first of its pair and the second, float32 [N, DIM] of
    equal rows."""
    HALF: tl.constexpr = DIM // 2
    at = tl.arange(0, N)[:, None] * 0 + tl.arange(0, DIM)[None, :]
    if NEOX:
        a, b = tl.load(p + at % HALF), tl.load(p + at % HALF + HALF)
    else:
        a, b = tl.split(tl.reshape(tl.load(p + at), (N, HALF, 2)))
        a, b = tl.reshape(tl.join(a, a), (N, DIM)), tl.reshape(tl.join(b, b), (N, DIM))
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def _spread(a, b, N: tl.constexpr, NEOX: tl.constexpr):
    """What pairs' first values have [DIM / 2], and what their second have, where these values stand: [N, DIM]."""
    both = tl.join(a, b)
    if NEOX:
        both = tl.permute(both, (1, 0))
    return tl.broadcast_to(tl.reshape(both, (1, 2 * a.shape[0])), (N, 2 * a.shape[0]))


@triton.jit
def _rotated(pairs, of_first, of_second, magnitude):
    """Pairs after their rotation, with the bits of `rotate_pairs`."""
    a, b = pairs
    return tl.fma(a, of_first, b * of_second) * magnitude


@triton.jit
def _joined(top, total, other_top, other_total):
    """Greatest scores of two warps and their sums of weights, together."""
    most = tl.maximum(top, other_top)
    base = tl.where(most == float("-inf"), 0.0, most)
    return most, total * tl.exp2(top - base) + other_total * tl.exp2(other_top - base)


@triton.jit
def _over_warps(x):
    """The sum over the second axis of `[PARTS, WARPS, WIDE]`. Pairs are brought to a thread, by one exchange without bank
    conflicts; `tl.sum` alone would store each warp's values 32 lanes to a bank (Triton 3.6)."""
    x = tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2, x.shape[2]))
    a, b = tl.split(tl.permute(x, (0, 3, 1, 2)))
    return tl.sum(a + b, 2)


@triton.jit
def attend_latent_head(
    out, partial, q, append, cache, sequences, item_start, scale, S: tl.constexpr, ROTATE: tl.constexpr,
    NORMS: tl.constexpr, KEYS: tl.constexpr, WARPS: tl.constexpr, COMPUTE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (items, heads); the step has one row. Arguments as `attend_latent_one`'s, but

    KEYS  keys of a tile to each of the program's WARPS
    """
    KIND: tl.constexpr = S.KIND
    NEOX: tl.constexpr = ROTATE == "neox"
    LANE: tl.constexpr = 128 // cache.v.dtype.element_ty.primitive_bitwidth
    WIDE: tl.constexpr = S.RANK if S.RANK < 32 * LANE else 32 * LANE
    PARTS: tl.constexpr = S.RANK // WIDE
    BESIDE: tl.constexpr = KEYS if KEYS * S.DIM < 32 * LANE else 32 * LANE // S.DIM
    N: tl.constexpr = KEYS * WARPS
    item = tl.program_id(0)
    head = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    splits = tl.load(item_start + 1)
    n_keys = tl.load(sequences.kv_len)
    if item >= splits:
        return
    last = n_keys - 1
    split = split_of(n_keys, splits)
    start = item * split
    newest = start + split >= n_keys
    stop = tl.minimum(last, start + split)
    tile = _load_tile(cache, sequences.table, start, stop, S, KEYS, WARPS, BESIDE, WIDE)
    b_k, b_v, k_scale, v_scale = _load_tile(cache, sequences.table, start + N, stop, S, KEYS, WARPS, BESIDE, WIDE)
    i = tl.arange(0, PARTS * WARPS)
    r = (i // WARPS * WIDE)[:, None] + tl.arange(0, WIDE)[None, :]
    d = tl.arange(0, N)[:, None] * 0 + tl.arange(0, S.DIM)[None, :]
    if ROTATE != "":
        rotation = append.rotation
        angle = tl.load(rotation.positions).to(tl.float32) * tl.load(rotation.freq + tl.arange(0, S.DIM // 2))
        sin, cos = sin_cos(angle)
        of_first, of_second = _spread(cos, sin, N, NEOX), _spread(-sin, cos, N, NEOX)
        slot = tl.load(rotation.slots).to(tl.int64)
    else:
        slot = tl.load(sequences.table + last // S.SIZE).to(tl.int64) * S.SIZE + last % S.SIZE
    if NORMS:
        gain = tl.reshape(tl.load(append.gain + r), (PARTS, WARPS, WIDE))
    p_q = q + head * (S.DIM + S.RANK)
    p_k, p_v = cache.k + slot * S.DIM, cache.v + slot * S.RANK
    # What is above comes with the step, before its first kernel, or from earlier steps.
    if PDL:
        tl.extra.cuda.gdc_wait()
    q_rest = tl.reshape(tl.load(p_q + S.DIM + r).to(COMPUTE).to(tl.float32), (PARTS, WARPS, WIDE))
    if ROTATE != "":
        v_new = tl.reshape(tl.load(rotation.v + r).to(tl.float32), (PARTS, WARPS, WIDE))
        q_key = _rotated(_pairs(p_q, N, S.DIM, NEOX), of_first, of_second, rotation.q_magnitude).to(q.dtype.element_ty)
        k_new = _rotated(_pairs(rotation.k, N, S.DIM, NEOX), of_first, of_second, rotation.k_magnitude)
        k_new = k_new.to(cache.k.dtype.element_ty)
        if NORMS:
            squares = tl.sum(tl.sum(v_new * v_new, 0), 1)  # [WARPS]
            v_new = v_new * (1.0 / tl.sqrt(squares / S.RANK + append.eps))[None, :, None] * gain
        v_new = v_new.to(cache.v.dtype.element_ty)
        stored = tl.where(newest & (head == 0), 1, 0)
        tl.store(p_k + d, k_new, mask=(tl.arange(0, N) < stored)[:, None])
        tl.store(p_v + r, tl.reshape(v_new, (PARTS * WARPS, WIDE)), mask=(i % WARPS < stored)[:, None])
    else:
        q_key, k_new = tl.load(p_q + d), as_values(tl.load(p_k + d), KIND, COMPUTE)
        v_new = tl.reshape(as_values(tl.load(p_v + r), KIND, COMPUTE), (PARTS, WARPS, WIDE))
    q_key = q_key.to(COMPUTE).to(tl.float32)
    # The new key begins the sums of the first warp.
    v_new = v_new.to(tl.float32)
    of_keys = tl.max(_by_warp(tl.sum(q_key * k_new.to(tl.float32), 1), KEYS, WARPS, BESIDE), 0)  # [WARPS]
    own = tl.sum(tl.sum(q_rest * v_new, 0), 1)
    if KIND != "plain":
        new_scale = tl.load(cache.v_scale + slot)
        of_keys, own, v_new = of_keys * tl.load(cache.k_scale + slot), own * new_scale, v_new * new_scale
    there = tl.arange(0, WARPS) < tl.where(newest, 1, 0)
    acc = tl.where(there[None, :, None], v_new, 0.0)
    top = tl.where(there, (of_keys + own) * scale, float("-inf"))
    total = tl.where(there, 1.0, 0.0)
    acc, top, total = _add_tile(
        (acc, top, total), q_key, q_rest, tile, start, stop, scale, KIND, KEYS, BESIDE, COMPUTE
    )  # fmt: skip
    for begin in tl.range(start + N, stop, N, num_stages=1):
        n_k, n_v, next_k_scale, next_v_scale = _load_tile(
            cache, sequences.table, begin + N, stop, S, KEYS, WARPS, BESIDE, WIDE
        )  # fmt: skip
        tile = b_k, b_v, k_scale, v_scale
        acc, top, total = _add_tile(
            (acc, top, total), q_key, q_rest, tile, begin, stop, scale, KIND, KEYS, BESIDE, COMPUTE
        )  # fmt: skip
        b_k, b_v, k_scale, v_scale = n_k, n_v, next_k_scale, next_v_scale
    best, whole = tl.reduce((top, total), 0, _joined)
    base = tl.where(best == float("-inf"), 0.0, best)
    result = _over_warps(acc * tl.exp2(top - base)[None, :, None])  # [PARTS, WIDE]
    r = tl.arange(0, PARTS)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    if splits == 1:
        tl.store(out + head * S.RANK + r, (result / tl.where(whole > 0, whole, 1.0)).to(out.dtype.element_ty))
    else:
        place = item.to(tl.int64) * S.HEADS + head
        tl.store(partial.sums + place * S.RANK + r, result)
        tl.store(partial.top_sum + place * 2, best)
        tl.store(partial.top_sum + place * 2 + 1, whole)
