"""Metal's types and functions give what Metal's specification says, in every mode."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.metal_emulator.kernels import elementwise
from tools.metal_emulator import Call, Kind, Mode, Settings, bfloat16, check, metal_kernel

Floats = npt.NDArray[np.float32]


def run(body: str, header: str = "", threads: int = 32) -> Floats:
    """y of a clean kernel, with x[i] = i."""
    kernel, call = elementwise(body, threads, header=header)
    result = check(kernel, call, seeds=(0, 1))
    assert not result.findings
    return result.outputs[0]  # type: ignore[no-any-return]


LANES = np.arange(32)
COLLECTIVES = {
    "simd_sum(x[i])": np.full(32, 496),
    "simd_product(1 + (lane == 3) + (lane == 7))": np.full(32, 4),
    "simd_max(x[i] * (lane % 5))": np.full(32, max(i * (i % 5) for i in range(32))),
    "simd_min(x[i] - 2 * lane)": np.full(32, -31),
    "simd_and(lane | 64u)": np.full(32, 64),
    "simd_or(lane)": np.full(32, 31),
    "simd_xor(lane == 5 ? 3u : lane == 6 ? 1u : 0u)": np.full(32, 2),
    "simd_prefix_inclusive_sum(x[i])": np.cumsum(LANES),
    "simd_prefix_exclusive_sum(x[i])": np.cumsum(LANES) - LANES,
    "simd_prefix_inclusive_product(lane == 4 ? 3 : 1)": np.where(LANES >= 4, 3, 1),
    "simd_prefix_exclusive_product(lane == 4 ? 3 : 1)": np.where(LANES > 4, 3, 1),
    "simd_broadcast(x[i], 9)": np.full(32, 9),
    "simd_broadcast_first(x[i] + 7)": np.full(32, 7),
    "simd_shuffle(x[i], ushort((lane * 7) % 32))": LANES * 7 % 32,
    "simd_shuffle_xor(x[i], 5)": LANES ^ 5,
    "simd_shuffle_up(x[i], 3)": np.where(LANES >= 3, LANES - 3, LANES),
    "simd_shuffle_down(x[i], 3)": np.where(LANES < 29, LANES + 3, LANES),
    "simd_shuffle_rotate_up(x[i], 3)": (LANES - 3) % 32,
    "simd_shuffle_rotate_down(x[i], 3)": (LANES + 3) % 32,
    "simd_shuffle_and_fill_up(x[i], x[i] + 100, 3)": np.where(LANES >= 3, LANES - 3, (LANES - 3) % 32 + 100),
    "simd_shuffle_and_fill_down(x[i], x[i] + 100, 3)": np.where(LANES < 29, LANES + 3, (LANES + 3) % 32 + 100),
    "simd_shuffle_and_fill_down(x[i], x[i] + 100, 1, 8)": np.where(LANES % 8 < 7, LANES + 1, LANES - 7 + 100),
    "(ulong)simd_ballot(lane % 2 == 0) == 0x55555555ul": np.ones(32),
    "simd_any(lane == 31) + 2 * simd_any(lane == 32)": np.ones(32),
    "simd_all(lane < 32) + 2 * simd_all(lane < 31)": np.ones(32),
    "simd_is_first()": LANES == 0,
    "quad_sum(x[i])": LANES // 4 * 16 + 6,
    "quad_max(x[i])": LANES // 4 * 4 + 3,
    "quad_shuffle_xor(x[i], 2)": LANES ^ 2,
    "simd_sum(half(1.5h))": np.full(32, 48),
    "simd_sum(float4(x[i], 1, 2, 3)).y": np.full(32, 32),
    "simd_max(float2(x[i], -x[i])).y": np.zeros(32),
}


@pytest.fixture(scope="module")
def collectives() -> Floats:
    """Every expression above, from one kernel."""
    lines = [f"y[{n} * 32 + i] = float({expression});" for n, expression in enumerate(COLLECTIVES)]
    body = "uint i = thread_position_in_grid.x, lane = thread_index_in_simdgroup;\n" + "\n".join(lines)
    kernel = metal_kernel("collectives", ["x"], ["y"], body)
    x = np.arange(256, dtype=np.float32)
    result = check(kernel, Call([x], [(len(lines), 32)], [np.float32], (32, 1, 1), (32, 1, 1)), seeds=(0, 1))
    assert not result.findings
    return result.outputs[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("number", range(len(COLLECTIVES)), ids=list(COLLECTIVES))
def test_simdgroup_function(number: int, collectives: Floats) -> None:
    assert collectives[number].tolist() == list(COLLECTIVES.values())[number].tolist()


def test_nan_and_infinity_in_reductions() -> None:
    assert (run("y[i] = simd_max(lane == 3 ? NAN : x[i]);") == 31).all()
    assert np.isnan(run("y[i] = simd_sum(lane == 3 ? NAN : x[i]);")).all()
    assert (run("y[i] = simd_min(lane ? -INFINITY : x[i]);") == -math.inf).all()


VALUES = {
    "dot(float3(1, 2, 3), float3(4, 5, 6))": 32,
    "length(float4(2, 2, 2, 2))": 4,
    "float4(1, float2(2, 3), 4).z": 3,
    "float4(uchar4(1, 2, 3, 250)).w": 250,
    "uint3(7u).y": 7,
    "vec<float, 4>(5, 6, 7, 8).y": 6,
    "vec<int, 2>(3).x": 3,
    "as_type<uint>(1.0f) == 0x3f800000u": 1,
    "as_type<half2>(0x3c004000u).x": 2,
    "1.5h + 0.25h": 1.75,
    "float(2.5bf)": 2.5,
    "float(bfloat(1.00390625f))": 1,  # a tie rounds to even
    "float(bfloat(1.01171875f))": 1.015625,
    "1 / 3 * 3": 0,
    "1e-3 == 1e-3f": 1,  # literals are float
    "clamp(5, 1, 3) + clamp(-1.0f, 0.0f, 1.0f)": 3,
    "select(1.0f, 2.0f, true)": 2,
    "select(float4(0), float4(1), float4(1, 2, 3, 4) > float4(2)).w": 1,
    "any(int4(0, 0, 1, 0) != int4(0)) + all(int2(1, 0))": 1,
    "popcount(255u) + clz(1u) + ctz(8u)": 42,
    "extract_bits(0xabcdu, 4, 8) + insert_bits(0u, 3u, 2, 2)": 0xBC + 12,
    "mulhi(0xffffffffu, 16u)": 15,
    "rotate(0x80000001u, 1u)": 3,
    "absdiff(3u, 5u) + abs(-4)": 6,
    "max3(1, 9, 4) + min3(3u, 2u, 5u)": 11,
    "mix(2.0f, 4.0f, 0.25f)": 2.5,
    "step(0.5f, 0.25f) + step(0.5f, 0.75f)": 1,
    "saturate(1.5f) + sign(-3.0f)": 0,
    "fract(2.75f) + trunc(-1.5f) + rint(2.5f)": 1.75,
    "sinpi(0.5f) + cospi(1.0f) + sinpi(1000000.5f)": 1,
    "fast::exp(0.0f) + precise::log(1.0f)": 1,
    "ldexp(0.75f, 3)": 6,
    "numeric_limits<half>::max()": 65504,
    "Limits<float>::min == -INFINITY": 1,
    "unpack_unorm4x8_to_float(0xff0000ffu).w": 1,
    "sizeof(packed_float3) + sizeof(float3)": 28,
    "float3(packed_float3(float3(1, 2, 3))).z": 3,
    "char(200) < 0": 1,
    "is_same_v<decltype(half(1) + half(2)), half>": 1,
}


@pytest.mark.parametrize("mode", [Mode.FAST, Mode.CHECK])
def test_values(mode: Mode) -> None:
    lines = [f"y[{n}] = float({expression});" for n, expression in enumerate(VALUES)]
    kernel = metal_kernel("values", ["x"], ["y"], "\n".join(lines) + "\ny[0] += x[threads_per_grid.y - 1];")
    call = Call([np.zeros(8, np.float32)], [(len(lines),)], [np.float32], (1, 1, 1), (1, 1, 1))
    launch = kernel.launch(call, Settings(mode=mode))
    assert not launch.findings
    got = dict(zip(VALUES, launch.outputs[0].tolist()))
    assert got == VALUES


UNARY: dict[str, Callable[[Any], Any]] = {
    "acos": np.arccos, "asin": np.arcsin, "atan": np.arctan, "cos": np.cos, "cosh": np.cosh, "exp": np.exp, "exp2": np.exp2,
    "log": np.log, "log2": np.log2, "log10": np.log10, "rsqrt": lambda x: 1 / np.sqrt(x), "sin": np.sin, "sinh": np.sinh,
    "sqrt": np.sqrt, "tan": np.tan, "tanh": np.tanh, "ceil": np.ceil, "floor": np.floor, "round": np.round,
}  # fmt: skip


def test_mathematics_against_numpy() -> None:
    x = np.linspace(0.05, 0.95, 64, dtype=np.float32)
    lines = [f"y[{n} * 64 + i] = {name}(x[i]); h[{n} * 64 + i] = {name}(half(x[i]));" for n, name in enumerate(UNARY)]
    lines += [f"v[{n} * 64 + i] = {name}(float4(x[i])).w;" for n, name in enumerate(UNARY)]
    kernel = metal_kernel("unary", ["x"], ["y", "h", "v"], "uint i = thread_position_in_grid.x;\n" + "\n".join(lines))
    shape = (len(UNARY), 64)
    call = Call([x], [shape] * 3, [np.float32, np.float16, np.float32], (64, 1, 1), (64, 1, 1))
    y, h, v = kernel.launch(call, Settings()).outputs
    half_x = x.astype(np.float16).astype(np.float64)
    for n, (name, function) in enumerate(UNARY.items()):
        np.testing.assert_allclose(y[n], function(x.astype(np.float64)), rtol=3e-7, atol=1e-7, err_msg=name)
        np.testing.assert_allclose(h[n], function(half_x), rtol=1e-3, atol=1e-3, err_msg=name)
        np.testing.assert_array_equal(v[n], y[n], err_msg=name)


def test_bfloat_narrows_only_by_a_cast() -> None:
    kernel = metal_kernel("narrow", ["x"], ["y"], "y[0] = x[0] * 2.0f;")
    call = Call([np.zeros(8, np.float32)], [(1,)], [bfloat16], (1, 1, 1), (1, 1, 1))
    assert {f.kind for f in check(kernel, call).findings} >= {Kind.DOES_NOT_COMPILE}


MATRIX = """
  simdgroup_float8x8 a, b, c = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
  simdgroup_load(a, x, 8);
  simdgroup_load(b, x, 16, ulong2(8, 1), true);
  simdgroup_multiply_accumulate(c, a, b, c);
  simdgroup_store(c, y, 8);
"""


def test_matrices() -> None:
    x = np.random.default_rng(3).standard_normal(256).astype(np.float32)
    kernel = metal_kernel("matrices", ["x"], ["y"], MATRIX)
    result = check(kernel, Call([x], [(8, 8)], [np.float32], (32, 1, 1), (32, 1, 1)))
    assert not result.findings
    a, b = x[:64].reshape(8, 8), x.reshape(16, 16)[1:9, 8:].T
    np.testing.assert_allclose(result.outputs[0], a @ b + 1, rtol=0, atol=1e-5)


ATTRIBUTES: dict[str, Callable[[tuple[int, int]], int]] = {
    "thread_position_in_grid.y": lambda t: t[1],
    "threadgroup_position_in_grid.x": lambda t: t[0] // 8,
    "thread_position_in_threadgroup.x": lambda t: t[0] % 8,
    "thread_index_in_threadgroup": lambda t: t[0] % 8 + (t[1] % 4) * min(8, 20 - t[0] // 8 * 8),
    "threads_per_threadgroup.x": lambda t: min(8, 20 - t[0] // 8 * 8),
    "dispatch_threads_per_threadgroup.x": lambda t: 8,
    "threadgroups_per_grid.x": lambda t: 3,
    "threads_per_grid.x": lambda t: 20,
    "grid_size.y": lambda t: 8,
    "grid_origin.x": lambda t: 0,
    "threads_per_simdgroup": lambda t: 32,
    "thread_execution_width": lambda t: 32,
    "dispatch_simdgroups_per_threadgroup": lambda t: 1,
    "simdgroups_per_threadgroup": lambda t: 1,
    "quadgroups_per_threadgroup": lambda t: min(8, 20 - t[0] // 8 * 8),
    "dispatch_quadgroups_per_threadgroup": lambda t: 8,
}


def test_attributes_of_a_ragged_grid() -> None:
    place = "thread_position_in_grid.x + 20 * thread_position_in_grid.y"
    lines = [f"y[{n} * 160 + {place}] = float({name});" for n, name in enumerate(ATTRIBUTES)]
    kernel = metal_kernel("attributes", ["x"], ["y"], "\n".join(lines))
    call = Call([np.zeros(8, np.float32)], [(len(lines), 8, 20)], [np.float32], (20, 8, 1), (8, 4, 1))
    result = check(kernel, call)
    assert not result.findings
    for n, (name, value) in enumerate(ATTRIBUTES.items()):
        expected = [[value((cx, cy)) for cx in range(20)] for cy in range(8)]
        assert result.outputs[0][n].tolist() == expected, name


IDIOMS_HEADER = """
constant float table[4] = {1, 2, 3, 4};
static constant constexpr short4 shorts = short4(1, 2, 3, 4);
struct Params { int n; float scale; };
template <typename P> METAL_FUNC float load(P p, uint i) { return float(p[i]); }
METAL_FUNC float look(constant float* t, int i) { return t[i]; }
inline void put(device float* y, thread const float& v, uint i) { y[i] = v; }
METAL_FUNC float4 bytes(const device uchar* p) { return float4(*reinterpret_cast<const device uchar4*>(p)); }
"""
IDIOMS = """
  threadgroup half tile[2][32];
  tile[0][lane] = half(x[i]);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  float v = load(x, i) + load(&tile[0][0], lane) + look(table, int(i % 4)) + shorts.y;
  const device float2* pairs = (const device float2*)x;
  v += pairs[i / 2].y + bytes((const device uchar*)x + 4 * i).x;
  float own[3] = {1, 2, 3};
  thread float* p = own;
  uint4 shifted = uint4(2, 4, 6, 8) >> 1u;
  Params params = {3, 2.0f};
  Params copy = ((const device Params*)x)[2], back;
  back = copy;
  v += p[1] + shifted.z + params.n * params.scale + int8_t(-3) + back.scale;
  put(y, v, i);
"""


def test_idioms_of_kernels_pass_every_check() -> None:
    y = run(IDIOMS, IDIOMS_HEADER)
    low_bytes = np.arange(32, dtype=np.float32).view(np.uint8)[::4]
    assert (y == 2 * LANES + LANES % 4 + 1 + 2 + (LANES | 1) + low_bytes + 2 + 3 + 6 - 3 + 5).all()
