"""What an op is: named axes, a frozen spec, one NumPy body, cases and a tolerance, all in one object.

Axis names in capitals are free (`T` tokens, `S` sequences, `R` rows of `out_rows`, `L` entries of their lists, `B` blocks
per sequence, `C` cache blocks); lower-case names are attributes of the op's spec, digits stand for themselves. A
primitive's body is `reference`; a composite's body is `expand`, which emits smaller ops through the same builder. Tests,
fuzzers, benches and QUARREL_CHECK=1 all read this one object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt

from quarrel.gguf import GGMLType, dequantize
from quarrel.ops.kv import KVType

Array = npt.NDArray[Any]
Dim = int | str
Kind = Literal["act", "f32", "i32", "weight", "const", "cache", "state"]
"""`act` follows the step's compute type; `f32` and `i32` are exact; `const` is a small float32 host array; `cache` and
`state` are a backend's handles."""


@dataclass(frozen=True)
class Param:
    """One input or output of an op: its name, kind and axes, such as `Param("x", "act", "T k")`."""

    name: str
    kind: Kind
    axes: str = ""

    def dims(self, spec: object) -> tuple[Dim, ...]:
        """Axes with the spec's numbers filled in; free axes stay as names."""
        return tuple(a if a[0].isupper() else int(a) if a.isdigit() else int(getattr(spec, a)) for a in self.axes.split())


class Value:
    """A symbolic array: dims and kind, and nothing an assembly could compute with.

    Any operator, method, index, length or truth test raises, so that an assembly can only speak in ops.
    """

    __slots__ = ("dims", "id", "kind", "name")

    def __init__(self, id: int, kind: Kind, dims: tuple[Dim, ...], name: str) -> None:
        self.id, self.kind, self.dims, self.name = id, kind, dims, name

    def __repr__(self) -> str:
        return f"%{self.id}:{self.name}[{', '.join(map(str, self.dims))}]{self.kind}"

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError(f"{self!r} is symbolic: an assembly combines arrays through ops only")

    __bool__ = __len__ = __iter__ = __getitem__ = __array__ = __float__ = __int__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = __rmatmul__ = _refuse
    __truediv__ = __rtruediv__ = __pow__ = __neg__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse


@dataclass(frozen=True)
class WeightRef:
    """Rows `[start, start + rows)` of a tensor in the file, seen as a matrix `[rows, k]` (a vector is one row)."""

    name: str
    type: GGMLType
    rows: int
    k: int
    start: int = 0

    def split_first(self) -> WeightRef:
        """The first row alone."""
        return WeightRef(self.name, self.type, 1, self.k, self.start)

    def split(self, *sizes: int) -> tuple[WeightRef, ...]:
        """Consecutive row slices, as in a fused `attn_qkv`."""
        assert sum(sizes) == self.rows, (self, sizes)
        starts = np.cumsum([0, *sizes[:-1]])
        return tuple(
            WeightRef(self.name, self.type, n, self.k, self.start + int(s)) for n, s in zip(sizes, starts, strict=True)
        )


@dataclass(frozen=True)
class ConstRef:
    """A small float32 table known when the program is built, such as rope frequencies."""

    name: str
    data: tuple[float, ...]


@dataclass(frozen=True)
class CacheRef:
    """The key/value cache of one attention layer."""

    layer: int


@dataclass(frozen=True)
class StateRef:
    """The state of one recurrent op."""

    index: int


Operand = Value | WeightRef | ConstRef | CacheRef | StateRef


@dataclass(frozen=True)
class RawWeight:
    """Concrete weight rows: raw blocks `[rows, row_bytes]` uint8 of `type`, each row holding `k` values."""

    type: GGMLType
    raw: Array
    k: int

    def dense(self) -> Array:
        """float32 `[rows, k]`, dequantised exactly."""
        return dequantize(self.raw, self.type).reshape(self.raw.shape[0], self.k)


@dataclass(frozen=True)
class KVArrays:
    """Concrete cache of one layer: `k` and `v`, `[C, block_size, n_kv, width]` float32, values that `type` can hold."""

    k: Array
    v: Array
    type: KVType = "auto"


Concrete = Array | RawWeight | KVArrays


@dataclass(frozen=True)
class Case:
    """One set of static facts and free axes to try; `note` says what is odd about it."""

    spec: Any
    dims: Mapping[str, int] = field(default_factory=dict)
    note: str = ""


Compute = Literal["float32", "float16", "bfloat16", "int8"]
DEFAULT_TOLERANCE: Mapping[Compute, float] = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.2e-2, "int8": 2.5e-2}
"""Largest RMS(difference) / RMS(reference) by the arithmetic of the implementation; `int8` rounds activations to 8 bits."""


@dataclass(frozen=True)
class Op:
    """The contract of one op.

    `reference(spec, *inputs)` takes concrete arrays in `params` order (activations as float32, weights as `RawWeight`,
    caches as `KVArrays`) and returns a tuple in `results` order, then what the cache or state arguments that it `consumes`
    (names separated by spaces, in the order of `params`) hold afterwards. `make(case, rng)` draws such inputs.
    """

    name: str
    spec: type
    params: Callable[[Any], tuple[Param, ...]]
    results: Callable[[Any], tuple[Param, ...]]
    reference: Callable[..., tuple[Concrete, ...]] | None = None
    expand: Callable[[Any, Any, Sequence[Operand]], Sequence[Value]] | None = None
    """`expand(builder, spec, inputs)` with a builder of `ops/null.py`."""
    make: Callable[[Case, np.random.Generator], tuple[Concrete, ...]] | None = None
    cases: Callable[[], list[Case]] = list
    strategy: Callable[[], Any] | None = None
    consumes: str = ""
    joint: bool = False
    """Every member of a group runs it, whether or not it reads the result itself."""
    tolerance: Mapping[Compute, float] = field(default_factory=lambda: DEFAULT_TOLERANCE)

    def __post_init__(self) -> None:
        assert (self.reference is None) != (self.expand is None), f"{self.name}: a reference or an expansion, not both"

    def __repr__(self) -> str:
        return f"Op({self.name})"

    @property
    def always(self) -> bool:
        """Whether a step runs it even where nothing reads its results."""
        return bool(self.consumes) or self.joint

    @property
    def consumed(self) -> tuple[str, ...]:
        """The names of the arguments that a call consumes."""
        return tuple(self.consumes.split())


def rel_error(got: Array, want: Array, floor: float = 0.0) -> float:
    """RMS(got - want) / max(RMS(want), floor) in float64; infinite if any value that should be finite is not."""
    g, w = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if g.shape != w.shape or not np.array_equal(np.isfinite(g), np.isfinite(w)):
        return float("inf")
    ok = np.isfinite(w)
    if not ok.any():
        return 0.0
    scale = max(float(np.sqrt(np.mean(w[ok] ** 2))), floor)
    return float(np.sqrt(np.mean((g[ok] - w[ok]) ** 2))) / (scale or 1.0)
