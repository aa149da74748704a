"""Vision towers: what a projector file (`general.architecture` clip) makes of an image's patches, as an assembly.

A tower is a transformer whose layers are a decoder's with attention to all sides, between a map of patches and a
projector into the language model. Patches come in the order of the projector's groups of `merge` x `merge`, row by row.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np

from quarrel.errors import UnsupportedModel
from quarrel.gguf import FORMATS, GGUFFile
from quarrel.models.assembly import run_layer
from quarrel.models.keys import MAX_LAYERS, Keys
from quarrel.models.kind import Block
from quarrel.models.mixers import Attention
from quarrel.models.projectors import PARTS, PROJECTORS, Tower, deep
from quarrel.models.spec import Layer, ModelSpec, Rope
from quarrel.models.tensors import Tensors
from quarrel.ops.contract import Value
from quarrel.ops.linear import linear_add
from quarrel.ops.norm import NormSpec, norm
from quarrel.ops.null import Builder
from quarrel.ops.program import Program

_RENAMED = {"ln1": "attn_norm", "ln2": "ffn_norm", "attn_out": "attn_output"}
_RENAMED |= {"attn_post_norm": "post_attention_norm", "ffn_post_norm": "post_ffw_norm"}
_OF_HEADS = re.compile(r"blk\.\d+\.attn_[qk](_norm)?\.weight")
_NAME = re.compile(r"v\.(blk\.\d+\.)?(\w+)(.*)")


class _Renamed:
    """A projector file whose tensors have the names that the assembly's blocks use."""

    def __init__(self, file: GGUFFile) -> None:
        self._file, self.metadata = file, file.metadata
        self._own = {_renamed(name): name for name in file.tensors}
        self.tensors = {new: file.tensors[own] for new, own in self._own.items()}
        self._by_columns = _kind(file) == "gemma4v"
        self._heads = file.metadata.int("clip.vision.attention.head_count", 1, lo=1, hi=1 << 16)

    def raw(self, name: str) -> Any:
        raw = self._file.raw(self._own[name])
        if not self._by_columns or not _OF_HEADS.fullmatch(name):
            return raw
        # A head's pairs that turn by columns lie in its first half, those by rows in its second: here every pair has one
        # value in each half.
        heads = 1 if raw.ndim == 1 else self._heads
        values = raw.reshape(-1, FORMATS[self.tensors[name].type].nbytes) if raw.ndim == 1 else raw
        return values.reshape(heads, 2, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(raw.shape)

    def array(self, name: str) -> Any:
        return self._file.array(self._own[name])


def _renamed(name: str) -> str:
    found = _NAME.fullmatch(name)
    return name if found is None else f"{found[1] or ''}{_RENAMED.get(found[2], found[2])}{found[3]}"


def _kind(file: GGUFFile) -> str:
    found: str = file.metadata.str("clip.projector_type", "") or file.metadata.str("clip.vision.projector_type", "unnamed")
    return found


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
    kind = _kind(file)
    if kind not in PROJECTORS:
        raise UnsupportedModel(f"the projector is {kind!r}; this version runs {', '.join(PROJECTORS)}")
    return PROJECTORS[kind].read(Keys(file.metadata, "clip.vision"), tensors, kind)


def assemble_tower(tower: Tower, tensors: Tensors) -> Program:
    """Patches in, `patches` `[T, patch_size]` and `stream`, their positions' embeddings `[T, n_embd]`; out `hidden`, a row
    for each of `out_rows`, the first of a group, and what deepstack adds: `deep1`, ..."""
    b, n = Builder(), tower.n_embd
    block = Block(tensors, "", n, NormSpec(tower.norm, n, tower.norm_eps, out="f32"))
    added: dict[str, Value] = {}
    with b.at("patch_embd"):
        h = b.input("stream", n)
        for name in ("patch_embd.weight", "patch_embd.weight.1"):
            if name in tensors:
                first = name.endswith("weight")
                bias = tensors.optional("patch_embd.bias", n) if first else None
                h = linear_add(b, h, b.input("patches", tower.patch_size), tensors.patches(name, n, tower.patch), bias)
        if "pre_ln.weight" in tensors:
            h = norm(b, block.norm, h, *block.gains("pre_ln"))
    for il, each in enumerate(tower.layers):
        h = run_layer(b, tower, tensors, il, each, h, {})
        if il in tower.deepstack:
            with b.at(f"deepstack.{il}"):
                added[PARTS[1 + len(added)]] = deep(b, block, tower, il, h)
    with b.at("mm"):
        hidden = PROJECTORS[tower.projector].project(b, block, tower, h)
    tensors.check_all_read(len(tower.layers))
    return b.program(hidden=hidden, **added)


INTERLEAVED = ("qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe")


def _both_ways(spec: ModelSpec, tower: Tower, a: Attention) -> bool:
    """Whether the tokens of an image see each other both ways: of Gemma 4 in layers with a window, in the larger models."""
    return tower.projector == "gemma3" or (tower.projector == "gemma4v" and a.window > 0 and not spec.per_layer)


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
        return replace(layer, mixer=replace(a, rope=rope, image_spans=_both_ways(spec, tower, a)))

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


def position_table(file: GGUFFile, tower: Tower) -> np.ndarray | None:
    """What `positions` reads; the class token's embedding is in its row."""
    if tower.places == "none":
        return None
    table = file.array("v.position_embd.weight")
    if tower.classes:
        table[0] += file.array("v.class_embd").reshape(-1)
    return table


def positions(tower: Tower, table: np.ndarray | None, rows: int, columns: int) -> np.ndarray:
    """The embedding of each patch's position, `[rows, columns, n_embd]` float32. A table that is stretched over the image
    has its corners on the corners, and is interpolated between its four nearest entries."""
    if table is None:
        return np.zeros((rows, columns, tower.n_embd), np.float32)
    if tower.places == "listed":
        return table[1:].reshape(rows, columns, tower.n_embd)
    if tower.places == "by axis":
        return table[1, :rows, None] + table[0, None, :columns]  # type: ignore[no-any-return]
    grid = table.reshape(tower.grid, tower.grid, tower.n_embd)

    def stretched(values: np.ndarray, count: int) -> np.ndarray:
        at = np.linspace(0, tower.grid - 1, count, dtype=np.float32)
        low = at.astype(np.int32)
        share = (at - low).reshape(-1, 1, 1)
        return np.asarray(values[low] * (1 - share) + values[np.minimum(low + 1, tower.grid - 1)] * share)

    return stretched(stretched(grid, rows).swapaxes(0, 1), columns).swapaxes(0, 1)
