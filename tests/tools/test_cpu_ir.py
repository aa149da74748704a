"""The comparison of emitted IR: what is renamed, gone or new."""

from __future__ import annotations

from tools.cpu_ir import compare


def test_a_renamed_kernel_is_not_a_changed_one() -> None:
    before = {"avx2 add": "1", "avx2 dot_row": "2", "neon add": "3"}
    assert compare(before, before) == (0, [], [])
    assert compare(before, {"avx2 add": "1", "avx2 matvec": "2", "neon add": "3"}) == (1, [], [])
    assert compare(before, {"avx2 add": "9", "avx2 dot_row": "2", "neon add": "3"}) == (0, ["avx2 add"], ["avx2 add"])


def test_levels_are_compared_apart() -> None:
    assert compare({"avx2 add": "1"}, {"neon add": "1"}) == (0, ["avx2 add"], ["neon add"])
