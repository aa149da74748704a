"""A convolution between two gates, of sequences with one new token, in one launch: after * conv(before * u) (LFM2).

State, taps and roundings are those of `conv_step` and of the gates by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from quarrel.ops.activation import GatedSpec
from quarrel.ops.program import Node
from quarrel.ops.state import ConvSpec
from quarrel.triton_backend.elementwise.activation import activate
from quarrel.triton_backend.formats.int8x2 import store_int8x2
from quarrel.triton_backend.recurrent.conv_scan2 import conv_before, conv_renew, conv_weights
from quarrel.triton_backend.recurrent.records import Stored
from quarrel.triton_backend.runtime.launch import cdiv
from quarrel.triton_backend.runtime.site import Batch, Launch, Site, starts_early

_BLOCKS = 8  # of 32 channels to a program


@triton.jit
def gated_conv_step(
    y, to, before, u, after, weight, bias, sequences, state_slots, state, C: tl.constexpr, W: tl.constexpr, B: tl.constexpr,
    KIND: tl.constexpr, FORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows and state of the sequences with one new token. Grid (C / 32 / B, sequences).

    y                 act `[T, C]`; to: int32, y of one row as int8x2. FORM: which are written, "plain", "int8x2" or "both"
    before, u, after  act `[T, C]`
    weight            float32 `[C, W]`; bias: float32 `[C]`
    sequences, state_slots  as in `records.py`
    state             float32 `[slots, W - 1, C]`
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    block = tl.program_id(0) * B + tl.arange(0, B)
    channel = block[:, None, None] * 32 + tl.arange(0, 2)[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    seq = tl.program_id(1)
    row, p_state, ok, known, acc, tap = conv_before(channel, weight, bias, sequences, state_slots, state, seq, C, W)
    if PDL:
        tl.extra.cuda.gdc_wait()
    at = row * C + channel
    new = tl.load(before + at, mask=ok, other=0.0).to(tl.float32) * tl.load(u + at, mask=ok, other=0.0).to(tl.float32)
    new = new.to(y.dtype.element_ty).to(tl.float32)
    mixed = activate(acc + new * tap, KIND).to(y.dtype.element_ty).to(tl.float32)
    value = (tl.load(after + at, mask=ok, other=0.0).to(tl.float32) * mixed).to(y.dtype.element_ty)
    if FORM != "int8x2":
        tl.store(y + at, value, mask=ok)
    if FORM != "plain":
        store_int8x2(to, value.to(tl.float32), block, block < C // 32, C)
    conv_renew(p_state, new, ok, known, C, W)


@dataclass(frozen=True)
class ShortConv:
    """A GATED, the CONV of its result, and the GATED of that one's."""

    before: Node
    conv: Node
    after: Node

    def fits(self) -> bool:
        gates: tuple[GatedSpec, ...] = (self.before.spec, self.after.spec)
        spec: ConvSpec = self.conv.spec
        plain = all(g.activation == "identity" and not g.per_row and g.up_width == g.n for g in gates)
        return plain and spec.channels % 32 == 0 and spec.width > 1

    def build(self, site: Site) -> Launch:
        spec: ConvSpec = self.conv.spec
        gate, u = (site.slot(v) for v in self.before.inputs)  # type: ignore[arg-type]
        after, target = site.slot(self.after.inputs[0]), site.slot(self.after.outputs[0])  # type: ignore[arg-type]
        stored = Stored.of(site, conv_weights(spec, self.conv.inputs[1:]), self.conv.inputs[-4:])
        to, plain = site.int8x2_target(self.after.outputs[0])

        def run(batch: Batch) -> None:
            weight, bias = stored.weights
            form = "plain" if to is None or batch.T > 1 else "both" if plain else "int8x2"
            site.launch(
                gated_conv_step, (cdiv(spec.channels // 32, _BLOCKS), batch.S), y=target.tensor,
                to=target.tensor if to is None else to, before=gate.tensor, u=u.tensor, after=after.tensor, weight=weight,
                bias=bias, **stored.sequences(), state=stored.state, C=spec.channels, W=spec.width, B=_BLOCKS,
                KIND=spec.activation, FORM=form, early=starts_early(site),
            )  # fmt: skip

        return run
