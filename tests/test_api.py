"""`quarrel.load` and what a loaded model does, on the reference models: exact tokens, exact logits, every ending."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quarrel
from quarrel.engine import Result, SamplingParams
from quarrel.errors import (
    BackendUnavailable,
    ContextOverflow,
    ModelNotFound,
    OutOfMemory,
    QuarrelError,
    RequestError,
    UnsupportedModel,
)
from quarrel.gguf import GGUFFile
from quarrel.llm import LLM
from quarrel.models import read_spec
from quarrel.ops.contract import rel_error
from quarrel.ops.registry import backend as backend_named
from quarrel.ops.registry import missing_driver
from quarrel.ops.step import Backend
from tests.paths import need_cases
from tests.reference_backend import ReferenceBackend

TRANSFORMERS = (
    "llama32",
    "mistral",
    "tinyllama",
    "smollm2",
    "qwen2",
    "qwen3",
    "qwen3_yarn",
    "granite",
    "granite4micro",
    "phi3",
    "gemma2",
    "gemma3",
)
ENCODERS = ("bert", "nomic_bert")
MESSAGES = [{"role": "user", "content": "a"}]
RECURRENT = ("mamba", "mamba2", "granitehybrid", "nemotron_h")


def backends() -> list[str]:
    """The reference and the CPU everywhere, CUDA where there is a device."""
    names = ["reference", "cpu"]
    try:
        # Without a driver Triton stays unloaded: the kernels' own tests choose its interpreter before that.
        if missing_driver("triton") is None and backend_named("triton").unavailable() is None:
            names.append("triton")
    except BackendUnavailable:
        pass
    return names


BACKENDS = backends()


def model(arch: str) -> Path:
    return need_cases(arch, "model-q4_0x.gguf")


def facts(arch: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(need_cases(arch, "meta.json").read_text())
    return read


def open_model(arch: str, backend: str | Backend = "reference", **options: Any) -> LLM:
    made = ReferenceBackend() if backend == "reference" else backend
    return quarrel.load(model(arch), **{"backend": made, "compute": "float32", "n_ctx": 64, "max_seqs": 3, **options})


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_model("llama32") as loaded:
        yield loaded


GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.mark.parametrize("arch", TRANSFORMERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_greedy_text_and_logits_are_the_reference_s(arch: str, backend: str) -> None:
    greedy = facts(arch)["greedy"]
    with open_model(arch, backend) as llm:
        result = llm.generate(greedy["prompt"], GREEDY)
        assert list(result.token_ids) == greedy["continuation"]
        wanted = np.load(need_cases(arch, "logits_hf.npy"))
        logits = llm.logits(np.load(need_cases(arch, "tokens.npy")).tolist())[-len(wanted) :]
        assert (logits.dtype, logits.shape) == (np.float32, wanted.shape)
        assert rel_error(logits, wanted) < 1e-5


@pytest.mark.parametrize("arch", RECURRENT)
def test_recurrent_models_continue_as_the_reference_does(arch: str) -> None:
    greedy = facts(arch)["greedy"]
    with open_model(arch) as llm:
        first, again = (llm.generate(greedy["prompt"], GREEDY) for _ in range(2))
        assert list(first.token_ids) == list(again.token_ids) == greedy["continuation"]
        assert again.usage.cached_tokens == 0  # a state cannot be cut back to a prefix
        batch = llm.generate([greedy["prompt"], greedy["prompt"][:5], greedy["prompt"]], GREEDY)
        assert [list(r.token_ids) for r in (batch[0], batch[2])] == [greedy["continuation"]] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_gives_what_each_prompt_gives_alone(backend: str) -> None:
    prompts = [[5, 6, 7], list(range(40)), [300], [9, 9, 9, 9, 9, 9], list(range(100, 117))]
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=10, ignore_eos=True)
    with open_model("llama32", backend) as llm:
        alone = [llm.generate(p, params).token_ids for p in prompts]
        together = llm.generate(prompts, params)
        assert [r.token_ids for r in together] == alone
        assert llm.generate([], params) == []
        with pytest.raises(ContextOverflow, match=r"^prompts\[1\]: the prompt has"):
            llm.generate([[5], [5] * (llm.n_ctx + 1)], params)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_continued_conversation_gives_what_a_fresh_one_gives(backend: str) -> None:
    with open_model("llama32", backend) as llm, open_model("llama32", backend, prefix_cache=False) as fresh:
        start = llm.generate([5, 6, 7], GREEDY)
        prompt = [5, 6, 7, *start.token_ids[:-2], 8, 8]
        again, wanted = llm.generate(prompt, GREEDY), fresh.generate(prompt, GREEDY)
        assert again.token_ids == wanted.token_ids
        assert again.usage.cached_tokens == len(prompt) - 2
        assert wanted.usage.cached_tokens == 0


def test_what_is_kept_of_texts_that_are_over_has_a_limit_in_bytes() -> None:
    prompts = [[i, *range(20, 110)] for i in range(6)]
    for texts, kept in ((0, 0), (2, 8)):
        with open_model("llama32", "cpu", n_ctx=256) as llm:
            plan = llm.explain().plan
            text = 4 * plan.cache // plan.limits.n_blocks  # of 91 tokens and some more
        with open_model("llama32", "cpu", n_ctx=256, prefix_cache_bytes=texts * text + 1) as llm:
            for prompt in prompts:
                llm.generate(prompt, GREEDY)
            assert llm.activity().kept_blocks == kept
            found = [llm.generate([*p[:90], 7], GREEDY).usage.cached_tokens for p in reversed(prompts)]
            assert [bool(n) for n in found][: texts + 1] == [True] * texts + [False]
    for wrong in (-1, 0.5, True, "1GB"):
        with pytest.raises(RequestError, match="prefix_cache_bytes is"):
            open_model("llama32", "cpu", prefix_cache_bytes=wrong)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "reference"])
def test_every_backend_draws_the_same_tokens_by_the_same_seed(backend: str) -> None:
    # Float32 arithmetic agrees to about 1e-6, so a draw differs only where it falls that close to a border.
    params = SamplingParams(temperature=0.9, seed=11, max_tokens=20, ignore_eos=True)
    with open_model("qwen3") as llm, open_model("qwen3", backend) as other:
        assert other.generate([5, 6, 7], params).token_ids == llm.generate([5, 6, 7], params).token_ids


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_of_a_text_longer_than_a_step_are_those_of_its_parts(backend: str) -> None:
    with open_model("smollm2", backend, n_ctx=640) as llm:
        ids = np.random.default_rng(0).integers(0, llm.spec.n_vocab, 600).tolist()
        whole = llm.logits(ids)
        assert whole.shape == (600, llm.spec.n_vocab)
        assert np.isfinite(whole).all()
        assert rel_error(llm.logits(ids[:520])[500:], whole[500:520]) < 1e-5
        assert llm.generate(ids, temperature=0, max_tokens=1).token_ids[0] == int(whole[-1].argmax())


def test_hidden_rows_are_what_the_output_layer_reads(llm: LLM) -> None:
    ids = [5, 6, 7, 8]
    hidden = llm.hidden(ids)
    assert (hidden.dtype, hidden.shape) == (np.float32, (4, llm.spec.n_embd))
    file = llm._parts.file
    name = "output.weight" if "output.weight" in file.tensors else "token_embd.weight"
    assert rel_error(hidden @ file.array(name).T, llm.logits(ids)) < 1e-5


@pytest.mark.parametrize("bad", [[], [-1], [384], [1.5], [True], [None], ["a"], 5, None, b"text", {1: 2}, [[1], [2]]])
def test_logits_of_what_is_no_text_are_refused(llm: LLM, bad: Any) -> None:
    with pytest.raises(RequestError):
        llm.logits(bad)


def test_text_becomes_tokens_and_back(llm: LLM) -> None:
    samples = facts("llama32")["tokenizer"]
    for text, ids in zip(samples["texts"], samples["ids_llamacpp"]):
        assert llm.tokenize(text) == ids
        assert llm.detokenize(llm.tokenize(text, add_special=False)) == text
    prompt = samples["texts"][0]
    by_text, by_ids = llm.generate(prompt, GREEDY), llm.generate(llm.tokenize(prompt), GREEDY)
    assert by_text.token_ids == by_ids.token_ids
    assert by_text.usage.prompt_tokens == len(llm.tokenize(prompt))
    assert by_ids.text == llm.tokenizer.decode(by_ids.token_ids)


def test_an_empty_prompt_begins_with_bos_where_there_is_one(llm: LLM) -> None:
    assert llm.generate("", GREEDY).usage.prompt_tokens == 1
    with open_model("granite4micro") as other, pytest.raises(RequestError, match="the prompt is empty"):
        other.generate("")


BAD_PROMPTS: list[Any] = [[[]], [-1], [384], [2**63], [1.5], [True], [None], 5, None, b"text", ["a", 5], {1}, count(1)]


@pytest.mark.parametrize("bad", [*BAD_PROMPTS, range(10**15), np.zeros((2, 2), int), np.array([1.0])], ids=repr)
def test_prompts_that_are_none_are_refused(llm: LLM, bad: Any) -> None:
    with pytest.raises(RequestError, match="prompt"):
        llm.generate(bad)
    with pytest.raises(RequestError):
        llm.stream(bad)


def test_no_prompts_have_no_results_but_one_without_ids_is_refused(llm: LLM) -> None:
    assert llm.generate([]) == []
    for one in (llm.stream, llm.logprobs):
        with pytest.raises(RequestError):
            one([])


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(llm: LLM) -> None:
    with pytest.raises(ContextOverflow, match="65 tokens and the context holds 64"):
        llm.generate([1] * 65)
    with pytest.raises(ContextOverflow):
        llm.logits([1] * 65)
    result = llm.generate([1] * 60, GREEDY)
    assert (result.finish_reason, len(result.token_ids)) == ("length", 4)


@pytest.mark.parametrize("id", [-1, -(2**31), 384, 2**31, 2**63, float("nan"), 1.5, "1e9"])
def test_no_field_takes_an_id_that_the_model_does_not_have(llm: LLM, id: Any) -> None:
    calls: Sequence[Callable[[], object]] = (
        lambda: llm.generate([1, id]),
        lambda: llm.generate([1], stop_token_ids=[id]),
        lambda: llm.generate([1], logit_bias={id: 1.0}),
        lambda: llm.logits([id]),
        lambda: llm.hidden([id]),
    )
    for call in calls:
        with pytest.raises(RequestError):
            call()


def test_params_and_keywords_join(llm: LLM) -> None:
    assert len(llm.generate([5], GREEDY, max_tokens=3).token_ids) == 3
    with pytest.raises(RequestError, match="params is a dict"):
        llm.generate([5], {"max_tokens": 3})  # type: ignore[call-overload]
    with pytest.raises(RequestError, match="no sampling parameter 'temp'; perhaps temperature is meant"):
        llm.generate([5], temp=0)  # type: ignore[call-overload]
    with pytest.raises(RequestError, match="temperature is -1"):
        llm.generate([5], temperature=-1)


def test_results_are_frozen_and_tell_everything(llm: LLM) -> None:
    result = llm.generate([5, 6], GREEDY, logprobs=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.text = ""  # type: ignore[misc]
    assert result.timings.load > 0
    assert result.timings.decode_rate > 0
    assert result.logprobs is not None
    assert len(result.logprobs) == 24
    assert json.dumps(dataclasses.asdict(result))


def test_streams_tell_the_result_in_pieces(llm: LLM) -> None:
    wanted = llm.generate([5, 6], GREEDY)
    with llm.stream([5, 6], GREEDY) as stream:
        chunks = list(stream)
    assert stream.result is not None
    assert "".join(c.text for c in chunks) == stream.result.text == wanted.text
    assert chunks[-1].result == stream.result
    assert stream.result.token_ids == wanted.token_ids


def test_an_unset_seed_is_drawn_and_reported(llm: LLM) -> None:
    one, two = (llm.generate([5, 6], temperature=2.0, top_k=0, top_p=1, min_p=0, max_tokens=9) for _ in range(2))
    assert one.seed != two.seed
    again = llm.generate([5, 6], temperature=2.0, top_k=0, top_p=1, min_p=0, max_tokens=9, seed=one.seed)
    assert again.token_ids == one.token_ids


CHAT = [{"role": "user", "content": "Hi"}]


def test_a_chat_is_its_template_s_tokens(llm: LLM) -> None:
    ids = llm.tokenizer.apply_chat(CHAT, template="chatml")
    wanted = llm.generate(ids, GREEDY)
    assert llm.chat(CHAT, GREEDY, template="chatml").token_ids == wanted.token_ids
    stream = llm.chat(CHAT, GREEDY, template="chatml", stream=True)
    assert stream.wait().token_ids == wanted.token_ids
    with pytest.raises(QuarrelError, match="template"):
        llm.chat(CHAT)


@pytest.mark.parametrize(
    "bad", [None, 5, "Hi", [5], ["Hi"], [{}], [{"role": 5, "content": "x"}], [None], {"role": "user"}, []]
)
@pytest.mark.parametrize("system", [None, "Be brief"])
def test_what_are_no_messages_is_refused(llm: LLM, bad: Any, system: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "system", system)
    with pytest.raises(RequestError):
        llm.chat(bad, template="chatml")


def test_a_system_text_that_came_with_the_model_stands_in_front() -> None:
    system = {"role": "system", "content": "Be brief"}
    own = {"role": "system", "content": "x"}
    with open_model("llama32", n_ctx=200) as llm:
        llm.system = "Be brief"
        for messages, wanted in ((CHAT, [system, *CHAT]), ([own, *CHAT], [own, *CHAT])):
            result = llm.chat(messages, GREEDY, template="chatml", max_tokens=1)
            assert result.usage.prompt_tokens == len(llm.tokenizer.apply_chat(wanted, template="chatml"))


def test_the_asynchronous_calls_give_the_same(llm: LLM) -> None:
    async def work() -> list[tuple[int, ...]]:
        stream = llm.astream([5, 6], GREEDY)
        chunks = [chunk async for chunk in stream]
        assert stream.result is not None
        chat = await llm.achat(CHAT, GREEDY, template="chatml").wait()
        assert chat.token_ids == llm.chat(CHAT, GREEDY, template="chatml").token_ids
        one, two = await asyncio.gather(llm.agenerate([5, 6], GREEDY), llm.agenerate([5, 6], GREEDY))
        return [one.token_ids, two.token_ids, tuple(c.token_id for c in chunks if c.token_id is not None)]

    wanted = llm.generate([5, 6], GREEDY).token_ids
    assert asyncio.run(work()) == [wanted] * 3


def test_cancelling_an_asynchronous_call_stops_its_work(llm: LLM) -> None:
    async def work() -> None:
        task = asyncio.create_task(llm.agenerate([5, 6], GREEDY, max_tokens=None))
        while llm.activity().running == 0:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(work())
    llm.generate([1], GREEDY, max_tokens=1)
    assert llm.activity().running == 0


def interrupt_when_busy(llm: LLM) -> threading.Thread:
    """Ctrl-C, once something runs."""

    def work() -> None:
        while llm.activity().running == 0:
            threading.Event().wait(0.001)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def calls(llm: LLM) -> dict[str, Callable[[], object]]:
    long = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    return {
        "generate": lambda: llm.generate([5, 6], long),
        "batch": lambda: llm.generate([[5], [6], [7], [8]], long),
        "logits": lambda: llm.logits([5] * 60),
        "stream": lambda: list(llm.stream([5, 6], long)),
    }


@pytest.mark.parametrize("call", ["generate", "batch", "logits", "stream"])
def test_ctrl_c_stops_the_work_and_is_raised(call: str) -> None:
    with open_model("gemma3") as llm:
        thread = interrupt_when_busy(llm)
        with pytest.raises(KeyboardInterrupt):
            calls(llm)[call]()
        thread.join()
        llm.generate([1], GREEDY, max_tokens=1)
        assert (llm.activity().running, llm.activity().waiting) == (0, 0)


def test_a_failing_step_raises_for_one_prompt_and_reports_in_a_list() -> None:
    backend = ReferenceBackend()
    with open_model("llama32", backend) as llm:
        assert backend.step is not None
        backend.step.fail = QuarrelError("the device is gone")
        for call in (lambda: llm.generate([5]), lambda: llm.logits([5]), lambda: llm.chat(CHAT, template="chatml")):
            with pytest.raises(QuarrelError, match="the device is gone"):
                call()
        with pytest.raises(QuarrelError, match="the device is gone"):
            asyncio.run(llm.agenerate([5]))
        results = llm.generate([[5], [6]])
        assert [r.finish_reason for r in results] == ["error", "error"]
        chunks = list(llm.stream([5]))
        assert chunks[-1].result is not None
        assert chunks[-1].result.error == "the device is gone"
        backend.step.fail = None
        assert llm.generate([5], GREEDY).finish_reason == "length"


def test_closing_gives_everything_back_and_may_be_repeated() -> None:
    backend = ReferenceBackend()
    llm = open_model("llama32", backend)
    stream = llm.stream([5], GREEDY, max_tokens=None)
    llm.close()
    assert stream.wait().finish_reason == "cancelled"
    llm.close()
    assert backend.step is not None
    assert backend.step.closed
    assert not any(t.name == "quarrel-engine" and t is llm._loop._thread for t in threading.enumerate())
    for call in (lambda: llm.generate([5]), lambda: llm.logits([5]), lambda: llm.stream([5])):
        with pytest.raises(QuarrelError, match="closed"):
            call()


def test_a_model_that_is_dropped_ends_its_thread() -> None:
    llm = open_model("llama32")
    thread = llm._loop._thread
    del llm
    thread.join(60)
    assert not thread.is_alive()


def test_a_stream_keeps_its_model() -> None:
    """As in `for chunk in quarrel.load(name).stream(prompt)`, where nothing else holds it."""
    wanted = facts("llama32")["greedy"]
    made = [open_model("llama32").stream(wanted["prompt"], GREEDY)]
    assert list(made.pop().wait().token_ids) == wanted["continuation"]
    talk = open_model("llama32").chat(MESSAGES, GREEDY, stream=True, template="chatml")
    assert talk.wait().finish_reason == "length"

    async def read() -> list[Result]:
        streams = (
            open_model("llama32").astream([5], GREEDY),
            open_model("llama32").achat(MESSAGES, GREEDY, template="chatml"),
        )
        return [await stream.wait() for stream in streams]

    assert [result.finish_reason for result in asyncio.run(read())] == ["length"] * 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_is_told_to_load_its_own() -> None:
    code = f"""
import os, signal, sys
import quarrel
name = {str(model("llama32"))!r}
llm = quarrel.load(name, backend="cpu", n_ctx=64)
wanted = llm.generate([5], temperature=0, max_tokens=3).token_ids
child = os.fork()
if child == 0:
    signal.alarm(50)
    try:
        llm.generate([5])
    except quarrel.QuarrelError as error:
        assert "forked" in str(error), error
    llm.close()
    with quarrel.load(name, backend="cpu", n_ctx=64) as own:
        assert own.generate([5], temperature=0, max_tokens=3).token_ids == wanted
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert llm.generate([5], temperature=0, max_tokens=3).token_ids == wanted
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("busy", [False, True])
def test_a_process_that_never_closes_its_model_ends_all_the_same(busy: bool) -> None:
    code = (
        f"import quarrel; llm = quarrel.load({str(model('llama32'))!r}, backend='cpu', n_ctx=2048);"
        f"stream = llm.stream([1], ignore_eos=True, max_tokens=None); print(next(stream).token_id); busy = {busy};"
        "busy or stream.close()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_explain_tells_who_does_what_and_where() -> None:
    with open_model("llama32", "cpu") as llm:
        told = llm.explain()
    assert (told.backend, told.compute, told.architecture, told.n_ctx) == ("cpu", "float32", "llama", 64)
    assert told.memory.cache > 0
    assert {c.path.split(".")[0] for c in told.choices} == {"token_embd", "blk", "output"}
    assert "thread" in told.device
    assert told.model.endswith("model-q4_0x.gguf")


def test_threads_reach_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_model("llama32", "cpu", threads=1) as llm:
        assert "1 thread" in llm.explain().device
    monkeypatch.setenv("QUARREL_THREADS", "2")
    with open_model("llama32", "cpu") as llm:
        assert "2 threads" in llm.explain().device


def test_auto_takes_the_variable_s_backend_or_the_first_that_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_model("llama32", "auto") as llm:
        told = llm.explain()
        assert told.backend in ("triton", "mlx", "cpu")
        if told.backend == "cpu":
            assert len(told.skipped) == 2
            assert told.skipped[0].startswith("backend triton")
    monkeypatch.setenv("QUARREL_BACKEND", "cpu")
    monkeypatch.setenv("QUARREL_COMPUTE", "float32")
    with open_model("llama32", "auto", compute="auto") as llm:
        assert (llm.explain().backend, llm.explain().skipped) == ("cpu", ())
        assert llm.explain().compute == "float32"


def test_a_backend_asked_for_by_name_is_taken_or_raises() -> None:
    with pytest.raises(BackendUnavailable, match="no backend is called 'cuda'"):
        open_model("llama32", "cuda")
    with pytest.raises(BackendUnavailable, match="mlx"):
        open_model("llama32", "mlx")
    with pytest.raises(RequestError, match="backend is a int"):
        open_model("llama32", 5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"n_ctx": 0}, "n_ctx is 0"),
        ({"n_ctx": True}, "n_ctx is True"),
        ({"n_ctx": "9"}, "n_ctx is '9'"),
        ({"n_ctx": 4096}, "n_ctx is 4096, wanted 1 to 2048, the context that the model was made for"),
        ({"max_seqs": 0}, "max_seqs is 0"),
        ({"max_seqs": None}, "max_seqs is None"),
        ({"max_seqs": 257}, "max_seqs is 257"),
        ({"threads": 0}, "threads is 0"),
        ({"experts_on_cpu": -1}, "experts_on_cpu is -1, wanted a whole number"),
        ({"experts_on_cpu": True}, "experts_on_cpu is True, wanted a whole number"),
        ({"compute": "int4"}, "compute is 'int4', wanted one of auto"),
    ],
)
def test_load_refuses_what_makes_no_sense(options: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        open_model("llama32", **options)


def test_a_model_is_found_by_name_and_a_missing_one_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        quarrel.load(tmp_path / "none.gguf")
    with pytest.raises(RequestError):
        quarrel.load("")
    (tmp_path / "mine.gguf").symlink_to(model("llama32"))
    monkeypatch.setenv("QUARREL_MODELS", str(tmp_path))
    for name in ("mine", "mine.gguf"):
        with quarrel.load(name, backend=ReferenceBackend(), n_ctx=32) as llm:
            assert llm.spec.architecture == "llama"


@pytest.mark.parametrize("arch", ENCODERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_encoder_s_hidden_states_are_the_reference_s(arch: str, backend: str) -> None:
    ids, wanted = np.load(need_cases(arch, "tokens.npy")).reshape(-1).tolist(), np.load(need_cases(arch, "hidden_hf.npy"))
    with open_model(arch, backend, n_ctx=len(ids)) as llm:
        hidden = llm.hidden(ids)
        assert (hidden.dtype, hidden.shape) == (np.float32, wanted.shape)
        assert rel_error(hidden, wanted) < 1e-5
        assert llm.detokenize(llm.tokenize("hi")) == llm.tokenizer.decode(llm.tokenizer.encode("hi"))
        with pytest.raises(ContextOverflow):
            llm.hidden([*ids, 5])
        with pytest.raises(RequestError, match="token id"):
            llm.hidden([llm.spec.n_vocab])


@pytest.mark.parametrize("backend", BACKENDS)
def test_texts_that_an_encoder_gets_at_once_stay_whole(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token sees every other, so a text that were cut at the end of a full step would come out wrong."""
    monkeypatch.setattr(ReferenceBackend if backend == "reference" else type(backend_named(backend)), "step_tokens", 1)
    rng = np.random.default_rng(0)
    texts = [rng.integers(5, 300, n).tolist() for n in (40, 50, 1, 64, 30, 7, 64, 2)]
    with open_model("bert", backend, n_ctx=64) as llm:
        alone = [llm.hidden(text) for text in texts]
        together: dict[int, Any] = {}
        ask = [threading.Thread(target=lambda i=i: together.update({i: llm.hidden(texts[i])})) for i in range(len(texts))]
        for thread in ask:
            thread.start()
        for thread in ask:
            thread.join()
    assert all(np.array_equal(alone[i], together[i]) for i in range(len(texts)))


def test_an_encoder_continues_no_text_and_says_so() -> None:
    with open_model("bert") as llm:
        calls: list[Callable[[], object]] = [
            lambda: llm.generate("a"),
            lambda: llm.generate(["a", "b"]),
            lambda: llm.stream("a"),
            lambda: llm.astream("a"),
            lambda: asyncio.run(llm.agenerate("a")),
            lambda: llm.chat([{"role": "user", "content": "a"}], template="chatml"),
            lambda: llm.achat([{"role": "user", "content": "a"}], template="chatml"),
            lambda: llm.logits([5]),
        ]
        for call in calls:
            with pytest.raises(UnsupportedModel, match="bert model is an encoder"):
                call()
        assert llm.hidden([5]).shape == (1, llm.spec.n_embd)
    with pytest.raises(OutOfMemory, match="smaller n_ctx"):
        open_model("bert", ReferenceBackend(free=1 << 20))
    with pytest.raises(RequestError, match="n_ctx is 129"):
        open_model("bert", n_ctx=129)


def test_sentences_through_a_real_encoder_lie_where_the_reference_puts_them() -> None:
    folder = need_cases("minilm")
    sentences = json.loads((folder / "meta.json").read_text())["sentences"]
    wanted = np.load(folder / "embeddings_hf.npy")
    with quarrel.load(folder / "all-MiniLM-L6-v2-q8_0.gguf", backend="cpu", compute="float32") as llm:
        assert llm.n_ctx == 512
        found = np.stack([llm.hidden(llm.tokenize(text)).mean(0) for text in sentences])
    cosine = (found * wanted).sum(1) / np.linalg.norm(found, axis=1)
    assert cosine.min() > 0.999  # of unquantised weights; these are Q8_0


def test_an_encoder_can_be_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUARREL_CHECK", "1")
    with open_model("nomic_bert", "cpu", n_ctx=32) as llm:
        assert llm.hidden([5, 6, 7]).shape == (3, llm.spec.n_embd)


def test_rope_factors_are_those_of_the_context_in_use() -> None:
    """Contexts beyond 32 tokens have factors of their own in this file."""
    with GGUFFile.open(model("phi3_longrope")) as file:
        short, long = (read_spec(file, n).layers[0] for n in (32, None))  # type: ignore[union-attr]
    assert short != long
    with open_model("phi3_longrope", n_ctx=32) as llm:
        assert llm.spec.layers[0] == short  # type: ignore[union-attr]
    with open_model("phi3_longrope", n_ctx=None) as llm:
        assert llm.spec.layers[0] == long  # type: ignore[union-attr]


def test_the_context_shrinks_with_a_warning_where_memory_ends() -> None:
    with pytest.warns(UserWarning, match="the context is reduced from 2048 to") as told:
        llm = quarrel.load(model("llama32"), backend=ReferenceBackend(free=4 << 20), max_seqs=3)
    assert told[0].filename == __file__
    with llm:
        assert 64 <= llm.n_ctx < 2048
        assert llm.generate([5], GREEDY).finish_reason == "length"
    with pytest.raises(OutOfMemory, match="n_ctx"):
        open_model("llama32", ReferenceBackend(free=4 << 20), n_ctx=2048)
    with pytest.raises(OutOfMemory, match="smaller model"):
        open_model("llama32", ReferenceBackend(free=1 << 20), n_ctx=None)


def test_the_whole_context_can_be_used(llm: LLM) -> None:
    result = llm.generate([5] * 3, GREEDY, max_tokens=None)
    assert len(result.token_ids) == 61
    with open_model("llama32", n_ctx=33) as odd:
        assert len(odd.generate([5] * 3, GREEDY, max_tokens=None).token_ids) == 30


def test_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    with open_model("llama32", "cpu", progress=lambda done, of: told.append((done, of))):
        pass
    with GGUFFile.open(model("llama32")) as file:
        # Factors of the rotation are constants of the program.
        whole = sum(tensor.nbytes for name, tensor in file.tensors.items() if name != "rope_freqs.weight")
    assert told == sorted(told)
    assert told[-1] == (whole, whole), "bytes, as the documentation says"


def test_everything_is_checked_when_the_variable_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUARREL_CHECK", "1")
    greedy = facts("llama32")["greedy"]
    with open_model("llama32", "cpu") as llm:
        assert list(llm.generate(greedy["prompt"], GREEDY, max_tokens=4).token_ids) == greedy["continuation"][:4]


def test_the_public_names_are_these() -> None:
    assert quarrel.__all__ == [
        "LLM",
        "Chunk",
        "Explanation",
        "QuarrelError",
        "Result",
        "SamplingParams",
        "Service",
        "Stream",
        "Structure",
        "Timings",
        "Usage",
        "__version__",
        "load",
        "load_tokenizer",
    ]
    assert len(quarrel.__all__) <= 15
    for name in quarrel.__all__:
        assert getattr(quarrel, name) is not None
        assert name in dir(quarrel)
    assert quarrel.Result is Result
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        _ = quarrel.Engine  # type: ignore[attr-defined]


def test_importing_the_package_is_quick_and_brings_in_nothing_heavy() -> None:
    code = (
        "import time; t = time.perf_counter(); import quarrel; t = time.perf_counter() - t; import sys;"
        "print(t, *sorted({'numpy', 'llvmlite', 'torch', 'triton', 'tokenizers', 'jinja2'} & set(sys.modules)))"
    )
    times = []
    for _ in range(3):
        seconds, *heavy = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
        assert heavy == []
        times.append(float(seconds))
    assert min(times) < 0.3


def test_a_vocabulary_alone_makes_a_tokenizer() -> None:
    path = need_cases("tokenizers", "ggml-vocab-llama-bpe.gguf")
    tokenizer = quarrel.load_tokenizer(path)
    assert tokenizer.decode(tokenizer.encode("Hello world")) == "Hello world"
    with pytest.raises(ModelNotFound):
        quarrel.load_tokenizer("/nowhere/at/all.gguf")
