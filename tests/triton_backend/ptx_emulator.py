"""Runs the inline PTX of kernels on the CPU: every instruction on the words of all elements at once."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

Words = np.ndarray[Any, np.dtype[np.uint32]]


def run(assembly: str, constraints: str, inputs: list[Words]) -> list[Words]:
    """The outputs of inline assembly: 16-bit ones (`=h`) in the low half of a word."""
    kinds = constraints.split(",")
    outputs = [kind[1:] for kind in kinds if kind[0] == "="]
    registers = {f"${len(outputs) + i}": x for i, x in enumerate(inputs)}
    written: set[str] = set()
    like = inputs[0]

    def read(name: str) -> Words:
        if name[0] == "$" and int(name[1:]) >= len(outputs):
            assert kinds[int(name[1:])] not in written, f"{name} is read when an output may have taken its register"
        return registers[name] if name in registers else np.full_like(like, int(name, 0))

    def write(name: str, x: Words) -> None:
        registers[name] = x
        if name[0] == "$":
            written.add(outputs[int(name[1:])])

    for line in assembly.strip().removeprefix("{").removesuffix("}").split(";"):
        operation, _, rest = line.strip().partition(" ")
        to, *operands = re.findall(r"\{[^}]*\}|[^,\s]+", rest) or [""]
        if operation in ("", ".reg"):
            continue
        x = _OPERATIONS[operation](*map(read, operands))
        if to[0] == "{":
            low, high = to[1:-1].replace(" ", "").split(",")
            write(low, x & 0xFFFF)
            write(high, x >> 16)
        else:
            write(to, x)
    return [registers[f"${i}"] for i in range(len(outputs))]


def _halves(x: Words) -> Any:
    return x.view(np.float16).astype(np.float64)


def _rounded(x: Any) -> Words:
    """Pairs of float64 to float16 in words: products and sums of a few are exact before."""
    with np.errstate(all="ignore"):
        return np.ascontiguousarray(x.astype(np.float16)).view(np.uint32)


def _prmt(a: Words, b: Words, selector: Words) -> Words:
    found = np.zeros_like(a)
    for i in range(4):
        at = int(selector[0]) >> 4 * i & 15
        assert at < 8, "a selector that repeats a sign"
        found |= ((a, b)[at // 4] >> at % 4 * 8 & 255) << 8 * i
    return found


def _two_halves(high: Words, low: Words) -> Words:
    return _rounded(np.stack([low.view(np.float32), high.view(np.float32)], -1).reshape(-1))


_OPERATIONS: dict[str, Any] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "mul.lo.u32": lambda a, b: a * b,
    "prmt.b32": _prmt,
    "sub.f16x2": lambda a, b: _rounded(_halves(a) - _halves(b)),
    "mul.rn.f16x2": lambda a, b: _rounded(_halves(a) * _halves(b)),
    "fma.rn.f16x2": lambda a, b, c: _rounded(_halves(a) * _halves(b) + _halves(c)),
    "cvt.rn.f16x2.f32": _two_halves,
}
