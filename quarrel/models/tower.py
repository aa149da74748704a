"""Vision towers: what a projector file (`general.architecture` clip) makes of an image's patches, as an assembly.

A tower is a transformer whose layers are a decoder's with attention to all sides, between a map of patches and a
projector into the language model. Patches come in the order of the projector's groups of `merge` x `merge`, row by row.

qwen3vl_merger: a group's rows side by side, two maps with GELU between them; after some layers the same once more
(deepstack), for the language model to add behind its first layers.
gemma3: the mean of a group's rows, a norm, one map.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from quarrel.errors import ModelError, UnsupportedModel
from quarrel.gguf import GGUFFile
from quarrel.models.assembly import run_layer
from quarrel.models.feedforward import PlainFFN
from quarrel.models.keys import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Keys
from quarrel.models.kind import Block
from quarrel.models.mixers import Attention
from quarrel.models.rope import plain as frequencies
from quarrel.models.spec import Layer, ModelSpec, Rope
from quarrel.models.tensors import Tensors
from quarrel.ops.activation import plain
from quarrel.ops.contract import Value
from quarrel.ops.embedding import gather_rows
from quarrel.ops.linear import linear, linear_add
from quarrel.ops.norm import NormSpec, norm
from quarrel.ops.null import Builder
from quarrel.ops.program import Program

PARTS = ("hidden", "deep1", "deep2", "deep3")
"""Results of a tower, side by side a row of what the language model reads."""
_RENAMED = {"ln1": "attn_norm", "ln2": "ffn_norm", "attn_out": "attn_output"}
_NAME = re.compile(r"v\.(blk\.\d+\.)?(\w+)(.*)")


@dataclass(frozen=True)
class Tower:
    """Everything static about a tower. `side`: of its images in pixels, 0 where they keep their shape; `grid`: rows and
    columns of its table of positions; `deepstack`: layers behind which a projector of their own reads."""

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
    norm: Literal["layer"] = "layer"

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


class _Renamed:
    """A projector file whose tensors have the names that the assembly's blocks use."""

    def __init__(self, file: GGUFFile) -> None:
        self._file, self.metadata = file, file.metadata
        self._own = {_renamed(name): name for name in file.tensors}
        self.tensors = {new: file.tensors[own] for new, own in self._own.items()}

    def raw(self, name: str) -> Any:
        return self._file.raw(self._own[name])

    def array(self, name: str) -> Any:
        return self._file.array(self._own[name])


def _renamed(name: str) -> str:
    found = _NAME.fullmatch(name)
    return name if found is None else f"{found[1] or ''}{_RENAMED.get(found[2], found[2])}{found[3]}"


def tower_tensors(file: GGUFFile) -> Tensors:
    """A projector file's tensors, for `read_tower` and `assemble_tower`."""
    return Tensors(_Renamed(file))  # type: ignore[arg-type]


def read_tower(file: GGUFFile, tensors: Tensors) -> Tower:
    """The facts of a projector file. Raises UnsupportedModel for a kind that this version does not run."""
    name = file.metadata.str("general.architecture")
    if name != "clip":
        raise UnsupportedModel(
            f"the projector file's architecture is {name!r}, wanted 'clip': give the file called mmproj-*.gguf"
        )
    if not file.metadata.bool("clip.has_vision_encoder", True):
        raise UnsupportedModel("the projector file has no tower for images; this version takes no sound")
    kind: str = file.metadata.str("clip.projector_type", "") or file.metadata.str("clip.vision.projector_type", "unnamed")
    if kind not in PROJECTORS:
        raise UnsupportedModel(f"the projector is {kind!r}; this version runs {', '.join(PROJECTORS)}")
    return PROJECTORS[kind].read(Keys(file.metadata, "clip.vision"), tensors, kind)


def assemble_tower(tower: Tower, tensors: Tensors) -> Program:
    """Patches in, `patches` `[T, patch_size]` and `stream`, their positions' embeddings `[T, n_embd]`; out `hidden`, a row
    for each of `out_rows`, the first of a group, and what deepstack adds: `deep1`, ..."""
    b, n = Builder(), tower.n_embd
    block = Block(tensors, "", n, NormSpec("layer", n, tower.norm_eps, out="f32"))
    projector = PROJECTORS[tower.projector]
    deep: dict[str, Value] = {}
    with b.at("patch_embd"):
        h = b.input("stream", n)
        for name in ("patch_embd.weight", "patch_embd.weight.1"):
            if name in tensors:
                first = name.endswith("weight")
                bias = tensors.optional("patch_embd.bias", n) if first else None
                h = linear_add(b, h, b.input("patches", tower.patch_size), tensors.patches(name, n, tower.patch), bias)
    for il, each in enumerate(tower.layers):
        h = run_layer(b, tower, tensors, il, each, h, {})
        if il in tower.deepstack:
            with b.at(f"deepstack.{il}"):
                deep[PARTS[1 + len(deep)]] = _deep(b, block, tower, il, h)
    with b.at("mm"):
        hidden = projector.project(b, block, tower, norm(b, block.norm, h, *block.gains("post_ln")))
    tensors.check_all_read(len(tower.layers))
    return b.program(hidden=hidden, **deep)


INTERLEAVED = ("qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe")
BOTH_WAYS = ("gemma3",)
"""Projectors into models in which the tokens of an image see each other both ways."""


def seeing(spec: ModelSpec, keys: Keys, tower: Tower) -> ModelSpec:
    """The model with room for the tower's images. Raises UnsupportedModel where they do not fit each other."""
    parts = 1 + keys.int("n_deepstack_layers", 0, hi=MAX_LAYERS)
    found, wanted = (tower.n_out, tower.parts), (spec.n_embd, parts)
    if found != wanted:
        raise UnsupportedModel(
            f"the projector gives rows of {found[0]} in {found[1]} parts, and the model wants {wanted[0]} in {wanted[1]}:"
            " give the mmproj file that was made with this model"
        )

    def sees(layer: Layer) -> Layer:
        a = layer.mixer
        if not isinstance(a, Attention):
            return layer
        rope = _on_axes(keys, a.rope) if a.rope is not None and keys.has_list("rope.dimension_sections") else a.rope
        return replace(layer, mixer=replace(a, rope=rope, image_spans=tower.projector in BOTH_WAYS))

    return replace(spec, image_parts=parts, layers=tuple(sees(layer) for layer in spec.layers))


def _on_axes(keys: Keys, rope: Rope) -> Rope:
    """The rotation by time, row and column: the file's sections say how many pairs follow each."""
    half = rope.n_rot // 2
    sections = keys.metadata.ints(f"{keys.architecture}.rope.dimension_sections", lo=0, hi=half)[:3]
    pair = np.arange(half)
    if keys.architecture in INTERLEAVED:
        axis = np.where((pair % 3 > 0) & (pair < 3 * np.array([0, *sections[1:]])[pair % 3]), pair % 3, 0)
    else:
        axis = np.searchsorted(np.cumsum(sections), pair, side="right").clip(0, 2)
    freq = np.where(axis == np.arange(3)[:, None], np.array(rope.freq), 0.0)
    return replace(rope, freq=tuple(float(f) for f in freq.reshape(-1)), axes=3)


def positions(tower: Tower, table: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """The embedding of each patch's position, `[rows, columns, n_embd]` float32: the table, a square grid, stretched over
    the image with its corners on the corners, and interpolated between its four nearest entries."""
    grid = table.reshape(tower.grid, tower.grid, tower.n_embd)

    def stretched(values: np.ndarray, count: int) -> np.ndarray:
        at = np.linspace(0, tower.grid - 1, count, dtype=np.float32)
        low = at.astype(np.int32)
        share = (at - low).reshape(-1, 1, 1)
        return np.asarray(values[low] * (1 - share) + values[np.minimum(low + 1, tower.grid - 1)] * share)

    return stretched(stretched(grid, rows).swapaxes(0, 1), columns).swapaxes(0, 1)


def _read(keys: Keys, tensors: Tensors, kind: str, merge: int, rotation: bool) -> Tower:
    n = keys.int("embedding_length", lo=1, hi=MAX_WIDTH)
    heads, patch = keys.int("attention.head_count", lo=1, hi=MAX_HEADS), keys.int("patch_size", lo=1, hi=256)
    n_layers, dim = keys.int("block_count", lo=1, hi=MAX_LAYERS), n // heads
    if n % heads or dim % 4:
        raise ModelError(f"embedding_length {n} does not divide into {heads} heads of fours: the file is inconsistent")
    for name in ("use_silu", "use_gelu"):
        if keys.metadata.bool(f"clip.{name}", name == "use_gelu") != (name == "use_gelu"):
            raise UnsupportedModel(f"the key clip.{name} asks for an activation that this version's towers do not have")
    table = tensors.shape("position_embd.weight")
    grid = round(table[0] ** 0.5)
    if table != (grid * grid, n):
        raise ModelError(f"the tensor v.position_embd.weight is {list(table)}, wanted a square number of rows of {n}")
    # Half of a head's pairs turn by the row, half by the column, with the same frequencies.
    half = frequencies(10000.0, dim // 2)
    freq = np.stack([np.concatenate([half, 0 * half]), np.concatenate([0 * half, half])])
    rope = Rope("neox", dim, tuple(float(f) for f in freq.reshape(-1).astype(np.float32)), axes=2) if rotation else None
    width = keys.int("feed_forward_length", lo=1, hi=MAX_WIDTH)
    each = Layer(Attention(heads, heads, dim, dim**-0.5, rope, both_ways=True), PlainFFN("gelu_tanh", width))
    return Tower(
        projector=kind,
        patch=patch,
        merge=merge,
        side=0,
        n_embd=n,
        n_out=keys.int("projection_dim", lo=1, hi=MAX_WIDTH),
        norm_eps=keys.float("attention.layer_norm_epsilon", lo=0.0),
        layers=(each,) * n_layers,
        grid=grid,
        deepstack=(),
        mean=tuple(keys.metadata.floats("clip.vision.image_mean", count=3)),
        std=tuple(keys.metadata.floats("clip.vision.image_std", count=3)),
    )


def _read_qwen3vl(keys: Keys, tensors: Tensors, kind: str) -> Tower:
    tower = _read(keys, tensors, kind, keys.int("spatial_merge_size", 2, lo=1, hi=16), rotation=True)
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


def _read_gemma3(keys: Keys, tensors: Tensors, kind: str) -> Tower:
    tower = _read(keys, tensors, kind, keys.int("projector.scale_factor", 4, lo=1, hi=64), rotation=False)
    side = keys.int("image_size", lo=1, hi=1 << 14)
    if side != tower.grid * tower.patch or tower.grid % tower.merge:
        raise ModelError(
            f"image_size {side} is no {tower.grid} patches of {tower.patch} in groups of {tower.merge}: inconsistent file"
        )
    return replace(tower, side=side)


def _merged(b: Builder, block: Block, tower: Tower, x: Value, names: tuple[str, str]) -> Value:
    """Two maps with GELU between them."""
    wide = tower.group * tower.n_embd
    x = plain(b, "gelu_erf", linear(b, x, *block.linear(names[0], wide, wide)))
    return linear(b, x, *block.linear(names[1], tower.n_out, wide), out="f32")


def _project_qwen3vl(b: Builder, block: Block, tower: Tower, h: Value) -> Value:
    return _merged(b, block, tower, gather_rows(b, h, b.input("out_rows"), tower.group), ("mm.0", "mm.2"))


def _deep(b: Builder, block: Block, tower: Tower, il: int, h: Value) -> Value:
    """Unlike the last projector, it normalises a whole group."""
    name = f"deepstack.{il}"
    x = gather_rows(b, h, b.input("out_rows"), tower.group)
    wide = Block(
        block.tensors, "", tower.group * tower.n_embd, replace(block.norm, k=tower.group * tower.n_embd, out="act")
    )
    x = norm(b, wide.norm, x, *wide.gains(f"{name}.norm"))
    return _merged(b, block, tower, x, (f"{name}.fc1", f"{name}.fc2"))


def _project_gemma3(b: Builder, block: Block, tower: Tower, h: Value) -> Value:
    x = gather_rows(b, h, b.input("out_rows"), tower.group, mean=True)
    gain = block.vector("mm.soft_emb_norm.weight", tower.n_embd)
    x = norm(b, NormSpec("rms", tower.n_embd, tower.norm_eps), x, gain)
    return linear(b, x, block.tensors.transposed("mm.input_projection.weight", tower.n_out, tower.n_embd), out="f32")


@dataclass(frozen=True)
class Projector:
    """What a kind of tower has of its own: how its keys are read, and what stands behind its last norm."""

    read: Callable[[Keys, Tensors, str], Tower]
    project: Callable[[Builder, Block, Tower, Value], Value]


PROJECTORS: Mapping[str, Projector] = {
    "qwen3vl_merger": Projector(_read_qwen3vl, _project_qwen3vl),
    "gemma3": Projector(_read_gemma3, _project_gemma3),
}
"""`clip.projector_type` -> what reads and projects."""
