"""Values that lie in the order in which the ring of weights reads rows (`elementwise/ring_x.py`), in deterministic steps.

Attention and gate with up leave their rows so where every reader is a linear map of the ring: no launch puts them in order
then. A value is in one order in steps of any number of rows, and a permutation changes no bit of a sum.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from quarrel.ops.attention import ATTENTION
from quarrel.ops.contract import Value
from quarrel.ops.linear import LINEAR_ADD, NORM_GATE_UP, LinearSpec
from quarrel.ops.registry import Choice
from quarrel.triton_backend.attention import paged
from quarrel.triton_backend.formats.table import RING, by_name
from quarrel.triton_backend.linear import matvec

COLUMNS = 256
"""Of which a row is a whole number, so that nothing pads it."""


def values(choices: Sequence[Choice], kept: Collection[int]) -> set[int]:
    """Their ids, where all linear maps are those of `linear/invariant.py`. Values of `kept` are results."""
    made: set[int] = set()
    read: set[int] = set()
    others: set[int] = set(kept)
    for choice in choices:
        node = choice.node
        if _makes(choice):
            made.add(node.outputs[0].id)
        x = node.inputs[1 if node.op is LINEAR_ADD else 0] if _reads(choice) else None
        for value in node.inputs:
            if isinstance(value, Value):
                (read if value is x else others).add(value.id)
    return (made & read) - others


def _makes(choice: Choice) -> bool:
    spec = choice.node.spec
    if choice.implementation in paged.IMPLEMENTATIONS:
        return choice.node.op is ATTENTION and spec.width % COLUMNS == 0
    if choice.implementation not in matvec.IMPLEMENTATIONS or choice.node.op is not NORM_GATE_UP:
        return False
    return spec.gate.type == spec.up.type and spec.gate.n % COLUMNS == 0 and _by_ring(spec.gate)


def _reads(choice: Choice) -> bool:
    if choice.implementation not in matvec.IMPLEMENTATIONS:
        return False
    spec = choice.node.spec.linear if choice.node.op is LINEAR_ADD else choice.node.spec
    return isinstance(spec, LinearSpec) and spec.k % COLUMNS == 0 and _by_ring(spec)


def _by_ring(spec: LinearSpec) -> bool:
    if spec.type.name not in RING:
        return False
    top = by_name(spec.type.name).top
    return spec.k % (top.columns if top else 32) == 0
