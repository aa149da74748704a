"""Packed weights: every format decodes to the reference's values bit for bit, in about the file's size."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from quarrel.gguf import FORMATS, GGMLType
from quarrel.ops import draw
from quarrel.ops.contract import RawWeight, WeightRef
from quarrel.ops.embedding import EMBEDDING, EmbeddingSpec, embedding_reference
from quarrel.ops.formats import WEIGHT_TYPES
from quarrel.ops.linear import LINEAR, LinearSpec
from quarrel.ops.weights import CallWeights
from quarrel.triton_backend.backend import TritonBackend
from quarrel.triton_backend.formats import pack
from quarrel.triton_backend.formats.pack import Uploader, packed_bytes
from quarrel.triton_backend.formats.table import NATIVE
from quarrel.triton_backend.formats.weights import Weights
from quarrel.triton_backend.runtime.arrays import Packed
from tests.triton_backend.cases import error_on


def any_bytes(type: GGMLType, rows: int, k: int) -> RawWeight:
    """Blocks of random bytes: every code, and scales that may be tiny, huge, infinite or NaN."""
    block = FORMATS[type]
    raw = np.random.default_rng(int(type)).integers(0, 256, (rows, k // block.elements * block.nbytes), dtype=np.uint8)
    return RawWeight(type, raw, k)


@pytest.mark.parametrize("type", WEIGHT_TYPES, ids=lambda t: t.name)
def test_any_bytes_decode_as_the_reference_does(backend: TritonBackend, type: GGMLType) -> None:
    weight = any_bytes(type, 64, 512)
    ids = np.arange(64, dtype=np.int32)[::-1].copy()
    spec = EmbeddingSpec(type, 64, 512)
    (got,) = backend.run_op(EMBEDDING, spec, (ids, weight), "float32")
    with np.errstate(all="ignore"):
        (want,) = embedding_reference(spec, ids, weight)
    same = (got == want) | (np.isnan(got) & np.isnan(want))  # type: ignore[operator]
    # K-quants subtract two products: fused on a GPU, the last bit may differ where infinities do not meet.
    near = np.isclose(got, want, rtol=1e-6, atol=0, equal_nan=True)  # type: ignore[arg-type]
    assert (same if backend.device().startswith("Triton") else near).all()


@pytest.mark.parametrize("type", NATIVE, ids=lambda t: t.name)
def test_packed_weights_are_at_most_3_percent_larger(type: GGMLType) -> None:
    block = FORMATS[type]
    k = max(block.elements, 256) * 4
    assert packed_bytes(type, 512, k) <= 1.03 * 512 * k // block.elements * block.nbytes


@pytest.mark.parametrize("type", [GGMLType.Q4_K, GGMLType.Q3_K, GGMLType.F16, GGMLType.MXFP4], ids=lambda t: t.name)
def test_packing_in_small_pieces_changes_nothing(monkeypatch: pytest.MonkeyPatch, type: GGMLType) -> None:
    weight = any_bytes(type, 37, 512)

    def packed() -> torch.Tensor:
        upload = Uploader(torch.device("cpu"))
        made = pack.pack(type, 37, 512, lambda a, b: weight.raw[a:b], upload)
        return torch.cat([p.reshape(-1).view(torch.uint8) for p in made.planes])

    whole = packed()
    monkeypatch.setattr(pack, "_CHUNK", 3 * weight.raw.shape[1] + 5)
    assert torch.equal(packed(), whole)
    monkeypatch.setattr(pack, "_CHUNK", weight.raw.shape[1] // 2 + 1)  # less than a row
    assert torch.equal(packed(), whole)


@pytest.mark.parametrize("type", NATIVE, ids=lambda t: t.name)
def test_a_row_of_one_block_is_packed_as_among_others(type: GGMLType) -> None:
    k = FORMATS[type].elements
    weight = any_bytes(type, 3, k)
    upload = Uploader(torch.device("cpu"))
    three = pack.pack(type, 3, k, lambda a, b: weight.raw[a:b], upload)
    one = pack.pack(type, 1, k, lambda a, b: weight.raw[1:2], upload)
    for single, among in zip(one.planes, three.planes, strict=True):
        assert torch.equal(single[0].view(torch.uint8), among[1].clone().view(torch.uint8))


def test_planes_start_at_aligned_addresses() -> None:
    for type in NATIVE:
        weight = any_bytes(type, 5, 256)
        upload = Uploader(torch.device("cpu"))
        made = pack.pack(type, 5, 256, lambda a, b, w=weight: w.raw[a:b], upload)
        assert all((p.data_ptr() - made.buffer.data_ptr()) % 256 == 0 for p in made.planes), type


@pytest.mark.parametrize("type", [GGMLType.Q4_K, GGMLType.Q6_K, GGMLType.Q8_0, GGMLType.IQ2_XS], ids=lambda t: t.name)
@pytest.mark.parametrize("last", [256, 48])
def test_matrices_beside_each_other_are_each_what_it_is_by_itself(type: GGMLType, last: int) -> None:
    refs = [WeightRef(name, type, rows, 512) for name, rows in (("q", 512), ("k", 256), ("v", last))]
    source = CallWeights({ref.name: any_bytes(type, ref.rows, ref.k) for ref in refs})
    device = torch.device("cpu")
    with np.errstate(all="ignore"):
        alone, beside = (Weights(source, device, "float16", refs) for _ in range(2))
        beside.beside(refs)
        parts = [beside.matrix(ref) for ref in refs]
        for ref, part in zip(refs, parts, strict=True):
            for plane, want in zip(part.planes, alone.matrix(ref).planes, strict=True):
                assert torch.equal(plane.view(torch.uint8), want.view(torch.uint8))
    whole = parts[0].whole
    assert whole is not None
    assert whole.n == 768 + last
    assert all(part.whole is whole for part in parts)
    assert parts[1].planes.codes.data_ptr() == whole.planes.codes[512:].data_ptr()
    absent = [plane is whole.planes.codes for plane in whole.planes]
    assert [plane is parts[2].planes.codes for plane in parts[2].planes] == absent
    assert all(plane.data_ptr() % 16 == 0 for part in parts for plane in part.planes)
    assert beside.nbytes() == whole.nbytes


def test_what_is_no_one_matrix_stays_apart() -> None:
    def made(*refs: WeightRef) -> list[Packed]:
        weights = Weights(
            CallWeights({r.name: any_bytes(r.type, r.rows, r.k) for r in refs}), torch.device("cpu"), "float16"
        )
        weights.matrix(refs[-1])
        weights.beside(refs[:-1])
        return [weights.matrix(ref) for ref in refs]

    q, k, other = (WeightRef(name, GGMLType.Q4_K, 256, 512) for name in ("q", "k", "other"))
    assert made(q, k, other)[0].whole is not None
    assert made(q, k, k)[0].whole is None  # packed already
    for odd in (replace(k, type=GGMLType.Q6_K), replace(k, k=256), q):
        assert made(q, odd, other)[0].whole is None
    # The rows of the last are behind all others.
    assert made(q, replace(k, rows=300), other)[0].whole is not None
    assert made(replace(q, rows=300), k, other)[0].whole is None


@pytest.mark.parametrize("compute", ["float32", "float16"])
def test_a_format_without_kernels_is_stored_as_floats(backend: TritonBackend, compute: str) -> None:
    type, rows, k = GGMLType.IQ2_XS, 40, 512
    weight = any_bytes(type, rows, k)
    weight.raw.reshape(rows, 2, -1)[..., :2] = np.full((rows, 2), 0.01, np.float16)[..., None].view(np.uint8)
    x = draw.activations(np.random.default_rng(2), 3, k)
    assert error_on(backend, LINEAR, LinearSpec(type, rows, k), (x, weight), compute) <= LINEAR.tolerance[compute]  # type: ignore[arg-type, index]
