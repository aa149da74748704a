"""Folders without tokenizer.json: tiktoken's ranks, tekken.json, vocab.json with merges.txt. Ids are the libraries' own."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from quarrel.convert.folder import FolderFile
from quarrel.errors import ModelError
from quarrel.tokenizer import load_tokenizer
from quarrel.tokenizer.detokenizer import byte_alphabet
from quarrel.tokenizer.pre import rules
from tests.convert.folders import llama_folder

ROWS = 272
TEXTS = (
    "the thing that they think, then there: the other 1234 things!",
    "Naïve  façade\n\n\tIT'S 3.14 \r\n 日本語 – “quotes” 🙂 the\u00a0end ",
    " the the the",
    "",
)
LINES = ["the thing that they think then there the other things and the end of the thing"] * 4
LETTERS = {byte: letter for letter, byte in byte_alphabet().items()}


def trained(pre: str, size: int, whole: bool = False) -> Tokenizer:
    """A small byte-level vocabulary whose merges are those of a few lines; bytes have the first 256 ids."""
    made = Tokenizer(models.BPE(ignore_merges=whole))
    splits: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rules()[pre].patterns
    ]
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        LINES, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False, special_tokens=[])
    )
    return made


def ranks(made: Tokenizer) -> list[tuple[str, int]]:
    """Tokens in base64 with their ids, as tiktoken has them."""
    alphabet = byte_alphabet()
    spelt = sorted(made.get_vocab().items(), key=lambda item: item[1])
    return [(base64.b64encode(bytes(alphabet[c] for c in text)).decode(), id) for text, id in spelt]


def folder_of(tmp_path: Path, config: dict[str, object] | None = None) -> Path:
    folder = llama_folder(tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(config or {}))
    return folder


def ids(folder: Path, text: str) -> list[int]:
    with FolderFile(folder) as file:
        return load_tokenizer(file.metadata).encode(text, add_special=False)


def tiktoken(folder: Path, made: Tokenizer, name: str = "tiktoken.model") -> Path:
    path = folder / name
    path.write_text("".join(f"{token} {id}\n" for token, id in ranks(made)))
    return path


def program(folder: Path, pattern: str) -> None:
    (folder / "tokenization_x.py").write_text(
        f'raise SystemExit("it ran")\n\nclass A:\n    pat_str = "|".join([r"""{pattern}"""])\n'
    )


@pytest.mark.parametrize("pre", ["kimi-k2", "qwen2", "gpt-4o"])
def test_ids_of_ranks_are_those_of_merges(pre: str, tmp_path: Path) -> None:
    made, config = (
        trained(pre, 268),
        {"added_tokens_decoder": {"270": {"content": "<|end|>", "special": True}}, "eos_token": "<|end|>"},
    )
    folder = folder_of(tmp_path, config)
    tiktoken(folder, made)
    program(folder, rules()[pre].patterns[0])
    for text in TEXTS:
        assert ids(folder, text) == made.encode(text).ids
    with FolderFile(folder) as file:
        vocabulary, keys = load_tokenizer(file.metadata), file.metadata
        assert keys.str("tokenizer.ggml.pre") == pre
        assert keys.int("tokenizer.ggml.eos_token_id") == 270
        assert keys.strs("tokenizer.ggml.tokens")[271] == "[PAD271]"
        for text in TEXTS:
            assert vocabulary.decode(vocabulary.encode(text, add_special=False)) == text
        merges = keys.strs("tokenizer.ggml.merges")
        assert merges == [" ".join(pair) for pair in json.loads(made.to_str())["model"]["merges"]]


def test_files_tell_by_their_names_what_no_program_does(tmp_path: Path) -> None:
    made = trained("qwen2", 260)
    folder = folder_of(tmp_path)
    for name, pre in (("tiktoken.model", "kimi-k2"), ("tokenizer.model", "llama-bpe"), ("qwen.tiktoken", "qwen2")):
        path = tiktoken(folder, made, name)
        with FolderFile(folder) as file:
            assert file.metadata.str("tokenizer.ggml.pre") == pre
            assert (file.metadata.strs("tokenizer.ggml.tokens")[261] == "<|im_start|>") is (pre == "qwen2")
        path.unlink()
    tiktoken(folder, made, "x.tiktoken")
    with pytest.raises(ModelError, match="does not tell how words are cut"):
        FolderFile(folder)


def tekken(folder: Path, made: Tokenizer, special: list[str] | None, count: int = 4) -> Path:
    vocab = [{"rank": id, "token_bytes": token, "token_str": None} for token, id in ranks(made)]
    config = {
        "pattern": rules()["tekken"].patterns[0],
        "num_vocab_tokens": len(vocab) + 50,
        "default_vocab_size": len(vocab) + count,
        "default_num_special_tokens": count,
        "version": "v3",
    }
    # Ranks beyond the default size are no tokens.
    beyond = [{"rank": len(vocab) + i, "token_bytes": base64.b64encode(f"beyond{i}".encode()).decode()} for i in range(50)]
    named = (
        {}
        if special is None
        else {"special_tokens": [{"rank": i, "token_str": t, "is_control": True} for i, t in enumerate(special)]}
    )
    path = folder / "tekken.json"
    path.write_text(json.dumps({"config": config, "vocab": [*vocab, *beyond], **named}))
    return path


@pytest.mark.parametrize("special", [None, ["<unk>", "<s>", "</s>"]])
def test_tekken_has_its_control_tokens_first(special: list[str] | None, tmp_path: Path) -> None:
    made, folder = trained("tekken", 266, whole=True), folder_of(tmp_path)
    tekken(folder, made, special)
    for text in TEXTS:
        assert ids(folder, text) == [4 + id for id in made.encode(text).ids]
    with FolderFile(folder) as file:
        keys, vocabulary = file.metadata, load_tokenizer(file.metadata)
        fourth = "[INST]" if special is None else "<SPECIAL_3>"
        assert keys.strs("tokenizer.ggml.tokens")[:4] == ["<unk>", "<s>", "</s>", fourth]
        assert keys.ints("tokenizer.ggml.token_type")[:4] == [2, 3, 3, 3]
        assert keys.str("tokenizer.ggml.pre") == "tekken"
        assert not any("beyond" in t for t in keys.strs("tokenizer.ggml.tokens"))
        assert (vocabulary.bos_id, keys.int("tokenizer.ggml.eos_token_id")) == (1, 2)
        assert vocabulary.encode("the")[0] == 1
        assert vocabulary.encode("</s>the", parse_special=True)[1] == 2


@pytest.mark.parametrize(("name", "pre"), [("GPT2Tokenizer", "gpt-2"), ("Qwen2TokenizerFast", "qwen2")])
def test_vocab_and_merges_in_two_files(name: str, pre: str, tmp_path: Path) -> None:
    made = trained(pre, 268)
    decoder = {"268": {"content": "<|endoftext|>", "special": True}, "269": {"content": "<think>", "special": False}}
    config = {"tokenizer_class": name, "added_tokens_decoder": decoder, "eos_token": {"content": "<|endoftext|>"}}
    folder = folder_of(tmp_path, config)
    made.model.save(str(folder))
    assert {"vocab.json", "merges.txt"} <= {p.name for p in folder.iterdir()}
    for text in TEXTS:
        assert ids(folder, text) == made.encode(text).ids
    assert ids(folder, "<think>the") == [269, *made.encode("the").ids]
    with FolderFile(folder) as file:
        assert file.metadata.str("tokenizer.ggml.pre") == pre
        assert file.metadata.int("tokenizer.ggml.eos_token_id") == 268
        assert file.metadata.ints("tokenizer.ggml.token_type")[268:270] == [3, 4]
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "OddTokenizer"}')
    with pytest.raises(
        ModelError, match="how OddTokenizer cuts words is not known: save the tokenizer with its tokenizer.json"
    ):
        FolderFile(folder)


def _changed(change: Callable[[dict[str, object]], object]) -> Callable[[str], str]:
    def changed(text: str) -> str:
        file = json.loads(text)
        change(file)
        return json.dumps(file)

    return changed


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-1],
        lambda text: "[]",
        lambda text: "{}",
        _changed(lambda f: f["vocab"][3].update(token_bytes="!!")),
        _changed(lambda f: f["vocab"][3].update(token_bytes="")),
        _changed(lambda f: f["vocab"][3].update(rank=4)),
        _changed(lambda f: f["vocab"][3].update(rank="3")),
        _changed(lambda f: f["vocab"].pop(3)),
        _changed(lambda f: f["config"].update(pattern="(")),
        _changed(lambda f: f["config"].update(pattern="the")),
        _changed(lambda f: f["config"].update(default_num_special_tokens=-1)),
        _changed(lambda f: f["config"].update(default_num_special_tokens=1 << 40)),
        _changed(lambda f: f.update(special_tokens=[{"rank": -1, "token_str": "x"}])),
        _changed(lambda f: f.update(special_tokens=[{"rank": 99, "token_str": "x"}])),
        _changed(lambda f: f.update(special_tokens=[{"rank": 1, "token_str": 5}])),
    ],
)
def test_a_tekken_file_that_makes_no_sense_is_refused(change: Callable[[str], str], tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    path = tekken(folder, trained("tekken", 262), None)
    path.write_text(change(path.read_text()))
    with pytest.raises(ModelError) as caught:
        FolderFile(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace(" 7\n", " x\n"),
        lambda text: text.replace(" 7\n", " 8\n"),
        lambda text: text.replace(" 7\n", " -7\n"),
        lambda text: "é" + text,
        lambda text: "!" + text,
        lambda text: text[: len(text) // 2],
        lambda text: "",
    ],
)
def test_ranks_that_make_no_sense_are_refused(change: Callable[[str], str], tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    path = tiktoken(folder, trained("kimi-k2", 262))
    path.write_text(change(path.read_text()), "utf-8")
    with pytest.raises(ModelError) as caught:
        FolderFile(folder)
    assert "\n" not in str(caught.value)
