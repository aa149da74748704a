"""How far two right ways through the cut model may be apart, found by going the first way again, shaken.

The ways run the same weights through the same kinds of kernels. They differ in what they store between ops (a fused kernel
keeps float32 where two kernels store `act`), in the order of float32 sums, and in which kernel serves how many rows. So
each result x of an op may differ by a relative error of RMS

    e = u + 2^-24 sqrt(k)        u: roundoff of the arithmetic's format, k: terms of the widest sum

because a rounding is off by 0.4 u in RMS and an op has a few of them, of its result, of what it reads, of its weights,
whose errors add up as squares do, as those of k float32 additions do. Where the checked op was further than e from the
exact result, e is that distance, as another kernel of the op may be as far off in another direction. (Not in `int8`: every
kernel rounds a row to the same codes, so that the largest error of an op is common to both ways.)

What e makes of the logits follows from the model: its depth adds an error for each op, its width averages them, its scores,
gains and outliers multiply them, a code of 8 bits that falls the other way is a step. This is measured, not guessed: the
ops run again with every float result replaced by x (1 + LOUD e g), g standard normal, and the distance to the unshaken
logits is taken. The largest of DRAWS distances is the limit.

LOUD is the margin. To first order the distance grows with the noise, so that a way with errors of e stays near 1 / LOUD of
the limit. Where a choice of experts nearly ties, what decides it is a step too: router logits are shaken TIES times louder
still, so that a choice that can fall the other way does so in a draw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from quarrel.ops.check import CheckedStep
from quarrel.ops.contract import Concrete, RawWeight, Value
from quarrel.ops.embedding import EMBEDDING
from quarrel.ops.linear import ADD, LINEAR_ADD
from quarrel.ops.program import Node, Program
from quarrel.ops.rounding import result_error, shake_result
from quarrel.ops.step import Backend, ComputeChoice, Limits, WeightSource

LOUD = 4.0
TIES = 4.0
DRAWS = 3
MOST = 1.0
"""Logits that are off by their own size are noise, in whatever arithmetic."""


class ShakenStep(CheckedStep):
    """Op by op through `run_op`, as the checked step, with every float result off by LOUD times what it may be off by.

    found: the error of each place, by path and op, as the checked step found it
    """

    def __init__(
        self,
        backend: Backend,
        program: Program,
        weights: WeightSource,
        limits: Limits,
        compute: ComputeChoice,
        found: Mapping[tuple[str, str], float],
        seed: int,
    ) -> None:
        super().__init__(backend, program, weights, limits, compute)
        self._found = {} if self.compute == "int8" else found
        self._rng = np.random.default_rng(seed)
        self._routed = {v.id for n in program.nodes if n.op.name == "route" for v in n.inputs if isinstance(v, Value)}

    def verify(self, node: Node, inputs: Sequence[Concrete], got: Sequence[Concrete]) -> None:
        """Nothing: the unshaken run was compared."""

    def passed_on(self, node: Node, inputs: Sequence[Concrete], got: Sequence[Concrete]) -> list[Concrete]:
        """The results, shaken; caches, states and integers as they are."""
        results = list(got)
        if node.op is EMBEDDING:  # rows of a table, as they stand there
            return results
        error = result_error(self.compute, max(map(_terms, inputs), default=1))
        error = LOUD * max(error, self._found.get((node.path, node.op.name), 0.0))
        # Of a sum only what was added is new.
        base = np.asarray(inputs[0]) if node.op in (ADD, LINEAR_ADD) else np.float32(0)
        for i, value in enumerate(node.outputs):
            x = results[i]
            if isinstance(x, np.ndarray) and x.dtype.kind == "f":
                times = TIES if value.id in self._routed else 1.0
                results[i] = base + shake_result(x - base, times * error, self._rng)
        return results


def _terms(x: Concrete) -> int:
    """How many products an op may sum for one value, as far as this input shows."""
    if isinstance(x, RawWeight):
        return x.k
    return x.shape[-1] if isinstance(x, np.ndarray) and x.ndim > 1 and x.dtype.kind == "f" else 1
