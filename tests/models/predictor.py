"""The block that predicts further tokens on a backend, against the reference; and a file whose block knows its model."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np

from quarrel.gguf import GGMLType, GGUFFile, quantize
from quarrel.models import ModelSpec, Tensors, assemble, assemble_predictor, read_spec
from quarrel.ops.contract import rel_error
from quarrel.ops.reference import empty_cache, run_program
from quarrel.ops.step import Backend, Limits, SampleInputs
from tests.models.test_reference_logits import chunk
from tests.paths import need_cases

LIMITS = Limits(max_tokens=24, max_seqs=2, max_blocks_per_seq=4, n_blocks=4, block_size=16)


def check_predictor(backend: Backend, arch: str, *, trunk: bool) -> None:
    """The block makes of a stream what the reference does, in two pieces. trunk: and the model's `stream` is `hidden` of
    every row."""
    folder = need_cases(arch)
    ids = np.load(folder / "tokens.npy").reshape(-1).astype(np.int32)[:7]
    ones = np.ones(1, np.float32)
    greedy = SampleInputs(0 * ones, np.zeros(1, np.int32), ones, 0 * ones, 0 * ones)
    with GGUFFile.open(folder / "model-q4_0x.gguf") as file:
        spec, tensors = read_spec(file), Tensors(file)
        assert isinstance(spec, ModelSpec)
        stream = np.random.default_rng(1).standard_normal((7, spec.n_embd), np.float32)
        if trunk:
            step = backend.compile(assemble(spec, tensors, stream=True), tensors, LIMITS, "float32")
            whole = chunk(ids, 0, 7)
            made = step(replace(whole, out_rows=np.array([6], np.int32), sample=greedy), "tokens").stream
            assert made is not None
            assert np.allclose(made, step(whole, "hidden").hidden, rtol=1e-5, atol=1e-6)
            step.close()
        program = assemble_predictor(spec, tensors)
        caches = [empty_cache(c, 4, 16, fill=np.nan) for c in program.caches]
        step = backend.compile(program, tensors, LIMITS, "float32")
        for start, end in ((0, 5), (5, 6)):
            inputs = chunk(ids[1:], start, end)
            inputs = replace(inputs, stream=stream[start:end], out_rows=inputs.out_rows[-1:], sample=greedy)
            got, want = step(inputs, "tokens"), run_program(program, tensors, caches, inputs)
            assert got.stream is not None
            assert got.stream.shape == (1, spec.n_embd)
            assert rel_error(got.stream, want["stream"]) < 2e-5
            assert np.array_equal(got.tokens, want["tokens"])  # type: ignore[arg-type]
        step.close()


def write_knowing(path: Path, arch: str) -> Path:
    """The model of a case whose layers add nothing, so that what follows depends on the last token alone, with a block
    that reads the embedding and not the stream, and so says the same."""
    shutil.copy(need_cases(arch, "model-q4_0x.gguf"), path)
    with GGUFFile.open(path) as file:
        parts = {name: (file.raw(name).nbytes, t) for name, t in file.tensors.items()}
        offsets = {name: file.raw(name).ctypes.data - file.raw(next(iter(parts))).ctypes.data for name in parts}
        first = path.read_bytes().find(file.raw(next(iter(parts))).tobytes())
        shared = {"shared_head_norm": "output_norm", "shared_head_head": "output", "embed_tokens": "token_embd"}
        own = {
            f"nextn.{name}.weight": file.raw(f"{of}.weight").tobytes()
            for name, of in shared.items()
            if f"{of}.weight" in parts
        }
    data = bytearray(path.read_bytes())
    for name, (size, info) in parts.items():
        at = first + offsets[name]
        n = info.shape[0]
        _, _, of_block = name.partition("nextn.")
        if any(part in name for part in ("attn_output.weight", "ssm_out.weight", "ffn_down")):
            data[at : at + size] = bytes(size)
        elif name.endswith("nextn.eh_proj.weight"):
            joined = np.concatenate([np.eye(n, dtype=np.float32), np.zeros((n, n), np.float32)], 1)
            data[at : at + size] = quantize(joined, GGMLType.Q4_0).tobytes()
        elif name.endswith("nextn.enorm.weight"):
            data[at : at + size] = np.ones(n, np.float32).tobytes()
        elif f"nextn.{of_block}" in own:
            data[at : at + size] = own[f"nextn.{of_block}"]
    path.write_bytes(data)
    return path
