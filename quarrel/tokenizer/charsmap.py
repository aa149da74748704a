"""SentencePiece's `precompiled_charsmap`: text normalisation by longest prefix, read out of a double-array trie.

The library would walk the trie without checking it, so the pairs are read out here, once, and every index is checked.
Layout: u32 size of the trie in bytes, the trie (u32 each: label in bits 0-7, has-value in bit 8, base shift in bit 9,
base from bit 10; bit 31 marks a value), then NUL-terminated replacements.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Mapping

from quarrel.errors import TokenizerError

# nmt_nfkc, the map of nearly every model, has prefixes of up to 18 bytes.
_MAX_PREFIX_BYTES = 64
_MAX_PREFIXES = 1 << 20
# nmt_nfkc has 237,539 bytes.
MAX_BYTES = 1 << 20


class CharsMap:
    """Replaces, from left to right, the longest prefix that has a replacement."""

    def __init__(self, replacements: Mapping[str, str]) -> None:
        self._replacements = dict(replacements)
        longest: dict[str, int] = {}
        for prefix in self._replacements:
            longest[prefix[0]] = max(longest.get(prefix[0], 0), len(prefix))
        self._longest = longest
        self._starts = re.compile(f"[{re.escape(''.join(longest))}]") if longest else None

    @classmethod
    def parse(cls, blob: bytes) -> CharsMap:
        """Raises TokenizerError where the map points outside itself or does not end."""
        return cls(_read(blob))

    def apply(self, text: str) -> str:
        if self._starts is None:
            return text
        parts: list[str] = []
        at = 0
        while (start := self._starts.search(text, at)) is not None:
            begin = start.start()
            for end in range(begin + self._longest[text[begin]], begin, -1):
                replacement = self._replacements.get(text[begin:end])
                if replacement is not None:
                    # Near the end of the text the slice is shorter than asked for.
                    parts += (text[at:begin], replacement)
                    at = min(end, len(text))
                    break
            else:
                parts.append(text[at : begin + 1])
                at = begin + 1
        parts.append(text[at:])
        return "".join(parts)


def _read(blob: bytes) -> dict[str, str]:
    if not blob:
        return {}
    size = int.from_bytes(blob[:4], "little")
    if len(blob) < 4 or size % 4 or size == 0 or 4 + size >= len(blob):
        raise TokenizerError(f"tokenizer.ggml.precompiled_charsmap claims a trie of {size} bytes in {len(blob)}")
    units = array("I", blob[4 : 4 + size])
    if sys.byteorder == "big":
        units.byteswap()
    texts = blob[4 + size :]
    replacements = {}
    for prefix, offset in _walk(units):
        end = texts.find(b"\0", offset)
        if end < 0:
            raise TokenizerError(f"tokenizer.ggml.precompiled_charsmap has a replacement at {offset} that never ends")
        try:
            replacements[prefix.decode()] = texts[offset:end].decode()
        except UnicodeDecodeError:
            # Text is valid UTF-8, and so never has this prefix.
            continue
    return replacements


def _walk(units: array[int]) -> list[tuple[bytes, int]]:
    children: dict[int, list[tuple[int, int]]] = {}
    for at, unit in enumerate(units):
        if not unit >> 31 and (label := unit & 0xFF):
            children.setdefault(at ^ label, []).append((label, at))
    found: list[tuple[bytes, int]] = []
    pending = [(b"", _base(units[0]))]
    while pending:
        prefix, base = pending.pop()
        if len(prefix) > _MAX_PREFIX_BYTES or len(found) + len(pending) > _MAX_PREFIXES:
            raise TokenizerError("tokenizer.ggml.precompiled_charsmap has no end: its trie runs in a circle")
        for label, at in children.get(base, ()):
            below = at ^ _base(units[at])
            if units[at] >> 8 & 1:
                if below >= len(units):
                    raise TokenizerError(f"tokenizer.ggml.precompiled_charsmap points to unit {below} of {len(units)}")
                found.append((prefix + bytes((label,)), units[below] & 0x7FFFFFFF))
            pending.append((prefix + bytes((label,)), below))
    return found


def _base(unit: int) -> int:
    return (unit >> 10) << ((unit & 0x200) >> 6)
