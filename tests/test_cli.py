"""The command line, mostly in this process: what it prints, where it prints it, and the status it ends with."""

from __future__ import annotations

import builtins
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quarrel.cli import explain, main
from quarrel.cli.models import document
from quarrel.cli.parser import make_parser
from quarrel.cli.prompt import model_and_text
from quarrel.cli.samplers import SAMPLERS, sampling_of
from quarrel.cli.terminal import amount
from quarrel.engine import Chunk, SamplingParams, Stream
from quarrel.engine.chain import HostChain
from quarrel.llm import LLM
from tests.tiny_model import CHATML, write_tiny_model

ROOT = Path(__file__).resolve().parents[1]
GREEDY = ("--temp", "0", "-n", "12", "--backend", "cpu")


@pytest.fixture(scope="module", name="base")
def _base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that only continues texts."""
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "base.gguf"))


@pytest.fixture(scope="module", name="chatty")
def _chatty(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with a chat template."""
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "chatty.gguf", template=CHATML))


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test finds the models, or writes the history, of whoever runs it."""
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def typed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Puts a text on standard input."""
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def spawn(*arguments: str, **environment: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "quarrel", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


# What is typed


def test_every_sampling_parameter_is_an_option() -> None:
    assert sorted(s.field for s in SAMPLERS) == sorted(f.name for f in dataclasses.fields(SamplingParams))


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda s: s.field)
def test_an_option_reaches_its_parameter_by_every_spelling(sampler) -> None:  # type: ignore[no-untyped-def]
    text = {"logit_bias": "7=-2.5", "mirostat": "2"}.get(sampler.field, "1")
    want = {"logit_bias": {7: -2.5}, "stop": ["1"], "dry_sequence_breakers": ["1"], "stop_token_ids": [1], "mirostat": 2}
    for flag in (sampler.flags + " " + sampler.hidden).split():
        words = ["generate", flag] if sampler.type is None else ["generate", flag, text]
        given = sampling_of(make_parser().parse_args([*words, "--quiet", "prompt"]))
        assert given == {sampler.field: want.get(sampler.field, 1)}
        SamplingParams(**given)


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ("PROMPT", ("demo", "PROMPT")),
        ("model.gguf PROMPT", ("model.gguf", "PROMPT")),
        ("-m other PROMPT", ("other", "PROMPT")),
        ("-m other -p PROMPT", ("other", "PROMPT")),
        ("other -p PROMPT", ("other", "PROMPT")),
        ("-model other -prompt PROMPT", ("other", "PROMPT")),
        ("demo", ("demo", "from stdin")),
        ("model.gguf", ("model.gguf", "from stdin")),
        ("hf://a/b", ("hf://a/b", "from stdin")),
        ("-m other", ("other", "from stdin")),
        ("-f FILE", ("demo", "from file")),
        ("other -f FILE", ("other", "from file")),
        ("-f -", ("demo", "from stdin")),
    ],
)
def test_model_and_prompt_in_every_order_that_people_use(
    line: str, want: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "from stdin\n")
    (tmp_path / "prompt.txt").write_text("from file")
    words = [w.replace("FILE", str(tmp_path / "prompt.txt")) for w in line.split()]
    assert model_and_text(make_parser().parse_args(["generate", *words])) == want


@pytest.mark.parametrize(
    "line",
    [
        "",
        "generate --nonsense x",
        "generate one two three",
        "generate -m demo one two",
        "generate -p x -f y",
        "generate --temperature warm x",
        "generate --logit-bias 7 x",
        "generate --backend abacus x",
        "generate --chat --echo x",
        "chat demo -m demo",
        "tokenize --decode -p one",
        "pull",
        "fly",
    ],
)
def test_a_wrong_command_line_is_status_2(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert "quarrel" in streams.err


def test_no_text_at_a_terminal_is_status_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    typed(monkeypatch, "")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert main(["generate", "-m", "demo"]) == 2
    assert "there is no text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("generate -m nowhere.gguf x", "no model 'nowhere.gguf' was found"),
        ("generate BASE x --temperature -1", "temperature is -1.0"),
        ("generate BASE x --top-p 2", "top_p is 2.0"),
        ("generate BASE x --mirostat 1", "mirostat is 1"),
        ("generate BASE x --ctx 0", "n_ctx is 0"),
        ("generate BASE x --ctx 100000", "n_ctx is 100000"),
        ("generate BASE x --stop-token 100000", "token id 100000"),
        ("generate BASE x --threads 0", "threads is 0"),
        ("generate BASE x --backend mlx", "mlx"),
        ("generate BASE --file nowhere.txt", "nowhere.txt: No such file"),
        ("generate BASE --file .", "Is a directory"),
        ("generate BASE x --chat", "no chat template"),
        ("generate BASE x --chat-template nonsense", "no chat template 'nonsense'"),
        ("chat BASE -p x", "made to continue texts"),
        ("inspect README.md", "not a GGUF file"),
        ("explain nowhere", "no model 'nowhere' was found"),
        ("tokenize BASE --decode -p 99999", "99999"),
        ("pull nonsense", "'nonsense' is no name on the hub"),
    ],
)
def test_a_mistake_is_one_sentence_and_status_1(
    line: str, said: str, base: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main([base if word == "BASE" else word for word in line.split()]) == 1
    streams = capsys.readouterr()
    assert streams.out == ""
    (sentence,) = streams.err.splitlines()
    assert sentence.startswith("quarrel: ")
    assert said in sentence


def test_a_prompt_longer_than_the_context_names_both_sizes(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", base, "abc " * 400, "--ctx", "64"]) == 1
    assert "the context holds 64" in capsys.readouterr().err


# generate


def test_text_goes_to_stdout_and_speeds_to_stderr(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", base, "once", *GREEDY]) == 0
    streams = capsys.readouterr()
    assert len(streams.out) == 13
    assert streams.out.endswith("\n")
    assert "12 tokens at " in streams.err
    assert main(["generate", base, "once", *GREEDY, "--quiet"]) == 0
    assert capsys.readouterr() == (streams.out, "")


def test_streamed_whole_and_json_are_the_same_text(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["generate", base, "once", *GREEDY, "--seed", "5", "-q"]
    assert main(line) == 0
    text = capsys.readouterr().out[:-1]
    assert main([*line, "--no-stream"]) == 0
    assert capsys.readouterr().out[:-1] == text
    assert main([*line, "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["text"] == text
    assert (whole["finish_reason"], whole["seed"], whole["usage"]["completion_tokens"]) == ("length", 5, 12)
    assert len(whole["token_ids"]) == 12
    assert main([*line, "--json", "--stream"]) == 0
    *chunks, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert "".join(chunk["text"] for chunk in chunks) == last["result"]["text"] == text
    assert [chunk["token_id"] for chunk in chunks] == whole["token_ids"]


def test_samples_are_printed_one_after_the_other(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["generate", base, "once", "-n", "6", "--temp", "2", "--samples", "3", "--seed", "1", "-q"]
    assert main(line) == 0
    printed = capsys.readouterr().out
    assert main([*line, "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert printed.splitlines()[::2] == [r["text"] for r in (whole, *whole["alternatives"])]


def test_echo_stop_and_logprobs(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", base, "once", *GREEDY, "-q", "--echo"]) == 0
    text = capsys.readouterr().out.removeprefix("once").rstrip("\n")
    stop = text[4:6]
    assert main(["generate", base, "once", *GREEDY, "-q", "--json", "--stop", stop, "--logprobs", "2"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["text"] == text[: text.index(stop)]
    assert (whole["finish_reason"], whole["stopped_by"]) == ("stop", stop)
    assert [entry["token_id"] for entry in whole["logprobs"]] == whole["token_ids"]
    assert all(len(entry["top"]) == 2 for entry in whole["logprobs"])


def test_the_prompt_from_a_pipe_and_from_a_file_is_the_same(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = []
    for arguments in ((base, "once"), (base,), (base, "-f", str(tmp_path / "prompt.txt"))):
        (tmp_path / "prompt.txt").write_text("once")
        typed(monkeypatch, "once\n")
        assert main(["generate", *arguments, *GREEDY, "-q"]) == 0
        outputs.append(capsys.readouterr().out)
    assert len(set(outputs)) == 1


def test_chat_option_uses_the_template_and_a_file_may_replace_it(
    chatty: str, base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.jinja").write_text(CHATML)
    sizes = []
    for arguments in (
        [chatty, "hi"],
        [chatty, "hi", "--chat"],
        [base, "hi", "--chat-template", str(tmp_path / "own.jinja")],
        [base, "hi", "--chat-template", "chatml"],
        [chatty, "hi", "--system", "be kind"],
    ):
        assert main(["generate", *arguments, *GREEDY, "--json"]) == 0
        sizes.append(json.loads(capsys.readouterr().out)["usage"]["prompt_tokens"])
    raw, own, by_file, by_name, with_system = sizes
    assert raw < own == by_file == by_name < with_system


def test_bytes_that_are_no_text_do_not_crash(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", base, "caf\udce9", *GREEDY, "-q"]) == 0
    assert len(capsys.readouterr().out) == 13


def interrupt_after(monkeypatch: pytest.MonkeyPatch, chunks: int) -> None:
    """Presses Ctrl-C behind so many chunks of the next stream; a token takes a millisecond, so it comes in time."""
    real = Stream.__next__
    draw = HostChain.draw
    left = [chunks]

    def next_(self: Stream) -> Chunk:
        left[0] -= 1
        if left[0] == -1:
            signal.raise_signal(signal.SIGINT)
        return real(self)

    def slowly(self: HostChain, *args: object) -> int:
        time.sleep(0.001)
        return draw(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Stream, "__next__", next_)
    monkeypatch.setattr(HostChain, "draw", slowly)


SLOW = ("--logit-bias", "0=-1")  # drawn on the host


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_ctrl_c_prints_what_was_generated_and_is_status_130(
    options: tuple[str, ...], base: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", base, "once", *GREEDY, "-q"]) == 0
    text = capsys.readouterr().out
    interrupt_after(monkeypatch, 3)
    assert main(["generate", base, "once", "--temp", "0", "-n", "400", "--backend", "cpu", *SLOW, *options]) == 130
    streams = capsys.readouterr()
    if options:
        whole = json.loads(streams.out)
        assert whole["finish_reason"] == "cancelled"
        assert whole["text"].startswith(text[:3])
    else:
        assert streams.out.startswith(text[:3])
        assert streams.out.endswith("\n")
        assert "cancelled" in streams.err


# chat


def keyboard(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> None:
    """A person at a terminal who types these lines, then Ctrl-D."""
    typed(monkeypatch, "")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    rest: Iterator[str | type[BaseException]] = iter(lines)

    def read(prompt: str = "") -> str:
        got = next(rest, EOFError)
        if isinstance(got, str):
            return got
        raise got

    monkeypatch.setattr(builtins, "input", read)


def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, str]]]:
    """The messages of every request that follows."""
    seen: list[list[dict[str, str]]] = []
    real: Callable[..., object] = LLM.chat

    def chat(self: LLM, messages: list[dict[str, str]], *args: object, **kwargs: object) -> object:
        seen.append(list(messages))
        return real(self, messages, *args, **kwargs)

    monkeypatch.setattr(LLM, "chat", chat)
    return seen


def test_lines_of_a_pipe_are_a_conversation(
    chatty: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = asked(monkeypatch)
    typed(monkeypatch, "hello\n\nand then\n")
    assert main(["chat", chatty, *GREEDY, "--json", "--system", "be brief"]) == 0
    answers = [json.loads(line)["content"] for line in capsys.readouterr().out.splitlines()]
    assert [[m["content"] for m in messages] for messages in seen] == [
        ["be brief", "hello"],
        ["be brief", "hello", answers[0], "and then"],
    ]


def test_one_question_by_option(chatty: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "-m", chatty, *GREEDY, "-p", "hello"]) == 0
    streams = capsys.readouterr()
    assert len(streams.out) == 13
    assert "12 tokens" in streams.err


def test_a_conversation_at_the_keyboard(
    chatty: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = asked(monkeypatch)
    saved = [tmp_path / "talk.json", tmp_path / "talk.md"]
    keyboard(
        monkeypatch,
        "/help",
        "/nonsense",
        "/system be kind",
        "one",
        '"""two',
        'lines"""',
        KeyboardInterrupt,
        f"/save {saved[0]}",
        f"/save {saved[1]}",
        f"/save {tmp_path}/no/such/folder",
        "/reset",
        "/system",
        "",
        "three",
        "/exit",
        "never asked",
    )
    assert main(["chat", chatty, *GREEDY]) == 0
    said = capsys.readouterr().err
    assert [[m["content"] for m in messages if m["role"] != "assistant"] for messages in seen] == [
        ["be kind", "one"],
        ["be kind", "one", "two\nlines"],
        ["three"],
    ]
    for part in ("/reset", "'/nonsense' is no command", "Ctrl-D or /exit", "No such file", "(forgotten)", "12 tokens"):
        assert part in said
    kept = json.loads(saved[0].read_text())
    assert [m["role"] for m in kept] == ["system", "user", "assistant", "user", "assistant"]
    assert "**user**\n\ntwo\nlines\n" in saved[1].read_text()


def test_a_conversation_that_outgrows_its_context_goes_on_after_reset(
    chatty: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = asked(monkeypatch)
    keyboard(monkeypatch, "x" * 300, "short", "/reset", "short")
    assert main(["chat", chatty, *GREEDY, "--ctx", "256"]) == 0
    assert "/reset forgets" in capsys.readouterr().err
    assert [len(messages) for messages in seen] == [1, 1, 1], "a question that was refused is not kept"


def test_ctrl_c_ends_an_answer_and_not_the_conversation(
    chatty: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = asked(monkeypatch)
    keyboard(monkeypatch, "one", "two")
    interrupt_after(monkeypatch, 4)
    assert main(["chat", chatty, "--temp", "0", "-n", "150", "--backend", "cpu", *SLOW]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert 4 <= len(first) < 150
    assert len(second) == 150
    assert [m["role"] for m in seen[1]] == ["user", "assistant", "user"]
    assert seen[1][1]["content"] == first, "what was said before Ctrl-C is part of the conversation"


# inspect, explain, tokenize, doctor


def test_inspect_shows_keys_tensors_and_totals(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", base]) == 0
    text = capsys.readouterr().out
    for part in (
        "13 tensors",
        "29.1 K parameters",
        "32.00 bits per weight",
        "llama.block_count",
        "string[288]",
        "288 x 32",
    ):
        assert part in text
    assert "\x1b" not in text, "a file must not drive the terminal"
    assert main(["inspect", base, "--tensors", "blk.*.attn_?.weight"]) == 0
    assert capsys.readouterr().out.count("attn_") == 3
    assert main(["inspect", base, "--keys", "head_count"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["1 of 14 keys", "  llama.attention.head_count  uint32  2"]


def test_inspect_as_json(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", base, "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["metadata"]["tokenizer.ggml.tokens"]["length"] == 288
    assert len(whole["metadata"]["tokenizer.ggml.tokens"]["value"]) < 20
    assert sum(t["bytes"] for t in whole["tensors"]) == whole["bytes"]
    assert main(["inspect", base, "--json", "--full", "--keys", "tokens", "--tensors", "norm"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert len(whole["metadata"]["tokenizer.ggml.tokens"]["value"]) == 288
    assert [t["shape"] for t in whole["tensors"]] == [[32]] * 3


def test_explain_groups_calls_and_counts_them_all(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", base, "--backend", "cpu"]) == 0
    text = capsys.readouterr().out
    assert main(["explain", base, "--backend", "cpu", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["n_ctx"] == 512
    assert whole["backend"] == "cpu"
    assert f"{len(whole['choices'])} calls a step" in text
    plan = whole["memory"]
    assert f"  {amount(plan['weights'] + plan['cache'] + plan['activations'])}\n" in text
    table = text.partition(" calls a step")[2].splitlines()[2:]
    assert sum(int(row.split()[0]) for row in table if row.split()[0].isdigit()) == len(whole["choices"])
    for choice in whole["choices"]:
        assert choice["op"] in text
        assert choice["implementation"] in text


@pytest.mark.parametrize(
    ("paths", "want"),
    [
        (["output"], "output"),
        (["blk.0.attn", "blk.1.attn", "blk.3.attn"], "blk.0-1,3.attn"),
        (["blk.2.attn", "blk.2.ffn", "output"], "blk.2.attn blk.2.ffn output"),
    ],
)
def test_paths_are_told_in_short(paths: list[str], want: str) -> None:
    assert explain.where(paths) == want


def test_tokenize_there_and_back(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokenize", base, "hé you", "--ids"]) == 0
    ids = capsys.readouterr().out.split()
    assert ids[0] == "1"
    assert main(["tokenize", base, "--decode", "-p", ",".join(ids)]) == 0
    assert capsys.readouterr().out == "hé you\n"
    assert main(["tokenize", base, "--decode", "--special", "-p", " ".join(ids)]) == 0
    assert capsys.readouterr().out == "<s> hé you\n"
    assert main(["tokenize", base, "hé you", "--no-special", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert [str(id) for id in whole["ids"]] == ids[1:]
    assert whole["count"] == len(ids) - 1
    assert main(["tokenize", base, "<s>a"]) == 0
    assert '"<s>"' in capsys.readouterr().out.splitlines()[0]


def test_doctor_says_that_this_machine_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for part in ("backends", "cpu", "threads", "memory", "Python", "compiled kernels", "Ollama", "Hugging Face"):
        assert part in text
    assert main(["doctor", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["usable"] is True
    assert {"group": "backends", "what": "cpu", "state": "ready"}.items() <= whole["findings"][0].items()


def test_doctor_lists_the_models_that_it_finds(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    manifests = tmp_path / "ollama" / "manifests"
    for name in ("registry.ollama.ai/library/mistral/latest", "hf.co/me/mine/q4"):
        (manifests / name).parent.mkdir(parents=True)
        (manifests / name).write_text("{}")
    snapshot = tmp_path / "hub" / "models--you--yours" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "yours-Q4_0.gguf").symlink_to(base)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "hf.co/me/mine:q4, mistral:latest" in text
    assert "hf://you/yours" in text


def test_doctor_survives_a_backend_that_fails_to_load(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(name: str) -> object:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr("quarrel.doctor.backend", broken)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "libcuda.so.1" in text
    assert "No backend can run a model here" in text


def test_results_are_plain_json(base: str) -> None:
    from quarrel import load

    with load(base, backend="cpu") as llm:
        whole = document(llm, llm.generate("a", max_tokens=2))
    assert json.loads(json.dumps(whole)) == whole


# In a process of its own


def test_module_version_and_help() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "quarrel", "--version"], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.startswith("quarrel 0.")
    process = spawn("generate", "--help")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert b"--temperature" in out


def test_a_closed_pipe_ends_quietly(base: str) -> None:
    process = spawn("generate", base, "once", "--ignore-eos", "-n", "400", "-q", "--backend", "cpu")
    assert process.stdout is not None
    assert process.stdout.read(3)
    process.stdout.close()
    assert process.stderr is not None
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 141
    assert said == b""


def test_ctrl_c_in_a_process_keeps_the_text(base: str) -> None:
    # A line of JSON a token, so that the signal falls into the middle of a text.
    process = spawn("generate", base, "once", "-n", "-1", "--json", "--stream", "--dry-multiplier", "1", "--backend", "cpu")
    assert process.stdout is not None
    assert process.stderr is not None
    first = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    with process.stdout, process.stderr:
        out, err = process.stdout.read(), process.stderr.read()
    assert process.wait(60) == 130
    *chunks, last = map(json.loads, (first + out).splitlines())
    assert last["result"]["finish_reason"] == "cancelled"
    assert "".join(chunk["text"] for chunk in chunks) == last["result"]["text"]
    assert b"Traceback" not in err


def test_a_terminal_without_unicode_does_not_crash(base: str) -> None:
    process = spawn("tokenize", base, "über", PYTHONIOENCODING="ascii:strict", PYTHONUTF8="0", LC_ALL="C")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert b"?" in out or b"\\u" in out


def test_a_mistake_in_a_process_has_no_traceback() -> None:
    process = spawn("generate", "-m", "nowhere.gguf", "x")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert out == b""
    assert err.startswith(b"quarrel: no model 'nowhere.gguf'")
    assert err.count(b"\n") == 1
