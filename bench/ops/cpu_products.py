"""Products of a small matrix that stays in the cache, by this package's kernels and by ggml's, one thread.

    python -m bench.ops.cpu_products --ggml FOLDER --out FILE.jsonl [--types Q4_K,Q8_0,...] [--rows 1,2,8,128] [--k 2048]

FOLDER has libggml-base.so and libggml-cpu.so of a build of llama.cpp. So the arithmetic alone is compared, which neighbours
on a busy machine hide in whole models. Both sides' results are compared first. A figure is the nanoseconds that 256 values
of a weight row take with one row of x: the difference of 96 and 32 weight rows, whose fixed costs go, each the least of
many short runs in turns. llama.cpp repacks Q4_0, Q4_K, Q2_K and IQ4_NL when it loads a model; its kernels here do not.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench.shared import Notes, command_line
from quarrel.cpu_backend.formats.table import BLOCKS
from quarrel.cpu_backend.linear.activations import padded, quantize, row_bytes, to_bfloat16
from quarrel.cpu_backend.linear.floats import PAIRS, float_linear
from quarrel.cpu_backend.linear.matvec import MATVEC_ROWS, matvec
from quarrel.cpu_backend.linear.tile import block_rows, tile, tile_count
from quarrel.cpu_backend.runtime.abi import KernelDef
from quarrel.cpu_backend.runtime.features import level
from quarrel.cpu_backend.runtime.pool import aligned
from quarrel.gguf import GGMLType
from quarrel.gguf.quantize import quantize as encoded

TYPES = "F32,F16,BF16,Q8_0,Q6_K,Q5_K,Q4_K,Q4_0,Q3_K,Q2_K,IQ4_XS,MXFP4"
FEW, MANY = 32, 96
"""Weight rows: whole tiles."""
Kernel = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
Run = Callable[[], np.ndarray]


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--ggml", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--types", default=TYPES)
    parser.add_argument("--rows", default="1,2,8,128")
    parser.add_argument("--k", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each figure")
    args = parser.parse_args()
    notes, ggml, rng = Notes(args.out), Ggml(args.ggml), np.random.default_rng(0)
    for name in args.types.split(","):
        weight = encoded(rng.standard_normal((MANY, args.k)).astype(np.float32), GGMLType[name]).view(np.uint8)
        for rows in map(int, args.rows.split(",")):
            x = rng.standard_normal((rows, args.k)).astype(np.float32)
            sides = {
                side: [make(name, weight[:n], x) for n in (FEW, MANY)]
                for side, make in (("ours", ours), ("ggml", ggml.product))
            }
            left, right = (sides[side][1]() for side in sides)
            apart = float(np.abs(left - right).max() / np.abs(right).max())
            assert apart < 0.05, (name, rows, apart)
            values = (MANY - FEW) * args.k / 256 * rows
            spent = least([run for side in sides.values() for run in side], args.seconds)
            a, b = ((many - few) / values for few, many in (spent[:2], spent[2:]))
            notes.say(
                type=name,
                rows=rows,
                k=args.k,
                level=level().name,
                ours_ns=round(a, 2),
                ggml_ns=round(b, 2),
                ratio=round(b / a, 2),
            )
    return 0


def least(runs: list[Run], seconds: float) -> list[int]:
    """Nanoseconds of each, in turns."""
    best, end = [1 << 62] * len(runs), time.perf_counter() + seconds
    while time.perf_counter() < end:
        for i, run in enumerate(runs):
            began = time.perf_counter_ns()
            run()
            best[i] = min(best[i], time.perf_counter_ns() - began)
    return best


def ours(name: str, weight: np.ndarray, x: np.ndarray) -> Run:
    """The products by the kernel that this number of rows takes."""
    (n, size), (rows, k), here = weight.shape, x.shape, level()
    y, live = np.zeros((rows, n), np.float32), np.array([rows])
    output = {"y": y.ctypes.data, "y_stride": 4 * n, "bias": 0, "residual": 0, "scale": 1.0}
    common = {"live_rows": live.ctypes.data, "w": weight.ctypes.data, "n": n, "row_bytes": size, **output}
    keep: list[object] = [weight, x, y, live]
    if name == "BF16" and here.bfloat16:
        chunks, kernel, narrow = 1, float_linear(PAIRS, here, k // 2), aligned(2 * x.size)
        called(to_bfloat16(), {"x": x.ctypes.data, "out": narrow.ctypes.data, "k": x.size}, 1, narrow, keep)()
        common |= {"x": narrow.ctypes.data, "k": k // 2, "n_tiles": chunks, "chunk_rows": n}
        keep.append(narrow)
    elif name not in BLOCKS:
        chunks, kernel = 1, float_linear(name, here, k)
        common |= {"x": x.ctypes.data, "k": k, "n_tiles": chunks, "chunk_rows": n}
    else:
        codes = aligned(rows * row_bytes(k))
        rounded = quantize()
        block = rounded.pack({"x": x.ctypes.data, "out": codes.ctypes.data, "k": k, "out_stride": row_bytes(k)})
        for row in range(rows):
            Kernel(rounded.address(here))(block.ctypes.data, row, 0)
        fmt, bounds, chunks = BLOCKS[name], np.array([0, n]), 1
        tail = k % 256 // fmt.elements
        common |= {"x": codes.ctypes.data, "x_stride": row_bytes(k), "blocks": k // 256, "tail": tail, "p": padded(k)}
        keep += [codes, bounds]
        if rows <= MATVEC_ROWS:
            kernel = matvec(fmt, here, tail > 0)
            common["bounds"] = bounds.ctypes.data
        else:
            kernel, tiles = tile(fmt, here, tail > 0, padded(k)), tile_count(here, n)
            chunks = -(-rows // block_rows(padded(k))) * tiles
            common["n_tiles"] = tiles
    return called(kernel, common, chunks, y, keep)


def called(kernel: KernelDef, fields: dict[str, int | float], chunks: int, y: np.ndarray, keep: list[object]) -> Run:
    block, scratch, function = kernel.pack(fields), aligned(kernel.scratch + 64), Kernel(kernel.address(level()))
    keep += [block, scratch]

    def run() -> np.ndarray:
        for chunk in range(chunks):
            function(block.ctypes.data, chunk, scratch.ctypes.data)
        assert keep
        return y

    return run


class Ggml:
    """ggml's product of two matrices."""

    def __init__(self, folder: Path) -> None:
        self.base = ctypes.CDLL(str(folder / "libggml-base.so"), ctypes.RTLD_GLOBAL)
        self.cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"))
        self.cpu.ggml_cpu_init()
        for name in ("ggml_init", "ggml_new_tensor_2d", "ggml_mul_mat", "ggml_new_graph", "ggml_get_data"):
            getattr(self.base, name).restype = ctypes.c_void_p
        self.cpu.ggml_graph_plan.restype = _Plan

    def product(self, name: str, weight: np.ndarray, x: np.ndarray) -> Run:
        at, base = ctypes.c_void_p, self.base
        context = at(base.ggml_init(_Memory(weight.nbytes + 4 * x.nbytes + (8 << 20), None, False)))
        (rows, k), n = x.shape, len(weight)

        def tensor(type: GGMLType, values: np.ndarray) -> ctypes.c_void_p:
            made = at(base.ggml_new_tensor_2d(context, int(type), ctypes.c_int64(k), ctypes.c_int64(len(values))))
            ctypes.memmove(base.ggml_get_data(made), np.ascontiguousarray(values).ctypes.data, values.nbytes)
            return made

        result = at(base.ggml_mul_mat(context, tensor(GGMLType[name], weight), tensor(GGMLType.F32, x)))
        graph = at(base.ggml_new_graph(context))
        base.ggml_build_forward_expand(graph, result)
        plan = self.cpu.ggml_graph_plan(graph, 1, None)
        work = np.empty(plan.work_size + 64, np.uint8)
        plan.work = work.ctypes.data
        y = np.ctypeslib.as_array(ctypes.cast(base.ggml_get_data(result), ctypes.POINTER(ctypes.c_float)), (rows, n))

        def run() -> np.ndarray:
            self.cpu.ggml_graph_compute(graph, ctypes.byref(plan))
            assert len(work)
            return y

        return run


class _Memory(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("none", ctypes.c_bool))


class _Plan(ctypes.Structure):
    _fields_ = (
        ("work_size", ctypes.c_size_t), ("work", ctypes.c_void_p), ("threads", ctypes.c_int), ("pool", ctypes.c_void_p),
        ("abort", ctypes.c_void_p), ("abort_data", ctypes.c_void_p), ("reference", ctypes.c_bool),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
