"""Keys and values as 8-bit codes with a float32 scale for each token and head (`ops/kv.py`).

A code becomes a float by its bits alone: one of `int8` as 8 + u / 128 - 9 in float16, with u = code + 128 in the last bits,
one of `fp8` by moving its bits to where float16 has them, which is 256 times too small; one of `fp8_e5m2` is the upper half
of a float16, over 256, so that weights of the softmax times its scale are no subnormal float16. The scales on the device
make up for the 1 / 128 and the 1 / 256; they multiply scores, and the weights of the softmax.
"""

from __future__ import annotations

import triton
import triton.language as tl

TL_TYPES = {"float32": tl.float32, "float16": tl.float16, "bfloat16": tl.bfloat16}


@triton.jit
def as_values(codes, KIND: tl.constexpr, COMPUTE: tl.constexpr):
    """What a product takes: values of a plain cache, or codes before they are scaled."""
    if KIND == "int8":
        wide = (codes ^ 0x80).to(tl.int16) | 0x4800
        return (wide.to(tl.float16, bitcast=True) - 9.0).to(COMPUTE)
    elif KIND == "fp8":
        wide = codes.to(tl.int16)
        bits = ((wide & 0x7F) << 7) | ((wide & 0x80) << 8)
        return bits.to(tl.float16, bitcast=True).to(COMPUTE)
    elif KIND == "fp8_e5m2":
        return ((codes.to(tl.int16) << 8).to(tl.float16, bitcast=True) * 0.00390625).to(COMPUTE)
    else:
        return codes.to(COMPUTE)


@triton.jit
def code_of(x, factor, KIND: tl.constexpr):
    """Codes of float32 values; `factor` [R] is top / amax of their rows."""
    y = x * factor[:, None]
    if KIND == "int8":
        # 1.5 * 2^23 rounds to the nearest integer, ties to even, in the last bits.
        return (((y + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000) & 255).to(tl.uint8)
    elif KIND == "fp8_e5m2":
        bits = y.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = ((size + (0xFFFFF + ((size >> 21) & 1))) >> 21) - (112 << 2)
        small = (size.to(tl.float32, bitcast=True) + 128.0).to(tl.int32, bitcast=True) - 0x43000000
        code = tl.minimum(tl.where(size < 0x38800000, small, normal), 0x7B)
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
    else:
        bits = y.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = ((size + (0x7FFFF + ((size >> 20) & 1))) >> 20) - (120 << 3)
        # Adding 2^14 lets the float unit round a subnormal code into the last bits.
        small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.minimum(tl.where(size < 0x3C800000, small, normal), 0x7E)
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def factors(most, bad, KIND: tl.constexpr):
    """top / amax, and the scale as it lies on the device, of rows with `most` as their amax; `bad` is 0, or NaN."""
    TOP: tl.constexpr = 127.0 if KIND == "int8" else (448.0 if KIND == "fp8" else 57344.0)
    WIDER: tl.constexpr = 128.0 if KIND == "int8" else 256.0
    factor = tl.where(most > 1e-30, TOP / tl.where(most > 1e-30, most, 1.0), 0.0)
    # What is not finite makes the scale NaN, so it shows in every result.
    return factor, most * (1.0 / TOP) * WIDER + bad


@triton.jit
def largest(x):
    """amax of rows of float32 values, and 0, or NaN where something is not finite."""
    return tl.max(tl.abs(x), 1), tl.sum(x * 0.0, 1)
