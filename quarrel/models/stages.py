"""A stage of a model: consecutive layers, whose program reads the stream of the layers before and gives its own.

The first stage embeds the tokens, the last one scores and draws. Nothing else crosses from stage to stage, except what some
models make of a token for all of their layers: `per_layer`. A stage is of one rank, or of several that share its layers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from quarrel.errors import RequestError
from quarrel.ops.contract import CacheRef, Operand, StateRef, Value
from quarrel.ops.embedding import gather_rows
from quarrel.ops.null import Builder
from quarrel.ops.program import Program

_LAYER = re.compile(r"blk\.(\d+)\.")
_CROSSING = ("stream", "per_layer")
"""What stages hand on, the newest value first; each is an input and an output of a step."""


def place_of(rank: int, ranks: int, stages: int) -> tuple[int, int]:
    """The stage of a rank, and which of the stage's ranks it is. The first ranks are those of the last stage."""
    width = ranks // stages
    return (rank // width - 1) % stages, rank % width


def stage_of(program: Program, owners: Sequence[int], stage: int) -> Program:
    """The program of a stage of several. owners: the stage of each layer, in order.

    All but the last give `stream`, `[T, E]` float32, and `hidden`, those of its rows that are asked for; all but the first
    take the input `stream`. Raises RequestError where layers read more of those before than the stream.
    """
    begin = _begin(program, owners.index(1))
    if more := _crossing(program, begin)[1:]:
        reader = next(node for node in program.nodes[begin:] if more[0] in node.inputs)
        raise RequestError(
            f"{reader.path} reads more of the layers before than their result, so this model cannot be divided into"
            " stages: use tensor_parallel, or one device",
            "pipeline_parallel",
        )
    return _between(
        program, owners.index(stage) if stage else None, owners.index(stage + 1) if stage < owners[-1] else None
    )


def two_stages(program: Program, layers: int) -> tuple[Program, Program]:
    """The first so many layers, as in `stage_of`, and the rest. layers: one of `borders`."""
    return _between(program, None, layers), _between(program, layers, None)


def borders(program: Program) -> list[int]:
    """Numbers of first layers that can be a stage, from 1 on: those behind which nobody reads their keys."""
    numbers = {int(found[1]) for node in program.nodes if (found := _LAYER.match(node.path))}
    used: dict[CacheRef | StateRef, list[int]] = {}
    for node in program.nodes:
        for ref in node.inputs:
            if isinstance(ref, CacheRef | StateRef) and (found := _LAYER.match(node.path)):
                used.setdefault(ref, []).append(int(found[1]))
    return [n for n in range(1, len(numbers) + 1) if not any(min(layers) < n <= max(layers) for layers in used.values())]


def _between(program: Program, first: int | None, end: int | None) -> Program:
    """The program from layer `first` to the one before `end`; None is from the beginning, and to the end."""
    begin = 0 if first is None else _begin(program, first)
    stop = len(program.nodes) if end is None else _begin(program, end)
    own = program.nodes[begin:stop]
    b, values = Builder(), dict[int, Value]()
    for name, value in program.inputs.items():
        if any(value in node.inputs for node in own):
            values[value.id] = b.input_like(name, value)
    for name, value in zip(_CROSSING, _crossing(program, begin), strict=False):
        values[value.id] = b.input(name, int(value.dims[1]))
    refs: dict[CacheRef | StateRef, CacheRef | StateRef] = {}

    def operand(o: Operand) -> Operand:
        if isinstance(o, Value):
            return values[o.id]
        if isinstance(o, CacheRef) and o not in refs:
            refs[o] = b.cache(program.caches[o.layer])
        elif isinstance(o, StateRef) and o not in refs:
            refs[o] = b.state(*program.states[o.index].shape)
        return refs[o] if isinstance(o, CacheRef | StateRef) else o

    for node in own:
        with b.at(node.path):
            made = b.emit(node.op, node.spec, *map(operand, node.inputs))
        values.update(zip((v.id for v in node.outputs), made, strict=True))
    if end is None:
        return b.program(**{name: values[v.id] for name, v in program.outputs.items()})
    given = {name: values[v.id] for name, v in zip(_CROSSING, _crossing(program, stop), strict=False)}
    with b.at("output"):
        return b.program(hidden=gather_rows(b, given["stream"], b.input("out_rows")), **given)


def _begin(program: Program, layer: int) -> int:
    """The first node of a layer, or of what is behind the last one."""
    return next(i for i, node in enumerate(program.nodes) if node.path.startswith((f"blk.{layer}.", "output")))


def _crossing(program: Program, begin: int) -> list[Value]:
    """What nodes before this one make and later ones read, the newest first."""
    read = {v.id for node in program.nodes[begin:] for v in node.inputs if isinstance(v, Value)}
    made = [v for node in reversed(program.nodes[:begin]) for v in node.outputs if v.id in read]
    assert len(made) <= len(_CROSSING), [v.dims for v in made]
    return made
