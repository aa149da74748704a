"""How long a context, and how many of them, fit the memory that a backend has."""

from __future__ import annotations

import math
import warnings

from quarrel.errors import OutOfMemory, RequestError
from quarrel.models import EncoderSpec, ModelSpec
from quarrel.ops.contract import Compute
from quarrel.ops.program import Program
from quarrel.ops.step import Limits

DEFAULT_CONTEXT = 8192
BLOCK = 32
STEP_TOKENS = 512
"""Rows of a prefill step: past a few hundred the weights are read once for enough work to fill any device."""
MIN_CONTEXT = 64
SHORT_TEXT = 8
"""Tokens of the shortest texts that are worth filling an encoder's step with."""
SHARE = 0.5
"""Of the memory left over, what further sequences' caches may take."""


def cache_bytes_per_token(program: Program, compute: Compute) -> int:
    """Keys and values of one token in all layers."""
    width = 4 if compute == "float32" else 2
    return sum(2 * layer.n_kv * layer.head_dim * width for layer in program.caches)


def state_bytes(program: Program) -> int:
    """What the recurrent layers keep of one sequence, however long it is."""
    return sum(4 * math.prod(state.shape) for state in program.states)


def plan_limits(
    program: Program,
    spec: ModelSpec,
    *,
    compute: Compute,
    free: int,
    weights: int,
    n_ctx: int | None,
    max_seqs: int,
) -> tuple[Limits, int]:
    """Limits of a step and the context length.

    Without `n_ctx` it is the model's own, at most 8192, and shorter with a warning where memory ends earlier. Raises
    OutOfMemory where an explicit `n_ctx`, or any context at all, does not fit; RequestError where the model has no such
    context.
    """
    wanted = _wanted(spec, n_ctx)
    # A model without attention has no cache; its blocks are counted all the same.
    block_bytes = max(1, BLOCK * cache_bytes_per_token(program, compute))
    # One prefill step, and a row of logits a sequence.
    activations = _activations(spec, STEP_TOKENS) + 4 * max_seqs * spec.n_vocab
    left = free - weights - activations - max_seqs * state_bytes(program)
    # One block more than a context fills: continuing from another sequence's half-used block copies that block.
    fitting = left // block_bytes - 1
    length = min(wanted, fitting * BLOCK)
    if length < (wanted if n_ctx else min(wanted, MIN_CONTEXT)):
        raise OutOfMemory(
            f"a context of {wanted} tokens takes {_gib(_blocks(wanted) * block_bytes)}, the weights {_gib(weights)}, and"
            f" {_gib(free)} are free: {f'use n_ctx={fitting * BLOCK} or less' if fitting > 1 else 'use a smaller model'}"
        )
    if length < wanted:
        warnings.warn(
            f"the context is reduced from {wanted} to {length} tokens: {_gib(free)} are free, the weights take"
            f" {_gib(weights)}; give n_ctx to choose it yourself",
            stacklevel=3,
        )
    blocks = _blocks(length)
    sequences = max(1, min(max_seqs, int(left * SHARE) // (blocks * block_bytes)))
    return Limits(max(STEP_TOKENS, max_seqs), max_seqs, blocks, sequences * blocks + 1, BLOCK), length


def plan_encoder(spec: EncoderSpec, *, free: int, weights: int, n_ctx: int | None, max_seqs: int) -> tuple[Limits, int]:
    """Limits of an encoder's step, which holds a whole text, and the length of that. Raises as `plan_limits`."""
    length = _wanted(spec, n_ctx)
    tokens = max(STEP_TOKENS, length, max_seqs)
    needed = _activations(spec, tokens)
    if weights + needed > free:
        raise OutOfMemory(
            f"texts of {length} tokens take {_gib(needed)}, the weights {_gib(weights)}, and {_gib(free)} are free: use a"
            " smaller n_ctx or a smaller model"
        )
    # It has no cache; the blocks are numbers only.
    # Sequences cost it nothing: as many as a step of short texts holds.
    seqs = max(max_seqs, tokens // SHORT_TEXT)
    return Limits(tokens, seqs, _blocks(length), seqs * _blocks(length), BLOCK), length


def _wanted(spec: ModelSpec | EncoderSpec, n_ctx: int | None) -> int:
    if n_ctx is not None and not 1 <= n_ctx <= spec.context_length:
        raise RequestError(f"n_ctx is {n_ctx}, wanted 1 to {spec.context_length}, the context that the model was made for")
    return n_ctx or min(spec.context_length, DEFAULT_CONTEXT)


def _activations(spec: ModelSpec | EncoderSpec, tokens: int) -> int:
    """Bytes of the residual stream and what a layer makes of it."""
    return 4 * tokens * 16 * spec.n_embd


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB"
