"""Bytes that a step of decoding has to read: what its speed is bounded by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quarrel.gguf import FORMATS
from quarrel.ops.contract import Compute, WeightRef
from quarrel.ops.embedding import EmbeddingSpec
from quarrel.ops.moe import ExpertDownSpec, ExpertUpSpec
from quarrel.ops.program import KVLayer, Program


def nbytes(ref: WeightRef) -> int:
    """Bytes of these rows in the file."""
    block = FORMATS[ref.type]
    return ref.rows * (ref.k // block.elements) * block.nbytes


@dataclass(frozen=True)
class Traffic:
    """What a model reads: its dense weights once a step, rows of its embedding, the experts chosen, caches and states."""

    weights: int
    """All of them, as the file holds them."""
    dense: int
    row: int
    experts: tuple[tuple[int, int, int], ...]
    """Bytes of a layer's stack, and of how many experts how many are used."""
    caches: tuple[KVLayer, ...]
    width: int
    """Bytes of a cached value."""
    state: int

    @classmethod
    def of(cls, program: Program, compute: Compute) -> Traffic:
        """Read off the program's nodes."""
        dense: set[WeightRef] = set()
        rows: set[WeightRef] = set()
        stacks: dict[tuple[int, int, tuple[WeightRef, ...]], int] = {}
        for node in program.nodes:
            refs = [i for i in node.inputs if isinstance(i, WeightRef)]
            if isinstance(node.spec, EmbeddingSpec):
                rows.update(refs)
            elif isinstance(node.spec, ExpertUpSpec | ExpertDownSpec):
                key = (node.spec.n_experts, node.spec.used, tuple(refs))
                stacks[key] = sum(map(nbytes, refs))
            else:
                dense.update(refs)
        return cls(
            weights=sum(map(nbytes, dense | rows)) + sum(stacks.values()),
            dense=sum(map(nbytes, dense)),
            row=sum(nbytes(r) // r.rows for r in rows - dense),
            experts=tuple((size, n, used) for (n, used, _), size in stacks.items()),
            caches=program.caches,
            width=4 if compute == "float32" else 2,
            state=sum(4 * _product(s.shape) for s in program.states),
        )

    def step(self, batch: int, context: float) -> float:
        """Bytes read by one step that decodes a token of `batch` sequences, each with `context` keys.

        Experts: the number of distinct ones expected if choices are even and independent. A recurrent state is counted
        once, as it is read; it is written back too.
        """
        chosen = sum(size * (1 - (1 - used / n) ** batch) for size, n, used in self.experts)
        return self.dense + batch * (self.row + self.state + self.cache(context)) + chosen

    def cache(self, context: float) -> float:
        """Bytes of the keys and values of one sequence."""
        kept = ((min(context, c.window) if c.window else context) * c.width for c in self.caches)
        return self.width * sum(kept)


def _product(shape: Sequence[int]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size
