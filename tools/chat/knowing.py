"""Questions whose answers stand in the tables, and what follows them."""

from __future__ import annotations

from tools.chat import tables
from tools.chat.draw import Draw
from tools.chat.turn import Turn, article, capital, listed
from tools.chat.wordings import wordings

W = wordings("knowing")

_CAPITAL = W["capital"]
_ANSWER_CAPITAL = W["answer_capital"]
_AND = W["and"]


def capitals(draw: Draw) -> list[Turn]:
    chosen = draw.some(tables.CAPITALS, 3)
    x, y = chosen[0]
    turns = [Turn("capitals", draw.ask(_CAPITAL, x=x), capital(draw.say(_ANSWER_CAPITAL, x=x, y=y)), (y,))]
    for x, y in chosen[1 : 1 + draw.of((0, 0, 1, 2))]:
        turns.append(Turn("follow-up", draw.ask(_AND, x=x), capital(draw.say(_ANSWER_CAPITAL, x=x, y=y)), (y,)))
    x, y = chosen[0]
    if len(turns) == 1 and draw.chance(0.25):
        language = dict(tables.LANGUAGES).get(x)
        where = dict(tables.CONTINENTS).get(x)
        if language:
            asked = W["capitals_asked"]
            turns.append(
                Turn(
                    "follow-up",
                    draw.ask(asked),
                    draw.say(("They speak {y} in {x}.", "People in {x} speak {y}."), x=x, y=language),
                    (language,),
                )
            )
        if where:
            asked = W["capitals_asked_2"]
            turns.append(
                Turn(
                    "follow-up",
                    draw.ask(asked),
                    capital(draw.say(("{x} is in {y}.", "It is in {y}."), x=x, y=where)),
                    (where,),
                )
            )
    return turns


def reverse_capitals(draw: Draw) -> list[Turn]:
    x, y = draw.of(tables.CAPITALS)
    asked = W["reverse_capitals_asked"]
    return [
        Turn(
            "capitals",
            draw.ask(asked, y=y),
            draw.say(("{y} is the capital of {x}.", "{y} is in {x}. It is the capital."), x=x, y=y),
            (x.removeprefix("the "),),
        )
    ]


def places(draw: Draw) -> list[Turn]:
    if draw.chance(0.5):
        x, y = draw.of(tables.CONTINENTS)
        asked = W["places_asked"]
        return [
            Turn(
                "places",
                draw.ask(asked, x=x),
                capital(draw.say(("{x} is in {y}.", "{x} is a country in {y}."), x=x, y=y)),
                (y,),
            )
        ]
    x, y = draw.of(tables.LANGUAGES)
    asked = W["places_asked_2"]
    return [
        Turn(
            "places", draw.ask(asked, x=x), draw.say(("They speak {y} in {x}.", "People in {x} speak {y}."), x=x, y=y), (y,)
        )
    ]


def colours(draw: Draw) -> list[Turn]:
    (x, y), (x2, y2) = draw.some(tables.COLOURS, 2)
    asked = W["colours_asked"]
    said = ("{x} is {y}.", "{x} is {y}.", "Usually {x} is {y}.")
    turns = [Turn("colours", draw.ask(asked, x=x), capital(draw.say(said, x=x, y=y)), (y,))]
    if draw.chance(0.35):
        turns.append(Turn("follow-up", draw.ask(_AND, x=x2), capital(draw.say(said, x=x2, y=y2)), (y2,)))
    if draw.chance(0.2):
        wrong = draw.of([c for c in tables.KINDS["a colour"] if c not in (y, y2, "gray")])
        right = draw.chance(0.5)
        asked = W["colours_asked_2"]
        said = ("Yes, {x} is {y}.",) if right else ("No, {x} is {y}.",)
        turns.append(
            Turn(
                "yes or no",
                draw.ask(asked, x=x, y=y if right else wrong),
                draw.say(said, x=x, y=y),
                ("yes" if right else "no", y),
            )
        )
    return turns


def opposites(draw: Draw) -> list[Turn]:
    chosen = draw.some(tables.OPPOSITES, 3)
    x, y = chosen[0]
    asked = W["opposites_asked"]
    said = ("The opposite of {x} is {y}.", "The opposite of {x} is {y}.", "It is {y}.", "{y}.")
    turns = [Turn("opposites", draw.ask(asked, x=x), capital(draw.say(said, x=x, y=y)), (y,))]
    for x, y in chosen[1 : 1 + draw.of((0, 0, 1, 2))]:
        turns.append(Turn("follow-up", draw.ask(_AND, x=x), capital(draw.say(said, x=x, y=y)), (y,)))
    return turns


_SOUND = W["sound"]
_YOUNG = W["young"]
_HOME = W["home"]
_LEGS = W["legs"]
_FOOD = W["food"]


def animals(draw: Draw) -> list[Turn]:
    name, sound, young, home, legs, food = draw.of(tables.ANIMALS)
    x, number = article(name), tables.NUMBERS[int(legs)]
    silent = sound.startswith("makes no")
    facts = {
        "sound": (_SOUND, capital(f"{x} {sound}."), ("no sound" if silent else sound,)),
        "young": (_YOUNG, f"A young {name} is called {article(young)}.", (young,)),
        "home": (
            _HOME,
            capital(
                f"{x} lives in {article(home)}."
                if home not in ("water", "ant hill")
                else f"{x} lives in {home if home == 'water' else 'an ant hill'}."
            ),
            (home,),
        ),
        "legs": (
            _LEGS,
            capital(f"{x} has {'no' if legs == '0' else number} legs."),
            ("no" if legs == "0" else f"{number}|{legs}",),
        ),
        "food": (_FOOD, capital(f"{x} eats {food}."), (food,)),
    }
    chosen = draw.some(sorted(facts), 2)
    asked, said, wanted = facts[chosen[0]]
    text = (
        draw.ask(asked, x=x, n=name)
        .replace("a " + name + "s eat", name + "s eat")
        .replace("an " + name + "s eat", name + "s eat")
    )
    turns = [Turn("animals", text, said, wanted)]
    if draw.chance(0.35):
        later = {
            "sound": W["animals_sound"],
            "young": W["animals_young"],
            "home": ("And where does it live?", "Where does it live?", "where is its home?", "And its home?"),
            "legs": W["animals_legs"],
            "food": ("And what does it eat?", "What does it eat?", "what is its food?", "And its food?"),
        }
        _, said, wanted = facts[chosen[1]]
        turns.append(Turn("follow-up", draw.ask(later[chosen[1]]), said.replace(capital(x), "It", 1), wanted))
    return turns


def meanings(draw: Draw) -> list[Turn]:
    x, y = draw.of(tables.DEFINITIONS)
    bare = x in W["meanings_bare"]
    the = x in ("moon", "sun", "earth", "alphabet", "internet")
    thing = x if bare else f"the {x}" if the else article(x)
    asked = W["meanings_asked"]
    return [
        Turn(
            "meanings", draw.ask(asked, x=thing, w=x), draw.say(("{x} is {y}.", "{x} is {y}."), x=capital(thing), y=y), (y,)
        )
    ]


def facts(draw: Draw) -> list[Turn]:
    question, answer, wanted = draw.of(tables.SCIENCE)
    low = question[0].lower() + question[1:] if question.split()[0] not in ("Little",) else question
    asked = W["facts_asked"]
    text = draw.ask(asked, q=draw.of((question, low)) if not draw.heldout else question)
    return [
        Turn(
            "facts", text, answer, (wanted if wanted not in tables.NUMBERS else f"{wanted}|{tables.NUMBERS.index(wanted)}",)
        )
    ]


def calendar(draw: Draw) -> list[Turn]:
    days = draw.chance(0.5)
    row, what = (tables.DAYS, "day") if days else (tables.MONTHS, "month")
    at = draw.rng.randrange(len(row))
    x, after, before = row[at], row[(at + 1) % len(row)], row[at - 1]
    kind = draw.rng.randrange(6 if not days else 4)
    if kind == 0:
        asked = W["calendar_asked"]
        turns = [Turn("calendar", draw.ask(asked, w=what, x=x), f"After {x} comes {after}.", (after,))]
        if draw.chance(0.4):
            asked = W["calendar_asked_2"]
            turns.append(
                Turn(
                    "follow-up",
                    draw.ask(asked),
                    f"After {after} comes {row[(at + 2) % len(row)]}.",
                    (row[(at + 2) % len(row)],),
                )
            )
        return turns
    if kind == 1:
        asked = W["calendar_asked_3"]
        return [Turn("calendar", draw.ask(asked, w=what, x=x), f"Before {x} comes {before}.", (before,))]
    if kind == 2:
        asked = W["calendar_asked_4"]
        text = (
            draw.ask(asked, w=what)
            .replace("days of the year", "days of the week")
            .replace("months of the week", "months of the year")
        )
        return [Turn("calendar", text, f"The {what}s are {listed(row)}.", (listed(row),))]
    if kind == 3:
        name = "today" if days else "now"
        asked = W["calendar_asked_5"]
        later = "tomorrow" if days else "next month"
        if draw.chance(0.35) and days:
            later, after = "yesterday", before
            said = f"If today is {x}, yesterday was {after}."
        else:
            said = f"If today is {x}, tomorrow is {after}." if days else f"If it is {x} now, next month is {after}."
        return [
            Turn(
                "calendar", capital(draw.ask(asked, n=name if days else "this month", x=x, m=later, w=what)), said, (after,)
            )
        ]
    if kind == 4:
        asked = W["calendar_asked_6"]
        extra = ", and 29 in a leap year" if x == "February" else ""
        return [
            Turn("calendar", draw.ask(asked, x=x), f"{x} has {tables.MONTH_DAYS[x]} days{extra}.", (tables.MONTH_DAYS[x],))
        ]
    asked = W["calendar_asked_7"]
    return [
        Turn(
            "calendar", draw.ask(asked, x=x), f"{x} is in {tables.SEASONS[x]}, north of the equator.", (tables.SEASONS[x],)
        )
    ]


def grammar(draw: Draw) -> list[Turn]:
    if draw.chance(0.5):
        x, y = draw.of(tables.PLURALS)
        asked = W["grammar_asked"]
        return [
            Turn(
                "grammar",
                draw.ask(asked, x=x, a=article(x)),
                draw.say(("The plural of {x} is {y}.", "One {x}, two {y}."), x=x, y=y),
                (y,),
            )
        ]
    x, y = draw.of(tables.PASTS)
    asked = W["grammar_asked_2"]
    return [
        Turn(
            "grammar",
            draw.ask(asked, x=x),
            draw.say(("The past of {x} is {y}.", "Today I {x}, yesterday I {y}."), x=x, y=y),
            (y,),
        )
    ]


def sorts(draw: Draw) -> list[Turn]:
    """What kind of thing something is, examples of a kind, and the odd one out."""
    kinds = sorted(tables.KINDS)
    what = draw.of(kinds)
    members = tables.KINDS[what]
    kind = draw.rng.randrange(4)
    name = what.split(" ", 1)[1]
    if kind == 0:
        x, right = draw.of(members), draw.chance(0.5)
        other = (
            what if right else draw.of([k for k in kinds if x not in tables.KINDS[k] and k != "a thing that you ride in"])
        )
        proper = x[0].isupper() or what in ("a colour", "a drink", "a metal")
        thing = x if proper else article(x)
        asked = W["sorts_asked"]
        said = f"Yes, {thing} is {what}." if right else f"No, {thing} is not {other}. It is {what}."
        return [Turn("yes or no", draw.ask(asked, x=thing, k=other), said, ("yes" if right else "no",))]
    if kind == 1:
        count = draw.of((1, 2, 3, 3, 4, 5))
        chosen = draw.some(members, count)
        number = "" if count == 1 else tables.NUMBERS[count] + " "
        plural = {
            "a piece of furniture": "pieces of furniture",
            "a piece of clothing": "pieces of clothing",
            "a thing that you ride in": "things that you ride in",
            "a day of the week": "days of the week",
        }.get(what, name + "s")
        asked = W["sorts_asked_2"]
        text = draw.ask(asked, k=what if count == 1 else number + plural)
        return [Turn("examples", text, capital(listed(chosen)) + ".", ("|".join(members),))]
    if kind == 2:
        x = draw.of(members)
        proper = x[0].isupper() or what in ("a colour", "a drink", "a metal")
        asked = W["sorts_asked_3"]
        thing = x if proper else article(x)
        first = next(k for k in tables.KINDS if x in tables.KINDS[k])
        return [Turn("examples", draw.ask(asked, x=thing), capital(f"{thing} is {first}."), (first.split()[-1],))]
    other = draw.of([k for k in kinds if k != what and not set(tables.KINDS[k]) & set(members)])
    odd = draw.of(tables.KINDS[other])
    row = [*draw.some([m for m in members if m != odd], 3), odd]
    draw.rng.shuffle(row)
    asked = W["sorts_asked_4"]
    return [
        Turn(
            "odd one out",
            draw.ask(asked, r=", ".join(row)),
            f"{capital(odd)} does not belong: the others are {name}s."
            if " " not in name
            else f"{capital(odd)} does not belong.",
            (odd, *(f"!{m}" for m in row if m != odd)),
        )
    ]


def rhymes(draw: Draw) -> list[Turn]:
    row = draw.of(tables.RHYMES)
    x, y = draw.some(row, 2)
    asked = W["rhymes_asked"]
    return [
        Turn(
            "rhymes",
            draw.ask(asked, x=x),
            draw.say(("{y} rhymes with {x}.", "{x} rhymes with {y}."), x=x, y=y).capitalize(),
            ("|".join(w for w in row if w != x),),
        )
    ]
