"""The tokenizer of a folder in GGUF's keys: pieces, their kinds and scores, merges, special ids and chat templates."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import sentencepiece

from quarrel.convert.config import Config, read_json
from quarrel.convert.ranks import merges_of, pattern_beside, read_tekken, read_tiktoken, spelt
from quarrel.errors import TokenizerError
from quarrel.tokenizer import Kind, pre_name, pre_of_pattern

VOCABULARIES = (
    *("tokenizer.json", "tokenizer.model", "vocab.txt", "tekken.json", "tiktoken.model", "qwen.tiktoken"),
    *("vocab.json", "merges.txt"),
)
"""Files that one of which a model's vocabulary is."""
LOOKS_SPECIAL = re.compile(r"<pad>|<mask>|<2mass>|\[@BOS@\]|<\|.*\|>|<｜.*｜>|<unused.*>", re.DOTALL)
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
VISIBLE = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>')
"""Of Gemma 4: what a reader of chats must see."""
_SPECIAL = {"unk": "unknown", "sep": "seperator", "pad": "padding"}  # sic
_GLM = {"eot": "<|user|>", "eom": "<|observation|>", "unk": "<|endoftext|>"}
_ADDED: Mapping[str, Mapping[str, str]] = {
    "glm4": {**_GLM, "eos": "<|endoftext|>", "bos": "<|endoftext|>"},
    "glm4moe": {**_GLM, "bos": "[gMASK]"},
    "muse-glimmer": {"eot": "<|eot|>"},
}
"""Tokens that only their text tells of."""
ADDED_SCORE, ABSENT_SCORE = -1000.0, -10000.0


class _Pieces:
    """As many pieces as the embedding has rows; those that nothing names are unused."""

    def __init__(self, rows: int) -> None:
        self.texts = [f"[PAD{i}]" for i in range(rows)]
        self.kinds = [int(Kind.UNUSED)] * rows
        self.scores = [ABSENT_SCORE] * rows

    def put(self, id: Any, text: Any, kind: Kind, score: float = 0.0) -> None:
        if type(id) is not int or not isinstance(text, str) or id < 0:
            raise TokenizerError(f"the tokenizer has a token {str(text)[:40]!r} with the id {str(id)[:20]!r}")
        if id >= len(self.texts):
            return  # the model cannot make it
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise TokenizerError(f"the token {id} of the tokenizer is no text") from None
        self.texts[id], self.kinds[id], self.scores[id] = text, int(kind), score

    def add(self, tokens: Sequence[Mapping[str, Any]]) -> None:
        """Tokens that were added to a vocabulary: control tokens, and others that are found before it is asked."""
        for token in tokens:
            text = token.get("content")
            control = token.get("special") or (isinstance(text, str) and LOOKS_SPECIAL.fullmatch(text))
            if not control and isinstance(text, str):
                text = text.replace("▁", " ")
            self.put(token.get("id"), text, Kind.CONTROL if control else Kind.USER_DEFINED, ADDED_SCORE)

    def keys(self, model: str, pre: str | None, *, scores: bool) -> dict[str, Any]:
        keys: dict[str, Any] = {"tokenizer.ggml.model": model}
        if pre is not None:
            keys["tokenizer.ggml.pre"] = pre
        keys |= {"tokenizer.ggml.tokens": self.texts, "tokenizer.ggml.token_type": self.kinds}
        return keys | ({"tokenizer.ggml.scores": self.scores} if scores else {})


def vocabulary_keys(folder: Path, arch: str, c: Config, rows: int) -> dict[str, Any]:
    """rows: of the token embedding. Raises TokenizerError where the folder has no tokenizer that can be read."""
    path, pieces = folder / "tokenizer.json", _Pieces(rows)
    try:
        fast = read_json(path) if path.is_file() else None
        kind = _kind(folder, arch, fast)
        keys = _MAKERS[kind](folder, fast or {}, pieces)
        special = gguf.SpecialVocab(folder, load_merges=kind in ("gpt2", "gemma4", "files"), n_vocab=rows)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError, OSError) as error:
        raise TokenizerError(f"the tokenizer of {folder} cannot be read: {type(error).__name__} {error}") from None
    return {**_named_ids(folder, pieces), **_special_keys(special, arch, pieces), **keys}


def _kind(folder: Path, arch: str, fast: Mapping[str, Any] | None) -> str:
    if fast is None:
        spm = folder / "tokenizer.model"
        if (folder / "tekken.json").is_file():
            return "tekken"
        if spm.is_file() and not _is_text(spm):
            return "spm"
        if _tiktoken_file(folder) is not None:
            return "tiktoken"
        if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
            return "files"
        if (folder / "vocab.txt").is_file():
            return "bert"
        raise TokenizerError(f"{folder} has neither tokenizer.json nor tokenizer.model: download the model's tokenizer too")
    model = fast["model"]
    match model.get("type") or ("BPE" if "merges" in model else None):
        case "WordPiece":
            return "bert"
        case "Unigram":
            return "t5"
        case "BPE" if arch == "gemma4":
            return "gemma4"
        case "BPE":
            spelt_in_bytes = "ByteLevel" in json.dumps([fast.get("pre_tokenizer"), fast.get("decoder")])
            return "gpt2" if spelt_in_bytes else "spm" if (folder / "tokenizer.model").is_file() else "merged"
        case other:
            raise TokenizerError(
                f"the model of {folder / 'tokenizer.json'} is {str(other)[:40]!r}, wanted BPE, Unigram or WordPiece"
            )


def _gpt2(folder: Path, fast: Mapping[str, Any], pieces: _Pieces) -> dict[str, Any]:
    for text, id in fast["model"]["vocab"].items():
        pieces.put(id, text, Kind.NORMAL)
    pieces.add(fast.get("added_tokens") or [])
    return pieces.keys("gpt2", pre_name(folder / "tokenizer.json"), scores=False)


def _files(folder: Path, fast: Mapping[str, Any], pieces: _Pieces) -> dict[str, Any]:
    """vocab.json and merges.txt, as GPT-2 has them; what cuts words only the tokenizer's class tells."""
    for text, id in read_json(folder / "vocab.json").items():
        pieces.put(id, text, Kind.NORMAL)
    _add_further(folder, pieces)
    said = _config(folder).get("tokenizer_class") or read_json(folder / "config.json").get("model_type")
    pre = _CLASSES.get(str(said).removesuffix("Fast"))
    if pre is None:
        raise TokenizerError(
            f"{folder} has vocab.json and merges.txt, but how {str(said)[:40]} cuts words is not known: save the tokenizer"
            " with its tokenizer.json"
        )
    return pieces.keys("gpt2", pre, scores=False)


_GPT2 = ("GPT2Tokenizer", "gpt2", "CodeGenTokenizer", "GPTNeoXTokenizer", "gpt_neox")
_QWEN2 = ("Qwen2Tokenizer", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
_CLASSES: Mapping[str, str] = {**dict.fromkeys(_GPT2, "gpt-2"), **dict.fromkeys(_QWEN2, "qwen2")}


def _is_text(path: Path) -> bool:
    """Whether a tokenizer.model is a tiktoken file: lines of base64, where SentencePiece has bytes."""
    with path.open("rb") as file:
        head = file.read(256)
    return head.isascii() and b"\0" not in head


def _tiktoken_file(folder: Path) -> Path | None:
    found = [*sorted(folder.glob("*.tiktoken")), *(folder / n for n in ("tiktoken.model", "tokenizer.model"))]
    return next((path for path in found if path.is_file()), None)


def _add_further(folder: Path, pieces: _Pieces) -> None:
    """Tokens behind the vocabulary, as added_tokens.json and tokenizer_config.json tell of them."""
    if (folder / "added_tokens.json").is_file():
        added = read_json(folder / "added_tokens.json")
        pieces.add([{"id": id, "content": text} for text, id in added.items()])
    decoder = _config(folder).get("added_tokens_decoder") or {}
    pieces.add([{**token, "id": int(id)} for id, token in decoder.items()])


def _tiktoken(folder: Path, fast: Mapping[str, Any], pieces: _Pieces) -> dict[str, Any]:
    path = _tiktoken_file(folder)
    assert path is not None
    ranks = read_tiktoken(path)
    for token, id in ranks.items():
        pieces.put(id, spelt(token), Kind.NORMAL)
    if path.name == "qwen.tiktoken":  # whose program names them
        names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)))
        pieces.add([{"id": len(ranks) + i, "content": name} for i, name in enumerate(names)])
    _add_further(folder, pieces)
    pattern = pattern_beside(folder)
    if pattern is None:
        known = {"qwen.tiktoken": "qwen2", "tiktoken.model": "kimi-k2", "tokenizer.model": "llama-bpe"}
        if path.name not in known:
            raise TokenizerError(f"{path} does not tell how words are cut: download the tokenizer's program beside it too")
        pre = known[path.name]
    else:
        pre = pre_of_pattern(pattern, False, path)
    return pieces.keys("gpt2", pre, scores=False) | {"tokenizer.ggml.merges": merges_of(ranks)}


def _tekken(folder: Path, fast: Mapping[str, Any], pieces: _Pieces) -> dict[str, Any]:
    """Control tokens have the first ids, and what is merged the next ones."""
    path = folder / "tekken.json"
    file = read_json(path)
    ranks, special = read_tekken(file, path, len(pieces.texts))
    for id, text in enumerate(special):
        pieces.put(id, text, Kind.UNKNOWN if text == "<unk>" else Kind.CONTROL)
    for token, rank in ranks.items():
        pieces.put(len(special) + rank, spelt(token), Kind.NORMAL)
    keys = pieces.keys("gpt2", pre_of_pattern(file["config"]["pattern"], True, path), scores=False)
    ids = {f"tokenizer.ggml.{n}_token_id": special.index(t) for n, t in _TEKKEN_IDS.items() if t in special}
    return {**keys, **ids, "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.merges": merges_of(ranks)}


_TEKKEN_IDS = {"bos": "<s>", "eos": "</s>", "unknown": "<unk>", "padding": "<pad>"}


def _merged(folder: Path, fast: Mapping[str, Any], pieces: _Pieces) -> dict[str, Any]:
    """A SentencePiece vocabulary as merges, whose ranks give the scores that it had: what merges first scores highest."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(fast["model"]["merges"]):
        ranks.setdefault("".join(merge if isinstance(merge, list) else merge.split(" ", 1)), rank)
    unknown = fast["model"].get("unk_token")
    for text, id in fast["model"]["vocab"].items():
        kind = Kind.BYTE if BYTE.fullmatch(text) else Kind.UNKNOWN if text == unknown else Kind.NORMAL
        pieces.put(id, text, kind, -float(ranks.get(text, len(ranks))))
    pieces.add([token for token in fast.get("added_tokens") or [] if token.get("content") != unknown])
    return pieces.keys("llama", "default", scores=True) | _space_prefix(folder, fast)


def _gemma4(folder: Path, fast: Mapping[str, Any], pieces: _Pieces) -> dict[str, Any]:
    _merged(folder, fast, pieces)
    for id, text in enumerate(pieces.texts):
        if text in VISIBLE:
            pieces.kinds[id] = int(Kind.USER_DEFINED)
    pieces.scores = [ADDED_SCORE] * len(pieces.texts)
    space = {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": True}
    return pieces.keys("gemma4", None, scores=True) | space


def _spm(folder: Path, fast: Mapping[str, Any], pieces: _Pieces) -> dict[str, Any]:
    model = sentencepiece.SentencePieceProcessor()
    model.LoadFromFile(str(folder / "tokenizer.model"))
    kinds: tuple[tuple[Callable[[int], bool], Kind], ...] = (
        (model.IsUnknown, Kind.UNKNOWN),
        (model.IsControl, Kind.CONTROL),
        (model.IsUnused, Kind.UNUSED),
        (model.IsByte, Kind.BYTE),
    )
    for id in range(min(model.vocab_size(), len(pieces.texts))):
        kind = next((kind for is_so, kind in kinds if is_so(id)), Kind.NORMAL)
        pieces.put(id, model.IdToPiece(id), kind, model.GetScore(id))
    _add_further(folder, pieces)
    return pieces.keys("llama", "default", scores=True) | _space_prefix(folder, fast)


def _bert(folder: Path, fast: Mapping[str, Any], pieces: _Pieces) -> dict[str, Any]:
    """Pieces that begin a word have a space in front, those that go on with one nothing."""
    if fast:
        vocab, added = fast["model"]["vocab"], fast.get("added_tokens") or []
        normalizer = fast.get("normalizer") or {}
    else:
        vocab = {text: id for id, text in enumerate((folder / "vocab.txt").read_text("utf-8").split("\n")) if text}
        names = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
        added = [{"id": vocab[name], "content": name, "special": True} for name in names if name in vocab]
        normalizer = {"lowercase": _config(folder).get("do_lower_case", True)}
    for text, id in vocab.items():
        pieces.put(id, text[2:] if text.startswith("##") else f"▁{text}", Kind.NORMAL)
    pieces.add(added)
    lowercase = bool(normalizer.get("lowercase", True))
    accents = normalizer.get("strip_accents")
    cased = {"lowercase": lowercase, "strip_accents": lowercase if accents is None else bool(accents)}
    return pieces.keys("bert", "default", scores=False) | {f"tokenizer.ggml.normalizer.{k}": v for k, v in cased.items()}


def _t5(folder: Path, fast: Mapping[str, Any], pieces: _Pieces) -> dict[str, Any]:
    unknown = fast["model"].get("unk_id")
    for id, (text, score) in enumerate(fast["model"]["vocab"]):
        pieces.put(id, text, Kind.UNKNOWN if id == unknown else Kind.NORMAL, float(score))
    for token in fast.get("added_tokens") or []:
        if token["id"] != unknown and 0 <= token["id"] < len(pieces.texts):
            kind = Kind.CONTROL if token.get("special") else Kind.USER_DEFINED
            pieces.put(token["id"], token["content"], kind, pieces.scores[token["id"]])
    said = json.dumps([fast.get("pre_tokenizer"), fast.get("normalizer")])
    keys = pieces.keys("t5", "default", scores=True)
    keys["tokenizer.ggml.add_space_prefix"] = '"add_prefix_space": false' not in said and '"never"' not in said
    keys["tokenizer.ggml.remove_extra_whitespaces"] = True
    if (charsmap := _charsmap(fast.get("normalizer"))) is not None:
        keys["tokenizer.ggml.precompiled_charsmap"] = list(charsmap)
    return keys


def _charsmap(normalizer: Any) -> bytes | None:
    for part in (normalizer or {}).get("normalizers") or [normalizer or {}]:
        if part.get("precompiled_charsmap"):
            try:
                return base64.b64decode(part["precompiled_charsmap"], validate=True)
            except binascii.Error as error:
                raise ValueError(f"its charsmap is no base64 ({error})") from None
    return None


_MAKERS = {
    "tekken": _tekken,
    "tiktoken": _tiktoken,
    "files": _files,
    "gpt2": _gpt2,
    "merged": _merged,
    "gemma4": _gemma4,
    "spm": _spm,
    "bert": _bert,
    "t5": _t5,
}


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return read_json(path) if path.is_file() else {}


def _named_ids(folder: Path, pieces: _Pieces) -> dict[str, Any]:
    """Special ids by their texts, where no tokenizer.json has them."""
    keys: dict[str, Any] = {}
    config = _config(folder) if not (folder / "tokenizer.json").is_file() else {}
    for name in ("bos", "eos", "unk", "pad"):
        said = config.get(f"{name}_token")
        text = said.get("content") if isinstance(said, dict) else said
        if isinstance(text, str) and text in pieces.texts:
            keys[f"tokenizer.ggml.{_SPECIAL.get(name, name)}_token_id"] = pieces.texts.index(text)
    return keys


def _space_prefix(folder: Path, fast: Mapping[str, Any]) -> dict[str, Any]:
    """Whether a text gets a space in front: by the tokenizer's own rules, where there are some."""
    said = _config(folder).get("add_prefix_space")
    if fast:
        rules = json.dumps([fast.get("normalizer"), fast.get("pre_tokenizer")])
        said = '"Prepend"' in rules or ('"Metaspace"' in rules and '"never"' not in rules)
    return {} if said is None else {"tokenizer.ggml.add_space_prefix": bool(said)}


def _special_keys(special: Any, arch: str, pieces: _Pieces) -> dict[str, Any]:
    keys: dict[str, Any] = {"tokenizer.ggml.merges": special.merges} if special.merges else {}
    ids = dict(special.special_token_ids)
    for name, text in _ADDED.get(arch, {}).items():
        if text in pieces.texts:
            ids[name] = pieces.texts.index(text)
    keys |= {f"tokenizer.ggml.{_SPECIAL.get(name, name)}_token_id": id for name, id in ids.items()}
    keys |= {f"tokenizer.ggml.add_{name}_token": bool(value) for name, value in special.add_special_token.items()}
    template = special.chat_template
    if isinstance(template, str):
        keys["tokenizer.chat_template"] = template
    elif template:
        named = {str(t["name"]): str(t["template"]) for t in template}
        if "default" in named:
            keys["tokenizer.chat_template"] = named.pop("default")
        keys |= {f"tokenizer.chat_template.{name}": text for name, text in named.items()}
        keys |= {"tokenizer.chat_templates": sorted(named)} if named else {}
    if arch == "modern-bert":
        keys |= {f"tokenizer.ggml.add_{name}_token": True for name in ("bos", "eos", "sep")}
    return keys
