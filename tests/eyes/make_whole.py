"""Writes the folders of `whole`: tiny random models that see, as Hugging Face's transformers saves them, with a picture, a
prompt around it, and the original's logits. Wants torch and transformers 5.23, which no test does.

    python -m tests.eyes.make_whole FOLDER

A folder holds config.json, model.safetensors (float16), a byte-level tokenizer.json, image.npy `[H, W, 3]`, ids.npy `[T]`
with -1 for each of the image's tokens (and those that end its rows), and logits.npy `[T, V]`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.convert.folders import write_tokenizer
from tests.eyes.make import MEAN, STD, normal, picture, randomized

ROWS = 288
SPECIAL = {
    "pixtral": ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    "mistral3": ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    "llava": ("<image>",),
    "qwen25vl": ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
    "qwen3vlmoe": ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
    "gemma4": ("<|image>", "<|image|>", "<image|>"),
    "gemma4_e": ("<|image>", "<|image|>", "<image|>"),
}
"""Each has the id ROWS - 9 and on."""
FIRST = ROWS - 9
BEFORE, AFTER = (40, 41, 42, 43, 44), (50, 51, 52, 53, 54, 55)
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": ROWS,
    "max_position_embeddings": 512,
}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
EAGER = {"attn_implementation": "eager"}


def _image(kind: str, rows: int, columns: int) -> list[int]:
    """An image's tokens with what stands around them: ids, and -1 for a row of its own."""
    start, *rest = (FIRST + i for i in range(3))
    if kind in ("pixtral", "mistral3"):
        line = [*[-1] * columns, rest[0]]
        return [*(line * rows)[:-1], rest[1]]
    if kind == "llava":
        return [-1] * (rows * columns)
    return [start, *[-1] * (rows * columns), rest[1]]


def _written(folder: Path, kind: str, model: Any, pixels: np.ndarray, grid: tuple[int, int], inputs: Any, pad: int) -> None:
    import torch

    ids = np.array([*BEFORE, *_image(kind, *grid), *AFTER], np.int32)
    given = torch.tensor(np.where(ids < 0, pad, ids))[None].long()
    with torch.no_grad():
        logits = model(input_ids=given, attention_mask=torch.ones_like(given), **inputs(given)).logits[0]
    target = folder / kind
    target.mkdir(parents=True, exist_ok=True)
    model.half().save_pretrained(target)
    write_tokenizer(target, ROWS)
    _named(target / "tokenizer.json", SPECIAL[kind])
    (target / "generation_config.json").unlink(missing_ok=True)
    (target / "preprocessor_config.json").write_text(json.dumps({"image_mean": MEAN, "image_std": STD}))
    (target / "model.safetensors").chmod(0o644)
    if kind in ("pixtral", "mistral3"):  # rows end with a token that our towers give a row: it counts as the image's
        last = int(np.flatnonzero(ids == -1)[-1])
        ids[: last + 1][ids[: last + 1] == FIRST + 1] = -1
    np.save(target / "image.npy", pixels)
    np.save(target / "ids.npy", ids)
    np.save(target / "logits.npy", logits.numpy())


def _named(path: Path, special: tuple[str, ...]) -> None:
    """Ids from FIRST on are these."""
    made = json.loads(path.read_text())
    old = {id: text for text, id in made["model"]["vocab"].items()}
    for i, text in enumerate(special):
        del made["model"]["vocab"][old[FIRST + i]]
        made["model"]["vocab"][text] = FIRST + i
        made["added_tokens"].append({**made["added_tokens"][0], "id": FIRST + i, "content": text})
    made["added_tokens"].sort(key=lambda token: token["id"])
    path.write_text(json.dumps(made))


def mistral(folder: Path, kind: str) -> None:
    from transformers import (
        LlavaConfig,
        LlavaForConditionalGeneration,
        Mistral3Config,
        Mistral3ForConditionalGeneration,
        MistralConfig,
        PixtralVisionConfig,
    )

    patch = 8
    vision = PixtralVisionConfig(**TOWER, image_size=64, patch_size=patch, hidden_act="silu")
    text = MistralConfig(**SIZES, sliding_window=None, head_dim=16, rms_norm_eps=1e-5)
    both = {"vision_config": vision, "text_config": text, "image_token_index": FIRST, "vision_feature_layer": -1}
    if kind == "pixtral":
        model = LlavaForConditionalGeneration(LlavaConfig(**both, vision_feature_select_strategy="full", **EAGER))
    else:
        model = Mistral3ForConditionalGeneration(
            Mistral3Config(**both, spatial_merge_size=2, tie_word_embeddings=False, **EAGER)
        )
    randomized(model.eval(), 21)
    pixels = picture(22, 48, 32)
    merge = 1 if kind == "pixtral" else 2
    grid = (32 // patch // merge, 48 // patch // merge)
    import torch

    sizes = {"image_sizes": torch.tensor([[32, 48]])}
    _written(folder, kind, model, pixels, grid, lambda ids: {"pixel_values": normal(pixels), **sizes}, FIRST)


def llava(folder: Path) -> None:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    side, patch = 32, 8
    vision = CLIPVisionConfig(
        **{**TOWER, "num_hidden_layers": 3}, image_size=side, patch_size=patch, hidden_act="quick_gelu"
    )
    model = LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=LlamaConfig(**SIZES), image_token_index=FIRST, **EAGER)
    )
    randomized(model.eval(), 23)
    pixels = picture(24, side, side)
    grid = (side // patch, side // patch)
    _written(folder, "llava", model, pixels, grid, lambda ids: {"pixel_values": normal(pixels)}, FIRST)


def qwen25(folder: Path) -> None:
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": 14,
        "out_hidden_size": 64,
        "window_size": 112,
        "fullatt_block_indexes": [1],
    }
    text = {
        **SIZES,
        "bos_token_id": None,
        "eos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
    }
    model = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            vision_config=vision,
            text_config=text,
            vision_start_token_id=FIRST,
            image_token_id=FIRST + 1,
            video_token_id=FIRST + 8,
            vision_end_token_id=FIRST + 2,
            **EAGER,
        )
    )
    randomized(model.eval(), 25)
    pixels = picture(26, 28 * 6, 28 * 5)
    rows, columns = (side // 14 for side in pixels.shape[:2])
    values = normal(pixels).numpy()[0].reshape(3, rows // 2, 2, 14, columns // 2, 2, 14)
    values = values.transpose(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns, 3, 1, 14, 14).repeat(2, 2)
    more = {
        "pixel_values": torch.tensor(values.reshape(rows * columns, -1)),
        "image_grid_thw": torch.tensor([[1, rows, columns]]),
    }
    kinds = lambda ids: {**more, "mm_token_type_ids": (ids == FIRST + 1).int()}  # noqa: E731
    _written(folder, "qwen25vl", model, pixels, (rows // 2, columns // 2), kinds, FIRST + 1)


def qwen3moe(folder: Path) -> None:
    import torch
    from safetensors.numpy import load_file, save_file
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    patch = 8
    vision = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": patch,
        "out_hidden_size": 64,
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [0, 1],
    }
    text = {
        **SIZES,
        "num_hidden_layers": 3,
        "head_dim": 16,
        "moe_intermediate_size": 48,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "bos_token_id": None,
        "eos_token_id": None,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
    }
    ids = {"vision_start_token_id": FIRST, "image_token_id": FIRST + 1, "video_token_id": FIRST + 8}
    model = Qwen3VLMoeForConditionalGeneration(
        Qwen3VLMoeConfig(
            vision_config=vision, text_config=text, vision_end_token_id=FIRST + 2, tie_word_embeddings=False, **ids, **EAGER
        )
    )
    randomized(model.eval(), 31)
    pixels = picture(32, 16 * 10, 16 * 8)  # no fewer tokens than an image may have
    rows, columns = (side // patch for side in pixels.shape[:2])
    values = normal(pixels).numpy()[0].reshape(3, rows // 2, 2, patch, columns // 2, 2, patch)
    values = values.transpose(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns, 3, 1, patch, patch).repeat(2, 2)
    more = {
        "pixel_values": torch.tensor(values.reshape(rows * columns, -1)),
        "image_grid_thw": torch.tensor([[1, rows, columns]]),
    }
    kinds = lambda ids: {**more, "mm_token_type_ids": (ids == FIRST + 1).int()}  # noqa: E731
    _written(folder, "qwen3vlmoe", model, pixels, (rows // 2, columns // 2), kinds, FIRST + 1)
    # Published files hold experts with their columns first; transformers 5 turns them as it reads, and saves its own form.
    path = folder / "qwen3vlmoe" / "model.safetensors"
    turned = {n: w.swapaxes(1, 2).copy() if ".experts." in n else w for n, w in load_file(path).items()}
    save_file(turned, path, {"format": "pt"})


def gemma4(folder: Path, kind: str) -> None:
    import torch
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    small, patch = kind == "gemma4_e", 8
    vision = {
        **TOWER,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "patch_size": patch,
        "position_embedding_size": 72,
        "standardize": not small,
        "use_clipped_linears": small,
    }
    text = {
        **SIZES,
        "head_dim": 16,
        "global_head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 32,
        "hidden_size_per_layer_input": 16 if small else 0,
        "pad_token_id": 0,
        "vocab_size_per_layer_input": ROWS,
        "use_bidirectional_attention": None if small else "vision",
    }
    config = Gemma4Config(
        vision_config=vision,
        text_config=text,
        audio_config=None,
        boi_token_id=FIRST,
        image_token_id=FIRST + 1,
        eoi_token_id=FIRST + 2,
        video_token_id=FIRST + 6,
        audio_token_id=FIRST + 7,
        **EAGER,
    )
    model = Gemma4ForConditionalGeneration(config).eval()
    randomized(model, 27)
    tower, draw = model.model.vision_tower, torch.Generator().manual_seed(28)
    with torch.no_grad():
        if not small:
            tower.std_bias.copy_(torch.randn(32, generator=draw).half())
            tower.std_scale.copy_((1 + 0.2 * torch.randn(32, generator=draw)).half())
        for name, limit in tower.named_buffers():
            if name.endswith(("put_min", "put_max")):  # about one value in ten is beyond
                limit.fill_((-1.0 if name.endswith("min") else 1.25) * (1.5 if ".input" in name else 1.0))
        for name, scale in model.named_buffers():
            if name.endswith("layer_scalar"):
                scale.fill_(0.75)
    pixels = picture(29, patch * 3 * 4, patch * 3 * 2)
    rows, columns = (side // patch for side in pixels.shape[:2])
    patches = (pixels / 255).astype(np.float32).reshape(rows, patch, columns, patch, 3).swapaxes(1, 2)
    at = np.stack(np.meshgrid(np.arange(columns), np.arange(rows)), -1).reshape(1, -1, 2)
    more = {"pixel_values": torch.tensor(patches.reshape(1, rows * columns, -1)), "image_position_ids": torch.tensor(at)}
    kinds = lambda ids: {**more, "mm_token_type_ids": (ids == FIRST + 1).int()}  # noqa: E731
    _written(folder, kind, model, pixels, (rows // 3, columns // 3), kinds, FIRST + 1)


def main() -> None:
    folder = Path(sys.argv[1])
    for each in sys.argv[2:] or SPECIAL:
        {
            "pixtral": lambda: mistral(folder, "pixtral"),
            "mistral3": lambda: mistral(folder, "mistral3"),
            "llava": lambda: llava(folder),
            "qwen25vl": lambda: qwen25(folder),
            "qwen3vlmoe": lambda: qwen3moe(folder),
            "gemma4": lambda: gemma4(folder, "gemma4"),
            "gemma4_e": lambda: gemma4(folder, "gemma4_e"),
        }[each]()


if __name__ == "__main__":
    main()
