"""The dialogues of the bundled chat model: drawn alike from one seed, right by their own checks, and as token ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import torch

from quarrel.gguf import GGUFFile
from quarrel.tokenizer import load_tokenizer
from tools.chat import evaluate, tokens, train
from tools.chat.dialogue import dialogue
from tools.chat.draw import Draw, held
from tools.chat.export import export
from tools.chat.turn import Turn
from tools.chat.wordings import wordings
from tools.demo_model import Llama, Shape
from tools.demo_weights import save


@pytest.fixture(name="sp", scope="module")
def _sp() -> sentencepiece.SentencePieceProcessor:
    draw = Draw(1)
    lines = [line for _ in range(100) for m in dialogue(draw).messages() for line in m["content"].split("\n") if line]
    return sentencepiece.SentencePieceProcessor(model_proto=tokens.fit(lines, 420))


def test_a_seed_gives_the_same_dialogues() -> None:
    first, again, other = Draw(7), Draw(7), Draw(8)
    drawn = [dialogue(first) for _ in range(20)]
    assert drawn == [dialogue(again) for _ in range(20)]
    assert drawn != [dialogue(other) for _ in range(20)]


@pytest.mark.parametrize("heldout", [False, True])
def test_every_answer_is_right_by_its_own_check(heldout: bool) -> None:
    draw = Draw(11, heldout)
    turns = [turn for _ in range(400) for turn in dialogue(draw).turns]
    assert [turn for turn in turns if not turn.right(turn.assistant)] == []
    assert sum(bool(turn.wanted) for turn in turns) > 400


def test_wordings_that_are_kept_are_never_drawn_for_training() -> None:
    options = wordings("knowing")["capital"]
    kept = held(options)
    assert 0 < len(kept) < len(options) / 3
    plain = [option for option in options if "[" not in option]

    def drawn(draw: Draw) -> set[str]:
        draw._typed = lambda text: text  # type: ignore[method-assign]
        return {draw.ask(options, x="{x}") for _ in range(400)}

    seen, unseen = drawn(Draw(3)), drawn(Draw(3, heldout=True))
    assert {option for option in plain if option in seen} == set(plain) - kept
    assert {option for option in plain if option in unseen} == set(plain) & kept


def test_a_check_counts_whole_words() -> None:
    assert Turn("sums", "", "", ("12",)).right("It is 12.")
    assert not Turn("sums", "", "", ("12",)).right("It is 112.")
    assert Turn("x", "", "", ("a|b", "!c")).right("B")
    assert not Turn("x", "", "", ("a|b", "!c")).right("b c")
    assert Turn("x", "", "", ("=2, 5",)).right("2, 5.")
    assert not Turn("x", "", "", ("=2, 5",)).right("2, 5, 7.")


def test_answers_and_nothing_else_are_learned(sp: sentencepiece.SentencePieceProcessor) -> None:
    drawn = [dialogue(Draw(seed)) for seed in range(30)]
    made = tokens.ids(sp, drawn)
    assert made.lengths.sum() == len(made.tokens) == len(made.learned)
    rows, at = [], 0
    for length in made.lengths:
        rows.append(
            [int(t) for t, on in zip(made.tokens[at : at + length], made.learned[at : at + length], strict=True) if on]
        )
        at += int(length)
    whole = [d for d in drawn if len(tokens.ids(sp, [d]).lengths)]
    wanted = [[t.assistant for t in d.turns] for d in whole]
    assert [_answers(sp, row) for row in rows] == wanted


def _answers(sp: sentencepiece.SentencePieceProcessor, row: list[int]) -> list[str]:
    texts: list[list[int]] = [[]]
    for token in row:
        if token == tokens.END:
            texts.append([])
        else:
            texts[-1].append(token)
    assert texts.pop() == [], "an answer's end is learned too"
    return [sp.decode(ids) for ids in texts]


def test_what_is_exported_reads_a_chat_as_it_was_trained(sp: sentencepiece.SentencePieceProcessor, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Llama(Shape(sp.get_piece_size(), 64, 64, 64, 1, 2, 1, 32))
    save(model, tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(sp.serialized_model_proto())
    export(tmp_path, tmp_path / "tokenizer.model", tmp_path / "m.gguf", "Q8_0")
    with GGUFFile.open(tmp_path / "m.gguf") as file:
        tokenizer = load_tokenizer(file.metadata)
    for seed in range(10):
        drawn = dialogue(Draw(seed))
        made = tokenizer.apply_chat(drawn.messages(), add_generation_prompt=False)
        assert made == tokens.ids(sp, [drawn]).tokens.tolist()


def test_a_batch_holds_every_dialogue_once_and_learns_only_answers(sp: sentencepiece.SentencePieceProcessor) -> None:
    made = tokens.ids(sp, [dialogue(Draw(seed)) for seed in range(40)])
    arrays = {"chat_tokens": made.tokens, "chat_lengths": made.lengths, "chat_learned": np.packbits(made.learned)}
    corpus = train.Corpus(arrays, "chat", torch.device("cpu"))
    batches = list(corpus.epoch(2048, np.random.default_rng(0)))
    assert len(batches) > 1
    assert sorted(t for b in batches for t in b.targets.tolist()) == sorted(made.tokens[made.learned].tolist())


def test_shares_count_right_answers_by_kind() -> None:
    questions = evaluate.drawn(3, True, 2, 60)
    kinds = [q.turn.kind for q in questions]
    assert max(kinds.count(kind) for kind in kinds) == 2
    assert all(q.messages[-1] == {"role": "user", "content": q.turn.user} for q in questions)
    right = [q.turn.assistant for q in questions]
    assert evaluate.shares(questions, right)["all"] == {"asked": len(questions), "right": len(questions), "share": 1.0}
    assert evaluate.shares(questions, [""] * len(questions))["all"]["right"] == 0
