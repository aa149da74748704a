"""Products with the chosen experts only: the entries of each expert are one small matrix product, in the order of `tile`.

Entry t * used + j is the j-th choice of token t. A chunk is one expert that has entries, and one tile of its weight rows.
An expert with few entries is read as in decoding; with more, its rows are unpacked once for all of them.
"""

from __future__ import annotations

from dataclasses import replace

from quarrel.cpu_backend.elementwise import gelu_tanh, relu2, silu
from quarrel.cpu_backend.formats.block import BlockFormat
from quarrel.cpu_backend.linear.epilogue import OUTPUT_FIELDS, Output
from quarrel.cpu_backend.linear.floats import exact_marks, exact_rows, exact_scratch, float_rows
from quarrel.cpu_backend.linear.matvec import MATRIX_FIELDS, MATVEC_ROWS, Matrix, Rows, matvec_rows
from quarrel.cpu_backend.linear.tile import LANES, tile_rows, tile_scratch, vectors
from quarrel.cpu_backend.runtime.abi import Fields, KernelDef
from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import I32, I64, Kernel, Val
from quarrel.cpu_backend.runtime.vector import each, f32s, sigmoid

EXPERT_FIELDS = ("first", "entries", "active", "shared", "x", "x_stride", "n_tiles")


def _rows(k: Kernel, a: Fields, expert: Val) -> Rows:
    """The expert's entries; `shared` of them at a time read the same row of x."""
    first, end = (k.load(a.first + (expert << 3), I64, 8 * i) for i in range(2))
    entries, x, stride, shared = a.entries, a.x, a.x_stride, a.shared

    def entry(i: Val) -> Val:
        return k.load(entries + (i << 3), I64)

    return Rows(first, end, lambda i: x + entry(i).udiv(shared) * stride, entry)


def _of_expert(k: Kernel, a: Fields, n: Val, expert: Val) -> Output:
    """Results with the expert's own bias."""
    out = Output.of(a, n)
    bias = k.select(out.bias.ne(0), out.bias + expert * (n << 2), 0)
    return Output(out.y, out.stride, n, bias, out.residual, out.scale)


def _expert_rows(stack: Matrix, expert: Val) -> Matrix:
    """One expert's matrix out of all of them, which lie one after another."""
    return replace(stack, w=stack.w + expert * stack.n * stack.row_bytes)


def expert_tile(fmt: BlockFormat, level: Level, tail: bool, k_padded: int) -> KernelDef:
    """Chunk (i, tile): weight rows of the i-th active expert, activations rounded to 8 bits."""
    step = LANES * vectors(level)

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        n_tiles = a.n_tiles
        expert = k.load(a.active + (chunk.udiv(n_tiles) << 3), I64)
        first = (chunk - chunk.udiv(n_tiles) * n_tiles) * step
        m = _expert_rows(Matrix.of(a), expert)
        rows, out = _rows(k, a, expert), _of_expert(k, a, m.n, expert)
        with k.either(rows.stop - rows.start <= MATVEC_ROWS) as (small, large):
            with small:
                matvec_rows(k, level, fmt, m, rows, (first, k.minimum(first + step, m.n)), out, tail)
            with large:
                tile_rows(k, level, fmt, m, first, rows, out, scratch, tail)

    fields = (*EXPERT_FIELDS, *MATRIX_FIELDS, *OUTPUT_FIELDS)
    name = f"experts/tile/{fmt.name}{'/tail' if tail else ''}"
    return KernelDef(name, fields, body, tile_scratch(fmt, level, k_padded))


def expert_matvec(fmt: BlockFormat, level: Level, tail: bool, shared: bool) -> KernelDef:
    """The decode path, without a list of entries: chunk (j, c) is rows bounds[c] .. bounds[c + 1] - 1 of choice j."""

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        j = chunk.udiv(a.n_tiles)
        at = a.bounds + (chunk - j * a.n_tiles << 3)
        chosen = k.load(a.ids + (j << 2), I32).to(I64)
        expert = k.minimum(k.maximum(chosen, 0), a.experts - 1)
        m = _expert_rows(Matrix.of(a), expert)
        x = a.x if shared else a.x + j * a.x_stride
        one = Rows(j, j + 1, lambda t: x, lambda t: t)
        span = (k.load(at, I64), k.load(at, I64, 8))
        matvec_rows(k, level, fmt, m, one, span, _of_expert(k, a, m.n, expert), tail, alone=True)

    fields = ("ids", "experts", "x", "x_stride", "bounds", "n_tiles", *MATRIX_FIELDS, *OUTPUT_FIELDS)
    return KernelDef(f"experts/matvec/{fmt.name}{'/shared' if shared else ''}{'/tail' if tail else ''}", fields, body)


def expert_floats(name: str, level: Level, k_in: int) -> KernelDef:
    """Chunk (i, tile): `chunk_rows` weight rows of the i-th active expert in float32 arithmetic."""
    tail = k_in % 16 != 0

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        n_tiles = a.n_tiles
        expert = k.load(a.active + (chunk.udiv(n_tiles) << 3), I64)
        first = (chunk - chunk.udiv(n_tiles) * n_tiles) * a.chunk_rows
        span = (first, k.minimum(first + a.chunk_rows, a.n))
        matrix = exact_rows(k, level, name, a, a.w + expert * a.n * a.row_bytes, span, k_in, scratch)
        float_rows(k, level, matrix, span, _rows(k, a, expert), _of_expert(k, a, a.n, expert), tail)

    fields = (*EXPERT_FIELDS, "w", "n", "k", "row_bytes", "chunk_rows", *OUTPUT_FIELDS)
    return KernelDef(f"experts/floats/{name}{exact_marks(name, k_in)}", fields, body, exact_scratch(name, k_in))


def activate(kind: str) -> KernelDef:
    """Chunk e: y = act(gate, up) for one entry of `n` values; `relu2` reads up alone."""

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        at = chunk * (a.n << 2)

        def one(offset: Val, lanes: int) -> None:
            type = f32s(lanes)
            up = k.load(a.up + at + offset, type)
            if kind == "relu2":
                y = relu2(k, up)
            else:
                gate = k.load(a.gate + at + offset, type)
                if kind == "oai":
                    most, least = k.lift(7.0, type), k.lift(-7.0, type)
                    gate, up = k.minimum(most, gate), k.maximum(least, k.minimum(most, up))
                    y = gate * sigmoid(k, gate * 1.702) * (up + 1.0)
                else:
                    y = (gelu_tanh if kind == "gelu_tanh" else silu)(k, gate) * up
            k.store(y, a.y + at + offset)

        each(k, a.n, one)

    return KernelDef(f"experts/activate/{kind}", ("gate", "up", "y", "n"), body)
