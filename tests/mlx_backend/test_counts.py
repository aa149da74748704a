"""Counting the instructions of a loop."""

from __future__ import annotations

from tools.metal_counts import attention_of_mlx, compiled, counted, fours_of_mlx, longest_loop, of_mlx, prompts_of_mlx

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


def test_what_apples_gpus_do_otherwise_is_counted_as_they_do() -> None:
    def cycles(*lines: str) -> float:
        return counted("\n".join(["$L__BB0_1:", *lines, "bra $L__BB0_1;"]), 1)[1] - 1

    assert cycles("add.rn.f16x2 %r1, %r2, %r3;") == 2
    assert cycles("fma.rn.f32 %f1, %f2, %f3, %f4;", "cvt.rn.f16.f32 %h1, %f1;") == 1
    assert cycles("mul.lo.s32 %r1, %r2, %r3;") == cycles("shr.u32 %r1, %r2, 4;") == 4
    assert cycles("@%p1 shr.u32 %r1, %r2, %r3;") == 8
    # Four neighbours are one load, whoever wrote it; the fifth is another, as is a load by another pointer.
    four = [f"ld.b16 %h{i}, [%rd1+{2 * i}];" for i in range(4)]
    assert cycles(*four) == cycles("ld.v4.b16 {%h1, %h2, %h3, %h4}, [%rd1];") == 1
    assert cycles(*four, "ld.b16 %h4, [%rd1+8];") == cycles(*four, "ld.b16 %h4, [%rd2+2];") == 2
    # Four stores are one, a product of 8x8 matrices the 16 FMAs of a lane.
    assert cycles(*(f"st.shared.b16 [%rd1+{2 * i}], %h{i};" for i in range(4)), "ld.b16 %h4, [%rd1];") == 2
    assert cycles("product.8x8x8 {%f1, %f2}, {%f3, %f4}, {%f5, %f6}, {%f7, %f8};", "bar.warp.sync -1;") == 16


def test_kernels_of_mlx_are_cut_out_of_its_headers() -> None:
    assert 60 < counted(compiled(attention_of_mlx(), "counted", True), 1)[0] < 90
    assert 4 < counted(compiled(of_mlx(4), "counted"), 64)[0] < 5
    assert 8 < counted(compiled(fours_of_mlx(32), "counted", True), 64)[0] < 9
    # 1 is products alone: a tile of 32 by 32 by 32 of 128 threads.
    assert 1.2 < counted(compiled(prompts_of_mlx(4), "counted", True), 32 * 32 * 32 / 128)[0] < 1.4
