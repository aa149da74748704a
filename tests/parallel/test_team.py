"""Two processes over gloo: the same logits and tokens as one, and what becomes of requests when one dies."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import quarrel
from quarrel.errors import BackendUnavailable, EngineFault, RequestError
from quarrel.ops.step import Lists, Masks, SampleInputs, StepInputs
from quarrel.parallel.messages import pack_step, unpack
from tests.paths import need_cases
from tests.reference_backend import ReferenceBackend

pytest.importorskip("torch.distributed")

FOLDER, VARIANT = "granitehybrid", "q4_k_m"


@pytest.fixture(name="path")
def _path() -> Path:
    return need_cases(FOLDER) / f"model-{VARIANT}.gguf"


def test_two_processes_compute_what_one_does_and_a_lost_one_is_replaced(path: Path) -> None:
    options = {"backend": "cpu", "compute": "float32", "n_ctx": 64, "max_seqs": 2, "threads": 2}
    prompts = [[5, 9, 33], list(range(40))]
    ids = np.load(path.parent / "tokens.npy").reshape(-1).tolist()
    with quarrel.load(path, **options) as llm:  # type: ignore[arg-type]
        alone = texts(llm, prompts)
        likely = [token.logprob for token in llm.logprobs(ids)]
    with quarrel.load(path, **options, tensor_parallel=2) as llm:  # type: ignore[arg-type]
        assert texts(llm, prompts) == alone
        assert [token.logprob for token in llm.logprobs(ids)] == pytest.approx(likely, abs=1e-4)
        before = children()
        assert len(before) == 1
        os.kill(before[0], signal.SIGKILL)
        with pytest.raises(EngineFault, match="device 1 is lost"):
            llm.generate(prompts[0], max_tokens=3)
        assert texts(llm, prompts) == alone
        assert len(children()) == 1
        assert children() != before
    assert children() == []


def texts(llm: quarrel.LLM, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    return [result.token_ids for result in llm.generate(prompts, max_tokens=12, ignore_eos=True, temperature=0.0)]


def test_what_one_device_only_can_do_is_refused() -> None:
    with pytest.raises(RequestError, match="tensor_parallel is 17"):
        quarrel.load("demo", backend="cpu", tensor_parallel=17)
    with pytest.raises(RequestError, match="an encoder runs on one device"):
        quarrel.load(next(need_cases("bert").glob("*.gguf")), backend="cpu", tensor_parallel=2)
    with pytest.raises(BackendUnavailable, match="reference backend runs on one device"):
        quarrel.load("demo", backend=ReferenceBackend(), tensor_parallel=2)


def children() -> list[int]:
    """Worker processes of this one."""
    found = Path(f"/proc/self/task/{os.getpid()}").parent.glob("*/children")
    pids = [int(pid) for file in found for pid in file.read_text().split()]
    return [pid for pid in pids if b"quarrel.parallel.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_steps_travel_whole() -> None:
    rows = np.arange(3, dtype=np.int32)
    floats = np.linspace(0, 1, 3, dtype=np.float32)
    draws = SampleInputs(floats, rows, floats, floats, floats)
    table = np.arange(10, dtype=np.int32).reshape(2, 5)
    given = StepInputs(
        rows, rows, rows, rows, rows[:2], table, rows, sample=draws, state_slots=rows[:2], from_last=rows - 1
    )
    windows = replace(given, window_slots=np.stack([rows, rows + 7]), window_tables=np.stack([table, table + 1]))
    lists = Lists(rows, rows[:2], floats[:2], floats[1:], floats, floats, floats)
    listed = replace(given, sample=replace(draws, lists=lists))
    masks = Masks(rows - 1, np.arange(8, dtype=np.int32).reshape(2, 4))
    masked = [replace(given, sample=replace(s, masks=masks)) for s in (draws, listed.sample) if s is not None]
    for inputs in (given, windows, listed, *masked, replace(given, sample=None, state_slots=None, from_last=None)):
        parsed = unpack(pack_step(inputs, "both"))
        assert isinstance(parsed, tuple)
        got, want = parsed
        assert want == "both"
        for name, sent in vars(inputs).items():
            for a, b in zip(flat(getattr(got, name)), flat(sent), strict=True):
                assert np.array_equal(a, b)
                assert a.dtype == b.dtype
                assert a.shape == b.shape


def flat(value: object) -> list[np.ndarray]:
    if isinstance(value, SampleInputs | Lists | Masks):
        return [array for field in vars(value).values() for array in flat(field)]
    return [] if value is None else [np.asarray(value)]
