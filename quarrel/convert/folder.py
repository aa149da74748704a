"""A Hugging Face folder as if it were a GGUF file: keys and tensors by GGUF's names, made when they are read."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from quarrel.convert.config import Config, read_json
from quarrel.convert.floats import Scales, float32, scales_of
from quarrel.convert.keys import common_keys
from quarrel.convert.layout import Part, Weight, cut, pieces
from quarrel.convert.mlx import BIASES, SCALES, WORDS, Coding, codings, to_blocks, to_values
from quarrel.convert.modules import Modules, modules
from quarrel.convert.projectors import projector, projector_keys
from quarrel.convert.registry import architecture
from quarrel.convert.rerankers import RANK, is_reranker, reranker
from quarrel.convert.rules import Architecture, weights
from quarrel.convert.safetensors import Checkpoint, Stored
from quarrel.convert.vocabulary import VOCABULARIES, vocabulary_keys
from quarrel.errors import GGUFError, ModelError, UnsupportedModel
from quarrel.gguf import (
    FORMATS,
    GGMLType,
    GGUFFile,
    Metadata,
    TensorInfo,
    ValueType,
    check_vocab,
    nbytes,
    quantize,
)
from quarrel.gguf.mixes import check_mix, types_of
from quarrel.gguf.requantize import PIECE

CONFIG = "config.json"
_PLAIN = {GGMLType.F32: "F32", GGMLType.F16: "F16", GGMLType.BF16: "BF16"}
Decode = Callable[[Coding, np.ndarray, np.ndarray, np.ndarray | None], np.ndarray]
"""Of codes, scales and biases, `to_blocks` or `to_values`."""
_KEPT = 2
"""Matrices of MLX in another order, and made tensors, that stay decoded: pieces of one are read one after another."""


def _writes(said: Mapping[str, Any]) -> bool:
    """Whether the model's class has an output at all: embedding models are saved without."""
    return str((said.get("architectures") or [""])[0]).endswith(("ForCausalLM", "ForConditionalGeneration"))


def is_folder(path: Path) -> bool:
    return path.is_dir() and (path / CONFIG).is_file()


class FolderFile(GGUFFile):
    """A model in safetensors. F32, F16 and BF16 stay as they are, 8-bit floats become BF16, MXFP4 stays; with `mix`, a
    name of `gguf.MIXES`, weights become what `quarrel quantize` makes of them, each time that they are read."""

    def __init__(self, folder: Path, mix: str | None = None, *, mmproj: bool = False) -> None:
        """mmproj: what sees, in place of the text model.

        Raises ModelError, UnsupportedModel and ModelNotFound; RequestError for a mix that is none.
        """
        if mix is not None:
            check_mix(mix, None, "quantize")
        said = read_json(folder / CONFIG)
        config = Config(said, folder / CONFIG)
        arch, config = projector(config) if mmproj else (architecture(config), config)
        config = config.with_defaults(arch.defaults)
        self._block = _quantization(config)
        behind = Modules() if mmproj else modules(folder)
        self._checkpoint = Checkpoint(folder, behind.named)
        try:
            self.config = config = config if mmproj else config.and_predictors(self._checkpoint.tensors)
            if is_reranker(folder, arch, config):
                rows = max(
                    (t.shape[0] for n, t in self._checkpoint.tensors.items() if n.endswith("embed_tokens.weight")),
                    default=0,
                )
                arch = reranker(arch, config, vocabulary_keys(folder, arch.name, config, rows)["tokenizer.ggml.tokens"])
            self.paths = (folder,)
            named = (*VOCABULARIES, "tokenizer_config.json", "chat_template.jinja")
            beside = tuple(folder / name for name in (CONFIG, *(() if mmproj else named)) if (folder / name).is_file())
            self.files = (*beside, *self._checkpoint.paths)
            self.version, self.alignment = 3, 32
            self._codings = codings(config, self._checkpoint.tensors)
            found = weights(arch, config, self._checkpoint.tensors, self._checkpoint.view, self._codings)
            self._weights = {w.name: w for w in found}
            read = (self._checkpoint.tensors[part.name] for w in found for part in w.parts)
            self._scales = {t.name: self._scales_of(t) for t in read if t.dtype.startswith("F8")}
            self._show(found)
            if mmproj:
                self.metadata = _projector(folder, arch, config, self.tensors)
            else:
                self.metadata = _metadata(folder, arch, config, self.tensors, behind)
                check_vocab(self.metadata, self.tensors)
                own = arch.decoder and said.get("tie_word_embeddings") is False and behind.pooling is None
                if own and _writes(said) and not any(t == "output.weight" or t.startswith("cls.") for t in self.tensors):
                    raise ModelError("tie_word_embeddings is false, but there is no lm_head.weight: download it whole")
            if mix is not None:
                types = types_of(self, mix)
                self._show([replace(w, type=types[w.name]) for w in found])
            self._lock, self._making = threading.Lock(), threading.Lock()
            self._decoded: OrderedDict[str, np.ndarray] = OrderedDict()
        except BaseException as error:
            self._checkpoint.close()
            if isinstance(error, ModelError) and str(folder) not in str(error):
                raise type(error)(f"{folder}: {error}") from None
            raise

    def _show(self, found: Sequence[Weight]) -> None:
        self.tensors = MappingProxyType(
            {
                w.name: TensorInfo(w.name, w.type, w.shape[::-1], 0, nbytes(w.type, w.shape[::-1]), number)
                for number, w in enumerate(found)
            }
        )

    def raw(self, name: str) -> np.ndarray:
        weight, info = self._weight(name), self.tensors[name]
        block = FORMATS[info.type]
        shape = (*info.shape[:-1], info.dims[0] // block.elements * block.nbytes)
        rows = info.nbytes // shape[-1]
        if self._as_stored(weight, info.type):
            return self.rows(name, 0, rows).reshape(shape)
        with self._making:
            if name not in self._decoded:
                step = max(1, PIECE // weight.k)
                with ThreadPoolExecutor(os.cpu_count()) as pool:
                    made = pool.map(lambda i: self.rows(name, i, min(i + step, rows)), range(0, rows, step))
                    self._keep(name, np.concatenate(list(made)))
            return self._decoded[name].reshape(shape)

    def rows(self, name: str, first: int, last: int) -> np.ndarray:
        weight, type = self._weight(name), self.tensors[name].type
        if self._in_blocks(weight, type):
            return self._coded(weight, first, last, to_blocks)
        if self._as_stored(weight, type):
            found = [cut(self._view(part), a, b, weight.k) for part, a, b in pieces(weight.parts, first, last)]
            rows = found[0] if len(found) == 1 else np.concatenate(found)
            return np.ascontiguousarray(rows).view(np.uint8)
        try:
            return quantize(self.values(name, first, last), type)
        except GGUFError as error:
            raise GGUFError(f"the tensor {name}: {error}") from None

    def values(self, name: str, first: int, last: int) -> np.ndarray:
        weight = self._weight(name)
        if weight.constant is not None:
            return weight.constant.reshape(-1, weight.k)[first:last]
        if weight.coding is not None:
            floats = self._coded(weight, first, last, to_values)
        else:
            found = [self._floats(part, a, b, weight.k) for part, a, b in pieces(weight.parts, first, last)]
            floats = found[0] if len(found) == 1 else np.concatenate(found)
        return floats if weight.change is None else weight.change(floats, first).astype(np.float32, copy=False)

    def prefetch(self, name: str) -> None:
        self._advise("MADV_WILLNEED", name)

    def release(self, name: str) -> None:
        self._advise("MADV_DONTNEED", name)

    def close(self) -> None:
        self._checkpoint.close()

    def _advise(self, advice: str, name: str) -> None:
        for part in self._weight(name).parts:
            self._checkpoint.advise(advice, part.name)

    def _weight(self, name: str) -> Weight:
        if name not in self._weights:
            raise GGUFError(f"{self.paths[0]} has no tensor {name!r}")
        return self._weights[name]

    def _as_stored(self, weight: Weight, type: GGMLType) -> bool:
        """Whether the rows are bytes of the folder's files."""
        dtype = self._checkpoint.tensors[weight.parts[0].name].dtype if weight.parts else None
        return weight.change is None and weight.coding is None and _PLAIN.get(type) == dtype

    def _in_blocks(self, weight: Weight, type: GGMLType) -> bool:
        """Whether codes become blocks of the type as they are."""
        coding = weight.coding
        return coding is not None and weight.change is None and type is coding.type(weight.k) and type not in _PLAIN

    def _view(self, part: Part) -> np.ndarray:
        return part.view(self._checkpoint.view(part.name), self.config)

    def _coded(self, weight: Weight, first: int, last: int, make: Decode) -> np.ndarray:
        """Rows of a weight whose codes are in the order of its rows."""
        coding = weight.coding
        assert coding is not None

        def beside(parts: Sequence[Part]) -> np.ndarray | None:
            found = [
                self._numbers(part.name, cut(self._view(part), a, b, weight.k // coding.group))
                for part, a, b in pieces(parts, first, last)
            ]
            return np.concatenate(found) if found else None

        scales = beside(weight.scales)
        assert scales is not None
        codes = []
        for part, a, b in pieces(weight.parts, first, last):
            view = self._view(part)
            words = cut(view, a, b, weight.k * coding.bits // 8 // view.itemsize)
            codes.append(np.ascontiguousarray(words).view(np.uint8))
        return make(coding, np.concatenate(codes), scales, beside(weight.biases))

    def _numbers(self, name: str, stored: np.ndarray) -> np.ndarray:
        dtype = self._checkpoint.tensors[name].dtype
        return stored if dtype == "U8" else float32(stored, dtype)

    def _whole(self, name: str) -> np.ndarray:
        """The values of a weight that MLX quantised, whose columns get another order."""
        stored, base = self._checkpoint.tensors[name], name.removesuffix(WORDS)
        view = self._checkpoint.view

        def flat(name: str) -> np.ndarray:
            array = view(name)
            return self._numbers(name, array.reshape(-1, array.shape[-1]))

        coding = self._codings[name]
        codes = np.ascontiguousarray(view(name)).view(np.uint8)
        biases = flat(base + BIASES) if coding.biased else None
        whole = to_values(coding, codes.reshape(-1, codes.shape[-1]), flat(base + SCALES), biases)
        return whole.reshape(*stored.shape[:-1], -1)

    def _floats(self, part: Part, first: int, last: int, k: int) -> np.ndarray:
        dtype = self._checkpoint.tensors[part.name].dtype
        if part.name not in self._codings:
            values = float32(cut(self._view(part), first, last, k), dtype)
            for scales in self._scales.get(part.name, ()):
                if scales.numbers is None:
                    values *= scales.values
                    continue
                numbers = [cut(part.view(n, self.config), first, last, k) for n in scales.numbers]
                values *= np.take(scales.values, numbers[0] if len(numbers) == 1 else np.add(*numbers))
            return values
        with self._lock:
            if part.name not in self._decoded:
                self._keep(part.name, self._whole(part.name))
            whole = self._decoded[part.name]
        return cut(part.view(whole, self.config), first, last, k)

    def _scales_of(self, stored: Stored) -> list[Scales]:
        """Of 8-bit floats."""
        found = []
        for name in (f"{stored.name}_scale_inv", f"{stored.name}_scale"):
            if name in self._checkpoint.tensors:
                scale = float32(self._checkpoint.view(name), self._checkpoint.tensors[name].dtype)
                found.append(scales_of(stored.shape, scale, self._block, stored.name))
        return found

    def _keep(self, name: str, values: np.ndarray) -> None:
        self._decoded[name] = values
        while len(self._decoded) > _KEPT:
            self._decoded.popitem(last=False)


def _quantization(c: Config) -> tuple[int, int]:
    """Rows and columns of a block of 8-bit floats; raises UnsupportedModel for weights that are quantised otherwise."""
    said = c.get("quantization_config", default={})
    if not isinstance(said, dict):
        raise c.refusal("quantization_config", said, "an object")
    method, kind = said.get("quant_method"), said.get("format", "")
    floats = kind in ("float-quantized", "naive-quantized") if method == "compressed-tensors" else True
    if method not in (None, "fp8", "fbgemm_fp8", "modelopt", "mxfp4", "compressed-tensors") or not floats:
        raise UnsupportedModel(
            f"the weights are quantised already, by {f'{method} {kind}'.strip()[:60]}, and would lose more: take the"
            " original model in BF16, F16, F32 or FP8"
        )
    block = said.get("weight_block_size") or [128, 128]
    if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
        raise c.refusal("weight_block_size", block, "two sizes")
    return block[0], block[1]


_FLOAT_KEYS = (
    "freq_base",
    "freq_base_swa",
    "factor",
    "multiplier",
    "scale",
    "epsilon",
    "softcapping",
    "beta_fast",
    "beta_slow",
)


def _projector(folder: Path, arch: Architecture, c: Config, tensors: Any) -> Metadata:
    blocks = {name.split(".")[2] for name in tensors if name.startswith("v.blk.")}
    if len(blocks) != arch.blocks(c):
        raise ModelError(
            f"{c.path.name} tells of {arch.blocks(c)} layers that see, but {len(blocks)} are there: download it whole"
        )
    return Metadata(projector_keys(folder, arch, c))


def _metadata(folder: Path, arch: Architecture, c: Config, tensors: Any, behind: Modules) -> Metadata:
    keys: dict[str, Any] = {
        "general.architecture": arch.name,
        "general.type": "model",
        "general.name": folder.resolve().name,
        "general.quantization_version": 2,
    }
    own = {"block_count": arch.blocks(c), **common_keys(c), **behind.keys, **arch.keys(c)}
    for name in ("dense_2", "dense_3"):
        if (dense := tensors.get(f"{name}.weight")) is not None:
            own |= {f"{name}_feat_in": dense.dims[0], f"{name}_feat_out": dense.dims[1]}
    for key, value in own.items():
        if value is not None:
            exact = float(value) if key.endswith(_FLOAT_KEYS) and not isinstance(value, list) else value
            keys[key if key.startswith("tokenizer.") else f"{arch.name}.{key}"] = exact
    if own.get("pooling_type") == RANK and not any(name.startswith("cls.") for name in tensors):
        raise ModelError("it is a reranker, and there is no classifier among the weights: download the model whole")
    if "token_embd.weight" not in tensors:
        raise ModelError("there is no token embedding among the weights: download the model whole")
    rows = keys[f"{arch.name}.vocab_size"] = tensors["token_embd.weight"].dims[1]
    charsmap = {"tokenizer.ggml.precompiled_charsmap": ValueType.UINT8}
    return Metadata({**keys, **vocabulary_keys(folder, arch.name, c, rows)}, charsmap)
