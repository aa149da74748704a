"""A program whose layers with a sliding window keep only their window, beside others that keep every key.

Layers come in groups: those without a window, and `window_groups` groups of those with one, none larger than the first
allows for. Each group has block tables of its own, so that blocks behind a window can go while the others' stay. Layer i
of every group lies in the same array: a cache is one pool of blocks, and a block serves whichever group it is given to.

    layers        full full full   windowed windowed windowed   windowed windowed
    arrays           0    1    2          0        1        2          0        1
    table         block_table       block_table.1                block_table.2
"""

from __future__ import annotations

from dataclasses import replace

from quarrel.ops.contract import CacheRef, Operand, Value
from quarrel.ops.program import KVLayer, Node, Program, group_input

MOST_GROUPS = 8
"""Block tables beside the first: each is as long as a context, and part of every step's inputs."""
WORTH = 0.9
"""Of the bytes with one table, what it may take at most to be done at all."""


def by_window(program: Program) -> Program:
    """The program in groups; the same one where its layers have no windows or all have one, or keep unlike rows."""
    layers = program.caches
    windowed = [i for i, layer in enumerate(layers) if layer.window]
    full = [i for i, layer in enumerate(layers) if not layer.window]
    if not windowed or not full or len({(c.n_kv, c.head_dim) for c in layers}) > 1:
        return program
    arrays = max(len(full), -(-len(windowed) // MOST_GROUPS))
    places = {layer: (i, 0) for i, layer in enumerate(full)}
    places |= {layer: (i % arrays, 1 + i // arrays) for i, layer in enumerate(windowed)}
    groups = -(-len(windowed) // arrays)
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

        def operand(given: Operand) -> Operand:
            if given is ref:
                return CacheRef(array)
            if isinstance(given, Value) and given.id in tables:
                return inputs[group_input(tables[given.id], group)]
            return given

        return replace(node, inputs=tuple(operand(i) for i in node.inputs))

    return replace(
        program,
        nodes=tuple(moved(n) for n in program.nodes),
        inputs=inputs,
        caches=tuple(KVLayer(layers[0].n_kv, layers[0].head_dim) for _ in range(arrays)),
        window=max(layers[i].window for i in windowed),
        window_groups=groups,
    )


def worth(program: Program, context: int) -> Program:
    """`by_window` where a sequence of this length takes clearly less so."""
    grouped = by_window(program)
    rows = context + grouped.window_groups * min(context, grouped.window)
    return grouped if rows * len(grouped.caches) <= WORTH * context * len(program.caches) else program


def as_planned(program: Program, groups: int) -> Program:
    """In groups if the limits that it is compiled for say so."""
    return by_window(program) if groups else program
