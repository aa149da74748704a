"""What is typed: options, the order of model and prompt, and mistakes, each told in one sentence."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest

from quarrel.cli import main
from quarrel.cli.flags import in_flags, load_options
from quarrel.cli.parser import OTHERS_OPTIONS, make_parser, parse
from quarrel.cli.prompt import model_and_text
from quarrel.cli.samplers import SAMPLERS, sampling_of
from quarrel.engine import SamplingParams
from quarrel.errors import RequestError
from quarrel.llm import LoadOptions
from tests.cli.support import ROOT, typed


def test_every_sampling_parameter_is_an_option() -> None:
    assert sorted(s.field for s in SAMPLERS) == sorted(f.name for f in dataclasses.fields(SamplingParams))


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda s: s.field)
def test_an_option_reaches_its_parameter_by_every_spelling(sampler) -> None:  # type: ignore[no-untyped-def]
    texts = {"logit_bias": "7=-2.5", "mirostat": "2", "adaptive_decay": "0.5", "samplers": "top_k;temperature"}
    text = texts.get(sampler.field, "1")
    want = {"logit_bias": {7: -2.5}, "stop": ["1"], "dry_sequence_breakers": ["1"], "stop_token_ids": [1], "mirostat": 2}
    want |= {"adaptive_decay": 0.5, "samplers": ("top_k", "temperature")}
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
        ("model.gguf -n 3 PROMPT", ("model.gguf", "PROMPT")),
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
    assert model_and_text(parse(make_parser(), ["generate", *words])[0]) == want


@pytest.mark.parametrize("text", ["Once upon a time", "Once", "a long text " * 99])
def test_a_text_before_the_model_is_told(text: str, base: str, capsys: pytest.CaptureFixture[str]) -> None:
    for model in (base, "demo"):
        assert main(["generate", text, model]) == 2
        said = capsys.readouterr().err
        assert f"{text[:40]!r}"[:-1] in said
        assert f"{model!r} is one; the model comes first, then the text" in said
        assert len(said) < 200 + len(model)


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


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("genrate x", "perhaps `quarrel generate` is meant"),
        ("run mistral", "perhaps `quarrel chat` is meant"),
        ("bench", "perhaps `python -m quarrel.bench` is meant"),
        ("xyzzy", "there is no command 'xyzzy' (see"),
        ("generate --temprature=0 x", "perhaps --temperature is meant"),
        ("generate --xyzzy x", "'--xyzzy' is not understood here (see"),
        ("generate -n many x", "-n/--max-tokens: 'many' is no whole number (see quarrel generate --help)"),
        ("generate --seed one x", "-s/--seed: 'one' is no whole number (see"),
        ("serve --timeout soon", "--timeout: 'soon' is no number (see quarrel serve --help)"),
        ("generate --gpu 0 x", "'--gpu' is not understood here; a model runs on one device: --backend names it, and"),
        ("generate -ngl some x", "-ngl/--gpu-layers: 'some' is no number of layers, wanted auto, all or a whole number"),
        ("generate -interactive", "`quarrel chat` is a conversation"),
        ("serve --api-key secret", "WEBUI_API_KEY"),
        ("generate --logprobs 2 x", "give --json too"),
        ("keys list laptop", "list takes no name, got 'laptop'"),
        ("search --dataset notes -p=", "there is no text to look for"),
        ("keys create a --days 1e9", "--days is 1e+09, wanted more than 0 and at most 36500"),
        ("keys create a --days nan", "--days is nan, wanted"),
        ("keys rotate a --overlap inf", "--overlap is inf, wanted 0 to 876000"),
        ("generate --config ~nobody-here/x x", "~nobody-here/x: No such file or directory"),
    ],
)
def test_what_is_nearly_right_is_told(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert said in sentence


def test_what_other_programs_call_an_option_is_none_of_ours() -> None:
    commands = re.findall(r"^## ([\w-]+)$", (ROOT / "docs" / "cli.md").read_text("utf-8"), re.MULTILINE)
    needed = {
        "pull": ["x"],
        "quantize": ["x", "y", "q8_0"],
        "convert": ["x", "-o", "y"],
        "imatrix": ["x", "y", "-o", "z"],
        "keys": ["list"],
        "cp": ["x", "y"],
        "rm": ["x"],
        "completion": ["bash"],
        "datasets": ["list"],
        "ollama": ["use"],
    }
    ours = {flag for c in commands for flag in make_parser().parse_args([c, *needed.get(c, [])]).flags}
    assert {"--temperature", "--origin", "--input"} <= ours
    assert not ours & set(OTHERS_OPTIONS)


@pytest.mark.parametrize("command", ["generate", "chat", "explain", "embed", "search", "serve"])
def test_every_option_of_loading_reaches_the_model(command: str) -> None:
    line = (
        "--backend cpu --compute float32 --ctx 96 --memory 1GiB --kv-cache int8 --prefix-cache-bytes 1MiB --attention own"
    )
    line += " --deterministic --threads 3 --tensor-parallel 2 --experts-on-cpu 4 --rope-scaling yarn --rope-scale 2"
    line += " --pipeline-parallel 3 --expert-memory 20GiB --yarn-orig-ctx 64 --decoded-weights never --quantize q8_0"
    line += " --mmproj p.gguf --allow-image-urls --gpu-layers 5 --hosts auto --prefill grpc://h:1 --beside-tokens 256"
    options = load_options(make_parser().parse_args([command, *line.split()]))
    wanted = {
        "backend": "cpu", "compute": "float32", "n_ctx": 96, "memory": 1 << 30, "threads": 3, "kv_cache": "int8",
        "prefix_cache_bytes": 1 << 20, "attention": "own", "deterministic": True, "tensor_parallel": 2,
        "experts_on_cpu": 4, "pipeline_parallel": 3, "expert_memory": 20 << 30, "rope_scaling": "yarn", "rope_scale": 2.0,
        "yarn_orig_ctx": 64, "decoded_weights": "never", "quantize": "q8_0", "mmproj": "p.gguf",
        "allow_image_urls": True, "gpu_layers": 5, "hosts": "auto", "prefill": "grpc://h:1",
        "beside_tokens": 256,
    }  # fmt: skip
    assert {name: getattr(options, name) for name in wanted} == wanted
    assert {option.name for option in dataclasses.fields(LoadOptions) if option.metadata["help"]} == set(wanted)
    beside = ["--draft", "small", "--lora", "one.gguf"]
    if command not in ("embed", "search"):
        options = load_options(make_parser().parse_args([command, *beside]))
        assert (options.draft, options.adapters) == ("small", {"one": "one.gguf"})


@pytest.mark.parametrize("command", ["generate", "embed", "serve"])
def test_an_error_names_the_flag_of_its_field(command: str) -> None:
    flags = make_parser().parse_args([command]).flags
    for option in dataclasses.fields(LoadOptions):
        if option.metadata["help"]:
            flag = {"n_ctx": "--ctx"}.get(option.name, f"--{option.name.replace('_', '-')}")
            error = RequestError(f"{option.name} is x, wanted y, or None", option.name)
            assert in_flags(error, flags) == f"{flag} is x, wanted y"
    error = RequestError("n_ctx is 9; rope_scaling='yarn' goes further, or n_ctx=8", "n_ctx", "rope_scaling")
    assert in_flags(error, flags) == "--ctx is 9; --rope-scaling yarn goes further, or --ctx 8"
    assert in_flags(RequestError("n_ctx is 9"), flags) == "n_ctx is 9"


def test_no_words_at_all_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "quarrel generate" in capsys.readouterr().err


def test_an_empty_pipe_is_no_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    typed(monkeypatch, "\n")
    assert main(["generate", "-m", "demo"]) == 2
    assert "standard input is empty" in capsys.readouterr().err


@pytest.mark.parametrize("text", [b"caf\xe9", "caf\u00e9".encode()])
def test_bytes_that_are_no_text_are_told(text: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.txt").write_bytes(text)
    args, _ = parse(make_parser(), ["generate", "-f", str(tmp_path / "in.txt")])
    assert model_and_text(args) == ("demo", text.decode("utf-8", "replace"))
    assert ("not all UTF-8" in capsys.readouterr().err) == (text == b"caf\xe9")


def test_no_text_at_a_terminal_is_status_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    typed(monkeypatch, "")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert main(["generate", "-m", "demo"]) == 2
    assert "there is no text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("generate -m nowhere.gguf x", "no model 'nowhere.gguf' was found"),
        ("generate BASE x --temperature -1", "--temperature is -1.0, wanted a number from 0 to 100"),
        ("generate BASE x --seed -1", "--seed is -1, wanted a whole number from 0 to 18446744073709551615\n"),
        ("generate BASE x --samples 0", "--samples is 0, wanted"),
        ("generate BASE x --max-tokens -5", "--max-tokens is -5, wanted a whole number from 0 to 2147483647\n"),
        ("generate BASE x --repeat-penalty 0", "--repeat-penalty is 0.0, wanted"),
        ("generate BASE x --lookup 99", "--lookup is 99, wanted"),
        ("generate BASE x --timeout 0", "--timeout is 0.0, wanted seconds above 0 and up to 1e+06\n"),
        ("generate BASE x --stop=", "an entry of --stop is ''"),
        ("generate BASE x --compute fp8 --backend cpu", "no implementation of any op for --compute fp8: leave it out"),
        ("generate BASE x --top-p 2", "--top-p is 2.0"),
        ("generate BASE x --mirostat 3", "--mirostat is 3"),
        ("generate BASE x --ctx 0", "--ctx is 0"),
        ("generate BASE x --ctx 100000", "--ctx is 100000"),
        ("generate BASE x --stop-token 100000", "--stop-token holds the token id 100000"),
        ("generate BASE x --ctx 700", "--rope-scaling yarn goes further"),
        ("generate BASE x --rope-scale 0", "--rope-scale is 0.0, wanted"),
        ("generate BASE x --yarn-orig-ctx 9 --rope-scaling linear", "--yarn-orig-ctx belongs to --rope-scaling 'yarn'"),
        ("generate BASE x --threads 0", "--threads is 0"),
        ("generate BASE x --backend mlx", "mlx"),
        ("generate BASE --file nowhere.txt", "nowhere.txt: No such file"),
        ("generate BASE --file .", "Is a directory"),
        ("generate BASE x --chat", "no chat template: choose one by template= or --chat-template, of alpaca"),
        ("generate BASE x --chat-template nonsense", "no chat template 'nonsense'"),
        ("chat BASE -p x", "made to continue texts"),
        ("inspect README.md", "not a GGUF file"),
        ("explain nowhere", "no model 'nowhere' was found"),
        ("tokenize BASE --decode -p 99999", "99999"),
        ("pull non/sense/", "'non/sense/' is no name on the hub"),
        ("generate BASE -f ~nobody-here/x", "the name of no user of this machine"),
        ("generate BASE x --json-schema ~nobody-here/x", "the name of no user of this machine"),
        ("keys list --data-dir ~nobody-here/x", "the name of no user of this machine"),
        ("ps --url nowhere", "there is no server at nowhere (unknown url type"),
        ("ps --url http://127.0.0.1:x", "there is no server at http://127.0.0.1:x (nonnumeric port"),
        ("ps --url http://[::1", "there is no server at http://[::1 (Invalid IPv6 URL)"),
    ],
)
def test_a_mistake_is_one_sentence_and_status_1(
    line: str, said: str, base: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main([base if word == "BASE" else word for word in line.split()]) == 1
    streams = capsys.readouterr()
    assert streams.out == ""
    (sentence,) = streams.err.splitlines(keepends=True)
    assert sentence.startswith("quarrel: ")
    assert said in sentence


def test_keys_that_expire_on_no_day_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = {"id": "a", "name": "a", "hash": "0" * 64, "created": 0.0, "expires": 1e14, "revoked": False}
    (tmp_path / "keys.json").write_text(json.dumps([key, {**key, "id": "b", "expires": float("nan")}]))
    assert main(["keys", "list", "--data-dir", str(tmp_path)]) == 0
    assert [row.split()[-3:] for row in capsys.readouterr().out.splitlines()[1:]] == [
        ["no", "date", "usable"],
        ["no", "date", "expired"],
    ]


def test_a_prompt_longer_than_the_context_names_both_sizes(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", base, "abc " * 400, "--ctx", "64"]) == 1
    assert "the context holds 64" in capsys.readouterr().err
