"""What sees, in a file of its own (mmproj): the towers of models that read images, and what maps them into the text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quarrel.convert.config import Config, read_json
from quarrel.convert.layout import View, interleaved
from quarrel.convert.rules import PLUS_ONE, Architecture, Out, rule
from quarrel.errors import UnsupportedModel

KEPT = r"(model\.)?(visual|vision_tower|multi_modal_projector|embed_vision)\..*"
BREAK = "[IMG_BREAK]"
"""What ends a row of an image's tokens in Pixtral: its embedding lies with what sees."""
WINDOW = 112
"""Pixels of a window's side in Qwen2.5-VL, which readers take where the file does not say."""
_SIZES = ("patch_size", "hidden_size", "intermediate_size")
_PREPROCESSORS = ("preprocessor_config.json", "processor_config.json")


def _blocks(c: Config) -> int:
    return c.integer("depth", "num_hidden_layers")


def _common(c: Config) -> dict[str, Any]:
    patch, width, wide = (c.integer(name) for name in _SIZES)
    return {
        "vision.projection_dim": c.integer("projection_dim"),
        "vision.patch_size": patch,
        "vision.embedding_length": width,
        "vision.feed_forward_length": wide,
        "vision.block_count": _blocks(c),
        "vision.attention.head_count": c.integer("num_heads", "num_attention_heads"),
        "vision.attention.layer_norm_epsilon": c.real("layer_norm_eps", default=1e-6),
    }


def _gelu(c: Config) -> dict[str, Any]:
    kind = c.get("hidden_act", default="gelu_pytorch_tanh")
    if kind not in ("gelu", "gelu_pytorch_tanh"):
        raise UnsupportedModel(f"the activation of what sees is {str(kind)[:40]!r}, wanted gelu")
    return {"use_gelu": True}


def _deepstack(c: Config) -> list[int]:
    layers = c.get("deepstack_visual_indexes", default=[])
    if not isinstance(layers, list) or not all(type(i) is int and 0 <= i < _blocks(c) for i in layers):
        raise c.refusal("deepstack_visual_indexes", layers, "numbers of layers")
    return layers


def _qwen3(c: Config) -> dict[str, Any]:
    seen = _deepstack(c)
    return {
        **_common(c),
        **_gelu(c),
        "projector_type": "qwen3vl_merger",
        "vision.image_size": math.isqrt(c.integer("num_position_embeddings")) * c.integer("patch_size"),
        "vision.spatial_merge_size": c.integer("spatial_merge_size", default=2),
        "vision.is_deepstack_layers": [i in seen for i in range(_blocks(c))],
    }


def _qwen3_names(c: Config) -> tuple[tuple[str, str], ...]:
    block = {"norm1": "ln1", "norm2": "ln2", "attn.qkv": "attn_qkv", "attn.proj": "attn_out"}
    block |= {"mlp.linear_fc1": "ffn_up", "mlp.linear_fc2": "ffn_down"}
    merger = {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}
    parts = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}
    return (
        (r"^(model\.)?visual\.", "visual."),
        *((rf"^visual\.blocks\.(\d+)\.{old}\.", rf"v.blk.\1.{new}.") for old, new in block.items()),
        *((rf"^visual\.merger\.{old}\.", f"{new}.") for old, new in merger.items()),
        *(
            (rf"^visual\.deepstack_merger_list\.{n}\.{old}\.", f"v.deepstack.{i}.{new}.")
            for n, i in enumerate(_deepstack(c))
            for old, new in parts.items()
        ),
        (r"^visual\.pos_embed\.", "v.position_embd."),
        (r"^visual\.patch_embed\.proj\.bias", "v.patch_embd.bias"),
    )


def _gemma3(c: Config) -> dict[str, Any]:
    image, patch = c.integer("image_size"), c.integer("patch_size")
    keys = {**_common(c), **_gelu(c), "projector_type": "gemma3", "vision.image_size": image}
    side = math.isqrt(c.integer("mm_tokens_per_image", default=256))
    scale = image // patch // max(1, side)
    return keys | ({"vision.projector.scale_factor": scale} if scale not in (0, 4) else {})


def _gemma3_names(c: Config) -> tuple[tuple[str, str], ...]:
    block = {"layer_norm1": "ln1", "layer_norm2": "ln2", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"}
    block |= {f"self_attn.{n}_proj": f"attn_{n}" for n in "qkv"} | {"self_attn.out_proj": "attn_out"}
    return (
        (r"^(model\.)?vision_tower\.(vision_model\.)?", "tower."),
        *((rf"^tower\.encoder\.layers\.(\d+)\.{old}\.", rf"v.blk.\1.{new}.") for old, new in block.items()),
        (r"^tower\.embeddings\.patch_embedding\.", "v.patch_embd."),
        (r"^tower\.embeddings\.position_embedding\.", "v.position_embd."),
        (r"^tower\.post_layernorm\.", "v.post_ln."),
        (r"^(model\.)?multi_modal_projector\.mm_input_projection_weight$", "mm.input_projection.weight"),
        (r"^(model\.)?multi_modal_projector\.mm_soft_emb_norm\.", "mm.soft_emb_norm."),
    )


def _pixtral(c: Config) -> dict[str, Any]:
    kind = c.get("hidden_act", default="silu")
    if kind not in ("silu", "gelu"):
        raise UnsupportedModel(f"the activation of what sees is {str(kind)[:40]!r}, wanted silu or gelu")
    merge = c.get("spatial_merge_size")
    return {
        **_common(c),
        "projector_type": "pixtral",
        f"use_{kind}": True,
        "vision.image_size": c.integer("image_size"),
        **({} if merge is None else {"vision.spatial_merge_size": c.integer("spatial_merge_size")}),
    }


def _pixtral_names(c: Config) -> tuple[tuple[str, str], ...]:
    block = {"attention_norm": "ln1", "ffn_norm": "ln2", "attention.o_proj": "attn_out"}
    block |= {f"attention.{n}_proj": f"attn_{n}" for n in "qkv"}
    block |= {f"feed_forward.{n}_proj": f"ffn_{n}" for n in ("gate", "up", "down")}
    joined = {
        "norm": "mm.input_norm",
        "patch_merger.merging_layer": "mm.patch_merger",
        "linear_1": "mm.1",
        "linear_2": "mm.2",
    }
    return (
        (r"^(model\.)?vision_tower\.", "tower."),
        *((rf"^tower\.transformer\.layers\.(\d+)\.{old}\.", rf"v.blk.\1.{new}.") for old, new in block.items()),
        (r"^tower\.patch_conv\.", "v.patch_embd."),
        (r"^tower\.ln_pre\.", "v.pre_ln."),
        *((rf"^(model\.)?multi_modal_projector\.{old}\.", f"{new}.") for old, new in joined.items()),
    )


def _qwen25(c: Config) -> dict[str, Any]:
    if (kind := c.get("hidden_act", default="silu")) != "silu":
        raise UnsupportedModel(f"the activation of what sees is {str(kind)[:40]!r}, wanted silu")
    whole = c.get("fullatt_block_indexes")
    every = whole[0] + 1 if isinstance(whole, list) and whole and type(whole[0]) is int and whole[0] >= 0 else 0
    if every < 1 or whole != list(range(every - 1, every * len(whole), every)):
        raise c.refusal("fullatt_block_indexes", whole, "every n-th layer")
    window = c.integer("window_size", default=WINDOW)
    return {
        **_common(c),
        "projector_type": "qwen2.5vl_merger",
        "use_silu": True,
        "vision.image_size": 560,
        "vision.spatial_merge_size": c.integer("spatial_merge_size", default=2),
        "vision.n_wa_pattern": every,
        **({} if window == WINDOW else {"vision.window_size": window}),
    }


def _qwen25_names(c: Config) -> tuple[tuple[str, str], ...]:
    block = {"norm1": "ln1", "norm2": "ln2", "attn.qkv": "attn_qkv", "attn.proj": "attn_out"}
    block |= {f"mlp.{n}_proj": f"ffn_{n}" for n in ("gate", "up", "down")}
    merger = {"ln_q": "v.post_ln", r"mlp\.0": "mm.0", r"mlp\.2": "mm.2"}
    return (
        (r"^(model\.)?visual\.", "visual."),
        *((rf"^visual\.blocks\.(\d+)\.{old}\.", rf"v.blk.\1.{new}.") for old, new in block.items()),
        *((rf"^visual\.merger\.{old}\.", f"{new}.") for old, new in merger.items()),
    )


def _clip(c: Config) -> dict[str, Any]:
    kind, strategy = c.get("hidden_act", default="quick_gelu"), c.get("vision_feature_select_strategy", default="default")
    if kind not in ("quick_gelu", "gelu"):
        raise UnsupportedModel(f"the activation of what sees is {str(kind)[:40]!r}, wanted quick_gelu or gelu")
    if strategy != "default":
        raise UnsupportedModel(
            f"the class token is {str(strategy)[:40]!r} to the text, wanted 'default', which leaves it out"
        )
    return {
        **_common(c),
        "projector_type": "mlp",
        "use_gelu": kind == "gelu",
        "vision.image_size": c.integer("image_size"),
        "vision.block_count": _read_blocks(c),
        # Without it llama.cpp leaves the last layer out.
        "vision.feature_layer": [_read_blocks(c)],
    }


def _read_blocks(c: Config) -> int:
    """Layers up to the one that is read."""
    at, blocks = c.integer("vision_feature_layer", default=-2), _blocks(c)
    count = at if at >= 0 else blocks + 1 + at
    if not 0 < count <= blocks:
        raise c.refusal("vision_feature_layer", at, f"one of the {blocks} layers")
    return count


def _clip_names(c: Config) -> tuple[tuple[str, str], ...]:
    block = {"layer_norm1": "ln1", "layer_norm2": "ln2", r"mlp\.fc1": "ffn_up", r"mlp\.fc2": "ffn_down"}
    block |= {rf"self_attn\.{n}_proj": f"attn_{n}" for n in "qkv"} | {r"self_attn\.out_proj": "attn_out"}
    behind = "|".join(str(i) for i in range(_read_blocks(c), _blocks(c)))
    return (
        (r"^(model\.)?vision_tower\.(vision_model\.)?", "tower."),
        *(((rf"^tower\.encoder\.layers\.({behind})\.", "tower.behind."),) if behind else ()),
        *((rf"^tower\.encoder\.layers\.(\d+)\.{old}\.", rf"v.blk.\1.{new}.") for old, new in block.items()),
        (r"^tower\.embeddings\.class_embedding$", "v.class_embd"),
        (r"^tower\.embeddings\.patch_embedding\.", "v.patch_embd."),
        (r"^tower\.embeddings\.position_embedding\.", "v.position_embd."),
        (r"^tower\.pre_layrnorm\.", "v.pre_ln."),  # spelt so
        *((rf"^(model\.)?multi_modal_projector\.linear_{i}\.", f"mm.{to}.") for i, to in ((1, 0), (2, 2))),
    )


def _gemma4(c: Config) -> dict[str, Any]:
    kind, dim = c.get("hidden_activation", default="gelu_pytorch_tanh"), c.get("head_dim")
    if kind != "gelu_pytorch_tanh":
        raise UnsupportedModel(f"the activation of what sees is {str(kind)[:40]!r}, wanted gelu_pytorch_tanh")
    if dim is not None and dim * c.heads != c.integer("hidden_size"):
        raise c.refusal("head_dim", dim, "hidden_size divided by the heads")
    keys, pool = _common(c), c.integer("pooling_kernel_size", default=3)
    return {
        **keys,
        "vision.attention.layer_norm_epsilon": c.real("rms_norm_eps", default=1e-6),
        "vision.projector_type": "gemma4v",
        "use_gelu": True,
        "vision.image_size": 224,
        **({} if pool == 3 else {"vision.projector.scale_factor": pool}),
    }


def _gemma4_names(c: Config) -> tuple[tuple[str, str], ...]:
    block = {"input_layernorm": "ln1", "post_attention_layernorm": "attn_post_norm", "pre_feedforward_layernorm": "ln2"}
    block |= {"post_feedforward_layernorm": "ffn_post_norm", r"self_attn\.o_proj": "attn_out"}
    block |= {rf"self_attn\.{n}_proj": f"attn_{n}" for n in "qkv"} | {
        rf"self_attn\.{n}_norm": f"attn_{n}_norm" for n in "qk"
    }
    block |= {rf"mlp\.{n}_proj": f"ffn_{n}" for n in ("gate", "up", "down")}
    return (
        (r"^(model\.)?vision_tower\.", "tower."),
        (r"\.linear\.weight$", ".weight"),
        *((rf"^tower\.encoder\.layers\.(\d+)\.{old}\.", rf"v.blk.\1.{new}.") for old, new in block.items()),
        (r"^tower\.patch_embedder\.position_embedding_table$", "v.position_embd.weight"),
        (r"^tower\.std_", "v.std_"),
        (r"^(model\.)?embed_vision\.embedding_projection\.", "mm.input_projection."),
    )


def _channels_first(a: np.ndarray, c: Config) -> np.ndarray:
    """A patch's values, whose channels lie side by side, one channel after the other."""
    patch = c.integer("patch_size")
    return a.reshape(len(a), patch, patch, 3).transpose(0, 3, 1, 2)


def _third(i: int) -> View:
    return lambda a, c: a.reshape(3, -1, *a.shape[1:])[i]


def _break(a: np.ndarray, c: Config) -> np.ndarray:
    """The row of the token that ends a row."""
    listed = read_json(c.path.with_name("tokenizer.json")).get("added_tokens")
    tokens = [t for t in listed if isinstance(t, dict)] if isinstance(listed, list) else []
    found = next((t.get("id") for t in tokens if t.get("content") == BREAK), None)
    if type(found) is not int or not 0 <= found < len(a):
        raise UnsupportedModel(f"the tokenizer beside {c.path} has no token {BREAK}: download the model whole")
    row: np.ndarray = a[found]
    return row


_PIXTRAL = Architecture(
    "clip",
    (
        rule(r"(attn_[qk]\.weight)", Out(r"\2", (interleaved(lambda c: c.heads),), like=True)),
        rule(r"(?:.*\.)?embed_tokens\.weight", Out("v.token_embd.img_break", (_break,))),
    ),
    _pixtral,
    defaults={"layer_norm_eps": 1e-5},
    blocks=_blocks,
    rename=_pixtral_names,
    kept=rf"{KEPT}|(.*\.)?embed_tokens\.weight",
)

_TWO_FRAMES = rule(
    r"visual\.patch_embed\.proj\.weight",
    Out("v.patch_embd.weight", (lambda a, c: a[:, :, 0],)),
    Out("v.patch_embd.weight.1", (lambda a, c: a[:, :, 1],)),
)
_QWEN25 = Architecture(
    "clip",
    (_TWO_FRAMES, rule(r"attn_qkv\.(weight|bias)", *(Out(rf"attn_{n}.\2", (_third(i),)) for i, n in enumerate("qkv")))),
    _qwen25,
    blocks=_blocks,
    rename=_qwen25_names,
    kept=KEPT,
)
_CLIP = Architecture(
    "clip",
    (),
    _clip,
    defaults={"layer_norm_eps": 1e-5},
    blocks=_read_blocks,
    rename=_clip_names,
    drop=r"tower\.(post_layernorm|behind)\..*",
    kept=KEPT,
)
_GEMMA4 = Architecture(
    "clip",
    (
        rule(r"tower\.patch_embedder\.input_proj\.weight", Out("v.patch_embd.weight", (_channels_first,))),
        rule(r"((?:in|out)put_(?:min|max))", Out(r"\2", (lambda a, c: a.reshape(1),))),
    ),
    _gemma4,
    blocks=_blocks,
    rename=_gemma4_names,
    kept=KEPT,
)
_QWEN3 = Architecture(
    "clip",
    (_TWO_FRAMES,),
    _qwen3,
    blocks=_blocks,
    rename=_qwen3_names,
    kept=KEPT,
)

PROJECTORS: Mapping[str, Architecture] = {
    **dict.fromkeys(
        (
            "Qwen3VLForConditionalGeneration",
            "Qwen3VLMoeForConditionalGeneration",
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForConditionalGeneration",
        ),
        _QWEN3,
    ),
    "Qwen2_5_VLForConditionalGeneration": _QWEN25,
    "Gemma4ForConditionalGeneration": _GEMMA4,
    "Gemma3ForConditionalGeneration": Architecture(
        "clip",
        (rule(r"(mm\.soft_emb_norm\.weight)", Out(r"\2", change=PLUS_ONE)),),
        _gemma3,
        blocks=_blocks,
        rename=_gemma3_names,
        drop=r"tower\.head\..*",
        kept=KEPT,
    ),
    **dict.fromkeys(("LlavaForConditionalGeneration", "Mistral3ForConditionalGeneration"), _PIXTRAL),
}
"""By `architectures` of config.json."""


def projector(config: Config) -> tuple[Architecture, Config]:
    """The tower of a folder's model and what config.json says of it; raises UnsupportedModel where there is none."""
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    seen = config.get("vision_config")
    if not isinstance(name, str) or name not in PROJECTORS or not isinstance(seen, dict):
        said = f"{config.path} tells of {str(name)[:80]!r}, of which this version converts nothing that sees"
        raise UnsupportedModel(f"{said}; it knows {', '.join(sorted(PROJECTORS))}")
    found = PROJECTORS[name]
    if found is _PIXTRAL and (kind := str(seen.get("model_type"))[:40]) != "pixtral":
        if kind != "clip_vision_model" or name != "LlavaForConditionalGeneration":
            raise UnsupportedModel(f"what sees in {config.path} is a {kind!r}, of which this version converts pixtral only")
        found = _CLIP
    more = {"projection_dim": config.integer("hidden_size"), "mm_tokens_per_image": config.get("mm_tokens_per_image")}
    for named in ("spatial_merge_size", "vision_feature_layer", "vision_feature_select_strategy"):
        if (value := config.get(named)) is not None:
            more[named] = value
    return found, Config({**seen, **more}, config.path)


def sees(folder: Path) -> bool:
    """Whether config.json tells of a model whose tower this version converts."""
    path = folder / "config.json"
    try:
        projector(Config(read_json(path), path))
    except UnsupportedModel:
        return False
    return True


def projector_keys(folder: Path, arch: Architecture, c: Config) -> dict[str, Any]:
    """All keys of the file; colours are moved by what the folder's preprocessor says."""
    said: dict[str, Any] = {}
    for name in _PREPROCESSORS:
        if (folder / name).is_file():
            found = read_json(folder / name)
            inner = found.get("image_processor")
            said = {**found, **(inner if isinstance(inner, dict) else {}), **said}
    colours = Config(said, folder / _PREPROCESSORS[0])
    means = {n: colours.reals(n, 3) if colours.get(n) is not None else [0.5] * 3 for n in ("image_mean", "image_std")}
    return {
        "general.architecture": arch.name,
        "general.type": "mmproj",
        "general.name": folder.resolve().name,
        "general.quantization_version": 2,
        "clip.has_vision_encoder": True,
        **{f"clip.{key}": value for key, value in arch.keys(c).items()},
        **{f"clip.vision.{key}": value for key, value in means.items()},
    }
