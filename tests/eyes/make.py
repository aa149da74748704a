"""Writes the cases of this folder: small random towers of Hugging Face's, as llama.cpp's converter writes them, with a
picture and what the original makes of it. Wants torch and transformers 5.23, which no test does.

    python -m tests.eyes.make FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Named = Iterable[tuple[str, np.ndarray]]
COMMON = {"ln1": "attention_norm", "ln2": "ffn_norm"}
MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


def write(folder: Path, kind: str, keys: dict[str, Any], tensors: Named, pixels: np.ndarray, rows: np.ndarray) -> None:
    """mmproj.gguf, image.npy `[H, W, 3]` and rows.npy `[tokens, n_out]`."""
    (folder / kind).mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(folder / kind / "mmproj.gguf", "clip")
    writer.add_string("general.type", "mmproj")
    writer.add_bool("clip.has_vision_encoder", True)
    for key, value in keys.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_array(key, value)
    for name, array in tensors:
        kind_of = np.float16 if array.ndim > 1 and "position" not in name else np.float32
        writer.add_tensor(name, np.ascontiguousarray(array, kind_of))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    np.save(folder / kind / "image.npy", pixels)
    np.save(folder / kind / "rows.npy", rows.astype(np.float32))


def randomized(model: Any, seed: int) -> dict[str, np.ndarray]:
    """Every parameter and buffer drawn again, gains about 1; all by name."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn(p.shape, generator=draw) * (0.2 if p.ndim == 1 else 0.6 / p.shape[-1] ** 0.5))
            if p.ndim == 1 and "norm" in name and name.endswith("weight"):
                p.add_(1.0)
            p.copy_(p.half())  # as the file holds them
    return {name: p.detach().numpy() for name, p in model.state_dict().items()}


def picture(seed: int, width: int, height: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def normal(pixels: np.ndarray, mean: Any = MEAN, std: Any = STD) -> Any:
    import torch

    return torch.tensor(((pixels / 255 - np.array(mean)) / np.array(std)).transpose(2, 0, 1)[None].astype(np.float32))


def permuted(w: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a head's halves in turn, as rotated pairs lie in llama.cpp."""
    return w.reshape(heads, 2, -1, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def vision(n: int, width: int, blocks: int, heads: int, patch: int, side: int, eps: float, out: int) -> dict[str, Any]:
    sizes = {"embedding_length": n, "feed_forward_length": width, "block_count": blocks, "attention.head_count": heads}
    sizes |= {"patch_size": patch, "image_size": side, "projection_dim": out}
    keys: dict[str, Any] = {f"clip.vision.{key}": value for key, value in sizes.items()}
    keys["clip.vision.attention.layer_norm_epsilon"] = eps
    return keys | {"clip.vision.image_mean": MEAN, "clip.vision.image_std": STD}


def mistral3(folder: Path, kind: str, merge: int) -> None:
    """pixtral without merging, and Mistral Small 3.1 with it."""
    import torch
    from transformers import MistralConfig, PixtralVisionConfig
    from transformers.models.mistral3.configuration_mistral3 import Mistral3Config
    from transformers.models.mistral3.modeling_mistral3 import Mistral3MultiModalProjector
    from transformers.models.pixtral.modeling_pixtral import PixtralVisionModel

    n, width, heads, patch, out = (64, 96, 2, 8, 80) if merge == 1 else (48, 96, 2, 8, 192)
    config = PixtralVisionConfig(hidden_size=n, intermediate_size=width, num_hidden_layers=2, num_attention_heads=heads,
        image_size=128, patch_size=patch, hidden_act="silu", attn_implementation="eager")  # fmt: skip
    tower = PixtralVisionModel(config).eval()
    w = randomized(tower, 1)
    text = MistralConfig(hidden_size=out, rms_norm_eps=1e-5, num_attention_heads=2, num_hidden_layers=1)
    whole = Mistral3Config(vision_config=config, text_config=text, spatial_merge_size=merge, vision_feature_layer=-1)
    projector = Mistral3MultiModalProjector(whole).eval()
    p = randomized(projector, 2)
    pixels = picture(3, patch * merge * 4, patch * merge * 3)
    h, columns = pixels.shape[0], pixels.shape[1] // patch // merge
    with torch.no_grad():
        states = tower(normal(pixels)).last_hidden_state[0]
        if merge > 1:
            rows = projector(states, torch.tensor([[h, pixels.shape[1]]]))
        else:
            rows = projector.linear_2(projector.act(projector.linear_1(states)))
    broken = np.random.default_rng(4).standard_normal(out).astype(np.float32)
    grid = rows.numpy().reshape(-1, columns, out)
    grid = np.concatenate([grid, np.broadcast_to(broken, (len(grid), 1, out))], 1)
    keys = {**vision(n, width, 2, heads, patch, 128, 1e-5, out), "clip.projector_type": "pixtral", "clip.use_silu": True}
    if merge > 1:
        keys["clip.vision.spatial_merge_size"] = merge

    def tensors() -> Named:
        yield "v.patch_embd.weight", w["patch_conv.weight"]
        yield "v.pre_ln.weight", w["ln_pre.weight"]
        for i in range(2):
            at = f"transformer.layers.{i}."
            for ours, theirs in COMMON.items():
                yield f"v.blk.{i}.{ours}.weight", w[f"{at}{theirs}.weight"]
            for name in ("q", "k", "v", "o"):
                each = w[f"{at}attention.{name}_proj.weight"]
                yield (
                    f"v.blk.{i}.attn_{'out' if name == 'o' else name}.weight",
                    permuted(each, heads) if name in "qk" else each,
                )
            for name in ("gate", "up", "down"):
                yield f"v.blk.{i}.ffn_{name}.weight", w[f"{at}feed_forward.{name}_proj.weight"]
        if merge > 1:
            yield "mm.input_norm.weight", p["norm.weight"]
            yield "mm.patch_merger.weight", p["patch_merger.merging_layer.weight"]
        for i in (1, 2):
            yield f"mm.{i}.weight", p[f"linear_{i}.weight"]
            if f"linear_{i}.bias" in p:
                yield f"mm.{i}.bias", p[f"linear_{i}.bias"]
        yield "v.token_embd.img_break", broken

    write(folder, kind, keys, tensors(), pixels, grid.reshape(-1, out)[:-1])


def llava(folder: Path) -> None:
    """CLIP with a class token, of which the last layer but one is read."""
    import torch
    from transformers import CLIPVisionConfig
    from transformers.models.clip.modeling_clip import CLIPVisionModel

    n, width, heads, patch, out, side = 64, 96, 4, 8, 80, 40
    config = CLIPVisionConfig(hidden_size=n, intermediate_size=width, num_hidden_layers=3, num_attention_heads=heads,
        image_size=side, patch_size=patch, hidden_act="quick_gelu", attn_implementation="eager")  # fmt: skip
    tower = CLIPVisionModel(config).eval()
    w = {name.removeprefix("vision_model."): a for name, a in randomized(tower, 5).items()}
    first, second = (torch.nn.Linear(a, out) for a in (n, out))
    p = randomized(torch.nn.ModuleDict({"0": first, "2": second}), 6)
    pixels = picture(7, side, side)
    with torch.no_grad():
        states = tower(normal(pixels), output_hidden_states=True).hidden_states[-2][0, 1:]
        rows = second(torch.nn.functional.gelu(first(states)))
    names = {"ln1": "layer_norm1", "ln2": "layer_norm2", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
    names |= {f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"} | {"attn_out": "self_attn.out_proj"}
    pre = next(name for name in w if "pre" in name and name.endswith(".weight")).removesuffix(".weight")

    def tensors() -> Named:
        yield "v.class_embd", w["embeddings.class_embedding"]
        yield "v.patch_embd.weight", w["embeddings.patch_embedding.weight"]
        yield "v.position_embd.weight", w["embeddings.position_embedding.weight"]
        for end in ("weight", "bias"):
            yield f"v.pre_ln.{end}", w[f"{pre}.{end}"]
            # All layers are in the file; block_count is the number of those that count.
            for i in range(3):
                for ours, theirs in names.items():
                    yield f"v.blk.{i}.{ours}.{end}", w[f"encoder.layers.{i}.{theirs}.{end}"]
            for i in (0, 2):
                yield f"mm.{i}.{end}", p[f"{i}.{end}"]

    keys = {**vision(n, width, 2, heads, patch, side, 1e-5, out), "clip.projector_type": "mlp", "clip.use_gelu": False}
    write(folder, "llava", keys, tensors(), pixels, rows.numpy())


def gemma4(folder: Path) -> None:
    """With and without the scale and bias behind the pooling would be one case too many: with."""
    import torch
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig, Gemma4VisionConfig
    from transformers.models.gemma4.modeling_gemma4 import Gemma4MultimodalEmbedder, Gemma4VisionModel

    n, width, heads, patch, out, dim = 64, 96, 2, 8, 192, 32
    config = Gemma4VisionConfig(hidden_size=n, intermediate_size=width, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=heads, head_dim=dim, patch_size=patch, position_embedding_size=24, standardize=True,
        attn_implementation="eager")  # fmt: skip
    tower = Gemma4VisionModel(config).eval()
    randomized(tower, 8)
    with torch.no_grad():
        tower.std_bias.copy_(torch.randn(n, generator=torch.Generator().manual_seed(9)))
        tower.std_scale.copy_(1 + 0.2 * torch.randn(n, generator=torch.Generator().manual_seed(10)))
    w = {name: p.detach().numpy() for name, p in tower.state_dict().items()}
    embedder = Gemma4MultimodalEmbedder(config, Gemma4TextConfig(hidden_size=out)).eval()
    p = randomized(embedder, 11)
    pixels = picture(12, patch * 3 * 4, patch * 3 * 2)
    rows, columns = (side // patch for side in pixels.shape[:2])
    patches = (pixels / 255).astype(np.float32).reshape(rows, patch, columns, patch, 3).swapaxes(1, 2)
    at = np.stack(np.meshgrid(np.arange(columns), np.arange(rows)), -1).reshape(1, -1, 2)
    with torch.no_grad():
        states = tower(torch.tensor(patches.reshape(1, rows * columns, -1)), torch.tensor(at)).last_hidden_state
        made = embedder(states)
    names = {"ln1": "input_layernorm", "attn_post_norm": "post_attention_layernorm", "ln2": "pre_feedforward_layernorm"}
    names |= {"ffn_post_norm": "post_feedforward_layernorm", "attn_out": "self_attn.o_proj.linear"}
    names |= {f"attn_{x}": f"self_attn.{x}_proj.linear" for x in "qkv"} | {
        f"attn_{x}_norm": f"self_attn.{x}_norm" for x in "qk"
    }
    names |= {f"ffn_{x}": f"mlp.{x}_proj.linear" for x in ("gate", "up", "down")}

    def tensors() -> Named:
        conv = w["patch_embedder.input_proj.weight"].reshape(n, patch, patch, 3).transpose(0, 3, 1, 2)
        yield "v.patch_embd.weight", conv
        yield "v.position_embd.weight", w["patch_embedder.position_embedding_table"]
        for i in range(2):
            for ours, theirs in names.items():
                yield f"v.blk.{i}.{ours}.weight", w[f"encoder.layers.{i}.{theirs}.weight"]
        yield "v.std_bias", w["std_bias"]
        yield "v.std_scale", w["std_scale"]
        yield "mm.input_projection.weight", p["embedding_projection.weight"]

    keys = vision(n, width, 2, heads, patch, 224, 1e-6, out)
    keys |= {"clip.vision.projector_type": "gemma4v", "clip.use_gelu": True, "clip.vision.attention.head_dim": dim}
    keys |= {"clip.vision.image_mean": [0.0] * 3, "clip.vision.image_std": [1.0] * 3}
    write(folder, "gemma4", keys, tensors(), pixels, made.numpy().reshape(-1, out))


def qwen25(folder: Path) -> None:
    """Windows of 4 x 4 groups in the first layer, all patches in the second."""
    import torch
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    n, width, heads, patch, out = 32, 48, 2, 14, 80
    config = Qwen2_5_VLVisionConfig(depth=2, hidden_size=n, intermediate_size=width, num_heads=heads, patch_size=patch,
        out_hidden_size=out, window_size=112, fullatt_block_indexes=[1], attn_implementation="eager")  # fmt: skip
    tower = Qwen2_5_VisionTransformerPretrainedModel(config).eval()
    w = randomized(tower, 13)
    pixels = picture(14, 28 * 5, 28 * 6)
    rows, columns = (side // patch for side in pixels.shape[:2])
    values = normal(pixels).numpy()[0].reshape(3, rows // 2, 2, patch, columns // 2, 2, patch)
    values = values.transpose(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns, 3, 1, patch, patch).repeat(2, 2)
    with torch.no_grad():
        made = tower(torch.tensor(values.reshape(rows * columns, -1)), torch.tensor([[1, rows, columns]]))
        made = getattr(made, "pooler_output", made)
    names = {"ln1": "norm1", "ln2": "norm2", "attn_out": "attn.proj"}
    names |= {f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}

    def tensors() -> Named:
        for i, name in enumerate(("v.patch_embd.weight", "v.patch_embd.weight.1")):
            yield name, w["patch_embed.proj.weight"][:, :, i]
        for i in range(2):
            for ours, theirs in names.items():
                for end in ("weight", "bias"):
                    if f"blocks.{i}.{theirs}.{end}" in w:
                        yield f"v.blk.{i}.{ours}.{end}", w[f"blocks.{i}.{theirs}.{end}"]
            for end in ("weight", "bias"):
                for x, part in zip("qkv", np.split(w[f"blocks.{i}.attn.qkv.{end}"], 3), strict=True):
                    yield f"v.blk.{i}.attn_{x}.{end}", part
        yield "v.post_ln.weight", w["merger.ln_q.weight"]
        for i in (0, 2):
            for end in ("weight", "bias"):
                yield f"mm.{i}.{end}", w[f"merger.mlp.{i}.{end}"]

    keys = {**vision(n, width, 2, heads, patch, 560, 1e-6, out), "clip.projector_type": "qwen2.5vl_merger"}
    keys |= {"clip.use_silu": True, "clip.vision.n_wa_pattern": 2}
    write(folder, "qwen25vl", keys, tensors(), pixels, made.numpy())


def main() -> None:
    folder = Path(sys.argv[1])
    mistral3(folder, "pixtral", 1)
    mistral3(folder, "mistral3", 2)
    llava(folder)
    gemma4(folder)
    qwen25(folder)


if __name__ == "__main__":
    main()
