"""A draft model beside a loaded one: read, held against its vocabulary, given its share of the memory, compiled."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

from quarrel.engine import CacheRules
from quarrel.engine.draft import Drafter
from quarrel.errors import UnsupportedModel
from quarrel.gguf import GGUFFile
from quarrel.llm.caching import cache_rules
from quarrel.llm.plan import DEFAULT_CONTEXT, Device, Plan, plan_limits
from quarrel.models import EncoderSpec, ModelSpec, Tensors, assemble, read_spec
from quarrel.ops.program import Program
from quarrel.ops.step import Backend, ComputeChoice
from quarrel.ops.windows import as_planned, worth
from quarrel.tokenizer import Tokenizer
from quarrel.tokenizer import load_tokenizer as read_tokenizer

PADDING = 256
"""Rows by which two vocabularies may differ at their ends: releases of one family pad the same words to other sizes."""


@dataclass(frozen=True)
class DraftModel:
    """An open file that can guess for a model."""

    name: str
    file: GGUFFile
    spec: ModelSpec
    program: Program
    plan: Plan

    def drafter(self, backend: Backend, compute: ComputeChoice, n_vocab: int, reuse: bool) -> Drafter:
        """Compiles it; to be called on the engine's thread. n_vocab: of the large model."""
        step = backend.compile(self.program, Tensors(self.file), self.plan.limits, compute)
        rules: CacheRules = cache_rules(self.program, reuse)
        return Drafter(step, rules, n_vocab, self.spec.n_vocab)


def open_draft(
    name: str,
    file: GGUFFile,
    tokenizer: Tokenizer,
    program: Program,
    *,
    backend: Backend,
    compute: ComputeChoice,
    device: Device,
    weights: int,
    n_ctx: int | None,
    max_seqs: int,
) -> DraftModel:
    """The model in `file`, to guess for one of this tokenizer and program, whose weights take so many bytes.

    Memory is shared so that both caches hold about as many tokens. Raises UnsupportedModel for one that cannot guess,
    OutOfMemory.
    """
    spec = read_spec(file)
    if isinstance(spec, EncoderSpec):
        raise UnsupportedModel(f"the draft model {name} is an encoder ({spec.architecture}), which continues no text")
    small = assemble(spec, Tensors(file))
    for what, one in (("the draft model", small), ("the model that it is to guess for", program)):
        if one.states:
            raise UnsupportedModel(
                f"{what} has recurrent layers, whose state cannot be taken back to where a guess was wrong: leave the draft"
                " model out, or use one of attention layers only"
            )
    check_vocabulary(name, tokenizer, read_tokenizer(file.metadata))
    own = sum(t.nbytes for t in file.tensors.values())
    share = _width(small) / max(1, _width(small) + _width(program))
    budget = own + int(max(0, device.budget - weights - own) * share)
    length = min(spec.context_length, n_ctx or DEFAULT_CONTEXT)
    small = worth(small, length)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a shorter context ends the guessing, nothing else
        plan = plan_limits(
            small,
            replace(spec, context_length=length),
            compute=backend.compute_of(compute),
            device=replace(device, budget=min(budget, device.budget)),
            weights=own,
            n_ctx=None,
            max_seqs=max_seqs,
        )
    spec = read_spec(file, plan.n_ctx)
    assert isinstance(spec, ModelSpec)
    return DraftModel(name, file, spec, as_planned(assemble(spec, Tensors(file)), plan.limits.window_groups), plan)


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
    return sum(layer.n_kv * layer.head_dim for layer in program.caches)
