"""A stage of a model: consecutive layers, whose program reads the stream of the layers before and gives its own.

The first stage embeds the tokens, the last one scores and draws. Nothing else crosses from stage to stage. A stage is of
one rank, or of several that share its layers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from quarrel.errors import RequestError
from quarrel.ops.contract import CacheRef, Operand, StateRef, Value
from quarrel.ops.embedding import gather_rows
from quarrel.ops.null import Builder
from quarrel.ops.program import Node, Program

_LAYER = re.compile(r"blk\.(\d+)\.")


def place_of(rank: int, ranks: int, stages: int) -> tuple[int, int]:
    """The stage of a rank, and which of the stage's ranks it is. The first ranks are those of the last stage."""
    width = ranks // stages
    return (rank // width - 1) % stages, rank % width


def stage_of(program: Program, owners: Sequence[int], stage: int) -> Program:
    """The stage's program. owners: the stage of each layer, in order.

    All but the last give `stream`, `[T, E]` float32, and `hidden`, those of its rows that are asked for; all but the first
    take the input `stream`. Raises RequestError where layers read more of those before than the stream.
    """
    last = owners[-1]
    own: list[list[Node]] = [[] for _ in range(last + 1)]
    for node in program.nodes:
        layer = _LAYER.match(node.path)
        own[owners[int(layer[1])] if layer else last if node.path.startswith("output") else 0].append(node)
    b, values = Builder(), dict[int, Value]()
    for name, value in program.inputs.items():
        if any(value in node.inputs for node in own[stage]):
            values[value.id] = b.input(name, int(value.dims[1]) if len(value.dims) > 1 and name != "block_table" else 0)
    if stage:
        (stream,) = own[stage - 1][-1].outputs
        values[stream.id] = b.input("stream", int(stream.dims[1]))
    refs: dict[CacheRef | StateRef, CacheRef | StateRef] = {}

    def operand(node: Node, o: Operand) -> Operand:
        if isinstance(o, Value):
            if o.id not in values:
                raise RequestError(
                    f"{node.path} reads more of the layers before than their result, so this model cannot be divided into"
                    " stages: use tensor_parallel, or one device",
                    "pipeline_parallel",
                )
            return values[o.id]
        if isinstance(o, CacheRef) and o not in refs:
            refs[o] = b.cache(program.caches[o.layer])
        elif isinstance(o, StateRef) and o not in refs:
            refs[o] = b.state(*program.states[o.index].shape)
        return refs[o] if isinstance(o, CacheRef | StateRef) else o

    for node in own[stage]:
        with b.at(node.path):
            made = b.emit(node.op, node.spec, *(operand(node, o) for o in node.inputs))
        values.update(zip((v.id for v in node.outputs), made, strict=True))
    if stage == last:
        return b.program(**{name: values[v.id] for name, v in program.outputs.items()})
    (h,) = own[stage][-1].outputs
    with b.at("output"):
        hidden = gather_rows(b, values[h.id], b.input("out_rows"))
    return b.program(hidden=hidden, stream=values[h.id])
