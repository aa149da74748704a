"""MLX's own `quantized_matmul` for formats that it holds exactly, so that the two can be compared: QUARREL_METAL=mlx.

Q4_0, Q4_1 and Q8_0 are MLX's affine groups of 32, 64 or 128 (codes from 0, a scale and a bias that are float16 numbers),
MXFP4 is its `mxfp4`. The planes that other kernels read stay where they are; this makes a copy in MLX's order. Norms,
biases, activations and residuals are MLX operations, which mx.compile fuses.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from quarrel.gguf import GGMLType
from quarrel.mlx_backend.formats.fields import IN_ORDER, THIRD_BESIDE_TWOS, fours_apart, nibbles_apart, words_apart
from quarrel.mlx_backend.formats.layout import TWO_BITS, Packed
from quarrel.mlx_backend.linear.product import Product
from quarrel.mlx_backend.runtime.launch import evaluated

EXACT = {GGMLType.Q4_0: "affine", GGMLType.Q4_1: "affine", GGMLType.Q8_0: "affine", GGMLType.MXFP4: "mxfp4"}
"""MLX's mode for each format."""


def _words(weight: Packed) -> tuple[mx.array, int]:
    """Codes as MLX has them, `[rows, k * bits / 32]`, and their bits: neighbours in a word, the first one lowest."""
    blocks, bits = weight.rows * weight.k // 32, 4
    planes = dict(zip((p.name for p in weight.format.planes), weight.planes))
    words = planes["codes"]
    if weight.type == GGMLType.Q8_0:
        return words.view(mx.uint8)[: blocks * 32].reshape(weight.rows, -1).view(mx.uint32), 8
    if weight.type == GGMLType.MXFP4:
        codes = fours_apart(words[: blocks * 4].reshape(-1, 4))
    elif TWO_BITS in weight.format.planes:
        codes, bits = words_apart(words[: blocks * 2].reshape(-1, 2), 2, IN_ORDER), 2
        if "bits" in planes:
            third = words_apart(planes["bits"][: blocks * 2].reshape(-1, 2), 1, THIRD_BESIDE_TWOS)
            codes, bits = codes | third << 2, 3
    else:
        codes = nibbles_apart(words[: blocks * 4].reshape(-1, 4))
    eights = codes.reshape(-1, 8).astype(mx.uint32) << mx.arange(0, 8 * bits, bits).astype(mx.uint32)
    packed = mx.contiguous(eights.sum(-1, keepdims=True)).view(mx.uint8)[:, :bits]
    return mx.contiguous(packed.reshape(weight.rows, -1)).view(mx.uint32), bits


def _operands(weight: Packed, kind: mx.Dtype) -> tuple[list[mx.array], int, int, str]:
    """Words, scales and, of affine blocks, biases; the bits of a code; columns to a scale; the mode."""
    words, bits = _words(weight)
    group = weight.format.planes[-1].columns
    count, mode = weight.rows * weight.k // group, EXACT[weight.type]
    if mode == "mxfp4":
        scales = [weight.planes[-1][:count]]
    elif weight.type == GGMLType.Q4_1:
        both = weight.planes[-1][: 2 * count].reshape(-1, 2)
        scales = [both[:, 0].astype(kind), both[:, 1].astype(kind)]
    else:
        scale = weight.planes[-1][:count].astype(kind)
        scales = [scale, scale * (-128 if bits == 8 else -8)]
    arrays = [words, *(mx.contiguous(s.reshape(weight.rows, -1)) for s in scales)]
    return [evaluated(a) for a in arrays], bits, group, mode


def quantized(product: Product) -> Callable[..., list[mx.array]]:
    """`(x, residual=None) -> results`, x `[T, k]` of any float type."""
    # bfloat16 would round scales.
    kind = mx.float16 if product.act == mx.float16 else mx.float32
    weights = [_operands(m.weight, kind) for m in product.maps]

    def run(x: mx.array, residual: mx.array | None = None) -> list[mx.array]:
        if product.gain is not None:
            x = mx.fast.rms_norm(x.astype(mx.float32), product.gain.astype(mx.float32), product.eps)
        x, results = x.astype(kind), []
        for arrays, bits, group, mode in weights:
            y = mx.quantized_matmul(x, *arrays, transpose=True, group_size=group, bits=bits, mode=mode)
            results.append(y.astype(mx.float32))
        return product.finish_arrays(results, residual)

    return run
