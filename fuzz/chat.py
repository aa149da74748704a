"""Chat templates with changed bytes, or put together at random, and any messages: only our errors may come out, in time.

    python -m fuzz.chat [--seconds 60] [--seed 0]

With the built-in templates as they are: a message has no influence on which control tokens a chat has, whatever it says.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

from hypothesis import strategies as st

from fuzz.running import arguments, examples, rounds
from fuzz.tokenizer import texts
from quarrel.errors import QuarrelError
from quarrel.tokenizer import BUILTIN_TEMPLATES, Tokenizer, load_tokenizer
from quarrel.tokenizer.chat import ROLES
from tests.tokenizer.synthetic import bpe_metadata, spm_metadata

SECONDS = 25.0
"""A worker that must be stopped and started anew, on a busy machine; an ordinary rendering takes 2 ms."""
Chat = list[dict[str, Any]]

EXPRESSIONS = (
    "messages",
    "messages[0].content",
    "messages | length",
    "message.content | trim",
    "loop.index0",
    "bos_token",
    "range(99999)",
    "10 ** 9",
    "'a' * 10 ** 9",
    "messages | tojson",
    "cycler('a').next",
    "''.__class__",
    "namespace(x=1)",
    "tools",
    "undefined_name",
    "undefined_name.x",
    "-messages",
    "messages | map(attribute='role') | join",
    "'<|im_start|>'",
    "strftime_now('%Y')",
    "raise_exception('no')",
    "messages[-1]['content'][::-1]",
    "messages | selectattr('role', 'equalto', 'user') | list",
    "[messages] * 999",
    "dict(a=1)",
    "self",
    "loop.last",
)
TAGS = (
    "{% for message in messages %}",
    "{% endfor %}",
    "{% if messages %}",
    "{% else %}",
    "{% endif %}",
    "{%- set x = messages[1:] -%}",
    "{% macro m(n) %}",
    "{{ m(1) }}",
    "{% endmacro %}",
    "{% break %}",
    "{% generation %}",
    "{% include 'x' %}",
    "{% filter upper %}",
    "{% endfilter %}",
    "{# note #}",
    "{% raw %}",
    "{% endraw %}",
)


@st.composite
def templates(draw: st.DrawFn) -> str:
    """A built-in template with a few edits, or (one in three) pieces of Jinja in any order."""
    if draw(st.integers(0, 2)) == 2:
        expression = st.sampled_from(EXPRESSIONS).map(lambda e: "{{ " + e + " }}")
        return "".join(draw(st.lists(expression | st.sampled_from(TAGS) | texts(), max_size=10)))
    text = BUILTIN_TEMPLATES[draw(st.sampled_from(sorted(BUILTIN_TEMPLATES)))]
    for _ in range(draw(st.integers(0, 3))):
        at, size = draw(st.integers(0, len(text))), draw(st.integers(0, 12))
        new = draw(st.sampled_from(EXPRESSIONS) | st.sampled_from(TAGS) | st.text(max_size=4) | st.just(text[at : at + 40]))
        text = text[:at] + new + text[at + size :]
    return text


def chats() -> Any:
    """Messages as a careless or hostile caller sends them."""
    loose = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | texts(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
        max_leaves=6,
    )
    content = st.integers(0, 5).flatmap(lambda n: loose if n == 5 else texts())
    role = st.integers(0, 19).flatmap(lambda n: st.text(max_size=6) if n == 19 else st.sampled_from(ROLES))
    message = st.fixed_dictionaries({"role": role, "content": content}, optional={"tool_calls": loose, "name": loose})
    return st.lists(message, min_size=1, max_size=4)


@cache
def tokenizers() -> tuple[Tokenizer, ...]:
    """Both with every control token that the built-in templates write."""
    return load_tokenizer(bpe_metadata()), load_tokenizer(spm_metadata())


def check_any(drawn: tuple[str, Chat, bool]) -> bool:
    """Whether it was rendered."""
    template, messages, prompt = drawn
    start = time.monotonic()
    try:
        tokenizer = tokenizers()[0]
        # The first tag alone makes any text a template and not a template's name.
        ids = tokenizer.apply_chat(messages, template="{% set _ = 1 %}" + template, add_generation_prompt=prompt)
        assert all(0 <= id < tokenizer.n_vocab for id in ids), "an id outside the vocabulary"
        return True
    except QuarrelError as error:
        assert str(error)
        return False
    finally:
        taken = time.monotonic() - start
        assert taken <= SECONDS, f"{taken:.1f} s"


def check_builtin(drawn: tuple[str, list[str], list[str]]) -> None:
    """Two chats that differ in what the messages say have the same control tokens."""
    name, some, others = drawn
    roles = ["user", "assistant"] * len(some)
    for tokenizer in tokenizers():
        found = []
        for contents in (some, others):
            chat = [{"role": role, "content": f"x{text}x"} for role, text in zip(roles, contents)]
            try:
                ids = tokenizer.apply_chat(chat, template=name)
            except QuarrelError:
                return
            found.append([id for id in ids if tokenizer.is_control(id) and id != tokenizer.unk_id])
        assert found[0] == found[1], f"{name}: control tokens out of a message"


def fuzz(count: int, number: int) -> tuple[int, int]:
    """`count` chats by changed templates and as many by built-in ones: how many of the former were refused or rendered."""
    counts = [0, 0]

    def one(drawn: tuple[str, Chat, bool]) -> None:
        counts[check_any(drawn)] += 1

    examples(st.tuples(templates(), chats(), st.booleans()), count, number, one)
    pairs = st.integers(1, 3).flatmap(lambda n: st.tuples(*[st.lists(texts(), min_size=n, max_size=n)] * 2))
    named = st.tuples(st.sampled_from(sorted(BUILTIN_TEMPLATES)), pairs).map(lambda d: (d[0], *d[1]))
    examples(named, count, number, check_builtin)
    return counts[0], counts[1]


def main(given: Sequence[str] | None = None) -> int:
    """Command line."""
    args = arguments(__doc__).parse_args(given)
    total = [0, 0]

    def one(number: int) -> None:
        for i, n in enumerate(fuzz(200, number)):
            total[i] += n

    count = rounds(args.seconds, args.seed, one)
    seeds = f"seeds {args.seed} to {args.seed + count - 1}"
    print(f"{sum(total)} changed templates and as many sound ones, {seeds}: {total[0]} refused, {total[1]} rendered")
    return 0


if __name__ == "__main__":
    sys.exit(main())
