"""Bytes on disk: reading and writing GGUF files, the block formats, and finding a model by its name."""

from quarrel.gguf.blocks import dequantize
from quarrel.gguf.file import GGUFFile, TensorInfo
from quarrel.gguf.formats import FORMATS, BlockFormat, GGMLType, file_type, nbytes
from quarrel.gguf.importance import Entry, ImportanceMatrix, read_importance
from quarrel.gguf.mapped import Mapped
from quarrel.gguf.metadata import REQUIRED, Metadata
from quarrel.gguf.mixes import own_mix
from quarrel.gguf.quantize import quantize
from quarrel.gguf.requantize import requantize
from quarrel.gguf.resolve import Resolved, pull, resolve
from quarrel.gguf.values import ValueType
from quarrel.gguf.vocabulary import check_vocab
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
    "requantize",
    "resolve",
]
