"""The tensors of a file as the assembly sees them: by GGUF name, with the shape that the spec demands."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import cached_property, partial

import numpy as np

from quarrel.errors import ModelError, UnsupportedModel
from quarrel.gguf import FORMATS, GGMLType, GGUFFile
from quarrel.ops.contract import RawWeight, WeightRef
from quarrel.ops.program import Program

_BLOCK = re.compile(r"blk\.(\d+)\.(.+?)(\.weight|\.bias)?")
_ONES, _ZEROS = "(ones)", "(zeros)"
# Which keys, below the architecture's name, give a tensor its shape.
_HEADS = "attention.head_count, attention.head_count_kv and attention.key_length"
_EXPERTS = "expert_count, expert_feed_forward_length and embedding_length"
_LATENT = "attention.head_count, attention.kv_lora_rank, attention.key_length_mla, attention.value_length_mla"
_SSM = "ssm.inner_size, ssm.state_size, ssm.group_count and ssm.time_step_rank"
_SHAPED_BY = {
    **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), f"{_HEADS} and embedding_length"),
    **dict.fromkeys(("attn_q_norm", "attn_k_norm", "attn_sinks"), _HEADS),
    **dict.fromkeys(("attn_q_a", "attn_q_b", "attn_q_a_norm"), f"{_LATENT}, attention.q_lora_rank"),
    **dict.fromkeys(("attn_kv_a_mqa", "attn_kv_a_norm", "attn_k_b", "attn_v_b"), _LATENT),
    **dict.fromkeys(("ffn_gate", "ffn_up", "ffn_down"), "feed_forward_length and embedding_length"),
    **dict.fromkeys(("ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps", "ffn_down_exps"), _EXPERTS),
    **dict.fromkeys(("ffn_gate_inp", "exp_probs_b"), "expert_count and embedding_length"),
    **dict.fromkeys(
        ("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"), "expert_shared_feed_forward_length and embedding_length"
    ),
    **dict.fromkeys(("ssm_in", "ssm_out"), f"{_SSM} and embedding_length"),
    **dict.fromkeys(("ssm_x", "ssm_dt", "ssm_a", "ssm_d", "ssm_norm"), _SSM),
    **dict.fromkeys(("attn_qkv", "attn_gate"), f"{_HEADS}, or {_SSM} in a delta net, and embedding_length"),
    **dict.fromkeys(("ssm_alpha", "ssm_beta", "ssm_ba"), f"{_SSM} and embedding_length"),
    **dict.fromkeys(
        ("shortconv.conv", "shortconv.in_proj", "shortconv.out_proj"), "shortconv.l_cache and embedding_length"
    ),
    "ssm_conv1d": f"{_SSM} and ssm.conv_kernel",
    "position_embd": "context_length and embedding_length",
}

ANY, FAR = 3.4e38, 1e30
"""Bounds of a map that bound nothing, and from where on none is meant."""
NOT_WEIGHTS = frozenset(GGMLType[name] for name in ("I8", "I16", "I32", "I64", "F64", "Q8_K"))


class Tensors:
    """Named weights of one open file; also the `WeightSource` that backends pack from."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self._read: set[str] = set()
        self._picked: dict[str, tuple[WeightRef, Sequence[tuple[int, int]]]] = {}
        self._made: dict[str, Callable[[], RawWeight]] = {}

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

    def optional(self, name: str, *shape: int) -> WeightRef | None:
        """A tensor of one or two axes, or None if the file has no such tensor."""
        return self._ref(name, shape) if name in self else None

    def column(self, name: str, n: int) -> WeightRef:
        """`[n]`, or `[n, 1]` as the state-space converters write it."""
        return self.matrix(name, n, 1) if len(self.shape(name)) == 2 else self.vector(name, n)

    def grouped(self, name: str, groups: int, k: int) -> WeightRef:
        """`[groups, k]`; a file with one group may store `[k]`."""
        return self.vector(name, k) if groups == 1 and len(self.shape(name)) == 1 else self.matrix(name, groups, k)

    def stack(self, name: str, n: int, rows: int, k: int) -> WeightRef:
        """`[n, rows, k]`, seen as `n * rows` rows."""
        ref = self._ref(name, (n, rows, k))
        return WeightRef(ref.name, ref.type, n * rows, k)

    def stacks(self, name: str, parts: Sequence[str], n: int, rows: int, k: int) -> tuple[WeightRef, ...]:
        """The named parts of `[n, len(parts) * rows, k]`, each seen as `n * rows` rows."""
        whole, step = self.stack(name, n, len(parts) * rows, k), len(parts) * rows
        starts = [i * rows for i in range(len(parts))]
        ranges = ([(e * step + start, e * step + start + rows) for e in range(n)] for start in starts)
        return tuple(self.pick(whole, part, each) for part, each in zip(parts, ranges))

    def scaled(self, name: str, n: int, factor: float) -> WeightRef:
        """A vector `[n]` times a factor, float32."""
        vector = self.vector(name, n)

        def made() -> RawWeight:
            values = (self.raw(vector).dense() * np.float32(factor)).astype(np.float32)
            return RawWeight(GGMLType.F32, values.view(np.uint8), n)

        ref = WeightRef(f"{name}*{factor}", GGMLType.F32, 1, n)
        self._made[ref.name] = made
        return ref

    def column_range(self, name: str, rows: int, k: int, start: int, stop: int) -> WeightRef:
        """These columns of a matrix, which begin and end with a block of its format."""
        whole = self.matrix(name, rows, k)
        block = FORMATS[whole.type]
        if start % block.elements or stop % block.elements:
            raise UnsupportedModel(
                f"the tensor {name} is {whole.type.name}, blocks of {block.elements} columns; Quarrel wants to part it at"
                f" {start or stop}: convert the model again, with a type of smaller blocks for it"
            )

        def made() -> RawWeight:
            first, last = (at // block.elements * block.nbytes for at in (start, stop))
            return RawWeight(whole.type, np.ascontiguousarray(self.raw(whole).raw[:, first:last]), stop - start)

        ref = WeightRef(f"{name}[:, {start}:{stop}]", whole.type, rows, stop - start)
        self._made[ref.name] = made
        return ref

    def patches(self, name: str, rows: int, side: int) -> WeightRef:
        """A convolution of square patches side by side, `[rows, 3, side, side]`, as the map of a patch that it is."""
        ref = self._ref(name, (rows, 3, side, side))
        return WeightRef(ref.name, ref.type, rows, 3 * side * side)

    def transposed(self, name: str, rows: int, k: int) -> WeightRef:
        """A matrix `[k, rows]` of floats as `[rows, k]`."""
        whole = self.matrix(name, k, rows)
        if FORMATS[whole.type].elements > 1:
            raise UnsupportedModel(f"the tensor {name} is {whole.type.name}, wanted floats: convert the file again")

        def made() -> RawWeight:
            raw = self.raw(whole).raw
            values = raw.view(f"u{FORMATS[whole.type].nbytes}").reshape(k, rows)
            return RawWeight(whole.type, np.ascontiguousarray(values.T).view(np.uint8), k)

        ref = WeightRef(f"{name}.T", whole.type, rows, k)
        self._made[ref.name] = made
        return ref

    def interleaved(self, name: str, rows: int, k: int, n: int) -> WeightRef:
        """A matrix of floats `[rows, k * n]` whose columns are `n` values for each of `k`, as one whose are `k` for each of
        `n`."""
        whole = self.matrix(name, rows, k * n)
        if FORMATS[whole.type].elements > 1:
            raise UnsupportedModel(f"the tensor {name} is {whole.type.name}, wanted floats: convert the file again")

        def made() -> RawWeight:
            values = self.raw(whole).raw.reshape(rows, k, n, -1).swapaxes(1, 2)
            return RawWeight(whole.type, np.ascontiguousarray(values).reshape(rows, -1), k * n)

        ref = WeightRef(f"{name}[by {n}]", whole.type, rows, k * n)
        self._made[ref.name] = made
        return ref

    def moved(self, scale: str, bias: str, n: int, factor: float) -> tuple[WeightRef, WeightRef]:
        """`(factor * x - bias) * scale` of rows of `n`, as a map."""
        names = (self.vector(scale, n), self.vector(bias, n))

        def made(bias: bool) -> RawWeight:
            by, less = (self.raw(ref).dense().reshape(-1) for ref in names)
            values = (-less * by)[None] if bias else np.diag(factor * by)
            return RawWeight(GGMLType.F32, np.ascontiguousarray(values, np.float32).view(np.uint8), n)

        self._made[f"{scale}[map]"], self._made[f"{scale}[bias]"] = partial(made, False), partial(made, True)
        return WeightRef(f"{scale}[map]", GGMLType.F32, n, n), WeightRef(f"{scale}[bias]", GGMLType.F32, 1, n)

    def unused(self, *names: str) -> None:
        """Says that results do not depend on these, which a file may have."""
        self._read.update(names)

    def first_row(self, name: str, k: int) -> WeightRef:
        """Row 0 of a matrix with any number of rows."""
        return self.matrix(name, self.shape(name)[0], k).split_first()

    def pick(self, ref: WeightRef, part: str, ranges: Sequence[tuple[int, int]]) -> WeightRef:
        """These ranges of a tensor's rows as a matrix of their own, called `name[part]`: rows that a file interleaves."""
        name = f"{ref.name}[{part}]"
        self._picked[name] = (ref, ranges)
        return WeightRef(name, ref.type, sum(stop - start for start, stop in ranges), ref.k)

    def floats(self, name: str) -> tuple[float, ...]:
        """All values of a small tensor, such as rope factors."""
        self._require(name)
        return tuple(float(x) for x in self.file.array(name).reshape(-1))

    def number(self, name: str) -> float:
        """A tensor of one value."""
        self.vector(name, 1)
        return self.floats(name)[0]

    def bounds(self, weight: WeightRef) -> tuple[float, float, float, float] | None:
        """Within which a map's input lies, least and greatest, and its result, in files that say so of it."""
        ends = {"input_min": -ANY, "input_max": ANY, "output_min": -ANY, "output_max": ANY}
        stem = weight.name.removesuffix(".weight")
        found = [self.number(n) if (n := f"{stem}.{end}") in self else far for end, far in ends.items()]
        low, high, least, most = (min(max(bound, -ANY), ANY) for bound in found)
        if math.isnan(sum(found)) or low > high or least > most:
            said = f"{found[0]} to {found[1]} and {found[2]} to {found[3]}"
            raise ModelError(f"the bounds of {weight.name} are {said}: the file is inconsistent")
        return None if min(map(abs, found)) >= FAR else (low, high, least, most)

    def ones(self, n: int) -> WeightRef:
        """`[n]` ones: the gain of a norm that has none."""
        return WeightRef(_ONES, GGMLType.F32, 1, n)

    def zeros(self, n: int) -> WeightRef:
        """`[n]` zeros: the bias of a layer norm that has none."""
        return WeightRef(_ZEROS, GGMLType.F32, 1, n)

    @cached_property
    def norm_biases(self) -> bool:
        """Whether the file's layer norms have biases: all of them, or none."""
        return any(name.endswith("norm.bias") for name in self.file.tensors)

    def check_all_read(self, n_layers: int) -> None:
        """Raises `UnsupportedModel` for a tensor of a layer that nothing asked for: it would change the model's results.

        Blocks behind the last layer may hold what predicts several tokens at once, if the file says so.
        """
        for name in self.file.tensors:
            found = _BLOCK.fullmatch(name)
            if found is None or name in self._read:
                continue
            if int(found[1]) >= n_layers:
                metadata = self.file.metadata
                extra = f"{metadata.str('general.architecture')}.nextn_predict_layers"
                if int(found[1]) < n_layers + metadata.int(extra, 0, lo=0, hi=1 << 16):
                    continue
                said = f"lies behind the {n_layers} layers that the key block_count tells of"
            elif ".nextn." in name:
                said = (
                    "predicts further tokens, where the keys block_count and nextn_predict_layers place an ordinary layer"
                )
            else:
                said = "has no place in this architecture as this version computes it"
            raise UnsupportedModel(f"the tensor {name} {said}: results without it would be wrong, convert the model again")

    def traced(self, program: Program) -> Program:
        """What a program that was traced on these tensors becomes: itself, or a rank's part of it."""
        return program

    def raw(self, ref: WeightRef) -> RawWeight:
        """The rows' blocks, in place in the mapping."""
        if ref.name in (_ONES, _ZEROS):
            made = np.full((1, ref.k), float(ref.name == _ONES), np.float32)
            return RawWeight(GGMLType.F32, made.view(np.uint8), ref.k)
        if ref.name in self._picked:
            whole, ranges = self._picked[ref.name]
            blocks = self.raw(whole).raw
            picked = np.concatenate([blocks[start:stop] for start, stop in ranges])
            return RawWeight(ref.type, picked[ref.start : ref.start + ref.rows], ref.k)
        if ref.name in self._made:
            return self._made[ref.name]()
        rows = self.file.raw(ref.name).reshape(-1, ref.k // FORMATS[ref.type].elements * FORMATS[ref.type].nbytes)
        return RawWeight(ref.type, rows[ref.start : ref.start + ref.rows], ref.k)

    def _require(self, name: str) -> None:
        if name not in self.file.tensors:
            asked = ", which the key block_count asks for" if _BLOCK.fullmatch(name) else ""
            raise ModelError(f"the tensor {name} is missing{asked}: the file is incomplete, download or convert it again")

    def _ref(self, name: str, shape: tuple[int, ...]) -> WeightRef:
        self._require(name)
        self._read.add(name)
        info = self.file.tensors[name]
        if info.shape != shape:
            raise ModelError(
                f"the tensor {name} is {list(info.shape)}, but {_keys_of(name)} ask for {list(shape)}: the file contradicts"
                " itself, download or convert it again"
            )
        if info.type in NOT_WEIGHTS:
            raise UnsupportedModel(f"the tensor {name} has type {info.type.name}, which holds no weights: convert it again")
        return WeightRef(name, info.type, shape[0] if len(shape) == 2 else 1, shape[-1])


def _keys_of(name: str) -> str:
    """The keys that say how large a tensor is."""
    found = _BLOCK.fullmatch(name)
    base = found[2] if found else name.rsplit(".", 1)[0]
    return f"the keys {_SHAPED_BY.get(base, 'embedding_length and block_count')}"
