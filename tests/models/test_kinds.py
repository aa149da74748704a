"""A kind of layer is one entry of a table: the assembly and the sharding know of no other place."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest

from quarrel.gguf import GGUFFile, Metadata
from quarrel.models import ModelSpec, Tensors, assemble, assembly, read_spec, shard
from quarrel.models.cut import Cutter
from quarrel.models.kind import Block, Kind
from quarrel.models.mixers import MIXERS, Attention
from quarrel.models.spec import Mixer
from quarrel.ops.activation import plain
from quarrel.ops.contract import StateRef, Value, WeightRef
from quarrel.ops.linear import Linear, norm_linear
from quarrel.ops.null import Builder
from quarrel.ops.program import StateLayer
from quarrel.ops.state import conv
from tests.paths import need_cases


@dataclass(frozen=True)
class Filter(Mixer):
    """The squared queries of a file with attention, behind a convolution whose taps are all ones."""

    width: int


def _block(b: Builder, block: Block, m: Filter, h: Value, state: StateRef) -> tuple[Value, Linear]:
    maps = [block.linear(f"attn_{name}", n, block.n_embd) for name, n in (("q", m.width), ("k", 128), ("v", 128))]
    q, _, _ = norm_linear(b, block.norm, h, block.gains(), maps)
    ones = replace(block.tensors.ones(m.width * 2), rows=m.width, k=2)
    return plain(b, "relu2", conv(b, q, ones, None, state)), block.linear("attn_output", block.n_embd, m.width)


def _shard(cut: Cutter, m: Filter) -> Filter | None:
    own = cut.portion(m.width, 1, "attn_output.weight")
    if own is None:
        return None
    cut.rows("attn_q", m.width, own)
    cut.columns("attn_output", m.width, own)
    return Filter(own[1] - own[0])


def test_a_mixer_of_a_test_is_assembled_and_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = Kind(Filter, _block, _shard, ("attn_",), lambda m: (StateLayer((1, m.width)),))
    table = {**MIXERS, Filter: kind}
    monkeypatch.setattr(assembly, "MIXERS", table)
    monkeypatch.setattr(shard, "MIXERS", table)
    with GGUFFile.open(need_cases("nemotron") / "model-q4_0x.gguf") as file:
        spec = read_spec(file)
        assert isinstance(spec, ModelSpec)
        first, *rest = spec.layers
        assert isinstance(first.mixer, Attention)
        spec = replace(spec, layers=(replace(first, mixer=Filter(256)), *rest))
        whole = assemble(spec, Tensors(file))
        parts = [assemble(*shard.shard(spec, Tensors(file), rank, 2, "tensor")) for rank in range(2)]

    assert [s.shape for s in whole.states] == [(1, 256)]
    assert len(whole.caches) == len(rest)
    names = [n.op.name for n in whole.nodes if n.path == "blk.0.attn"]
    assert names == ["norm_linear", "conv", "plain", "linear_add"]
    for part in parts:
        assert [s.shape for s in part.states] == [(1, 128)]
        mine = [n.op.name for n in part.nodes if n.path == "blk.0.attn"]
        assert mine == [*names[:-1], "linear", "all_reduce_add"]


def test_qwen3vlmoe_is_qwen3moe_where_there_is_only_text() -> None:
    """M-RoPE turns by equal positions on all axes."""
    with GGUFFile.open(need_cases("qwen3moe") / "model-q4_0x.gguf") as file:
        keys = {key.replace("qwen3moe.", "qwen3vlmoe."): value for key, value in file.metadata.items()}
        keys |= {"general.architecture": "qwen3vlmoe", "qwen3vlmoe.rope.dimension_sections": [6, 5, 5, 0]}
        seeing = SimpleNamespace(metadata=Metadata(keys), tensors=file.tensors, raw=file.raw, array=file.array)
        assert read_spec(seeing) == replace(read_spec(file), architecture="qwen3vlmoe")  # type: ignore[arg-type]


def test_an_old_file_of_qwen3next_has_a_delta_net_in_one_tensor() -> None:
    """`ssm_in` holds query, key, values and gates of one key head after the other: the same rows are found in it."""
    with GGUFFile.open(need_cases("qwen3next") / "model-q4_0x.gguf") as file:
        spec = read_spec(file)
        qkv, gate, whole = (f"blk.0.{name}.weight" for name in ("attn_qkv", "attn_gate", "ssm_in"))
        (q, k, v), z = np.split(file.raw(qkv), [64, 128]), file.raw(gate)
        rows = np.concatenate([x[g * len(x) // 2 : (g + 1) * len(x) // 2] for g in range(2) for x in (q, k, v, z)])
        held = {name: info for name, info in file.tensors.items() if name not in (qkv, gate)}
        held[whole] = replace(file.tensors[qkv], name=whole, dims=(192, len(rows)))
        raw = lambda name: rows if name == whole else file.raw(name)  # noqa: E731
        old = Tensors(SimpleNamespace(metadata=file.metadata, tensors=held, raw=raw, array=file.array))  # type: ignore[arg-type]
        (maps,) = (n for n in assemble(spec, old).nodes if n.path == "blk.0.attn" and n.op.name == "norm_linear")
        found = [old.raw(ref).raw for ref in maps.inputs if isinstance(ref, WeightRef)]
        assert np.array_equal(found[1], file.raw(qkv))
        assert np.array_equal(found[4], z)


def test_every_kind_in_the_tables_is_under_its_spec() -> None:
    for table in (assembly.MIXERS, assembly.FEED_FORWARDS):
        for spec, kind in table.items():
            assert kind.spec is spec
            assert kind.tensors
