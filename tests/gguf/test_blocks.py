"""Dequantised blocks are ggml's own values, bit for bit; quantised ones lose no more than ggml's do."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from bench.check import quantisers
from quarrel.errors import GGUFError
from quarrel.gguf import FORMATS, GGMLType, GGUFFile, dequantize, quantize
from quarrel.gguf.formats import ggml_type
from tests.paths import need_cases

RECORD = Path(quantisers.__file__).parents[1] / "results" / "2026-11-27-quantisers.json"
TYPES = [kind for kind in GGMLType if kind.name not in ("F32", "Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64")]
# Relative RMS error on standard normal values; the K types and what bounds them are measured against ggml's below.
NORMAL_ERROR = {
    GGMLType.F32: 0.0,
    GGMLType.F16: 2.2e-4,
    GGMLType.BF16: 1.8e-3,
    GGMLType.Q8_0: 5.5e-3,
    GGMLType.Q8_1: 5.5e-3,
    GGMLType.Q4_0: 0.087,
    GGMLType.Q4_1: 0.079,
    GGMLType.Q5_0: 0.043,
    GGMLType.Q5_1: 0.039,
    GGMLType.MXFP4: 0.116,
    GGMLType.NVFP4: 0.1,
    GGMLType.TQ1_0: 0.9,
    GGMLType.TQ2_0: 0.9,
    GGMLType.Q4_K: 0.073,
    GGMLType.Q5_K: 0.037,
    GGMLType.Q6_K: 0.018,
    GGMLType.Q2_K: 0.27,
    GGMLType.Q3_K: 0.148,
    GGMLType.IQ4_NL: 0.078,
    GGMLType.IQ4_XS: 0.078,
    GGMLType.IQ3_S: 0.135,
    GGMLType.IQ3_XXS: 0.184,
    GGMLType.IQ2_S: 0.246,
    GGMLType.IQ2_XS: 0.296,
    GGMLType.IQ2_XXS: 0.337,
    GGMLType.IQ1_M: 0.431,
    GGMLType.IQ1_S: 0.463,
}
# Mean squared errors of ggml's own `ggml_quantize_chunk` for the matrix of `_weighted`: without importance, and with it.
GGML_ERROR = {
    GGMLType.Q4_0: (0.0074361, 0.015264),
    GGMLType.Q4_1: (0.0060901, 0.0090808),
    GGMLType.Q5_0: (0.0018304, 0.0036079),
    GGMLType.Q5_1: (0.001414, 0.0021942),
    GGMLType.Q2_K: (0.08687, 0.12159),
    GGMLType.Q3_K: (0.022784, 0.042809),
    GGMLType.Q4_K: (0.0050967, 0.0094869),
    GGMLType.Q5_K: (0.0012993, 0.0025882),
    GGMLType.Q6_K: (0.00031723, 0.00063757),
    GGMLType.IQ4_NL: (0.005748, 0.011843),
    GGMLType.IQ4_XS: (0.005832, 0.012114),
    # Without importance, as it makes these with importance that is one everywhere: some it refuses to make without any.
    GGMLType.IQ1_S: (0.23471, 0.44993),
    GGMLType.IQ1_M: (0.20263, 0.32699),
    GGMLType.IQ2_XXS: (0.11717, 0.1934),
    GGMLType.IQ2_XS: (0.088511, 0.14707),
    GGMLType.IQ2_S: (0.061739, 0.11742),
    GGMLType.IQ3_XXS: (0.032466, 0.047959),
    GGMLType.IQ3_S: (0.018619, 0.031171),
}


def _weighted() -> tuple[np.ndarray, np.ndarray]:
    """A normal matrix, and the importance of its columns."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal((16, 1024)).astype(np.float32)
    return x, np.exp(1.5 * rng.standard_normal(1024)).astype(np.float32)


def rel(x: np.ndarray, reference: np.ndarray) -> float:
    return float(np.sqrt(np.mean((x - reference) ** 2) / np.mean(reference**2)))


def test_27_types_have_reference_blocks() -> None:
    sizes = json.loads(need_cases("quant_blocks", "meta.json").read_text())
    assert sorted(sizes) == sorted(kind.name for kind in TYPES)
    for name, entry in sizes.items():
        block = FORMATS[GGMLType[name]]
        assert (int(block.type), block.elements, block.nbytes) == (entry["id"], entry["blck"], entry["size"])


@pytest.mark.parametrize("kind", TYPES)
def test_values_are_those_of_ggml(kind: GGMLType) -> None:
    with np.load(need_cases("quant_blocks", "blocks.npz")) as blocks:
        raw, wanted = blocks[f"{kind.name}_bytes"], blocks[f"{kind.name}_f32"]
    values = dequantize(raw, kind)
    assert values.shape == wanted.shape
    same = values.view(np.uint32) == wanted.view(np.uint32)
    assert (same | np.isnan(wanted) & np.isnan(values)).all()


@pytest.mark.parametrize("kind", [GGMLType.NVFP4, GGMLType.TQ1_0, GGMLType.TQ2_0])
def test_values_of_random_bytes_are_those_of_the_gguf_package(kind: GGMLType) -> None:
    raw = np.random.default_rng(int(kind)).integers(0, 256, (2000, FORMATS[kind].nbytes), np.uint8)
    try:
        with np.errstate(all="ignore"):
            wanted = quants.dequantize(raw, GGMLQuantizationType(kind)).astype(np.float32)
    except (NotImplementedError, ValueError):
        pytest.skip(f"this version of the gguf package does not read {kind.name}")
    values = dequantize(raw, kind)
    same = values.view(np.uint32) == wanted.view(np.uint32)
    assert (same | np.isnan(wanted) & np.isnan(values)).all()


def test_blocks_of_16_values_of_nvfp4_have_scales_of_their_own() -> None:
    x = np.repeat(np.float32([0.012, 1, -60, 2688]), 16)[None]  # the first is below the smallest normal scale
    np.testing.assert_allclose(dequantize(quantize(x, GGMLType.NVFP4), GGMLType.NVFP4), x, rtol=0.05)
    with pytest.raises(GGUFError, match="holds values up to 2688"):
        quantize(x * 1.01, GGMLType.NVFP4)


@pytest.mark.parametrize("kind", [GGMLType.Q4_K, GGMLType.Q8_0, GGMLType.BF16, GGMLType.F32])
def test_leading_axes_and_strides_are_kept(kind: GGMLType) -> None:
    size = FORMATS[kind].nbytes
    raw = np.random.default_rng(0).integers(0, 100, (3, 4, 5 * size), np.uint8)
    values = dequantize(raw, kind)
    assert values.shape == (3, 4, 5 * FORMATS[kind].elements)
    np.testing.assert_array_equal(values[1, 2], dequantize(raw[1, 2], kind))
    np.testing.assert_array_equal(dequantize(raw[:, ::2], kind), values[:, ::2])
    assert dequantize(raw[:0], kind).shape == (0, 4, values.shape[2])


def test_large_arrays_are_the_sum_of_their_parts() -> None:
    raw = np.random.default_rng(0).integers(0, 100, (9, 1000 * 144), np.uint8)
    whole = dequantize(raw, GGMLType.Q4_K)
    for i in range(9):
        np.testing.assert_array_equal(whole[i], dequantize(raw[i], GGMLType.Q4_K))


def test_what_is_no_block_is_refused() -> None:
    with pytest.raises(GGUFError, match=r"143 bytes, wanted a multiple"):
        dequantize(np.zeros((2, 143), np.uint8), GGMLType.Q4_K)
    with pytest.raises(GGUFError, match="wanted uint8"):
        dequantize(np.zeros((2, 144), np.int8), GGMLType.Q4_K)
    with pytest.raises(GGUFError, match="activations"):
        dequantize(np.zeros((2, 292), np.uint8), GGMLType.Q8_K)


@pytest.mark.parametrize("kind", NORMAL_ERROR)
def test_round_trip_error(kind: GGMLType) -> None:
    x = np.random.default_rng(0).standard_normal((32, 1024)).astype(np.float32)
    raw = quantize(x, kind)
    assert (raw.dtype, raw.shape) == (np.uint8, (32, 1024 // FORMATS[kind].elements * FORMATS[kind].nbytes))
    error = rel(dequantize(raw, kind), x)
    assert NORMAL_ERROR[kind] * 0.8 <= error <= NORMAL_ERROR[kind]


@pytest.mark.parametrize(
    ("case", "variant"), [("mistral", "q4_k_m"), ("nemotron", "q4_k_m"), ("phi3", "q5_k_m"), ("qwen3", "q6_k")]
)
def test_k_quantisers_lose_no_more_than_ggml_does(case: str, variant: str) -> None:
    checked = set()
    with (
        GGUFFile.open(need_cases(case, "model-q4_0x.gguf")) as exact,
        GGUFFile.open(need_cases(case, f"model-{variant}.gguf")) as made,
    ):
        for name, info in made.tensors.items():
            if info.type in (GGMLType.Q4_K, GGMLType.Q5_K, GGMLType.Q6_K):
                x = exact.array(name)
                ours = rel(dequantize(quantize(x, info.type), info.type), x)
                assert ours <= 1.02 * rel(made.array(name), x), name
                checked.add(info.type)
    assert checked


@pytest.mark.parametrize("kind", GGML_ERROR)
def test_errors_weigh_as_much_as_columns_are_used(kind: GGMLType) -> None:
    x, importance = _weighted()

    def error(importance: np.ndarray | None, weight: np.ndarray | float) -> float:
        return float((weight * (dequantize(quantize(x, kind, importance), kind) - x).astype(np.float64) ** 2).mean())

    plain, weighted = GGML_ERROR[kind]
    assert error(None, 1.0) <= 1.02 * plain
    assert error(importance, importance) <= 1.02 * weighted
    assert error(importance, importance) < 0.99 * error(None, importance)
    rows = np.broadcast_to(importance, x.shape)
    assert np.array_equal(quantize(x, kind, rows), quantize(x, kind, importance))


@pytest.mark.parametrize("kind", [*GGML_ERROR, GGMLType.Q8_0, GGMLType.MXFP4, GGMLType.F16])
def test_importance_that_says_nothing_changes_little(kind: GGMLType) -> None:
    x, importance = _weighted()
    best = rel(dequantize(quantize(x, kind), kind), x)
    for nothing in (np.zeros(1024), np.full(1024, 1e-30), np.full(1024, 1e30), np.eye(1, 1024)[0]):
        made = dequantize(quantize(x, kind, nothing), kind)
        assert rel(made, x) <= 1.3 * best, "what no text used was lost"
    for wrong, said in ((importance[:-1], "does not fit"), (importance * np.nan, "holds NaN"), (-importance, "negative")):
        if kind is not GGMLType.F16:
            with pytest.raises(GGUFError, match=said):
                quantize(x, kind, wrong)


@pytest.mark.parametrize(
    "kind", [GGMLType.Q4_K, GGMLType.Q5_K, GGMLType.Q6_K, GGMLType.Q2_K, GGMLType.Q3_K, GGMLType.IQ4_XS]
)
@pytest.mark.parametrize("value", [0.0, 3.0, -3.0, 1e-30, -60000.0])
def test_constant_blocks(kind: GGMLType, value: float) -> None:
    x = np.full((1, 256), value, np.float32)
    np.testing.assert_allclose(dequantize(quantize(x, kind), kind), x, rtol=0.01, atol=1e-6)


@pytest.mark.parametrize("kind", [GGMLType.Q4_K, GGMLType.Q5_K, GGMLType.Q6_K])
def test_runs_of_very_different_size_share_a_block(kind: GGMLType) -> None:
    x = np.random.default_rng(1).standard_normal((8, 256)).astype(np.float32)
    x[:, :128] *= 0.05
    x[:, 128:] += 2
    assert rel(dequantize(quantize(x, kind), kind), x) < 0.05


@pytest.mark.parametrize("name", quantisers.TYPES)
def test_errors_of_a_normal_matrix_are_within_two_percent_of_ggmls(name: str) -> None:
    """The record's errors of ggml are of its own quantisers, run once on this matrix."""
    recorded = json.loads(RECORD.read_text("utf-8"))["mean squared errors"][name]
    made = quantisers.error(GGMLType[name])
    assert made <= 1.02 * recorded["ggml"]
    assert made == pytest.approx(recorded["ours"], rel=1e-3), "the record is of other code"


def test_what_no_block_holds_is_refused() -> None:
    for value in (np.nan, np.inf, 1e6):
        with pytest.raises(GGUFError, match="holds values up to"):
            quantize(np.full((1, 256), value, np.float32), GGMLType.Q4_K)
    with pytest.raises(GGUFError, match="multiples of 256"):
        quantize(np.zeros((1, 255), np.float32), GGMLType.Q4_K)
    with pytest.raises(GGUFError, match="no quantiser for Q1_0"):
        quantize(np.zeros((1, 256), np.float32), GGMLType.Q1_0)


def test_bf16_rounds_to_even_and_keeps_nan() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F800000, 0x7F800001, 0xFFC00000], np.uint32)
    raw = quantize(bits.view(np.float32)[None], GGMLType.BF16).view(np.uint16)[0]
    assert [hex(n) for n in raw] == ["0x3f80", "0x3f82", "0x3f81", "0x7f80", "0x7fc0", "0xffc0"]


def test_the_sizes_of_blocks_are_the_gguf_packages() -> None:
    from gguf.constants import GGML_QUANT_SIZES

    known = {int(kind): size for kind, size in GGML_QUANT_SIZES.items() if kind != GGMLType.Q8_1}
    assert len(known) > 25
    ours = {int(kind): (block.elements, block.nbytes) for kind, block in FORMATS.items()}
    assert {kind: ours[kind] for kind in known if kind in ours} == {k: v for k, v in known.items() if k in ours}


def test_no_file_has_weights_in_q8_1() -> None:
    with pytest.raises(GGUFError, match="Q8_1.* is a format of activations, which no model file stores"):
        ggml_type(9)
