"""HEAD_LINEAR: a matrix of each head's own, in float32 arithmetic (`floats.py`).

Activations stay as they are: what is compressed keeps its precision, and the matrices are a few percent of a model.
"""

from __future__ import annotations

from quarrel.cpu_backend.linear.epilogue import Output
from quarrel.cpu_backend.linear.floats import ROWS, T_BLOCK, exact_rows, exact_scratch, float_rows
from quarrel.cpu_backend.linear.matvec import Rows
from quarrel.cpu_backend.lowering import Lowering
from quarrel.cpu_backend.plan import Header
from quarrel.cpu_backend.runtime.abi import Fields, KernelDef
from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import Kernel, Val
from quarrel.cpu_backend.runtime.vector import each, f32s
from quarrel.ops.heads import HEAD_LINEAR, HeadLinearSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation


def head_linear(name: str, level: Level, s: HeadLinearSpec) -> KernelDef:
    """Chunk (token block, head, tile): ROWS weight rows of a head for T_BLOCK tokens; the first tile copies the rest."""
    tiles = -(-s.n // ROWS)

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        of_block = chunk % (s.n_heads * tiles)
        head, first = of_block.udiv(tiles), of_block % tiles * ROWS
        start = chunk.udiv(s.n_heads * tiles) * T_BLOCK
        stop = k.minimum(start + T_BLOCK, a.live_rows)
        span = (first, k.minimum(first + ROWS, s.n))
        matrix = exact_rows(k, level, name, a, a.w + head * (s.n * a.row_bytes), span, s.k, scratch)
        x, y = a.x + head * (4 * (s.k + s.rest)), a.y + head * (4 * (s.rest + s.n))
        rows = Rows(start, stop, lambda t: x + t * (4 * s.width), lambda t: t)
        none = k.i64(0)
        out = Output(y + 4 * s.rest, k.i64(4 * s.out_width), k.i64(s.n), none, none, k.f32(1.0))
        float_rows(k, level, matrix, span, rows, out, s.k % 16 != 0)
        if s.rest:
            with k.when(first.eq(0)), k.range(start, stop) as t:
                source, to = rows.source(t) + 4 * s.k, y + t * (4 * s.out_width)
                each(k, k.i64(s.rest), lambda o, lanes: k.store(k.load(source + o, f32s(lanes)), to + o))

    return KernelDef(f"heads/{name}/{s}", ("live_rows", "x", "y", "w", "k", "row_bytes"), body, exact_scratch(name, s.k))


def build_head_linear(e: Lowering, node: Node) -> None:
    s, (x, weight), (y,) = node.spec, node.inputs, node.outputs
    w, axis = e.weights.matrix(weight), e.plan.rows(x)
    fields = {"live_rows": e.plan.live(axis), "x": x, "y": y, "w": w.address, "k": s.k, "row_bytes": w.row_bytes}
    kernel = head_linear(w.type, e.plan.level, s)
    e.plan.stage(e.job(kernel, Header.axis(axis), fields, T_BLOCK, s.n_heads * -(-s.n // ROWS)))


IMPLEMENTATIONS = (Implementation(HEAD_LINEAR, "float32 tile by head", build_head_linear),)
