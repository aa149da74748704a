"""A draft model beside a loaded one: its vocabulary is compared, and it gets a share of the memory."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quarrel.errors import UnsupportedModel
from quarrel.gguf import FORMATS, GGUFFile
from quarrel.llm.memory import DEFAULT_CONTEXT, Device, Plan, plan_limits
from quarrel.llm.options import MTP
from quarrel.models import EncoderSpec, ModelSpec, Tensors, assemble, assemble_predictor, read_spec
from quarrel.ops.contract import WeightRef
from quarrel.ops.program import Program
from quarrel.ops.windows import by_window_if_smaller, with_window_groups
from quarrel.tokenizer import Tokenizer
from quarrel.tokenizer import load_tokenizer as read_tokenizer

if TYPE_CHECKING:
    from quarrel.llm.open import Opened

PADDING = 256
"""Rows by which two vocabularies may differ at their ends: releases of one family pad the same words to other sizes."""


@dataclass(frozen=True)
class DraftModel:
    """An open file that can propose tokens for a model."""

    name: str
    file: GGUFFile
    spec: ModelSpec
    program: Program
    plan: Plan


def plan_draft(opened: Opened, program: Program, device: Device) -> DraftModel:
    """The draft model of an opened one, whose program this is.

    Memory is divided so that both caches hold about as many tokens. Raises UnsupportedModel for one that cannot draft,
    OutOfMemory.
    """
    options, file = opened.options, opened.draft
    assert file is not None
    assert options.draft is not None
    name = os.fspath(options.draft)
    spec = read_spec(file)
    if isinstance(spec, EncoderSpec):
        raise UnsupportedModel(f"the draft model {name} is an encoder ({spec.architecture}), which continues no text")
    small = assemble(spec, Tensors(file))
    if small.states:
        raise UnsupportedModel(
            "the draft model has recurrent layers, whose state cannot be taken back to where a guess was wrong: leave it"
            " out, or use one of attention layers only"
        )
    check_vocabulary(name, opened.tokenizer, read_tokenizer(file.metadata))
    own = sum(t.nbytes for t in file.tensors.values())
    plan = _share(opened, spec, small, program, device, own)
    spec = read_spec(file, plan.n_ctx)
    assert isinstance(spec, ModelSpec)
    return DraftModel(name, file, spec, with_window_groups(assemble(spec, Tensors(file)), plan.limits.window_groups), plan)


def plan_block(opened: Opened, program: Program, device: Device) -> DraftModel:
    """The model's own block that predicts further tokens, as `plan_draft`. Raises UnsupportedModel where it has none."""
    spec = opened.spec
    assert isinstance(spec, ModelSpec)
    block = assemble_predictor(spec, opened.tensors)
    refs = {w.name: w for node in block.nodes for w in node.inputs if isinstance(w, WeightRef)}
    own = sum(w.rows * w.k // FORMATS[w.type].elements * FORMATS[w.type].nbytes for w in refs.values())
    return DraftModel(MTP, opened.file, spec, block, _share(opened, spec, block, program, device, own))


def _share(opened: Opened, spec: ModelSpec, small: Program, large: Program, device: Device, weights: int) -> Plan:
    """The draft's part of the memory, with a cache for about as many tokens as the large model's."""
    options = opened.options
    share = _width(small) / max(1, _width(small) + _width(large))
    budget = weights + int(max(0, device.budget - opened.weight_bytes - weights) * share)
    length = min(spec.context_length, options.n_ctx or DEFAULT_CONTEXT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # beyond a shorter context nothing is drafted, which is all
        return plan_limits(
            by_window_if_smaller(small, length),
            replace(spec, context_length=length),
            compute=opened.backend.compute_of(options.compute),
            device=replace(device, budget=min(budget, device.budget)),
            weights=weights,
            n_ctx=None,
            max_seqs=options.max_seqs,
        )


def check_vocabulary(name: str, large: Tokenizer, small: Tokenizer) -> None:
    """Raises UnsupportedModel unless the same ids mean the same words in both, but for some rows at the end."""
    sizes = f"{large.n_vocab} and {small.n_vocab} tokens"
    known = min(large.n_vocab, small.n_vocab)
    unlike = next((i for i in range(known) if large.token_text(i) != small.token_text(i)), None)
    if unlike is not None:
        raise UnsupportedModel(
            f"the draft model {name} has another vocabulary ({sizes}; id {unlike} is {large.token_text(unlike)!r} and"
            f" {small.token_text(unlike)!r}): choose a smaller model of the same family"
        )
    if max(large.n_vocab, small.n_vocab) - known > PADDING:
        raise UnsupportedModel(
            f"the draft model {name} has a vocabulary of another size ({sizes}): choose a smaller model of the same family"
        )


def _width(program: Program) -> int:
    """Values that the cache keeps of a token."""
    return sum(layer.width for layer in program.caches)
