"""Tokens that end a generation. GGUF states one or two of them; the others are known by their text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

STOP_TEXTS: Final = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
    # A model that fills in the middle has run past its file when it writes one of these.
    "<|fim_pad|>",
    "<fim-pad>",
    "<fim_pad>",
    "<PAD>",
    "[PAD]",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
    "<|file_sep|>",
)
FIM: Final = {
    "prefix": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>"),
        *("<PRE>", "▁<PRE>", "<|code_prefix|>", "<|prefix|>"),
    ),
    "suffix": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>"),
        *("<SUF>", "▁<SUF>", "<|code_suffix|>", "<|suffix|>"),
    ),
    "middle": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>"),
        *("<MID>", "▁<MID>", "<|code_middle|>", "<|middle|>"),
    ),
    "separator": ("<|file_sep|>",),
}
"""What names the parts of a text with a hole in it."""
FIM_TEXTS: Final = tuple(text for part in ("prefix", "suffix", "middle") for text in FIM[part])


def control_texts(ids: Mapping[str, int]) -> list[str]:
    """Pieces that are control tokens whatever type the file gives them."""
    texts = [text for text in (*STOP_TEXTS, *FIM_TEXTS) if text in ids]
    if _gemma4(ids):
        texts.remove("</s>")
    return texts


def stop_ids(ids: Mapping[str, int], stated: Iterable[int | None]) -> frozenset[int]:
    """The ids that the file states, and those of all stop texts but the ones that only close a message or a tag."""
    stops = {id for id in stated if id is not None}
    stops |= {ids[text] for text in STOP_TEXTS if text in ids}
    if _harmony(ids):
        stops.discard(ids["<|end|>"])
    if _gemma4(ids):
        stops.discard(ids["</s>"])
    return frozenset(stops)


def _harmony(ids: Mapping[str, int]) -> bool:
    """gpt-oss and Solar Open: <|end|> closes one message of a turn, and the turn goes on."""
    calls = "<|call|>" in ids or "<|calls|>" in ids
    return calls and "<|end|>" in ids and ("<|return|>" in ids or "<|flush|>" in ids)


def _gemma4(ids: Mapping[str, int]) -> bool:
    """Gemma 4: </s> is an HTML tag there."""
    return "<|tool_response>" in ids and "</s>" in ids
