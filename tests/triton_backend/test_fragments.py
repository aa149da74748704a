"""The PTX that decodes codes in registers, run by a small model of its eight instructions; and what the tables say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from quarrel.triton_backend.elementwise import norm, wgmma_x
from quarrel.triton_backend.formats import fragment_codes, fragments
from quarrel.triton_backend.linear import matmul, mma, tuned
from quarrel.triton_backend.linear.left_parts import nothing
from quarrel.triton_backend.linear.tuned import key, table
from quarrel.triton_backend.runtime.launch import INTERPRETED, launch

RNG = np.random.default_rng(5)
ONE, ZERO = 0x3C003C00, 0


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    """Where tensors are made."""
    with torch.device("cpu" if INTERPRETED else "cuda"):
        yield


def halves(word: int) -> np.ndarray:
    return np.array([word & 0xFFFF, word >> 16], np.uint16).view(np.float16).astype(np.float64)


def word_of(values: np.ndarray) -> int:
    low, high = (int(v) for v in values.astype(np.float16).view(np.uint16))
    return low | high << 16


def permuted(a: int, b: int, how: int) -> int:
    of = [(w >> 8 * i) & 255 for w in (a, b) for i in range(4)]
    return sum(of[(how >> 4 * i) & 7] << 8 * i for i in range(4))


WHAT = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "shr.u32": lambda a, b: a >> b,
    "mul.lo.u32": lambda a, b: a * b & 0xFFFFFFFF,
    "prmt.b32": permuted,
    "sub.f16x2": lambda a, b: word_of(halves(a) - halves(b)),
    "mul.rn.f16x2": lambda a, b: word_of(halves(a) * halves(b)),
    "fma.rn.f16x2": lambda a, b, c: word_of(halves(a) * halves(b) + halves(c)),
}


def run(text: str, *given: int) -> list[float]:
    """The eight results of a fragment's PTX, whose operands follow its outputs."""
    registers: dict[str, int] = {f"${8 + i}": value for i, value in enumerate(given)}
    results = [float("nan")] * 8
    for line in text.strip()[1:-1].replace("{$", "<$").split(";"):
        if not line.strip() or ".reg" in line:
            continue
        pair = re.fullmatch(r"\s*mov.b32 <\$(\d), \$(\d)}, (\w+)", line)
        if pair:
            results[int(pair[1])], results[int(pair[2])] = halves(registers[pair[3]])
            continue
        op, rest = line.split(None, 1)
        to, *from_ = (part.strip() for part in rest.split(","))
        registers[to] = WHAT[op](*(registers[f] if f in registers else int(f, 0) for f in from_))
    return results


def test_codes_become_their_integers_in_order() -> None:
    for _ in range(50):
        code, upper = (int(v) for v in RNG.integers(0, 1 << 32, 2))
        code_bytes = [(code >> 8 * i) & 255 for i in range(4)]
        nibbles = [b & 15 for b in code_bytes] + [b >> 4 for b in code_bytes]
        assert run(fragment_codes.FOUR.value, code, ONE, ZERO) == [q - 8 for q in nibbles]
        two = [upper >> 2 * i & 3 for i in range(8)]
        given = (code, ONE, ONE, upper & 255, upper >> 8 & 255)
        assert run(fragment_codes.SIX.value, *given) == [(q | t << 4) - 32 for q, t in zip(nibbles, two, strict=True)]
        one = [upper >> i & 1 for i in range(8)]
        given = (code, ONE, ZERO, upper & 15, upper >> 4 & 15)
        assert run(fragment_codes.FIVE.value, *given) == [(q | t << 4) - 16 for q, t in zip(nibbles, one, strict=True)]
        signed = np.array([code, upper], np.uint32).view(np.int8)
        assert run(fragment_codes.EIGHT.value, code, upper, ONE) == signed.tolist()


def test_scale_and_minimum_follow() -> None:
    scale, less = word_of(np.array([0.25, 0.25])), word_of(np.array([-1.5, -1.5]))
    assert run(fragment_codes.FOUR.value, 0x76543210, scale, less)[:2] == [(0 - 8) * 0.25 - 1.5, (2 - 8) * 0.25 - 1.5]
    high = run(fragment_codes.SIX.value, 0, ONE, scale, 0, 0b11100100)[4:]
    assert high == [(q * 16 - 32) * 0.25 for q in range(4)]


@pytest.mark.parametrize("k", [512, 288])
def test_rows_are_arranged_as_threads_read_them(k: int) -> None:
    x = torch.arange(11 * k, dtype=torch.float32).reshape(11, k).fmod(2048) + 1
    to = torch.full((16 * 512,), float("nan"), dtype=torch.float16)
    launch(fragments.arrange, (2, 2), to, x, 11, K=k, PDL=False)
    # Group of rows, 256 columns, half of a block, blocks 4 on, 8 columns on, row, block, column.
    made = to.reshape(2, 2, 2, 2, 2, 8, 4, 8).permute(0, 5, 1, 3, 6, 2, 4, 7).reshape(16, 512)
    assert torch.equal(made[:11, :k], x.half())
    assert not made[11:].any()
    assert not made[:, k:].any()


@pytest.mark.parametrize("k", [768, 576])
def test_a_norm_may_put_its_rows_there_itself(k: int) -> None:
    x, gain = torch.randn(3, k), torch.randn(k)
    to, wanted = (torch.full((8 * 768,), float("nan"), dtype=torch.float16) for _ in range(2))
    left, none = nothing(x)
    launch(norm.norm_arranged, (8,), to, x, gain, left, 3, 1e-5, **none, K=k, C=1024, PDL=False)
    rows_of_x = x * (x.square().mean(1, keepdim=True) + 1e-5).rsqrt() * gain
    launch(fragments.arrange, (3, 1), wanted, rows_of_x, 3, K=k, PDL=False)
    torch.testing.assert_close(to, wanted, rtol=2e-3, atol=1e-6)


def test_more_warps_share_the_columns_of_fewer_rows() -> None:
    assert [mma.k_split(n, k, 8).turns for n, k in ((32000, 4096), (14336, 4096), (4096, 14336), (1024, 512))] == [
        1,
        2,
        8,
        2,
    ]
    assert [mma.k_split(14336, 4096, w).rows for w in mma.WIDTHS] == [16, 32, 16]


@pytest.mark.parametrize("generation", [0, 9])
def test_tables_hold_what_kernels_can_run(generation: int) -> None:
    found = table(generation)
    assert {"one", "gated", "three", "wide"} <= found.widths.keys()
    for name, by_width in found.tiles.items():
        k = int(name.rpartition("x")[2])
        for width, (tall, blocks, parts, warps, stages) in by_width.items():
            assert (k // 32) % blocks == 0, name
            assert tall in (16, 32, 64, 128, 256), name
            assert width >= 16, name
            assert parts * blocks <= k // 32, name
            assert (warps in (2, 4, 8), 1 <= stages <= 4) == (True, True), name
    for name, by_width in found.rows.items():
        for width, (tall_rows, tall, turns, deep) in by_width.items():
            assert width in (8, 16, 32), name
            assert tall_rows % (16 * tall) == 0, name
            assert tall * turns <= 16, name
            assert deep in (0, 1), name


def test_a_measured_shape_goes_before_the_widths() -> None:
    widths = ((16, 64, 4, 4, 3), (32, 64, 4, 4, 3))
    shapes = matmul.shapes_for(4096, 4096, widths, {32: (128, 8, 2, 8, 2), 128: (128, 4, 1, 8, 3)})
    assert [s.tokens for s in shapes] == [16, 32, 128]
    assert shapes[1] == matmul.Shape(128, 32, 8, 2, 8, 2)
    assert shapes[0].parts == 4
    assert key("three", ["Q4_K", "Q4_K", "Q6_K"], [4096, 1024, 1024], 4096) == "three Q4_K+Q4_K+Q6_K 4096+1024+1024x4096"


def test_the_tables_are_in_the_package() -> None:
    folder = Path(tuned.__file__).parent
    assert {p.name for p in folder.glob("*.json")} == {"sm_90.json", "other.json"}
    for file in folder.glob("*.json"):
        assert json.loads(file.read_text())["widths"]


def test_rows_for_warpgroups_count_columns_as_these_decode_them() -> None:
    x, k, width = torch.arange(5 * 256, dtype=torch.float32).reshape(5, 256).fmod(2048), 256, 64
    to, normed = (torch.full((width * k,), float("nan"), dtype=torch.float16) for _ in range(2))
    launch(wgmma_x.arrange, (k // 128, width // 16), to, x, 5, K=k, BT=width, PDL=False)
    # The eight values of a word, [block, word], joined as the kernel does it: [block, word, one, next, upper half].
    block, word = np.arange(4)[:, None], np.arange(2)[None, :]
    for half in range(2):
        at = [block * 32 + i // 4 * 16 + (half * 2 + word) * 4 + i % 4 for i in range(8)]
        pairs = [np.stack(at[i : i + 2], -1) for i in range(0, 8, 2)]
        both = np.stack([np.stack(pairs[:2], -1), np.stack(pairs[2:], -1)], -1)
        columns = both.transpose(1, 4, 3, 0, 2).reshape(64)
        made = to.reshape(k // 64, width, 64)[half::2]
        for step in range(2):
            assert torch.equal(made[step, :5], x[:, step * 128 + torch.from_numpy(columns).to(x.device)].half())
            assert not made[step, 5:].any()
    gain = torch.randn(k)
    left, none = nothing(x)
    launch(wgmma_x.norm_arranged, (width,), normed, x, gain, left, 5, 1e-5, **none, K=k, C=256, BT=width, PDL=False)
    rows_of_x = x * (x.square().mean(1, keepdim=True) + 1e-5).rsqrt() * gain
    launch(wgmma_x.arrange, (k // 128, width // 16), to, rows_of_x, 5, K=k, BT=width, PDL=False)
    torch.testing.assert_close(normed, to, rtol=2e-3, atol=1e-6)
