"""What happens to a linear map's results on their way out: y = residual + scale * (result + bias), any part optional."""

from __future__ import annotations

from quarrel.cpu_backend.abi import Fields
from quarrel.cpu_backend.ir import F32, Kernel, Val
from quarrel.cpu_backend.vector import F32x16

EPILOGUE_FIELDS = ("y", "y_stride", "bias", "residual", "scale")
"""`bias` and `residual` are addresses or 0; residual rows lie like those of y. Without a residual, scale is unused."""


def finish_one(k: Kernel, a: Fields, y: Val, n: Val, t: Val) -> None:
    """Stores y[t, n]."""
    out = k.var(y)
    at = t * a.y_stride + (n << 2)
    with k.when(a.bias.ne(0)):
        out.v = out.v + k.load(a.bias + (n << 2), F32)
    with k.when(a.residual.ne(0)):
        out.v = k.load(a.residual + at, F32) + out.v * a.f32("scale")
    k.store(out.v, a.y + at)


def finish_sixteen(k: Kernel, a: Fields, y: Val, n: Val, t: Val) -> None:
    """Stores y[t, n : n + 16]."""
    out = k.var(y)
    at = t * a.y_stride + (n << 2)
    with k.when(a.bias.ne(0)):
        out.v = out.v + k.load(a.bias + (n << 2), F32x16)
    with k.when(a.residual.ne(0)):
        out.v = k.load(a.residual + at, F32x16) + out.v * k.splat(a.f32("scale"), 16)
    k.store(out.v, a.y + at)
