"""Which values of a deterministic step lie in the order in which the ring of weights reads them."""

from __future__ import annotations

from typing import Any

import pytest

from quarrel.gguf import GGMLType
from quarrel.ops.attention import ATTENTION, AttentionSpec
from quarrel.ops.contract import CacheRef, Value, WeightRef
from quarrel.ops.linear import LINEAR, LINEAR_ADD, NORM_GATE_UP, LinearAddSpec, LinearSpec, NormGateUpSpec
from quarrel.ops.norm import NormSpec
from quarrel.ops.program import Node, Program
from quarrel.ops.registry import lower
from quarrel.triton_backend import ring_order
from quarrel.triton_backend.backend import REGISTRY

TYPE, WIDTH, WIDE = GGMLType.Q4_K, 512, 1024
ATTENDED, SUM, HIDDEN, LAST, OTHER = 10, 11, 12, 13, 14


def act(id: int, width: int, kind: Any = "act") -> Value:
    return Value(id, kind, ("T", width), f"v{id}")


def weight(name: str, n: int, k: int, type: GGMLType = TYPE) -> WeightRef:
    return WeightRef(name, type, n, k)


def layer(
    heads: int = 8, o: GGMLType = TYPE, down: GGMLType = TYPE, wide: int = WIDE, cap: bool = False, spare: int | None = None
) -> tuple[Node, ...]:
    """Attention, its output, gate with up, and down; `spare` is read by a map of another format too."""
    ints = tuple(Value(i, "i32", ("S",), n) for i, n in enumerate(("query_start", "kv_len", "block_table"), 1))
    spec = AttentionSpec(heads, 2, 64, 0.125, cap=20.0 if cap else 0.0)
    gain, pair = weight("gain", 1, WIDTH, GGMLType.F32), LinearSpec(TYPE, wide, WIDTH)
    maps = (LinearSpec(o, WIDTH, spec.width), LinearSpec(down, WIDTH, wide))
    attended, stream, hidden = act(ATTENDED, spec.width), act(SUM, WIDTH, "f32"), act(HIDDEN, wide)
    o_ref, down_ref = weight("o", WIDTH, spec.width, o), weight("down", WIDTH, wide, down)
    both = (weight("gate", wide, WIDTH), weight("up", wide, WIDTH))
    gated = NormGateUpSpec(NormSpec("rms", WIDTH, 1e-5), pair, pair, "silu")
    nodes = [
        Node(ATTENTION, spec, (act(0, spec.width), *ints, CacheRef(0)), (attended,)),
        Node(LINEAR_ADD, LinearAddSpec(maps[0]), (act(5, WIDTH, "f32"), attended, o_ref), (stream,)),
        Node(NORM_GATE_UP, gated, (stream, gain, *both), (hidden,)),
        Node(LINEAR_ADD, LinearAddSpec(maps[1]), (stream, hidden, down_ref), (act(LAST, WIDTH, "f32"),)),
    ]
    if spare is not None:
        k = spec.width if spare == ATTENDED else wide
        more = LinearSpec(GGMLType.F16, 64, k)
        nodes.append(Node(LINEAR, more, (act(spare, k), weight("more", 64, k, GGMLType.F16)), (act(OTHER, 64),)))
    return tuple(nodes)


@pytest.mark.parametrize(
    ("nodes", "kept", "want"),
    [
        (layer(), set(), {ATTENDED, HIDDEN}),
        (layer(cap=True), set(), {ATTENDED, HIDDEN}),
        (layer(down=GGMLType.Q6_K), set(), {ATTENDED, HIDDEN}),
        (layer(), {HIDDEN}, {ATTENDED}),
        (layer(spare=HIDDEN), set(), {ATTENDED}),
        (layer(spare=ATTENDED), set(), {HIDDEN}),
        (layer(heads=6, o=GGMLType.Q8_0), set(), {HIDDEN}),  # 384 columns
        (layer(o=GGMLType.F16), set(), {HIDDEN}),
        (layer(down=GGMLType.F16), set(), {ATTENDED}),
        (layer(wide=640, down=GGMLType.Q8_0), set(), {ATTENDED}),
    ],
)
def test_what_every_reader_takes_so(nodes: tuple[Node, ...], kept: set[int], want: set[int]) -> None:
    inputs = {f"v{i}": act(i, 1) for i in (0, 1, 2, 3, 5)}
    assert ring_order.values(lower(Program(nodes, inputs, {}, ()), REGISTRY), kept) == want
