"""The families of this backend, one file each; the first implementation of an op that accepts takes it."""

from __future__ import annotations

from quarrel.mlx_backend import (
    attention,
    elementwise,
    embedding,
    encode,
    experts,
    linear,
    logprobs,
    lora,
    norm,
    recurrent,
    rope,
    route,
    sample,
)
from quarrel.ops.registry import Registry

FAMILIES = (
    attention, elementwise, embedding, encode, experts, linear, logprobs, lora, norm, recurrent, rope, route, sample,
)  # fmt: skip

REGISTRY = Registry("mlx", [i for family in FAMILIES for i in family.IMPLEMENTATIONS])
