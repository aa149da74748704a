"""A mixture of experts behind a router, perhaps with one more that every token passes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quarrel.errors import UnsupportedModel
from quarrel.models.cut import Cutter
from quarrel.models.kind import Block, Kind
from quarrel.models.spec import FeedForward
from quarrel.ops.activation import GatedSpec, gated, plain
from quarrel.ops.contract import Value
from quarrel.ops.linear import linear, linear_add
from quarrel.ops.moe import ExpertActivation, ExpertDownSpec, ExpertUpSpec, Gate, RouteSpec, expert_down, expert_up, route
from quarrel.ops.null import Builder
from quarrel.ops.position import MOST_POSITIONS, by_position


@dataclass(frozen=True)
class Experts(FeedForward):
    """`used` of `n_experts` feed-forwards a token, weighted, plus a shared one of width `shared` if that is not 0. With
    `gains` each expert's weight is multiplied by a number of its own.

    `shared_gate`: the shared one's result is multiplied by the sigmoid of `ffn_gate_inp_shexp`, one number a token.
    `on_input`: a weight multiplies what its expert reads, not its result (Llama 4); one expert a token.
    """

    n_experts: int
    used: int
    width: int
    activation: ExpertActivation
    gate: Gate = "softmax"
    renormalise: bool = True
    scale: float = 1.0
    shared: int = 0
    n_groups: int = 1
    groups_used: int = 1
    shared_gate: bool = False
    on_input: bool = False
    gains: bool = False


def feed(b: Builder, block: Block, e: Experts, h: Value) -> tuple[Value, None]:
    """The weighted sum of the chosen experts and the shared one, `[T, n_embd]`."""
    x = block.normed(b, h)
    out = routed(b, block, e, x, x)
    return (out if not e.shared else _shared(b, block, e, x, out)), None


def routed(b: Builder, block: Block, e: Experts, x: Value, judged: Value) -> Value:
    """The weighted sum of the experts that the router chooses by `judged`, `[T, n_embd]`."""
    logits = linear(b, judged, *block.linear("ffn_gate_inp", e.n_experts, block.n_embd), out="f32")
    # Added to the scores that choose; ERNIE's is one row of a matrix.
    shift = block.row("exp_probs_b.bias", e.n_experts) if block.has("exp_probs_b.bias") else None
    choice = RouteSpec(
        e.n_experts, e.used, e.gate, e.renormalise, e.scale, shift is not None, e.n_groups, e.groups_used, e.gains
    )
    gains = block.vector("ffn_down_exps.scale", e.n_experts) if e.gains else None
    ids, weights = route(b, choice, logits, shift, gains)
    if block.has("ffn_up.0.weight"):
        raise UnsupportedModel(
            f"{block.prefix}ffn_up.0.weight and its like hold one expert each, as files from before 2024 do; Quarrel wants"
            f" the experts of a layer in one tensor, {block.prefix}ffn_up_exps.weight: convert the model again"
        )
    names = ("gate", "up") if block.has("ffn_gate_exps.weight") else ("up",)
    if block.has("ffn_gate_up_exps.weight"):
        names, fused = ("gate", "up"), f"{block.prefix}ffn_gate_up_exps.weight"
        stacks = list(block.tensors.stacks(fused, names, e.n_experts, e.width, block.n_embd))
    else:
        stacks = [block.stack(f"ffn_{name}_exps", e.n_experts, e.width, block.n_embd) for name in names]
    biased = block.has("ffn_up_exps.bias")
    biases = [block.matrix(f"ffn_{n}_exps.bias", e.n_experts, e.width) for n in names if biased]
    first = ExpertUpSpec(stacks[0].type, e.n_experts, e.used, e.width, block.n_embd, e.activation, len(names) == 2, biased)
    read = x
    if e.on_input:
        if e.used != 1:
            raise UnsupportedModel(f"{e.used} experts a token whose inputs are weighted; Quarrel wants one, as Llama 4 has")
        read = gated(b, GatedSpec("identity", block.n_embd, per_row=True), weights, x)
        weights = by_position(b, (1.0,), MOST_POSITIONS)  # ones
    y = expert_up(b, first, read, ids, *stacks, *biases)
    down = block.stack("ffn_down_exps", e.n_experts, block.n_embd, e.width)
    offset = block.tensors.optional(f"{block.prefix}ffn_down_exps.bias", e.n_experts, block.n_embd)
    second = ExpertDownSpec(down.type, e.n_experts, e.used, block.n_embd, e.width, offset is not None)
    return expert_down(b, second, y, ids, weights, down, offset)


def _shared(b: Builder, block: Block, e: Experts, x: Value, routed: Value) -> Value:
    up = linear(b, x, *block.linear("ffn_up_shexp", e.shared, block.n_embd))
    if block.has("ffn_gate_shexp.weight"):
        gate = linear(b, x, *block.linear("ffn_gate_shexp", e.shared, block.n_embd))
        up = gated(b, GatedSpec("silu", e.shared), gate, up)
    else:
        up = plain(b, "relu2", up)
    if e.shared_gate:
        rate = linear(b, x, block.tensors.grouped(f"{block.prefix}ffn_gate_inp_shexp.weight", 1, block.n_embd))
        up = gated(b, GatedSpec("sigmoid", e.shared, per_row=True), rate, up)
    return linear_add(b, routed, up, *block.linear("ffn_down_shexp", block.n_embd, e.shared))


def shard(cut: Cutter, e: Experts) -> Experts | None:
    """A part of each expert, so that every rank has work whatever experts are chosen."""
    own = cut.portion(e.width, 1, "ffn_down_exps.weight")
    shared = cut.portion(e.shared, 1, "ffn_down_shexp.weight") if e.shared else (0, 0)
    if own is None or shared is None:
        return None
    for which, width, part in (("exps", e.width, own), ("shexp", e.shared, shared)):
        if width:
            cut.rows(f"ffn_gate_{which}", width, part)
            cut.rows(f"ffn_up_{which}", width, part)
            cut.columns(f"ffn_down_{which}", width, part)
    cut.rows("ffn_gate_up_exps", 2 * e.width, own, (e.width + own[0], e.width + own[1]))
    return replace(e, width=own[1] - own[0], shared=shared[1] - shared[0])


KIND = Kind(Experts, feed, shard, ("ffn_", "exp_probs"))
