"""Vocabularies of bytes with ranks: tiktoken files, and Mistral's tekken.json. A token is what its bytes merge into."""

from __future__ import annotations

import ast
import base64
import binascii
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from quarrel.errors import TokenizerError
from quarrel.tokenizer.detokenizer import byte_alphabet

MAX_BYTES = 64 << 20
MAX_TOKEN = 1 << 10
"""Bytes; the longest ones of real vocabularies are runs of 128 spaces."""
TEKKEN_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]"),
    *("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""Where a file does not name its own."""


_LETTERS = {byte: letter for letter, byte in byte_alphabet().items()}


def spelt(token: bytes) -> str:
    return "".join(_LETTERS[byte] for byte in token)


def merges_of(ranks: Mapping[bytes, int]) -> list[str]:
    """What GGUF wants in place of ranks: the two tokens that each one is merged of, in order of rank."""
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            found = [ranks.get(parts[i] + parts[i + 1], rank) for i in range(len(parts) - 1)]
            best = min(found)
            if best >= rank:
                break  # nothing merges into it: it is found as a whole word only
            at = found.index(best)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append(f"{spelt(parts[0])} {spelt(parts[1])}")
    return merges


def read_tiktoken(path: Path) -> dict[bytes, int]:
    """Lines of a token in base64 and its rank."""
    if path.stat().st_size > MAX_BYTES:
        raise TokenizerError(f"{path} has more than {MAX_BYTES >> 20} MiB, which no vocabulary has")
    lines = (line.split() for line in path.read_text("ascii").splitlines())
    return _ranks(((fields[0], int(fields[1])) for fields in lines if len(fields) == 2), path)


def read_tekken(file: Mapping[str, Any], path: Path, rows: int) -> tuple[dict[bytes, int], list[str]]:
    """Ranks, and the control tokens whose ids come before them."""
    count = file["config"]["default_num_special_tokens"]
    if type(count) is not int or not 0 <= count <= rows:
        raise TokenizerError(f"{path} has {str(count)[:20]} special tokens, wanted 0 to {rows}")
    special = [f"<SPECIAL_{i}>" for i in range(count)]
    named = file.get("special_tokens")
    for i, text in ((t["rank"], t["token_str"]) for t in named) if named else enumerate(TEKKEN_SPECIAL):
        if type(i) is not int or not 0 <= i < max(count, len(TEKKEN_SPECIAL)) or not isinstance(text, str):
            raise TokenizerError(f"{path} has a special token {str(text)[:40]!r} with the rank {str(i)[:20]}")
        if i < count:
            special[i] = text
    size = min(rows, file["config"]["default_vocab_size"]) - count
    return _ranks(((t["token_bytes"], t["rank"]) for t in file["vocab"][:size]), path), special


def _ranks(pairs: Iterable[tuple[str, int]], path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for text, rank in pairs:
        try:
            token = base64.b64decode(text, validate=True)
        except binascii.Error as error:
            raise TokenizerError(f"{path} has a token {text[:40]!r} that is no base64 ({error})") from None
        if not 0 < len(token) <= MAX_TOKEN or type(rank) is not int or rank < 0:
            raise TokenizerError(f"{path} has a token of {len(token)} bytes with the rank {str(rank)[:20]}")
        ranks[token] = rank
    if len(set(ranks.values())) != len(ranks) or not all(bytes([b]) in ranks for b in range(256)):
        raise TokenizerError(f"{path} has no rank of its own for each token, or not all 256 bytes: download it again")
    return ranks


def pattern_beside(folder: Path) -> str | None:
    """The expression that cuts words, from the tokenizer's program, which is read and not run."""
    for path in sorted(folder.glob("tokenization_*.py")):
        if path.stat().st_size > 1 << 20:
            continue
        try:
            tree = ast.parse(path.read_text("utf-8"))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        for node in ast.walk(tree):
            names = [t.id.lower() for t in node.targets if isinstance(t, ast.Name)] if isinstance(node, ast.Assign) else []
            if set(names) & {"pat_str", "pattern"} and (found := _text(node.value)) is not None:  # type: ignore[attr-defined]
                return found
    return None


def _text(node: ast.expr) -> str | None:
    """A string, or `"|".join([...])` of several."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(glue)), attr="join"), args=[ast.List(elts=parts)]):
            texts = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            return glue.join(texts) if len(texts) == len(parts) else None
        case _:
            return None
