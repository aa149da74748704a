"""One memory budget: what a model needs by purpose, before anything is allocated, and what context that leaves."""

from __future__ import annotations

import ctypes
import math
import sys
import warnings
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace

from quarrel.errors import OptionWarning, OutOfMemory, RequestError
from quarrel.models import EncoderSpec, ModelSpec
from quarrel.ops.contract import Compute, Operand, Value, WeightRef
from quarrel.ops.embedding import EMBEDDING
from quarrel.ops.kv import KVType
from quarrel.ops.program import Program
from quarrel.ops.step import Limits

DEFAULT_CONTEXT = 8192
BLOCK = 32
MIN_CONTEXT = 64
LEAST_STEP = 128
"""Tokens of a prefill step on the smallest device."""
ENCODER_STEPS = 4
"""Prefill steps that an encoder's step is as long as, on a device that is done with a short one before it is launched."""
SHARE = 0.5
"""Of the memory left over, for the caches of further sequences."""
ROOM = 3
"""Times the values alive at once: backends keep rounded copies, routed rows and partial sums beside them (measured: 1.2 to
2.6 over all architectures)."""
MAX_SNAPSHOTS = 48
"""Copies of recurrent state beside those in use: the ends of as many prompts and answers."""
SNAPSHOT_SHARE = 0.25
"""Of the memory left over, for them."""
DECODED_SHARE = 0.9
"""Of the memory left over after all else, for weights that are kept decoded too."""
GRAPH_BYTES = 16 << 20
"""A captured graph and its pool, for each size of batch."""


@dataclass(frozen=True)
class Device:
    """The device of a plan: bytes free, bytes that may be used, and how the backend steps."""

    free: int
    budget: int
    step_tokens: int = 512
    """Rows of a prefill step, unless its values need more than a quarter of what the weights leave."""
    captures: bool = False
    """It captures graphs, and decodes whole matrices for long prompts."""

    @classmethod
    def of(cls, free: int, memory: int | float | None, step_tokens: int = 512, captures: bool = False) -> Device:
        """`memory` in bytes, or a share of what is free if it is 1.0 or a smaller float; None is all of it."""
        share = isinstance(memory, float)
        wanted = free if memory is None else int(free * memory) if share else int(memory)
        return cls(free, min(wanted, free), step_tokens, captures)


@dataclass(frozen=True)
class Plan:
    """Bytes by purpose, all within the budget, and what they allow."""

    free: int
    budget: int
    weights: int
    cache: int
    """Keys and values."""
    states: int
    """Recurrent states of running sequences."""
    snapshots: int
    """Copies of them, to continue from."""
    scratch: int
    """Values of a step, routed rows, decoded matrices, rows of logits."""
    graphs: int
    n_ctx: int
    longest: int
    """The longest context that one sequence could have in this budget, at most the model's own."""
    limits: Limits
    host: int = 0
    """Experts in host memory, none of the budget."""
    host_layers: int = 0
    """How many layers' they are."""
    resident: int = 0
    """Of the weights, for the experts among those that are used most."""

    @property
    def decoded(self) -> int:
        """For weights that are kept decoded too, beside `weights`."""
        return self.limits.decoded_bytes

    @property
    def total(self) -> int:
        return self.weights + self.decoded + self.cache + self.states + self.snapshots + self.scratch + self.graphs

    @property
    def spare(self) -> int:
        return self.budget - self.total

    def with_snapshots(self, program: Program, most: int | None = None) -> Plan:
        """The same with slots for copies of recurrent states, in a share of what is left over, and at most `most` bytes."""
        size = state_bytes(program)
        if not size:
            return self
        room = int(SNAPSHOT_SHARE * self.spare)
        count = max(0, min(MAX_SNAPSHOTS, (room if most is None else min(room, most)) // size))
        limits = replace(self.limits, n_states=self.limits.states + count)
        return replace(self, limits=limits, snapshots=count * size)

    def with_decoded(self, program: Program) -> Plan:
        """The same with room for matrices of two bytes a value, in a share of what is left over, and at most for all whose
        rows of x are those of a prompt."""
        return replace(self, limits=replace(self.limits, decoded_bytes=decoded_room(program, self.spare)))


def decoded_room(program: Program, spare: int) -> int:
    """Bytes for weights that are kept decoded too, where so many are left over."""
    nodes = [n for n in program.nodes if n.op is not EMBEDDING and _axis(n.inputs[0]) == "T"]
    refs = {w.name: w for node in nodes for w in node.inputs if isinstance(w, WeightRef) and w.rows > 1}
    return min(int(DECODED_SHARE * max(0, spare)), 2 * sum(w.rows * w.k for w in refs.values()))


@dataclass(frozen=True)
class Demand:
    """Blocks of the pool that a context needs: its own, and for each window group as many as the window touches."""

    groups: int
    window: int
    """Blocks that a window touches, and one that is being filled."""
    step: int
    """Blocks of a step's tokens, kept until the step is launched."""

    @classmethod
    def of(cls, program: Program, tokens: int) -> Demand:
        return cls(program.window_groups, _blocks(program.window) + 2, _blocks(tokens))

    def each(self, blocks: int) -> int:
        """Of each running sequence."""
        return blocks + self.groups * min(blocks, self.window)

    def of_one(self, blocks: int) -> int:
        """Of the only sequence, at any time: also during its prefill, and where it copies the partly used block of a
        prefix."""
        return blocks + self.groups * min(blocks, self.window + self.step) + 1 + self.groups

    def fitting(self, pool: int, most: int) -> int:
        """Blocks of the longest context, up to `most`, that fits a pool of this size; -1 if none."""
        return bisect_right(range(most + 1), pool, key=self.of_one) - 1


def cache_bytes_per_token(program: Program, compute: Compute, kv_cache: KVType = "auto") -> int:
    """Keys and values of one token in all layers, scales included; of one group of layers, where there are several."""
    width = 4 if compute == "float32" else 2
    return sum(layer.row_bytes(kv_cache, width) for layer in program.caches)


def cache_tokens(program: Program, limits: Limits) -> int:
    """Tokens of whole contexts that the cache has room for; none for an encoder, which has no cache."""
    if not (program.caches or program.states):
        return 0
    blocks = limits.max_blocks_per_seq
    return limits.n_blocks * blocks // Demand.of(program, limits.max_tokens).each(blocks) * limits.block_size


def state_bytes(program: Program) -> int:
    """What the recurrent layers keep of one sequence, however long it is."""
    return sum(4 * math.prod(state.shape) for state in program.states)


def step_bytes(program: Program, limits: Limits) -> int:
    """Caches, states and values of a step of these limits, in 16 bits."""
    cache = cache_bytes_per_token(program, "float16") * limits.n_blocks * limits.block_size
    return cache + state_bytes(program) * limits.states + scratch_bytes(program, limits.max_tokens, limits.max_seqs)


def scratch_bytes(program: Program, tokens: int, rows: int) -> int:
    """Values that are alive at once in a step, as float32: those of its tokens, with room for what backends add, and those
    of the rows whose results are wanted."""
    return ROOM * _alive(program, {"T": tokens, "S": tokens, "R": 0}) + _alive(program, {"R": rows})


def _alive(program: Program, rows: Mapping[str, int]) -> int:
    """The most bytes at once; axes that are not named count nothing."""
    last = {v.id: i for i, node in enumerate(program.nodes) for v in (*node.inputs, *node.outputs) if isinstance(v, Value)}
    last |= {v.id: len(program.nodes) for v in program.outputs.values()}
    alive: dict[int, int] = {}
    peak = 0
    for i, node in enumerate(program.nodes):
        for value in node.outputs:
            alive[value.id] = 4 * math.prod(rows.get(d, 0) if isinstance(d, str) else d for d in value.dims)
        peak = max(peak, sum(alive.values()))
        alive = {id: size for id, size in alive.items() if last[id] > i}
    return peak


def _axis(operand: Operand) -> object:
    return operand.dims[0] if isinstance(operand, Value) and operand.dims else None


def caller_stacklevel() -> int:
    """The `stacklevel` of the first call from outside this package, seen from the one that warns."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("quarrel."):
        level, frame = level + 1, frame.f_back
    return level


def _step_bytes(program: Program, spec: ModelSpec, tokens: int, rows: int) -> int:
    return max(scratch_bytes(program, tokens, rows), _activations(spec, tokens))


def _step_tokens(program: Program, spec: ModelSpec, device: Device, weights: int) -> int:
    """The device's number of rows, halved as often as their values would crowd out the cache."""
    tokens = device.step_tokens
    while tokens > LEAST_STEP and 4 * _step_bytes(program, spec, tokens, 0) > device.budget - weights:
        tokens //= 2
    return tokens


def largest_matrices(program: Program) -> int:
    """The matrices of the largest op, two bytes a value."""
    sizes = (sum(w.rows * w.k for w in node.inputs if isinstance(w, WeightRef)) for node in program.nodes)
    return 2 * max(sizes, default=0)


def plan_limits(
    program: Program,
    spec: ModelSpec,
    *,
    compute: Compute,
    device: Device,
    weights: int,
    n_ctx: int | None,
    max_seqs: int,
    kv_cache: KVType = "auto",
    rollback: bool = False,
) -> Plan:
    """The plan of a decoder. rollback: every recurrent state has a second slot.

    Without `n_ctx` the context is the model's own, at most 8192, and shorter with a warning where the budget ends earlier.
    Raises OutOfMemory where an explicit `n_ctx`, or any context at all, does not fit; RequestError where the model has no
    such context.
    """
    wanted = context_of(spec, n_ctx)
    # A model without attention has no cache; its blocks are counted all the same.
    block_bytes = max(1, BLOCK * cache_bytes_per_token(program, compute, kv_cache))
    tokens = max(_step_tokens(program, spec, device, weights), max_seqs)
    # Only scoring wants results of more than one row a sequence; their pages are allocated then.
    scratch = _step_bytes(program, spec, tokens, max_seqs) + 4 * max_seqs * spec.n_vocab
    scratch += largest_matrices(program) if device.captures else 0
    graphs = GRAPH_BYTES * (1 + (max_seqs - 1).bit_length()) if device.captures else 0
    slots = 2 * max_seqs if rollback and program.states else max_seqs
    states = slots * state_bytes(program)
    left = device.budget - weights - scratch - graphs - states
    demand = Demand.of(program, tokens)
    longest = max(0, min(spec.context_length, demand.fitting(left // block_bytes, _blocks(spec.context_length)) * BLOCK))
    length = min(wanted, longest)
    least = wanted if n_ctx else min(wanted, MIN_CONTEXT)
    if length < least:
        parts = {"weights": weights, "states": states, "scratch": scratch, "graphs": graphs}
        parts["a context of " + str(least)] = demand.of_one(_blocks(least)) * block_bytes
        shortest = demand.of_one(_blocks(MIN_CONTEXT)) * block_bytes
        raise OutOfMemory(_refusal(device, parts, longest, weights + left - shortest), "n_ctx")
    if length < wanted:
        message = (
            f"the context is reduced from {wanted} to {length} tokens: {_budget(device)}, the weights take"
            f" {gib(weights)}; give n_ctx to choose it yourself"
        )
        warnings.warn(OptionWarning(message, "n_ctx"), stacklevel=caller_stacklevel())
    blocks = _blocks(length)
    sequences = max(1, min(max_seqs, int(left * SHARE) // (demand.each(blocks) * block_bytes)))
    n_blocks = demand.of_one(blocks) + (sequences - 1) * demand.each(blocks)
    groups = program.window_groups
    limits = Limits(tokens, max_seqs, blocks, n_blocks, BLOCK, slots, kv_cache=kv_cache, window_groups=groups)
    cache = limits.n_blocks * block_bytes if program.caches else 0
    return Plan(device.free, device.budget, weights, cache, states, 0, scratch, graphs, length, longest, limits)


def plan_encoder(spec: EncoderSpec, *, device: Device, weights: int, n_ctx: int | None, max_seqs: int) -> Plan:
    """The plan of an encoder, whose step holds a whole text. Raises as `plan_limits`."""
    length = context_of(spec, n_ctx)
    tokens = device.step_tokens * (ENCODER_STEPS if device.captures else 1)
    while tokens > device.step_tokens and 4 * _activations(spec, tokens) > device.budget - weights:
        tokens //= 2
    tokens = max(tokens, length, max_seqs)
    needed = _activations(spec, tokens)
    if weights + needed > device.budget:
        parts = {"weights": weights, f"texts of {length} tokens": needed}
        raise OutOfMemory(_refusal(device, parts, 0, device.budget - _activations(spec, device.step_tokens)), "n_ctx")
    # It has no cache; the blocks are numbers only, one a sequence. Texts cost it nothing: as many as there are tokens.
    limits = Limits(tokens, tokens, 1, tokens, tokens)
    fitting = (device.budget - weights) // _activations(spec, 1)
    longest = min(spec.context_length, fitting)
    return Plan(device.free, device.budget, weights, 0, 0, 0, needed, 0, length, longest, limits)


def _refusal(device: Device, parts: Mapping[str, int], longest: int, weights: int) -> str:
    """Bytes needed, bytes there are, and what would fit."""
    needed = ", ".join(f"{name} {gib(size)}" for name, size in parts.items() if size)
    fits = []
    if longest >= MIN_CONTEXT:
        fits.append(f"a context of {longest} tokens would fit: use n_ctx={longest} or less")
    elif weights > 0:
        fits.append(f"weights of {gib(weights)} would fit: use a smaller model or a smaller quantisation of it")
    else:
        fits.append("no model fits that: use another device, a smaller n_ctx or a smaller model")
    if device.budget < device.free:
        fits.append(f"or give more than the {gib(device.budget)} that it may use")
    return f"the model needs {gib(sum(parts.values()))} ({needed}), and {_budget(device)}; {', '.join(fits)}"


def _budget(device: Device) -> str:
    if device.budget < device.free:
        return f"{gib(device.budget)} of the {gib(device.free)} that are free may be used"
    return f"{gib(device.free)} are free"


def context_of(spec: ModelSpec | EncoderSpec, n_ctx: int | None) -> int:
    """The requested context, or the default."""
    if n_ctx is not None and not 1 <= n_ctx <= spec.context_length:
        further = "" if isinstance(spec, EncoderSpec) else "; rope_scaling='yarn' goes further"
        message = f"n_ctx is {n_ctx}, wanted 1 to {spec.context_length}, the context that the model was made for{further}"
        raise RequestError(message, "n_ctx", "rope_scaling")
    return n_ctx or min(spec.context_length, DEFAULT_CONTEXT)


def _activations(spec: ModelSpec | EncoderSpec, tokens: int) -> int:
    """Bytes of the residual stream and what a layer makes of it."""
    return 4 * tokens * 16 * spec.n_embd


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)


def gib(count: int) -> str:
    """Bytes in words."""
    return f"{count / (1 << 30):.2f} GiB" if count >= 1 << 27 else f"{count / (1 << 20):.2f} MiB"


def give_back() -> None:
    """Freed memory goes to the system again, which glibc keeps in the arena of each thread that had it: with it, a server
    that exchanged a small model 60 times grew by 7 MiB, now by 1."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
