"""Typed, range-checked reads of an architecture's keys, and the part that every transformer has in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from quarrel.errors import ModelError, UnsupportedModel
from quarrel.gguf import REQUIRED, Metadata
from quarrel.models.feedforward import Experts
from quarrel.models.mixers import Mamba2
from quarrel.models.tensors import Tensors
from quarrel.ops.moe import ExpertActivation, Gate

# The methods of Keys are called int, float, str and bool, which hides the types of those names inside the class.
_int: TypeAlias = int
_float: TypeAlias = float
_str: TypeAlias = str
_bool: TypeAlias = bool

GATES: Mapping[_int, Gate] = {1: "softmax", 2: "sigmoid", 3: "softmax_topk"}
"""What the key expert_gating_func says."""

MAX_LAYERS, MAX_WIDTH, MAX_HEADS, MAX_EXPERTS, MAX_CONTEXT = 4096, 1 << 20, 4096, 4096, 1 << 30


class Keys:
    """The keys below `<architecture>.`, without that prefix."""

    def __init__(self, metadata: Metadata, architecture: _str) -> None:
        self.metadata, self.architecture = metadata, architecture

    def int(self, name: _str, default: _int = REQUIRED, *, lo: _int = 0, hi: _int = MAX_CONTEXT) -> _int:
        return self.metadata.int(f"{self.architecture}.{name}", default, lo=lo, hi=hi)

    def float(self, name: _str, default: _float = REQUIRED, *, lo: _float = -1e30) -> _float:
        return self.metadata.float(f"{self.architecture}.{name}", default, lo=lo, hi=1e30)

    def str(self, name: _str, default: _str = REQUIRED) -> _str:
        return self.metadata.str(f"{self.architecture}.{name}", default)

    def bool(self, name: _str, default: _bool = REQUIRED) -> _bool:
        return self.metadata.bool(f"{self.architecture}.{name}", default)

    def per_layer(self, name: _str, n_layers: _int, default: _int = REQUIRED, *, lo: _int = 0) -> list[_int]:
        """One integer a layer; a single value stands for all. Blocks behind the last layer may have theirs too."""
        if name not in self and default is not REQUIRED:
            return [default] * n_layers
        count = self._listed(name, n_layers)
        return self.metadata.ints(f"{self.architecture}.{name}", lo=lo, hi=MAX_WIDTH, count=count)[:n_layers]

    def bools(self, name: _str, n_layers: _int, default: _bool = REQUIRED) -> list[_bool]:
        """One flag a layer, as `per_layer`."""
        if name not in self and default is not REQUIRED:
            return [default] * n_layers
        return self.metadata.bools(f"{self.architecture}.{name}", count=self._listed(name, n_layers))[:n_layers]

    def has_list(self, name: _str) -> _bool:
        return self.metadata.length(f"{self.architecture}.{name}") is not None

    def _listed(self, name: _str, n_layers: _int) -> _int:
        """How long a list of values for each layer must be: predicting blocks may have theirs in it or not."""
        blocks = n_layers + self.int("nextn_predict_layers", 0, hi=MAX_LAYERS)
        return blocks if self.metadata.length(f"{self.architecture}.{name}") == blocks else n_layers

    def __contains__(self, name: object) -> _bool:
        return f"{self.architecture}.{name}" in self.metadata


@dataclass(frozen=True)
class Common:
    """What all the decoders here read the same way; lists have one entry a layer."""

    n_layers: int
    n_embd: int
    n_vocab: int
    context_length: int
    norm_eps: float
    n_heads: list[int]
    n_kv: list[int]
    head_dim: int
    ffn: list[int]


def common(
    keys: Keys,
    tensors: Tensors,
    *,
    hybrid: bool = False,
    latent: bool = False,
    norm: _str = "layer_norm_rms_epsilon",
) -> Common:
    """Reads and cross-checks the shared keys. In a `hybrid`, head_count_kv and feed_forward_length may be 0 in a layer;
    `latent` values may differ in width from keys."""
    n_layers = keys.int("block_count", lo=1, hi=MAX_LAYERS) - keys.int("nextn_predict_layers", 0, hi=MAX_LAYERS)
    n_embd = keys.int("embedding_length", lo=1, hi=MAX_WIDTH)
    n_heads = keys.per_layer("attention.head_count", n_layers, lo=1)
    least = 0 if hybrid else 1
    n_kv = keys.per_layer("attention.head_count_kv", n_layers, n_heads[0], lo=least)
    for heads, kv in zip(n_heads, n_kv):
        if heads > MAX_HEADS or (kv and heads % kv):
            raise ModelError(f"head_count {heads} is no multiple of head_count_kv {kv}: the file is inconsistent")
    head_dim = keys.int("attention.key_length", n_embd // n_heads[0], lo=1, hi=4096)
    if head_dim < 2:
        raise ModelError(f"embedding_length {n_embd} is too small for {n_heads[0]} heads: the file is inconsistent")
    value_dim = keys.int("attention.value_length", head_dim, lo=1, hi=4096)
    if value_dim != head_dim and not latent:
        raise UnsupportedModel(
            f"attention.value_length {value_dim} differs from key_length {head_dim}; Quarrel wants them equal"
        )
    vocabulary = tensors.shape("token_embd.weight")
    return Common(
        n_layers=n_layers,
        n_embd=n_embd,
        n_vocab=vocabulary[0],
        context_length=keys.int("context_length", lo=1),
        norm_eps=keys.float(f"attention.{norm}", lo=0.0),
        n_heads=n_heads,
        n_kv=n_kv,
        head_dim=head_dim,
        ffn=keys.per_layer("feed_forward_length", n_layers, lo=least),
    )


def experts(
    keys: Keys,
    default_width: _int,
    activation: ExpertActivation,
    gate: Gate = "softmax",
    *,
    renormalise: _bool = True,
) -> Experts | None:
    """The expert keys, or None for a dense model. `default_width` applies where the file has no width for experts, `gate`
    and `renormalise` where it does not say."""
    n_experts = keys.int("expert_count", 0, hi=MAX_EXPERTS)
    if not n_experts:
        return None
    used = keys.int("expert_used_count", lo=1, hi=n_experts)
    groups = keys.int("expert_group_count", 1, hi=n_experts) or 1
    if n_experts % groups:
        raise ModelError(
            f"expert_count {n_experts} is no multiple of expert_group_count {groups}: the file is inconsistent"
        )
    function = keys.int("expert_gating_func", 0)
    if function not in (0, *GATES):
        known = ", ".join(f"{number} ({name})" for number, name in GATES.items())
        raise UnsupportedModel(f"{keys.architecture}.expert_gating_func is {function}; this version knows {known}")
    width = keys.int("expert_feed_forward_length", default_width, lo=1, hi=MAX_WIDTH)
    shared = keys.int("expert_shared_count", 0, hi=n_experts) * width
    return Experts(
        n_experts=n_experts,
        used=used,
        width=width,
        activation=activation,
        gate=GATES.get(function, gate),
        renormalise=keys.bool("expert_weights_norm", renormalise),
        scale=keys.float("expert_weights_scale", 1.0) or 1.0,
        shared=keys.int("expert_shared_feed_forward_length", shared, hi=MAX_WIDTH),
        n_groups=groups,
        groups_used=keys.int("expert_group_used_count", groups, hi=groups) or groups,
    )


def mamba2(keys: Keys) -> Mamba2:
    """The keys of a Mamba-2 mixer; `time_step_rank` is its number of heads."""
    d_inner = keys.int("ssm.inner_size", lo=1, hi=MAX_WIDTH)
    heads = keys.int("ssm.time_step_rank", lo=1, hi=d_inner)
    groups = keys.int("ssm.group_count", lo=1, hi=heads)
    if d_inner % heads or heads % groups:
        raise ModelError(f"ssm sizes {d_inner}, {heads} heads and {groups} groups do not divide: the file is inconsistent")
    return Mamba2(
        n_heads=heads,
        head_dim=d_inner // heads,
        n_groups=groups,
        n_state=keys.int("ssm.state_size", lo=1, hi=4096),
        conv_width=keys.int("ssm.conv_kernel", lo=2, hi=16),
    )
