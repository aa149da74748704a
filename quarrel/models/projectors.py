"""What kinds of towers there are: how each one's keys are read, and what stands behind its last layer.

qwen3vl_merger: a group's rows side by side, two maps with GELU between them; after some layers the same once more
(deepstack), for the language model to add behind its first layers.
qwen2.5vl_merger: the same without deepstack; in most layers a patch sees those of its window alone.
gemma3: the mean of a group's rows, a norm, one map.
gemma4v: the mean of a group's rows, moved and scaled, a norm without gains, one map.
pixtral: a group's rows side by side through one map, if there are groups; two maps with GELU between them. A row of its own
ends each row of tokens but the last (Mistral Small 3.1 and later).
mlp: two maps with GELU between them (LLaVA), of all rows but the class token's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from quarrel.errors import ModelError, UnsupportedModel
from quarrel.models.feedforward import GatedFFN, PlainFFN
from quarrel.models.keys import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Keys
from quarrel.models.kind import Block
from quarrel.models.mixers import Attention
from quarrel.models.rope import plain as frequencies
from quarrel.models.spec import FeedForward, Layer, Rope
from quarrel.models.tensors import Tensors
from quarrel.ops.activation import plain
from quarrel.ops.contract import Value
from quarrel.ops.embedding import gather_rows
from quarrel.ops.linear import linear
from quarrel.ops.norm import NormSpec, norm
from quarrel.ops.null import Builder

PARTS = ("hidden", "deep1", "deep2", "deep3")
"""Results of a tower, side by side a row of what the language model reads."""
Places = Literal["stretched", "none", "listed", "by axis"]
"""How a patch's position is embedded: by a square table, stretched over the image; not at all; by a row of a table for each
patch, the class token's first; by the sum of a row for its column and a row for its row."""


@dataclass(frozen=True)
class Tower:
    """Everything static about a tower. `side`: of its images in pixels, 0 where they keep their shape; `grid`: rows and
    columns of its table of positions, or rows of each of two; `deepstack`: layers behind which a projector of their own
    reads; `breaks`: each row of tokens but the last ends with a row of its own."""

    projector: str
    patch: int
    merge: int
    side: int
    n_embd: int
    n_out: int
    norm_eps: float
    layers: tuple[Layer, ...]
    grid: int
    deepstack: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    min_pixels: int = 0
    max_pixels: int = 0
    norm: Literal["layer", "rms"] = "layer"
    places: Places = "stretched"
    shape: Literal["near", "within", "below"] = "near"
    """How an image that keeps its shape is made to fit (`vision.patches.Preparation`)."""
    pad: tuple[int, ...] = ()
    """The colour around an image that is no square, where it is not stretched to one."""
    breaks: bool = False
    window: int = 0
    """Rows and columns of groups that see each other in layers which do not see the whole image."""

    @property
    def classes(self) -> int:
        """Rows in front of the patches: the class token's."""
        return int(self.places == "listed")

    @property
    def group(self) -> int:
        """Patches that become one row."""
        return self.merge * self.merge

    @property
    def parts(self) -> int:
        """Rows of the language model's width that a group becomes."""
        return 1 + len(self.deepstack)

    @property
    def patch_size(self) -> int:
        """Numbers of a patch."""
        return 3 * self.patch * self.patch


def _rotation(style: Literal["norm", "neox"], rows: np.ndarray, columns: np.ndarray) -> Rope:
    """The first half of a head's pairs turn by the row, the second by the column."""
    freq = np.stack([np.concatenate([rows, 0 * columns]), np.concatenate([0 * rows, columns])])
    return Rope(style, 2 * freq.shape[1], tuple(float(f) for f in freq.reshape(-1).astype(np.float32)), axes=2)


def _activation(keys: Keys, wanted: str) -> None:
    """Raises UnsupportedModel for a file that names another one: silu, gelu, or quick GELU by neither."""
    given = {name: keys.metadata.bool(f"clip.use_{name}", name == wanted) for name in ("silu", "gelu")}
    if given != {name: name == wanted for name in given}:
        raise UnsupportedModel(
            "the keys clip.use_silu and clip.use_gelu ask for an activation that these towers do not have"
        )


def _read(keys: Keys, kind: str, merge: int, ffn: Callable[[int], FeedForward], **more: Any) -> Tower:
    """What all kinds have in common; of a layer's attention `rope` and `scale`, of the layer `post_norms`."""
    n = keys.int("embedding_length", lo=1, hi=MAX_WIDTH)
    heads, patch = keys.int("attention.head_count", lo=1, hi=MAX_HEADS), keys.int("patch_size", lo=1, hi=256)
    n_layers, dim = keys.int("block_count", lo=1, hi=MAX_LAYERS), n // heads
    if n % heads or dim % 4:
        raise ModelError(f"embedding_length {n} does not divide into {heads} heads of fours: the file is inconsistent")
    attention = Attention(heads, heads, dim, more.pop("scale", dim**-0.5), None, both_ways=True)
    attention = replace(attention, value_norm=more.pop("value_norm", False))
    if (turn := more.pop("rope", None)) is not None:
        attention = replace(attention, rope=turn(dim))
    each = Layer(
        attention, ffn(keys.int("feed_forward_length", lo=1, hi=MAX_WIDTH)), post_norms=more.pop("post_norms", False)
    )
    mean, std = (tuple(keys.metadata.floats(f"clip.vision.image_{name}", count=3)) for name in ("mean", "std"))
    return Tower(
        projector=kind,
        patch=patch,
        merge=merge,
        side=0,
        n_embd=n,
        n_out=keys.int("projection_dim", lo=1, hi=MAX_WIDTH),
        norm_eps=keys.float("attention.layer_norm_epsilon", lo=0.0),
        layers=(each,) * n_layers,
        **{"grid": 0, "deepstack": (), "mean": mean, "std": std, **more},
    )


def _grid(keys: Keys, tensors: Tensors) -> int:
    """Rows and columns of a square table of positions."""
    n, table = keys.int("embedding_length", lo=1, hi=MAX_WIDTH), tensors.shape("position_embd.weight")
    grid: int = round(table[0] ** 0.5)
    if table != (grid * grid, n):
        raise ModelError(f"the tensor v.position_embd.weight is {list(table)}, wanted a square number of rows of {n}")
    return grid


def _gelu(width: int) -> FeedForward:
    return PlainFFN("gelu_tanh", width)


def _same(dim: int) -> Rope:
    """The same frequencies for rows and columns."""
    half = frequencies(10000.0, dim // 2)
    return _rotation("neox", half, half)


def _columns_first(dim: int) -> Rope:
    """Gemma 4's, with rows of the maps as `tower_tensors` has them."""
    half = frequencies(100.0, dim // 2)
    freq = np.stack([np.concatenate([0 * half, half]), np.concatenate([half, 0 * half])])
    return Rope("neox", dim, tuple(float(f) for f in freq.reshape(-1).astype(np.float32)), axes=2)


def _in_turn(dim: int) -> Rope:
    """Of one run of frequencies every other for rows, the rest for columns; pairs lie side by side."""
    whole = frequencies(10000.0, dim)
    return _rotation("norm", whole[0::2], whole[1::2])


def _read_qwen3vl(keys: Keys, tensors: Tensors, kind: str) -> Tower:
    _activation(keys, "gelu")
    merge = keys.int("spatial_merge_size", 2, lo=1, hi=16)
    tower = _read(keys, kind, merge, _gelu, rope=_same, grid=_grid(keys, tensors))
    flags = keys.bools("is_deepstack_layers", len(tower.layers), False)
    deepstack = tuple(il for il, flag in enumerate(flags) if flag)
    if len(deepstack) >= len(PARTS):
        raise UnsupportedModel(f"{len(deepstack)} layers of the tower are read, wanted at most {len(PARTS) - 1}")
    pixels = (tower.patch * tower.merge) ** 2
    return replace(
        tower,
        deepstack=deepstack,
        # The model cards say 64 to 16384 tokens; llama.cpp stops at 4096 too, as activations grow with them.
        min_pixels=keys.int("image_min_pixels", 64 * pixels, lo=1),
        max_pixels=keys.int("image_max_pixels", 4096 * pixels, lo=1),
    )


WINDOW = 112
"""Pixels of a window's side in Qwen2.5-VL, where a file does not say."""


def _read_qwen25(keys: Keys, tensors: Tensors, kind: str) -> Tower:
    _activation(keys, "silu")
    merge = keys.int("spatial_merge_size", 2, lo=1, hi=16)
    tower = _read(keys, kind, merge, lambda width: GatedFFN("silu", width), norm="rms", rope=_same, places="none")
    side, every = tower.patch * merge, keys.int("n_wa_pattern", lo=1, hi=MAX_LAYERS)
    each = tower.layers[0]
    assert isinstance(each.mixer, Attention)
    parted = replace(each, mixer=replace(each.mixer, parted=True))
    return replace(
        tower,
        layers=tuple(parted if (il + 1) % every else each for il in range(len(tower.layers))),
        window=keys.int("window_size", WINDOW, lo=side, hi=1 << 14) // side,
        # The model card says 4 to 16384 tokens; of more than 4096 see above.
        min_pixels=keys.int("image_min_pixels", 4 * side**2, lo=1),
        max_pixels=keys.int("image_max_pixels", 4096 * side**2, lo=1),
    )


def _read_gemma3(keys: Keys, tensors: Tensors, kind: str) -> Tower:
    _activation(keys, "gelu")
    merge = keys.int("projector.scale_factor", 4, lo=1, hi=64)
    tower = _read(keys, kind, merge, _gelu, grid=_grid(keys, tensors))
    side = keys.int("image_size", lo=1, hi=1 << 14)
    if side != tower.grid * tower.patch or tower.grid % tower.merge:
        raise ModelError(
            f"image_size {side} is no {tower.grid} patches of {tower.patch} in groups of {tower.merge}: inconsistent file"
        )
    return replace(tower, side=side)


COLOURS = (122, 116, 104)
"""Around LLaVA's images: CLIP's mean."""
SOFT_TOKENS = 280
"""Of an image, for Gemma 4, at most: the model card's."""
BREAK = "token_embd.img_break"
_LAYER = re.compile(r"blk\.(\d+)\.")


def _read_gemma4(keys: Keys, tensors: Tensors, kind: str) -> Tower:
    _activation(keys, "gelu")
    n, table = keys.int("embedding_length", lo=1, hi=MAX_WIDTH), tensors.shape("position_embd.weight")
    if len(table) != 3 or (table[0], table[2]) != (2, n):
        raise ModelError(f"the tensor v.position_embd.weight is {list(table)}, wanted two tables with rows of {n}")
    merge = keys.int("projector.scale_factor", 3, lo=1, hi=64)

    tower = _read(
        keys, kind, merge, lambda width: GatedFFN("gelu_tanh", width), norm="rms", rope=_columns_first, scale=1.0,
        value_norm=True, post_norms=True, grid=table[1], places="by axis", shape="below", mean=(0.5,) * 3, std=(0.5,) * 3,
    )  # fmt: skip
    return replace(tower, max_pixels=SOFT_TOKENS * (merge * tower.patch) ** 2)


def _read_pixtral(keys: Keys, tensors: Tensors, kind: str) -> Tower:
    _activation(keys, "silu")
    merge = keys.int("spatial_merge_size", 1, lo=1, hi=16)
    tower = _read(
        keys, kind, merge, lambda width: GatedFFN("silu", width), norm="rms", rope=_in_turn, places="none",
        shape="within", breaks=BREAK in tensors,
    )  # fmt: skip
    return replace(tower, max_pixels=keys.int("image_size", lo=1, hi=1 << 14) ** 2)


def _read_mlp(keys: Keys, tensors: Tensors, kind: str) -> Tower:
    gelu = keys.metadata.bool("clip.use_gelu", False)
    _activation(keys, "gelu" if gelu else "none")
    layers, tiles = (f"clip.vision.{name}" for name in ("feature_layer", "image_grid_pinpoints"))
    last = [keys.int("block_count", lo=1, hi=MAX_LAYERS)]
    others = layers in keys.metadata and list(keys.metadata.ints(layers, lo=0, hi=MAX_LAYERS)) != last
    if others or tiles in keys.metadata:
        raise UnsupportedModel(
            f"the key {layers if others else tiles} asks for other layers or for tiles, which this version's towers lack"
        )
    side, patch = keys.int("image_size", lo=1, hi=1 << 14), keys.int("patch_size", lo=1, hi=256)
    n, table = keys.int("embedding_length", lo=1, hi=MAX_WIDTH), tensors.shape("position_embd.weight")
    if side % patch or table != (1 + (side // patch) ** 2, n):
        wanted = f"one row of {n} for each of {(side // patch) ** 2} patches of {patch} and one for the class"
        raise ModelError(f"the tensor v.position_embd.weight is {list(table)}, wanted {wanted}")
    tower = _read(
        keys, kind, 1, lambda width: PlainFFN("gelu_tanh" if gelu else "gelu_quick", width), places="listed",
        grid=side // patch, pad=COLOURS,
    )  # fmt: skip
    # A file may hold the layers behind the last one that counts.
    tensors.unused(*(t for t in tensors.file.tensors if (at := _LAYER.match(t)) and int(at[1]) >= len(tower.layers)))
    return replace(tower, side=side)


def _merged(b: Builder, block: Block, tower: Tower, x: Value, names: tuple[str, str]) -> Value:
    """Two maps with GELU between them."""
    wide = tower.group * tower.n_embd
    x = plain(b, "gelu_erf", linear(b, x, *block.linear(names[0], wide, wide)))
    return linear(b, x, *block.linear(names[1], tower.n_out, wide), out="f32")


def _behind(b: Builder, block: Block, h: Value) -> Value:
    """The stream behind the last norm."""
    return norm(b, block.norm, h, *block.gains("post_ln"))


def _project_qwen3vl(b: Builder, block: Block, tower: Tower, h: Value) -> Value:
    h = _behind(b, block, h)
    return _merged(b, block, tower, gather_rows(b, h, b.input("out_rows"), tower.group), ("mm.0", "mm.2"))


def deep(b: Builder, block: Block, tower: Tower, il: int, h: Value) -> Value:
    """Unlike the last projector, it normalises a whole group."""
    name = f"deepstack.{il}"
    x = gather_rows(b, h, b.input("out_rows"), tower.group)
    wide = Block(
        block.tensors, "", tower.group * tower.n_embd, replace(block.norm, k=tower.group * tower.n_embd, out="act")
    )
    x = norm(b, wide.norm, x, *wide.gains(f"{name}.norm"))
    return _merged(b, block, tower, x, (f"{name}.fc1", f"{name}.fc2"))


def _project_gemma3(b: Builder, block: Block, tower: Tower, h: Value) -> Value:
    x = gather_rows(b, _behind(b, block, h), b.input("out_rows"), tower.group, mean=True)
    gain = block.vector("mm.soft_emb_norm.weight", tower.n_embd)
    x = norm(b, NormSpec("rms", tower.n_embd, tower.norm_eps), x, gain)
    return linear(b, x, block.tensors.transposed("mm.input_projection.weight", tower.n_out, tower.n_embd), out="f32")


def _project_gemma4(b: Builder, block: Block, tower: Tower, h: Value) -> Value:
    n, t = tower.n_embd, block.tensors
    x = gather_rows(b, h, b.input("out_rows"), tower.group, mean=True)
    eps = tower.norm_eps
    if "std_scale" in t:
        x = linear(b, x, *t.moved("std_scale", "std_bias", n, n**0.5), out="f32")
    else:
        eps /= n  # instead of the rows times the root of n
    x = norm(b, NormSpec("rms", n, eps), x, t.ones(n))
    return linear(b, x, *block.linear("mm.input_projection", tower.n_out, n), out="f32")


def _project_pixtral(b: Builder, block: Block, tower: Tower, h: Value) -> Value:
    n, t = tower.n_embd, block.tensors
    if tower.merge > 1:
        h = norm(b, replace(block.norm, out="f32"), h, block.vector("mm.input_norm.weight", n))
        x = gather_rows(b, h, b.input("out_rows"), tower.group)
        # Its columns are a patch's values of one channel after the other.
        x = linear(b, x, t.interleaved("mm.patch_merger.weight", n, n, tower.group))
    else:
        x = gather_rows(b, h, b.input("out_rows"))
    x = linear(b, x, *block.linear("mm.1", tower.n_out, n))
    return linear(b, plain(b, "gelu_erf", x), *block.linear("mm.2", tower.n_out, tower.n_out), out="f32")


def _project_mlp(b: Builder, block: Block, tower: Tower, h: Value) -> Value:
    x = gather_rows(b, _behind(b, block, h) if block.has("post_ln.weight") else h, b.input("out_rows"))
    if not block.has("mm.2.weight"):
        return linear(b, x, *block.linear("mm.0", tower.n_out, tower.n_embd), out="f32")
    x = plain(b, "gelu_erf", linear(b, x, *block.linear("mm.0", tower.n_out, tower.n_embd)))
    return linear(b, x, *block.linear("mm.2", tower.n_out, tower.n_out), out="f32")


@dataclass(frozen=True)
class Projector:
    """What a kind of tower has of its own: how its keys are read, and what stands behind its last norm."""

    read: Callable[[Keys, Tensors, str], Tower]
    project: Callable[[Builder, Block, Tower, Value], Value]


PROJECTORS: Mapping[str, Projector] = {
    "qwen3vl_merger": Projector(_read_qwen3vl, _project_qwen3vl),
    "qwen2.5vl_merger": Projector(_read_qwen25, _project_qwen3vl),
    "gemma3": Projector(_read_gemma3, _project_gemma3),
    "gemma4v": Projector(_read_gemma4, _project_gemma4),
    "pixtral": Projector(_read_pixtral, _project_pixtral),
    "mlp": Projector(_read_mlp, _project_mlp),
}
"""`clip.projector_type` -> what reads and projects."""
