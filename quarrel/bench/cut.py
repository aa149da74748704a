"""A model cut down to one layer of each kind, at its own shapes: all of its kernels, a fraction of its bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from quarrel.gguf import GGUFFile
from quarrel.gguf.file import TensorInfo
from quarrel.models import EncoderSpec, ModelSpec, Tensors
from quarrel.models.spec import Layer

_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
_OF_ALL = {"per_layer_token_embd.weight": -1, "per_layer_model_proj.weight": 0}
"""Tensors that hold something for each layer, and the axis along which it lies."""


@dataclass(frozen=True)
class _Renamed:
    """Stands in for the open file: its tensors under the numbers that the chosen layers now have."""

    file: GGUFFile
    names: Mapping[str, str]
    chosen: Sequence[int]
    layers: int
    """Of the file."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {new: self._info(self.file.tensors[old]) for new, old in self.names.items()}

    def raw(self, name: str) -> Any:
        return self._chosen(self.names[name], self.file.raw(self.names[name]))

    def array(self, name: str) -> Any:
        return self._chosen(self.names[name], self.file.array(self.names[name]))

    def _info(self, info: TensorInfo) -> TensorInfo:
        axis = _OF_ALL.get(info.name)
        if axis is None:
            return info
        dims = list(info.dims)
        dims[-1 - axis] = dims[-1 - axis] // self.layers * len(self.chosen)
        return replace(info, dims=tuple(dims), nbytes=info.nbytes // self.layers * len(self.chosen))

    def _chosen(self, name: str, values: Any) -> Any:
        """The parts of the chosen layers; a layer has whole blocks."""
        axis = _OF_ALL.get(name)
        if axis is None:
            return values
        parts = np.split(values, self.layers, axis)
        return np.concatenate([parts[i] for i in self.chosen], axis)


def one_layer_of_each(file: GGUFFile, spec: ModelSpec | EncoderSpec) -> tuple[ModelSpec | EncoderSpec, Tensors, list[int]]:
    """The first layer of each kind, where a kind is its blocks, shapes and types, and those whose keys they read; and which
    layers these are."""
    parts: dict[int, list[tuple[Any, ...]]] = {}
    shared: dict[str, str] = {}
    for name, info in file.tensors.items():
        if found := _BLOCK.fullmatch(name):
            parts.setdefault(int(found[1]), []).append((found[2], info.type, info.shape))
        else:
            shared[name] = name
    kinds: dict[tuple[Any, ...], int] = {}
    for i in range(_count(spec)):
        layer = () if isinstance(spec, EncoderSpec) else (spec.layers[i],)
        kinds.setdefault((*layer, *sorted(parts.get(i, ()))), i)
    chosen = sorted({*kinds.values(), *(read for i in kinds.values() if (read := _reads(spec, i)) is not None)})
    names = shared | {
        f"blk.{new}.{part}": f"blk.{old}.{part}" for new, old in enumerate(chosen) for part, *_ in parts.get(old, ())
    }
    cut: ModelSpec | EncoderSpec
    if isinstance(spec, EncoderSpec):
        cut = replace(spec, n_layers=len(chosen))
    else:
        cut = replace(spec, layers=tuple(_moved(spec.layers[i], chosen) for i in chosen))
    return cut, Tensors(cast(GGUFFile, _Renamed(file, names, chosen, _count(spec)))), chosen


def _count(spec: ModelSpec | EncoderSpec) -> int:
    return spec.n_layers if isinstance(spec, EncoderSpec) else len(spec.layers)


def _reads(spec: ModelSpec | EncoderSpec, layer: int) -> int | None:
    """The layer whose keys and values this one reads."""
    mixer = None if isinstance(spec, EncoderSpec) else spec.layers[layer].mixer
    return None if mixer is None else mixer.reads


def _moved(layer: Layer, chosen: Sequence[int]) -> Layer:
    """The layer, reading another's keys where that one now is."""
    if layer.mixer is None or layer.mixer.reads is None:
        return layer
    mixer: Any = layer.mixer
    return replace(layer, mixer=replace(mixer, reads=chosen.index(mixer.reads)))
