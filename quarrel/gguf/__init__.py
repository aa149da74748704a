"""Bytes on disk: reading and writing GGUF files, the block formats, and finding a model by its name."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from quarrel.gguf.blocks import dequantize
from quarrel.gguf.file import GGUFFile, TensorInfo
from quarrel.gguf.formats import FORMATS, BlockFormat, GGMLType, file_type, nbytes
from quarrel.gguf.mapped import Mapped
from quarrel.gguf.metadata import REQUIRED, Metadata
from quarrel.gguf.quantize import quantize
from quarrel.gguf.resolve import Resolved, pull, resolve
from quarrel.gguf.values import ValueType
from quarrel.gguf.vocabulary import check_vocab

if TYPE_CHECKING:
    from quarrel.gguf.importance import Entry, ImportanceMatrix, read_importance
    from quarrel.gguf.mixes import own_mix
    from quarrel.gguf.writer import GGUFWriter

__all__ = [
    "FORMATS",
    "REQUIRED",
    "BlockFormat",
    "Entry",
    "GGMLType",
    "GGUFFile",
    "GGUFWriter",
    "ImportanceMatrix",
    "Mapped",
    "Metadata",
    "Resolved",
    "TensorInfo",
    "ValueType",
    "check_vocab",
    "dequantize",
    "file_type",
    "nbytes",
    "own_mix",
    "pull",
    "quantize",
    "read_importance",
    "resolve",
]

_HOMES = {
    "Entry": "importance",
    "GGUFWriter": "writer",
    "ImportanceMatrix": "importance",
    "own_mix": "mixes",
    "read_importance": "importance",
}


def __getattr__(name: str) -> object:
    # Imported when first asked for: a model runs without what writes files.
    if name not in _HOMES:
        raise AttributeError(f"module 'quarrel.gguf' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"quarrel.gguf.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
