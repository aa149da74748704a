"""A model cut down to one layer of each kind, at its own shapes: all of its kernels, a fraction of its bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from quarrel.gguf import GGUFFile
from quarrel.gguf.file import TensorInfo
from quarrel.models import EncoderSpec, ModelSpec, Tensors

_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")


@dataclass(frozen=True)
class _Renamed:
    """Stands in for the open file: its tensors under the numbers that the chosen layers now have."""

    file: GGUFFile
    names: Mapping[str, str]

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {new: self.file.tensors[old] for new, old in self.names.items()}

    def raw(self, name: str) -> Any:
        return self.file.raw(self.names[name])

    def array(self, name: str) -> Any:
        return self.file.array(self.names[name])


def one_layer_of_each(file: GGUFFile, spec: ModelSpec | EncoderSpec) -> tuple[ModelSpec | EncoderSpec, Tensors, list[int]]:
    """The first layer of each kind, where a kind is its blocks, shapes and types; and which layers these are."""
    parts: dict[int, list[tuple[Any, ...]]] = {}
    shared: dict[str, str] = {}
    for name, info in file.tensors.items():
        if found := _BLOCK.fullmatch(name):
            parts.setdefault(int(found[1]), []).append((found[2], info.type, info.shape))
        else:
            shared[name] = name
    kinds: dict[tuple[Any, ...], int] = {}
    for i in range(spec.n_layers if isinstance(spec, EncoderSpec) else len(spec.layers)):
        layer = () if isinstance(spec, EncoderSpec) else (spec.layers[i],)
        kinds.setdefault((*layer, *sorted(parts.get(i, ()))), i)
    chosen = sorted(kinds.values())
    names = shared | {
        f"blk.{new}.{part}": f"blk.{old}.{part}" for new, old in enumerate(chosen) for part, *_ in parts.get(old, ())
    }
    cut: ModelSpec | EncoderSpec
    if isinstance(spec, EncoderSpec):
        cut = replace(spec, n_layers=len(chosen))
    else:
        cut = replace(spec, layers=tuple(spec.layers[i] for i in chosen))
    return cut, Tensors(cast(GGUFFile, _Renamed(file, names))), chosen
