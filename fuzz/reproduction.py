"""A case as text and back, so that what a fuzzer finds is one line that runs again."""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
from typing import Any

from quarrel.errors import RequestError
from quarrel.gguf import GGMLType
from quarrel.ops import ALL_OPS, EXTRA_OPS
from quarrel.ops.contract import Case

_MEMBER = re.compile(r"<GGMLType\.(\w+): \d+>")


def text_of(case: Case) -> str:
    """A Python expression, as it may also be pasted into an op's `cases()`."""
    return _MEMBER.sub(r"GGMLType.\1", repr(case))


def case_of(text: str) -> Case:
    """What `text_of` wrote. Only specs of ops, numbers, texts, tuples and dicts are understood; nothing is executed."""
    known: dict[str, type] = {"Case": Case}
    for op in {**ALL_OPS, **EXTRA_OPS}.values():
        module = vars(sys.modules[op.spec.__module__])
        known |= {n: v for n, v in module.items() if dataclasses.is_dataclass(v) and isinstance(v, type)}

    def value(node: ast.expr) -> Any:
        match node:
            case ast.Constant(found):
                return found
            case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as found)):
                return -found
            case ast.Tuple(elements):
                return tuple(map(value, elements))
            case ast.Dict(keys, values):
                return {value(k): value(v) for k, v in zip(keys, values, strict=True) if k is not None}
            case ast.Attribute(ast.Name("GGMLType"), name):
                return GGMLType[name]
            case ast.Call(ast.Name(name), positional, named) if name in known:
                return known[name](*map(value, positional), **{k.arg: value(k.value) for k in named if k.arg})
        raise RequestError(f"a case holds {ast.unparse(node)[:80]!r}, which no case has; paste what a fuzzer printed")

    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError as error:
        raise RequestError(f"{text[:80]!r} is no case: {error.msg}; paste what a fuzzer printed") from None
    case = value(tree.body)
    if not isinstance(case, Case):
        raise RequestError(f"{text[:80]!r} is no case; paste what a fuzzer printed")
    return case
