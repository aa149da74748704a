"""How families of models write calls of tools: one table. A format has an opening, a parser and a renderer; a family that
writes calls in another way is one more entry.

Which format a template teaches is not asked: openings are rare words, and what does not parse as calls of the request's own
tools stays text.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quarrel.server import gemma

Schema = Mapping[str, Any]
Functions = Mapping[str, Schema]
"""Names of functions, and the JSON schemas of their arguments."""


@dataclass(frozen=True)
class Call:
    """One call; `arguments` is JSON text, as OpenAI's clients expect. id: the model's own, if it wrote one."""

    name: str
    arguments: str
    id: str | None = field(default=None, compare=False)

    @property
    def named(self) -> str:
        """The id, or a new one."""
        return self.id or "call_" + secrets.token_hex(12)

    @property
    def parsed(self) -> dict[str, Any]:
        """The arguments; none of a call that was cut, or of one that no JSON can carry."""
        return {} if arguments_of(self.arguments) is None else dict(json.loads(self.arguments))

    def body(self, index: int) -> dict[str, object]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": index, "id": self.named, "type": "function", "function": function}


class Unfinished(Exception):
    """What is there is the beginning of a call, whose closing has not come yet: it stands in an argument."""


@dataclass(frozen=True)
class Format:
    """opening, closing: what stands around calls; without a closing they go on to the next opening or the end of the text.

    begins: what can follow the opening, spaces apart; `NAME` is any function's name. parse: the calls in what stands
    between; none if anything else does. render: as a model writes a call. inner: further control tokens of the format.
    heads: what stands before the arguments of a call, where these are JSON: `name`, and any other group is an id.
    """

    opening: str
    closing: str
    begins: tuple[str, ...]
    parse: Callable[[str, Functions], list[Call]]
    render: Callable[[Call], str]
    inner: tuple[str, ...] = ()
    heads: tuple[re.Pattern[str], ...] = ()

    def may_begin(self, text: str, functions: Functions) -> bool:
        """Whether calls can begin as the text does."""
        start = text.lstrip()
        words = [w for begin in self.begins for w in (functions if begin == NAME else (begin,))]
        return any(start.startswith(word) or word.startswith(start) for word in words)


NAME = ""


def arguments_of(given: Any) -> str | None:
    """Arguments as JSON text, of an object or of its text; None for what is neither, or holds what JSON has no word for:
    infinities, halves of characters."""
    try:
        found = json.loads(given) if isinstance(given, str) else given
        text = json.dumps(found, allow_nan=False)
        json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, TypeError, RecursionError):
        return None
    return (given if isinstance(given, str) else text) if isinstance(found, dict) else None


def json_calls(text: str, functions: Functions) -> list[Call]:
    """Of an object or a list of them, or of several behind each other."""
    decoder, rows, at = json.JSONDecoder(), list[Any](), 0
    try:
        while at < len(text):
            if text[at] in " \t\r\n;":
                at += 1
                continue
            row, at = decoder.raw_decode(text, at)
            rows += row if isinstance(row, list) else [row]
    except json.JSONDecodeError as error:
        if error.msg.startswith("Unterminated string"):
            raise Unfinished from None
        return []
    except (ValueError, RecursionError):
        return []
    calls = [_json_call(row, functions) for row in rows]
    return [] if None in calls else [call for call in calls if call is not None]


def _json_call(row: Any, functions: Functions) -> Call | None:
    if isinstance(row, dict) and isinstance(row.get("function"), dict):
        row = {**row, **row["function"]}
    if not isinstance(row, dict):
        return None
    name = row.get("name", row.get("tool_name"))
    if not isinstance(name, str) or name not in functions:
        return None
    id = row.get("id", row.get("tool_call_id"))
    return _call(name, row.get("arguments", row.get("parameters", {})), id if isinstance(id, str) and id else None)


def _call(name: str, given: Any, id: str | None = None) -> Call | None:
    arguments = arguments_of(given)
    return None if arguments is None else Call(name, arguments, id)


def _json(call: Call, name: str = "name", arguments: str = "arguments") -> str:
    return f'{{"{name}": {json.dumps(call.name)}, "{arguments}": {call.arguments}}}'


def _value(text: str, schema: Any) -> Any:
    """An argument that was written without quotes, by its schema: a text, or JSON."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "string":
        return text
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if arguments_of({"": found}) is None else found


def _typed(name: str, pairs: Iterable[tuple[str, str]], functions: Functions) -> Call | None:
    if name not in functions:
        return None
    known = functions[name].get("properties")
    known = known if isinstance(known, dict) else {}
    return _call(name, {key: _value(value, known.get(key)) for key, value in pairs})


def _values(call: Call) -> list[tuple[str, str]]:
    return [(k, v if isinstance(v, str) else json.dumps(v)) for k, v in json.loads(call.arguments).items()]


def _all(found: Sequence[Call | None]) -> list[Call]:
    return [] if None in found else [call for call in found if call is not None]


@dataclass(frozen=True)
class Tags:
    """Calls between tags. head: up to a function's name; pair: an argument, which begins with `argument`; end: what closes
    a call."""

    head: re.Pattern[str]
    argument: str
    pair: re.Pattern[str]
    end: str

    def __call__(self, text: str, functions: Functions) -> list[Call]:
        calls, at = list[Call | None](), 0
        while text[at:].strip():
            begin = self.head.match(text, at)
            if begin is None:
                return []
            place, pairs = begin.end(), list[tuple[str, str]]()
            while (found := self.pair.match(text, place)) is not None:
                pairs.append((found[1].strip(), found[2]))
                place = found.end()
            rest = text[place:].lstrip()
            if rest.startswith(self.argument) or (not rest and self.end):
                raise Unfinished
            if not rest.startswith(self.end):
                return []
            at = len(text) - len(rest) + len(self.end)
            calls.append(_typed(begin[1].strip(), pairs, functions))
        return _all(calls)


def _xml(call: Call) -> str:
    rows = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in _values(call))
    return f"<function={call.name}>\n{rows}</function>"


def _invoke(tag: str, string: bool) -> Callable[[Call], str]:
    def render(call: Call) -> str:
        rows = []
        for key, value in json.loads(call.arguments).items():
            kind = f' string="{json.dumps(isinstance(value, str))}"' if string else ""
            text = value if isinstance(value, str) else json.dumps(value)
            rows.append(f'<{tag}parameter name="{key}"{kind}>{text}</{tag}parameter>\n')
        return f'<{tag}invoke name="{call.name}">\n{"".join(rows)}</{tag}invoke>\n'

    return render


def _glm(call: Call) -> str:
    rows = (f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in _values(call))
    return f"{call.name}\n{''.join(rows)}"


XML = Tags(
    re.compile(r"\s*<function=([^>\n]+)>"),
    "<parameter=",
    re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL),
    "</function>",
)
GLM = Tags(
    re.compile(r"\s*([^\s<]+)"),
    "<arg_key>",
    re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>\n?(.*?)\n?</arg_value>", re.DOTALL),
    "",
)
INVOKE, DSML = (
    Tags(
        re.compile(rf"\s*<{tag}invoke name=\"([^\"\n]+)\">"),
        f"<{tag}parameter",
        re.compile(rf"\s*<{tag}parameter name=\"([^\"\n]+)\"[^>\n]*>\n?(.*?)\n?</{tag}parameter>", re.DOTALL),
        f"</{tag}invoke>",
    )
    for tag in ("", "｜DSML｜")
)


def _bare_xml(text: str, functions: Functions) -> list[Call]:
    """Behind `<function=`: arguments in tags, or as JSON."""
    name, _, rest = text.partition(">")
    if rest.lstrip().startswith("{"):
        return json_calls(f'{{"name": {json.dumps(name.strip())}, "arguments": {rest}}}', functions)
    return XML(f"<function={text}</function>", functions)


_ARGS = re.compile(r"\s*([^\s\[{(]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\])?\s*(\{.*)", re.DOTALL)


def _mistral(text: str, functions: Functions) -> list[Call]:
    """A list in JSON, or a name and an object."""
    if text.lstrip()[:1] in ("[", "{"):
        return json_calls(text, functions)
    found = _ARGS.fullmatch(text)
    if found is None:
        return []
    id = f', "id": {json.dumps(found[2])}' if found[2] else ""
    return json_calls(f'{{"name": {json.dumps(found[1])}{id}, "arguments": {found[3]}}}', functions)


_DEEPSEEK = re.compile(
    r"\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?([^<\n]+)(?:<｜tool▁sep｜>|\n```json\n)(.*?)(?:\n```)?\s*<｜tool▁call▁end｜>",
    re.DOTALL,
)
_KIMI = re.compile(
    r"\s*<\|tool_call_begin\|>\s*(?:functions\.)?([^<\n]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>(.*?)<\|tool_call_end\|>",
    re.DOTALL,
)


def _framed(pattern: re.Pattern[str]) -> Callable[[str, Functions], list[Call]]:
    """Names and objects in JSON, between tags."""

    def parse(text: str, functions: Functions) -> list[Call]:
        calls, at = list[Call](), 0
        while text[at:].strip():
            found = pattern.match(text, at)
            if found is None:
                return []
            one = json_calls(f'{{"name": {json.dumps(found[1].strip())}, "arguments": {found[2]}}}', functions)
            if not one:
                return []
            calls, at = calls + one, found.end()
        return calls

    return parse


def _deepseek(call: Call) -> str:
    return f"<｜tool▁call▁begin｜>{call.name}<｜tool▁sep｜>{call.arguments}<｜tool▁call▁end｜>"


def _kimi(call: Call) -> str:
    body = f"{call.name}:0<|tool_call_argument_begin|>{call.arguments}"
    return f"<|tool_call_begin|>functions.{body}<|tool_call_end|>"


def python_calls(text: str, functions: Functions) -> list[Call]:
    """Of a list of Python's calls, or one of them, whose arguments are constants by name. `NAME.call(...)` is NAME's."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that a model wrote
            body = ast.parse(text.strip(), mode="eval").body
        calls = []
        for node in body.elts if isinstance(body, ast.List) else [body]:
            if not isinstance(node, ast.Call) or node.args or any(k.arg is None for k in node.keywords):
                return []
            name = ast.unparse(node.func)
            name = name if name in functions else name.removesuffix(".call")
            given = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
            calls.append(_call(name, given) if name in functions else None)
        return _all(calls)
    except SyntaxError as error:
        if "unterminated string" in str(error.msg):
            raise Unfinished from None
        return []
    except (ValueError, TypeError, RecursionError, MemoryError):
        return []


def _python(call: Call) -> str:
    given = ", ".join(f"{key}={value!r}" for key, value in json.loads(call.arguments).items())
    return f"[{call.name}({given})]"


def _gemma(text: str, functions: Functions) -> list[Call]:
    try:
        name, arguments = gemma.parsed(text)
    except gemma.Open:
        raise Unfinished from None
    except (ValueError, RecursionError):
        return []
    call = _call(name, arguments) if name in functions else None
    return [] if call is None else [call]


def _llama(text: str, functions: Functions) -> list[Call]:
    return json_calls(text, functions) if text.lstrip()[:1] == "{" else python_calls(text, functions)


def _phi(text: str, functions: Functions) -> list[Call]:
    return json_calls(text.strip().removesuffix("<|/tool_call|>"), functions)


def _lfm(text: str, functions: Functions) -> list[Call]:
    return json_calls(text, functions) or python_calls(text, functions)


_ID = r'(?:"(?:id|tool_call_id)"\s*:\s*"(?P<{}>[^"\\]*)"\s*,\s*)?'
JSON_HEAD = re.compile(
    r'[\s\[\]},;]*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?(?:"function"\s*:\s*\{\s*)?'
    + _ID.format("id")
    + r'"(?:name|tool_name)"\s*:\s*"(?P<name>(?:[^"\\]|\\.)*)"\s*,\s*'
    + _ID.format("later")
    + r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_HEADS = (JSON_HEAD,)
_MISTRAL_HEAD = re.compile(r"\s*(?P<name>[^\s\[{(]+)\s*(?:\[CALL_ID\]\s*(?P<id>\w+)\s*)?(?:\[ARGS\])?\s*(?=\{)")
_FUNCTION_HEAD = re.compile(r"\s*(?P<name>[^>\n{]+)>\s*(?=\{)")
_DEEPSEEK_HEAD = re.compile(
    r"\s*(?:```)?\s*(?:<｜tool▁call▁end｜>)?\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(?P<name>[^<\n]+)"
    r"(?:<｜tool▁sep｜>|\n```json\n)\s*(?=\{)"
)
_KIMI_HEAD = re.compile(
    r"\s*(?:<\|tool_call_end\|>)?\s*<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[^<\n]+?)(?::\d+)?\s*"
    r"<\|tool_call_argument_begin\|>\s*(?=\{)"
)
_OBJECTS = ("{", "[")
FORMATS: Mapping[str, Format] = {
    "hermes": Format("<tool_call>", "</tool_call>", _OBJECTS, json_calls, lambda c: f"\n{_json(c)}\n", heads=_HEADS),
    "qwen3-coder": Format("<tool_call>", "</tool_call>", ("<function=",), XML, lambda c: f"\n{_xml(c)}\n"),
    "glm-4.5": Format("<tool_call>", "</tool_call>", (NAME,), GLM, _glm),
    "function": Format(
        "<function=", "</function>", (NAME,), _bare_xml, lambda c: f"{c.name}>{c.arguments}", heads=(_FUNCTION_HEAD,)
    ),
    "seed": Format("<seed:tool_call>", "</seed:tool_call>", ("<function=",), XML, lambda c: f"\n{_xml(c)}\n"),
    "mistral": Format(
        "[TOOL_CALLS]",
        "",
        (*_OBJECTS, NAME),
        _mistral,
        lambda c: f"{c.name}[ARGS]{c.arguments}",
        ("[ARGS]", "[CALL_ID]"),
        (JSON_HEAD, _MISTRAL_HEAD),
    ),
    "llama-3": Format("<|python_tag|>", "", ("{", NAME), _llama, lambda c: _json(c, arguments="parameters"), heads=_HEADS),
    "granite": Format("<|tool_call|>", "", _OBJECTS, _phi, lambda c: f"[{_json(c)}]", ("<|/tool_call|>",), _HEADS),
    "deepseek": Format(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        ("<｜tool▁call▁begin｜>",),
        _framed(_DEEPSEEK),
        _deepseek,
        ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        (_DEEPSEEK_HEAD,),
    ),
    "deepseek-3.2": Format(
        "<｜DSML｜function_calls>",
        "</｜DSML｜function_calls>",
        ("<｜DSML｜invoke",),
        DSML,
        _invoke("｜DSML｜", True),
        ("｜DSML｜",),
    ),
    "minimax": Format("<minimax:tool_call>", "</minimax:tool_call>", ("<invoke",), INVOKE, _invoke("", False)),
    "kimi": Format(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        ("<|tool_call_begin|>",),
        _framed(_KIMI),
        _kimi,
        ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        (_KIMI_HEAD,),
    ),
    "command-r": Format(
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        _OBJECTS,
        json_calls,
        lambda c: f"[{_json(c, 'tool_name', 'parameters')}]",
        heads=_HEADS,
    ),
    "nemotron": Format("<TOOLCALL>", "</TOOLCALL>", _OBJECTS, json_calls, lambda c: f"[{_json(c)}]", heads=_HEADS),
    "gemma-4": Format(
        "<|tool_call>",
        "<tool_call|>",
        (gemma.CALL,),
        _gemma,
        lambda c: f"{gemma.CALL}{c.name}{gemma.rendered(json.loads(c.arguments))}",
        (gemma.QUOTE,),
    ),
    "lfm2": Format("<|tool_call_start|>", "<|tool_call_end|>", _OBJECTS, _lfm, _python, heads=_HEADS),
}
TAGS = frozenset(tag for f in FORMATS.values() for tag in (f.opening, f.closing, *f.inner) if tag)
"""Those that may be control tokens, which a text shows only if they are named."""


def written(format: str, calls: Sequence[Call]) -> str:
    """Calls as the format's models write them."""
    made = FORMATS[format]
    return "".join(f"{made.opening}{made.render(call)}{made.closing}" for call in calls)
