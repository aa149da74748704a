"""Encoders: which tensors of a Hugging Face folder become which, and their keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quarrel.convert.config import Config
from quarrel.convert.layout import span
from quarrel.convert.rules import ADDS_ONE, Architecture, Out, rule
from quarrel.errors import UnsupportedModel


def _encoder(c: Config) -> dict[str, Any]:
    return {"attention.causal": False, **_labels(c)}


def _labels(c: Config) -> dict[str, Any]:
    """Of a model that ends in a classifier, such as a reranker."""
    if "ForSequenceClassification" not in str(c.get("architectures")):
        return {}
    labels = c.get("id2label", default={})
    named = [str(v) for _, v in sorted(labels.items())] if isinstance(labels, dict) else []
    return {"pooling_type": 4, **({"classifier.output_labels": named} if named and named != ["LABEL_0", "LABEL_1"] else {})}


def _offset(c: Config) -> int:
    """Positions of RoBERTa begin behind the padding."""
    return c.integer("pad_token_id", default=1) + 1


def _roberta(c: Config) -> dict[str, Any]:
    return {**_encoder(c), "context_length": c.integer("max_position_embeddings") - _offset(c), **_types(c)}


def _types(c: Config) -> dict[str, Any]:
    return {"tokenizer.ggml.token_type_count": c.integer("type_vocab_size", default=1)}


def _nomic(c: Config) -> dict[str, Any]:
    if c.get("moe_every_n_layers"):
        raise UnsupportedModel("this nomic-bert has experts, which this version does not run")
    trained = {(8192, 2048): 2048, (2048, 2048): 512}
    length = trained.get(
        (c.integer("n_positions"), c.integer("max_trained_positions", default=2048)), c.integer("n_positions")
    )
    return {**_encoder(c), "context_length": length, **_types(c)}


def _modern(c: Config) -> dict[str, Any]:
    keys = {**_encoder(c), "attention.sliding_window": c.integer("local_attention"), "rope.scaling.type": "none"}
    if (period := c.get("global_attn_every_n_layers")) is not None:
        keys["attention.sliding_window_pattern"] = period
    if c.get("hidden_activation"):
        keys["hidden_activation"] = str(c.get("hidden_activation"))
    return keys


BERT_NAMES = ((r"^(bert|roberta|distilbert|model)\.", ""), (r"\.gamma$", ".weight"), (r"\.beta$", ".bias"))
BERT_DROP = r"embeddings\.position_ids|pooler\.dense\..*|cls\.(predictions|seq_relationship).*|lm_head\..*|vocab_.*"
CLASSIFIER = rule(r"classifier\.(weight|bias)", Out(r"classifier.out_proj.\2"))
POSITIONS = rule(r"(position_embeddings\.weight)", Out(r"\2", (span(_offset, lambda c: None),)))

ENCODERS: Mapping[str, Architecture] = {
    "BertModel BertForMaskedLM BertForSequenceClassification": Architecture(
        "bert",
        (CLASSIFIER,),
        lambda c: {**_encoder(c), **_types(c)},
        defaults={"layer_norm_eps": 1e-12},
        rename=lambda c: BERT_NAMES,
        drop=BERT_DROP,
        decoder=False,
    ),
    "XLMRobertaModel XLMRobertaForSequenceClassification RobertaModel RobertaForSequenceClassification": Architecture(
        "bert",
        (POSITIONS,),
        _roberta,
        defaults={"layer_norm_eps": 1e-5},
        rename=lambda c: BERT_NAMES,
        drop=BERT_DROP,
        decoder=False,
    ),
    "NomicBertModel": Architecture(
        "nomic-bert",
        (),
        _nomic,
        defaults={"layer_norm_eps": 1e-12},
        rename=lambda c: BERT_NAMES,
        drop=BERT_DROP,
        decoder=False,
    ),
    "ModernBertModel ModernBertForMaskedLM ModernBertForSequenceClassification": Architecture(
        "modern-bert",
        (CLASSIFIER,),
        _modern,
        rename=lambda c: BERT_NAMES,
        drop=r"decoder\..*",
        decoder=False,
    ),
    "Gemma3TextModel": Architecture(
        "gemma-embedding",
        (ADDS_ONE,),
        lambda c: {"attention.sliding_window": c.integer("sliding_window")},
        defaults={"head_dim": 256, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
    ),
}
