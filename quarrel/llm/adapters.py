"""LoRA adapters of a model from GGUF files as llama.cpp writes them: read, checked against the model, stacked for its step.

A file names itself an adapter of an architecture (`general.type`, `adapter.type`), and has two matrices for each weight
that it changes: `NAME.lora_a` `[rank, k]` and `NAME.lora_b` `[n, rank]`. The weight then acts as W + alpha / rank * B A.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from quarrel.errors import ModelError, RequestError, UnsupportedModel
from quarrel.gguf import GGMLType, GGUFFile
from quarrel.models import Tensors
from quarrel.ops.contract import Array, RawWeight, WeightRef
from quarrel.ops.lora import Adapted, with_adapters
from quarrel.ops.program import Program
from quarrel.ops.step import WeightSource

MAX_RANK = 1024
_PART = re.compile(r"(.+)\.lora_([ab])")
_STACK = re.compile(r"(.+)\.lora_(a|b\[(\d+):(\d+)\])")


@dataclass(frozen=True)
class Adapters:
    """Some adapters of one model; a request names one by its place in `names`, counted from 1."""

    names: tuple[str, ...]
    pairs: tuple[Mapping[str, tuple[Array, Array]], ...]
    """A and B by weight, float32, the scale in B."""
    adapted: Mapping[str, Adapted]

    @property
    def nbytes(self) -> int:
        """Of the stacks, whose ranks are those of the widest adapter."""
        total = 0
        for name, adapted in self.adapted.items():
            a, b = self._one(name)
            total += 4 * adapted.count * adapted.rank * (a.shape[1] + b.shape[0])
        return total

    def _one(self, name: str) -> tuple[Array, Array]:
        return next(pairs[name] for pairs in self.pairs if name in pairs)

    def applied(self, program: Program) -> Program:
        """The program with them. Raises UnsupportedModel for a weight that is not used as a linear map alone."""
        adapted, found = with_adapters(program, self.adapted)
        for name in sorted(self.adapted.keys() - found):
            owner = next(n for n, pairs in zip(self.names, self.pairs) if name in pairs)
            raise UnsupportedModel(
                f"the adapter {owner} changes {name}, which is not a linear map of every token's row here (embeddings,"
                " experts and the output layer are not): train it without that weight, or merge it into the model"
            )
        return adapted

    def source(self, tensors: WeightSource) -> WeightSource:
        """The model's weights and the stacks."""
        return _Source(self, tensors)

    def stack(self, ref: WeightRef) -> RawWeight:
        """A stack that `with_adapters` refers to: zeros for no adapter, then each in turn."""
        parts = _STACK.fullmatch(ref.name)
        assert parts is not None
        adapted = self.adapted[parts[1]]
        stack = np.zeros((adapted.count, ref.rows // adapted.count, ref.k), np.float32)
        for i, pairs in enumerate(self.pairs, 1):
            if parts[1] in pairs:
                a, b = pairs[parts[1]]
                if parts[2] == "a":
                    stack[i, : len(a)] = a
                else:
                    stack[i, :, : b.shape[1]] = b[int(parts[3]) : int(parts[4])]
        return RawWeight(GGMLType.F32, stack.reshape(ref.rows, ref.k).view(np.uint8), ref.k)


@dataclass(frozen=True)
class _Source:
    adapters: Adapters
    tensors: WeightSource

    def raw(self, ref: WeightRef) -> RawWeight:
        return self.adapters.stack(ref) if _STACK.fullmatch(ref.name) else self.tensors.raw(ref)


def read_adapters(files: Mapping[str, GGUFFile], model: GGUFFile, tensors: Tensors) -> Adapters:
    """The adapters in open files, by name, for the model in another. Raises ModelError for one that does not fit it."""
    pairs = tuple(_read(name, file, model, tensors) for name, file in files.items())
    ranks: dict[str, int] = {}
    for one in pairs:
        for weight, (a, _) in one.items():
            ranks[weight] = max(ranks.get(weight, 0), len(a))
    adapted = {weight: Adapted(len(pairs) + 1, rank) for weight, rank in ranks.items()}
    return Adapters(tuple(files), pairs, adapted)


def _read(name: str, file: GGUFFile, model: GGUFFile, tensors: Tensors) -> dict[str, tuple[Array, Array]]:
    keys = file.metadata
    kind, how = keys.str("general.type", "model"), keys.str("adapter.type", "none")
    if kind != "adapter" or how != "lora":
        raise ModelError(
            f"the adapter {name}: {file.paths[0].name} is a {kind} (adapter.type {how}), wanted a LoRA adapter in GGUF, as"
            " llama.cpp's convert_lora_to_gguf.py writes it"
        )
    own, wanted = keys.str("general.architecture"), model.metadata.str("general.architecture")
    if own != wanted:
        raise ModelError(f"the adapter {name} was made for {own}, and the model is {wanted}: choose one of this model")
    if "adapter.alora.invocation_tokens" in keys:
        raise UnsupportedModel(f"the adapter {name} is an activated LoRA, which begins at certain tokens: use a plain one")
    alpha = keys.float("adapter.lora.alpha", lo=0.0)
    pairs: dict[str, dict[str, str]] = {}
    for tensor in file.tensors:
        part = _PART.fullmatch(tensor)
        if part is None:
            raise UnsupportedModel(f"the adapter {name} holds {tensor}, which is no lora_a or lora_b: wanted nothing else")
        pairs.setdefault(part[1], {})[part[2]] = tensor
    if not pairs:
        raise ModelError(f"the adapter {name} holds no tensors: the file is incomplete, convert it again")
    return {weight: _pair(name, weight, names, alpha, file, tensors) for weight, names in pairs.items()}


def _pair(
    name: str, weight: str, names: Mapping[str, str], alpha: float, file: GGUFFile, tensors: Tensors
) -> tuple[Array, Array]:
    if len(names) != 2:
        raise ModelError(f"the adapter {name} has {'lora_a' if 'a' in names else 'lora_b'} alone for {weight}, wanted both")
    if weight not in tensors:
        raise ModelError(f"the adapter {name} changes {weight}, which the model does not have: choose one of this model")
    shape = tensors.shape(weight)
    a, b = (file.tensors[names[which]].shape for which in "ab")
    if len(shape) != 2 or len(a) != 2 or len(b) != 2 or (b[0], a[1]) != shape or a[0] != b[1] or a[0] > MAX_RANK:
        raise ModelError(
            f"the adapter {name} has matrices {list(b)} and {list(a)} for {weight}, which is {list(shape)}: wanted"
            f" [n, rank] and [rank, k] of that, with a rank up to {MAX_RANK}"
        )
    down, up = (file.array(names[which]) for which in "ab")
    # As llama.cpp does, an alpha of 0 stands for no scale at all.
    with np.errstate(over="ignore"):  # checked below
        up = up * np.float32(alpha / a[0]) if alpha else up
    if not (np.isfinite(down).all() and np.isfinite(up).all()):
        raise ModelError(f"the adapter {name} holds numbers for {weight} that are not finite: convert it again")
    return down, up


def adapter_index(names: Sequence[str], adapter: object) -> int:
    """Which one a request names, counted from 1; 0 for none. Raises RequestError for a name that is not among them."""
    if adapter is None:
        return 0
    if adapter not in names:
        known = f"wanted one of {', '.join(names)}" if names else "and the model was loaded without any"
        raise RequestError(f"there is no adapter {_short(adapter)}, {known}")
    return 1 + list(names).index(str(adapter))


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
