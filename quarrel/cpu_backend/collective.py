"""What members of a group do together, between two runs of the stages: by the group's own means, on the step's buffers."""

from __future__ import annotations

from quarrel.cpu_backend.lowering import Lowering
from quarrel.cpu_backend.plan import Rows
from quarrel.ops.collective import ALL_REDUCE, BROADCAST, PLACE
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation


def build_all_reduce(e: Lowering, node: Node) -> None:
    group = e.group

    def run(x: Rows, y: Rows) -> None:
        y[:] = x
        if group is not None:
            group.all_reduce(y)

    e.plan.call(run, node.inputs[0], node.outputs[0])


def build_place(e: Lowering, node: Node) -> None:
    start, stop = node.spec.start, node.spec.start + node.spec.n

    def run(x: Rows, y: Rows) -> None:
        y[:] = 0.0
        y[:, start:stop] = x

    e.plan.call(run, node.inputs[0], node.outputs[0])


def build_broadcast(e: Lowering, node: Node) -> None:
    group, s = e.group, node.spec

    def run(*rows: Rows) -> None:
        y = rows[-1]
        y[:] = rows[0] if s.mine else 0.0
        if group is not None:
            group.broadcast(y, s.source)

    e.plan.call(run, *(node.inputs if s.mine else ()), node.outputs[0])


IMPLEMENTATIONS = (
    Implementation(ALL_REDUCE, "the group's", build_all_reduce),
    Implementation(PLACE, "copy columns", build_place),
    Implementation(BROADCAST, "the group's", build_broadcast),
)
