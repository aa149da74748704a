"""llama-server's command line as launchers write it."""

from __future__ import annotations

from pathlib import Path

import pytest

from quarrel.errors import ConfigError
from quarrel.launch.arguments import parse
from quarrel.launch.main import choose_gpu, end_with, keys_of, load_options, main, name_of, origins_of, template_of
from quarrel.launch.old import old_engine, theirs
from quarrel.server.keys import Keyring
from quarrel.server.origins import Origins

LAUNCHED = [
    *("--model", "m.gguf", "--port", "4711", "--host", "127.0.0.1", "--no-webui", "--offline", "-c", "8192", "-np", "4"),
    *("--log-verbosity", "4", "--no-log-prefix", "--no-log-timestamps", "--no-jinja", "--chat-template", "chatml"),
    *("--cache-type-k", "q8_0", "--cache-type-v", "q8_0", "--flash-attn", "auto", "-b", "512", "-ub", "512"),
    *("-ngl", "33", "-t", "6", "--context-shift", "--keep", "4"),
]


def test_what_a_launcher_writes_is_taken_apart() -> None:
    args = parse(LAUNCHED, {})
    assert (args.text("model"), args.number("port"), args.text("host")) == ("m.gguf", 4711, "127.0.0.1")
    assert args.passed_over == ("--flash-attn auto", "-b 512", "-ub 512")
    options = load_options(args)
    assert (options.n_ctx, options.max_seqs, options.threads, options.kv_cache) == (2048, 4, 6, "int8")
    assert options.backend == "auto"
    assert (template_of(args), name_of(args)) == ("chatml", "m")
    assert args.summary().startswith("heeds --model m.gguf --port 4711")
    assert args.summary().endswith("passes over --flash-attn auto -b 512 -ub 512")


def test_pages_of_other_origins_are_named() -> None:
    alone, with_key = Origins(origins_of(parse([], {}))), Origins(origins_of(parse(["--api-key", "k"], {})))
    assert [("http://localhost:3000" in o, "https://a.example" in o) for o in (alone, with_key)] == [
        (True, False),
        (True, True),
    ]
    given = origins_of(parse(["--cors-origins", "https://a.example, localhost"], {}))
    assert [o in Origins(given) for o in ("https://a.example", "http://[::1]:3000", "https://localhost")] == [True] * 3
    assert "http://localhost.a.example" not in Origins(given)


def test_the_context_is_shared_by_those_that_run_at_once() -> None:
    assert load_options(parse(["-c", "1000", "-np", "3"], {})).n_ctx == 333
    alone = load_options(parse(["--ctx-size=1000"], {}))
    assert (alone.n_ctx, alone.max_seqs) == (1000, 4)
    assert load_options(parse(["-c", "0"], {})).n_ctx is None


@pytest.mark.parametrize(
    ("words", "name", "wanted"),
    [
        ("-ngl 0", "backend", "cpu"),
        ("--device none", "backend", "cpu"),
        ("-ngl -1", "backend", "auto"),
        ("", "gpu_layers", "auto"),
        ("-ngl -1", "gpu_layers", "auto"),
        ("-ngl 17", "gpu_layers", 16),
        ("-ngl all", "gpu_layers", None),
        ("-ctk f16 -ctv bf16", "kv_cache", "float16"),
        ("-ctk bf16 -ctv bf16", "kv_cache", "bfloat16"),
        ("-ctk q4_0 -ctv q5_1", "kv_cache", "int8"),
        ("-ctk q8_0", "kv_cache", "float16"),
        ("--lora a.gguf", "adapters", {"lora": "a.gguf"}),
        ("-mm p.gguf", "mmproj", "p.gguf"),
        ("--mmproj p.gguf --no-mmproj", "mmproj", "none"),
        ("--jinja", "mmproj", "none"),
        ("-ncmoe 7", "experts_on_cpu", 7),
        ("--cpu-moe", "experts_on_cpu", 1 << 20),
        ("--rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 0", "rope_scale", 4.0),
        ("-t -1", "threads", None),
        ("-md d.gguf", "draft", "d.gguf"),
        ("--spec-draft-model d.gguf --spec-type draft-mtp --spec-draft-n-max 4", "draft", None),
        ("--spec-type draft-mtp --spec-draft-n-max 4", "draft", "mtp"),
    ],
)
def test_an_argument_becomes_an_option_of_load(words: str, name: str, wanted: object) -> None:
    assert getattr(load_options(parse(words.split(), {})), name) == wanted


def test_the_environment_is_heeded_and_the_command_line_is_before_it() -> None:
    environment = {"LLAMA_ARG_CTX_SIZE": "64", "LLAMA_ARG_THREADS": "2", "LLAMA_API_KEY": "secret", "LLAMA_ARG_JINJA": "1"}
    args = parse(["-t", "3"], environment)
    assert (args.number("ctx"), args.number("threads"), args.text("api_key")) == (64, 3, "secret")
    assert "secret" not in args.summary()
    assert "embedding" in parse([], {"LLAMA_ARG_EMBEDDINGS": "1"}).switches
    assert "embedding" not in parse([], {"LLAMA_ARG_EMBEDDINGS": "0"}).switches


def test_unknown_words_are_passed_over_with_their_values() -> None:
    args = parse(["--new-thing", "-3", "--other", "--port", "1", "--third", "x", "--fourth=5", "stray", "-t", "2"], {})
    assert args.passed_over == ("--new-thing -3", "--other", "--third x", "--fourth=5", "stray")
    assert (args.number("port"), args.number("threads")) == (1, 2)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--port"], "--port is the last word, wanted a value behind it"),
        (["--model", "m", "--port", "many"], "--port is 'many', wanted a whole number"),
        (["--model", "m", "-c", "1e3"], "--ctx-size is '1e3', wanted a whole number"),
        (["--model", "m", "--rope-scale", "x"], "--rope-scale is 'x', wanted a number"),
        (
            ["--model", "m", "--chat-template-file", "/nowhere/t"],
            "--chat-template-file /nowhere/t: No such file or directory",
        ),
        (["--model", "m", "--port", "99999999"], "99999999"),
        (["--model", "m", "--port", "0", "--temp", "warm"], '--temperature is "warm", wanted a number'),
        (["--model", "m", "--port", "0", "--temp", "inf"], "--temperature is Infinity, wanted a finite number"),
        (["--model", "m", "--port", "0", "--top-k", "1.5"], "--top-k is 1.5, wanted a whole number"),
        (["--models-max", "2", "--port", "0", "--seed", "x"], '--seed is "x", wanted a whole number'),
    ],
)
def test_a_mistake_is_one_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err.splitlines()
    assert sentence in said[-1]
    assert said[-1].startswith("error: quarrel llama-server: ")


def test_keys_may_stand_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("\n one-key \nanother\n")
    (tmp_path / "none").write_text(" \n")
    words = ["--api-key-file", str(tmp_path / "keys"), "--api-key", "a,b"]
    args = parse(words, {})
    assert keys_of(args) == ("a", "b", "one-key", "another")
    assert origins_of(args) == ("*",)
    ring = Keyring(tmp_path, keys_of(args))
    found = [ring.find(key) for key in ("a", "another", "none", "")]
    assert [key and key.id for key in found] == ["given", "given 4", None, None]
    for name, said in (("none", "holds no key"), ("absent", "No such file")):
        with pytest.raises(ConfigError, match=f"--api-key-file .*{said}"):
            keys_of(parse(["--api-key-file", str(tmp_path / name)], {}))
    secret = parse(["--mcp-servers-json", '{"env": {"TOKEN": "secret"}}', "--api-key", "secret"], {})
    assert secret.summary() == "heeds --mcp-servers-json --api-key"


def test_a_model_that_is_not_there_is_told_in_the_words_that_launchers_look_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "/nowhere/m.gguf", "--port", "0"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("error loading model: ")


def test_a_device_is_chosen_among_those_that_are_visible() -> None:
    for before, number, after in (("", 1, "1"), ("2,5", 1, "5"), ("GPU-abc", 0, "GPU-abc"), ("2", 3, "2")):
        environment = {"CUDA_VISIBLE_DEVICES": before} if before else {}
        choose_gpu(number, environment)
        assert environment["CUDA_VISIBLE_DEVICES"] == after


def test_the_old_engine_is_found_by_its_name_and_gets_only_its_own_words(tmp_path: Path) -> None:
    engine = tmp_path / "llama-server.ollama"
    engine.write_text("#!/bin/sh\n")
    words = ["--old-engine", str(engine), "--old-library-path", "/x", "--model", "m", "--old-engine=y"]
    assert old_engine(parse(words[:-1], {})) is None  # nobody may run it
    engine.chmod(0o755)
    assert old_engine(parse(words[:-1], {})) == engine
    assert theirs(words) == ["--model", "m"]
    assert old_engine(parse([], {})) is None


def test_a_process_whose_engine_has_stopped_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken:
        looks = 0

        @property
        def fault(self) -> str | None:
            self.looks += 1
            return "the device is gone" if self.looks > 3 else None

    statuses: list[int] = []
    monkeypatch.setattr("quarrel.launch.main.LOOKS", 0.0)
    monkeypatch.setattr("os._exit", statuses.append)
    end_with([Broken()])  # type: ignore[list-item]
    assert statuses == [70]
    assert "the device is gone" in capsys.readouterr().err


def test_a_draft_that_cannot_be_loaded_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    from quarrel.launch.main import _load

    for words in (["--spec-type", "draft-mtp"], ["-md", "/nowhere/d.gguf"]):
        args = parse([*words, "-c", "64", "-ngl", "0"], {})
        with _load(args, "demo", load_options(args)) as llm:
            assert llm.n_ctx == 64
        assert "it goes on without" in capsys.readouterr().err


def test_a_template_that_only_others_know_is_the_models_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert template_of(parse(["--chat-template", "vicuna-orca"], {})) is None
    assert "vicuna-orca is not known here" in capsys.readouterr().err
    assert template_of(parse(["--chat-template", "{{ messages }}"], {})) == "{{ messages }}"
    assert template_of(parse([], {})) is None


def test_templates_have_llama_cpps_names() -> None:
    names = [template_of(parse(["--chat-template", name], {})) for name in ("llama3", "phi3", "command-r", "none-such")]
    assert names == ["llama-3", "phi-3", "command-r", None]
