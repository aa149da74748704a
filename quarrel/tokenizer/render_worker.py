"""The process that renders chat templates: a template comes out of a model file, and must be taken for an attack.

Run as a script by `renderer.py`, never imported by it; needs nothing but the standard library, Jinja and `sandbox.py`.
Jinja's sandbox keeps a template from Python's internals; the limits keep it from time, memory, files and other processes.

What is rendered carries, for each character, who wrote it (`Traced`). So control tokens are recognised only where the
template itself spells them out, through any filter, slice or test that it applies to a message. A text that has lost its
trace counts as a stranger's.

Requests and replies are frames of JSON.
"""

from __future__ import annotations

import datetime
import json
import re
import signal
from collections.abc import Iterable
from typing import Any

import jinja2.debug  # noqa: F401  (imported late by Jinja itself, when no file can be opened any more)
from jinja2 import TemplateSyntaxError, nodes, pass_environment
from jinja2.compiler import CodeGenerator, Frame
from jinja2.environment import Environment
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quarrel.child.sandbox import limit_cpu, limit_resources, received, send

COMPILE_CPU_S = 2.0
RENDER_CPU_S = 0.25
MEMORY_BYTES = 256 << 20
MAX_OUTPUT_CHARS = 4 << 20
# Levels of trust: CONTENT, REPLY and TEMPLATE of special.py.
CONTENT, REPLY, TEMPLATE = 0, 1, 2
RUNS = re.compile(rb"\x00+|\x01+|\x02+")
REPLY_ROLES = ("assistant", "model")


class OutputTooLong(Exception):
    """The text outgrew MAX_OUTPUT_CHARS."""


class Raised(Exception):
    """The template called raise_exception: it refuses these messages."""


class Traced(str):
    """A text with a level of trust for each character. Every method that is missing here returns a plain str, which
    counts as CONTENT: to lose the trace is safe."""

    __slots__ = ("_levels",)
    _levels: bytes

    def __new__(cls, text: str, levels: bytes | None = None) -> Traced:
        self = super().__new__(cls, text)
        self._levels = bytes(len(text)) if levels is None else levels
        return self

    def __str__(self) -> str:
        return self

    def __add__(self, other: object) -> Any:
        return concat((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: object) -> Any:
        return concat((other, self)) if isinstance(other, str) else NotImplemented

    def __mod__(self, values: Any) -> str:
        """Only "%s" keeps the trace."""
        parts = self.split("%s")
        given = values if isinstance(values, tuple) else (values,)
        if isinstance(values, dict) or len(parts) != len(given) + 1 or any("%" in part for part in parts):
            return str.__mod__(self, values)
        return concat([text for pair in zip(parts, map(str, given)) for text in pair] + parts[-1:])

    def __getitem__(self, key: Any) -> Traced:
        text = str.__getitem__(self, key)
        return Traced(text, self._levels[key] if isinstance(key, slice) else self._levels[key:][:1])

    def _part(self, start: int, text: str) -> Traced:
        return Traced(text, self._levels[start : start + len(text)])

    def strip(self, chars: str | None = None, /) -> Traced:
        return self.rstrip(chars).lstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> Traced:
        text = str.lstrip(self, chars)
        return self._part(len(self) - len(text), text)

    def rstrip(self, chars: str | None = None, /) -> Traced:
        return self._part(0, str.rstrip(self, chars))

    def removeprefix(self, prefix: str, /) -> Traced:
        text = str.removeprefix(self, prefix)
        return self._part(len(self) - len(text), text)

    def removesuffix(self, suffix: str, /) -> Traced:
        return self._part(0, str.removesuffix(self, suffix))

    def _parts(self, texts: Iterable[str]) -> list[Any]:
        parts, at = [], 0
        for text in texts:
            at = str.index(self, text, at)
            parts.append(self._part(at, text))
            at += len(text)
        return parts

    def split(self, sep: str | None = None, maxsplit: Any = -1) -> list[Any]:
        return self._between(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: Any = -1) -> list[Any]:
        return self._between(str.rsplit(self, sep, maxsplit), sep)

    def _between(self, texts: list[str], sep: str | None) -> list[Any]:
        if sep is None:
            return self._parts(texts)
        parts, at = [], 0
        for text in texts:
            parts.append(self._part(at, text))
            at += len(text) + len(sep)
        return parts

    def splitlines(self, keepends: bool = False) -> list[Any]:
        return self._parts(str.splitlines(self, keepends))

    def replace(self, old: str, new: str, count: Any = -1, /) -> str:
        return join(new, self.split(old, count)) if old else str.replace(self, old, new, count)

    def join(self, texts: Iterable[str], /) -> str:
        return join(self, texts)

    def _same_length(self, text: str) -> str:
        return Traced(text, self._levels) if len(text) == len(self) else text

    def upper(self) -> str:
        return self._same_length(str.upper(self))

    def lower(self) -> str:
        return self._same_length(str.lower(self))

    def title(self) -> str:
        return self._same_length(str.title(self))

    def capitalize(self) -> str:
        return self._same_length(str.capitalize(self))


def levels(text: str) -> bytes:
    return text._levels if isinstance(text, Traced) else bytes(len(text))


def concat(texts: Iterable[Any]) -> Traced:
    """Texts to one text; takes the place of "".join in Jinja's environment, and stops a text that grows too long."""
    kept, size = [], 0
    for text in texts:
        kept.append(text)
        size += len(text)
        if size > MAX_OUTPUT_CHARS:
            raise OutputTooLong
    return Traced("".join(kept), b"".join(map(levels, kept)))


def join(separator: str, texts: Iterable[str]) -> Traced:
    def woven() -> Iterable[str]:
        for at, text in enumerate(texts):
            if at:
                yield separator
            yield text

    return concat(woven())


def traced(value: Any, level: int) -> Any:
    """The same JSON value, all its texts at this level. Keys stay as they are."""
    if isinstance(value, str):
        return Traced(value, bytes((level,)) * len(value))
    if isinstance(value, list):
        return [traced(item, level) for item in value]
    if isinstance(value, tuple):
        return tuple(traced(item, level) for item in value)
    if isinstance(value, dict):
        return {key: traced(item, level) for key, item in value.items()}
    return value


class Generator(CodeGenerator):
    """Compiles a template so that its own text, and the constants in its expressions, are traced to it."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if isinstance(node, nodes.TemplateData):
            return node.data
        # Jinja would fold constant expressions here, while it compiles.
        raise nodes.Impossible

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return f"environment.own({''.join(group)!r})"

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:
        self.write(f"environment.own({node.data!r})")

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        value = node.as_const(frame.eval_ctx)
        if isinstance(value, str | list | tuple | dict):
            self.write(f"environment.own({value!r})")
        else:
            super().visit_Const(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")


class GenerationTag(Extension):
    """{% generation %} marks the model's turns for training, and means nothing here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Jinja as Hugging Face sets it up for chat templates."""

    code_generator_class = Generator
    concat = staticmethod(concat)

    def __init__(self) -> None:
        extensions = ["jinja2.ext.loopcontrols", GenerationTag]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False, cache_size=0)
        del self.globals["lipsum"]
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = strftime_now
        self.filters["tojson"] = tojson
        self.filters["join"] = join_filter

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        # Jinja's own would print as nothing, and the template would seem to work.
        raise SecurityError(f"the attribute {attribute} of a {type(obj).__name__}")

    def own(self, value: Any) -> Any:
        return traced(value, TEMPLATE)


def raise_exception(message: object) -> None:
    raise Raised(str(message))


def strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@pass_environment
def join_filter(environment: Environment, value: Iterable[Any], d: str = "", attribute: Any = None) -> Traced:
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    return join(str(d), map(str, value))


def message_levels(message: dict[str, Any]) -> dict[str, Any]:
    """Roles come from a fixed list, so that templates may build tokens of them; replies were written by the model."""
    level = REPLY if message.get("role") in REPLY_ROLES else CONTENT
    levelled: dict[str, Any] = traced(message, level)
    return levelled | {"role": traced(message.get("role"), TEMPLATE)}


class Worker:
    """Compiled templates and the limits around them."""

    def __init__(self) -> None:
        self._environment = ChatEnvironment()
        self._templates: dict[str, Any] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            if request["do"] == "compile":
                return self._compile(request["name"], request["template"])
            return self._render(request["name"], request["variables"], request["control_texts"])
        except TemplateSyntaxError as error:
            return refusal("syntax", f"{error.message} in line {error.lineno}")
        except SecurityError as error:
            return refusal("security", error)
        except Raised as error:
            return refusal("raised", error)
        except OutputTooLong:
            return refusal("output", f"writes more than {MAX_OUTPUT_CHARS >> 20} MiB of text")
        except MemoryError:
            return refusal("memory", f"needs more than {MEMORY_BYTES >> 20} MiB of memory")
        except Exception as error:
            kind = "syntax" if request["do"] == "compile" else "failed"
            return refusal(kind, f"{type(error).__name__}: {error}")
        finally:
            limit_cpu(0)

    def _compile(self, name: str, template: str) -> dict[str, Any]:
        limit_cpu(COMPILE_CPU_S)
        self._templates[name] = self._environment.from_string(template)
        return {}

    def _render(self, name: str, variables: dict[str, Any], control_texts: dict[str, str]) -> dict[str, Any]:
        messages = [message_levels(message) for message in variables["messages"]]
        variables |= traced(control_texts, TEMPLATE) | {"messages": messages}
        limit_cpu(RENDER_CPU_S)
        text = self._templates[name].render(variables)
        runs = [(match.end() - match.start(), match[0][0]) for match in RUNS.finditer(levels(text))]
        return {"text": text, "runs": runs}


def refusal(kind: str, message: object) -> dict[str, Any]:
    return {"error": kind, "message": str(message)[:500]}


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker = Worker()
    # Jinja and the codecs load their last modules here, while files can still be opened.
    worker.answer({"do": "compile", "name": "", "template": "{{ raise_exception('é'|upper) }}"})
    worker.answer({"do": "render", "name": "", "variables": {"messages": []}, "control_texts": {}})
    limit_resources(MEMORY_BYTES)
    while (request := received()) is not None:
        send(json.dumps(worker.answer(json.loads(request))).encode())


if __name__ == "__main__":
    main()
