"""Rerankers that are language models (Qwen3-Reranker): the two rows that say yes and no, as a head of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from quarrel.convert.config import Config
from quarrel.convert.layout import View, same
from quarrel.convert.rules import Architecture, Out, rule
from quarrel.errors import UnsupportedModel

RANK = 4
TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided."
    ' Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: Given a web search query,'
    " retrieve relevant passages that answer the query\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""What the models were trained on, and llama.cpp writes."""
_NAMES = ("qwen3-reranker", "qwen3-vl-reranker")
_HEAD, _CARD = "cls.output.weight", 1 << 16


def is_reranker(folder: Path, arch: Architecture, c: Config) -> bool:
    """As llama.cpp tells them, for their config.json is that of any Qwen3: by the model card, a name or the class."""
    if arch.name not in ("qwen3", "qwen3vl"):
        return False
    names = f"{folder.resolve().name} {c.get('_name_or_path', default='')}".lower()
    card = ""
    if (folder / "README.md").is_file():
        with (folder / "README.md").open(encoding="utf-8", errors="replace") as file:
            card = file.read(_CARD).lower()
    return _classifies(c) or any(name in names or f"# {name}" in card for name in _NAMES)


def reranker(arch: Architecture, c: Config, tokens: Sequence[str]) -> Architecture:
    """The architecture with a head in place of its output layer; tokens: the vocabulary, in order.

    A classifier with one label has the logit of yes, and 0 for no: their shares are what a sigmoid makes of it.
    """
    if _classifies(c):
        labels = c.get("id2label", default=c.get("num_labels", default=2))
        count = len(labels) if isinstance(labels, dict) else labels
        if count != 1:
            raise UnsupportedModel(f"the classifier has {str(count)[:20]} labels, wanted the one of a reranker")
        rules = (rule(r"score\.weight", Out(_HEAD, (same, _zeros))), *arch.rules)
    else:
        if not {"yes", "no"} <= set(tokens):
            raise UnsupportedModel("the model is a reranker, but its tokenizer has no tokens yes and no: download it again")
        head = Out(_HEAD, (_row(tokens.index("yes")), _row(tokens.index("no"))))
        tied = rule(r"((?:model\.)?embed_tokens\.weight)", Out(r"\2"), head)
        rules = (tied if c.get("tie_word_embeddings") is True else rule(r"lm_head\.weight", head), *arch.rules)
    further = {
        "pooling_type": RANK,
        "classifier.output_labels": ["yes", "no"],
        "tokenizer.chat_template.rerank": TEMPLATE,
        "tokenizer.chat_templates": ["rerank"],
    }
    return replace(arch, rules=rules, keys=lambda c: {**arch.keys(c), **further})


def _classifies(c: Config) -> bool:
    return "ForSequenceClassification" in str(c.get("architectures"))


def _row(i: int) -> View:
    return lambda a, c: a[i : i + 1]


def _zeros(a: np.ndarray, c: Config) -> np.ndarray:
    return np.broadcast_to(np.zeros((), a.dtype), a.shape)
