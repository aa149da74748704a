"""The families of this backend; the first implementation of an op that accepts takes it."""

from __future__ import annotations

from quarrel.mlx_backend import elementwise, embedding, norm, streams
from quarrel.mlx_backend.attention import encoder, latent, paged, rope
from quarrel.mlx_backend.experts import experts, lora, router
from quarrel.mlx_backend.linear import heads, linear
from quarrel.mlx_backend.recurrent import conv, delta, mamba1, mamba2
from quarrel.mlx_backend.sampling import adjust, logprobs, sample
from quarrel.ops.registry import Registry

FAMILIES = (
    embedding, norm, elementwise, linear, heads, rope, latent, paged, encoder, router, experts, lora, conv, delta, mamba1,
    mamba2, adjust, logprobs, sample, streams,
)  # fmt: skip

REGISTRY = Registry("mlx", [i for family in FAMILIES for i in family.IMPLEMENTATIONS])
