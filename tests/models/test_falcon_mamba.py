"""FalconMamba: Mamba-1 with its step, B and C normalised, against a forward pass written out here."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from quarrel.gguf import GGUFFile, Metadata
from quarrel.models import Tensors, assemble, read_spec
from quarrel.ops.contract import rel_error
from quarrel.ops.reference import run_program
from tests.models.test_reference_logits import chunk, wanted
from tests.paths import need_cases


def rms(x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def forward(file: GGUFFile, ids: np.ndarray, normed: bool) -> np.ndarray:
    """Logits `[T, V]` in float64, token by token, from the maths of Mamba-1."""
    eps = file.metadata.float("mamba.attention.layer_norm_rms_epsilon")
    w = {name: file.array(name).astype(np.float64) for name in file.tensors}
    h = w["token_embd.weight"][ids]
    for il in range(file.metadata.int("mamba.block_count")):
        p = {n.removeprefix(f"blk.{il}."): a for n, a in w.items() if n.startswith(f"blk.{il}.")}
        inner, n_state = p["ssm_a"].shape
        both = rms(h, eps) * p["attn_norm.weight"] @ p["ssm_in.weight"].T
        x, z = both[:, :inner], both[:, inner:]
        taps = p["ssm_conv1d.weight"]
        padded = np.concatenate([np.zeros((taps.shape[1] - 1, inner)), x])
        x = np.stack([(padded[t : t + taps.shape[1]].T * taps).sum(1) for t in range(len(ids))]) + p["ssm_conv1d.bias"]
        x = silu(x)
        low = x @ p["ssm_x.weight"].T
        dt, b, c = np.split(low, [low.shape[1] - 2 * n_state, low.shape[1] - n_state], axis=1)
        if normed:
            dt, b, c = rms(dt, eps), rms(b, eps), rms(c, eps)
        step = np.log1p(np.exp(dt @ p["ssm_dt.weight"].T + p["ssm_dt.bias"]))
        state, y = np.zeros((inner, n_state)), np.empty_like(x)
        for t in range(len(ids)):
            state = np.exp(step[t][:, None] * p["ssm_a"]) * state + (step[t] * x[t])[:, None] * b[t]
            y[t] = state @ c[t] + p["ssm_d"] * x[t]
        h = h + y * silu(z) @ p["ssm_out.weight"].T
    return rms(h, eps) * w["output_norm.weight"] @ w.get("output.weight", w["token_embd.weight"]).T


@pytest.mark.parametrize("normed", [False, True], ids=["mamba", "falcon-mamba"])
def test_logits_follow_the_formula(normed: bool) -> None:
    folder = need_cases("mamba", "model-q4_0x.gguf").parent
    ids = np.load(folder / "tokens.npy").reshape(-1).astype(np.int32)[:24]
    with GGUFFile.open(folder / "model-q4_0x.gguf") as file:
        want = forward(file, ids, normed)
        keys = Metadata(dict(file.metadata) | {"mamba.ssm.dt_b_c_rms": normed})
        given = SimpleNamespace(metadata=keys, tensors=file.tensors, raw=file.raw, array=file.array)
        tensors = Tensors(given)  # type: ignore[arg-type]
        program = assemble(read_spec(given), tensors)  # type: ignore[arg-type]
        states = [np.full((2, *s.shape), np.nan, np.float32) for s in program.states]
        got = run_program(program, tensors, [], chunk(ids, 0, len(ids)), states)["logits"]
        assert rel_error(got, want) < 1e-5
        if not normed:
            assert rel_error(want, wanted(folder, "q4_0x")[: len(ids)]) < 1e-5
