"""Defaults from a TOML file, and completion by a shell."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from quarrel.cli import main


@pytest.fixture(name="config")
def _config(tmp_path: Path) -> Path:
    """The user's own file."""
    path = tmp_path / "config" / "quarrel" / "config.toml"
    path.parent.mkdir(parents=True)
    return path


def generated(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    capsys.readouterr()
    assert main(["generate", *words, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def tokens(document: dict[str, object]) -> int:
    return len(document["token_ids"])  # type: ignore[arg-type]


def test_defaults_hold_for_commands_and_models_and_what_is_typed_comes_first(
    config: Path, base: str, chatty: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(
        f'model = "{base}"\nmax_tokens = 3\nbackend = "cpu"\nseed = 5\nplain = true\n[generate]\ntemperature = 0\n'
        f'[models."chatty"]\nmax-tokens = 4\n[models."{base}"]\nstop-token = [700, 701]\n[serve]\nport = 9\n'
    )
    config.write_text(config.read_text().replace("stop-token = [700, 701]", "seed = 6"))
    found = generated(capsys, "hello")
    assert (found["model"], tokens(found), found["seed"]) == (base, 3, 6)
    assert tokens(generated(capsys, "hello", "-n", "2")) == 2
    assert tokens(generated(capsys, "-m", chatty, "hello")) == 4
    other = config.with_name("other.toml")
    other.write_text(f'model = "{chatty}"\nbackend = "cpu"\nmax_tokens = 1\n')
    found = generated(capsys, "hello", "--config", str(other))
    assert (found["model"], tokens(found)) == (chatty, 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("temprature = 1", "the file has 'temprature', which is no option; perhaps 'temperature' is meant"),
        ("[chatt]\nplain = true", "there is no command 'chatt'; perhaps 'chat' is meant"),
        ("[keys]\ntemperature = 1", "[keys] has 'temperature', which is no option"),
        ('[models.x]\nsytem = "a"', "perhaps 'system' is meant"),
        ("models = 3", "wanted tables"),
        ("model = 3", "model is 3, wanted the name of a model"),
        ("temperature = 1979-05-27", "wanted a text, a number, true or false"),
        ("config = 'x'", "which is no option"),
        ("temperature = ", "is no TOML"),
    ],
)
def test_a_mistake_in_the_file_is_one_sentence(
    text: str, said: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(text)
    assert main(["generate", "hello"]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert str(config) in sentence
    assert said in sentence


def test_a_wrong_value_names_the_file(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text('temperature = "warm"')
    assert main(["generate", "hello"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "'warm' is no number" in first
    assert str(config) in second
    assert main(["generate", "hello", "--config", "nowhere.toml"]) == 2
    assert "nowhere.toml: No such file" in capsys.readouterr().err


def test_a_shell_completes_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    ask = f"{script}\nCOMP_WORDS=(quarrel comp); COMP_CWORD=1; _shtab_quarrel; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, env=dict(os.environ), timeout=60)
    assert done.stdout.split() == ["completion"]
