"""Short texts about made-up people: questions on them, sums of them, one sentence rewritten."""

from __future__ import annotations

from dataclasses import dataclass

from tools.chat import tables
from tools.chat.draw import Draw
from tools.chat.turn import Turn, article, capital, listed
from tools.chat.wordings import wordings

W = wordings("reading")

GIRLS = tables.words(
    "Anna Clara Emma Grace Ida Kate Mary Nora Rosa Una Vera Alice Lucy Jane Ella Mia Ruth Tina Zoe Bella Dora Fiona Hanna Julia Lena Petra Sara Maria Elena Lily Sofia Aisha Mei Chloe Linda Susan Helen Laura"
)
BOYS = tables.words(
    "Ben David Frank Henry Jack Leo Oscar Paul Sam Tom Will Peter John Max Hugo Noah Simon Victor Walter Adam Carl Eric George Ivan Karl Martin Otto Robert Theo Omar Luis Ali Kofi Pablo Marco James Kevin Harry Arthur"
)
_PETS = tables.words("dog cat rabbit horse goat parrot mouse duck pony hen turtle hamster pig goose donkey lamb")
_OBJECTS = tables.words(
    "kite ball hat coat bag boat bicycle drum book lamp scarf cup umbrella box car key candle ring basket shirt"
)
_COLOURS = tables.words("red blue green yellow black white brown orange purple grey pink")
_PLACES = W["places"]
_JOBS = tables.words(
    "baker farmer doctor teacher sailor tailor miller painter nurse shoemaker carpenter gardener fisherman cook writer"
)
_FOODS = tables.words(
    "apples cake bread cheese soup cherries rice honey eggs fish pears noodles pancakes plums nuts carrots"
)
_TIMES = W["times"]
_ACTS = (
    ("goes to the market", "go to the market"),
    ("reads a book", "read a book"),
    ("swims in the lake", "swim in the lake"),
    ("plays the piano", "play the piano"),
    ("visits the old aunt", "visit the old aunt"),
    ("bakes bread", "bake bread"),
    ("works in the garden", "work in the garden"),
    ("feeds the birds", "feed the birds"),
    ("rides to town", "ride to town"),
    ("writes letters", "write letters"),
    ("paints pictures", "paint pictures"),
    ("sings in the choir", "sing in the choir"),
    ("walks in the woods", "walk in the woods"),
    ("goes fishing", "go fishing"),
)


@dataclass(frozen=True)
class Fact:
    """One sentence, and what can be asked about it: (question, answer, wanted); a false question has "no"."""

    text: str
    asked: tuple[tuple[str, str, tuple[str, ...]], ...]
    false: tuple[tuple[str, str, tuple[str, ...]], ...]


def _person(draw: Draw) -> tuple[str, str, str]:
    girl = draw.chance(0.5)
    return (draw.of(GIRLS), "She", "her") if girl else (draw.of(BOYS), "He", "his")


def _facts(draw: Draw, name: str, he: str, his: str, friend: str) -> list[Fact]:
    low = he.lower()
    colour, wrong = draw.some(_COLOURS, 2)
    thing, no_thing = draw.some(_OBJECTS, 2)
    pet, no_pet = draw.some(_PETS, 2)
    petname, job, food, place, time = draw.of(W["facts_of"]), "", "", "", ""
    job, no_job = draw.some(_JOBS, 2)
    food, no_food = draw.some(_FOODS, 2)
    place, no_place = draw.some(_PLACES, 2)
    (act, act_base), (_, no_act) = draw.some(_ACTS, 2)
    time, no_time = draw.some(_TIMES, 2)
    age = draw.rng.randint(4, 90)
    n = name
    rel = draw.of(("sister" if friend in GIRLS else "brother", "friend", "cousin", "neighbour", "teacher"))
    return [
        Fact(
            f"{n} has {article(colour)} {thing}.",
            (
                (f"What colour is the {thing}?", f"The {thing} is {colour}.", (colour,)),
                (f"What does {n} have?", f"{n} has {article(colour)} {thing}.", (thing,)),
                (f"Does {n} have {article(thing)}?", f"Yes, {n} has {article(colour)} {thing}.", ("yes",)),
                (f"Who has {article(thing)}?", f"{n} has {article(thing)}.", (n,)),
                (f"Is the {thing} {colour}?", f"Yes, the {thing} is {colour}.", ("yes",)),
            ),
            (
                (f"Is the {thing} {wrong}?", f"No, the {thing} is {colour}.", ("no", colour)),
                (
                    f"Does {n} have {article(no_thing)}?",
                    f"The text does not say so. {n} has {article(colour)} {thing}.",
                    ("no|not",),
                ),
            ),
        ),
        Fact(
            f"{he} lives {place}.",
            (
                (f"Where does {n} live?", f"{n} lives {place}.", (place,)),
                (f"Does {n} live {place}?", f"Yes, {n} lives {place}.", ("yes",)),
                (f"Who lives {place}?", f"{n} lives {place}.", (n,)),
            ),
            ((f"Does {n} live {no_place}?", f"No, {n} lives {place}.", ("no", place)),),
        ),
        Fact(
            f"{he} has {article(pet)} called {petname}.",
            (
                (f"What is the {pet} called?", f"The {pet} is called {petname}.", (petname,)),
                (f"Which animal does {n} have?", f"{n} has {article(pet)}.", (pet,)),
                (f"Who is {petname}?", f"{petname} is the {pet} of {n}.", (pet,)),
                (f"Does {n} have {article(pet)}?", f"Yes, {n} has {article(pet)} called {petname}.", ("yes",)),
            ),
            ((f"Does {n} have {article(no_pet)}?", f"No, {n} has {article(pet)}.", ("no", pet)),),
        ),
        Fact(
            f"{capital(his)} father is {article(job)}.",
            (
                (f"What is the father of {n}?", f"The father of {n} is {article(job)}.", (job,)),
                (f"Is the father of {n} {article(job)}?", f"Yes, {his} father is {article(job)}.", ("yes",)),
                (f"Who is {article(job)}?", f"The father of {n} is {article(job)}.", ("father",)),
            ),
            ((f"Is the father of {n} {article(no_job)}?", f"No, {his} father is {article(job)}.", ("no", job)),),
        ),
        Fact(
            f"{he} likes {food}.",
            (
                (f"What does {n} like?", f"{n} likes {food}.", (food,)),
                (f"Does {n} like {food}?", f"Yes, {n} likes {food}.", ("yes",)),
                (f"Who likes {food}?", f"{n} likes {food}.", (n,)),
            ),
            ((f"Does {n} like {no_food}?", f"The text does not say so. {n} likes {food}.", ("no|not",)),),
        ),
        Fact(
            f"{capital(time)} {low} {act}.",
            (
                (f"What does {n} do {time}?", f"{capital(time)} {n} {act}.", (act,)),
                (f"When does {n} {act_base}?", f"{n} {act} {time}.", (time,)),
                (f"Does {n} {act_base} {time}?", f"Yes, {low} {act} {time}.", ("yes",)),
            ),
            (
                (f"Does {n} {no_act} {time}?", f"No, {time} {low} {act}.", ("no", act)),
                (f"Does {n} {act_base} {no_time}?", f"The text says: {time}.", (time,)),
            ),
        ),
        Fact(
            f"{he} is {age} years old.",
            (
                (f"How old is {n}?", f"{n} is {age} years old.", (str(age),)),
                (f"What is the age of {n}?", f"{n} is {age} years old.", (str(age),)),
                (f"Is {n} {age} years old?", f"Yes, {low} is {age} years old.", ("yes",)),
            ),
            ((f"Is {n} {age + draw.rng.randint(1, 9)} years old?", f"No, {low} is {age} years old.", ("no", str(age))),),
        ),
        Fact(
            f"{capital(his)} {rel} is called {friend}.",
            (
                (f"What is the name of {n}'s {rel}?", f"{capital(his)} {rel} is called {friend}.", (friend,)),
                (f"Who is {friend}?", f"{friend} is the {rel} of {n}.", (rel,)),
                (f"Is {friend} the {rel} of {n}?", f"Yes, {friend} is {his} {rel}.", ("yes",)),
            ),
            (
                (
                    f"Is {friend} the {'aunt' if rel != 'aunt' else 'uncle'} of {n}?",
                    f"No, {friend} is {his} {rel}.",
                    ("no", rel),
                ),
            ),
        ),
    ]


def texts(draw: Draw) -> list[Turn]:
    """A text of two to four sentences, and one to three questions on it."""
    name, he, his = _person(draw)
    friend = draw.of([n for n in (*GIRLS, *BOYS) if n != name])
    chosen = draw.some(_facts(draw, name, he, his, friend), draw.of((1, 2, 3, 3, 4, 4, 5)))
    # The first sentence names the person.
    lines = [f.text for f in chosen]
    first = lines[0]
    for word in (he, capital(his), he.lower()):
        if name not in first and f"{word} " in first + " ":
            first = first.replace(f"{word} ", f"{name}'s " if word == capital(his) else f"{name} ", 1)
            break
    lines[0] = first
    text = " ".join(lines)
    shown = W["texts_shown"]
    turns: list[Turn] = []
    asked: set[str] = set()
    for number in range(draw.of((1, 1, 2, 3))):
        fact = draw.of(chosen)
        pick = draw.rng.random()
        if pick < 0.12:
            question, answer, wanted = _unsaid(draw, name, text)
        else:
            question, answer, wanted = draw.of(fact.false if pick < 0.4 else fact.asked)
        if question in asked:
            continue
        asked.add(question)
        yesno = question.split()[0] in ("Is", "Does")
        kind = "reading, yes or no" if yesno else "reading"
        if number == 0:
            turns.append(Turn(kind, draw.ask(shown, t=text, q=question), answer, wanted))
        else:
            again = W["texts_again"]
            turns.append(Turn("follow-up", draw.ask(again, q=question), answer, wanted))
    return turns


def _unsaid(draw: Draw, name: str, text: str) -> tuple[str, str, tuple[str, ...]]:
    row = [
        ("How tall is {n}?", "tall"),
        ("What did {n} eat yesterday?", "eat yesterday"),
        ("Which song does {n} sing best?", "song"),
        ("How much money does {n} have?", "money"),
        ("When was {n} born?", "born"),
        ("What is the weather like?", "weather"),
        ("Which car does {n} drive?", "drive"),
        ("What is the mother of {n}?", "mother"),
        ("What colour are the eyes of {n}?", "eyes"),
    ]
    question, _ = draw.of(row)
    return question.format(n=name), "The text does not say that.", ("not say|does not",)


_SUBJECTS = (
    ("the old man", "he"),
    ("the little girl", "she"),
    ("the farmer", "he"),
    ("the cat", "it"),
    ("the black dog", "it"),
    ("the king", "he"),
    ("the queen", "she"),
    ("my brother", "he"),
    ("my sister", "she"),
    ("the teacher", "she"),
    ("the young sailor", "he"),
    ("the baker", "he"),
    ("the white horse", "it"),
    ("a small bird", "it"),
    ("the tired doctor", "he"),
    ("our neighbour", "she"),
    ("the fox", "it"),
    ("the boy", "he"),
)
# third person, plain form, past
_VERBS = (
    ("eats an apple", "eat an apple", "ate an apple"),
    ("sings a song", "sing a song", "sang a song"),
    ("writes a letter", "write a letter", "wrote a letter"),
    ("finds a key", "find a key", "found a key"),
    ("buys some bread", "buy some bread", "bought some bread"),
    ("sees a ship", "see a ship", "saw a ship"),
    ("loses a shoe", "lose a shoe", "lost a shoe"),
    ("drinks cold water", "drink cold water", "drank cold water"),
    ("opens the door", "open the door", "opened the door"),
    ("reads a book", "read a book", "read a book"),
    ("builds a house", "build a house", "built a house"),
    ("runs home", "run home", "ran home"),
    ("sleeps on the floor", "sleep on the floor", "slept on the floor"),
    ("tells a story", "tell a story", "told a story"),
    ("catches a fish", "catch a fish", "caught a fish"),
    ("carries a bag", "carry a bag", "carried a bag"),
    ("waits for the train", "wait for the train", "waited for the train"),
    ("brings a gift", "bring a gift", "brought a gift"),
    ("breaks a cup", "break a cup", "broke a cup"),
    ("climbs a tree", "climb a tree", "climbed a tree"),
)
_WHEN = W["when"]
_WHERE = W["where"]
_WHY = W["why"]


def rewriting(draw: Draw) -> list[Turn]:
    """Shorter, in the past, as a question, negated, with another word, with the doer changed."""
    subject, _ = draw.of(_SUBJECTS)
    verb, base, past = draw.of(_VERBS)
    when, where, why = draw.of(_WHEN), draw.of(_WHERE), draw.of(_WHY)
    plain = f"{capital(subject)} {verb}."
    kind = draw.rng.randrange(7)
    if kind <= 1:
        tail = draw.of((f" {where} {when}", f" {where} {when}, {why}", f" {when}, {why}", f" {where}, {why}"))
        long = draw.of((f"{capital(subject)} {verb}{tail}.", f"{capital(when)}, {subject} {verb} {where}, {why}."))
        asked = W["rewriting_asked"]
        return [Turn("summaries", draw.ask(asked, s=long), plain, ("=" + plain,))]
    time = draw.of((f" {where}", f" {when}", ""))
    full = f"{capital(subject)} {verb}{time}."
    if kind == 2:
        asked = W["rewriting_asked_2"]
        said = f"{capital(subject)} {past}{time}."
    elif kind == 3:
        asked = W["rewriting_asked_3"]
        said = f"Does {subject} {base}{time}?"
    elif kind == 4:
        asked = W["rewriting_asked_4"]
        said = f"{capital(subject)} does not {base}{time}."
    elif kind == 5:
        other = draw.of([s for s, _ in _SUBJECTS if s != subject])
        asked = W["rewriting_asked_5"]
        said = f"{capital(other)} {verb}{time}."
        return [Turn("rewriting", draw.ask(asked, a=subject, b=other, s=full), said, ("=" + said,))]
    else:
        name = draw.of((*GIRLS, *BOYS))
        asked = W["rewriting_asked_6"]
        return [
            Turn(
                "reading",
                draw.ask(asked, s=f"{name} {verb}{time}."),
                draw.say(("{n} does.", "It is {n}.", "{n}."), n=name),
                (name,),
            )
        ]
    turns = [Turn("rewriting", draw.ask(asked, s=full), said, ("=" + said,))]
    if kind in (2, 4) and draw.chance(0.3):
        asked = W["rewriting_asked_7"]
        turns.append(
            Turn(
                "follow-up",
                draw.ask(asked),
                f"{'Did' if kind == 2 else 'Does'} {subject} {base if kind == 2 else 'not ' + base}{time}?",
                (base,),
            )
        )
    return turns


def lists(draw: Draw) -> list[Turn]:
    """What was bought, packed or invited, and how much of it."""
    row = draw.some(draw.of((_FOODS, _OBJECTS, _PETS, (*GIRLS, *BOYS))), draw.of((3, 4)))
    if row[0][0].isupper():
        text = f"I invited {listed(row)}."
        asked = W["lists_asked"]
        said = f"You invited {listed(row)}."
    else:
        items = [w if w in _FOODS else article(w) for w in row]
        text = f"I bought {listed(items)}."
        asked = W["lists_asked_2"]
        said = f"You bought {listed(items)}."
    turns = [Turn("reading", draw.ask(asked, t=text), said, tuple(row))]
    asked = ("How many is that?", "And how many are they?", "how many did I name?", "Count them.")
    if draw.chance(0.5):
        turns.append(
            Turn(
                "follow-up",
                draw.ask(asked),
                f"That is {tables.NUMBERS[len(row)]}.",
                (f"{tables.NUMBERS[len(row)]}|{len(row)}",),
            )
        )
    return turns
