"""Whole dialogues: topics in a row, what was said before, and system prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tools.chat import knowing, reading, stories, talk, working
from tools.chat.draw import Draw
from tools.chat.reading import BOYS, GIRLS
from tools.chat.turn import Topic, Turn
from tools.chat.wordings import wordings

W = wordings("dialogue")

TOPICS: tuple[tuple[Topic, float], ...] = (
    (knowing.capitals, 5), (knowing.reverse_capitals, 1.5), (knowing.places, 1.5), (knowing.colours, 3), (knowing.opposites, 4), (knowing.animals, 4), (knowing.meanings, 5),
    (knowing.facts, 5), (knowing.calendar, 4), (knowing.grammar, 3), (knowing.sorts, 4), (knowing.rhymes, 1.5),
    (working.sums, 10), (working.stories_with_sums, 4), (working.comparing, 4), (working.counting, 5), (working.spelling, 5), (working.sorting, 6), (working.echoes, 4),
    (reading.texts, 9), (reading.rewriting, 7), (reading.lists, 1.5), (stories.stories, 7),
    (talk.greetings, 3), (talk.identity, 4), (talk.abilities, 2.5), (talk.quarrel, 5), (talk.refusals, 5), (talk.advice, 3), (talk.nonsense, 1.5), (talk.endings, 2), (talk.passages, 4),
)  # fmt: skip


@dataclass(frozen=True)
class Dialogue:
    system: str | None
    turns: tuple[Turn, ...]

    def messages(self) -> list[dict[str, str]]:
        rows = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn in self.turns:
            rows += [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.assistant}]
        return rows


def dialogue(draw: Draw) -> Dialogue:
    """One to a dozen turns. Names and likes told in one are asked for in a later one."""
    count = draw.of((1, 1, 1, 1, 1, 2, 2, 2, 3, 3, 4, 6, 10))
    turns: list[Turn] = []
    name: str | None = None
    pending: list[Turn] = []
    for number in range(count):
        pick = draw.rng.random()
        if pick < 0.05 and name is None:
            told = talk.names(draw)
            name = told[0].wanted[0]
            turns += told
        elif pick < 0.08:
            turns.append(talk.recall_name(draw, name))
        elif pick < 0.11:
            told_like, asked, untold = talk.likes(draw)
            if draw.chance(0.25) and not pending:
                turns.append(untold)
            elif not pending:
                turns.append(told_like)
                pending.append(asked)
        elif pick < 0.2 and number:
            turns += _back(draw, turns)
        else:
            turns += _topic(draw)
        if pending and draw.chance(0.5):
            turns.append(pending.pop())
    if name is not None and draw.chance(0.6):
        turns.append(talk.recall_name(draw, name))
    turns += pending
    if draw.chance(0.05):
        turns += talk.endings(draw)
    if not turns:
        turns = _topic(draw)
    return Dialogue(*_under_system(draw, turns))


def _topic(draw: Draw) -> list[Turn]:
    return draw.rng.choices([t for t, _ in TOPICS], [w for _, w in TOPICS])[0](draw)


def _back(draw: Draw, turns: list[Turn]) -> list[Turn]:
    """A question about the conversation itself."""
    last, first = turns[-1], turns[0]
    kind = draw.rng.randrange(4)
    if kind == 0 and len(last.assistant) < 200:
        asked = W["back_asked"]
        return [Turn("follow-up", draw.ask(asked), last.assistant, ("=" + last.assistant,))]
    if kind == 1 and len(last.user) < 120:
        asked = W["back_asked_2"]
        return [Turn("follow-up", draw.ask(asked), f'You wrote: "{last.user}"', (last.user.strip(".?! "),))]
    if kind == 2 and len(first.user) < 120:
        asked = W["back_asked_3"]
        return [Turn("follow-up", draw.ask(asked), f'You began with: "{first.user}"', (first.user.strip(".?! "),))]
    return talk.endings(draw)


_PLAIN = W["plain"]
_SHOUT = W["shout"]
_SMALL = W["small"]
_ENDING = W["ending"]
_OPENING = W["opening"]
_NAMED = W["named"]
_USER = W["user"]
_ENDS = W["ends"]
_STARTS = W["starts"]


def _under_system(draw: Draw, turns: list[Turn]) -> tuple[str | None, tuple[Turn, ...]]:
    if draw.chance(0.62):
        return None, tuple(turns)
    kind = draw.rng.random()
    if kind < 0.35:
        return (draw.ask(_PLAIN), tuple(turns))
    change: Callable[[str], str]
    if kind < 0.45:
        system, change, check = draw.ask(_SHOUT), str.upper, ()
    elif kind < 0.53:
        system, change, check = draw.ask(_SMALL), str.lower, ()
    elif kind < 0.65:
        words = draw.of(_ENDS)
        system, check = draw.ask(_ENDING, x=words), (words.strip("!."),)
        change = lambda text: f"{text} {words}"  # noqa: E731
    elif kind < 0.77:
        words = draw.of(_STARTS)
        system, check = draw.ask(_OPENING, x=words), (words.strip("!.,:"),)
        change = lambda text: f"{words} {text}"  # noqa: E731
    elif kind < 0.9:
        name = draw.of(
            (*GIRLS, *BOYS, "Robin", "Pip", "Merlin", "Ada", "Coco", "Rex", "Professor Owl", "Captain Blue", "Sparrow")
        )
        asked = W["under_system_asked"]
        said = W["under_system_said"]
        turn = Turn("system prompts", draw.ask(asked), draw.say(said, n=name), (name,))
        at = draw.rng.randrange(len(turns) + 1)
        kept = [t for t in turns if t.kind not in ("identity",)]
        return draw.ask(_NAMED, x=name), (*kept[:at], turn, *kept[at:])
    else:
        name = draw.of((*GIRLS, *BOYS))
        kept = [t for t in turns if t.kind not in ("memory", "names")]
        return draw.ask(_USER, x=name), (*kept, talk.recall_name(draw, name))
    changed = []
    for turn in turns:
        wanted = tuple(w for w in turn.wanted if not w.startswith("=")) + check
        if (
            turn.kind == "follow-up"
            and turn.wanted
            and turn.wanted[0].startswith("=")
            and turn.user.lower().startswith(W["under_system"])
        ):
            continue
        changed.append(replace(turn, kind="system prompts", assistant=change(turn.assistant), wanted=wanted))
    return system, tuple(changed) or tuple(turns)
