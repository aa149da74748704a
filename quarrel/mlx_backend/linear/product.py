"""What a linear kernel computes: weights with their biases, and the epilogue that finishes its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from quarrel.mlx_backend.elementwise import ACTIVATE, ACTIVATIONS, BY_MLX
from quarrel.mlx_backend.formats.layout import LEAST, Packed
from quarrel.mlx_backend.formats.table import header
from quarrel.mlx_backend.runtime.launch import evaluated


@dataclass(frozen=True, eq=False)
class Map:
    """`W x (+ bias)`, its result of type `out`; the bias is `at_least` so long."""

    weight: Packed
    bias: mx.array | None
    out: mx.Dtype

    def arrays(self) -> list[mx.array]:
        """A kernel's inputs, in the order of `Product.inputs`."""
        return [*self.weight.planes, *([] if self.bias is None else [self.bias])]


@dataclass(frozen=True, eq=False)
class Product:
    """One launch: the maps of one row, or with an `activation` of two maps `activation(first) * second`.

    `act` is the step's arithmetic. With `gain` the row is RMS-normalised first; with `alpha` there is one map, and
    `residual + alpha * result` is kept.
    """

    maps: tuple[Map, ...]
    act: mx.Dtype
    activation: str | None = None
    gain: mx.array | None = None
    eps: float = 0.0
    alpha: float | None = None

    @property
    def k(self) -> int:
        return self.maps[0].weight.k

    @property
    def tail(self) -> bool:
        """Whether rows end within a block of 32."""
        return self.k % 32 != 0

    @property
    def outs(self) -> list[tuple[int, mx.Dtype]]:
        """Width and type of every result."""
        results = self.maps[:1] if self.activation else self.maps
        return [(m.weight.rows, m.out) for m in results]

    def name(self, kind: str) -> str:
        """A name for a kernel of this text."""
        parts = [m.weight.format.name.lower() + ("_bias" if m.bias is not None else "") for m in self.maps]
        marks = [self.activation or "", "norm" if self.gain is not None else "", "add" if self.alpha is not None else ""]
        return "_".join(["quarrel", kind, *parts, *filter(None, marks), *(["tail"] if self.tail else [])])

    def inputs(self) -> tuple[str, ...]:
        """Names of the kernel's inputs."""
        names: list[str] = ["x", "sizes", "scalars"]
        for i, m in enumerate(self.maps):
            names += [*m.weight.inputs(f"w{i}"), *([f"bias{i}"] if m.bias is not None else [])]
        return (*names, *(["gain"] if self.gain is not None else []), *(["residual"] if self.alpha is not None else []))

    def constants(self) -> list[mx.array]:
        """`sizes` (k, then every map's rows) and `scalars` (alpha, eps)."""
        rows = [m.weight.rows for m in self.maps]
        return [mx.array([self.k, *rows], mx.int32), mx.array([self.alpha or 0.0, self.eps], mx.float32)]

    def arrays(self, x: mx.array, constants: Sequence[mx.array], residual: mx.array | None) -> list[mx.array]:
        """The kernel's inputs, in the order of `inputs`."""
        last = [a for a in (self.gain, residual) if a is not None]
        return [x, *constants, *(a for m in self.maps for a in m.arrays()), *last]

    def header(self) -> str:
        """The Metal text of the formats, and of the activation if there is one."""
        text = header(*(m.weight.format for m in self.maps))
        return text + ACTIVATE if self.activation else text

    def template(self) -> list[tuple[str, object]]:
        """Template constants that both kernels take."""
        kind = [("KIND", ACTIVATIONS[self.activation])] if self.activation else []
        return [*kind, *((f"Y{i}", out) for i, (_, out) in enumerate(self.outs))]

    def finish(self, value: str, i: int, at: str, row: str) -> str:
        """Metal text that finishes result `i` of a row and stores it."""
        if self.maps[i].bias is not None:
            value = f"{value} + bias{i}[{row}]"
        if self.alpha is not None:
            value = f"fma(scalars[0], {value}, float(residual[{at}]))"
        return f"y{i}[{at}] = Y{i}({value});"

    def finish_gated(self, gate: str, up: str, at: str, row: str) -> str:
        """The same for `act(gate) * up`."""
        first, second = (
            value if m.bias is None else f"{value} + bias{i}[{row}]"
            for i, (value, m) in enumerate(zip((gate, up), self.maps, strict=True))
        )
        return f"y0[{at}] = Y0(activate<KIND>({first}) * ({second}));"

    def finish_arrays(self, results: Sequence[mx.array], residual: mx.array | None) -> list[mx.array]:
        """The same by MLX's operations, which `mx.compile` fuses: of every map's product in float32."""
        biases = [0 if m.bias is None else m.bias[: m.weight.rows] for m in self.maps]
        values = [y + b for y, b in zip(results, biases, strict=True)]
        if self.activation is not None:
            gate, up = values
            values = [BY_MLX[self.activation](gate) * up]
        if self.alpha is not None and residual is not None:
            values = [residual + self.alpha * values[0]]
        return [y.astype(out) for y, (_, out) in zip(values, self.outs)]


def at_least(vector: mx.array) -> mx.array:
    """Padded to as many values as make it a device array."""
    return vector if vector.size >= LEAST else evaluated(mx.pad(vector, (0, LEAST - vector.size)))
