"""Short stories on request, with chosen words: someone, a place, a want, a trouble, a helper, an end."""

from __future__ import annotations

from tools.chat import tables
from tools.chat.draw import Draw
from tools.chat.reading import BOYS, GIRLS
from tools.chat.turn import Turn, article, capital
from tools.chat.wordings import wordings

W = wordings("stories")

_BEINGS = tables.words(
    "fox bear wolf mouse cat dog hen goose frog owl rabbit lion tiger horse donkey goat pig duck squirrel hedgehog dragon giant dwarf witch fairy king queen prince princess knight miller farmer sailor fisherman shoemaker tailor boy girl robot ghost baker shepherd old-man whale crow bee ant elephant monkey penguin turtle snail unicorn mermaid pirate wizard"
)
_THINGS = tables.words(
    "key ring lamp book bell boat kite candle crown coin apple cake flower mirror hat box map drum stone feather ladder basket lantern rose clock letter ball umbrella star egg pearl spoon blanket bridge door well tree cloud moon river song shoe"
)
_TRAITS = tables.words(
    "little old young poor clever lazy brave kind proud shy hungry cheerful lonely curious quiet merry foolish"
)
_PLACES = W["places"]
_WEATHER = W["weather"]
_HELPERS = W["helpers"]
_LOST = W["lost"]
_WHERE = W["where"]
_ASKS = W["asks"]
_THERE = (
    ("under the old bridge", "to the old bridge"),
    ("behind the big stone", "to the big stone"),
    ("in the hollow tree", "to the hollow tree"),
    ("beside the well", "to the well"),
    ("on top of the hill", "to the hill"),
    ("in the tall tower", "to the tall tower"),
    ("at the bottom of the garden", "to the garden"),
)
_ENDS = W["ends"]


def _hero(draw: Draw, being: str) -> tuple[str, str]:
    """How the being is called in the story (with its article), and its pronoun."""
    name = being.replace("-", " ")
    if being in ("queen", "princess", "girl", "witch", "fairy", "mermaid", "hen"):
        return name, "she"
    if being in W["hero"]:
        return name, "he"
    return name, draw.of(("he", "she", "it"))


def _tale(draw: Draw, being: str, thing: str, other: str | None, name: str | None, short: bool) -> str:
    noun, he = _hero(draw, being)
    his = {"he": "his", "she": "her", "it": "its"}[he]
    trait = draw.of([t for t in _TRAITS if not (t == "old" and noun.startswith("old"))])
    place = draw.of(_PLACES)
    helper = article(other.replace("-", " ")) if other else draw.of(_HELPERS)
    hero = name or f"the {noun}"
    there, there_to = draw.of(_THERE)
    big = thing in ("well", "tree", "cloud", "moon", "river", "bridge", "door", "star")
    called = f" called {name}" if name else ""
    opening = draw.of(W["tale_of"]).format(a=article(trait), A=capital(article(trait)), n=noun, c=called, p=place)
    fields = {
        "he": he,
        "his": his,
        "hero": hero,
        "hero_cap": capital(hero),
        "helper": "the " + helper.split(" ", 1)[1],
        "thing_the": f"the {thing}" if big else f"{his} {thing}",
        "my_thing": f"my {thing}",
        "there": there,
        "there_to": there_to,
        "where": draw.of(_WHERE),
        "place_noun": draw.of(("the sea", "the stars", "the forest", "home", "a warm fire")),
    }
    fields["helper_cap"] = capital(fields["helper"])
    if big:
        middle = draw.of(
            (
                f"What {he} wanted most of all was to see the {thing} from far away.",
                f"Every day {he} looked at the {thing} and wondered who had made it.",
                f"{capital(he)} believed that the {thing} could hear every word.",
                f"Near the house was {article(thing) if thing != 'moon' else 'a pond, and in it the moon'}, and {he} was afraid of it.",
            )
        )
        trouble = draw.of(
            (
                f"{draw.of(_WEATHER)} {hero} set out to find the end of the road.",
                f"{draw.of(_WEATHER)} {hero} heard a voice near the {thing}.",
                f"{draw.of(_WEATHER)} a storm came, and {hero} could not find the way home.",
            )
        )
        found = draw.of(
            (
                f"There {he} sat down by the {thing} and was not afraid any more.",
                f"And there was the {thing}, bright and still.",
                f"Together they found the way, and the {thing} seemed to smile.",
            )
        )
    else:
        middle = draw.of(
            (
                f"{capital(he)} had {article(thing)} that was dearer to {'him' if he == 'he' else 'her' if he == 'she' else 'it'} than anything else.",
                f"{capital(he)} owned nothing but {article(thing)}.",
                f"Every day {he} carried {article(thing)} about, and nobody knew why.",
                f"{capital(his)} grandmother had left {'him' if he == 'he' else 'her' if he == 'she' else 'it'} {article(thing)}.",
            )
        )
        trouble = f"{draw.of(_WEATHER)} {hero} {draw.of(_LOST).format(**fields)}."
        found = draw.of(
            (
                f"And there it was: the {thing}, as good as new.",
                f"There {he} found the {thing} and jumped for joy.",
                f"There lay the {thing}, and {hero} took it home.",
            )
        )
    meets = draw.of(
        (
            f"Then {helper} came along the road.",
            f"On the way {he} met {helper}.",
            f"{capital(he)} walked a long time and met {helper}.",
            f"Then {he} heard {helper}.",
        )
    )
    ask = draw.of(_ASKS).format(**fields)
    end = draw.of(_ENDS).format(**fields)
    parts = [opening, middle, trouble, meets, ask, found, end]
    if short:
        parts = (
            [opening, trouble, f"But {helper} helped, and all was well."] if draw.chance(0.5) else [opening, middle, end]
        )
    return " ".join(parts)


_ASKED = W["asked"]
_ASKED_ONE = W["asked_one"]
_ASKED_ANY = W["asked_any"]
_SHORTER = W["shorter"]
_AGAIN = W["again"]


def stories(draw: Draw) -> list[Turn]:
    being, other = draw.some(_BEINGS, 2)
    thing = draw.of(_THINGS)
    noun = being.replace("-", " ")
    kind = draw.rng.random()
    name = None
    if kind < 0.45:
        asked, wanted = (
            draw.ask(_ASKED, b=article(noun), t=article(thing) if thing != "moon" else "the moon"),
            (f"{noun}", thing),
        )
        helper = None
    elif kind < 0.6:
        asked, wanted = (
            draw.ask(_ASKED, b=article(noun), t=article(other.replace("-", " "))),
            (noun, other.replace("-", " ")),
        )
        helper = other
    elif kind < 0.72:
        name = draw.of((*GIRLS, *BOYS))
        being = "girl" if name in GIRLS else "boy"
        asked, wanted, helper = (
            draw.ask(_ASKED_ONE, b=draw.of((f"{name}", f"{article(being)} called {name}"))),
            (name,),
            None,
        )
    elif kind < 0.9:
        asked, wanted, helper = draw.ask(_ASKED_ONE, b=article(noun)), (noun,), None
    else:
        asked, wanted, helper = draw.ask(_ASKED_ANY), (), None
    turns = [Turn("stories", asked, _tale(draw, being, thing, helper, name, False), wanted)]
    more = draw.rng.random()
    hero, _ = _hero(draw, being)
    if more < 0.12:
        turns.append(Turn("follow-up", draw.ask(_SHORTER), _tale(draw, being, thing, helper, name, True), wanted[:1]))
    elif more < 0.22:
        turns.append(
            Turn("follow-up", draw.ask(_AGAIN), _tale(draw, draw.of(_BEINGS), draw.of(_THINGS), None, None, False))
        )
    elif more < 0.32:
        question = W["stories_question"]
        turns.append(Turn("follow-up", draw.ask(question), f"It was about {name or article(hero)}.", (name or hero,)))
    elif more < 0.4:
        turns.append(Turn("thanks", draw.ask(W["stories_asked"]), draw.say(W["stories_said"])))
    return turns
