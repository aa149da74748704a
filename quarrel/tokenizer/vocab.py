"""The vocabulary of a GGUF file: pieces, their kinds and scores, the special ids and the rules about BOS and EOS."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Final

from quarrel.errors import ModelError, TokenizerError
from quarrel.gguf import Metadata
from quarrel.tokenizer.pre import PreTokenizer, pre_tokenizer
from quarrel.tokenizer.stops import control_texts, stop_ids

_MODELS: Final = ("llama", "gpt2", "bert", "t5", "gemma4")
MAX_TOKENS: Final = 2 << 20
# Orpheus-like speech models add 28,000 special tokens; every one of them is looked for in every text.
MAX_SPECIAL: Final = 1 << 18
# Converters write -1 as an unsigned number for a token that does not exist.
NO_TOKEN: Final = (-1, (1 << 32) - 1)


class TokenizerWarning(UserWarning):
    """The vocabulary can be used, but the ids may differ from those that the model was trained on."""


class Kind(IntEnum):
    """`tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class _Defaults:
    """What a model means where the file is silent."""

    bos: int | None = None
    eos: int | None = None
    unk: int | None = None
    sep: int | None = None
    pad: int | None = None
    mask: int | None = None
    add_bos: bool = False
    add_eos: bool = False
    add_space_prefix: bool = False
    cls_is_bos: bool = False


# llama.cpp gives byte-level BPE bos = eos = 11, which stands for "," in most of these vocabularies: no default is safer.
_DEFAULTS: Final[Mapping[str, _Defaults]] = MappingProxyType(
    {
        "llama": _Defaults(bos=1, eos=2, unk=0, add_bos=True, add_space_prefix=True),
        "gpt2": _Defaults(),
        "gemma4": _Defaults(add_bos=True),
        "bert": _Defaults(bos=101, unk=100, sep=102, pad=0, mask=103, add_bos=True, cls_is_bos=True),
        "t5": _Defaults(eos=1, unk=2, pad=0, add_eos=True),
    }
)


@dataclass(frozen=True, repr=False)
class Vocabulary:
    """Everything about the ids that the file states. `texts` keeps bytes that are not UTF-8 as lone surrogates."""

    model: str
    pre: str | None
    pre_tokenizer: PreTokenizer | None
    texts: Sequence[str]
    kinds: Sequence[int]
    scores: Sequence[float]
    ids: Mapping[str, int]
    bos: int | None
    eos: int | None
    unk: int | None
    pad: int | None
    sep: int | None
    cls: int | None
    mask: int | None
    stops: frozenset[int]
    add_bos: bool
    add_eos: bool
    add_sep: bool
    """Between two texts that are judged together, behind the end of the first."""
    add_space_prefix: bool
    remove_extra_whitespaces: bool
    lowercase: bool
    strip_accents: bool
    strips_left: frozenset[int]
    strips_right: frozenset[int]

    def of_kind(self, *kinds: Kind) -> list[int]:
        wanted = frozenset(map(int, kinds))
        return [id for id, kind in enumerate(self.kinds) if kind in wanted]

    def first(self, id: int) -> bool:
        """Whether `id` is the one that its text stands for: of equal pieces the first wins."""
        return self.ids[self.texts[id]] == id


def read_vocabulary(metadata: Metadata) -> Vocabulary:
    """Raises TokenizerError (or ModelError for a key of the wrong type) where the vocabulary cannot be used."""
    model = metadata.str("tokenizer.ggml.model", None)
    if model is None:
        raise TokenizerError("the file has no tokenizer.ggml.model, so it holds no vocabulary; use a file with one")
    if model not in _MODELS:
        raise TokenizerError(f"tokenizer.ggml.model is {model!r}, wanted one of {', '.join(_MODELS)}")
    texts = _texts(metadata)
    ids = {text: id for id, text in zip(reversed(range(len(texts))), reversed(texts), strict=True)}
    if len(ids) < len(texts):
        _warn(f"{len(texts) - len(ids)} pieces of the vocabulary occur more than once; the first of each is used")
    pre = metadata.str("tokenizer.ggml.pre", None)
    pre_rules = _pre_rules(model, pre)
    defaults = _DEFAULTS[model]
    special = _special_ids(metadata, defaults, len(texts))
    kinds = _kinds(metadata, len(texts))
    for text in control_texts(ids):
        kinds[ids[text]] = Kind.CONTROL
    add_bos, add_eos = _add_flags(metadata, special, defaults, pre_rules)
    lowercase = metadata.bool("tokenizer.ggml.normalizer.lowercase", True)
    strips_left, strips_right = _strips(metadata, pre, ids, kinds)
    return Vocabulary(
        model=model,
        pre=pre,
        pre_tokenizer=pre_rules,
        texts=texts,
        kinds=kinds,
        scores=_scores(metadata, len(texts)),
        ids=ids,
        bos=special["bos"],
        eos=special["eos"],
        unk=special["unk"],
        pad=special["pad"],
        sep=special["sep"],
        cls=special["cls"],
        mask=special["mask"],
        stops=stop_ids(ids, [special[name] for name in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")]),
        add_bos=add_bos,
        add_eos=add_eos,
        add_sep=metadata.bool("tokenizer.ggml.add_sep_token", model == "t5"),
        add_space_prefix=metadata.bool("tokenizer.ggml.add_space_prefix", defaults.add_space_prefix),
        remove_extra_whitespaces=metadata.bool("tokenizer.ggml.remove_extra_whitespaces", False),
        lowercase=lowercase,
        strip_accents=metadata.bool("tokenizer.ggml.normalizer.strip_accents", lowercase),
        strips_left=strips_left,
        strips_right=strips_right,
    )


def _warn(message: str) -> None:
    warnings.warn(message, TokenizerWarning, stacklevel=5)


def _texts(metadata: Metadata) -> list[str]:
    texts = metadata.strs("tokenizer.ggml.tokens", None)
    if not texts:
        raise TokenizerError("tokenizer.ggml.tokens is missing or empty, wanted at least one piece")
    if len(texts) > MAX_TOKENS:
        raise TokenizerError(f"tokenizer.ggml.tokens has {len(texts)} pieces, wanted at most {MAX_TOKENS}")
    return texts


def _kinds(metadata: Metadata, n_tokens: int) -> list[int]:
    kinds = metadata.ints("tokenizer.ggml.token_type", None)
    if kinds is None:
        return [int(Kind.NORMAL)] * n_tokens
    if len(kinds) != n_tokens:
        raise TokenizerError(f"tokenizer.ggml.token_type has {len(kinds)} elements, wanted {n_tokens}")
    special = sum(map(kinds.count, (Kind.CONTROL, Kind.USER_DEFINED, Kind.UNKNOWN)))
    if special > MAX_SPECIAL:
        raise TokenizerError(f"the vocabulary has {special} special tokens, wanted at most {MAX_SPECIAL}")
    return kinds


def _scores(metadata: Metadata, n_tokens: int) -> list[float]:
    scores = metadata.floats("tokenizer.ggml.scores", None)
    if scores is None:
        return [0.0] * n_tokens
    if len(scores) != n_tokens:
        raise TokenizerError(f"tokenizer.ggml.scores has {len(scores)} elements, wanted {n_tokens}")
    return scores


def _special_ids(metadata: Metadata, defaults: _Defaults, n_tokens: int) -> dict[str, int | None]:
    special = {
        name: _special_id(metadata, key, default, n_tokens)
        for name, key, default in (
            ("bos", "bos", defaults.bos),
            ("eos", "eos", defaults.eos),
            ("unk", "unknown", defaults.unk),
            # GGUF spells it so.
            ("sep", "seperator", defaults.sep),
            ("pad", "padding", defaults.pad),
            ("cls", "cls", None),
            ("mask", "mask", defaults.mask),
            ("eot", "eot", None),
            ("eom", "eom", None),
            ("fim_pad", "fim_pad", None),
            ("fim_rep", "fim_rep", None),
            ("fim_sep", "fim_sep", None),
        )
    }
    if defaults.cls_is_bos:
        # Either key will do for both.
        if special["cls"] is None:
            special["cls"] = special["bos"]
        elif "tokenizer.ggml.bos_token_id" not in metadata:
            special["bos"] = special["cls"]
    return special


def _special_id(metadata: Metadata, name: str, default: int | None, n_tokens: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    id = metadata.int(key, None)
    if id is None:
        return default if default is not None and default < n_tokens else None
    if id in NO_TOKEN:
        return None
    if not 0 <= id < n_tokens:
        raise TokenizerError(f"{key} is {id}, wanted 0 to {n_tokens - 1}")
    return id


def _pre_rules(model: str, pre: str | None) -> PreTokenizer | None:
    if model not in ("gpt2", "gemma4"):
        return None
    name = "gemma4" if model == "gemma4" else pre
    rules = pre_tokenizer(name) if name is not None else None
    if rules is None:
        found = "the file names no tokenizer.ggml.pre" if pre is None else f"tokenizer.ggml.pre is {pre!r}, unknown here"
        _warn(f"{found}: texts are split by llama.cpp's default rules, and the ids may not be the model's own")
        return pre_tokenizer("default")
    return rules


def _add_flags(
    metadata: Metadata, special: Mapping[str, int | None], defaults: _Defaults, pre: PreTokenizer | None
) -> tuple[bool, bool]:
    flags = []
    for name, default in (("bos", defaults.add_bos or (pre is not None and pre.add_bos)), ("eos", defaults.add_eos)):
        stated = metadata.bool(f"tokenizer.ggml.add_{name}_token", None)
        if stated and special[name] is None:
            raise TokenizerError(f"tokenizer.ggml.add_{name}_token is true, but there is no {name}_token_id")
        flags.append(stated if stated is not None else default and special[name] is not None)
    return flags[0], flags[1]


def _strips(
    metadata: Metadata, pre: str | None, ids: Mapping[str, int], kinds: Sequence[int]
) -> tuple[frozenset[int], frozenset[int]]:
    """Special tokens that swallow the white space beside them. GGUF does not say which; llama.cpp knows them by name."""
    name = _text(metadata, "general.name").lower()
    architecture = _text(metadata, "general.architecture")
    if pre in ("jina-v2-de", "jina-v2-es", "jina-v2-code") or architecture in ("nomic-bert-moe", "jina-bert-v3"):
        return frozenset({ids["<mask>"]} if "<mask>" in ids else ()), frozenset()
    if "phi-3" in name or "phi3" in name:
        special = (Kind.CONTROL, Kind.USER_DEFINED, Kind.UNKNOWN)
        right = {id for id, kind in enumerate(kinds) if kind in special}
        return frozenset(), frozenset(right - {ids.get(text) for text in ("<unk>", "<s>", "<|endoftext|>")})
    if "modern-bert" in name and "[MASK]" in ids:
        return frozenset({ids["[MASK]"]}), frozenset()
    return frozenset(), frozenset()


def _text(metadata: Metadata, key: str) -> str:
    try:
        return metadata.str(key, "")
    except ModelError:
        return ""
