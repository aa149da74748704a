"""Counts what loops of decoding take: a product for a weight, attention for a key and head; ours, and those of others.

    python -m tools.metal_counts [--llama DIR]

MLX's are cut out of the headers of its wheel, llama.cpp's out of DIR, a checkout's folder with `ggml-metal` and
`ggml-common.h`. Each text is compiled to PTX by the emulator's clang, and the loop that has the most instructions is
counted. A line gives the instructions for each weight that a lane's pass handles, and the cycles that they take on an Apple
GPU (github.com/philipturner/metal-benchmarks): 4 for a shift, an integer product, and a conversion between whole numbers
and floats, 8 for a shift to the right by a number not known before, 1 for anything else. Of what PTX has and Apple's GPUs
do not: a sum of two halves is two; half operands and half results of float sums are none, nor are moves; loads of
neighbours in a row are one for up to four, as a load's components need no more than their own alignment, and so are
stores. Sums of addresses count one each, whatever their width, though a load may have one for nothing, and a sum of 64 bits
takes four.

Of prompts (`matmul`, `qmm_t`, `kernel_mul_mm`) the counts are for each weight and row of x, tiles' loads and all: a product
of two 8x8 matrices is what it is at the rate of FMAs, 16 of a lane, and barriers of one SIMD-group are nothing.

Attention's are those of all lanes that share a key; a loop within the loop counts once, which favours MLX's sum over lanes.
Loops over a lane's values are unrolled. MLX's have scales and rows in float16; those of most folders are bfloat16, which M1
and M2 lack.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx

from quarrel.gguf import GGMLType
from quarrel.mlx_backend.attention.paged import heads_together, lanes_of
from quarrel.ops.attention import AttentionSpec
from quarrel.ops.linear import LINEAR
from tests.mlx_backend.cases import running
from tests.mlx_backend.emulated import FAST
from tests.mlx_backend.trials import Trial, attention, linear
from tools.metal_emulator import metal_kernel
from tools.metal_emulator.build import MetalSource
from tools.metal_emulator.kernel import Call
from tools.metal_emulator.ptx import compile_ptx
from tools.metal_emulator.session import Launch
from tools.metal_emulator.settings import Settings
from tools.metal_emulator.toolchain import find_toolchain

SLOW = re.compile(r"(shl|shr|shf|bfe|bfi|prmt|mul\.lo|mad\.|cvt\.(rn|rz|rni|rzi)?\.?(f\d+\.[us]\d+|[us]\d+\.f\d+))")
FREE = ("cvt.f32.f16", "cvt.f32.bf16", "cvt.rn.f16.f32", "cvt.rn.f16x2.f32", "bar.warp.sync")
_MOVE = re.compile(
    r"(?P<way>ld|st)\.(?:\w+\.)*(?:v(?P<count>\d)\.)?\w(?P<bits>\d+)\s.*\[(?P<base>[%\w]+)(?:\+(?P<offset>-?\d+))?\][;,]"
)
KERNELS = Path(mx.__file__).parent / "include"
_START = "#include <metal_stdlib>\nusing namespace metal;\n#define METAL_FUNC inline __attribute__((always_inline))\n"
_AFFINE = """
[[kernel]] void counted(device const uint* w [[buffer(0)]], device const half* scales [[buffer(1)]],
    device const half* biases [[buffer(2)]], device const half* x [[buffer(3)]], device half* y [[buffer(4)]],
    constant int& k [[buffer(5)]], constant int& n [[buffer(6)]], uint3 tid [[threadgroup_position_in_grid]],
    uint group [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  qmv_fast_impl<half, 64, @BITS>(w, scales, biases, x, y, k, n, tid, group, lane);
}
"""
_FOURS = """
[[kernel]] void counted(device const uint* w [[buffer(0)]], device const uint8_t* scales [[buffer(1)]],
    device const half* x [[buffer(3)]], device half* y [[buffer(4)]],
    constant int& k [[buffer(5)]], constant int& n [[buffer(6)]], uint3 tid [[threadgroup_position_in_grid]],
    uint group [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  fp_qmv_fast_impl<half, @GROUP, 4>(w, scales, nullptr, x, y, k, n, tid, group, lane);
}
"""
_PROMPTS = """
[[kernel]] void counted(device const uint* w [[buffer(0)]], device const half* scales [[buffer(1)]],
    device const half* biases [[buffer(2)]], device const half* x [[buffer(3)]], device half* y [[buffer(4)]],
    constant int& k [[buffer(5)]], constant int& n [[buffer(6)]], constant int& m [[buffer(7)]],
    uint3 tid [[threadgroup_position_in_grid]], uint thread_at [[thread_index_in_threadgroup]],
    uint group [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup half xs[32 * 40], ws[32 * 40];
  qmm_t_impl<half, 64, @BITS, true, half>(w, scales, biases, x, y, xs, ws, k, n, m, k, tid, thread_at, group, lane);
}
"""
_PRODUCT = """
#define simdgroup_multiply_accumulate counted_product
template <class D, class A, class B, class C>
inline void counted_product(thread D& d, thread const A& a, thread const B& b, thread const C& c) {
  const auto left = a.thread_elements(), right = b.thread_elements();
  const auto sum = c.thread_elements();
  float x, y;
  asm volatile("product.8x8x8 {%0, %1}, {%2, %3}, {%4, %5}, {%6, %7};" : "=f"(x), "=f"(y)
      : "f"(float(left[0])), "f"(float(left[1])), "f"(float(right[0])), "f"(float(right[1])), "f"(sum[0]), "f"(sum[1]));
  d.thread_elements()[0] = x;
  d.thread_elements()[1] = y;
}
"""
_MATRICES = """
template <class T, int N>
struct rows_of_four {
  vec<T, 4> row[N];
  rows_of_four() = default;
  template <class E>
  explicit rows_of_four(thread const rows_of_four<E, N>& other) {
    for (int i = 0; i < N; i++) row[i] = vec<T, 4>(other.row[i]);
  }
  thread vec<T, 4>& operator[](int i) { return row[i]; }
};
typedef rows_of_four<half, 4> half4x4;
typedef rows_of_four<float, 4> float4x4;
typedef rows_of_four<half, 2> half2x4;
typedef rows_of_four<float, 2> float2x4;
"""
_ATTENTION_OF_MLX = """
template [[host_name("counted")]] [[kernel]] decltype(sdpa_vector<half, 128, 128>) sdpa_vector<half, 128, 128>;
"""
_HEADS = AttentionSpec(8, 2, 128, 0.088)
FORMATS = ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "NVFP4", "IQ4_NL", "IQ4_XS", "Q2_K", "Q3_K", "F16")
OF_LLAMA = {
    "q8_0": 16, "q4_0": 64, "q4_1": 64, "q5_0": 64, "q5_1": 64, "q4_K": 64, "q5_K": 32, "q6_K": 32, "mxfp4": 32,
    "iq4_nl": 32, "iq4_xs": 32, "q2_K": 128, "q3_K": 64,
}  # fmt: skip
"""Weights of a lane's pass."""


def longest_loop(ptx: str) -> list[str]:
    """Instructions of the loop that has the most of them."""
    lines = [line.strip() for line in ptx.splitlines()]
    labels = {line.split(":")[0]: i for i, line in enumerate(lines) if re.match(r"\$L\w+:", line)}
    found: list[list[str]] = [[]]
    for i, line in enumerate(lines):
        branch = re.search(r"bra(?:\.uni)?\s+(\$L\w+);", line)
        if branch and labels.get(branch[1], i) < i:
            body = lines[labels[branch[1]] : i + 1]
            found.append([x for x in body if x.endswith(";") and not x.startswith((".", "mov", "cvta", "//", "{", "}"))])
    return max(found, key=len)


def counted(ptx: str, weights: float) -> tuple[float, float]:
    """Instructions and cycles a weight."""
    instructions = cycles = 0
    moves: set[tuple[str, str, str, int]] = set()
    for line in longest_loop(ptx):
        line = re.sub(r"^@!?%\w+\s+", "", line)
        name = line.split()[0]
        move = _MOVE.match(line)
        if move:
            # Four neighbours lie within a run of four at least: what is counted is the runs.
            first, size = int(move["offset"] or 0), int(move["bits"]) // 8
            moves |= {
                (move["way"], move["base"], move["bits"], (first // size + i) // 4) for i in range(int(move["count"] or 1))
            }
        elif name not in FREE:
            each = 16 if name == "product.8x8x8" else 2 if name.endswith("x2") else 1
            far = re.match(r"shr\S*\s+%\w+, %\w+, %", line)
            instructions += each
            cycles += each * (8 if far else 4 if SLOW.match(name) else 1)
    return (instructions + len(moves)) / weights, (cycles + len(moves)) / weights


def _cut(header: str, begin: str, end: str) -> str:
    """A template, from the line before its name to the template that `end` names."""
    at = header.rindex("template <", 0, header.index(begin))
    return header[at : header.index(end, at)].rpartition("template <")[0]


def _unrolled(text: str) -> str:
    """Loops over what a lane holds, as Apple's compiler makes of them."""
    text = re.sub(r"#pragma (clang loop )?unroll(\(full\))?|(?<=FOR)_UNROLL", "", text).replace("FOR (", "for (")
    return re.sub(r"(?<!\) )\bfor (\((?:short|int) (?:i|ik|k|l|row) =)", r'_Pragma("clang loop unroll(full)") for \1', text)


def of_mlx(bits: int) -> str:
    """MLX's product of a row with weights in groups of 64, cut out of its header."""
    header = (KERNELS / "mlx/backend/metal/kernels/quantized.h").read_text("utf-8")
    first = header[header.index("#define MLX_MTL_CONST") : header.index("inline U qdot_safe(")].rpartition("template <")[0]
    cut = _cut(header, "void qmv_fast_impl(", "void qmv_impl(") + _AFFINE.replace("@BITS", str(bits))
    return _START + _unrolled(first + cut)


def fours_of_mlx(group: int) -> str:
    """The same of its weights of 4 bits in E2M1."""
    folder = KERNELS / "mlx/backend/metal/kernels"
    texts = [(folder / name).read_text("utf-8").replace("#pragma once", "") for name in ("fp4.h", "fp8.h")]
    header = (folder / "fp_quantized.h").read_text("utf-8")
    first = header[header.index("#define MLX_MTL_CONST") : header.index("inline U\nqdot_safe(")].rpartition("template <")[0]
    cut = _cut(header, "void fp_qmv_fast_impl(", "void fp_qmv_impl(") + _FOURS.replace("@GROUP", str(group))
    return _START + "".join(texts) + _unrolled(first + cut)


def prompts_of_mlx(bits: int) -> str:
    """MLX's product of many rows with such weights, of whole tiles."""
    header = (KERNELS / "mlx/backend/metal/kernels/quantized.h").read_text("utf-8")
    cut = header[header.index("#define MLX_MTL_CONST") : header.index("void qmm_n_impl(")].rpartition("template <")[0]
    for edge, tile in (("min(BM, M - y_row)", "BM"), ("min(BN, N - y_col)", "BN")):
        assert edge in cut
        cut = cut.replace(edge, tile)
    included = "".join(
        f'#include "mlx/backend/metal/kernels/{name}.h"\n' for name in ("utils", "steel/gemm/loader", "steel/gemm/mma")
    )
    return _PRODUCT + included + _unrolled(cut + _PROMPTS.replace("@BITS", str(bits)))


def _llama(folder: Path) -> tuple[str, str]:
    """llama.cpp's text, and what of it stands before its functions."""
    text = (folder / "ggml-metal/ggml-metal.metal").read_text("utf-8")
    included = [(folder / path).read_text("utf-8") for path in ("ggml-common.h", "ggml-metal/ggml-metal-impl.h")]
    head = text[: text.index("static inline int best_index_int8")]
    head = re.sub(r"#if defined\(GGML_METAL_EMBED_LIBRARY\).*?impl.h\"\n", lambda _: "\n".join(included), head, flags=re.S)
    return text, head + _function(text, "static inline float e8m0_to_fp32(")


def _function(text: str, begin: str) -> str:
    return text[text.index(begin) :].partition("\n}\n")[0] + "\n}\n"


def prompts_of_llama(folder: Path, name: str) -> str:
    """llama.cpp's product of many rows for a format, of whole tiles."""
    text, head = _llama(folder)
    decoders = text[text.index("template <typename type4x4>\nvoid dequantize_q4_1(") : text.index("enum ggml_sort_order")]
    cut = _function(text, "template <typename type4x4>\nvoid dequantize_q4_0(") + decoders
    # The first of the name is for GPUs with matrix units.
    at = text.rindex("kernel void kernel_mul_mm(")
    begin = text.rindex("template<", 0, at)
    cut += text[text.index("constant bool FC_mul_mm_bc_inp") : text.index("// each block_q contains 16*nl")]
    cut += _function(text[begin:], "template<")
    instance = re.search(rf'host_name\("kernel_mul_mm_{name}_f32"\).*(kernel_mul_mm<.*>);', text)
    assert instance, name
    made = f'template [[host_name("counted")]] [[kernel]] decltype({instance[1]}) {instance[1]};\n'
    return _PRODUCT + _MATRICES + head + _unrolled(cut) + made


def of_llama(folder: Path, name: str) -> str:
    """llama.cpp's product for a format, its inner loops unrolled."""
    text, head = _llama(folder)
    dots = text[text.index("// Q1_0 dot product") : text.index("// mat-vec kernel processing in chunks of float4")]
    parts = [re.sub(r"(\[\[host_name[^\n]*\n)?kernel void .*?\n}\n", "", dots, flags=re.S)]
    impl = f"void kernel_mul_mv_{name}_f32_impl("
    if impl not in dots and impl in text:
        parts.append(_function(text[text.rindex("template<", 0, text.index(impl)) :], "template<"))
    parts.append(_function(text, f"kernel void kernel_mul_mv_{name}_f32("))
    return head + _unrolled("".join(parts))


def attention_of_mlx() -> str:
    """MLX's attention of one query, a SIMD-group a key and head, without masks and sinks."""
    text = (KERNELS / "mlx/backend/metal/kernels/sdpa_vector.h").read_text("utf-8")
    text = text.partition("template <typename T, int D, int V = D>\n[[kernel]] void sdpa_vector_2pass")[0]
    text = re.sub(r"constant (bool|int) (\w+) \[\[function_constant\(\d+\)\]\];", r"constant constexpr \1 \2 = 0;", text)
    return "using namespace metal;\n" + re.sub(r",\s*function_constant\(\w+\)", "", text) + _ATTENTION_OF_MLX


def ours(trial: Trial, prompts: bool = False) -> Iterator[tuple[str, str]]:
    """PTX of the kernels of a trial; `prompts`: with products of matrices to count."""
    made = []

    class Recorder(metal_kernel):
        def launch(self, call: Call, settings: Settings) -> Launch:
            text = self.text(call)
            counted = _PRODUCT + _unrolled(text.text) if prompts else text.text
            made.append((self.name, compile_ptx(MetalSource(self.name, counted, text.entry), "sm_90", find_toolchain())))
            return super().launch(call, settings)

    with running(FAST):
        mx.fast.metal_kernel = Recorder
        trial.error()
    yield from made


def compiled(text: str, entry: str, mlx_names: bool = False) -> str:
    constants = tuple((n, 0 if "_bc_" in n else 2) for n in re.findall(r"(\w+)\s*\[\[function_constant", text))
    return compile_ptx(MetalSource(entry, text, entry, mlx_names, constants), "sm_90", find_toolchain())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llama", type=Path, metavar="DIR", help="llama.cpp's folder ggml/src")
    llama = parser.parse_args().llama

    def say(name: str, ptx: str, weights: float) -> None:
        print(f"{name}: {' '.join(f'{number:.2f}' for number in counted(ptx, weights))}", flush=True)

    def say_prompts(name: str, ptx: str, rows: int, columns: int) -> None:
        # Tiles of `rows` of W by `columns` rows of x, 32 columns of W and 128 threads.
        say(f"{name}, prompts", ptx, rows * columns * 32 / 128)

    for name, bits in (*((name, 0) for name in FORMATS), ("Q4_1", 2), ("Q4_1", 3), ("Q8_1", 6)):
        # 4 rows of W and 16 columns a lane and pass.
        for kernel, ptx in ours(linear(LINEAR, [GGMLType[name]], 1024, bits=bits)):
            say(kernel, ptx, 64)
        for kernel, ptx in ours(linear(LINEAR, [GGMLType[name]], 1024, rows=64, single=False, bits=bits), prompts=True):
            say_prompts(kernel, ptx, 64, 64)
    for bits in (4, 8, 6, 3, 2):
        say_prompts(f"MLX's qmm_t, {bits} bits in groups of 64", compiled(prompts_of_mlx(bits), "counted", True), 32, 32)
    for bits, each in ((4, 64), (8, 32), (5, 64), (6, 32), (3, 64), (2, 64)):
        say(f"MLX's qmv_fast, {bits} bits in groups of 64", compiled(of_mlx(bits), "counted"), each)
    for group in (32, 16):
        say(f"MLX's fp_qmv_fast, groups of {group}", compiled(fours_of_mlx(group), "counted", True), 64)
    for name, each in OF_LLAMA.items() if llama else ():
        entry = f"kernel_mul_mv_{name}_f32"
        say(entry, compiled(of_llama(llama, name), entry, True), each)
        say_prompts(f"kernel_mul_mm_{name}_f32", compiled(prompts_of_llama(llama, name), "counted", True), 64, 32)
    lanes, heads = lanes_of(_HEADS.head_dim)[0], heads_together(_HEADS.n_heads // _HEADS.n_kv, _HEADS.head_dim)
    walks = [(name, ptx, lanes / heads) for name, ptx in ours(attention(_HEADS, [(1, 200)], "float16")) if "single" in name]
    walks.append(("MLX's sdpa_vector", compiled(attention_of_mlx(), "counted", True), 32.0))
    for name, ptx, lanes_a_head in walks:
        instructions, cycles = counted(ptx, 1)
        print(
            f"{name}, 128 values, a key and head: {instructions * lanes_a_head:.0f} {cycles * lanes_a_head:.0f}", flush=True
        )


if __name__ == "__main__":
    main()
