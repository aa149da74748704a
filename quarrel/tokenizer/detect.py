"""Which rules of GGUF cut words as the tokenizer.json of a model does: those that cut a text of odd places alike."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from quarrel.errors import TokenizerError
from quarrel.tokenizer.guard import native
from quarrel.tokenizer.pre import PreTokenizer, rules

_ODD: Final = (
    "Hello World! \n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n🚀 (normal) 😶\u200d🌫️ (multiple) ✅ 🦙🦙 3 33 333 "
    "3333 33333 333333 3333333 3.3 3..3 1,234.5 កាន់តែពិសេសអាច😁 ?我想在apple工作1314151天～ 東京タワーです。カナ、"
    "한국어 조선글 ------======= нещо на Български "
    '```````""""......!!!!!!?????? I\'ve been \'told he\'s there, '
    "'RE you sure? 'M not sure I'll make it, 'D you like? We'Ve a'lL camelCaseWord HTTPServer ÀÉîõü naïve e\u0301te\u0301 "
    "\u0e01\u0e33 हिन्दी में ქართული 𝐀𝐁\r\n\r\n  a/b //c\n/ #tag $var %x &y *z* (p) [q] {r} <s>|t| \\u ^v _w_ ~ab:cd;ef "
    "\u3000x\u00a0y\u2028z 'sa 's 'll tab\tx\n    if x:\n\t\treturn 12345678901234567890 ⅷ ²³ ½ ١٢٣ "
    "https://a.b/c?d=e&f=%20  end  "
)
"""Letters with and without case, marks, scripts with rules of their own, digits in runs, spaces and ends of lines."""


def pre_name(path: Path) -> str:
    """The value of `tokenizer.ggml.pre` for a tokenizer.json; raises TokenizerError where no rules are the same."""
    from tokenizers import Tokenizer  # only here, as every tokenizer comes by this package

    with native(f"{path} cannot be read"):
        tokenizer = Tokenizer.from_file(str(path))
        cut = tokenizer.pre_tokenizer
        wanted = [place for _, place in cut.pre_tokenize_str(_ODD)] if cut is not None else []
    return _alike(wanted, getattr(tokenizer.model, "ignore_merges", False), path, str(cut))


def pre_of_pattern(pattern: str, whole: bool, path: Path) -> str:
    """The same for an expression as tiktoken takes it. whole: a word that is a token is taken at once."""
    with native(f"the expression that {path} cuts words by cannot be read", user=True):
        wanted = _places(PreTokenizer((pattern,)))
    return _alike(wanted, whole, path, pattern)


def _alike(wanted: list[tuple[int, int]], whole: bool, path: Path, said: str) -> str:
    alike = {name: known for name, known in rules().items() if known.byte_level and _places(known) == wanted}
    for name, known in alike.items():
        if known.ignore_merges == whole:
            return name
    if alike:
        return next(iter(alike))
    raise TokenizerError(f"{path} cuts words by rules that none of GGUF's are: {said[:300]}; another version may know them")


def _places(known: PreTokenizer) -> list[tuple[int, int]]:
    from tokenizers import Regex, pre_tokenizers

    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in known.patterns]
    return [place for _, place in pre_tokenizers.Sequence(splits).pre_tokenize_str(_ODD)]
