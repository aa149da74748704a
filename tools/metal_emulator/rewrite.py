"""Metal text to C++ text: the few things that the headers in metal/ cannot say with types and macros.

Every rewriting keeps the number of lines, so that the compiler's places are places in the Metal text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from quarrel.errors import RequestError
from tools.metal_emulator.tokens import Token, closing, join, next_code, previous_code, split_commas, tokenise

# C++ that Metal does not have; the compiler behind the emulator would take it.
_FOREIGN_WORDS = frozenset(
    ["goto", "new", "delete", "throw", "try", "catch", "virtual", "dynamic_cast", "typeid", "thread_local", "asm"]
)


@dataclass(frozen=True)
class Parameter:
    """Of a kernel: where it gets its value, as in [[buffer(3)]] or [[thread_position_in_grid]]."""

    attribute: str


@dataclass(frozen=True)
class Rewritten:
    """`kernels` by function name, `instances` from host name to the C++ name of an explicit instantiation."""

    text: str
    kernels: Mapping[str, tuple[Parameter, ...]]
    instances: Mapping[str, str]


def rewrite(source: str, function_constants: Mapping[str, object] | None = None, count_rounds: bool = False) -> Rewritten:
    """The C++ text of a Metal text; `count_rounds` makes every loop count, which check mode wants (metal/msl/loops.h)."""
    tokens = tokenise(source)
    tokens = _literals(tokens)
    tokens = _function_constants(tokens, function_constants or {})
    tokens = _without_argument_tables(tokens)
    tokens = _vector_constructors(tokens)
    tokens = _threadgroup_variables(tokens)
    if count_rounds:
        tokens = _without_unrolling(tokens)
        tokens = _counted_loops(tokens)
    tokens, instances = _instantiations(tokens)
    tokens, kernels = _kernels(tokens)
    return Rewritten(join(tokens), kernels, instances)


def foreign(source: str) -> list[tuple[str, int, str]]:
    """File, line and complaint for what Metal's own compiler would not take, though this one does."""
    found = []
    file, line = "", 1
    tokens = tokenise(source)
    for at, token in enumerate(tokens):
        place = re.match(r'#line (\d+) "(.*)"', token.text) if token.kind == "directive" else None
        if place:
            file, line = place[2], int(place[1]) - 1  # the end of the directive's own line comes next
        namespace = token.text == "std" and at + 1 < len(tokens) and tokens[at + 1].text == "::"
        if token.kind == "word" and (token.text in _FOREIGN_WORDS or namespace):
            found.append((file, line, f"'{token.text}' is not Metal"))
        if not token.text.isascii():
            found.append((file, line, "the text is not ASCII, and MLX hands Metal sources over as ASCII"))
        line += token.text.count("\n")
    return found


def _code(text: str) -> Token:
    return Token("word", text)


def _blank(tokens: list[Token]) -> Token:
    """What is left of tokens that go away: their line breaks, those of a macro's continued lines included."""
    return Token("space", re.sub(r"[^\n\\]", "", join(token for token in tokens if token.kind == "space")) or " ")


def _literals(tokens: list[Token]) -> list[Token]:
    """1.5h and 2.0bf, whose suffixes C++ does not know."""

    def one(token: Token) -> Token:
        match = re.fullmatch(r"((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(h|bf)", token.text)
        if token.kind != "number" or not match:
            return token
        number = match[1] + ("f" if re.search(r"[.eE]", match[1]) else "")
        return _code(f"({'half' if match[2] == 'h' else 'bfloat'}({number}))")

    return [one(token) for token in tokens]


def _function_constants(tokens: list[Token], values: Mapping[str, object]) -> list[Token]:
    """`constant bool name [[function_constant(3)]];` gets its value."""
    result: list[Token] = []
    at = 0
    while at < len(tokens):
        if tokens[at].text == "[[" and "function_constant" in join(tokens[at : at + 2]):
            end = closing(tokens, at)
            name = tokens[previous_code(tokens, at - 1)].text
            if tokens[next_code(tokens, end + 1)].text == ";":
                if name not in values:
                    raise RequestError(f"function constant {name} has no value; give one in function_constants")
                result.append(_code(f"= {str(values[name]).lower()}"))
            at = end + 1
            continue
        result.append(tokens[at])
        at += 1
    return result


def _without_argument_tables(tokens: list[Token]) -> list[Token]:
    """[[threadgroup(0)]] on a function that is no kernel; the word `threadgroup` in it would be taken for the space."""
    result: list[Token] = []
    at = 0
    while at < len(tokens):
        if tokens[at].text == "[[" and tokens[next_code(tokens, at + 1)].text == "threadgroup":
            at = closing(tokens, at) + 1
            continue
        result.append(tokens[at])
        at += 1
    return result


def _vector_constructors(tokens: list[Token]) -> list[Token]:
    """`vec<T, 4>(...)`: a C++ type alias takes no list of arguments; float4(...) is a macro."""
    result: list[Token] = []
    for at, token in enumerate(tokens):
        if token.text == "vec" and at + 1 < len(tokens) and tokens[at + 1].text == "<":
            end = closing(tokens, at + 1)
            follows = next_code(tokens, end + 1)
            if end > 0 and follows < len(tokens) and tokens[follows].text == "(":
                token = _code("msl_make_vec")
        result.append(token)
    return result


def _threadgroup_variables(tokens: list[Token]) -> list[Token]:
    """`threadgroup float t[8][D];` becomes a reference into the threadgroup's memory; pointers stay what they are."""
    result: list[Token] = []
    at = number = 0
    while at < len(tokens):
        before = previous_code(tokens, at - 1)
        starts = before < 0 or tokens[before].text in (";", "{", "}") or tokens[before].kind == "directive"
        if tokens[at].text == "threadgroup" and starts:
            end = at
            while end < len(tokens) and tokens[end].text not in (";", "(", "=", "{"):
                end += 1
            variables = _declared(tokens[at + 1 : end]) if end < len(tokens) and tokens[end].text == ";" else []
            if variables:
                for name, variable_type in variables:
                    number += 1
                    result.append(_code(f"MSL_THREADGROUP_VARIABLE({number}, {name}, {variable_type}); "))
                result.append(_blank(tokens[at:end]))
                at = end + 1
                continue
        result.append(tokens[at])
        at += 1
    return result


def _declared(declaration: list[Token]) -> list[tuple[str, str]]:
    """Names and types of `float a[4], b`; nothing for pointers and references."""
    parts = split_commas(declaration)
    if not parts or any(token.text in ("*", "&") for token in _outside_subscripts(declaration)):
        return []
    found = []
    base = ""
    for i, part in enumerate(parts):
        subscript = next((k for k, token in enumerate(part) if token.text == "["), len(part))
        name_at = previous_code(part, subscript - 1)
        if name_at < 0 or part[name_at].kind != "word":
            return []
        if i == 0:
            base = join(part[:name_at]).strip().replace("\n", " ")
        found.append((part[name_at].text, f"{base} {join(part[subscript:]).strip()}".strip().replace("\n", " ")))
    return found if base else []


def _outside_subscripts(tokens: list[Token]) -> list[Token]:
    outside, depth = [], 0
    for token in tokens:
        depth += (token.text == "[") - (token.text == "]")
        if depth == 0:
            outside.append(token)
    return outside


def _without_unrolling(tokens: list[Token]) -> list[Token]:
    """Hints to unroll must stand right before a loop, where the counting will stand; they mean nothing to a check."""
    result: list[Token] = []
    at = 0
    while at < len(tokens):
        token = tokens[at]
        if token.kind == "directive" and re.match(r"#\s*pragma\s+(unroll|clang\s+loop)", token.text):
            token = Token("space", "\n" * token.text.count("\n"))
        elif token.text == "_Pragma":
            opening = next_code(tokens, at + 1)
            end = closing(tokens, opening)
            if re.search("unroll|clang loop", join(tokens[opening:end])):
                at = end + 1
                continue
        result.append(token)
        at += 1
    return result


def _counted_loops(tokens: list[Token]) -> list[Token]:
    before: dict[int, str] = {}
    after: dict[int, str] = {}
    ends_of_do: set[int] = set()
    skip_to = 0
    for at, token in enumerate(tokens):
        if at < skip_to or token.kind != "word":
            continue
        if token.text == "constexpr":  # evaluated by the compiler: it cannot count
            skip_to = _constexpr_body_end(tokens, at)
        elif token.text == "do":
            tail = _tail_of_do(tokens, at)
            if tail > 0:
                before[at] = "MSL_LOOP "
                ends_of_do.add(tail)
        elif token.text in ("for", "while"):
            opening = next_code(tokens, at + 1)
            if opening == len(tokens) or tokens[opening].text != "(":
                continue
            end = closing(tokens, opening)
            if at in ends_of_do:
                after[opening], before[end] = "msl_rounds.next() && (", ")"
            else:
                before[at], after[end] = "MSL_LOOP ", " MSL_ROUND "
    result: list[Token] = []
    for at, token in enumerate(tokens):
        if at in before:
            result.append(_code(before[at]))
        result.append(token)
        if at in after:
            result.append(_code(after[at]))
    return result


def _constexpr_body_end(tokens: list[Token], at: int) -> int:
    """Past the body of a constexpr function; just past the word for a constexpr variable."""
    i = at
    while i < len(tokens) and tokens[i].text not in (";", "=", "{"):
        i = closing(tokens, i) + 1 if tokens[i].text == "(" else i + 1
    return closing(tokens, i) if i < len(tokens) and tokens[i].text == "{" else at + 1


def _tail_of_do(tokens: list[Token], at: int) -> int:
    """The index of the `while` that ends a do statement; -1 if it cannot be told."""
    body = next_code(tokens, at + 1)
    if body == len(tokens):
        return -1
    if tokens[body].text == "{":
        end = closing(tokens, body)
    else:
        end = next((i for i in range(body, len(tokens)) if tokens[i].text == ";"), -1)
    tail = next_code(tokens, end + 1) if end > 0 else len(tokens)
    return tail if tail < len(tokens) and tokens[tail].text == "while" else -1


def _instantiations(tokens: list[Token]) -> tuple[list[Token], dict[str, str]]:
    """`template [[host_name("x")]] [[kernel]] decltype(f<int>) f<int>;` is C++ once its attributes are gone."""
    result: list[Token] = []
    instances: dict[str, str] = {}
    at = 0
    while at < len(tokens):
        result.append(tokens[at])
        first = next_code(tokens, at + 1)
        if tokens[at].text != "template" or first == len(tokens) or tokens[first].text != "[[":
            at += 1
            continue
        end = first
        names = []
        while tokens[end].text == "[[":
            stop = closing(tokens, end)
            names += [token.text[1:-1] for token in tokens[end:stop] if token.kind == "string"]
            end = next_code(tokens, stop + 1)
        opening = next_code(tokens, end + 1)
        if tokens[end].text == "decltype" and names:
            instances[names[0]] = join(tokens[opening + 1 : closing(tokens, opening)]).strip()
        result.append(_blank(tokens[at:end]))
        at = end
    return result, instances


def _kernels(tokens: list[Token]) -> tuple[list[Token], dict[str, tuple[Parameter, ...]]]:
    """Finds the kernels, reads where each parameter comes from, and takes the attributes away."""
    result: list[Token] = []
    kernels: dict[str, tuple[Parameter, ...]] = {}
    at = 0
    while at < len(tokens):
        found = _kernel_head(tokens, at)
        if not found:
            result.append(tokens[at])
            at += 1
            continue
        name, opening = found
        end = closing(tokens, opening)
        parameters, buffers = [], 0
        result += [_blank(tokens[at:opening]), _code(f"void {name}(")]
        for i, part in enumerate(split_commas(tokens[opening + 1 : end])):
            declaration, attribute = _without_attributes(part)
            if not attribute:
                attribute = f"buffer({buffers})"
            buffers += attribute.startswith("buffer")
            parameters.append(Parameter(attribute))
            result += [_code(", ")] * (i > 0) + declaration
        result.append(_code(")"))
        kernels[name] = tuple(parameters)
        at = end + 1
    return result, kernels


def _kernel_head(tokens: list[Token], at: int) -> tuple[str, int] | None:
    """Name and opening bracket of `[[kernel]] [[...]] void name(` or `kernel void name(` at this token."""
    if tokens[at].text == "[[":
        end = closing(tokens, at)
        if end < 0 or not any(token.text == "kernel" for token in tokens[at:end]):
            return None
    elif tokens[at].text == "kernel":
        end = at
    else:
        return None
    i = next_code(tokens, end + 1)
    while i < len(tokens) and tokens[i].text == "[[":
        i = next_code(tokens, closing(tokens, i) + 1)
    if i == len(tokens) or tokens[i].text != "void":
        return None
    name = next_code(tokens, i + 1)
    opening = next_code(tokens, name + 1)
    if opening >= len(tokens) or tokens[opening].text != "(":
        return None
    return tokens[name].text, opening


def _without_attributes(part: list[Token]) -> tuple[list[Token], str]:
    kept: list[Token] = []
    attribute = ""
    at = 0
    while at < len(part):
        if part[at].text == "[[":
            end = closing(part, at)
            for one in split_commas(part[at + 1 : end]):
                if not join(one).strip().startswith("function_constant"):
                    attribute = re.sub(r"\s", "", join(one))
            at = end + 1
            continue
        kept.append(part[at])
        at += 1
    return kept, attribute
