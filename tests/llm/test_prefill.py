"""One process reads prompts and another goes on from them: the same tokens, and none lost whatever becomes of the first."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quarrel
from quarrel.cli import main
from quarrel.errors import QuarrelError, RequestError
from quarrel.llm import prefill
from quarrel.llm.prompt_reader import Pieces, read_prompt
from tests.paths import need_cases
from tests.tiny_model import write_tiny_model

pytest.importorskip("pyarrow.flight", reason="needs pyarrow")

from quarrel.flight import segments
from quarrel.flight.handover import Giver, Taken
from quarrel.flight.segments import Borrower, Lender, Lent

OPTIONS: dict[str, Any] = {"backend": "cpu", "threads": 1, "n_ctx": 256, "max_seqs": 4}
GREEDY: dict[str, Any] = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True}
DRAW = np.random.default_rng(5)
TEXTS = [[1, *DRAW.integers(3, 250, n).tolist()] for n in (89, 64, 130, 41, 200, 5)]
MODELS = {"gemma3": "model-q4_0x.gguf", "mamba2": "model-q4_k_m.gguf"}
PATIENCE = 120.0
linux = pytest.mark.skipif(sys.platform != "linux", reason="memory that another process can open is Linux's")


@pytest.fixture(name="tiny", scope="module")
def _tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(name="wanted", scope="module")
def _wanted(tiny: Path) -> list[tuple[int, ...]]:
    with quarrel.load(tiny, **OPTIONS) as llm:
        return [llm.generate(text, **GREEDY).token_ids for text in TEXTS]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "LEAST", 32)


@contextmanager
def giving(model: Path, key: str = "", borrower: Borrower | None = None, **more: Any) -> Iterator[str]:
    """The address of a server in this process. borrower: through whose memory answers go; else through the network."""
    with quarrel.load(model, **{**OPTIONS, **more}) as llm:
        giver = Giver("127.0.0.1", 0, partial(read_prompt, llm, borrower=borrower), key)
        try:
            yield f"grpc://127.0.0.1:{giver.port}"
        finally:
            giver.end(0.0)


def pinned_by_nobody(memory: Any) -> Any:
    return lambda: None


@pytest.fixture(name="borrower")
def _borrower() -> Iterator[Borrower]:
    made = Borrower(pinned_by_nobody, segments.UNIT)
    yield made
    made.close()


def mapped() -> int:
    """Memory of others, or for others, that this process has."""
    return Path("/proc/self/maps").read_text().count("/memfd:quarrel-")


@contextmanager
def process(model: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    words = ["prefill", str(model), "--port", "0", "--json", "--backend", "cpu", "--threads", "1", "--ctx", "256"]
    with subprocess.Popen([sys.executable, "-m", "quarrel", *words], stdout=subprocess.PIPE, text=True) as made:
        try:
            assert made.stdout is not None
            yield made, json.loads(made.stdout.readline())["prefill"]
        finally:
            made.kill()


def test_two_processes_say_what_one_does(tiny: Path, wanted: list[tuple[int, ...]]) -> None:
    with process(tiny) as (_, address), quarrel.load(tiny, **OPTIONS, prefill=address) as llm:
        for text, tokens in zip(TEXTS, wanted):
            made = llm.generate(text, **GREEDY)
            assert made.token_ids == tokens
            assert made.usage.cached_tokens == len(text) - 1 or len(text) < 32
        again = [*TEXTS[0], *wanted[0]]
        assert llm.generate(again, **GREEDY).usage.cached_tokens == len(again) - 1  # which is known here


@linux
def test_a_process_that_reads_lets_go_of_memory_whose_owner_is_gone(tiny: Path) -> None:
    with process(tiny) as (reader, address):
        maps = Path(f"/proc/{reader.pid}/maps")
        with quarrel.load(tiny, **OPTIONS, prefill=address) as llm:
            assert llm.generate(TEXTS[0], **GREEDY).usage.cached_tokens == len(TEXTS[0]) - 1
            assert "/memfd:quarrel-" in maps.read_text()
        end = time.monotonic() + PATIENCE
        while "/memfd:quarrel-" in maps.read_text() and time.monotonic() < end:
            time.sleep(0.05)
        assert "/memfd:quarrel-" not in maps.read_text()
    assert mapped() == 0


@linux
@pytest.mark.parametrize("shared", [False, True])
def test_memory_and_network_carry_the_same(
    tiny: Path, wanted: list[tuple[int, ...]], borrower: Borrower, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    sent: list[int] = []
    readinto = Taken.readinto
    monkeypatch.setattr(Taken, "readinto", lambda self, memory: sent.append(readinto(self, memory)) or sent[-1])
    with giving(tiny, borrower=borrower if shared else None) as address:
        with quarrel.load(tiny, **OPTIONS, prefill=address) as llm:
            made = [llm.generate(text, **GREEDY) for text in TEXTS[:5]]
            assert mapped() == 1 + shared  # the same for all, here and there
            llm.prefixes.save(TEXTS[2], (path := tiny.with_name(f"saved{shared}")))
        borrower.tidy()
        assert mapped() == 0
    assert [r.token_ids for r in made] == wanted[:5]
    assert [r.usage.cached_tokens for r in made] == [len(text) - 1 for text in TEXTS[:5]]
    assert len(sent) == 5
    assert not any(sent) if shared else all(sent)
    with quarrel.load(tiny, **OPTIONS) as llm:
        llm.generate(TEXTS[2], **GREEDY)
        llm.prefixes.save(TEXTS[2], tiny.with_name("alone"))
    assert path.read_bytes() == tiny.with_name("alone").read_bytes()


@linux
def test_a_killed_process_that_decodes_leaves_nothing_behind(tiny: Path, borrower: Borrower) -> None:
    code = (
        "import sys, time, quarrel; from quarrel.llm import prefill; prefill.LEAST = 32\n"
        f"with quarrel.load({str(tiny)!r}, **{OPTIONS!r}, prefill=sys.argv[1]) as llm:\n"
        f"    print(llm.generate({TEXTS[2]!r}, max_tokens=1).usage.cached_tokens, flush=True); time.sleep(600)"
    )
    before = set(Path("/dev/shm").iterdir())
    with giving(tiny, borrower=borrower) as address:
        with subprocess.Popen([sys.executable, "-c", code, address], stdout=subprocess.PIPE, text=True) as decoder:
            try:
                assert decoder.stdout is not None
                assert int(decoder.stdout.readline()) == len(TEXTS[2]) - 1
                borrower.tidy()
                assert mapped() == 1
            finally:
                decoder.kill()
        borrower.tidy()
    assert mapped() == 0
    assert not {path for path in Path("/dev/shm").iterdir() if "quarrel" in path.name} - before


@linux
def test_names_that_are_of_no_such_memory_are_refused_in_a_sentence(tmp_path: Path, borrower: Borrower) -> None:
    (tmp_path / "secret").write_bytes(b"x" * 4096)
    lent = Lent(segments.UNIT, pinned_by_nobody)
    assert lent.name is not None
    name = asdict(lent.name)
    loose = os.memfd_create(f"quarrel-{'a' * 32}", os.MFD_CLOEXEC)  # whose size may change
    os.ftruncate(loose, 4096)
    with (tmp_path / "secret").open("r+b") as file:
        for more, words in (
            ({"fd": file.fileno()}, "is something else"),
            ({"token": "b" * 32}, "is something else"),
            ({"fd": loose, "token": "a" * 32}, "not sealed"),
            ({"fd": "../../1"}, "does not name its memory"),
            ({"pid": True}, "does not name its memory"),
            ({"token": "../secret"}, "does not name its memory"),
            ({"more": 1}, "does not name its memory"),
        ):
            with pytest.raises(RequestError, match=words), borrower.borrow({**name, **more}):
                pass
        for found in ("/etc/passwd", [], 5):
            with pytest.raises(RequestError, match="does not name its memory"), borrower.borrow(found):
                pass
    os.close(loose)
    assert mapped() == 1
    for more in ({"host": "another"}, {"pid": 2**31 - 1}, {"fd": 10**30}):  # which goes through the network
        with borrower.borrow({**name, **more}) as memory:
            assert memory is None
    with borrower.borrow(name) as memory:
        assert memory is not None
        memory[5] = 7
        assert lent.array[5] == 7
    del memory
    lent.close()
    borrower.tidy()
    assert mapped() == 0


@linux
def test_memory_is_kept_for_the_next_text_unless_one_went_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    pins: list[int] = []

    def pin(memory: Any) -> Any:
        pins.append(size := len(memory))
        return lambda: pins.remove(size)

    unit, lender = segments.UNIT, Lender(pin)
    with lender.lend(5) as first:
        pass
    with lender.lend(unit) as second, lender.lend(unit + 1) as third:
        assert second is first
        assert (len(second.array), len(third.array)) == (unit, 2 * unit)
    with pytest.raises(KeyError), lender.lend(5):
        {}["what goes wrong"]
    assert pins == [2 * unit]
    with lender.lend(2 * unit + 1):  # the other one makes room for it
        assert pins == [3 * unit]
    monkeypatch.setattr(segments, "KEPT", 3 * unit)
    with lender.lend(5), lender.lend(5):
        assert len(pins) == 2
    assert len(pins) == 1 or sum(pins) <= 4 * unit
    lender.close()
    assert pins == []
    assert mapped() == 0


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_windows_and_recurrent_states_are_handed_over_too(name: str, shared: bool, borrower: Borrower) -> None:
    model = need_cases(name, MODELS[name])
    asked = {**GREEDY, "logprobs": 0}
    with quarrel.load(model, **OPTIONS) as llm:
        alone = llm.generate(TEXTS[2], **asked)
    address_of = giving(model, borrower=borrower if shared else None)
    with address_of as address, quarrel.load(model, **OPTIONS, prefill=address) as llm:
        made = llm.generate(TEXTS[2], **asked)
    assert made.usage.cached_tokens == len(TEXTS[2]) - 1
    assert made.token_ids == alone.token_ids
    assert [e.logprob for e in made.logprobs or ()] == [e.logprob for e in alone.logprobs or ()]


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGSTOP")
def test_no_request_is_lost_when_a_process_that_reads_for_it_is_killed(
    tiny: Path, wanted: list[tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    with process(tiny) as (reader, address), quarrel.load(tiny, **OPTIONS, prefill=address) as llm:
        assert llm.generate(TEXTS[0], **GREEDY).usage.cached_tokens == len(TEXTS[0]) - 1
        reader.send_signal(signal.SIGSTOP)  # so that it is killed while it reads all of them
        made: dict[int, list[Any]] = {i: [] for i in range(1, 5)}
        threads = [threading.Thread(target=lambda i=i: made[i].append(llm.generate(TEXTS[i], **GREEDY))) for i in made]
        for thread in threads:
            thread.start()
        assert llm._prefillers is not None
        end = time.monotonic() + PATIENCE
        while llm._prefillers._reading != [len(made)] and time.monotonic() < end:
            time.sleep(0.01)
        reader.kill()
        for thread in threads:
            thread.join(PATIENCE)
        assert {i: [r.token_ids for r in results] for i, results in made.items()} == {i: [wanted[i]] for i in made}
        assert all(r.usage.cached_tokens < 2 for results in made.values() for r in results)  # all begin with token 1
        lines = [r.getMessage() for r in caplog.records if "a prompt is not read elsewhere" in r.getMessage()]
        assert len(lines) == 1
        assert llm._prefillers._reading == [0]
        assert sys.platform != "linux" or mapped() == 0  # what they might have written to still


def test_more_prompts_than_are_read_at_once_wait_for_their_turn(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "READING", 1)
    most, now, lock = 0, 0, threading.Lock()

    def counted(llm: quarrel.LLM, question: bytes) -> Pieces:
        nonlocal most, now
        with lock:
            now += 1
            most = max(most, now)
        try:
            return read_prompt(llm, question)
        finally:
            with lock:
                now -= 1

    with quarrel.load(tiny, **OPTIONS) as reader:
        giver = Giver("127.0.0.1", 0, partial(counted, reader))
        try:
            with quarrel.load(tiny, **OPTIONS, prefill=f"grpc://127.0.0.1:{giver.port}") as llm:
                with ThreadPoolExecutor(5) as pool:
                    made = list(pool.map(lambda text: llm.generate(text, **GREEDY), TEXTS[:5]))
        finally:
            giver.end(0.0)
    assert most == 1
    assert [r.usage.cached_tokens for r in made] == [len(text) - 1 for text in TEXTS[:5]]


def test_one_that_is_there_takes_what_another_does_not(
    tiny: Path, wanted: list[tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    with giving(tiny) as there:
        with giving(tiny) as gone:
            pass
        with quarrel.load(tiny, **OPTIONS, prefill=f"{gone}, {there}") as llm:
            made = [llm.generate(text, **GREEDY) for text in TEXTS[:3]]
    assert [r.token_ids for r in made] == wanted[:3]
    assert [r.usage.cached_tokens for r in made] == [len(text) - 1 for text in TEXTS[:3]]
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda question: [b""], "no saved prompt"),
        (lambda question: [b"QUARRELP"], "cut short"),
        (lambda question: [bytes(segments.UNIT), b"x"], "more than a prompt has"),
        (lambda question: [b"QUARRELP", b"\xff" * 8], "damaged"),
        (lambda question: [b"x" * 4096], "no saved prompt"),
        (lambda question: 1 // 0, "a prompt"),
    ],
)
def test_what_is_no_prompt_is_read_here(
    tiny: Path, wanted: list[tuple[int, ...]], caplog: pytest.LogCaptureFixture, answer: Any, words: str
) -> None:
    giver = Giver("127.0.0.1", 0, answer)
    try:
        with quarrel.load(tiny, **OPTIONS, prefill=f"grpc://127.0.0.1:{giver.port}") as llm:
            assert llm.generate(TEXTS[0], **GREEDY).token_ids == wanted[0]
    finally:
        giver.end(0.0)
    assert words in caplog.text


def test_another_model_or_cache_or_key_is_named_and_not_used(
    tiny: Path, tmp_path: Path, wanted: list[tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    other = write_tiny_model(tmp_path / "other.gguf", seed=1)
    for model, more, words in ((other, {}, "another model"), (tiny, {"kv_cache": "int8"}, "another cache type")):
        with giving(model, **more) as address, quarrel.load(tiny, **OPTIONS, prefill=address) as llm:
            assert llm.generate(TEXTS[0], **GREEDY).token_ids == wanted[0]
        assert words in caplog.text
    with giving(tiny, key="a") as address, quarrel.load(tiny, **OPTIONS, prefill=address) as llm:
        assert llm.generate(TEXTS[0], **GREEDY).token_ids == wanted[0]
    assert "wants other credentials" in caplog.text


def test_a_key_that_both_know_opens(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUARREL_PREFILL_KEY", "a secret")
    with giving(tiny, key="a secret") as address, quarrel.load(tiny, **OPTIONS, prefill=address) as llm:
        assert llm.generate(TEXTS[0], **GREEDY).usage.cached_tokens == len(TEXTS[0]) - 1


def test_questions_of_strangers_are_refused_in_a_sentence(tiny: Path) -> None:
    with quarrel.load(tiny, **OPTIONS) as llm:
        for question in (b"", b"[]", b"{}", b"[" * 9999, json.dumps({"tokens": 5, "salt": "", "adapter": None}).encode()):
            with pytest.raises(RequestError):
                read_prompt(llm, question)
        borrower = Borrower(pinned_by_nobody, segments.UNIT)
        with pytest.raises(RequestError, match="does not name its memory"):
            read_prompt(llm, b'{"tokens": [1, 2, 3], "salt": "", "adapter": null, "memory": "/dev/shm/x"}', borrower)
        for wrong in ({"tokens": [1, 10**9]}, {"tokens": []}, {"tokens": [1] * 999}, {"salt": 7}, {"adapter": "none"}):
            question = json.dumps({"tokens": [1, 2, 3], "salt": "", "adapter": None, **wrong}).encode()
            with pytest.raises(QuarrelError):
                read_prompt(llm, question)
        assert isinstance(read_prompt(llm, b'{"tokens": [1, 2, 3], "salt": "", "adapter": null}'), Pieces)


def test_what_cannot_be_is_said_at_once(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RequestError, match="without room for prompts that nobody uses"):
        quarrel.load(tiny, **OPTIONS, prefill="grpc://127.0.0.1:1", prefix_cache=False)
    for address in ("nowhere", "http://a:1", "grpc://"):
        with pytest.raises(RequestError, match="the address is .*wanted one such as grpc://"):
            quarrel.load(tiny, **OPTIONS, prefill=address)
    assert main(["prefill", str(tiny), "--host", "0.0.0.0"]) == 1
    assert "there is no secret: set QUARREL_PREFILL_KEY" in capsys.readouterr().err
    assert main(["prefill", str(tiny), "--port", "70000"]) == 2
    monkeypatch.setenv("QUARREL_CHECK", "1")
    assert main(["prefill", str(tiny), "--backend", "cpu", "--port", "0"]) == 1
    assert "that several devices share, or that is checked, cannot be saved" in capsys.readouterr().err
