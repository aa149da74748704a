"""Counts what loops of decoding take: a product for a weight, attention for a key and head; ours, and MLX's of its headers.

    python -m tools.metal_counts [FILE.metal:ENTRY:WEIGHTS ...]

Each text is compiled to PTX by the emulator's clang, and the loop that has the most instructions is counted. A line gives
the instructions for each weight that a lane's pass handles, and the cycles that they take on an Apple GPU: a shift or a
conversion between whole numbers and floats 4, anything else 1; moves, and half operands of float sums, none. Attention's
are those of all lanes that share a key; a loop within the loop counts once, which favours MLX's sum over lanes.
"""

from __future__ import annotations

import re
import sys
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

SLOW = re.compile(r"(shl|shr|shf|bfe|bfi|prmt|cvt\.(rn|rz|rni|rzi)?\.?(f\d+\.[us]\d+|[us]\d+\.f\d+))")
FREE = ("cvt.f32.f16", "cvt.f32.bf16")
KERNELS = Path(mx.__file__).parent / "include"
_OF_MLX = """
[[kernel]] void counted(device const uint* w [[buffer(0)]], device const half* scales [[buffer(1)]],
    device const half* biases [[buffer(2)]], device const half* x [[buffer(3)]], device half* y [[buffer(4)]],
    constant int& k [[buffer(5)]], constant int& n [[buffer(6)]], uint3 tid [[threadgroup_position_in_grid]],
    uint group [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  qmv_fast_impl<half, 64, 4>(w, scales, biases, x, y, k, n, tid, group, lane);
}
"""
_ATTENTION_OF_MLX = """
template [[host_name("counted")]] [[kernel]] decltype(sdpa_vector<half, 128, 128>) sdpa_vector<half, 128, 128>;
"""
_HEADS = AttentionSpec(8, 2, 128, 0.088)
FORMATS = ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "NVFP4", "IQ4_NL", "Q2_K", "Q3_K", "F16")


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


def counted(ptx: str, weights: int) -> tuple[float, float]:
    """Instructions and cycles a weight."""
    names = [re.sub(r"^@!?%\w+\s+", "", line).split()[0] for line in longest_loop(ptx)]
    taken = [name for name in names if name not in FREE]
    return len(taken) / weights, sum(4 if SLOW.match(name) else 1 for name in taken) / weights


def of_mlx() -> str:
    """MLX's product of a row with weights of 4 bits in groups of 64, cut out of its header."""
    header = (KERNELS / "mlx/backend/metal/kernels/quantized.h").read_text("utf-8")
    first = header[header.index("#define MLX_MTL_CONST") : header.index("inline U qdot_safe(")].rpartition("template <")[0]
    begin = header.index("METAL_FUNC void qmv_fast_impl(")
    begin = header.rindex("template <", 0, begin)
    kernel = header[begin : header.index("METAL_FUNC void qmv_impl(")].rpartition("template <")[0]
    start = "#include <metal_stdlib>\nusing namespace metal;\n#define METAL_FUNC inline __attribute__((always_inline))\n"
    return start + first + kernel + _OF_MLX


def attention_of_mlx() -> str:
    """MLX's attention of one query, a SIMD-group a key and head, without masks and sinks."""
    text = (KERNELS / "mlx/backend/metal/kernels/sdpa_vector.h").read_text("utf-8")
    text = text.partition("template <typename T, int D, int V = D>\n[[kernel]] void sdpa_vector_2pass")[0]
    text = re.sub(r"constant (bool|int) (\w+) \[\[function_constant\(\d+\)\]\];", r"constant constexpr \1 \2 = 0;", text)
    return "using namespace metal;\n" + re.sub(r",\s*function_constant\(\w+\)", "", text) + _ATTENTION_OF_MLX


def ours(trial: Trial) -> Iterator[tuple[str, str]]:
    """PTX of the kernels of a trial."""
    made = []

    class Recorder(metal_kernel):
        def launch(self, call: Call, settings: Settings) -> Launch:
            text = self.text(call)
            made.append((self.name, compile_ptx(MetalSource(self.name, text.text, text.entry), "sm_90", find_toolchain())))
            return super().launch(call, settings)

    with running(FAST):
        mx.fast.metal_kernel = Recorder
        trial.error()
    yield from made


def main() -> None:
    rows: list[tuple[str, str, int]] = []
    for name in FORMATS:
        # 4 rows of W and 16 columns a lane and pass.
        rows += [(kernel, ptx, 64) for kernel, ptx in ours(linear(LINEAR, [GGMLType[name]], 1024))]
    given = [("MLX's qmv_fast, 4 bits in groups of 64", of_mlx(), "counted", 64)]
    for argument in sys.argv[1:]:
        path, entry, weights = argument.rsplit(":", 2)
        given.append((entry, Path(path).read_text("utf-8"), entry, int(weights)))
    for name, text, entry, each in given:
        constants = tuple((n, 0) for n in re.findall(r"(\w+)\s*\[\[function_constant", text))
        rows.append((name, compile_ptx(MetalSource(name, text, entry, False, constants), "sm_90", find_toolchain()), each))
    for name, ptx, each in rows:
        print(f"{name}: {' '.join(f'{number:.2f}' for number in counted(ptx, each))}", flush=True)
    lanes, heads = lanes_of(_HEADS.head_dim)[0], heads_together(_HEADS.n_heads // _HEADS.n_kv, _HEADS.head_dim)
    walks = [(name, ptx, lanes / heads) for name, ptx in ours(attention(_HEADS, [(1, 200)], "float16")) if "single" in name]
    source = MetalSource("sdpa_vector", attention_of_mlx(), "counted", True)
    walks.append(("MLX's sdpa_vector", compile_ptx(source, "sm_90", find_toolchain()), 32.0))
    for name, ptx, lanes_a_head in walks:
        instructions, cycles = counted(ptx, 1)
        print(
            f"{name}, 128 values, a key and head: {instructions * lanes_a_head:.0f} {cycles * lanes_a_head:.0f}", flush=True
        )


if __name__ == "__main__":
    main()
