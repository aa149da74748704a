"""Small tasks on what the user gives: sums, counting, spelling, sorting."""

from __future__ import annotations

from tools.chat import tables
from tools.chat.draw import Draw
from tools.chat.turn import Turn, article, capital
from tools.chat.wordings import wordings

W = wordings("working")

_PLUS = W["plus"]
_MINUS = W["minus"]
_TIMES = W["times"]
_BY = W["by"]


def sums(draw: Draw) -> list[Turn]:
    r = draw.rng
    kind = draw.of(("plus", "plus", "plus", "minus", "minus", "times", "times", "by"))
    top = draw.of((10, 10, 20, 20, 50, 100))
    if kind == "plus":
        a, b = r.randint(0, top), r.randint(0, top)
        asked, sign, value = _PLUS, "+", a + b
    elif kind == "minus":
        a, b = sorted((r.randint(0, top), r.randint(0, top)), reverse=True)
        asked, sign, value = _MINUS, "-", a - b
    elif kind == "times":
        a, b = r.randint(0, 12), r.randint(0, 12)
        asked, sign, value = _TIMES, "x", a * b
    else:
        b, value = r.randint(1, 12), r.randint(0, 12)
        a, asked, sign = b * value, _BY, "/"
    said = ("{a} {s} {b} = {v}.", "{a} {s} {b} = {v}.", "{a} {s} {b} is {v}.")
    named = draw.chance(0.15) and max(a, b) <= 20
    fill = {"a": tables.NUMBERS[a], "b": tables.NUMBERS[b]} if named else {"a": a, "b": b}
    turns = [Turn("sums", draw.ask(asked, **fill), draw.say(said, a=a, b=b, s=sign, v=value), (str(value),))]
    while draw.chance(0.35) and len(turns) < 3:
        c = r.randint(1, 10)
        step = draw.of(("plus", "minus", "double"))
        if step == "plus":
            asked = W["sums_asked"]
            text, later = f"{value} + {c} = {value + c}.", value + c
        elif step == "minus" and value >= c:
            asked = W["sums_asked_2"]
            text, later = f"{value} - {c} = {value - c}.", value - c
        elif value <= 50:
            asked = W["sums_asked_3"]
            text, later = f"{value} x 2 = {value * 2}.", value * 2
        else:
            break
        turns.append(Turn("follow-up", draw.ask(asked, c=c), text, (str(later),)))
        value = later
    return turns


_THINGS = tables.words(
    "apples pears eggs books coins nuts marbles cakes pencils buttons stones flowers balls stamps cards shells plums biscuits sweets keys"
)


def stories_with_sums(draw: Draw) -> list[Turn]:
    name, other = draw.some(tables.FIRST_NAMES, 2)
    things = draw.of(_THINGS)
    a, b = draw.rng.randint(2, 20), draw.rng.randint(1, 12)
    if draw.chance(0.5):
        asked = W["stories_with_sums_asked"]
        value, sign = a + b, "+"
    else:
        a, b = max(a, b) + 1, min(a, b)
        asked = W["stories_with_sums_asked_2"]
        value, sign = a - b, "-"
    return [
        Turn(
            "word sums",
            draw.ask(asked, n=name, o=other, t=things, a=a, b=b),
            f"{a} {sign} {b} = {value}, so the answer is {value} {things}.",
            (str(value),),
        )
    ]


def comparing(draw: Draw) -> list[Turn]:
    top = draw.of((20, 100, 100))
    kind = draw.rng.randrange(4)
    if kind == 0:
        a, b = draw.some(range(top + 1), 2)
        big = draw.chance(0.6)
        asked = W["comparing_asked"]
        value = max(a, b) if big else min(a, b)
        return [
            Turn(
                "comparing",
                draw.ask(asked, a=a, b=b, w="larger" if big else "smaller"),
                f"{value} is {'larger' if big else 'smaller'} than {min(a, b) if big else max(a, b)}.",
                (f"{value} is",),
            )
        ]
    if kind == 1:
        row = draw.some(range(top + 1), draw.of((3, 4, 5)))
        big = draw.chance(0.5)
        asked = W["comparing_asked_2"]
        value = max(row) if big else min(row)
        return [
            Turn(
                "comparing",
                draw.ask(asked, r=", ".join(map(str, row)), w=draw.of(("largest", "biggest")) if big else "smallest"),
                f"The {'largest' if big else 'smallest'} is {value}.",
                (f"is {value}|{value} is",),
            )
        ]
    if kind == 2:
        a = draw.rng.randint(0, top)
        even = a % 2 == 0
        asked = W["comparing_asked_3"]
        text = draw.ask(asked, a=a)
        plain = " or " in text or ":" in text
        return [
            Turn(
                "comparing",
                text,
                f"{a} is {'even' if even else 'odd'}."
                if plain
                else f"{'Yes' if even else 'No'}, {a} is {'even' if even else 'odd'}.",
                (f"is {'even' if even else 'odd'}",),
            )
        ]
    a = draw.rng.randint(1, top)
    after = draw.chance(0.6)
    asked = W["comparing_asked_4"]
    value = a + 1 if after else a - 1
    return [
        Turn(
            "comparing",
            draw.ask(asked, a=a, w="after" if after else "before"),
            f"{capital('after' if after else 'before')} {a} comes {value}.",
            (f"comes {value}|is {value}",),
        )
    ]


def counting(draw: Draw) -> list[Turn]:
    r = draw.rng
    kind = r.randrange(4)
    if kind == 0:
        low, high = r.choice(
            ((1, 3), (1, 5), (1, 7), (1, 10), (1, 12), (1, 15), (1, 20), (5, 10), (10, 20), (3, 9), (2, 8), (11, 16))
        )
        down = draw.chance(0.25)
        row = list(range(low, high + 1))
        row = row[::-1] if down else row
        asked = (
            "Count from {a} to {b}.",
            "Can you count from {a} to {b}?",
            "Please count {a} to {b}.",
            "Count up from {a} to {b}." if not down else "Count down from {a} to {b}.",
            "Write the numbers from {a} to {b}.",
            "Say the numbers from {a} to {b}.",
            "list all numbers between {a} and {b}",
        )
        text = ", ".join(map(str, row))
        return [Turn("counting", draw.ask(asked, a=row[0], b=row[-1]), text + ".", (text,))]
    if kind == 1:
        start, step = r.randint(0, 12), r.choice((1, 2, 2, 3, 5, 5, 10))
        row = [start + step * i for i in range(5)]
        asked = W["counting_asked"]
        return [Turn("counting", draw.ask(asked, r=", ".join(map(str, row[:4]))), f"Next comes {row[4]}.", (str(row[4]),))]
    if kind == 2:
        row = draw.some(tables.SPELLING, r.randint(2, 7))
        asked = W["counting_asked_2"]
        number = tables.NUMBERS[len(row)]
        return [
            Turn("counting", draw.ask(asked, r=", ".join(row)), f"There are {number} words.", (f"{number}|{len(row)}",))
        ]
    word = draw.of(tables.SPELLING)
    asked = W["counting_asked_3"]
    return [
        Turn(
            "letters",
            draw.ask(asked, w=word),
            f"{_spelt(word)}: the word {word} has {tables.NUMBERS[len(word)]} letters.",
            (f"{tables.NUMBERS[len(word)]}|{len(word)}",),
        )
    ]


def _spelt(word: str) -> str:
    return "-".join(word)


def spelling(draw: Draw) -> list[Turn]:
    word = draw.of(tables.SPELLING)
    kind = draw.rng.randrange(5)
    spelt = _spelt(word)
    if kind <= 1:
        asked = W["spelling_asked"]
        turns = [Turn("spelling", draw.ask(asked, w=word), f"{spelt}.", (spelt,))]
        if draw.chance(0.3):
            asked = W["spelling_asked_2"]
            turns.append(
                Turn(
                    "follow-up",
                    draw.ask(asked),
                    f"The word {word} has {tables.NUMBERS[len(word)]} letters.",
                    (f"{tables.NUMBERS[len(word)]}|{len(word)}",),
                )
            )
        return turns
    if kind == 2:
        first = draw.chance(0.6)
        letter = word[0] if first else word[-1]
        which = "first" if first else "last"
        asked = (
            "What is the {k} letter of {w}?",
            "Which letter is the {k} in {w}?",
            "What letter does {w} " + ("begin with?" if first else "end with?"),
            "{w}: what is the {k} letter?",
            "Tell me the {k} letter of the word {w}.",
            "What's the {k} letter in {w}?",
        )
        return [
            Turn(
                "letters", draw.ask(asked, w=word, k=which), f"The {which} letter of {word} is {letter}.", (f"is {letter}",)
            )
        ]
    if kind == 3 and len(word) <= 7:
        asked = W["spelling_asked_3"]
        return [Turn("spelling", draw.ask(asked, w=word), f"{_spelt(word[::-1])}.", (_spelt(word[::-1]),))]
    small = sorted({c for c in word.lower() if c in "aeiou"})
    letter = draw.of("aeiou") if not small or draw.chance(0.3) else draw.of(small)
    count = word.lower().count(letter)
    asked = W["spelling_asked_4"]
    times = {0: "no times", 1: "once", 2: "twice", 3: "three times"}.get(count, f"{count} times")
    said = f"{spelt}: the letter {letter} is not in it." if not count else f"{spelt}: the letter {letter} is in it {times}."
    return [Turn("letters", draw.ask(asked, w=word, c=letter), said, (("not|no",) if not count else (times,)))]


def sorting(draw: Draw) -> list[Turn]:
    r = draw.rng
    if draw.chance(0.55):
        row = draw.some(range(draw.of((10, 20, 50, 100))), r.randint(3, 6))
        down = draw.chance(0.25)
        order = sorted(row, reverse=down)
        asked = W["sorting_asked"]
        how = " from large to small" if down else draw.of(("", "", " from small to large"))
        text, back = ", ".join(map(str, order)), ", ".join(map(str, order[::-1]))
        turns = [Turn("sorting", draw.ask(asked, r=", ".join(map(str, row)), d=how), text + ".", ("=" + text,))]
    else:
        row = draw.some([w for w in tables.SPELLING if w[0].islower()], r.randint(3, 5))
        order = sorted(row)
        asked = W["sorting_asked_2"]
        text, back = ", ".join(order), ", ".join(order[::-1])
        turns = [Turn("sorting words", draw.ask(asked, r=", ".join(row)), text + ".", ("=" + text,))]
    if draw.chance(0.3):
        kind = draw.of(("back", "first", "last"))
        asked, said = {
            "back": (W["sorting_back"], back),
            "first": (W["sorting_first"], str(order[0])),
            "last": (W["sorting_last"], str(order[-1])),
        }[kind]
        turns.append(Turn("follow-up", draw.ask(asked), said + ".", ("=" + said,)))
    return turns


def echoes(draw: Draw) -> list[Turn]:
    """Repeat, shout, join, pick: words that the user gives come back."""
    r = draw.rng
    row = draw.some((*tables.SPELLING, *tables.FIRST_NAMES), r.randint(2, 5))
    kind = r.randrange(6)
    if kind == 0:
        text = draw.of((" ".join(row), row[0], f"the {row[0]} and the {row[1]}"))
        asked = W["echoes_asked"]
        return [Turn("repeating", draw.ask(asked, t=text), capital(text) + ".", ("=" + text,))]
    if kind == 1:
        asked = W["echoes_asked_2"]
        return [Turn("repeating", draw.ask(asked, t=row[0]), row[0].upper() + ".", ())]
    if kind == 2:
        at = r.randrange(len(row))
        asked = W["echoes_asked_3"]
        name = ("first", "second", "third", "fourth", "fifth")[at]
        return [Turn("repeating", draw.ask(asked, n=name, r=", ".join(row)), f"The {name} word is {row[at]}.", (row[at],))]
    if kind == 3:
        x = draw.of(row) if draw.chance(0.5) else draw.of(tables.SPELLING)
        there = x in row
        asked = W["echoes_asked_4"]
        return [
            Turn(
                "yes or no",
                draw.ask(asked, x=x, r=", ".join(row)),
                f"Yes, {x} is in the list." if there else f"No, {x} is not in the list.",
                ("yes" if there else "no",),
            )
        ]
    if kind == 4:
        count = r.randint(2, 4)
        asked = W["echoes_asked_5"]
        text = " ".join([row[0]] * count)
        return [Turn("repeating", draw.ask(asked, x=row[0], n=tables.NUMBERS[count]), capital(text) + ".", ("=" + text,))]
    asked = W["echoes_asked_6"]
    noun = draw.of(
        tables.words(
            "dog cat house river mountain apple garden teacher window castle bridge forest king queen dragon horse rabbit tiger candle ladder book piano doctor farmer sailor ship boat letter table lamp"
        )
    )
    said = W["echoes_said"]
    return [
        Turn(
            "sentences",
            draw.ask(asked, a=noun),
            draw.say(
                said,
                x=article(noun),
                m=draw.of(("market", "river", "old mill", "school", "church")),
                f=draw.of(("brother", "aunt", "friend", "teacher")),
            ),
            (noun,),
        )
    ]
