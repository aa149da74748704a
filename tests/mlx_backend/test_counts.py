"""Counting the instructions of a loop."""

from __future__ import annotations

from tools.metal_counts import attention_of_mlx, counted, longest_loop
from tools.metal_emulator.build import MetalSource
from tools.metal_emulator.ptx import compile_ptx
from tools.metal_emulator.toolchain import find_toolchain

PTX = """
$L__BB0_1:
	add.s32 	%r1, %r1, 1;
	@%p1 bra 	$L__BB0_1;
$L__BB0_2:                              // =>This Inner Loop Header
	ld.v2.b32 	{%r1, %r2}, [%rd1];
	mov.b32 	%r3, %r1;
	shr.u32 	%r3, %r3, 4;
	cvt.rn.f32.u32 	%f1, %r3;
	cvt.f32.f16 	%f2, %h1;
	fma.rn.f32 	%f1, %f1, %f2, %f3;
	@%p2 bra 	$L__BB0_2;
	ret;
"""


def test_the_longest_loop_is_counted() -> None:
    assert len(longest_loop(PTX)) == 6
    assert counted(PTX, 2) == (5 / 2, (1 + 4 + 4 + 1 + 1) / 2)
    assert longest_loop("	ret;") == []


def test_attention_of_mlx_is_cut_out_of_its_header() -> None:
    source = MetalSource("sdpa_vector", attention_of_mlx(), "counted", True)
    assert 60 < counted(compile_ptx(source, "sm_90", find_toolchain()), 1)[0] < 90
