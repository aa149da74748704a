"""The tensors of a file as the assembly sees them: by GGUF name, with the shape that the spec demands."""

from __future__ import annotations

from quarrel.errors import ModelError, UnsupportedModel
from quarrel.gguf import FORMATS, GGMLType, GGUFFile
from quarrel.ops.contract import RawWeight, WeightRef

NOT_WEIGHTS = frozenset(GGMLType[name] for name in ("I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"))


class Tensors:
    """Named weights of one open file; also the `WeightSource` that backends pack from."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file

    def __contains__(self, name: str) -> bool:
        return name in self.file.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Row-major shape; `ModelError` if the tensor is missing."""
        self._require(name)
        return self.file.tensors[name].shape

    def matrix(self, name: str, rows: int, k: int) -> WeightRef:
        """`[rows, k]`, or an error with both shapes."""
        return self._ref(name, (rows, k))

    def vector(self, name: str, n: int) -> WeightRef:
        """`[n]`, seen as one row."""
        return self._ref(name, (n,))

    def optional_vector(self, name: str, n: int) -> WeightRef | None:
        """`[n]`, or None if the file has no such tensor."""
        return self.vector(name, n) if name in self else None

    def column(self, name: str, n: int) -> WeightRef:
        """`[n]`, or `[n, 1]` as the state-space converters write it."""
        return self.matrix(name, n, 1) if len(self.shape(name)) == 2 else self.vector(name, n)

    def grouped(self, name: str, groups: int, k: int) -> WeightRef:
        """`[groups, k]`; a file with one group may store `[k]`."""
        return self.vector(name, k) if groups == 1 and len(self.shape(name)) == 1 else self.matrix(name, groups, k)

    def stack(self, name: str, n: int, rows: int, k: int) -> WeightRef:
        """`[n, rows, k]`, seen as `n * rows` rows."""
        ref = self._ref(name, (n, rows, k))
        return WeightRef(name, ref.type, n * rows, k)

    def first_row(self, name: str, k: int) -> WeightRef:
        """Row 0 of a matrix with any number of rows."""
        return self.matrix(name, self.shape(name)[0], k).split_first()

    def floats(self, name: str) -> tuple[float, ...]:
        """All values of a small tensor, such as rope factors."""
        self._require(name)
        return tuple(float(x) for x in self.file.array(name).reshape(-1))

    def raw(self, ref: WeightRef) -> RawWeight:
        """The rows' blocks, in place in the mapping."""
        rows = self.file.raw(ref.name).reshape(-1, ref.k // FORMATS[ref.type].elements * FORMATS[ref.type].nbytes)
        return RawWeight(ref.type, rows[ref.start : ref.start + ref.rows], ref.k)

    def _require(self, name: str) -> None:
        if name not in self.file.tensors:
            raise ModelError(f"the tensor {name} is missing: the file is incomplete, download or convert it again")

    def _ref(self, name: str, shape: tuple[int, ...]) -> WeightRef:
        self._require(name)
        info = self.file.tensors[name]
        if info.shape != shape:
            raise ModelError(
                f"the tensor {name} is {list(info.shape)}, its metadata asks for {list(shape)}: inconsistent file"
            )
        if info.type in NOT_WEIGHTS:
            raise UnsupportedModel(f"the tensor {name} has type {info.type.name}, which holds no weights: convert it again")
        return WeightRef(name, info.type, shape[0] if len(shape) == 2 else 1, shape[-1])
