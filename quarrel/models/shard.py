"""One model on several devices: which heads, columns, rows and layers a rank holds, as a narrower spec and cut tensors.

What reads the residual stream is cut by rows, what writes it by columns, so that a half of a layer ends in one sum over the
ranks. Columns are cut between blocks of 256 values where there are enough, else between the format's own blocks, so packed
rows are never taken apart; shares may differ by a block. A half that cannot be cut is computed whole by every rank; where
much of a model is like that, or where asked for, ranks hold whole layers instead and hand the stream on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from quarrel.errors import RequestError
from quarrel.gguf import FORMATS, GGMLType
from quarrel.models.spec import Attention, Experts, FeedForward, Layer, Mamba1, Mamba2, Mixer, ModelSpec
from quarrel.models.tensors import Tensors
from quarrel.ops.contract import Array, RawWeight, WeightRef

Split = Literal["auto", "tensor", "layers"]
WIDE = 256
"""Columns that every kernel takes; the superblock of the k-quants."""
MOST_WHOLE = 0.25
"""Of a model's layers, what may be held by every rank."""

Range = tuple[int, int]


@dataclass(frozen=True)
class Cut:
    """The ranges of one axis (counted from the last) that a rank holds; `total` is the axis in the file."""

    axis: int
    total: int
    ranges: tuple[Range, ...]

    @property
    def size(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


@dataclass
class Share:
    """What one rank computes."""

    rank: int
    ranks: int
    vocabulary: Range
    """Its rows of the output matrix."""
    owners: tuple[int, ...] | None = None
    """Which rank computes each layer, where layers are not cut."""
    sums: set[str] = field(default_factory=set)
    """Halves of layers, such as `blk.0.attn`, whose result is the sum over the ranks."""
    rows: dict[str, tuple[Range, int]] = field(default_factory=dict)
    """Halves whose result is a range of the stream's columns, which the others lack."""
    gathers: dict[str, tuple[Range, int]] = field(default_factory=dict)
    """Mixers whose norm needs the values of all ranks: this rank's columns of them, and how many there are."""
    cuts: dict[str, Cut] = field(default_factory=dict)

    def owns(self, il: int) -> bool:
        return self.owners is None or self.owners[il] == self.rank

    def hands_on(self, il: int) -> int | None:
        """The rank whose stream the others need after this layer."""
        if self.owners is None or (il + 1 < len(self.owners) and self.owners[il + 1] == self.owners[il]):
            return None
        return self.owners[il]


class ShardedTensors(Tensors):
    """The rank's part of every tensor, under the shapes of its spec; also the `WeightSource` of these parts."""

    share: Share

    def __init__(self, tensors: Tensors, share: Share) -> None:
        super().__init__(tensors.file)
        self.share = share
        self._cut_refs: dict[str, str] = {}

    def summed_once(self, name: str, *shape: int) -> WeightRef | None:
        """A bias of what is summed over the ranks: one of them adds it."""
        ref = super()._ref(name, shape)
        return ref if self.share.rank == 0 else None

    def optional_vector(self, name: str, n: int) -> WeightRef | None:
        found = super().optional_vector(name, n)
        once = found is not None and self.share.rank != 0 and self._ends_a_sum(name)
        return None if once else found

    def check_all_read(self, n_layers: int) -> None:
        for name in self.file.tensors:
            parts = name.split(".")
            if parts[0] == "blk" and parts[1].isdigit() and int(parts[1]) < n_layers and not self.share.owns(int(parts[1])):
                self._read.add(name)
        super().check_all_read(n_layers)

    def raw(self, ref: WeightRef) -> RawWeight:
        """The rows' blocks: in place in the mapping where the rank's rows are, copied where columns are cut."""
        name = self._cut_refs.get(ref.name)
        if name is None:
            return super().raw(ref)
        cut, block = self.share.cuts[name], FORMATS[ref.type]
        shape = self.file.tensors[name].shape
        whole = self.file.raw(name).reshape(*shape[:-1], -1)
        row_bytes = ref.k // block.elements * block.nbytes
        if cut.axis == -1:
            ranges = [(a // block.elements * block.nbytes, z // block.elements * block.nbytes) for a, z in cut.ranges]
            rows = _taken(whole, -1, ranges).reshape(-1, row_bytes)
            return RawWeight(ref.type, rows[ref.start : ref.start + ref.rows], ref.k)
        if len(shape) > 2:
            rows = _taken(whole, cut.axis, cut.ranges).reshape(-1, row_bytes)
            return RawWeight(ref.type, rows[ref.start : ref.start + ref.rows], ref.k)
        return RawWeight(ref.type, _taken(whole, 0, _within(cut.ranges, ref.start, ref.start + ref.rows)), ref.k)

    def _ends_a_sum(self, name: str) -> bool:
        """Whether it belongs to a map whose columns are cut: its rows are whole, and summed."""
        cut = self.share.cuts.get(name.removesuffix(".bias") + ".weight")
        return cut is not None and cut.axis == -1

    def _ref(self, name: str, shape: tuple[int, ...]) -> WeightRef:
        cut = self.share.cuts.get(name)
        if cut is None:
            return super()._ref(name, shape)
        assert shape[cut.axis] == cut.size, (name, shape, cut)
        whole = list(shape)
        whole[cut.axis] = cut.total
        ref = super()._ref(name, tuple(whole))
        part = f"{name}[{self.share.rank}/{self.share.ranks}]"
        self._cut_refs[part] = name
        return WeightRef(part, ref.type, shape[0] if len(shape) == 2 else 1, shape[-1])


def _taken(array: Array, axis: int, ranges: Sequence[Range]) -> Array:
    index: list[slice] = [slice(None)] * array.ndim
    parts = []
    for start, stop in ranges:
        index[axis] = slice(start, stop)
        parts.append(array[tuple(index)])
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis)


def _within(ranges: Sequence[Range], start: int, stop: int) -> list[Range]:
    """What lies at `start` to `stop` of the ranges put end to end."""
    found, at = [], 0
    for a, z in ranges:
        low, high = max(start - at, 0), min(stop - at, z - a)
        if low < high:
            found.append((a + low, a + high))
        at += z - a
    return found


def portion(units: int, rank: int, ranks: int) -> Range:
    """A rank's share of so many units: equal, or one more for the first ranks."""
    each, more = divmod(units, ranks)
    start = rank * each + min(rank, more)
    return start, start + each + (rank < more)


def shard(
    spec: ModelSpec, tensors: Tensors, rank: int, ranks: int, split: Split = "auto"
) -> tuple[ModelSpec, ShardedTensors]:
    """The spec and the tensors of one rank; `assemble` makes its program of them. Raises RequestError."""
    if ranks < 2 or not 0 <= rank < ranks:
        raise RequestError(f"rank {rank} of {ranks} is none: wanted 2 ranks or more, counted from 0")
    share = Share(rank, ranks, _vocabulary(spec.n_vocab, rank, ranks))
    head = "output" if "output.weight" in tensors else "token_embd"
    # The table of the embeddings is read whole by every rank; only a matrix of its own is cut by name.
    if head == "output":
        share.cuts["output.weight"] = Cut(-2, spec.n_vocab, (share.vocabulary,))
    if "output.bias" in tensors:
        share.cuts["output.bias"] = Cut(-1, spec.n_vocab, (share.vocabulary,))
    if split != "layers":
        cutter = _Cutter(spec, tensors, share)
        layers = tuple(cutter.layer(il, layer) for il, layer in enumerate(spec.layers))
        if split == "tensor" or cutter.whole <= MOST_WHOLE * cutter.all or len(layers) < ranks:
            return replace(spec, layers=layers), ShardedTensors(tensors, share)
        share = Share(rank, ranks, share.vocabulary, cuts={k: v for k, v in share.cuts.items() if k.startswith("output.")})
    if len(spec.layers) < ranks:
        raise RequestError(f"the model has {len(spec.layers)} layers for {ranks} devices: use fewer")
    share.owners = _owners(spec, tensors, ranks)
    return spec, ShardedTensors(tensors, share)


def _vocabulary(rows: int, rank: int, ranks: int) -> Range:
    unit = next(u for u in (64, 32, 1) if rows % u == 0 and rows // u >= ranks)
    start, stop = portion(rows // unit, rank, ranks)
    return start * unit, stop * unit


def _owners(spec: ModelSpec, tensors: Tensors, ranks: int) -> tuple[int, ...]:
    """Consecutive layers of about the same number of bytes, at least one a rank."""
    n = len(spec.layers)
    sizes = [_bytes(tensors, f"blk.{il}.") for il in range(n)]
    owners: list[int] = []
    done = rank = 0
    for il, size in enumerate(sizes):
        left = n - il
        if rank + 1 < ranks and owners and owners[-1] == rank:
            full = (done + size / 2) * ranks >= (rank + 1) * sum(sizes)
            if full or left <= ranks - 1 - rank:
                rank += 1
        owners.append(rank)
        done += size
    return tuple(owners)


def _bytes(tensors: Tensors, prefix: str) -> int:
    return sum(t.nbytes for name, t in tensors.file.tensors.items() if name.startswith(prefix))


class _Cutter:
    """Cuts one layer after another; counts the bytes of what stayed whole."""

    def __init__(self, spec: ModelSpec, tensors: Tensors, share: Share) -> None:
        self._spec, self._tensors, self._share = spec, tensors, share
        self.whole = self.all = 0

    def layer(self, il: int, layer: Layer) -> Layer:
        prefix = f"blk.{il}."
        mixer, ffn = layer.mixer, layer.ffn
        self.all += _bytes(self._tensors, prefix)
        if mixer is not None:
            mixer = self._mixer(prefix, mixer)
            self._count(prefix, ("attn_", "ssm_"), mixer is layer.mixer)
        if ffn is not None:
            ffn = self._ffn(prefix, ffn)
            self._count(prefix, ("ffn_", "exp_probs"), ffn is layer.ffn)
        return replace(layer, mixer=mixer, ffn=ffn)

    def _count(self, prefix: str, names: tuple[str, ...], whole: bool) -> None:
        if whole:
            self.whole += sum(_bytes(self._tensors, prefix + name) for name in names)

    def _cut(self, name: str, axis: int, total: int, *ranges: Range) -> None:
        if name in self._tensors:
            self._share.cuts[name] = Cut(axis, total, ranges)

    def _rows(self, base: str, total: int, *ranges: Range) -> None:
        self._cut(f"{base}.weight", -2, total, *ranges)
        self._cut(f"{base}.bias", -1, total, *ranges)

    def _columns(self, base: str, total: int, taken: Range) -> None:
        self._cut(f"{base}.weight", -1, total, taken)

    def _block(self, name: str) -> int:
        """Columns that are only cut together."""
        type = self._tensors.file.tensors[name].type if name in self._tensors else GGMLType.F32
        return FORMATS[type].elements

    def _portion(self, width: int, each: int, *names: str) -> Range | None:
        """A share of `width` in units of `each`, cut between blocks of the columns of these tensors; None if too few."""
        block = math.lcm(*(self._block(n) for n in names))
        for unit in (math.lcm(each, block, WIDE), math.lcm(each, block)):
            if width % unit == 0 and width // unit >= self._share.ranks:
                start, stop = portion(width // unit, self._share.rank, self._share.ranks)
                return start * unit, stop * unit
        return None

    def _mixer(self, prefix: str, mixer: Mixer) -> Mixer:
        if isinstance(mixer, Attention):
            return self._attention(prefix, mixer)
        return self._mamba1(prefix, mixer) if isinstance(mixer, Mamba1) else self._mamba2(prefix, mixer)

    def _attention(self, prefix: str, a: Attention) -> Attention:
        """Heads with their keys and values; ranks share a key/value head where there are more ranks than those."""
        dim, width = a.head_dim, a.n_heads * a.head_dim
        group = a.n_heads // a.n_kv
        out = f"{prefix}attn_output.weight"
        q = self._portion(width, group * dim, out)
        if q is not None:
            kv = (q[0] // (group * dim), q[1] // (group * dim))
        else:
            ranks, per = self._share.ranks, a.n_heads // self._share.ranks
            if a.n_heads % ranks or ranks % a.n_kv or per * dim % self._block(out):
                return a
            q = (self._share.rank * per * dim, (self._share.rank + 1) * per * dim)
            kv = (q[0] // (group * dim), q[0] // (group * dim) + 1)
        keys = (kv[0] * dim, kv[1] * dim)
        kv_width = a.n_kv * dim
        self._rows(f"{prefix}attn_q", width, q)
        self._rows(f"{prefix}attn_k", kv_width, keys)
        self._rows(f"{prefix}attn_v", kv_width, keys)
        after = [(start + begin, start + end) for start in (width, width + kv_width) for begin, end in [keys]]
        self._rows(f"{prefix}attn_qkv", width + 2 * kv_width, q, *after)
        heads = (q[0] // dim, q[1] // dim)
        self._cut(f"{prefix}attn_sinks.weight", -1, a.n_heads, heads)
        self._columns(f"{prefix}attn_output", width, q)
        self._share.sums.add(f"{prefix}attn")
        return replace(a, n_heads=heads[1] - heads[0], n_kv=kv[1] - kv[0])

    def _mamba1(self, prefix: str, m: Mamba1) -> Mamba1:
        taken = self._portion(m.inner, 1, f"{prefix}ssm_out.weight", f"{prefix}ssm_x.weight")
        if taken is None:
            return m
        self._rows(f"{prefix}ssm_in", 2 * m.inner, taken, (m.inner + taken[0], m.inner + taken[1]))
        self._rows(f"{prefix}ssm_conv1d", m.inner, taken)
        self._columns(f"{prefix}ssm_x", m.inner, taken)
        self._rows(f"{prefix}ssm_dt", m.inner, taken)
        self._cut(f"{prefix}ssm_a", -2, m.inner, taken)
        self._cut(f"{prefix}ssm_d", -1, m.inner, taken)
        self._columns(f"{prefix}ssm_out", m.inner, taken)
        self._share.sums.add(f"{prefix}attn")
        return replace(m, inner=taken[1] - taken[0])

    def _mamba2(self, prefix: str, m: Mamba2) -> Mamba2:
        """Groups with their heads, whose norms then need no other rank. Of one group the heads alone, with B and C on every
        rank: their values are gathered for the norm, and the rows of the map behind it are cut instead."""
        ranks, rank, per = self._share.ranks, self._share.rank, m.n_heads // m.n_groups
        out = f"{prefix}ssm_out"
        x = self._portion(m.inner, per * m.head_dim, f"{out}.weight") if m.n_groups > 1 else None
        if x is not None:
            heads = (x[0] // m.head_dim, x[1] // m.head_dim)
            groups = (heads[0] // per, heads[1] // per)
        elif m.n_groups == 1 and m.n_heads >= ranks and self._spec.n_embd >= ranks:
            heads, groups = portion(m.n_heads, rank, ranks), (0, 1)
            x = (heads[0] * m.head_dim, heads[1] * m.head_dim)
        else:
            return m
        width = m.inner + 2 * m.n_groups * m.n_state
        states = (groups[0] * m.n_state, groups[1] * m.n_state)
        b = (m.inner + states[0], m.inner + states[1])
        c = (b[0] + m.n_groups * m.n_state, b[1] + m.n_groups * m.n_state)
        into = m.inner + width + m.n_heads
        self._rows(
            f"{prefix}ssm_in",
            into,
            x,
            *((m.inner + begin, m.inner + end) for begin, end in (x, b, c)),
            (m.inner + width + heads[0], m.inner + width + heads[1]),
        )
        self._rows(f"{prefix}ssm_conv1d", width, x, b, c)
        self._cut(f"{prefix}ssm_dt.bias", -1, m.n_heads, heads)
        for name in ("ssm_a", "ssm_d"):
            shape = self._tensors.shape(prefix + name)
            self._cut(prefix + name, -len(shape), m.n_heads, heads)
        if m.n_groups > 1:
            self._cut(f"{prefix}ssm_norm.weight", -2, m.n_groups, groups)
            self._columns(out, m.inner, x)
            self._share.sums.add(f"{prefix}attn")
        else:
            rows = _vocabulary(self._spec.n_embd, rank, ranks)
            self._rows(out, self._spec.n_embd, rows)
            self._share.gathers[f"{prefix}attn"] = (x, m.inner)
            self._share.rows[f"{prefix}attn"] = (rows, self._spec.n_embd)
        return replace(m, n_heads=heads[1] - heads[0], n_groups=groups[1] - groups[0])

    def _ffn(self, prefix: str, ffn: FeedForward) -> FeedForward:
        if isinstance(ffn, Experts):
            return self._experts(prefix, ffn)
        taken = self._portion(ffn.width, 1, f"{prefix}ffn_down.weight")
        if taken is None:
            return ffn
        if self._tensors.shape(f"{prefix}ffn_up.weight")[0] == 2 * ffn.width:  # gate rows first
            self._rows(f"{prefix}ffn_up", 2 * ffn.width, taken, (ffn.width + taken[0], ffn.width + taken[1]))
        else:
            self._rows(f"{prefix}ffn_gate", ffn.width, taken)
            self._rows(f"{prefix}ffn_up", ffn.width, taken)
        self._columns(f"{prefix}ffn_down", ffn.width, taken)
        self._share.sums.add(f"{prefix}ffn")
        return replace(ffn, width=taken[1] - taken[0])

    def _experts(self, prefix: str, e: Experts) -> Experts:
        """A part of each expert, so that every rank has work whatever experts are chosen."""
        taken = self._portion(e.width, 1, f"{prefix}ffn_down_exps.weight")
        shared = self._portion(e.shared, 1, f"{prefix}ffn_down_shexp.weight") if e.shared else (0, 0)
        if taken is None or shared is None:
            return e
        for name in ("gate", "up"):
            self._rows(f"{prefix}ffn_{name}_exps", e.width, taken)
            if e.shared:
                self._rows(f"{prefix}ffn_{name}_shexp", e.shared, shared)
        self._columns(f"{prefix}ffn_down_exps", e.width, taken)
        if e.shared:
            self._columns(f"{prefix}ffn_down_shexp", e.shared, shared)
        self._share.sums.add(f"{prefix}ffn")
        return replace(e, width=taken[1] - taken[0], shared=shared[1] - shared[0])
