"""Counts what the loop of a matrix-vector product takes for a weight: our kernels, and MLX's own from its header.

    python -m tools.metal_counts [FILE.metal:ENTRY:WEIGHTS ...]

Each text is compiled to PTX by the emulator's clang, and the loop that has the most instructions is counted. A line gives
the instructions for each weight that a lane's pass handles, and the cycles that they take on an Apple GPU: a shift or a
conversion between whole numbers and floats 4, anything else 1; moves, and half operands of float sums, none.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx

from quarrel.gguf import GGMLType
from quarrel.ops.linear import LINEAR
from tests.mlx_backend.cases import running
from tests.mlx_backend.emulated import FAST
from tests.mlx_backend.trials import linear
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


def ours(type: GGMLType) -> Iterator[tuple[str, str]]:
    """PTX of the kernel that multiplies a decoded row: 4 rows of W and 16 columns a lane and pass."""
    made = []

    class Recorder(metal_kernel):
        def launch(self, call: Call, settings: Settings) -> Launch:
            text = self.text(call)
            made.append((self.name, compile_ptx(MetalSource(self.name, text.text, text.entry), "sm_90", find_toolchain())))
            return super().launch(call, settings)

    with running(FAST):
        mx.fast.metal_kernel = Recorder
        linear(LINEAR, [type], 1024).error()
    yield from made


def main() -> None:
    rows: list[tuple[str, str, int]] = []
    for name in FORMATS:
        rows += [(kernel, ptx, 64) for kernel, ptx in ours(GGMLType[name])]
    given = [("MLX's qmv_fast, 4 bits in groups of 64", of_mlx(), "counted", 64)]
    for argument in sys.argv[1:]:
        path, entry, weights = argument.rsplit(":", 2)
        given.append((entry, Path(path).read_text("utf-8"), entry, int(weights)))
    for name, text, entry, each in given:
        constants = tuple((n, 0) for n in re.findall(r"(\w+)\s*\[\[function_constant", text))
        rows.append((name, compile_ptx(MetalSource(name, text, entry, False, constants), "sm_90", find_toolchain()), each))
    for name, ptx, each in rows:
        print(f"{name}: {' '.join(f'{number:.2f}' for number in counted(ptx, each))}", flush=True)


if __name__ == "__main__":
    main()
