"""Vocabularies with changed bytes, and any texts and ids: only our errors may come out, quickly, and never a wrong id.

    python -m fuzz.tokenizer [--seconds 60] [--seed 0]

A file that holds one of four small vocabularies and nothing else is mutated as in `fuzz.gguf`, opened, and its tokenizer
used. With the file as it was: ids become the text again (BPE, and SentencePiece, to which U+2581 is a space), ids one by
one give what they give at once, and a text that names control tokens has none.
"""

from __future__ import annotations

import io
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from fuzz.gguf import Seed, mutants, seed_of
from fuzz.running import arguments, examples, rounds
from quarrel.errors import ModelError, RequestError
from quarrel.gguf import GGUFFile, GGUFWriter
from quarrel.tokenizer import Tokenizer, TokenizerWarning, load_tokenizer
from tests.tokenizer.synthetic import CHAT_TOKENS, TAG_TOKENS, bpe_metadata, spm_metadata, ugm_metadata, wpm_metadata

Maker = Callable[..., dict[str, object]]
MAKERS: dict[str, Maker] = {"bpe": bpe_metadata, "spm": spm_metadata, "wpm": wpm_metadata, "ugm": ugm_metadata}
SECONDS = 2.0
ODD = ("hello", " world", "\u2581", "<0x41>", "\u0120", "\0", "\ufffd", "\ud55c", "\r\n", "\U0001f600", " " * 70)
PIECES = (*CHAT_TOKENS, *TAG_TOKENS, *ODD)


def texts() -> Any:
    """Any characters, and what vocabularies hold, in any order; lone surrogates too."""
    parts = st.sampled_from(PIECES) | st.text(max_size=12) | st.characters(categories=["Cs", "Mn", "Zs"])
    return st.lists(parts, max_size=12).map("".join)


@cache
def file_of(model: str) -> Seed:
    """A file with this vocabulary alone."""
    writer = GGUFWriter()
    for key, value in {"general.architecture": "llama", **MAKERS[model]()}.items():
        writer.add(key, value)
    stream = io.BytesIO()
    writer.write(stream)
    return seed_of(stream.getvalue())


@cache
def tokenizer_of(model: str) -> Tokenizer:
    """The vocabulary as it was."""
    return load_tokenizer(MAKERS[model]())


def use(tokenizer: Tokenizer, text: str, ids: Sequence[int]) -> None:
    """Both ways; ids are taken modulo the vocabulary."""
    for special in (False, True):
        try:
            found = tokenizer.encode(text, parse_special=special)
        except RequestError:
            continue
        assert all(0 <= id < tokenizer.n_vocab for id in found), "an id outside the vocabulary"
        tokenizer.decode(found, skip_special=False)
    if tokenizer.n_vocab:
        inside = [id % tokenizer.n_vocab for id in ids]
        whole = tokenizer.decode(inside)
        steps = tokenizer.detokenizer()
        assert "".join(map(steps.push, inside)) + steps.flush() == whole, "one by one gives another text"


def check_sound(drawn: tuple[str, str, list[int]]) -> None:
    """What holds of a vocabulary that nobody has changed."""
    model, text, ids = drawn
    tokenizer = tokenizer_of(model)
    use(tokenizer, text, ids)
    try:
        found = tokenizer.encode(text, add_special=False)
    except RequestError:
        assert any("\ud800" <= c <= "\udfff" for c in text), "a valid text is refused"
        return
    unknown = tokenizer.unk_id
    assert not any(tokenizer.is_control(id) for id in found if id != unknown), "a text became a control token"
    # SentencePiece puts a space in front of what follows a tag, too, as llama.cpp does.
    reversible = model == "bpe" or (model == "spm" and not any(tag in text for tag in TAG_TOKENS))
    if reversible and unknown not in found:
        spaced = text.replace("\u2581", " ") if model == "spm" else text
        assert tokenizer.decode(found) == spaced, "encode and decode give another text"


def check_mutant(drawn: tuple[bytes, str, list[int]], path: Path) -> bool:
    """Whether the file could be used."""
    data, text, ids = drawn
    path.write_bytes(data)
    start = time.process_time()
    try:
        with GGUFFile.open(path) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore", TokenizerWarning)
            use(load_tokenizer(file.metadata), text, ids)
        return True
    except ModelError as error:
        assert str(error)
        assert "\n" not in str(error)
        return False
    finally:
        taken = time.process_time() - start
        assert taken <= SECONDS, f"{taken:.2f} s"


def fuzz(count: int, number: int, path: Path) -> tuple[int, int]:
    """`count` texts for sound vocabularies, as many for mutants: how many of these were refused, how many used."""
    counts = [0, 0]
    ids = st.lists(st.integers(0, 1 << 20), max_size=20)
    examples(st.tuples(st.sampled_from([*MAKERS]), texts(), ids), count, number, check_sound)

    def one(drawn: tuple[bytes, str, list[int]]) -> None:
        counts[check_mutant(drawn, path)] += 1

    changed = st.sampled_from([*MAKERS]).flatmap(lambda model: mutants(file_of(model)))
    examples(st.tuples(changed, texts(), ids), count, number, one)
    return counts[0], counts[1]


def main(given: Sequence[str] | None = None) -> int:
    """Command line."""
    args = arguments(__doc__).parse_args(given)
    total = [0, 0]

    def one(number: int) -> None:
        for i, n in enumerate(fuzz(500, number, Path(folder) / "mutant.gguf")):
            total[i] += n

    with tempfile.TemporaryDirectory() as folder:
        count = rounds(args.seconds, args.seed, one)
    seeds = f"seeds {args.seed} to {args.seed + count - 1}"
    print(
        f"{sum(total)} changed vocabularies and as many texts, {seeds}: {total[0]} refused, {total[1]} used, none did harm"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
