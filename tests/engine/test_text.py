"""Stop strings are found wherever they fall, and nothing of them is ever shown."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quarrel.engine.text import StopText


class Pieces:
    """Each id is a piece of this text."""

    def __init__(self, pieces: list[str], rest: str = "") -> None:
        self._pieces, self._rest = pieces, rest

    def push(self, id: int) -> str:
        return self._pieces[id]

    def flush(self) -> str:
        return self._rest


def told(pieces: list[str], stops: list[str], rest: str = "") -> tuple[list[str], str | None]:
    text = StopText(Pieces(pieces, rest), stops)
    out = []
    for i in range(len(pieces)):
        out.append(text.push(i))
        if text.stopped_by is not None:
            return out, text.stopped_by
    return [*out, text.flush()], None


def test_without_stops_text_goes_straight_through() -> None:
    assert told(["ab", "", "c"], []) == (["ab", "", "c", ""], None)


def test_a_stop_across_tokens_is_held_back_and_cut() -> None:
    assert told(["Hi", " th", "ere\n", "User", ": x"], ["\nUser:"]) == (["Hi", " th", "ere", "", ""], "\nUser:")


def test_what_only_looked_like_a_stop_is_shown_late() -> None:
    assert told(["a\n", "U", "nit"], ["\nUser:"]) == (["a", "", "\nUnit", ""], None)


def test_the_rest_is_shown_at_the_end() -> None:
    assert told(["a\nUs"], ["\nUser:"], rest="!") == (["a", "\nUs!"], None)


def test_the_earliest_stop_wins_and_the_longest_of_two_at_one_place() -> None:
    assert told(["xxbcab"], ["ab", "bc"])[1] == "bc"
    assert told(["xxabc"], ["ab", "abc"])[1] == "abc"


def test_a_stop_inside_one_token_cuts_the_token() -> None:
    assert told(["before STOP behind"], ["STOP"]) == (["before "], "STOP")


def test_unarmed_stops_are_text() -> None:
    text = StopText(Pieces(["a.", "b.", "c"]), ["."])
    assert [text.push(0, armed=False), text.push(1)] == ["a.", "b"]
    assert text.stopped_by == "."


TEXT = st.text("ab", max_size=30)


@given(st.lists(TEXT, max_size=12), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
def test_any_cut_of_a_text_gives_what_the_whole_text_gives(pieces: list[str], stops: list[str]) -> None:
    whole = "".join(pieces)
    out, stopped_by = told(pieces, stops)
    ends = {stop: whole.find(stop) for stop in stops if stop in whole}
    if not ends:
        assert ("".join(out), stopped_by) == (whole, None)
        return
    # Tokens may show one stop before another that begins earlier but is not whole yet; never a part of the one found.
    assert stopped_by in ends
    shown = "".join(out)
    assert whole.startswith(shown + stopped_by)
    assert not any(stop in shown for stop in stops)


@given(st.lists(TEXT, max_size=12), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
def test_no_more_is_held_back_than_might_become_a_stop(pieces: list[str], stops: list[str]) -> None:
    text = StopText(Pieces(pieces), stops)
    for i in range(len(pieces)):
        text.push(i)
        if text.stopped_by is not None:
            return
        held = text._pending
        assert held == "" or any(stop.startswith(held) for stop in stops)
