"""How a byte-level BPE vocabulary cuts text into words before it merges: `tokenizer.ggml.pre` to regular expressions.

The expressions are those of the models' own tokenizer.json files, in Oniguruma's syntax. Several in a row: each one cuts
the pieces that the former left, and what lies between matches stays as a piece of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3: Final = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_QWEN2: Final = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_SYMBOLS}|{_SPACES}"
_QWEN35: Final = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASED_END: Final = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_CASED_START: Final = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_PATHS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_GPT4O: Final = rf"{_CASED_END}{_CONTRACTIONS}?|{_CASED_START}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_PATHS}|{_SPACES}"
_YOUTU: Final = rf"{_CASED_END}{_CONTRACTIONS}?|{_CASED_START}{_CONTRACTIONS}?|\p{{N}}|{_PATHS}|{_SPACES}"
_TEKKEN: Final = rf"{_CASED_END}|{_CASED_START}|\p{{N}}|{_PATHS}|{_SPACES}"
_KIMI_END: Final = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
_KIMI_START: Final = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
_KIMI: Final = (
    rf"[\p{{Han}}]+|{_KIMI_END}{_CONTRACTIONS}?|{_KIMI_START}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
)
_PUNCTUATED: Final = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_DEEPSEEK3: Final = rf"{_PUNCTUATED}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
_DEEPSEEK_CJK: Final = r"[\x{4e00}-\x{9fa5}\x{0800}-\x{4e00}\x{ac00}-\x{d7ff}]+"
_HAN_KANA: Final = r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+"
# Groups of three counted from the right end of a number. The count stops at 90 digits: without a limit, a megabyte of
# digits would be read a megabyte times. Longer numbers are grouped from the left until 90 digits remain.
_RIGHT_ALIGNED: Final = r"\p{N}{1,3}(?=(?:\p{N}{3}){0,30}(?!\p{N}))|\p{N}{3}"
_JAIS2_SPACES: Final = "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4)) + r"|\s{1,2}(?!\S)|\s"


@dataclass(frozen=True)
class PreTokenizer:
    """`patterns` in order. `byte_level`: words are spelt in GPT-2's alphabet of bytes, else in UTF-8 with U+2581 for
    spaces. `ignore_merges`: a word that is a token is taken at once. `add_bos`: where the file is silent."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    byte_level: bool = True


_LLAMA3_RULES: Final = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_GPT2_RULES: Final = PreTokenizer((_GPT2,))
_DIGITS_RULES: Final = PreTokenizer((r"\p{N}", _GPT2))
_QWEN2_RULES: Final = PreTokenizer((_QWEN2,))
_GPT4O_RULES: Final = PreTokenizer((_GPT4O,))
_PLAIN_LLAMA3: Final = PreTokenizer((_LLAMA3,))
_DEEPSEEK3_RULES: Final = PreTokenizer((r"\p{N}{1,3}", _HAN_KANA, _DEEPSEEK3))
_BAILING_RULES: Final = PreTokenizer(
    (rf"'(?i:[sdmt]|ll|ve|re)|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",)
)
_BLOOM_RULES: Final = PreTokenizer((r" ?[^(\s|.,!?…。，、।۔،)]+",))
_LINES_RULES: Final = PreTokenizer((r"[^\n]+|[\n]+",), byte_level=False)


def _named(rules: PreTokenizer, names: str) -> dict[str, PreTokenizer]:
    return dict.fromkeys(names.split(), rules)


_RULES: Final[Mapping[str, PreTokenizer]] = MappingProxyType(
    {
        **_named(_LLAMA3_RULES, "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"),
        **_named(_PLAIN_LLAMA3, "dbrx smaug-bpe chatglm-bpe glm4"),
        **_named(_QWEN2_RULES, "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 megrez hunyuan solar-open grok-2"),
        **_named(PreTokenizer((_QWEN35,)), "qwen35"),
        **_named(PreTokenizer((_QWEN2.removeprefix(_CONTRACTIONS + "|"),)), "ufakzeka"),
        **_named(_GPT4O_RULES, "gpt-4o llama4 kanana2 talkie minimax-m2"),
        **_named(replace(_GPT4O_RULES, ignore_merges=True), "granite-embed-multi-97m"),
        **_named(PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True), "tekken"),
        **_named(
            _GPT2_RULES,
            "gpt-2 phi-2 mpt olmo jais trillion granite-docling jina-es jina-de jina-v1-en jina-v2-es jina-v2-de "
            "jina-v2-code roberta-bpe gigachat a.x-4.0 mellum modern-bert exaone4",
        ),
        **_named(_DIGITS_RULES, "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2"),
        **_named(PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")), "falcon"),
        **_named(
            PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
            "default",
        ),
        # Letters that have a case, but neither Georgian nor mathematical ones.
        **_named(
            PreTokenizer(
                (
                    r"[\r\n]",
                    r"\s?[\p{Lu}\p{Ll}\p{Lt}&&[^\x{10d0}-\x{10ff}\x{1d400}-\x{1d7ff}]]+",
                    r"\s?[!-/:-~！-／：-～‘-‟\x{3000}-。]+",
                    # The look-behind keeps a long run of spaces from being tried from each of its spaces.
                    r"(?<!\s)\s+\z",
                    _DEEPSEEK_CJK,
                    r"\p{N}+",
                )
            ),
            "deepseek-llm",
        ),
        **_named(PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")), "deepseek-coder"),
        **_named(_DEEPSEEK3_RULES, "deepseek-v3 hunyuan-dense joyai-llm hy_v4"),
        **_named(
            PreTokenizer(
                (
                    r"\p{N}{1,3}",
                    _HAN_KANA,
                    rf"{_PUNCTUATED}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+|[\r\n]|"
                    r"\s+(?!\S)|\s+",
                    r"\p{N}",
                )
            ),
            "spark2_5",
        ),
        **_named(
            PreTokenizer(
                (
                    r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|" + _HAN_KANA,
                    _YOUTU,
                ),
                ignore_merges=True,
            ),
            "youtu",
        ),
        **_named(
            PreTokenizer((rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|\s*[\r\n]+|{_JAIS2_SPACES}",)), "jais-2"
        ),
        **_named(_BLOOM_RULES, "bloom poro-chat gpt3-finnish"),
        **_named(PreTokenizer((*_BLOOM_RULES.patterns, r"\p{N}")), "viking"),
        **_named(PreTokenizer((_KIMI,)), "kimi-k2"),
        **_named(_BAILING_RULES, "bailingmoe bailingmoe2 llada-moe"),
        **_named(PreTokenizer((rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)), "seed-coder"),
        **_named(
            PreTokenizer(
                (
                    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|"
                    r" ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
                )
            ),
            "exaone-moe",
        ),
        **_named(PreTokenizer((r"\d{1,3}(?=(?:\d{3}){0,30}\b)", _GPT4O)), "tiny_aya cohere2moe"),
        **_named(PreTokenizer((r"\p{N}+", _RIGHT_ALIGNED)), "superbpe"),
        **_named(
            PreTokenizer(
                (
                    _RIGHT_ALIGNED,
                    r"[一-鿿㐀-䶿豈-\x{faff}\x{3040}-ゟ゠-ヿ･-ﾟ⼀-\x{2fdf}\x{e00}-\x{e7f}\x{e80}-\x{eff}ក-\x{17ff}"
                    r"က-႟ꩠ-ꩿꧠ-\x{a9ff}가-\x{d7af}ᄀ-ᇿ]+",
                    _DEEPSEEK3,
                )
            ),
            "afmoe",
        ),
        **_named(PreTokenizer((r"[^\n]+|[\n]+", _QWEN2)), "laguna"),
        **_named(PreTokenizer((r"\p{N}{1,3}", _LLAMA3.replace("{1,3}", "+")), ignore_merges=True), "minicpm5"),
        **_named(
            PreTokenizer(
                (
                    r"<sentinel:[0-9]+>",
                    r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                    r"([\t\n]|    |  )",
                    r"\p{N}",
                    r"[\p{P}!-/:-@\[-`{-~]",
                    _GPT2,
                ),
                add_bos=True,
            ),
            "chameleon",
        ),
        **_named(replace(_LINES_RULES, add_bos=True), "gemma4 granite-embed-multi-311m"),
        **_named(_LINES_RULES, "sarvam-moe"),
    }
)


def pre_tokenizer(name: str) -> PreTokenizer | None:
    """The rules behind a value of `tokenizer.ggml.pre`; None for one that is not known."""
    return _RULES.get(name)


def rules() -> Mapping[str, PreTokenizer]:
    """All of them by name; of names for the same rules the first one is what most models of theirs have."""
    return _RULES
