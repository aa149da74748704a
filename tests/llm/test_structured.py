"""A text keeps to what it was asked to be, whatever the model would rather say; what cannot be compiled is refused."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

import quarrel
from quarrel.errors import QuarrelError, RequestError

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WORDS = 'start: ("yes" | "no") ("," ("yes" | "no"))*'


@pytest.fixture(name="llm", scope="module")
def _llm() -> Iterator[quarrel.LLM]:
    with quarrel.load("demo", backend="cpu", n_ctx=512) as llm:
        yield llm


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "seed": 5}])
def test_a_schema_is_kept_to(llm: quarrel.LLM, options: dict[str, Any]) -> None:
    for seed in range(3):
        result = llm.generate("Once", structure=quarrel.Structure.json(SCHEMA), **{**options, "seed": seed})
        found = json.loads(result.text)
        assert set(found) == {"name", "age"}
        assert len(found["name"]) <= 8
        assert 0 <= found["age"] <= 99
        assert result.finish_reason == "stop"


def test_a_regular_expression_is_kept_to(llm: quarrel.LLM) -> None:
    pattern = r"[A-Z][a-z]{2,5} (sat|ran) [0-9]{3}"
    for seed in range(5):
        result = llm.generate("The cat", temperature=2, top_k=0, seed=seed, structure=quarrel.Structure.regex(pattern))
        assert re.fullmatch(pattern, result.text)


def test_a_grammar_is_kept_to(llm: quarrel.LLM) -> None:
    result = llm.generate("Well?", temperature=1, seed=1, max_tokens=40, structure=quarrel.Structure.lark(WORDS))
    assert re.fullmatch("(yes|no)(,(yes|no))*,?[yesno]*", result.text)


def test_beside_others_everyone_keeps_his_own(llm: quarrel.LLM) -> None:
    free = llm.generate("The king", temperature=0, max_tokens=20).text
    guided = llm.stream("The king", temperature=0, max_tokens=20, structure=quarrel.Structure.regex("[0-9]{12}"), n=2)
    assert llm.generate("The king", temperature=0, max_tokens=20).text == free
    done = guided.wait()
    assert all(re.fullmatch("[0-9]{12}", r.text) for r in (done, *done.alternatives))
    service = quarrel.Service(speculate=4)
    again = llm.generate(
        "The king", temperature=0, max_tokens=20, structure=quarrel.Structure.regex("[0-9]{12}"), service=service
    )
    assert again.token_ids == done.token_ids


@pytest.mark.parametrize(
    ("structure", "what"),
    [
        (quarrel.Structure.regex("(a"), "cannot be used"),
        (quarrel.Structure.regex("(?=a)b"), "cannot be used"),
        (quarrel.Structure.lark("start: nothing"), "cannot be used"),
        (quarrel.Structure.lark("no grammar at all"), "cannot be used"),
        (quarrel.Structure.lark('root ::= "yes" | "no"'), "this is GBNF"),
        (quarrel.Structure("json", "{"), "cannot be used"),
        (quarrel.Structure.json({"type": "strange"}), "cannot be used"),
        (quarrel.Structure.json({"type": "array", "uniqueItems": True}), "cannot be used"),
        (quarrel.Structure.json({"$ref": "http://example.com/x"}), "cannot be used"),
    ],
)
def test_what_cannot_be_compiled_is_refused(llm: quarrel.LLM, structure: quarrel.Structure, what: str) -> None:
    with pytest.raises(RequestError, match=what):
        llm.generate("x", structure=structure)


@pytest.mark.parametrize(
    "make",
    [
        lambda: quarrel.Structure.regex("(" * 20_000),
        lambda: quarrel.Structure.regex("a" * 70_000),
        lambda: quarrel.Structure.json(json.loads('{"not":' * 200 + "{}" + "}" * 200)),
        lambda: quarrel.Structure.json({"x": object()}),
        lambda: quarrel.Structure.json(float("nan")),  # type: ignore[arg-type]
        lambda: quarrel.Structure.regex(""),
        lambda: quarrel.Structure.regex(5),  # type: ignore[arg-type]
        lambda: quarrel.Structure("xml", "x"),  # type: ignore[arg-type]
    ],
)
def test_what_is_too_large_or_no_text_is_refused(make: Any) -> None:
    with pytest.raises(RequestError):
        make()


def test_costly_structures_end_in_time(llm: quarrel.LLM) -> None:
    hostile = [
        quarrel.Structure.regex("((a{1,100}){1,100}){1,100}"),
        quarrel.Structure.regex("(a?){5000}a{5000}"),
        quarrel.Structure.regex("(x+x+)+y"),
        quarrel.Structure.json({"enum": [f"{i:09d}" for i in range(4000)]}),
        quarrel.Structure.lark("\n".join(["start: r0"] + [f"r{i}: r{i + 1} r{i + 1}" for i in range(30)] + ['r30: "a"'])),
    ]
    for structure in hostile:
        began = time.process_time()
        with contextlib.suppress(RequestError):
            llm.generate("x", max_tokens=2, structure=structure)
        assert time.process_time() - began < 15.0


def test_arguments_are_checked(llm: quarrel.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="exclude each other"):
        llm.generate("x", ignore_eos=True, structure=quarrel.Structure.regex("a"))
    with pytest.raises(RequestError, match="structure is a str"):
        llm.generate("x", structure="a")  # type: ignore[call-overload]
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(QuarrelError, match=r"quarrel\[structured\]"):
        llm.generate("x", structure=quarrel.Structure.regex("never compiled"))


def test_a_grammar_as_llama_cpp_writes_it_is_kept_to(llm: quarrel.LLM) -> None:
    structure = quarrel.Structure.gbnf('root ::= "yes" | no  # or\nno ::= "n" [o]')
    assert llm.generate("Well?", structure=structure, seed=3).text in ("yes", "no")
    for bad in ("", "root ::= (", "x" * 70_000, 'root ::= "\\ud800"'):
        with pytest.raises(RequestError):
            llm.generate("Well?", structure=quarrel.Structure.gbnf(bad))


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (r'"\u00e9\u0042"', "\u00e9B"),
        (r'"\U0001F600"', "\U0001f600"),
        (r"[\u0430-\u0430] [\u005d]", "\u0430]"),
        (r'"\\u0041"', "\\u0041"),
        (r'"\x41" "\u000a"', "A\n"),
    ],
)
def test_characters_of_a_gbnf_grammar_may_be_numbers(llm: quarrel.LLM, grammar: str, said: str) -> None:
    assert llm.generate("Well?", structure=quarrel.Structure.gbnf(f"root ::= {grammar}"), max_tokens=20).text == said


@pytest.mark.parametrize(
    "make",
    [
        lambda: quarrel.Structure.regex("a{1000000}"),
        lambda: quarrel.Structure.regex("((ab){1000}[cd]){1000,}"),
        lambda: quarrel.Structure.regex("a{" + "9" * 5000 + "}"),
        lambda: quarrel.Structure.json({"items": {"type": "string", "pattern": "^(ab){100000}$"}}),
        lambda: quarrel.Structure.json({"type": "object", "patternProperties": {"a{70000}": {}}}),
        lambda: quarrel.Structure.lark("start: /a{100000}/"),
        lambda: quarrel.Structure.gbnf('root ::= "ab"{70000}'),
    ],
)
def test_what_must_be_longer_than_a_structure_may_be_is_refused(make: Any) -> None:
    with pytest.raises(RequestError, match="repeats more than 65536 characters"):
        make()


def test_repeats_that_need_not_be_are_none() -> None:
    for text in ("a{0,1000000}", r"a\{1000000}", "[{]{1000}", "(a{10}){10}[b-d]{100}", "x{70000", ")" * 9 + "a{9}"):
        quarrel.Structure.regex(text)
    quarrel.Structure.json({"properties": {"pattern": {"type": "string", "minLength": 100_000}}})


def test_a_gbnf_grammar_is_read_where_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reader takes seconds for thousands of rules, and an event loop may be what makes the structure."""
    from llguidance import gbnf_to_lark

    monkeypatch.setattr(gbnf_to_lark, "gbnf_to_lark", lambda text: pytest.fail("it was read at once"))
    rules = [f'r{i} ::= "a" r{i + 1}' for i in range(1100)]
    quarrel.Structure.gbnf("\n".join(["root ::= r0", *rules[:900], 'r900 ::= "b"']))
    with pytest.raises(RequestError, match="more than 1000 rules"):
        quarrel.Structure.gbnf("\n".join(["root ::= r0", *rules, 'r1100 ::= "b"']))
