"""A program whose layers with a sliding window keep only their window, beside others that keep every key.

Layers come in groups: those without a window, and `window_groups` groups of those with one, none larger than the first
allows for. Each group has block tables of its own, so that blocks behind a window can go while the others' stay. Layer i
of every group lies in the same array: a cache is one pool of blocks, and a block serves any group.

    layers        all  all  all    windowed windowed windowed   windowed windowed
    arrays           0    1    2          0        1        2          0        1
    table         block_table       block_table.1                block_table.2
"""

from __future__ import annotations

from dataclasses import replace

from quarrel.ops.contract import CacheRef, Operand, Value
from quarrel.ops.program import Node, Program, group_input

MOST_GROUPS = 8
"""Block tables beside the first: each is as long as a context, and part of every step's inputs."""
LARGEST_PART = 0.9
"""Groups are formed if the cache then takes at most this part of its bytes with one table."""


def by_window(program: Program, groups: int = 0) -> Program:
    """The program in groups; the same one where its layers have no windows or all have one, or keep unlike rows.

    groups: how many there are, where it is a stage of a program that has them.
    """
    layers = program.caches
    windowed = [i for i, layer in enumerate(layers) if layer.window]
    unbounded = [i for i, layer in enumerate(layers) if not layer.window]
    if not windowed or not (unbounded or groups) or len({replace(c, window=0) for c in layers}) > 1:
        return program
    arrays = max(len(unbounded), -(-len(windowed) // (groups or MOST_GROUPS)))
    places = {layer: (i, 0) for i, layer in enumerate(unbounded)}
    places |= {layer: (i % arrays, 1 + i // arrays) for i, layer in enumerate(windowed)}
    groups = groups or -(-len(windowed) // arrays)
    next_id = 1 + max(v.id for v in [*(v for n in program.nodes for v in n.outputs), *program.inputs.values()])
    inputs = dict(program.inputs)
    for name in ("slots", "block_table"):
        for group in range(1, groups + 1):
            like = program.inputs[name]
            inputs[group_input(name, group)] = Value(next_id, like.kind, like.dims, group_input(name, group))
            next_id += 1
    tables = {program.inputs[name].id: name for name in ("slots", "block_table")}

    def moved(node: Node) -> Node:
        refs = [i for i in node.inputs if isinstance(i, CacheRef)]
        if not refs:
            return node
        (ref,) = refs
        array, group = places[ref.layer]

        def operand(o: Operand) -> Operand:
            if o is ref:
                return CacheRef(array)
            if isinstance(o, Value) and o.id in tables:
                return inputs[group_input(tables[o.id], group)]
            return o

        return replace(node, inputs=tuple(operand(i) for i in node.inputs))

    return replace(
        program,
        nodes=tuple(moved(n) for n in program.nodes),
        inputs=inputs,
        caches=tuple(replace(layers[0], window=0) for _ in range(arrays)),
        window=max(layers[i].window for i in windowed),
        window_groups=groups,
    )


def by_window_if_smaller(program: Program, context: int) -> Program:
    """`by_window` if a sequence of this length then takes clearly less memory; else the program as it is."""
    grouped = by_window(program)
    rows = context + grouped.window_groups * min(context, grouped.window)
    return grouped if rows * len(grouped.caches) <= LARGEST_PART * context * len(program.caches) else program


def with_window_groups(program: Program, groups: int) -> Program:
    """`by_window` if the limits that it is compiled for have groups, so many."""
    return by_window(program, groups) if groups else program
