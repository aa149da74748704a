"""mamba (FalconMamba among them) and mamba2: nothing but state-space mixers, no attention and no feed-forward."""

from __future__ import annotations

from quarrel.models.keys import MAX_LAYERS, MAX_WIDTH, Keys, mamba2
from quarrel.models.mixers import Mamba1
from quarrel.models.spec import Layer, ModelSpec
from quarrel.models.tensors import Tensors


def spec(keys: Keys, tensors: Tensors, n_ctx: int) -> ModelSpec:
    n_embd = keys.int("embedding_length", lo=1, hi=MAX_WIDTH)
    return ModelSpec(
        keys.architecture,
        tensors.shape("token_embd.weight")[0],
        n_embd,
        keys.int("context_length", lo=1),
        "rms",
        keys.float("attention.layer_norm_rms_epsilon", lo=0.0),
        (Layer(mamba2(keys) if keys.architecture == "mamba2" else _mamba1(keys), None),)
        * keys.int("block_count", lo=1, hi=MAX_LAYERS),
    )


def _mamba1(keys: Keys) -> Mamba1:
    return Mamba1(
        d_inner=keys.int("ssm.inner_size", lo=1, hi=MAX_WIDTH),
        n_state=keys.int("ssm.state_size", lo=1, hi=4096),
        dt_rank=keys.int("ssm.time_step_rank", lo=1, hi=MAX_WIDTH),
        conv_width=keys.int("ssm.conv_kernel", lo=2, hi=16),
        normed=keys.bool("ssm.dt_b_c_rms", False),
    )
