"""What happens to a linear map's results on their way out: y = residual + scale * (result + bias), any part optional."""

from __future__ import annotations

from dataclasses import dataclass

from quarrel.cpu_backend.runtime.abi import Fields
from quarrel.cpu_backend.runtime.ir import F32, Kernel, Val

OUTPUT_FIELDS = ("y", "y_stride", "bias", "residual", "scale")


@dataclass(frozen=True)
class Output:
    """Where results `[rows, n]` go. `bias` and `residual` are addresses or 0; residual rows lie like those of y."""

    y: Val
    stride: Val
    n: Val
    bias: Val
    residual: Val
    scale: Val

    @classmethod
    def of(cls, a: Fields, n: Val) -> Output:
        """From a kernel's fields. Without a residual, scale is unused."""
        return cls(a.y, a.y_stride, n, a.bias, a.residual, a.f32("scale"))

    def store(self, k: Kernel, y: Val, n: Val, row: Val) -> None:
        """Stores y[row, n], or as many values from there on as y has lanes."""
        out = k.var(y)
        at = row * self.stride + (n << 2)
        with k.when(self.bias.ne(0)):
            out.v = out.v + k.load(self.bias + (n << 2), y.type)
        with k.when(self.residual.ne(0)):
            out.v = k.load(self.residual + at, y.type) + out.v * k.lift(self.scale, y.type)
        k.store(out.v, self.y + at)

    def sixteen(self, k: Kernel, y: Val, n: Val, row: Val) -> None:
        """Stores y[row, n : n + 16], as many of them as there are."""
        with k.either(n + 16 <= self.n) as (whole, part):
            with whole:
                self.store(k, y, n, row)
            with part:
                buffer = k.stack(64)
                k.store(y, buffer)
                with k.range(n, self.n) as i:
                    self.store(k, k.load(buffer + (i - n << 2), F32), i, row)
