"""What the cache has of a text goes into a file and comes back: another process goes on from there, to the last bit."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quarrel
from quarrel.engine import transfer
from quarrel.engine.engine import Engine
from quarrel.engine.saved import SAVED, SavedPrefix
from quarrel.errors import RequestError
from tests.paths import need_cases
from tests.tiny_model import write_tiny_model

OPTIONS: dict[str, Any] = {"backend": "cpu", "threads": 1, "n_ctx": 256, "max_seqs": 2}
GREEDY: dict[str, Any] = {"max_tokens": 20, "temperature": 0.0, "logprobs": 0}
TEXT = [1, *np.random.default_rng(3).integers(3, 250, 89).tolist()]
MODELS = {
    "gemma3": "model-q4_0x.gguf",
    "gptoss": "model-mxfp4-bf16.gguf",
    "granitehybrid": "model-q4_k_m.gguf",
    "mamba2": "model-q4_k_m.gguf",
}


@pytest.fixture(name="tiny", scope="module")
def _tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(name="saved", scope="module")
def _saved(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of `TEXT` and 19 tokens that the tiny model said to it."""
    path = tmp_path_factory.mktemp("saved") / "text"
    with quarrel.load(tiny, **OPTIONS) as llm:
        result = llm.generate(TEXT, **GREEDY)
        assert llm.prefixes.save([*TEXT, *result.token_ids], path) == (109, path.stat().st_size)
    return path


def answers(llm: quarrel.LLM, ids: list[int]) -> tuple[Any, ...]:
    result = llm.generate(ids, **GREEDY)
    assert result.logprobs is not None
    return result.token_ids, [e.logprob for e in result.logprobs], result.usage.cached_tokens


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_another_process_goes_on_where_the_first_was(name: str, kv: str, tmp_path: Path) -> None:
    model, path = need_cases(name, MODELS[name]), tmp_path / "text"
    with quarrel.load(model, **OPTIONS, kv_cache=kv) as llm:
        said = [*TEXT, *llm.generate(TEXT, **GREEDY).token_ids]
        count, size = llm.prefixes.save(said, path)
        wanted = answers(llm, [*said, 7, 8])
        assert wanted[2] == count > 80
    with quarrel.load(model, **OPTIONS, kv_cache=kv) as llm:
        assert llm.prefixes.restore(path) == (said[:count], size)
        assert answers(llm, [*said, 7, 8]) == wanted
        # It is in the cache as any text is: found in part, too, and saved again as it was.
        llm.prefixes.forget(said)
        assert answers(llm, [*said, 7, 8])[2] == 0
        assert llm.prefixes.restore(path) == (said[:count], size)
        llm.prefixes.save(said[:count], tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


def test_names_as_long_as_a_disk_has_them_and_two_at_once(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with quarrel.load(tiny, **OPTIONS) as llm:
        other = [9, *TEXT]
        for ids in (TEXT, other):
            llm.generate(ids, max_tokens=1)
        long = tmp_path / ("\u5b57" * 85)  # 255 bytes
        llm.prefixes.save(TEXT, long)
        llm.prefixes.save(other, tmp_path / "other")
        # Two at once to one name: whichever ends last is there, whole.
        both, write = threading.Barrier(2), SavedPrefix.write

        def together(self: SavedPrefix, *args: Any, **more: Any) -> int:
            both.wait(60)
            made = write(self, *args, **more)
            both.wait(60)
            return made

        monkeypatch.setattr(SavedPrefix, "write", together)
        threads = [threading.Thread(target=llm.prefixes.save, args=(ids, tmp_path / "same")) for ids in (TEXT, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert (tmp_path / "same").read_bytes() in (long.read_bytes(), (tmp_path / "other").read_bytes())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "same", long.name]


def test_what_lies_behind_a_text_in_its_last_block_is_not_saved(tiny: Path, tmp_path: Path) -> None:
    with quarrel.load(tiny, **OPTIONS) as llm:
        llm.generate(TEXT, max_tokens=2)
        assert llm.prefixes.save(TEXT[:70], tmp_path / "part")[0] == 70
        llm.prefixes.forget(TEXT)
        llm.generate(TEXT[:70], max_tokens=1)
        llm.prefixes.save(TEXT[:70], tmp_path / "whole")
    assert (tmp_path / "part").read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize(("bound", "least"), [("MOST", 1), ("HOLD", 0.0)])
def test_a_text_comes_in_pieces_between_other_steps(
    tiny: Path, saved: Path, monkeypatch: pytest.MonkeyPatch, bound: str, least: float
) -> None:
    """The engine waits for the caller: it makes one step for each thing that the restoring asks of it."""
    steps: list[int] = []
    write, advance, restored = transfer.Restore.write, Engine.advance, threading.Event()

    def step_when_asked(engine: Engine) -> bool:
        while engine.stats.steps > 1 and not (llm._loop._jobs or restored.is_set()):
            time.sleep(1e-3)
        return advance(engine)

    def watched(restore: transfer.Restore, engine: Engine) -> bool:
        steps.append(engine.stats.steps)
        return write(restore, engine)

    monkeypatch.setattr(transfer, "PIECE", 1)
    monkeypatch.setattr(transfer, bound, least)
    monkeypatch.setattr(transfer.Restore, "write", watched)
    monkeypatch.setattr(Engine, "advance", step_when_asked)
    with quarrel.load(tiny, **OPTIONS) as llm:
        for i, _ in enumerate(llm.stream([1, 5, 6], max_tokens=200, ignore_eos=True)):
            if i == 0:
                try:
                    tokens, _ = llm.prefixes.restore(saved)
                finally:
                    restored.set()
        layers = len(llm.prefixes._form.layers)
        assert len(steps) == 4 * layers + 1  # a layer's block of 32 tokens each, and once more
        assert len(set(steps)) > 2
        assert llm.prefixes.known(tokens) == len(tokens) == 109


@pytest.mark.parametrize("name", ["gemma3", "gptoss"])
def test_blocks_of_windows_come_in_pieces_too(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PIECE", 1)
    with quarrel.load(need_cases(name, MODELS[name]), **OPTIONS) as llm:
        llm.generate(TEXT, max_tokens=1)
        llm.prefixes.save(TEXT, tmp_path / "text")
        llm.prefixes.forget(TEXT)
        engine = llm._loop.engine
        assert engine is not None
        step: Any = engine.step
        form, at_once, write = transfer.form_of(engine), list[int](), step.write_blocks

        def watched(blocks: list[int], arrays: list[Any], layer: int) -> None:
            at_once.append(len(blocks))
            write(blocks, arrays, layer)

        monkeypatch.setattr(step, "write_blocks", watched)
        llm.prefixes.restore(tmp_path / "text")
    beside = form.window_groups * form.window_blocks(len(TEXT))
    assert beside
    assert at_once == [1] * len(form.layers) * (form.blocks(len(TEXT)) + beside)


@pytest.mark.parametrize("at", ["begin", "write", "enter", "release"])
def test_an_interrupt_while_a_text_comes_leaves_nothing_behind(
    tiny: Path, saved: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    with quarrel.load(tiny, **OPTIONS) as llm:
        run = llm._loop.run

        def interrupted(job: Callable[[], Any]) -> Any:
            found = run(job)  # the job is the thread's, which no interrupt reaches
            if called[-1] == at:
                raise KeyboardInterrupt
            return found

        called = [""]
        for step in ("begin", "write", "enter", "release"):
            own = getattr(transfer.Restore, step)

            def noted(restore: transfer.Restore, engine: Engine, own: Any = own, step: str = step) -> Any:
                called.append(step)
                return own(restore, engine)

            monkeypatch.setattr(transfer.Restore, step, noted)
        monkeypatch.setattr(llm._loop, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.prefixes.restore(saved)
        monkeypatch.undo()
        busy = llm.activity()
        assert busy.free_blocks + busy.kept_blocks == busy.n_blocks
        assert len(llm.prefixes.restore(saved)[0]) == 109


def test_a_text_that_comes_while_the_engine_starts_again_can_come_again(
    tiny: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = transfer.Restore.write

    def interrupted(restore: transfer.Restore, engine: Engine) -> bool:
        engine.stats.restarts += 1
        return write(restore, engine)

    with quarrel.load(tiny, **OPTIONS) as llm:
        with monkeypatch.context() as patched:
            patched.setattr(transfer.Restore, "write", interrupted)
            with pytest.raises(RequestError, match="started again"):
                llm.prefixes.restore(saved)
        assert len(llm.prefixes.restore(saved)[0]) == 109


def test_a_restored_text_is_its_salt_s_alone(tiny: Path, saved: Path) -> None:
    with quarrel.load(tiny, **OPTIONS) as llm:
        llm.prefixes.restore(saved, salt="of one caller")
        for salt, known in (("", 0), ("of one caller", 109)):
            service = quarrel.Service(cache_salt=salt)
            tokens = llm.prefixes.restore(saved, salt="of one caller")[0]
            assert llm.generate([*tokens, 280], service=service, max_tokens=1).usage.cached_tokens == known
        with pytest.raises(RequestError, match="nothing of this text is in the cache any more"):
            llm.prefixes.save([9, 9, 9], saved.with_name("none"))
    assert not saved.with_name("none").exists()


def test_a_text_that_others_go_on_from_is_forgotten_behind_what_they_share(tiny: Path) -> None:
    with quarrel.load(tiny, **OPTIONS) as llm:
        other = [*TEXT[:40], *range(270, 285)]
        for ids in (TEXT, other):
            llm.generate(ids, max_tokens=1)
        llm.prefixes.forget(TEXT, shared=40)
        known = [llm.generate([*ids, 265], max_tokens=1).usage.cached_tokens for ids in (other, TEXT)]
        assert known == [55, 40]


def test_files_that_are_not_this_model_s_are_refused_in_a_sentence(tiny: Path, saved: Path, tmp_path: Path) -> None:
    data, path = saved.read_bytes(), tmp_path / "file"
    other = write_tiny_model(tmp_path / "other.gguf", seed=1)
    changed = bytearray(data)
    changed[-20] ^= 1

    def refusal(content: bytes, model: Path = tiny, **options: Any) -> str:
        path.write_bytes(content)
        with quarrel.load(model, **{**OPTIONS, **options}) as llm:
            with pytest.raises(RequestError) as error:
                llm.prefixes.restore(path)
            assert llm.activity().kept_blocks == 0
        return str(error.value)

    assert refusal(data, other).startswith("the saved prompt is of another model: ")
    assert refusal(data, kv_cache="int8") == "the saved prompt is of another cache type: float16, wanted int8"
    assert (
        refusal(data, n_ctx=100) == "the saved prompt has 109 tokens, wanted at most 100: load the model with more context"
    )
    assert refusal(bytes(changed)) == "the saved prompt is damaged: save it again"
    assert refusal(data[:-1]) == refusal(data[:9]) == refusal(b"") == "the saved prompt is cut short: save it again"
    assert refusal(b"GGUF" + data) == "it is no saved prompt of Quarrel's: wanted a file that a slot was saved to"
    for head in (b"\xff\xff\xff\xff", b"\x04\x00\x00\x00null", b"\x06\x00\x00\x00[[[[[["):
        assert refusal(SAVED + head) == "the saved prompt is damaged: save it again"
    assert "no such file" in refusal_of_none(tiny, tmp_path).lower()


def refusal_of_none(model: Path, folder: Path) -> str:
    with quarrel.load(model, **OPTIONS) as llm, pytest.raises(RequestError) as error:
        llm.prefixes.restore(folder / "absent")
    return str(error.value)


def test_counts_in_a_hostile_head_take_no_memory(tiny: Path, saved: Path, tmp_path: Path) -> None:
    data = saved.read_bytes()
    length = int.from_bytes(data[8:12], "little")
    head = json.loads(data[12 : 12 + length])
    with quarrel.load(tiny, **OPTIONS) as llm:
        for count in (-1, 0, 1 << 60, "many", None, [1], 1.5):
            made = json.dumps({**head, "tokens": count}).encode()
            (tmp_path / "file").write_bytes(SAVED + len(made).to_bytes(4, "little") + made + data[12 + length :])
            with pytest.raises(RequestError, match="damaged|wanted at most 256"):
                llm.prefixes.restore(tmp_path / "file")


def test_a_cache_without_room_refuses(tiny: Path, saved: Path) -> None:
    with quarrel.load(tiny, **OPTIONS, prefix_cache=False) as llm:
        with pytest.raises(RequestError, match="without room for prompts that nobody uses"):
            llm.prefixes.restore(saved)
    with quarrel.load(tiny, **OPTIONS) as llm:
        engine = llm._loop.engine
        assert engine is not None
        pool = engine.cache.pool
        llm.generate([5, 6, 7], max_tokens=1)
        taken = pool.allocate(pool.free - 2)
        with pytest.raises(
            RequestError, match=f"needs 4 cache blocks, and 3 of {pool.n_blocks} are free: wait for requests"
        ):
            llm.prefixes.restore(saved)
        assert llm.prefixes.known([5, 6, 7]) == 3, "nothing goes for one that finds no room"
        pool.release(taken[:1])
        assert len(llm.prefixes.restore(saved)[0]) == 109
        pool.release(taken[1:])
