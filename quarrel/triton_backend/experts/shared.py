"""The chosen experts of one token and the shared one beside them: one launch up, one down onto the stream.

A program of `up_with_shared` has 32 rows, so it rounds its block to int8x2 by itself, and nobody counts who is done. One of
`down_with_shared` has all that it reads of its rows on the way before its wait.

A shared expert with a gate (Qwen 3.5, Qwen3-Next) has one number a token, g. Its nodes say W (sigmoid(g) y); here that is
sigmoid(g) (W y), as g is the same for all of y. The router's launch makes g, in float32 (`route.py: Rate`), and neither it
nor sigmoid(g) y is rounded to 16 bits, as both are between the nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from quarrel.gguf import GGMLType
from quarrel.ops.contract import Value
from quarrel.ops.linear import LinearAddSpec, LinearSpec
from quarrel.ops.moe import ExpertDownSpec, ExpertUpSpec
from quarrel.ops.program import Node
from quarrel.triton_backend.elementwise.activation import activate
from quarrel.triton_backend.experts.choose import Chooses, best_experts, choose_left, expert_at, no_choice
from quarrel.triton_backend.experts.matvec import _as_int8x2, _tensor
from quarrel.triton_backend.experts.matvec_kernels import _planes_from
from quarrel.triton_backend.formats.dots import load_tile, tile_products
from quarrel.triton_backend.formats.int8x2 import store_int8x2
from quarrel.triton_backend.formats.table import INTEGERS, by_name, matvec_planes, word_columns
from quarrel.triton_backend.runtime.arrays import Packed, Slot
from quarrel.triton_backend.runtime.launch import INTERPRETED, cdiv, power_of_two
from quarrel.triton_backend.runtime.site import Batch, Launch, Site, starts_early

_ROWS: tl.constexpr = tl.constexpr(32)
_UP_WORDS, _UP_WARPS, _UP_REGISTERS = 128, 8, 128
"""Two programs to a multiprocessor, though 16 to 40 bytes spill: on an H200 1.4 us a layer of Qwen3.6-35B-A3B and Nemotron
less than with 140 to 146 registers and one, and 1 to 3 of Granite-4-h-tiny."""
_DOWN_ROWS, _DOWN_WORDS = 2, 512
_SHORT_WORDS, _MOST_SHORT = 128, 24
"""Of the chosen experts' rows down, in so many tiles at most: 3.5 us a layer of Nemotron with one warp for two or four."""
_AHEAD = 32
"""Words of codes of the chosen experts, for each thread, that a program down has on their way."""
_MOST_TILES = 16
"""Of the chosen experts' rows down: all are written out."""


class Up(NamedTuple):
    """Where one side of a launch up has its weights and stores its result; of the shared expert or of the chosen ones."""

    gate: Any  # Planes; of a plain activation up's again
    up: Any  # Planes
    to: Any  # int32, int8x2 of [chosen, N]


class Shape(NamedTuple):
    """Constants of a side."""

    N: int
    FORMAT: str
    W: int
    """Words of a tile."""


@triton.jit
def _up_rows(
    side, x, stacked, first, to, S: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr,
    WAITS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Rows first.. of act(gate x) * up x, or of act(up x), as a block of int8x2; WAITS for x behind its first tiles."""
    FORMAT: tl.constexpr = S.FORMAT
    W: tl.constexpr = S.W
    N: tl.constexpr = S.N
    KW: tl.constexpr = K // word_columns(FORMAT)
    TILES: tl.constexpr = (KW + W - 1) // W
    n = (first + tl.arange(0, _ROWS)).to(tl.int64)
    w_up = _planes_from(FORMAT, side.up, stacked, K)
    w_gate = _planes_from(FORMAT, side.gate, stacked, K)
    u_acc = tl.zeros([_ROWS, W // 4], tl.float32)
    g_acc = tl.zeros([_ROWS, W // 4], tl.float32)
    qu, hu, su, tu = load_tile(FORMAT, w_up, n, first, N, 0, K, _ROWS, W, ASM)
    if GATED:
        qg, hg, sg, tg = load_tile(FORMAT, w_gate, n, first, N, 0, K, _ROWS, W, ASM)
    if WAITS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for start in tl.range(0, (TILES - 1) * W, W, num_stages=1):
        qu1, hu1, su1, tu1 = load_tile(FORMAT, w_up, n, first, N, start + W, K, _ROWS, W, ASM)
        if GATED:
            qg1, hg1, sg1, tg1 = load_tile(FORMAT, w_gate, n, first, N, start + W, K, _ROWS, W, ASM)
        u_acc += tile_products(FORMAT, qu, hu, su, tu, x, start, K, _ROWS, W, ASM)
        if GATED:
            g_acc += tile_products(FORMAT, qg, hg, sg, tg, x, start, K, _ROWS, W, ASM)
            qg, hg, sg, tg = qg1, hg1, sg1, tg1
        qu, hu, su, tu = qu1, hu1, su1, tu1
    u_acc += tile_products(FORMAT, qu, hu, su, tu, x, (TILES - 1) * W, K, _ROWS, W, ASM)
    if GATED:
        g_acc += tile_products(FORMAT, qg, hg, sg, tg, x, (TILES - 1) * W, K, _ROWS, W, ASM)
    v = tl.sum(u_acc, 1)
    v = activate(tl.sum(g_acc, 1), KIND) * v if GATED else activate(v, KIND)
    block = first // 32 + tl.arange(0, 1)
    store_int8x2(to, tl.reshape(v, (1, 2, 16)), block, block >= 0, N)


@triton.jit
def up_with_shared(
    routed, shared, x, ids, left, R: tl.constexpr, SHARED: tl.constexpr, S: tl.constexpr, G: tl.constexpr, E: tl.constexpr,
    K: tl.constexpr, USED: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr, LEFT: tl.constexpr, PDL: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Grid: SHARED.N / 32 programs of the shared expert, then R.N / 32 of each that is chosen. R, SHARED: their shapes.
    LEFT: each of these finds its expert itself, and one program more stores the choice."""
    OWN: tl.constexpr = SHARED.N // 32
    PER: tl.constexpr = R.N // 32
    pid = tl.program_id(0)
    if pid < OWN:
        _up_rows(shared, x, pid.to(tl.int64) * 0, pid * 32, shared.to, SHARED, K, GATED, KIND, PDL, ASM)
    else:
        # Whoever comes next may start when all programs here know their experts, and so knows them too.
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        j = (pid - OWN) // PER
        if LEFT:
            if j == USED:
                choose_left(left, S, G, E)
                return
            mine = expert_at(left, j, S)
        else:
            mine = tl.load(ids + j)
        stacked = mine.to(tl.int64) * R.N
        to = routed.to + j * (R.N // 2 + R.N // 32 * 3)
        _up_rows(routed, x, stacked, (pid - OWN) % PER * 32, to, R, K, GATED, KIND, False, ASM)


class Down(NamedTuple):
    """What one side of a launch down reads."""

    w: Any  # Planes
    x: Any  # int32, int8x2 of [chosen, K]


class DownShape(NamedTuple):
    """Constants of a side."""

    K: int
    FORMAT: str
    W: int
    """Words of a tile."""


@triton.jit
def down_with_shared(
    out, routed, shared, ids, left, shares, rate, residual, alpha, N, R: tl.constexpr, SHARED: tl.constexpr,
    S: tl.constexpr, USED: tl.constexpr, RATED: tl.constexpr, ROWS: tl.constexpr, AHEAD: tl.constexpr, LEFT: tl.constexpr,
    PDL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """out [N] float32: residual + alpha * (the sum over chosen experts of share * W x, and the shared expert's W x), with
    RATED times the sigmoid of rate [1], float32. LEFT: the first experts are found here, as `ids` may be stored by the
    launch ahead."""
    FORMAT: tl.constexpr = R.FORMAT
    K: tl.constexpr = R.K
    W: tl.constexpr = R.W
    OWN_FORMAT: tl.constexpr = SHARED.FORMAT
    OWN_K: tl.constexpr = SHARED.K
    OWN_W: tl.constexpr = SHARED.W
    TILES: tl.constexpr = (K // word_columns(FORMAT) + W - 1) // W
    OWN_TILES: tl.constexpr = (OWN_K // word_columns(OWN_FORMAT) + OWN_W - 1) // OWN_W
    ALL: tl.constexpr = USED * TILES
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.program_id(0) * ROWS
    n = tl.minimum(first + tl.arange(0, ROWS), N - 1).to(tl.int64)
    if RATED:  # as old as the ids are
        g = tl.load(rate)
    own = ()
    for i in tl.static_range(OWN_TILES):
        own += (load_tile(OWN_FORMAT, shared.w, n, first, N, i * OWN_W, OWN_K, ROWS, OWN_W, ASM),)
    tiles = ()
    FIRST: tl.constexpr = ALL if ALL < AHEAD else AHEAD
    if LEFT:
        found = best_experts(left, S, (FIRST + TILES - 1) // TILES)
    for i in tl.static_range(FIRST):
        if LEFT:
            mine = found[i // TILES]
        else:
            mine = tl.load(ids + i // TILES)
        w = _planes_from(FORMAT, routed.w, mine.to(tl.int64) * N, K)
        tiles += (load_tile(FORMAT, w, n, first, N, i % TILES * W, K, ROWS, W, ASM),)
    if PDL:
        tl.extra.cuda.gdc_wait()
    own_acc = tl.zeros([ROWS, OWN_W // 4], tl.float32)
    for i in tl.static_range(OWN_TILES):
        q, u, s, t = own[i]
        own_acc += tile_products(OWN_FORMAT, q, u, s, t, shared.x, i * OWN_W, OWN_K, ROWS, OWN_W, ASM)
    acc = tl.zeros([ROWS, W // 4], tl.float32)
    for i in tl.static_range(ALL):
        if i + AHEAD < ALL:
            w = _planes_from(FORMAT, routed.w, tl.load(ids + (i + AHEAD) // TILES).to(tl.int64) * N, K)
            tiles += (load_tile(FORMAT, w, n, first, N, (i + AHEAD) % TILES * W, K, ROWS, W, ASM),)
        q, u, s, t = tiles[i]
        x = routed.x + i // TILES * (K // 2 + K // 32 * 3)
        acc += tl.load(shares + i // TILES) * tile_products(FORMAT, q, u, s, t, x, i % TILES * W, K, ROWS, W, ASM)
    r = first + tl.arange(0, ROWS)
    own_total = tl.sum(own_acc, 1)
    if RATED:
        own_total *= activate(g, "sigmoid")
    total = tl.sum(acc, 1) + own_total
    total = tl.load(residual + r, mask=r < N, other=0.0) + alpha * total
    tl.store(out + r, total, mask=r < N)


@dataclass(frozen=True)
class WithShared:
    """The nodes of a layer's experts in their order."""

    up: Node
    down: Node
    shared_maps: Sequence[Node]
    """Gate and up, or up alone."""
    activation: Node
    shared_down: Node
    add: Node
    rate: Node | None = None
    """Of a shared expert with a gate, the LINEAR that makes its logit."""

    def fits(self) -> bool:
        up, down = self.up.spec, self.down.spec
        first, last = self.shared_maps[0].spec, self.shared_down.spec.linear
        formats = {ref.type for ref in self.up.inputs[2 : 3 + up.gated]}  # type: ignore[union-attr]
        kinds = {up.activation, self.activation.spec.activation}
        rows = (up.n, first.n, down.k, last.k)
        return (
            not (up.bias or down.bias or first.bias or last.bias)
            and self.shared_down.spec.scale == 1.0
            and len(formats) == len(kinds) == 1
            and kinds <= {"silu", "relu2"}
            and len(self.shared_maps) == 1 + up.gated
            and all(n.spec == first and n.inputs[0] is self.up.inputs[0] for n in self.shared_maps)
            and (self.rate is None or self._takes_rate(self.rate))
            and all(n % 32 == 0 for n in rows)
            and down.used * cdiv(down.k, 4 * _DOWN_WORDS) <= _MOST_TILES
            and all(_integers(t, k) for t, k in ((up.type, up.k), (first.type, up.k), (down.type, 32), (last.type, 32)))
        )

    def _takes_rate(self, rate: Node) -> bool:
        """Whether the router's launch can make it."""
        spec: LinearSpec = rate.spec
        return rate.inputs[0] is self.up.inputs[0] and (spec.type, spec.n, spec.bias) == (GGMLType.F32, 1, False)

    def rate_of(self, site: Site) -> tuple[Node, Slot] | None:
        """The gate's LINEAR, and where its logit is until the launch down."""
        return None if self.rate is None else (self.rate, site.lasting("rate", 1, torch.float32))


def _integers(type: GGMLType, k: int) -> bool:
    return type.name in INTEGERS and k % 32 == 0


def _words_of(format: str, k: int) -> int:
    dots = by_name(format).dots
    assert dots is not None
    return cdiv(k, dots.word)


def _tile_words(format: str, k: int, most: int) -> int:
    return min(most, power_of_two(_words_of(format, k)))


def _int8x2(site: Site, value: Value) -> Any:
    made, _ = site.int8x2_target(value)
    assert made is not None, value
    return made


def build_up(site: Site, nodes: WithShared, chooses: Chooses | None) -> Launch:
    """EXPERT_UP, and the shared expert's maps with their activation."""
    spec: ExpertUpSpec = nodes.up.spec
    x, ids_value, *refs = nodes.up.inputs
    ids = site.slot(ids_value)  # type: ignore[arg-type]
    rows, prepare = _as_int8x2(site, x, 1, spec.k, spec.type.name)  # type: ignore[arg-type]

    def side(stacks: Sequence[Packed], value: Any) -> Up:
        planes = [matvec_planes(s) for s in stacks]
        return Up(planes[0], planes[-1], _int8x2(site, value))

    stacks = [site.weight(ref) for ref in refs[: 1 + spec.gated]]  # type: ignore[arg-type]
    own = [site.weight(node.inputs[1]) for node in nodes.shared_maps]  # type: ignore[arg-type]
    routed, shared = side(stacks, nodes.up.outputs[0]), side(own, nodes.shared_down.inputs[1])

    def run(batch: Batch) -> None:
        if prepare is not None:
            prepare(batch)
        r, s = (
            Shape(n, w.format, _tile_words(w.format, spec.k, _UP_WORDS))
            for n, w in ((spec.n, stacks[0]), (own[0].n, own[0]))
        )
        left, constants = chooses or no_choice(ids.tensor)
        programs = s.N // 32 + spec.used * (r.N // 32) + (chooses is not None)
        site.launch(
            up_with_shared, (programs,), routed, shared, _tensor(rows), ids.tensor, left(), R=r, SHARED=s, **constants,
            K=spec.k, USED=spec.used, GATED=spec.gated, KIND=spec.activation, LEFT=chooses is not None, ASM=not INTERPRETED,
            warps=_UP_WARPS, maxnreg=_UP_REGISTERS, early=starts_early(site),
        )  # fmt: skip

    return run


def build_down(site: Site, nodes: WithShared, chooses: Chooses | None) -> Launch:
    """EXPERT_DOWN, the shared expert's LINEAR_ADD onto it, and ADD to the stream."""
    spec: ExpertDownSpec = nodes.down.spec
    last: LinearAddSpec = nodes.shared_down.spec
    y, ids_value, shares_value, down = nodes.down.inputs
    ids, shares = site.slot(ids_value), site.slot(shares_value)  # type: ignore[arg-type]
    rate = nodes.rate_of(site)
    stream, out = site.slot(nodes.add.inputs[0]), site.slot(nodes.add.outputs[0])  # type: ignore[arg-type]
    own_ref, own_x = nodes.shared_down.inputs[2], nodes.shared_down.inputs[1]
    stack, own = site.weight(down), site.weight(own_ref)  # type: ignore[arg-type]
    routed, shared = Down(matvec_planes(stack), site.int8x2(y)), Down(matvec_planes(own), site.int8x2(own_x))  # type: ignore[arg-type]

    def run(batch: Batch) -> None:
        r = DownShape(spec.k, stack.format, _tile_words(stack.format, spec.k, _SHORT_WORDS))
        if spec.used * cdiv(_words_of(stack.format, spec.k), r.W) > _MOST_SHORT:
            r = r._replace(W=_tile_words(stack.format, spec.k, _DOWN_WORDS))
        # Rows of 64 words leave a program room for more of them: 0.4 us a layer of Qwen3.6-35B-A3B on an H200.
        rows = 2 * _DOWN_ROWS if r.W <= 64 and spec.n >= 2048 else _DOWN_ROWS
        most = min(512, 2 * r.W)
        s = DownShape(last.linear.k, own.format, _tile_words(own.format, last.linear.k, most))
        warps = max(1, r.W // 128)
        left, constants = chooses or no_choice(ids.tensor)
        site.launch(
            down_with_shared, (cdiv(spec.n, rows),), out.tensor, routed, shared, ids.tensor, left(), shares.tensor,
            out.tensor if rate is None else rate[1].tensor, stream.tensor, nodes.add.spec.scale, spec.n, R=r, SHARED=s,
            S=constants["S"], USED=spec.used, RATED=rate is not None, LEFT=chooses is not None,
            ROWS=rows, AHEAD=max(1, _AHEAD * 32 * warps // (rows * r.W)), ASM=not INTERPRETED, warps=warps,
            early=starts_early(site),
        )  # fmt: skip

    return run
