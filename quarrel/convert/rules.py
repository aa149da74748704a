"""From the tensors of a folder to those of a GGUF file: names, stacks of experts, and the rules of an architecture."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np

from quarrel.convert.config import Config
from quarrel.convert.layout import Change, Part, View, Weight, interleaved, nth, same, wide_along
from quarrel.convert.mlx import BIASES, HF_MXFP4, SCALES, WORDS, Coding
from quarrel.convert.safetensors import Stored
from quarrel.errors import ModelError, UnsupportedModel
from quarrel.gguf import GGMLType

BEYOND_TEXT = re.compile(
    r"(.*\.)?(visual|vision\w*|audio\w*|talker|token2wav|code2wav|vit|vpm|siglip2|conformer|merger|resampler|\w*projector\w*"
    r"|image_newline|patch_\w+|embed_vision|embed_audio|sound_\w+)(\..*)?|mlp\d.*"
)
"""Tensors of what sees or hears: a file of its own."""
IGNORED = re.compile(
    r".*(\.masked_bias|\.attention\.bias|rotary_emb\.inv_freq|\.input_scale|\.[kv]_scale|activation_scale)"
)
_EXPERT = re.compile(r"(.*\.(?:experts|altup_\w*projections))\.(\d+)\.((?:\w+\.)?weight)")
OF_MLX = (
    (r"(?:block_sparse_moe|mlp|feed_forward)\.switch_mlp\.", "mlp.experts."),
    (r"mixer\.switch_mlp\.fc1\.", "mixer.experts.up_proj."),
    (r"mixer\.switch_mlp\.fc2\.", "mixer.experts.down_proj."),
)
"""What MLX calls stacks of experts, and what others do."""
_FLOAT = re.compile(
    r".*_norm\.weight|.*(ffn_gate_inp(_shexp)?|position_embd|patch_embd|token_types|ssm_conv1d|shortconv\.conv)\.weight"
)
_TYPES = {"BF16": GGMLType.BF16, "F16": GGMLType.F16, "F8_E4M3": GGMLType.BF16, "F8_E5M2": GGMLType.BF16}
_SUFFIXES = (".weight", ".bias")


@dataclass(frozen=True)
class Out:
    """What becomes of a stored tensor.

    name: as HF or GGUF has it, `\\2` being the pattern's first group, and behind an @ what follows the block in GGUF's.
    views: the order of elements, in parts. like: in the stored one's shape, which the order does not tell. change: other
    values.
    """

    name: str
    views: tuple[View, ...] = (same,)
    like: bool = False
    change: Callable[[Config], Change | None] | None = None


@dataclass(frozen=True)
class Rule:
    """For the tensors of whose name the pattern is the end."""

    pattern: str
    outs: tuple[Out, ...]


def rule(pattern: str, *outs: Out) -> Rule:
    return Rule(pattern, outs)


@dataclass(frozen=True)
class Architecture:
    """`name` is GGUF's. `names`: the architecture of the gguf package whose names of tensors these are, if another one.
    `rules`: the first one that fits is applied. `keys` gives what is beyond the common ones, None being none at all."""

    name: str
    rules: tuple[Rule, ...] = ()
    keys: Callable[[Config], Mapping[str, Any]] = field(default=lambda c: {})
    names: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What config.json may leave out, as transformers knows it."""
    blocks: Callable[[Config], int] = field(default=lambda c: c.layers)
    rename: Callable[[Config], tuple[tuple[str, str], ...]] = field(default=lambda c: ())
    """Pairs of a pattern and what takes its place, in the names."""
    drop: str | None = None
    extra: Callable[[Config], Mapping[str, np.ndarray]] = field(default=lambda c: {})
    """Tensors that no stored one gives."""
    decoder: bool = True
    kept: str | None = None
    """A pattern of the only tensors that are of interest; by default all but those of what sees or hears."""


PLUS_ONE: Callable[[Config], Change | None] = lambda c: lambda x, first: x + np.float32(1)  # noqa: E731
ADDS_ONE = rule(r"(norm\w*\.weight)", Out(r"\2", change=PLUS_ONE))
ROTATED = (
    rule(r"(q_proj\.(?:weight|bias))", Out(r"\2", (interleaved(lambda c: c.heads),), like=True)),
    rule(r"(k_proj\.(?:weight|bias))", Out(r"\2", (interleaved(lambda c: c.kv_heads),), like=True)),
)


def all_blocks(c: Config) -> int:
    return c.layers + c.predictors


def gate_up(pattern: str, base: str, *, inner: View = same) -> Rule:
    """A tensor that holds gates, then ups."""
    views = [nth(i, 2, inner) for i in (0, 1)]
    return rule(pattern, Out(f"{base}.gate_proj.weight", (views[0],)), Out(f"{base}.up_proj.weight", (views[1],)))


FUSED_EXPERTS = (
    gate_up(r"mlp\.experts\.gate_up_proj(?:\.weight)?", "mlp.experts"),
    rule(r"mlp\.experts\.down_proj(?:\.weight)?", Out("mlp.experts.down_proj.weight")),
)
TRANSPOSED_EXPERTS = (
    gate_up(r"\.experts\.gate_up_proj", ".experts", inner=wide_along(-1)),
    rule(r"\.experts\.down_proj", Out(".experts.down_proj.weight", (wide_along(-2),))),
)
"""As they are published; transformers 5 saves them the other way round."""


def weights(
    arch: Architecture,
    config: Config,
    stored: Mapping[str, Stored],
    bits: Callable[[str], np.ndarray],
    coded: Mapping[str, Coding] = MappingProxyType({}),
) -> list[Weight]:
    """The tensors of the GGUF file, in its order; `coded` are those that MLX quantised.

    Raises UnsupportedModel for one that has no place.
    """
    saved_by_mlx = _saved_by_mlx(stored)
    if saved_by_mlx and arch.name == "falcon-h1":
        raise UnsupportedModel("MLX has multiplied the weights by factors of config.json: take the original model")
    names = _table(arch.names or arch.name, arch.blocks(config))
    found = {
        name: Weight(name, GGMLType.F32, values.shape, constant=values.astype(np.float32))
        for name, values in arch.extra(config).items()
    }
    beside = {name.removesuffix(WORDS) + end for name in coded for end in (SCALES, BIASES)}
    for name, sources in _stacked(arch, config, [s for s in stored if s not in beside]).items():
        first, coding = stored[sources[0]], coded.get(sources[0])
        if any(stored[s].shape != first.shape or stored[s].dtype != first.dtype or coded.get(s) != coding for s in sources):
            raise ModelError(
                f"the experts {sources[0]} and others like it differ in shape or type: download the model again"
            )
        for out, target in _outs(arch, name):
            if saved_by_mlx and out.change is PLUS_ONE:
                out = replace(out, change=None)  # MLX added it when it saved
            weight = _weight(out, names(target), config, sources, first, bits, coding)
            if weight.name in found:
                raise ModelError(f"two tensors of the folder become {weight.name}, the second one is {sources[0]}")
            found[weight.name] = weight
    return sorted(found.values(), key=lambda w: _order(w.name))


def _order(name: str) -> tuple[int, str]:
    block = re.match(r"blk\.(\d+)\.", name)
    return (int(block[1]), name) if block else (-1 if name.startswith(("token", "rope", "position")) else 1 << 30, name)


def _saved_by_mlx(stored: Mapping[str, Stored]) -> bool:
    """Of models with recurrent layers, whose filters MLX turns."""
    filters = [t.shape for name, t in stored.items() if name.endswith("conv1d.weight") and len(t.shape) == 3]
    return any(shape[2] == 1 < shape[1] for shape in filters)


def _stacked(arch: Architecture, config: Config, stored: Sequence[str]) -> dict[str, list[str]]:
    """Names in one spelling, with the stored tensors that make each up: all experts of a layer, or one."""
    bare = arch.decoder and arch.kept is None and "embed_tokens.weight" in stored
    drop = re.compile(arch.drop) if arch.drop else None
    kept = re.compile(arch.kept) if arch.kept else None
    tied = arch.decoder and config.get("tie_word_embeddings") is True
    experts: dict[str, dict[int, str]] = {}
    for source in stored:
        if source.endswith(("_scale", "_scale_inv")) and source.rpartition("_scale")[0] in stored:
            continue  # of 8-bit floats
        name = source.replace("language_model.", "").replace("e_score_correction_bias", "e_score_correction.bias")
        for pattern, other in OF_MLX:
            name = re.sub(pattern, other, name)
        if kept is not None and not kept.fullmatch(name):
            continue
        for pattern, other in arch.rename(config):
            name = re.sub(pattern, other, name)
        beyond = kept is None and BEYOND_TEXT.fullmatch(name)
        if IGNORED.fullmatch(name) or beyond or (drop and drop.fullmatch(name)):
            continue
        if tied and name.endswith("lm_head.weight"):
            continue
        if bare and not name.startswith(("model.", "lm_head.", "score.", "dense_")):
            name = f"model.{name}"
        expert = _EXPERT.fullmatch(name)
        key, number = (f"{expert[1]}.{expert[3]}", int(expert[2])) if expert else (name, -1)
        if number in experts.setdefault(key, {}):
            raise ModelError(f"the tensors {experts[key][number]} and {source} are the same one")
        experts[key][number] = source
    for key, numbered in experts.items():
        if -1 not in numbered and sorted(numbered) != list(range(len(numbered))):
            raise ModelError(f"of {key} there are the experts {str(sorted(numbered))[:80]}: download the model whole")
    counts = {key: len(numbered) for key, numbered in experts.items() if -1 not in numbered}
    wanted = config.get("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    for key, count in counts.items():
        if isinstance(wanted, int) and count != wanted and ".experts" in key:
            raise ModelError(
                f"{key} has {count} experts, but {config.path.name} tells of {wanted}: download the model whole"
            )
    return {key: [numbered[i] for i in sorted(numbered)] for key, numbered in experts.items()}


def _outs(arch: Architecture, name: str) -> Iterable[tuple[Out, str]]:
    for each in arch.rules:
        if found := re.fullmatch(f"(.*?){each.pattern}", name):
            block = re.search(r"\.(\d+)\.", f".{found[1]}")
            to = {"@": f"blk.{block[1] if block else ''}.", "": found[1]}
            return [(o, to["@" * o.name.startswith("@")] + found.expand(o.name.removeprefix("@"))) for o in each.outs]
    return [(Out(name), name)]


def _weight(
    out: Out,
    name: str,
    config: Config,
    sources: list[str],
    first: Stored,
    bits: Callable[[str], np.ndarray],
    coding: Coding | None,
) -> Weight:
    like, change = bits(first.name), out.change(config) if out.change else None
    if coding is not None:
        like = np.broadcast_to(np.uint8(0), (*like.shape[:-1], like.shape[-1] * 32 // coding.bits))
    codes = name.endswith("|mxfp4")
    try:
        seen = [view(like, config) for view in out.views]
        k = like.shape[-1] if out.like else seen[0].shape[-1]
        shape = like.shape if out.like else seen[0].shape if len(seen) == 1 else (sum(a.size for a in seen) // k, k)
        if sum(a.size for a in seen) != math.prod(shape):
            raise ValueError
    except (ValueError, ZeroDivisionError, IndexError):
        raise ModelError(
            f"the tensor {first.name} is {list(first.shape)}, which does not fit the sizes that {config.path.name} tells"
        ) from None
    if not shape or not all(shape):
        raise ModelError(f"the tensor {first.name} is {list(first.shape)}, which holds nothing")
    if codes:
        return _coded(name.removesuffix("|mxfp4"), out, first, shape, seen[0])
    if coding is None and first.dtype not in ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"):
        raise UnsupportedModel(f"the tensor {first.name} has type {first.dtype}, which holds no weights of a float model")
    parts = [Part(s, view, a.size // k) for s in sources for view, a in zip(out.views, seen)]
    shape = (len(sources), *shape) if len(sources) > 1 or _EXPERT.fullmatch(first.name) else shape
    plain = len(shape) < 2 or not name.endswith(".weight") or _FLOAT.fullmatch(name) or change
    type = GGMLType.F32 if plain else _TYPES.get(first.dtype, GGMLType.F32)
    if coding is None:
        return Weight(name, type, shape, tuple(parts), change)
    if not _keeps_groups(out, config, seen, coding, first.name, bits):
        return Weight(name, type if plain else GGMLType.F16, shape, tuple(parts), change)
    scales, biases = (
        tuple(replace(part, name=part.name.removesuffix(WORDS) + end) for part in parts) for end in (SCALES, BIASES)
    )
    type = type if plain else coding.type(k)
    return Weight(name, type, shape, tuple(parts), change, None, coding, scales, biases if coding.biased else ())


def _keeps_groups(
    out: Out, config: Config, seen: list[np.ndarray], coding: Coding, name: str, bits: Callable[[str], np.ndarray]
) -> bool:
    """Whether the views order whole groups only: then words and scales take the same order as values."""
    for stored, size in ((name, 32 / coding.bits), (name.removesuffix(WORDS) + SCALES, coding.group)):
        try:
            packed = [view(bits(stored), config) for view in out.views]
        except (ValueError, ZeroDivisionError, IndexError):
            return False
        if any(a.shape[:-1] != b.shape[:-1] or a.shape[-1] * size != b.shape[-1] for a, b in zip(packed, seen)):
            return False
    return True


def _coded(name: str, out: Out, first: Stored, shape: tuple[int, ...], seen: np.ndarray) -> Weight:
    """Codes [experts, rows, blocks, 16] with exponents beside them."""
    if first.dtype != "U8" or len(shape) != 4 or shape[-1] != 16:
        raise ModelError(f"the tensor {first.name} is {first.dtype} {list(first.shape)}, wanted codes of MXFP4")
    rows, blocks = shape[0] * shape[1], shape[2]
    part, scale = (Part(n, out.views[0], rows) for n in (first.name, first.name.replace("_blocks", "_scales")))
    return Weight(name, GGMLType.MXFP4, (*shape[:2], 32 * blocks), (part,), coding=HF_MXFP4, scales=(scale,))


@functools.cache
def _architectures() -> dict[str, Any]:
    return {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}


def _table(name: str, blocks: int) -> Callable[[str], str]:
    """GGUF's name of a tensor, by the gguf package's table."""
    table = gguf.get_tensor_name_map(_architectures()[name], blocks)

    def named(name: str) -> str:
        if name.startswith(("blk.", "v.", "mm.", "cls.output.")):
            return name
        found: str | None = table.get_name(name, try_suffixes=_SUFFIXES)
        if found is None:
            raise UnsupportedModel(
                f"the tensor {name} has no place in this architecture: results without it would be wrong"
            )
        return found

    return named
