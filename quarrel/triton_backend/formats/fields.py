"""Bit fields of raw blocks: how packing takes them apart, and how the exact decode reads them again."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def view(raw: torch.Tensor, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
    """Bytes start to stop of every block, as `dtype`."""
    # A copy always: the slice of a single block is contiguous as it lies, at any address.
    return raw[..., start:stop].clone(memory_format=torch.contiguous_format).view(dtype)


def nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Codes of 4 bits `[..., 32]` to bytes `[..., 16]`, column j below column j + 16."""
    return codes[..., :16] | (codes[..., 16:] << 4)


def words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of 1 or 2 bits `[..., 32]` to int32 words, the first column lowest."""
    per = 8 // bits
    shift = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    parts = codes.reshape(*codes.shape[:-1], 32 // per, per) << shift
    return parts.sum(-1, dtype=torch.int32).to(torch.uint8).view(torch.int32)


def unshift(raw: torch.Tensor, shifts: tuple[int, ...], mask: int) -> torch.Tensor:
    """`[..., bytes]` to `[..., len(shifts), bytes]`: the same bytes shifted down by each."""
    return (raw.unsqueeze(-2) >> torch.tensor(shifts, dtype=torch.uint8, device=raw.device)[:, None]) & mask


@triton.jit
def load_float(p, at, ok):
    """Entries [R, B] as float32 [R, B, 1]."""
    return tl.load(p + at, mask=ok, other=0.0).to(tl.float32)[:, :, None]


@triton.jit
def load_nibbles(codes, at, ok):
    """Codes of columns j and j + 16 of blocks `at` [R, B], each int32 [R, B, 16]."""
    p = codes + at[:, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    q = tl.load(p, mask=ok[:, :, None], other=0).to(tl.int32)
    return q & 15, q >> 4


@triton.jit
def load_two_bits(words, at, ok):
    """Two words a block: bits 2j and 2j + 1 of the first are column j, of the second column j + 16."""
    shift = tl.arange(0, 16)[None, None, :] * 2
    low = tl.load(words + at * 2, mask=ok, other=0)[:, :, None]
    high = tl.load(words + at * 2 + 1, mask=ok, other=0)[:, :, None]
    return (low >> shift) & 3, (high >> shift) & 3


@triton.jit
def load_one_bit(words, at, ok):
    """One word a block: bit j is column j."""
    j = tl.arange(0, 16)[None, None, :]
    word = tl.load(words + at, mask=ok, other=0)[:, :, None]
    return (word >> j) & 1, (word >> (j + 16)) & 1


@triton.jit
def float16_at(word):
    """The float16 in the low bits of an int32, as float32."""
    return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
