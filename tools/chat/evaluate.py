"""The share of right answers of the bundled chat model, by kind of question, greedily.

    python -m tools.chat.evaluate --model demo-chat --turns 60 --out bench/results/DATE-demo-chat.json

Questions are drawn anew, from seeds that training does not use: once in wordings that training never saw and once in those
that it saw. The turns in front of a question are the true ones. `Turn.right` says what counts; turns without a check, such
as jokes, are left out. Of facts, the question itself was seen: only what stands around it is new ("My son asks: ...").
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import quarrel
from tools.chat.dialogue import dialogue
from tools.chat.draw import Draw
from tools.chat.turn import Turn

SEED = 2_000_000
MAX_TOKENS = 200


@dataclass(frozen=True)
class Question:
    """A turn with a check, and the messages up to it."""

    turn: Turn
    messages: tuple[dict[str, str], ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="demo-chat")
    parser.add_argument("--turns", type=int, default=60, help="questions of each kind at most")
    parser.add_argument("--dialogues", type=int, default=3000, help="that they are taken from")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--wrong", type=Path, help="a file for the answers that are not right")
    args = parser.parse_args()
    found: dict[str, object] = {"command": " ".join(["python -m tools.chat.evaluate", *sys.argv[1:]])}
    wrong: list[dict[str, object]] = []
    with quarrel.load(args.model, n_ctx=1024, max_seqs=16) as llm:
        for name, heldout in (("wordings not seen in training", True), ("wordings of training", False)):
            questions = drawn(SEED, heldout, args.turns, args.dialogues)
            answers = asyncio.run(answered(llm, questions, args.temperature))
            found[name] = shares(questions, answers)
            wrong += [
                {"wordings": name, "kind": q.turn.kind, "user": q.turn.user, "answer": a, "true": q.turn.assistant}
                for q, a in zip(questions, answers, strict=True)
                if not q.turn.right(a)
            ]
    text = json.dumps(found, indent=1) + "\n"
    print(text, end="")
    if args.out:
        args.out.write_text(text, encoding="utf-8")
    if args.wrong:
        args.wrong.write_text("".join(json.dumps(row) + "\n" for row in wrong), encoding="utf-8")


def drawn(seed: int, heldout: bool, turns: int, dialogues: int) -> list[Question]:
    """The first `turns` questions of each kind that stand in that many dialogues."""
    draw = Draw(seed, heldout=heldout)
    found: dict[str, list[Question]] = defaultdict(list)
    for _ in range(dialogues):
        chosen = dialogue(draw)
        messages = chosen.messages()
        for number, turn in enumerate(chosen.turns):
            if turn.wanted and len(found[turn.kind]) < turns:
                end = 2 * number + 1 + (chosen.system is not None)
                found[turn.kind].append(Question(turn, tuple(messages[:end])))
    return [question for kind in sorted(found) for question in found[kind]]


async def answered(llm: quarrel.LLM, questions: Sequence[Question], temperature: float) -> list[str]:
    """The model's answers, many at once."""
    room = asyncio.Semaphore(32)

    async def one(question: Question) -> str:
        async with room:
            stream = llm.achat(question.messages, temperature=temperature, max_tokens=MAX_TOKENS, seed=1, overflow="shift")
            return (await stream.wait()).text

    return list(await asyncio.gather(*map(one, questions)))


def shares(questions: Sequence[Question], answers: Sequence[str]) -> dict[str, dict[str, float]]:
    """Of each kind, and of all kinds together: how many were asked, how many were right, and their share."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for question, answer in zip(questions, answers, strict=True):
        for kind in (question.turn.kind, "all"):
            counts[kind][0] += 1
            counts[kind][1] += question.turn.right(answer)
    return {
        kind: {"asked": asked, "right": right, "share": round(right / asked, 3)}
        for kind, (asked, right) in sorted(counts.items(), key=lambda item: (item[0] != "all", item[0]))
    }


if __name__ == "__main__":
    main()
