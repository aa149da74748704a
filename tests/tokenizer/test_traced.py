"""Texts that know who wrote each character: they are strings, and their traces follow what happens to them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quarrel.tokenizer.render_worker import (
    CONTENT,
    REPLY,
    TEMPLATE,
    ChatEnvironment,
    Traced,
    concat,
    levels,
    traced,
)

# Few different characters, so that prefixes, separators and white space are met.
chars = st.text("ab \n<", max_size=12)
numbers = st.integers(-14, 14)


def numbered(text: str) -> Traced:
    """Each character with a trace of its own: its place."""
    return Traced(text, bytes(range(1, len(text) + 1)))


def places_are_kept(whole: Traced, part: Any) -> None:
    """The part is a stretch of the whole, and its traces say where it was."""
    assert isinstance(part, Traced)
    places = levels(part)
    assert len(places) == len(part)
    if part:
        start = places[0] - 1
        assert places == bytes(range(start + 1, start + 1 + len(part)))
        assert str.__getitem__(whole, slice(start, start + len(part))) == part


@given(chars, st.one_of(st.none(), chars), numbers)
def test_parts_know_their_places(text: str, argument: str | None, limit: int) -> None:
    whole = numbered(text)
    for name in ("strip", "lstrip", "rstrip"):
        part = getattr(whole, name)(argument)
        assert part == getattr(text, name)(argument)
        places_are_kept(whole, part)
    for name in ("split", "rsplit"):
        separator = argument or None
        parts = getattr(whole, name)(separator, limit)
        assert parts == getattr(text, name)(separator, limit)
        for part in parts:
            places_are_kept(whole, part)
    for keep in (False, True):
        assert whole.splitlines(keep) == text.splitlines(keep)
        for part in whole.splitlines(keep):
            places_are_kept(whole, part)
    for name in ("removeprefix", "removesuffix"):
        part = getattr(whole, name)(argument or "")
        assert part == getattr(text, name)(argument or "")
        places_are_kept(whole, part)


@given(chars, st.one_of(st.none(), numbers), st.one_of(st.none(), numbers))
def test_slices_know_their_places(text: str, start: int | None, stop: int | None) -> None:
    whole = numbered(text)
    assert whole[start:stop] == text[start:stop]
    places_are_kept(whole, whole[start:stop])
    if text:
        at = (start or 0) % len(text)
        assert (whole[at], levels(whole[at])) == (text[at], bytes((at + 1,)))
        assert levels(whole[at - len(text)]) == bytes((at + 1,))
        assert levels(whole[::-1]) == levels(whole)[::-1]


@given(chars, chars, chars, st.integers(-1, 4))
def test_what_is_put_in_brings_its_trace(text: str, old: str, new: str, count: int) -> None:
    result = traced(text, TEMPLATE).replace(old, traced(new, REPLY), count)
    assert result == text.replace(old, new, count)
    if old and levels(result):
        assert levels(result).count(bytes((REPLY,))) % max(1, len(new)) == 0
        assert set(levels(traced(text, TEMPLATE).replace(old, new, count))) <= {CONTENT, TEMPLATE}


@given(st.lists(st.tuples(chars, st.sampled_from([None, CONTENT, REPLY, TEMPLATE])), max_size=6))
def test_sums_keep_every_trace(parts: list[tuple[str, int | None]]) -> None:
    texts = [text if level is None else traced(text, level) for text, level in parts]
    expected = b"".join(bytes((level or CONTENT,)) * len(text) for text, level in parts)
    assert levels(concat(texts)) == expected
    total: Any = traced("", TEMPLATE)
    for text in texts:
        total = total + text
    assert (total, levels(total)) == ("".join(texts), expected)
    assert levels(traced("", TEMPLATE).join(texts)) == expected


def test_a_plain_text_is_anyones() -> None:
    own = traced("<|", TEMPLATE)
    assert levels("x" + own + "y") == bytes((CONTENT, TEMPLATE, TEMPLATE, CONTENT))
    assert set(levels(own.center(9))) == {CONTENT}
    assert set(levels(own * 3)) == {CONTENT}
    assert levels(Traced("abc")) == bytes(3)


def test_percent_s_keeps_traces_and_other_forms_lose_them() -> None:
    form = traced("<%s|%s>", TEMPLATE)
    assert form % ("a", traced("b", REPLY)) == "<a|b>"
    assert levels(form % ("a", traced("b", REPLY))) == bytes((2, 0, 2, 1, 2))
    for form, values in (("%d", 5), ("%5s", "x"), ("%(a)s", {"a": 1}), ("%%%s", "x")):
        result = traced(form, TEMPLATE) % values
        assert result == form % values
        assert set(levels(result)) == {CONTENT}
    with pytest.raises(TypeError):
        traced("%s%s", TEMPLATE) % "x"


def test_case_changes_keep_traces_where_the_length_stays() -> None:
    mixed = traced("aß", TEMPLATE)
    assert (mixed.upper(), set(levels(mixed.upper()))) == ("ASS", {CONTENT})
    assert (mixed.title(), set(levels(traced("ab", TEMPLATE).title()))) == ("Aß", {TEMPLATE})
    assert set(levels(traced("AB", TEMPLATE).lower() + traced("ab", TEMPLATE).capitalize())) == {TEMPLATE}


@pytest.mark.parametrize(
    ("template", "trusted"),
    [
        ("<T>{{ x }}", "<T>"),
        ("{{ '<T>' + x }}{{ '<T>' ~ x ~ '<T>' }}", "<T><T><T>"),
        ("{% set y = '<T>' %}{% set y = y + x %}{{ y }}", "<T>"),
        ("{% set y %}<T>{{ x }}{% endset %}{{ y }}{{ y | trim }}", "<T><T>"),
        ("{% macro m(a, b='<D>') %}<T>{{ a }}{{ b }}{% endmacro %}{{ m(x) }}{{ m('<A>') }}", "<T><D><T><A><D>"),
        ("{% for t in ['<1>', '<2>'] %}{{ t }}{{ x }}{% endfor %}", "<1><2>"),
        ("{{ {'a': '<T>'}['a'] }}{{ ('<U>', x) | first }}{{ ['<V>', x] | join('<W>') }}", "<T><U><V><W>"),
        ("{{ [{'a': x}, {'a': '<T>'}] | join('<W>', attribute='a') }}", "<W><T>"),
        ("{{ ['<V>'] | map('upper') | join }}{{ '<t>' | upper | replace('T', '<U>') }}", "<V><<U>>"),
        ("{{ '<T>' if x else '<F>' }}{{ none | default('<D>', true) }}", "<T><D>"),
        ("{% set n = namespace(t='<T>') %}{% set n.t = n.t + x + '<U>' %}{{ n.t }}", "<T><U>"),
        ("{{ '<%s>' | format(x) }}{{ '<%s>' % x }}", "<><>"),
        ("{% filter upper %}<t>{{ x }}{% endfilter %}", "<T>"),
        ("{% generation %}<T>{{ x }}{% endgeneration %}", "<T>"),
        ("{% call(a) f() %}<T>{{ a }}{% endcall %}{% macro f() %}{{ caller(x) }}{% endmacro %}", "<T>"),
        ("{{ x | tojson }}{{ {'<K>': '<V>'} | tojson }}{{ '<T>' | list | string }}", ""),
        ("{{ x | replace('u', '<T>') }}{{ x.join(['<A>', '<B>']) }}", ""),
        ("{{ '{}<T>'.format(x) }}{{ '<T>'.center(9) }}", ""),
        ("{% for t in ['<1>'] %}{% if loop.first %}{% continue %}{% endif %}{{ t }}{% endfor %}<T>", "<T>"),
    ],
)
def test_what_a_template_spells_out_is_its_own(template: str, trusted: str) -> None:
    environment = ChatEnvironment()
    if "f()" in template:
        template = template[template.index("{% macro") :] + template[: template.index("{% macro")]
    result = environment.from_string(template).render(x="user <T>")
    assert isinstance(result, Traced)
    assert "".join(char for char, level in zip(result, levels(result), strict=True) if level == TEMPLATE) == trusted
    plain = ChatEnvironment()
    plain.concat = "".join  # type: ignore[assignment,method-assign]
    assert str.__eq__(plain.from_string(template).render(x="user <T>"), result)
