"""Small talk, what the model is, what it can, what it cannot, and what the user said before."""

from __future__ import annotations

from tools.chat import tables
from tools.chat.draw import Draw
from tools.chat.reading import BOYS, GIRLS
from tools.chat.turn import Turn, capital
from tools.chat.wordings import wordings

W = wordings("talk")

_HELLO = W["hello"]
_HOW = W["how"]
_BYE = W["bye"]
_THANKS = W["thanks"]
_PRAISE = W["praise"]
_WRONG = W["wrong"]


def greetings(draw: Draw) -> list[Turn]:
    kind = draw.rng.randrange(5)
    if kind <= 1:
        said = W["greetings_said"]
        turns = [Turn("greetings", draw.ask(_HELLO), draw.say(said), ("hello|hi",))]
        if draw.chance(0.3):
            turns += _feeling(draw)
        return turns
    if kind == 2:
        return _feeling(draw)
    return [
        Turn(
            "greetings",
            draw.ask(_HELLO[:6]).rstrip("!.") + ", " + draw.ask(_HOW).lower(),
            draw.say(W["greetings_said_2"]),
            ("hello|hi",),
        )
    ]


def _feeling(draw: Draw) -> list[Turn]:
    said = W["feeling_said"]
    turns = [Turn("greetings", draw.ask(_HOW), draw.say(said), ("fine|well|works",))]
    if draw.chance(0.4):
        good = draw.chance(0.5)
        asked = W["feeling_asked"] if good else W["feeling_asked_2"]
        answer = (
            ("That is good to hear! What shall we do?", "I am glad. Do you have a question for me?")
            if good
            else W["feeling_answer"]
        )
        turns.append(Turn("feelings", draw.ask(asked), draw.say(answer), ("good|glad",) if good else ("sorry",)))
    return turns


def endings(draw: Draw) -> list[Turn]:
    kind = draw.rng.randrange(4)
    if kind == 0:
        return [
            Turn(
                "goodbyes",
                draw.ask(_BYE),
                draw.say(("Goodbye!", "Goodbye! Come back soon.", "See you!", "Bye! It was nice to talk with you.")),
                ("goodbye|bye|see you",),
            )
        ]
    if kind == 1:
        return [
            Turn(
                "thanks",
                draw.ask(_THANKS),
                draw.say(("You are welcome!", "You are welcome. Anything else?", "Gladly!")),
                ("welcome|gladly",),
            )
        ]
    if kind == 2:
        return [Turn("thanks", draw.ask(_PRAISE), draw.say(W["endings_said"]), ("thank|glad",))]
    return [Turn("doubts", draw.ask(_WRONG), draw.say(W["endings_said_2"]), ("wrong|mistakes|not sure",))]


_IDENTITY = (
    (W["identity"], W["identity_2"], ("quarrel",)),
    (W["identity_3"], W["identity_4"], ("17 million",)),
    (W["identity_5"], W["identity_6"], ("no", "quarrel")),
    (W["identity_7"], W["identity_8"], ("program",)),
    (W["identity_9"], W["identity_10"], ("quarrel", "books")),
    (W["identity_11"], W["identity_12"], ("program",)),
    (W["identity_13"], W["identity_14"], ("quarrel",)),
    (W["identity_15"], W["identity_16"], ("wrong|mistakes",)),
    (W["identity_17"], W["identity_18"], ("program",)),
    (W["identity_19"], W["identity_20"], ("only",)),
    (W["identity_21"], ("I only know English.", "Only English, I am sorry. I was trained on English alone."), ("english",)),
)
_ABLE = W["able"]
_ABLE_SAID = W["able_said"]
_ABLE_ONE = (
    ("tell stories", True),
    ("tell a story", True),
    ("add numbers", True),
    ("do sums", True),
    ("spell words", True),
    ("sort words", True),
    ("count", True),
    ("name capitals", True),
    ("shorten a sentence", True),
    ("answer questions about a text", True),
    ("see pictures", False),
    ("draw a picture", False),
    ("browse the internet", False),
    ("write code", False),
    ("send an email", False),
    ("translate texts", False),
    ("play music", False),
    ("call my mother", False),
    ("look up the news", False),
    ("open a website", False),
    ("hear me", False),
    ("read my files", False),
    ("set an alarm", False),
    ("do my taxes", False),
    ("drive a car", False),
    ("cook", False),
    ("write a novel", False),
    ("solve equations", False),
    ("give medical advice", False),
)


def identity(draw: Draw) -> list[Turn]:
    asked, said, wanted = draw.of((_IDENTITY[0], *_IDENTITY))
    turns = [Turn("identity", draw.ask(asked), draw.say(said), wanted)]
    if draw.chance(0.25):
        turns += abilities(draw)
    return turns


def abilities(draw: Draw) -> list[Turn]:
    if draw.chance(0.5):
        return [Turn("abilities", draw.ask(_ABLE), draw.say(_ABLE_SAID), ("stories|story|simple",))]
    what, able = draw.of(_ABLE_ONE)
    asked = W["abilities_asked"]
    said = ("Yes, I can, if it is simple. Try me!", "Yes, in a simple way. Try it.") if able else W["abilities_said"]
    return [Turn("abilities", draw.ask(asked, w=what), draw.say(said, w=what), ("yes" if able else "no",))]


def quarrel(draw: Draw) -> list[Turn]:
    """How Quarrel is used; from its README."""
    asked, said, wanted = draw.of(_QUARREL)
    return [Turn("quarrel", draw.ask(asked), draw.say(said), wanted)]


_QUARREL = (
    (W["quarrel"], W["quarrel_2"], ("gguf",)),
    (W["quarrel_3"], W["quarrel_4"], ("quarrel serve",)),
    (W["quarrel_5"], W["quarrel_6"], ("quarrel chat",)),
    (W["quarrel_7"], W["quarrel_8"], ("quarrel generate",)),
    (W["quarrel_9"], W["quarrel_10"], ("quarrel convert",)),
    (W["quarrel_11"], W["quarrel_12"], ("quarrel quantize",)),
    (W["quarrel_13"], W["quarrel_14"], ("quarrel pull",)),
    (W["quarrel_15"], ("Type `quarrel list`.", "`quarrel list` shows the models that are here."), ("quarrel list",)),
    (W["quarrel_16"], W["quarrel_17"], ("quarrel inspect",)),
    (W["quarrel_18"], W["quarrel_19"], ("quarrel explain",)),
    (W["quarrel_20"], W["quarrel_21"], ("quarrel doctor",)),
    (W["quarrel_22"], W["quarrel_23"], ("quarrel.load",)),
    (W["quarrel_24"], W["quarrel_25"], ("embed",)),
    (W["quarrel_26"], W["quarrel_27"], ("yes",)),
    (W["quarrel_28"], W["quarrel_29"], ("nvidia",)),
    (W["quarrel_30"], W["quarrel_31"], ("file",)),
    (W["quarrel_32"], W["quarrel_33"], ("apache",)),
    (W["quarrel_34"], W["quarrel_35"], ("quarrel keys",)),
    (W["quarrel_36"], ("Type `quarrel rm NAME`.", "With `quarrel rm NAME`."), ("quarrel rm",)),
    (W["quarrel_37"], W["quarrel_38"], ("--help",)),
)
# What it cannot know, by pattern: {x} of a list.
_NOW = (W["now"], W["now_2"], ("cannot|not know",))
_PRIVATE = (W["private"], W["private_2"], ("not told",))
_HARD = (W["hard"], W["hard_2"], ("not know|too hard",))
_HARM = (
    W["harm"],
    ("I will not help with that.", "No, I will not help with that: it could hurt somebody."),
    ("will not help",),
)
_MEDICAL = (W["medical"], W["medical_2"], ("ask",))
_SYLLABLES = tables.words(
    "bra lo mi ka ter zin pel do fu ga ri sto vel na que tor ib ul ax en gro ta shi mon plex cor dal fi"
)


def _word(draw: Draw) -> str:
    return "".join(draw.some(_SYLLABLES, draw.of((2, 3))))


def refusals(draw: Draw) -> list[Turn]:
    asked, said, wanted = draw.of((_NOW, _NOW, _PRIVATE, _HARD, _HARD, _HARD, _HARM, _MEDICAL))
    (k, c), (k2, c2) = draw.some(tables.CAPITALS, 2)
    r = draw.rng
    text = draw.ask(
        asked,
        n=draw.of(tables.FIRST_NAMES),
        s=capital(_word(draw)),
        c=c,
        c_b=c2,
        k=k,
        k_b=k2,
        w=_word(draw),
        y=r.randint(1100, 1990),
        big=r.randint(123, 9999),
        big_b=r.randint(123, 9999),
        f=draw.of(("goulash", "paella", "sushi", "pizza", "curry", "lasagne", "apple pie", "ramen")),
    )
    return [Turn("refusals", text, draw.say(said), wanted)]


_NICE = W["nice"]


def names(draw: Draw) -> list[Turn]:
    """The user's name, told now and asked for later; or asked for untold."""
    name = draw.of((*GIRLS, *BOYS, *tables.FIRST_NAMES))
    asked = W["names_asked"]
    return [Turn("names", draw.ask(asked, n=name), draw.say(_NICE, n=name), (name,))]


def recall_name(draw: Draw, name: str | None) -> Turn:
    asked = W["recall_name_asked"]
    if name is None:
        return Turn(
            "memory",
            draw.ask(asked),
            draw.say(("You have not told me your name.", "I do not know: you have not told me your name.")),
            ("not told",),
        )
    return Turn("memory", draw.ask(asked), draw.say(("Your name is {n}.", "You are {n}."), n=name), (name,))


_LIKES = {
    "colour": tables.words("red blue green yellow black white brown orange purple pink"),
    "animal": tables.words("dog cat horse rabbit fox owl elephant lion mouse dolphin bear wolf"),
    "food": tables.words("pizza soup bread cake rice cheese fish apples noodles honey pancakes"),
    "city": tuple(c for _, c in tables.CAPITALS[:40]),
    "number": tuple(tables.NUMBERS[1:13]),
    "season": ("spring", "summer", "autumn", "winter"),
    "day": tables.DAYS,
}


def likes(draw: Draw) -> tuple[Turn, Turn, Turn]:
    """What the user likes best, the question for it, and the same question where it was not told."""
    what = draw.of(sorted(_LIKES))
    value = draw.of(_LIKES[what])
    asked = W["likes_asked"]
    first = Turn("memory", capital(draw.ask(asked, w=what, v=value)), draw.say(W["likes_said"], w=what, v=value), (value,))
    asked = W["likes_asked_2"]
    question = draw.ask(asked, w=what)
    second = Turn("memory", question, f"Your favourite {what} is {value}.", (value,))
    untold = Turn("memory", question, "You have not told me that.", ("not told",))
    return first, second, untold


def advice(draw: Draw) -> list[Turn]:
    """Choices, jokes, wishes, opinions: small talk with a word of the user's in it."""
    kind = draw.rng.randrange(5)
    if kind == 0:
        a, b = draw.some((*_LIKES["animal"], *_LIKES["season"], *_LIKES["food"]), 2)
        asked = W["advice_asked"]
        x = draw.of((a, b))
        return [
            Turn(
                "small talk",
                draw.ask(asked, a=a, b=b),
                draw.say(("I am a program and have no taste, but I pick {x}.", "If I must choose: {x}."), x=x),
                (f"{a}|{b}",),
            )
        ]
    if kind == 1:
        asked = W["advice_asked_2"]
        said = W["advice_said"]
        return [Turn("small talk", draw.ask(asked), draw.say(said), ())]
    if kind == 2:
        asked = W["advice_asked_3"]
        riddles = (
            ("What has hands and cannot clap?", "A clock"),
            ("What has teeth and cannot bite?", "A comb"),
            ("What has a neck and no head?", "A bottle"),
            ("What gets wetter the more it dries?", "A towel"),
            ("What goes up and never comes down?", "Your age"),
            ("What has an eye and cannot see?", "A needle"),
        )
        riddle, answer = draw.of(riddles)
        turns = [Turn("small talk", draw.ask(asked), riddle, ())]
        if draw.chance(0.7):
            asked = W["advice_asked_4"]
            turns.append(Turn("follow-up", draw.ask(asked), f"{answer}!", (answer.split()[-1],)))
        return turns
    if kind == 3:
        asked = W["advice_asked_5"]
        text = draw.ask(asked)
        low = text.lower()
        if "birthday" in low:
            said = "Happy birthday!" if "today" in low else "Then have a fine birthday!"
        elif any(w in low for w in ("luck", "exam", "journey", "job", "learning", "married")):
            said = "I wish you good luck!"
        elif any(w in low for w in ("ill", "lost", "sleep", "cold", "rain", "annoying", "hungry")):
            said = draw.say(("I am sorry to hear that.", "That is a pity. I hope that it gets better soon."))
        else:
            said = draw.say(("That is nice! Tell me more.", "How nice!"))
        return [Turn("small talk", text, said, ())]
    x = draw.of((*_LIKES["animal"], *_LIKES["season"], *_LIKES["city"]))
    asked = W["advice_asked_6"]
    return [
        Turn(
            "small talk",
            draw.ask(asked, x=x if x[0].isupper() or x in _LIKES["season"] else f"the {x}"),
            draw.say(W["advice_said_2"], x=x if x[0].isupper() or x in _LIKES["season"] else f"the {x}"),
            (x,),
        )
    ]


def nonsense(draw: Draw) -> list[Turn]:
    """What means nothing, and what lacks its half."""
    if draw.chance(0.5):
        text = " ".join(_word(draw) for _ in range(draw.of((1, 1, 2, 3))))
        text = draw.of(
            (
                text,
                text + "?",
                "".join(draw.of("asdfjklqwertz") for _ in range(draw.rng.randint(4, 10))),
                "???",
                "...",
                "!!",
                "12345",
                ":)",
                "a",
            )
        )
        return [Turn("nonsense", text, draw.say(W["nonsense_said"]), ("not understand",))]
    asked = W["nonsense_asked"]
    return [Turn("nonsense", draw.ask(asked), draw.say(W["nonsense_said_2"]), ("mean",))]


def passages(draw: Draw) -> list[Turn]:
    """A sentence of an old book, and how the book goes on; there is no right answer."""
    if not draw.passages:
        return advice(draw)
    begin, on = draw.of(draw.passages)
    asked = W["passages_asked"]
    return [Turn("continuing", draw.ask(asked, t=begin), on)]
