"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685), chosen row by row.

    chosen_linear:  y[t] = base[t] + W_i x[t],           i = ids[t]        (base only where the spec has one)
    lora:           y[t] = base[t] + B_i (A_i x[t]),     i = ids[t]

`W` stacks `count` matrices `[n, k]` as rows. The first one belongs to rows without an adapter, and is all zeros; whoever
stacks them sees to that. Scales are part of B. Sums are accumulated in float32 or wider, and a row's result does not
depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from quarrel.gguf import GGMLType
from quarrel.ops import draw
from quarrel.ops.contract import Array, Case, Concrete, Op, Operand, Param, RawWeight, Value, WeightRef
from quarrel.ops.linear import LINEAR
from quarrel.ops.null import Builder, expand
from quarrel.ops.program import STEP_INPUTS, Node, Program


@dataclass(frozen=True)
class ChosenLinearSpec:
    """`count` matrices `[n, k]`; `base` is added to."""

    type: GGMLType
    count: int
    n: int
    k: int
    base: bool = False
    out: Literal["act", "f32"] = "f32"

    @property
    def rows(self) -> int:
        return self.count * self.n


def _chosen_params(s: ChosenLinearSpec) -> tuple[Param, ...]:
    base = (Param("base", "f32", "T n"),) if s.base else ()
    return (Param("x", "act", "T k"), Param("ids", "i32", "T"), Param("weight", "weight", "rows k"), *base)


def chosen_linear_reference(
    s: ChosenLinearSpec, x: Array, ids: Array, weight: RawWeight, base: Array | None = None
) -> tuple[Array]:
    """NumPy body."""
    stack = weight.dense().reshape(s.count, s.n, s.k).astype(np.float64)
    y = np.zeros((len(x), s.n)) if base is None else base.astype(np.float64)
    for t, chosen in enumerate(ids):
        y[t] += stack[chosen] @ x[t]
    return (y.astype(np.float32),)


def _make_ids(case: Case, rng: np.random.Generator) -> Array:
    return rng.integers(0, case.spec.count, case.dims["T"]).astype(np.int32)


def _make_chosen(case: Case, rng: np.random.Generator) -> tuple[Concrete, ...]:
    s: ChosenLinearSpec = case.spec
    base = (draw.activations(rng, case.dims["T"], s.n),) if s.base else ()
    return (draw.activations(rng, case.dims["T"], s.k), _make_ids(case, rng), _stack(rng, s.count, s.n, s.k), *base)


def _stack(rng: np.random.Generator, count: int, n: int, k: int) -> RawWeight:
    stack = draw.weight(rng, GGMLType.F32, count * n, k)
    stack.raw.reshape(count, -1)[0] = 0
    return stack


def _chosen_strategy() -> Any:
    from hypothesis import strategies as st

    def case(count: int, n: int, k: int, base: bool, t: int) -> Case:
        return Case(ChosenLinearSpec(GGMLType.F32, count, n, k, base), {"T": t})

    return st.builds(case, st.integers(1, 5), st.integers(1, 70), st.integers(1, 70), st.booleans(), st.integers(1, 20))


CHOSEN_LINEAR = Op(
    "chosen_linear",
    ChosenLinearSpec,
    _chosen_params,
    lambda s: (Param("y", s.out, "T n"),),
    reference=chosen_linear_reference,
    make=_make_chosen,
    strategy=_chosen_strategy,
    cases=lambda: [
        Case(ChosenLinearSpec(GGMLType.F32, 3, 16, 512), {"T": 1}, "decode"),
        Case(ChosenLinearSpec(GGMLType.F32, 2, 129, 8, base=True), {"T": 17}, "odd rows, a small rank"),
        Case(ChosenLinearSpec(GGMLType.F32, 4, 67, 33, base=True, out="act"), {"T": 5}, "nothing divides"),
        Case(ChosenLinearSpec(GGMLType.F32, 5, 24, 300), {"T": 40}, "many rows of all adapters"),
    ],
)


@dataclass(frozen=True)
class LoraSpec:
    """`count` pairs of maps from `k` to `rank` to `n`."""

    count: int
    n: int
    k: int
    rank: int
    out: Literal["act", "f32"] = "f32"

    @property
    def a_rows(self) -> int:
        return self.count * self.rank

    @property
    def b_rows(self) -> int:
        return self.count * self.n


def _lora_expand(b: Builder, s: LoraSpec, inputs: Sequence[Operand]) -> Sequence[Value]:
    base, x, ids, down, up = inputs
    low = ChosenLinearSpec(GGMLType.F32, s.count, s.rank, s.k)
    high = ChosenLinearSpec(GGMLType.F32, s.count, s.n, s.rank, base=True, out=s.out)
    (y,) = b.emit(CHOSEN_LINEAR, low, x, ids, down)
    return b.emit(CHOSEN_LINEAR, high, y, ids, up, base)


def _make_lora(case: Case, rng: np.random.Generator) -> tuple[Concrete, ...]:
    s: LoraSpec = case.spec
    tokens = case.dims["T"]
    maps = (_stack(rng, s.count, s.rank, s.k), _stack(rng, s.count, s.n, s.rank))
    return (draw.activations(rng, tokens, s.n), draw.activations(rng, tokens, s.k), _make_ids(case, rng), *maps)


def _lora_strategy() -> Any:
    from hypothesis import strategies as st

    def case(count: int, n: int, k: int, rank: int, t: int) -> Case:
        return Case(LoraSpec(count, n, k, rank), {"T": t})

    return st.builds(case, st.integers(1, 4), st.integers(1, 70), st.integers(1, 70), st.integers(1, 20), st.integers(1, 9))


LORA = Op(
    "lora",
    LoraSpec,
    lambda s: (
        Param("base", "f32", "T n"),
        Param("x", "act", "T k"),
        Param("ids", "i32", "T"),
        Param("a", "weight", "a_rows k"),
        Param("b", "weight", "b_rows rank"),
    ),
    lambda s: (Param("y", s.out, "T n"),),
    expand=_lora_expand,
    make=_make_lora,
    strategy=_lora_strategy,
    cases=lambda: [
        Case(LoraSpec(2, 64, 96, 8), {"T": 1}, "decode"),
        Case(LoraSpec(3, 130, 77, 5, out="act"), {"T": 19}, "odd sizes"),
    ],
)


@dataclass(frozen=True)
class Adapted:
    """The adapters of one weight: how many, the first of them none, and the widest rank."""

    count: int
    rank: int


def a_ref(name: str, adapted: Adapted, k: int) -> WeightRef:
    """The stack of A for the weight of this name."""
    return WeightRef(f"{name}.lora_a", GGMLType.F32, adapted.count * adapted.rank, k)


def b_ref(ref: WeightRef, adapted: Adapted) -> WeightRef:
    """The stack of B for these rows of the weight."""
    name = f"{ref.name}.lora_b[{ref.start}:{ref.start + ref.rows}]"
    return WeightRef(name, GGMLType.F32, adapted.count * ref.rows, adapted.rank)


def with_adapters(program: Program, adapted: Mapping[str, Adapted]) -> tuple[Program, frozenset[str]]:
    """The program with each linear map of an adapted weight followed by its adapters, and the names that were found so.

    What such a map is fused into is taken apart for it. Rows are those of the step's tokens; maps of other rows, as behind
    the last layer, are left alone, and their names are not among those returned.
    """
    kind, axes = STEP_INPUTS["adapter"]
    values = [v for node in program.nodes for v in node.outputs] + list(program.inputs.values())
    next_id = 1 + max(v.id for v in values)
    ids = program.inputs.get("adapter") or Value(next_id, kind, (axes,), "adapter")  # type: ignore[arg-type]
    next_id += 1
    done: set[str] = set()
    nodes: list[Node] = []
    pending = list(reversed(program.nodes))
    while pending:
        node = pending.pop()
        names = {i.name for i in node.inputs if isinstance(i, WeightRef)} & adapted.keys()
        if names and node.op.expand is not None:
            body, next_id = expand(node, next_id)
            pending.extend(reversed(body))
        elif names and node.op is LINEAR and node.outputs[0].dims[0] == axes:
            x, weight = node.inputs[:2]
            assert isinstance(weight, WeightRef)
            found, (out,) = adapted[weight.name], node.outputs
            base = Value(next_id, "f32", out.dims, "base")
            next_id += 1
            nodes.append(Node(LINEAR, replace(node.spec, out="f32"), node.inputs, (base,), node.path))
            spec = LoraSpec(found.count, weight.rows, weight.k, found.rank, node.spec.out)
            maps = (a_ref(weight.name, found, weight.k), b_ref(weight, found))
            nodes.append(Node(LORA, spec, (base, x, ids, *maps), (out,), node.path))
            done.add(weight.name)
        else:
            nodes.append(node)
    inputs = {**program.inputs, "adapter": ids}
    return replace(program, nodes=tuple(nodes), inputs=inputs), frozenset(done)
