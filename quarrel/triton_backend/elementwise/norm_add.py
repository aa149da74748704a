"""A norm, the sum of a stream with it and a factor of the sum, in one launch for any number of rows.

    h = factor * (stream + scale * norm(x))

For one row that launch also leaves h as int8x2 where matvecs read it so, or the norm of h that they begin with. Then, too,
two norms whose sum is x have no launches, as those behind Gemma 4's dense maps and experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from quarrel.ops.contract import WeightRef
from quarrel.ops.norm import NormSpec
from quarrel.ops.program import Node
from quarrel.triton_backend.elementwise.norm import Onto, added, build_norm
from quarrel.triton_backend.formats.int8x2 import store_int8x2
from quarrel.triton_backend.runtime.launch import power_of_two
from quarrel.triton_backend.runtime.site import Launch, Site, dims, starts_early

MAX_ROW = 8192
"""Columns of a row that one program holds."""


@triton.jit
def norm_add_int8x2(
    to, h, x, other, stream, gain, next_gain, gains, rounded, eps, next_eps, pair_eps, scale, factor, K: tl.constexpr,
    C: tl.constexpr, NORMS: tl.constexpr, PAIR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row of h; and h, or with NORMS its RMS norm, as int8x2 into `to`. One program; C at least K, at least 32. With
    PAIR what is normalised is the sum of the norms of x and `other`, by `gains`."""
    column = tl.arange(0, C)
    weight = tl.load(gain + column, mask=column < K, other=0.0)
    if PAIR:
        x_weight = tl.load(gains[0] + column, mask=column < K, other=0.0)
        other_weight = tl.load(gains[1] + column, mask=column < K, other=0.0)
    if NORMS:
        next_weight = tl.reshape(tl.load(next_gain + column, mask=column < K, other=0.0), (C // 32, 2, 16))
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    value = tl.load(x + column, mask=column < K, other=0.0).to(tl.float32)
    left = tl.load(stream + column, mask=column < K, other=0.0)
    if PAIR:
        second = tl.load(other + column, mask=column < K, other=0.0).to(tl.float32)
        value = value * (1.0 / tl.sqrt(tl.sum(value * value, 0) / K + pair_eps)) * x_weight
        second = second * (1.0 / tl.sqrt(tl.sum(second * second, 0) / K + pair_eps)) * other_weight
        value = added(value, second, rounded, 1.0, 1.0)
    value = value * (1.0 / tl.sqrt(tl.sum(value * value, 0) / K + eps)) * weight
    value = added(left, value, rounded, scale, factor)
    tl.store(h + column, value, mask=column < K)
    v = tl.reshape(value, (C // 32, 2, 16))
    if NORMS:
        square = tl.sum(tl.sum(tl.sum(v * v, 2), 1), 0)
        v = v * (1.0 / tl.sqrt(square / K + next_eps)) * next_weight
    block = tl.arange(0, C // 32)
    store_int8x2(to, v, block, block < K // 32, K)


@dataclass(frozen=True)
class NormAdd:
    """The nodes of one such launch; `cap` is a CAP without a cap, if there is one; `pair`, two NORMs whose sum is x."""

    norm: Node
    add: Node
    cap: Node | None
    pair: tuple[Node, Node] | None = None

    @property
    def last(self) -> Node:
        return self.add if self.cap is None else self.cap

    def onto(self) -> Onto:
        """Where the norm goes."""
        factor = 1.0 if self.cap is None else self.cap.spec.scale
        return Onto(self.add.inputs[0], self.last.outputs[0], self.add.spec.scale, factor)  # type: ignore[arg-type]

    def fits_a_row(self) -> bool:
        """Whether one program computes a row."""
        spec: NormSpec = self.norm.spec
        return spec.kind == "rms" and spec.groups == 1 and spec.k % 32 == 0 and spec.k <= MAX_ROW

    def takes_pair(self, first: Node, second: Node) -> bool:
        """Whether the sum of these NORMs, the first in float32, is what it normalises."""
        one, other = (node.spec for node in (first, second))
        return one == replace(self.norm.spec, eps=one.eps, out="f32") and other == replace(one, out="act")

    def build(self, site: Site) -> Launch:
        """For any number of rows."""
        many, h = build_norm(site, self.norm, self.onto()), self.last.outputs[0]
        to, _ = site.int8x2_target(h) if self.fits_a_row() else (None, True)
        if to is None:
            return many
        axis, _ = dims(h)
        row = self.row(site)
        return lambda batch: row(to) if batch.count(axis) == 1 else many(batch)

    def row(
        self, site: Site, norm: NormSpec | None = None, gain: WeightRef | None = None
    ) -> Callable[[torch.Tensor], None]:
        """Launches it on one row, of which a tensor gets the sum, or the norm of that, as int8x2."""
        spec, onto = self.norm.spec, self.onto()
        x, first, rounded = self.norm.inputs[0], self.norm.inputs[1], site.slot(self.norm.outputs[0])
        xs, inner = ((x, x), (first, first)) if self.pair is None else zip(*(node.inputs[:2] for node in self.pair))
        sources, stream, h = [site.slot(v) for v in xs], site.slot(onto.stream), site.slot(onto.out)  # type: ignore[arg-type]
        own, gains = site.vector(first), tuple(site.vector(v) for v in inner)  # type: ignore[arg-type]
        pair_eps = 0.0 if self.pair is None else self.pair[0].spec.eps
        following = own if gain is None else site.vector(gain)
        columns = max(power_of_two(spec.k), 32)

        def run(to: torch.Tensor) -> None:
            site.launch(
                norm_add_int8x2, (1,), to, h.tensor, *(s.tensor for s in sources), stream.tensor, own, following, gains,
                rounded.tensor, spec.eps, 0.0 if norm is None else norm.eps, pair_eps, onto.scale, onto.factor, K=spec.k,
                C=columns, NORMS=norm is not None, PAIR=self.pair is not None,
                warps=16 if columns > 4096 else 8 if columns > 2048 else 4, early=starts_early(site),
            )  # fmt: skip

        return run
