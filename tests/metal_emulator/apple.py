"""Apple's own kernels, as the MLX wheel ships them: sources, buffers, references. Nothing of them is kept here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from tools.metal_emulator import Finding, Settings, Statistics
from tools.metal_emulator.build import MetalSource, build_kernel
from tools.metal_emulator.launcher import BoundBuffer, load_kernel
from tools.metal_emulator.mlx_headers import kernel_text
from tools.metal_emulator.toolchain import find_toolchain

Array = npt.NDArray[Any]
ALIGNED = (("align_M", True), ("align_N", True), ("align_K", True))
QUANTIZED = ("steel/gemm/gemm.h", "quantized_utils.h", "quantized.h")


@dataclass(frozen=True)
class AppleCase:
    """A launch of one of Apple's kernels. `buffers` are in the kernel's order, None is not bound."""

    name: str
    headers: Sequence[str]
    entry: str
    buffers: Sequence[Array | None]
    output: int
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    reference: Array
    tolerance: float
    constants: tuple[tuple[str, object], ...] = field(default=())

    def source(self, text: str | None = None) -> MetalSource:
        """`text` stands in for that of the headers."""
        return MetalSource("apple", text or kernel_text(*self.headers), self.entry, False, self.constants)

    def run(self, settings: Settings, text: str | None = None) -> tuple[Array, list[Finding], Statistics]:
        kernel = load_kernel(build_kernel(self.source(text), settings.mode, find_toolchain()))
        arrays = [None if b is None else np.ascontiguousarray(b) for b in self.buffers]
        out = arrays[self.output]
        assert out is not None
        out.view(np.uint8)[...] = 0xFF
        bound = [
            BoundBuffer(
                f"buffer {i}", None if a is None else a.ctypes.data, 0 if a is None else a.nbytes, a is out, a is not out
            )
            for i, a in enumerate(arrays)
        ]
        findings, statistics = kernel.launch(bound, self.grid, self.threadgroup, settings)
        return wide(out), findings, statistics

    def error(self, out: Array) -> float:
        """The largest difference, as a share of the largest number."""
        return float(np.abs(out.reshape(self.reference.shape) - self.reference).max() / np.abs(self.reference).max())


def wide(out: Array) -> Array:
    """float64; uint16 is bfloat16."""
    if out.dtype == np.uint16:
        return (out.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return out.astype(np.float64)


def raw(a: mx.array) -> Array:
    return np.array(a.view(mx.uint16) if a.dtype == mx.bfloat16 else a)


def one(value: float, dtype: type = np.int32) -> Array:
    return np.array([value], dtype)


def softmax(looped: bool) -> AppleCase:
    x = np.random.default_rng(0).standard_normal((6, 1000)).astype(np.float32) * 3
    e = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    threads = 1024 if looped else 256
    entry = f"softmax_{'looped' if looped else 'single_row'}<float, float>"
    size = (6 * threads, 1, 1), (threads, 1, 1)
    return AppleCase(entry, ["softmax.h"], entry, [x, x.copy(), one(1000)], 1, *size, e / e.sum(1, keepdims=True), 1e-6)


def _unused() -> list[Array]:
    """Batch shapes and strides, which kernels without batches take and do not read."""
    shape, strides = np.zeros(4, np.int32), np.zeros(4, np.int64)
    return [one(0), shape, strides, one(0), shape, strides, strides, strides]


def quantized_matvec(bits: int, group: int) -> AppleCase:
    rng = np.random.default_rng(bits)
    n, k = 64, 1024
    w, scales, biases = mx.quantize(mx.array(rng.standard_normal((n, k)).astype(np.float32)), group_size=group, bits=bits)
    x = rng.standard_normal((1, k)).astype(np.float32)
    reference = np.array(mx.dequantize(w, scales, biases, group_size=group, bits=bits)).astype(np.float64) @ x[0]
    buffers = [raw(w), raw(scales), raw(biases), x, np.empty((1, n), np.float32), one(k), one(n), *_unused()]
    name = f"affine_qmv_fast<float, {group}, {bits}, false>"
    return AppleCase(name, QUANTIZED, name, buffers, 4, (32, n // 4, 1), (32, 2, 1), reference, 3e-6, ALIGNED)


def quantized_matmul(metal_type: str, rows: int) -> AppleCase:
    """On 8x8 SIMD-group matrices."""
    rng = np.random.default_rng(rows)
    n, k = 64, 512
    dtype, tolerance = {"float": (mx.float32, 1e-6), "half": (mx.float16, 2e-3), "bfloat16_t": (mx.bfloat16, 8e-3)}[
        metal_type
    ]
    w, scales, biases = mx.quantize(
        mx.array(rng.standard_normal((n, k)).astype(np.float32)).astype(dtype), group_size=32, bits=4
    )
    x = mx.array(rng.standard_normal((rows, k)).astype(np.float32)).astype(dtype)
    wide_w = mx.dequantize(w, scales.astype(mx.float32), biases.astype(mx.float32), group_size=32, bits=4)
    reference = np.array(x.astype(mx.float32)).astype(np.float64) @ np.array(wide_w).astype(np.float64).T
    out = np.empty((rows, n), raw(x).dtype)
    buffers = [raw(w), raw(scales), raw(biases), raw(x), out, one(k), one(n), one(rows), *_unused()]
    name = f"affine_qmm_t<{metal_type}, 32, 4, true, false>"
    grid = (n // 32 * 32, -(-rows // 32) * 2, 2)
    return AppleCase(name, QUANTIZED, name, buffers, 4, grid, (32, 2, 2), reference, tolerance, ALIGNED)


def attention(width: int, heads: int, kv_heads: int, keys: int) -> AppleCase:
    rng = np.random.default_rng(width)
    q = rng.standard_normal((heads, width)).astype(np.float16)
    k, v = (rng.standard_normal((kv_heads, keys, width)).astype(np.float16) for _ in range(2))
    kw, vw = (np.repeat(a.astype(np.float64), heads // kv_heads, 0) for a in (k, v))
    scores = np.exp(np.einsum("hd,hsd->hs", q.astype(np.float64), kw) * width**-0.5)
    reference = np.einsum("hs,hsd->hd", scores / scores.sum(1, keepdims=True), vw)
    strides = [one(stride, np.uint64) for stride in (keys * width, width) * 2]
    sizes = [one(heads // kv_heads), one(keys), *strides, one(width**-0.5, np.float32)]
    flags = ("has_mask", "query_transposed", "do_causal", "bool_mask", "float_mask", "has_sinks")
    constants = (*((flag, False) for flag in flags), ("blocks", 1))
    name = f"sdpa_vector<half, {width}>"
    buffers = [q, k, v, np.empty((heads, width), np.float16), *sizes, *[None] * 7]
    size = (heads * 1024, 1, 1), (1024, 1, 1)
    return AppleCase(name, ["sdpa_vector.h"], name, buffers, 3, *size, reference, 2e-3, constants)


def gemm(metal_type: str, m: int, n: int, k: int) -> AppleCase:
    """A @ B^T."""
    dtype, tolerance = {"float": (np.float32, 1e-6), "half": (np.float16, 2e-3)}[metal_type]
    rng = np.random.default_rng(m)
    a, b = rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((n, k)).astype(dtype)
    tiles_n, tiles_m = -(-n // 32), -(-m // 32)
    # struct GEMMParams of steel/gemm/params.h
    params = np.zeros(72, np.uint8)
    params[:32].view(np.int32)[:] = [m, n, k, k, k, n, tiles_n, tiles_m]
    params[56:68].view(np.int32)[:] = [0, k // 16, 0]
    flags = (("has_batch", False), ("use_out_source", False), ("do_axpby", False))
    aligned = (("align_M", m % 32 == 0), ("align_N", n % 32 == 0), ("align_K", k % 16 == 0))
    buffers = [a, b, None, np.empty((m, n), dtype), params, None, None, None]
    return AppleCase(
        f"gemm<{metal_type}> {m}x{n}x{k}",
        ["steel/gemm/gemm.h", "steel/gemm/kernels/steel_gemm_fused.h"],
        f"gemm<{metal_type}, 32, 32, 16, 2, 2, false, true, float>",
        buffers,
        3,
        (tiles_n * 32, tiles_m * 2, 2),
        (32, 2, 2),
        a.astype(np.float64) @ b.astype(np.float64).T,
        tolerance,
        (*flags, *aligned),
    )


def all_cases() -> list[AppleCase]:
    return [
        softmax(looped=False),
        softmax(looped=True),
        *(quantized_matvec(bits, group) for bits, group in ((4, 32), (4, 64), (8, 32), (6, 64), (3, 64))),
        *(quantized_matmul(metal_type, rows) for metal_type, rows in (("float", 40), ("half", 32), ("bfloat16_t", 33))),
        attention(64, 4, 2, 77),
        attention(128, 4, 1, 200),
        gemm("half", 64, 64, 64),
        gemm("float", 50, 70, 40),
    ]
