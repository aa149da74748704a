"""Which type each tensor of a model gets, by llama.cpp's names of mixes.

A mix is what `llama-quantize` calls so: one type for most matrices, a finer one for the output and, in the mixes with an M,
for a part of the values' and the last maps (the first and last eighth of the layers, and every third between). Vectors,
norms, routers, convolutions and tables of positions stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from quarrel.errors import RequestError
from quarrel.gguf.file import GGUFFile
from quarrel.gguf.formats import FORMATS, GGMLType
from quarrel.gguf.importance import ImportanceMatrix
from quarrel.gguf.metadata import Metadata

_T = GGMLType
Q2_K_S, Q3_K_M, IQ3_M, UNWEIGHTED = 21, 12, 27, (25, 30)
LOWEST = (19, 20, 24, 28, 29, 31)
"""Those of IQ1 and IQ2, whose rules are their own."""


@dataclass(frozen=True)
class Mix:
    """`base` for most matrices, `finer` for some of the values' and last maps, `first` for those of the first layers;
    `number` is llama.cpp's of the mix. `values` and `lone`: the values' maps, with four or more heads of queries for each
    and with fewer. `last`, `begin`: the last maps, those of the first eighth of the layers. `out`: of attention. `keys`:
    and queries. `eight`: keys and values of eight experts. `middle`: the feed-forward's first maps, but for the first and
    last eighth. `output`, `embedding`: the model's own, the former where both are one."""

    base: GGMLType
    number: int
    finer: GGMLType | None = None
    first: GGMLType | None = None
    values: GGMLType | None = None
    lone: GGMLType | None = None
    last: GGMLType | None = None
    begin: GGMLType | None = None
    out: GGMLType | None = None
    keys: GGMLType | None = None
    middle: GGMLType | None = None
    eight: GGMLType = _T.Q8_0
    output: GGMLType = _T.Q6_K
    embedding: GGMLType | None = None

    @property
    def wants_importance(self) -> bool:
        return self.number == Q2_K_S or bool({self.base, self.keys} & WANTING)


WANTING = frozenset({_T.IQ1_S, _T.IQ1_M, _T.IQ2_XXS, _T.IQ2_XS, _T.IQ2_S, _T.IQ3_XXS})
"""Types that llama.cpp makes with importance only."""


def _lowest(base: GGMLType, number: int, finer: GGMLType, out: GGMLType | None, embedding: GGMLType) -> Mix:
    parts = {"values": _T.Q4_K, "eight": _T.Q4_K, "output": _T.Q5_K}
    return Mix(base, number, lone=finer, begin=finer, out=out, embedding=embedding, **parts)


MIXES: Mapping[str, Mix] = MappingProxyType(
    {
        "f32": Mix(_T.F32, 0),
        "f16": Mix(_T.F16, 1),
        "bf16": Mix(_T.BF16, 32),
        "q8_0": Mix(_T.Q8_0, 7),
        "q4_0": Mix(_T.Q4_0, 2),
        "q4_1": Mix(_T.Q4_1, 3),
        "q5_0": Mix(_T.Q5_0, 8),
        "q5_1": Mix(_T.Q5_1, 9),
        "q4_k_s": Mix(_T.Q4_K, 14, first=_T.Q5_K),
        "q4_k_m": Mix(_T.Q4_K, 15, _T.Q6_K),
        "q5_k_s": Mix(_T.Q5_K, 16),
        "q5_k_m": Mix(_T.Q5_K, 17, _T.Q6_K),
        "q6_k": Mix(_T.Q6_K, 18),
        "q2_k": Mix(_T.Q2_K, 10, values=_T.Q4_K, lone=_T.Q3_K, last=_T.Q3_K, out=_T.Q3_K),
        "q2_k_s": Mix(_T.Q2_K, Q2_K_S, values=_T.Q4_K, begin=_T.Q4_K),
        "q3_k_s": Mix(_T.Q3_K, 11),
        "q3_k_m": Mix(_T.Q3_K, Q3_K_M, values=_T.Q4_K, lone=_T.Q4_K, last=_T.Q4_K, out=_T.Q4_K),
        "q3_k_l": Mix(_T.Q3_K, 13, values=_T.Q5_K, lone=_T.Q5_K, last=_T.Q5_K, out=_T.Q5_K),
        "iq1_s": _lowest(_T.IQ1_S, 24, _T.Q2_K, _T.IQ2_XXS, _T.Q2_K),
        "iq1_m": _lowest(_T.IQ1_M, 31, _T.Q2_K, _T.IQ2_XXS, _T.Q2_K),
        "iq2_xxs": _lowest(_T.IQ2_XXS, 19, _T.Q2_K, None, _T.Q2_K),
        "iq2_xs": _lowest(_T.IQ2_XS, 20, _T.Q2_K, None, _T.Q2_K),
        "iq2_s": _lowest(_T.IQ2_XS, 28, _T.IQ3_S, _T.IQ3_S, _T.IQ3_S),
        "iq2_m": _lowest(_T.IQ2_S, 29, _T.IQ3_S, _T.IQ3_S, _T.IQ3_S),
        "iq3_xxs": Mix(_T.IQ3_XXS, 23, values=_T.Q4_K, out=_T.IQ3_S, keys=_T.IQ2_S, output=_T.Q5_K, embedding=_T.IQ3_S),
        "iq3_xs": Mix(_T.IQ3_S, 22, values=_T.Q4_K, keys=_T.IQ3_XXS, middle=_T.IQ3_XXS),
        "iq3_s": Mix(_T.IQ3_S, 26, values=_T.Q4_K),
        "iq3_m": Mix(_T.IQ3_S, IQ3_M, values=_T.Q4_K, lone=_T.Q4_K, begin=_T.Q4_K, out=_T.Q4_K),
        "iq4_nl": Mix(_T.IQ4_NL, 25, values=_T.Q5_K, begin=_T.Q5_K),
        "iq4_xs": Mix(_T.IQ4_XS, 30, values=_T.Q5_K, begin=_T.Q5_K),
    }
)
WHOLE = (_T.F32, _T.F16, _T.BF16)
_NARROW = {
    _T.Q2_K: _T.Q4_0,
    _T.Q3_K: _T.Q4_0,
    _T.Q4_K: _T.Q5_0,
    _T.Q5_K: _T.Q5_1,
    _T.Q6_K: _T.Q8_0,
    **dict.fromkeys((*WANTING, _T.IQ3_S, _T.IQ4_XS), _T.IQ4_NL),
}
"""What takes rows that are no multiple of 256, as in llama.cpp."""
_KEPT = re.compile(
    r"norm|^cls\.|ffn_gate_inp|ssm_conv1d|shortconv\.conv|position_embd|patch_embd|token_types|rope_|altup|laurel|per_layer_model_proj|\.scale"
)
_PARTS = ("attn_v", "attn_qkv", "ffn_down", "ffn_down_exps", "ffn_down_shexp")
_FINER = re.compile(rf"blk\.(\d+)\.({'|'.join(_PARTS)})\.weight")
_ATTENTION = re.compile(r"attn_(v|k|qkv)\.weight")
_QUERIES = re.compile(r"attn_[qk]\.weight")
_INNER = re.compile(r"blk\.(\d+)\.ffn_(?:gate|up)\w*\.weight")
_PLAIN_OUT = (13, Q2_K_S)
EIGHT = 8
"""Experts of Mixtral, for which llama.cpp keeps keys and values in 8 bits."""


def check_mix(mix: str, importance: ImportanceMatrix | None, parameter: str = "type") -> None:
    """Raises RequestError for a name of none, or one that wants importance where there is none."""
    name = mix.lower()
    if name not in MIXES:
        raise RequestError(f"the type is {mix!r}, wanted one of {', '.join(MIXES)}", parameter)
    if MIXES[name].wants_importance and importance is None:
        raise RequestError(
            f"{name} wants an importance matrix: make one with `quarrel imatrix` and give it to `quarrel quantize` with"
            " --imatrix, or take q2_k or iq3_s",
            "imatrix",
        )


def own_mix(source: GGUFFile) -> str:
    """The mix that keeps most weights of a model in 16 or 32 bits as they are."""
    sizes = dict.fromkeys(("bf16", "f16", "f32"), 0)
    for info in source.tensors.values():
        name = info.type.name.lower()
        if len(info.dims) > 1 and name in sizes:
            sizes[name] += info.nbytes
    return max(sizes, key=lambda name: sizes[name])


def types_of(source: GGUFFile, name_of_mix: str, *, again: bool = False, weighted: bool = False) -> dict[str, GGMLType]:
    """Which type each tensor gets. MXFP4 stays, as models were trained in it, unless `again`. weighted: with importance."""
    mix = MIXES[name_of_mix.lower()]
    keys, tied = source.metadata, "output.weight" not in source.tensors
    arch = keys.str("general.architecture")
    n_layers, n_experts = (keys.int(f"{arch}.{key}", 0) for key in ("block_count", "expert_count"))
    heads, kv_heads = (_one(keys, f"{arch}.attention.head_count{end}") for end in ("", "_kv"))
    shared = heads // max(1, kv_heads or heads)  # heads of queries for each of values
    order = {
        part: sorted(int(f[1]) for n in source.tensors if (f := _FINER.fullmatch(n)) and f[2] == part) for part in _PARTS
    }
    downs = sorted((int(f[1]), n) for n in source.tensors if "ffn_down" in n and (f := _FINER.fullmatch(n)))
    types: dict[str, GGMLType] = {}
    kept = (_T.I32, _T.I64) if again else (_T.I32, _T.I64, _T.MXFP4)
    for name, info in source.tensors.items():
        wanted, found = mix.base, _FINER.fullmatch(name)
        if len(info.dims) < 2 or not name.endswith(".weight") or _KEPT.search(name) or info.type in kept:
            wanted = info.type
        elif mix.base not in (*WHOLE, _T.Q8_0):
            if name in ("token_embd.weight" if tied else "output.weight", "per_layer_token_embd.weight"):
                wanted = _T.Q8_0 if info.dims[0] % FORMATS[mix.output].elements else mix.output
            elif name == "token_embd.weight":
                wanted = mix.embedding or mix.base
            elif n_experts == EIGHT and _ATTENTION.search(name):  # they share few weights with each other
                wanted = mix.eight
            elif "attn_output" in name and mix.base in _SMALL:
                wanted = _T.Q5_K if n_experts == EIGHT and mix.number not in _PLAIN_OUT else mix.out or mix.base
            elif mix.keys is not None and _QUERIES.search(name):
                wanted = mix.keys
            elif mix.number in LOWEST and found:
                spread = shared < 4 and n_experts < 4
                begins = "ffn" in name and downs.index((int(found[1]), name)) < n_layers // 8
                values = mix.lone if spread else mix.values
                wanted = (mix.begin if begins else mix.base) if "ffn" in name else values  # type: ignore[assignment]
            elif found:
                i = int(found[1]) if n_experts > 1 and "ffn" in name else order[found[2]].index(int(found[1]))
                n = n_layers if "ffn" in name else len(order[found[2]])
                wanted = _of_last(mix, i, n, weighted) if "ffn" in name else _of_values(mix, i, n, shared)
                if mix.number == IQ3_M and n_experts == EIGHT and "ffn" in name and _needs_more(i, n):
                    wanted = _T.Q4_K
            elif mix.middle is not None and (inner := _INNER.fullmatch(name)):
                wanted = mix.middle if n_layers // 8 <= int(inner[1]) < 7 * n_layers // 8 else mix.base
        if wanted is not info.type and info.dims[0] % FORMATS[wanted].elements:
            wanted = _NARROW.get(wanted, wanted)
            wanted = wanted if info.dims[0] % FORMATS[wanted].elements == 0 else _T.F16
        types[name] = _T.F16 if wanted is _T.Q8_1 else wanted  # no file has the latter
    return types


_SMALL = (_T.Q2_K, _T.Q3_K, _T.Q4_K, _T.IQ4_NL, _T.IQ4_XS, _T.IQ3_S, *WANTING)


def _one(keys: Metadata, key: str) -> int:
    """A number, or the largest of a list of them; 0 where there is none."""
    if key not in keys:
        return 0
    value = keys[key]
    numbers = [value] if isinstance(value, int) else keys.ints(key)
    return max(numbers, default=0)


def _of_values(mix: Mix, i: int, n: int, shared: int) -> GGMLType:
    """The type of the i-th of n maps to values, each of which so many heads of queries share."""
    if mix.number == Q3_K_M and i < 2:
        return _T.Q5_K
    if mix.first is not None and i < 4:
        return mix.first
    if mix.finer is not None and _needs_more(i, n):
        return mix.finer
    return (mix.values if shared >= 4 else mix.lone) or mix.base


def _of_last(mix: Mix, i: int, n: int, weighted: bool) -> GGMLType:
    """The type of the i-th of n maps that end a feed-forward."""
    if mix.number == Q3_K_M and i < n // 16:
        return _T.Q5_K
    if i < n // 8:
        if weighted and mix.base in (_T.Q4_0, _T.Q5_0):  # with importance their first layers go wrong
            return _T.Q4_1 if mix.base is _T.Q4_0 else _T.Q5_1
        if mix.begin is not None and not (weighted and mix.number in UNWEIGHTED):
            return mix.begin
        if mix.first is not None:
            return mix.first
    if mix.finer is not None and _needs_more(i, n):
        return mix.finer
    return mix.last or mix.base


def _needs_more(i: int, n: int) -> bool:
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2
