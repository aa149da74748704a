"""What sees, in a file of its own (mmproj): the towers of models that read images, and what maps them into the text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quarrel.convert.config import Config, read_json
from quarrel.convert.rules import PLUS_ONE, Architecture, Out, rule
from quarrel.errors import UnsupportedModel

KEPT = r"(model\.)?(visual|vision_tower|multi_modal_projector)\..*"
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


_QWEN3 = Architecture(
    "clip",
    (
        rule(
            r"visual\.patch_embed\.proj\.weight",
            Out("v.patch_embd.weight", (lambda a, c: a[:, :, 0],)),
            Out("v.patch_embd.weight.1", (lambda a, c: a[:, :, 1],)),
        ),
    ),
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
    "Gemma3ForConditionalGeneration": Architecture(
        "clip",
        (rule(r"(mm\.soft_emb_norm\.weight)", Out(r"\2", change=PLUS_ONE)),),
        _gemma3,
        blocks=_blocks,
        rename=_gemma3_names,
        drop=r"tower\.head\..*",
        kept=KEPT,
    ),
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
    more = {"projection_dim": config.integer("hidden_size"), "mm_tokens_per_image": config.get("mm_tokens_per_image")}
    return PROJECTORS[name], Config({**seen, **more}, config.path)


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
