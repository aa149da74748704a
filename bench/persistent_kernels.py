"""A kernel that `persistent.py` tries: a layer, or its second half, in one launch whose programs meet at grid barriers.

One program of 16 warps a multiprocessor. A unit is 32 rows of a map, two a warp, so a sum stays within a warp, and its 32
results are a block of the next map's activations, halved by the program that has them. RMS norm scales all of a row alike,
so x * gain is halved before the norm is known: each unit leaves the sum of its squares, and the next map's sums are scaled
by all of them. So neither norm nor halving is a phase. Between its arrival at a barrier and its wait, a program sends for
the first tiles of its next weights; before that it has asked the L2 cache for the first bytes of their codes.

The interpreter runs one program after the other, so a barrier would wait for ever: there, each phase is a launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quarrel.triton_backend.attend_one import LOG2E, _tile, rotated
from quarrel.triton_backend.dots import load_row, load_tile, products
from quarrel.triton_backend.elementwise import activate
from quarrel.triton_backend.halved import store_halved
from quarrel.triton_backend.rope import cache_row, sin_cos

PHASES = ("qkv", "attend", "o", "gate_up", "down")
_LOG2E: tl.constexpr = tl.constexpr(LOG2E)

# The first program's share makes the sum of all shares 2^31: the top bit turns once all are there, and nothing is reset.
_ARRIVE: tl.constexpr = tl.constexpr("""{
    .reg .pred first;
    .reg .b32 t, was;
    mov.u32 t, %tid.x;
    setp.eq.u32 first, t, 0;
    mov.b32 was, 0;
    @first atom.add.release.gpu.global.u32 was, [$1], $2;
    mov.b32 $0, was;
}""")
# Who waits in vain says so in the word behind the barrier and goes on: what follows is wrong, but it ends.
_WAIT: tl.constexpr = tl.constexpr("""{
    .reg .pred p;
    .reg .b32 t, now, left;
    mov.b32 left, $3;
    mov.u32 t, %tid.x;
    setp.ne.u32 p, t, 0;
    @p bra DONE;
AGAIN:
    ld.acquire.gpu.global.u32 now, [$1];
    xor.b32 now, now, $2;
    setp.lt.s32 p, now, 0;
    @p bra DONE;
    sub.s32 left, left, 1;
    setp.gt.s32 p, left, 0;
    @p bra AGAIN;
    mov.b32 left, 0;
    st.global.u32 [$1+4], 1;
DONE:
    mov.b32 $0, left;
}""")
_ASK: tl.constexpr = tl.constexpr("""{
    .reg .pred p;
    .reg .b32 t;
    mov.u32 t, %tid.x;
    setp.eq.u32 p, t, 0;
    setp.gt.and.s32 p, $2, 0, p;
    @p cp.async.bulk.prefetch.L2.global [$1], $2;
    mov.b32 $0, t;
}""")


@triton.jit
def arrive(barrier, MORE: tl.constexpr):
    """If more phases follow: what this program wrote is there for whoever waits. Its first thread keeps what it found."""
    was = 0
    if MORE:
        tl.debug_barrier()
        share = tl.where(tl.program_id(0) == 0, 2147483647 - tl.num_programs(0) + 2, 1)
        was = tl.inline_asm_elementwise(
            _ARRIVE, "=r,l,r,~{memory}", [barrier, share], dtype=tl.int32, is_pure=False, pack=1
        )  # fmt: skip
    return was


@triton.jit
def wait(barrier, was, patience, FIRST: tl.constexpr, PDL: tl.constexpr):
    """Until all programs have arrived, or for `patience` looks, of which it gives what is left. The first phase of a launch
    waits for the kernel ahead."""
    if FIRST:
        if PDL:
            tl.extra.cuda.gdc_wait()
    else:
        patience = tl.inline_asm_elementwise(
            _WAIT, "=r,l,r,r,~{memory}", [barrier, was, patience], dtype=tl.int32, is_pure=False, pack=1
        )  # fmt: skip
        tl.debug_barrier()
    return patience


@triton.jit
def ask(codes, unit, units, K: tl.constexpr, nbytes, MORE: tl.constexpr):
    """The L2 cache for the first bytes of a unit's codes."""
    if MORE:
        nbytes = tl.where(unit < units, nbytes, 0)
        tl.inline_asm_elementwise(
            _ASK, "=r,l,r", [codes + unit.to(tl.int64) * (K // 8 * 32), nbytes], dtype=tl.int32, is_pure=False, pack=1
        )  # fmt: skip


@triton.jit
def tile(FORMAT: tl.constexpr, w, unit, i, N, K: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    """Tile i of a unit's 32 rows; beyond the last row, the last one again."""
    n = tl.minimum(unit * 32 + tl.arange(0, 32), N - 1).to(tl.int64)
    return load_tile(FORMAT, w[0], w[1], w[2], w[3], n, unit * 32, N, i * W, K, 32, W, ASM)


@triton.jit
def add(FORMAT: tl.constexpr, sums, t, x, i, K: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    """Products of tile t with its columns of x, [32, W / 4], added up."""
    return sums + products(FORMAT, t[0], t[1], t[2], t[3], load_row(FORMAT, x, i * W, K, W, ASM), 32, W, ASM)


@triton.jit
def add_two(FORMAT: tl.constexpr, a, b, s, t, x, i, K: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    """The same for two tiles of the same columns."""
    row = load_row(FORMAT, x, i * W, K, W, ASM)
    a += products(FORMAT, s[0], s[1], s[2], s[3], row, 32, W, ASM)
    return a, b + products(FORMAT, t[0], t[1], t[2], t[3], row, 32, W, ASM)


@triton.jit
def three_tiles(FORMAT: tl.constexpr, w, unit, N, K: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    """The first of a unit."""
    tl.static_assert(K // 8 // W >= 3, "a row has less than three tiles")
    a, b = tile(FORMAT, w, unit, 0, N, K, W, ASM), tile(FORMAT, w, unit, 1, N, K, W, ASM)
    return a, b, tile(FORMAT, w, unit, 2, N, K, W, ASM)


@triton.jit
def walk(FORMAT: tl.constexpr, w, three, unit, x, N, K: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    """A unit's products with x but for its last three tiles, which are then on their way, as three always are."""
    a, b, c = three
    sums = tl.zeros([32, W // 4], tl.float32)
    for i in tl.range(0, K // 8 // W - 3, num_stages=1):
        d = tile(FORMAT, w, unit, i + 3, N, K, W, ASM)
        sums = add(FORMAT, sums, a, x, i, K, W, ASM)
        a, b, c = b, c, d
    return sums, (a, b, c)


@triton.jit
def drain(FORMAT: tl.constexpr, sums, three, x, K: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    """[32], with the last three."""
    TILES: tl.constexpr = K // 8 // W
    sums = add(FORMAT, sums, three[0], x, TILES - 3, K, W, ASM)
    sums = add(FORMAT, sums, three[1], x, TILES - 2, K, W, ASM)
    return tl.sum(add(FORMAT, sums, three[2], x, TILES - 1, K, W, ASM), 1)


@triton.jit
def two_pairs(
    FORMAT: tl.constexpr, v, w, unit, other, N, K: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """The first two tiles of a unit of v and of another of w."""
    a, b = tile(FORMAT, v, unit, 0, N, K, W, ASM), tile(FORMAT, w, other, 0, N, K, W, ASM)
    return a, b, tile(FORMAT, v, unit, 1, N, K, W, ASM), tile(FORMAT, w, other, 1, N, K, W, ASM)


@triton.jit
def drain_two(FORMAT: tl.constexpr, a, b, pairs, x, K: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    """[32] of each, with the last two pairs."""
    TILES: tl.constexpr = K // 8 // W
    a, b = add_two(FORMAT, a, b, pairs[0], pairs[1], x, TILES - 2, K, W, ASM)
    a, b = add_two(FORMAT, a, b, pairs[2], pairs[3], x, TILES - 1, K, W, ASM)
    return tl.sum(a, 1), tl.sum(b, 1)


@triton.jit
def put_block(to, v, block, K: tl.constexpr):
    """32 values as block `block` of a halved row of K."""
    at = block + tl.arange(0, 1)
    store_halved(to, tl.reshape(v, (1, 2, 16)), at, at < K // 32, K)


@triton.jit
def leave(h, to, squares, rows, gain, unit, E: tl.constexpr):
    """A unit's rows of the residual stream: as they are, times the next norm's gain in halved form, and their squares."""
    row = unit * 32 + tl.arange(0, 32)
    tl.store(h + row, rows, mask=row < E)
    put_block(to, rows * tl.load(gain + row, mask=row < E, other=0.0), unit, E)
    tl.store(squares + unit, tl.sum(rows * rows, 0), mask=unit < E // 32)


@triton.jit
def norm_scale(squares, eps, E: tl.constexpr, BLOCKS: tl.constexpr):
    """What RMS norm multiplies a row with, by the squares that were left."""
    block = tl.arange(0, BLOCKS)
    return 1.0 / tl.sqrt(tl.sum(tl.load(squares + block, mask=block < E // 32, other=0.0), 0) / E + eps)


@triton.jit
def two_units(
    FORMAT: tl.constexpr, w, unit, x, N, barrier, was, patience, K: tl.constexpr, W: tl.constexpr, FIRST: tl.constexpr,
    PDL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """[32] of a unit, and of the next."""
    a0, b0, a1, b1 = two_pairs(FORMAT, w, w, unit, unit + 1, N, K, W, ASM)
    patience = wait(barrier, was, patience, FIRST, PDL)
    a, b = tl.zeros([32, W // 4], tl.float32), tl.zeros([32, W // 4], tl.float32)
    for i in tl.range(0, K // 8 // W - 2, num_stages=1):
        a2, b2 = tile(FORMAT, w, unit, i + 2, N, K, W, ASM), tile(FORMAT, w, unit + 1, i + 2, N, K, W, ASM)
        a, b = add_two(FORMAT, a, b, a0, b0, x, i, K, W, ASM)
        a0, b0, a1, b1 = a1, b1, a2, b2
    a, b = drain_two(FORMAT, a, b, (a0, b0, a1, b1), x, K, W, ASM)
    return a, b, patience


@triton.jit
def chosen(which, q, k, v):
    """A plane of one of three maps."""
    return tl.multiple_of(tl.where(which == 0, q, tl.where(which == 1, k, v)), 16)


@triton.jit
def attend(
    x, qkv, keys, values, freq, table, position, barrier, was, patience, E: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, KEYS: tl.constexpr, FIRST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A query head a program, over at most KEYS older keys and the new one, which is rotated and kept; `x` is halved."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    head = tl.program_id(0)
    older = tl.where(head < HEADS, position, 0)
    kv_head = tl.minimum(head // GROUP, KV_HEADS - 1)
    b_k, b_v, _, _ = _tile(keys, values, keys, values, table, kv_head, 0, older, KV_HEADS, DIM, DIM, SIZE, KEYS, "plain")
    sin, cos = sin_cos(position.to(tl.float32) * tl.load(freq + tl.arange(0, DIM // 2)))
    sin, cos = sin[None, :], cos[None, :]
    slot = (tl.load(table + position // SIZE) * SIZE + position % SIZE).to(tl.int64)
    new = cache_row(slot, kv_head, KV_HEADS, SIZE) * DIM
    patience = wait(barrier, was, patience, FIRST, PDL)
    if head < HEADS:
        d, one = tl.arange(0, DIM), tl.arange(0, 1)
        k, v = qkv + E, qkv + E + KV_HEADS * DIM
        b_q = tl.reshape(rotated(qkv, head * DIM + one, one < 1, sin, cos, 1.0, qkv, False, 1, DIM // 2), (DIM,))
        b_new = tl.reshape(rotated(k, kv_head * DIM + one, one < 1, sin, cos, 1.0, keys, False, 1, DIM // 2), (DIM,))
        v_new = tl.load(v + kv_head * DIM + d)
        if head % GROUP == 0:
            tl.store(keys + new + d, b_new)
            tl.store(values + new + d, v_new)
        scaled = b_q.to(tl.float32) * (_LOG2E * DIM**-0.5)
        own = tl.sum(scaled * b_new.to(tl.float32), 0)
        score = tl.sum(b_k.to(tl.float32) * scaled[None, :], 1)
        score = tl.where(tl.arange(0, KEYS) < older, score, float("-inf"))
        top = tl.maximum(tl.max(score, 0), own)
        p, p_own = tl.exp2(score - top), tl.exp2(own - top)
        y = tl.sum(p[:, None] * b_v.to(tl.float32), 0) + p_own * v_new.to(tl.float32)
        block = head * (DIM // 32) + tl.arange(0, DIM // 32)
        store_halved(x, tl.reshape(y / (tl.sum(p, 0) + p_own), (DIM // 32, 2, 16)), block, block < E // 32, E)
    return patience


@triton.jit
def enter(h, mid, squares, gain, E: tl.constexpr):
    """What a layer finds of the one before it; a program a unit."""
    unit = tl.program_id(0)
    row = unit * 32 + tl.arange(0, 32)
    leave(h, mid, squares, tl.load(h + row, mask=row < E, other=0.0), gain, unit, E)


@triton.jit
def layer(
    h, x, mid, squares, inner, qkv, freq, table, position, eps, keys, values, gain, next_gain,
    qc, qb, qs, qt, kc, kb, ks, kt, vc, vb, vs, vt, oc, ob, os, ot, gc, gb, gs, gt, uc, ub, us, ut, dc, db, ds, dt,
    barrier, patience, nbytes, E: tl.constexpr, F: tl.constexpr, BLOCKS: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, KEYS: tl.constexpr, KIND: tl.constexpr, FV: tl.constexpr,
    FD: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, NEXT: tl.constexpr, PER: tl.constexpr, W: tl.constexpr,
    PDL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Phases FIRST to LAST of a layer of one token.

    0: qkv = maps of the norm of h        from `mid` (h times a gain, halved) and the squares of h
    1: x = attention, halved              rotation and append inside, up to KEYS older keys
    2: h += o x, `mid` and squares        with the gain of the second norm
    3: inner = act(gate n) * up n, halved
    4: h += down inner                    NEXT: `mid` and squares too, with the gain of the next layer
    """
    unit = tl.program_id(0)
    row = unit * 32 + tl.arange(0, 32)
    was = 0
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if FIRST == 0:
        # Two units a program: q's first, then k's, then v's.
        KV: tl.constexpr = KV_HEADS * DIM
        mine = unit * 2
        which = (mine >= E // 32).to(tl.int32) + (mine >= (E + KV) // 32).to(tl.int32)
        local = mine - tl.where(which == 0, 0, E // 32 + (which - 1) * (KV // 32))
        N = tl.where(which == 0, E, KV)
        if FV == "Q4_K":
            w = chosen(which, qc, kc, vc), qb, chosen(which, qs, ks, vs), chosen(which, qt, kt, vt)
            a, b, patience = two_units("Q4_K", w, local, mid, N, barrier, was, patience, E, W, True, PDL, ASM)
        elif which == 2:
            a, b, patience = two_units(FV, (vc, vb, vs, vt), local, mid, KV, barrier, was, patience, E, W, True, PDL, ASM)
        else:
            w = chosen(which, qc, kc, kc), qb, chosen(which, qs, ks, ks), chosen(which, qt, kt, kt)
            a, b, patience = two_units("Q4_K", w, local, mid, N, barrier, was, patience, E, W, True, PDL, ASM)
        scale = norm_scale(squares, eps, E, BLOCKS)
        i = mine * 32 + tl.arange(0, 32)
        ask(oc, unit, E // 32, E, nbytes, LAST > 0)
        tl.store(qkv + i, (a * scale).to(qkv.dtype.element_ty), mask=i < E + 2 * KV)
        tl.store(qkv + i + 32, (b * scale).to(qkv.dtype.element_ty), mask=i + 32 < E + 2 * KV)
        was = arrive(barrier, LAST > 0)
    if FIRST <= 1 and LAST >= 1:
        patience = attend(
            x, qkv, keys, values, freq, table, position, barrier, was, patience, E, HEADS, KV_HEADS, DIM, SIZE, KEYS,
            FIRST == 1, PDL,
        )  # fmt: skip
        was = arrive(barrier, LAST > 1)
    if FIRST <= 2 and LAST >= 2:
        o = oc, ob, os, ot
        three = three_tiles("Q4_K", o, unit, E, E, W, ASM)
        patience = wait(barrier, was, patience, FIRST == 2, PDL)
        rows = tl.load(h + row, mask=row < E, other=0.0)
        sums, three = walk("Q4_K", o, three, unit, x, E, E, W, ASM)
        ask(gc, unit * PER, F // 32, E, nbytes, LAST > 2)
        ask(uc, unit * PER, F // 32, E, nbytes, LAST > 2)
        rows += drain("Q4_K", sums, three, x, E, W, ASM)
        leave(h, mid, squares, rows, gain, unit, E)
        was = arrive(barrier, LAST > 2)
    if FIRST <= 3 and LAST >= 3:
        TILES: tl.constexpr = E // 8 // W
        first, gate, up = unit * PER, (gc, gb, gs, gt), (uc, ub, us, ut)
        a0, b0, a1, b1 = two_pairs("Q4_K", gate, up, first, first, F, E, W, ASM)
        patience = wait(barrier, was, patience, FIRST == 3, PDL)
        scale = norm_scale(squares, eps, E, BLOCKS)
        a, b = tl.zeros([32, W // 4], tl.float32), tl.zeros([32, W // 4], tl.float32)
        for i in tl.range(0, PER * TILES - 2, num_stages=1):
            of, j = first + (i + 2) // TILES, (i + 2) % TILES
            a2, b2 = tile("Q4_K", gate, of, j, F, E, W, ASM), tile("Q4_K", up, of, j, F, E, W, ASM)
            a, b = add_two("Q4_K", a, b, a0, b0, mid, i % TILES, E, W, ASM)
            if i % TILES == TILES - 1:
                put_block(inner, activate(tl.sum(a, 1) * scale, KIND) * (tl.sum(b, 1) * scale), first + i // TILES, F)
                a, b = tl.zeros([32, W // 4], tl.float32), tl.zeros([32, W // 4], tl.float32)
            a0, b0, a1, b1 = a1, b1, a2, b2
        ask(dc, unit, E // 32, F, nbytes, LAST > 3)
        g, u = drain_two("Q4_K", a, b, (a0, b0, a1, b1), mid, E, W, ASM)
        put_block(inner, activate(g * scale, KIND) * (u * scale), first + PER - 1, F)
        was = arrive(barrier, LAST > 3)
    if LAST == 4:
        down = dc, db, ds, dt
        three = three_tiles(FD, down, unit, E, F, W, ASM)
        patience = wait(barrier, was, patience, FIRST == 4, PDL)
        old = tl.load(h + row, mask=row < E, other=0.0)
        some, three = walk(FD, down, three, unit, inner, E, F, W, ASM)
        new = old + drain(FD, some, three, inner, F, W, ASM)
        if NEXT:
            leave(h, mid, squares, new, next_gain, unit, E)
        else:
            tl.store(h + row, new, mask=row < E)
