"""Two rules that clang's types do not hold, read from the LLVM IR of a text without optimisation; nothing is executed.

* A pointer stays in its address space: Metal refuses the cast that C++ takes for a reinterpretation.
* A product of 32-bit integers stays below 2^31 (2^32 if it is unsigned and becomes an address). How large its factors
  may be is what BOUNDS says of values by their names, MOST of others, and what the code does to them: quotients, minima.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Place = tuple[str, int]
Range = tuple[int, int]

MOST = 1 << 20
"""Rows of a stack of experts, tokens of a cache, entries of a vocabulary: of a model of 70 billion weights."""
BOUNDS: Mapping[str, int] = {"K": 28672, "gains": 256, "chunk": 256, "chunks": 256}
"""Columns of a matrix, groups of a gain, chunks of a vocabulary."""
ATTRIBUTES: Mapping[str, int] = {
    "thread_index_in_threadgroup": 1023,
    "thread_index_in_simdgroup": 31,
    "simdgroup_index_in_threadgroup": 31,
}
SPACES = {"0": "thread", "1": "device", "2": "constant", "3": "threadgroup"}

_ASSIGN = re.compile(r'^\s*(%[\w.$"-]+) = (.*)$')
_FUNCTION = re.compile(r'^define .*@("?[\w.$]+"?)\((.*)\)[^()]*\{$')
_CAST = re.compile(r"addrspacecast ptr(?: addrspace\((\d)\))? .* to ptr(?: addrspace\((\d)\))?")
_BINARY = re.compile(
    r"(add|sub|mul|shl|sdiv|udiv|srem|urem|and|or|ashr|lshr|xor)((?: nsw| nuw| exact| disjoint)*) i(\d+) (\S+), (\S+)$"
)
_CONVERT = re.compile(r"(sext|zext|trunc)(?: nneg)? i(\d+) (\S+) to i(\d+)$")
_LOAD = re.compile(r"load i(\d+), ptr (%[\w.$-]+)")
_SELECT = re.compile(r"select i1 \S+, i\d+ (\S+), i\d+ (\S+)$")
_PHI = re.compile(r"phi i32 \[ (\S+), %[\w.$-]+ \], \[ (\S+), %[\w.$-]+ \]$")
_ORDER = re.compile(r"icmp [su]([lg])t i32 (\S+), (\S+)$")
_COMPARE = re.compile(r"icmp [su]l[te] i32 (%\S+), (\S+)$")
_STORE = re.compile(r"^\s*store i\d+ (\S+), ptr (%[\w.$-]+)")


@dataclass(frozen=True)
class Broken:
    """What a line of the text does that Metal, or a large model, does not allow."""

    place: Place
    message: str


def broken(ir: str, attributes: Mapping[str, Sequence[str]]) -> list[Broken]:
    """Each place once. `attributes`: those of every kernel's parameters, in order, by the function's name."""
    places = _Places(ir)
    found: dict[Broken, None] = {}
    for name, parameters, lines in _functions(ir):
        given = next((a for kernel, a in attributes.items() if kernel in name), ())
        values = _Values(lines, parameters, given)
        for line in lines:
            cast = _CAST.search(line)
            if cast:
                source, target = (SPACES.get(space or "0", "unknown") for space in cast.groups())
                message = f"a pointer to {source} memory becomes one to {target} memory, which Metal refuses"
                found[Broken(places.of(line), message)] = None
        for line, bits, most in values.overflows():
            message = f"a product of 32-bit integers may reach {most:.1e}, past 2^{bits}: make a factor ulong"
            found[Broken(places.of(line), message)] = None
    return list(found)


def _functions(ir: str) -> list[tuple[str, list[str], list[str]]]:
    """Name, parameters and lines of each function that is defined."""
    found: list[tuple[str, list[str], list[str]]] = []
    inside = False
    for line in ir.splitlines():
        head = _FUNCTION.match(line.partition(" !dbg")[0].rstrip(" {") + " {") if line.startswith("define") else None
        if head:
            parameters = [p.rsplit(" ", 1)[-1] for p in re.split(r", (?=[a-z<])", head[2])]
            found.append((head[1], parameters, []))
            inside = True
        elif line == "}":
            inside = False
        elif inside:
            found[-1][2].append(line)
    return found


class _Places:
    """From `!dbg !7` to file and line."""

    def __init__(self, ir: str) -> None:
        self._nodes = dict(re.findall(r"^(!\d+) = (.*)$", ir, re.MULTILINE))

    def of(self, line: str) -> Place:
        match = re.search(r"!dbg (!\d+)", line)
        node = self._nodes.get(match[1], "") if match else ""
        number = re.search(r"line: (\d+)", node)
        while node and "!DIFile" not in node:
            up = re.search(r"file: (!\d+)", node) or re.search(r"scope: (!\d+)", node)
            node = self._nodes.get(up[1], "") if up else ""
        name = re.search(r'filename: "([^"]*)"', node)
        return (name[1] if name else "", int(number[1]) if number else 0)


class _Values:
    """The ranges of a function's whole numbers; one that depends on itself is as large as any."""

    def __init__(self, lines: Sequence[str], parameters: Sequence[str], attributes: Sequence[str]) -> None:
        self._made: dict[str, str] = {}
        self._lines: dict[str, str] = {}
        self._stored: dict[str, list[str]] = {}
        self._below: dict[str, list[str]] = {}
        self._ranges: dict[str, Range | None] = {}
        label = ""
        for line in lines:
            label = line if line.partition(";")[0].rstrip().endswith(":") else label
            bare = re.sub(r"(, !\w+(\.\w+)* !\d+)+$", "", line.split(" #")[0]).rstrip()
            if match := _ASSIGN.match(bare):
                self._made[match[1]], self._lines[match[1]] = match[2], line
                compare, counter = _COMPARE.match(match[2]), None
                if compare and label.startswith("for.cond"):
                    counter = _LOAD.match(self._made.get(compare[1], ""))
                if compare and counter:
                    self._below.setdefault(counter[2], []).append(compare[2])
            elif match := _STORE.match(bare):
                self._stored.setdefault(match[2], []).append(match[1])
        for parameter, attribute in zip(parameters, attributes):
            if attribute in ATTRIBUTES:
                self._ranges[parameter] = (0, ATTRIBUTES[attribute])

    def overflows(self) -> list[tuple[str, int, int]]:
        """Line of the IR, bits that are passed, and the largest value."""
        widened = self._widened()
        found = []
        for name, made in self._made.items():
            match = _BINARY.match(made)
            if not match or match[1] not in ("mul", "shl") or match[3] != "32":
                continue
            low, high = self._binary(match[1], match[4], match[5])
            signed = "nsw" in match[2]
            if signed and max(high, -low) >= 1 << 31:
                found.append((self._lines[name], 31, max(high, -low)))
            elif not signed and high >= 1 << 32 and name in widened:
                found.append((self._lines[name], 32, high))
        return found

    def _widened(self) -> set[str]:
        """Values that reach an extension to 64 bits through sums."""
        found: set[str] = set()
        waiting = [m[3] for made in self._made.values() if (m := _CONVERT.match(made)) and m[4] == "64"]
        while waiting:
            name = waiting.pop()
            if name in found:
                continue
            found.add(name)
            match = _BINARY.match(self._made.get(name, ""))
            if match and match[1] in ("add", "sub", "or"):
                waiting += [match[4], match[5]]
            if load := _LOAD.match(self._made.get(name, "")):
                waiting += self._stored.get(load[2], [])
        return found

    def _of(self, name: str) -> Range:
        if re.fullmatch(r"-?\d+", name):
            return int(name), int(name)
        if name in ("true", "false"):
            return 0, 1
        if name not in self._ranges:
            self._ranges[name] = None  # in the making
            self._ranges[name] = self._made_range(self._made.get(name, ""))
        found = self._ranges[name]
        return found if found is not None else (-MOST, MOST)

    def _made_range(self, made: str) -> Range:
        if match := _BINARY.match(made):
            low, high = self._binary(match[1], match[4], match[5])
            return max(low, -(1 << 31)), min(high, (1 << 32) - 1)
        if match := _CONVERT.match(made):
            low, high = self._of(match[3])
            if match[1] == "zext" and low < 0:
                return 0, min(MOST, (1 << int(match[2])) - 1)
            return low, high
        if match := _LOAD.match(made):
            return self._loaded(match[2], int(match[1]))
        if match := _SELECT.match(made):
            return _union(self._of(match[1]), self._of(match[2]))
        if match := _PHI.match(made):
            return self._chosen(match[1], match[2])
        return -MOST, MOST

    def _loaded(self, variable: str, bits: int) -> Range:
        field = self._made.get(variable, "")
        most = next((m for n, m in BOUNDS.items() if re.match(rf"%{n}(\.addr)?\d*$", variable)), MOST)
        most = min(most, (1 << bits) - 1)
        if not field.startswith("alloca") or not self._stored.get(variable):
            return (0 if most < MOST else -most), most
        below = [self._of(b)[1] for b in self._below.get(variable, ())]
        first, *rest = (s for s in self._stored[variable] if not below or not self._steps(s, variable))
        low, high = self._of(first)
        for other in rest:
            low, high = _union((low, high), self._of(other))
        if below:
            high = max(high, *below)
        return (max(low, 0), min(high, most)) if most < MOST else (low, high)

    def _chosen(self, left: str, right: str) -> Range:
        """Of one of two values; of the smaller or the larger one if that is what the code compares them for."""

        def variable(name: str) -> str:
            load = _LOAD.match(self._made.get(name, ""))
            return load[2] if load else name

        (a, b), (c, d) = self._of(left), self._of(right)
        for made in self._made.values():
            order = _ORDER.match(made)
            if order and (variable(order[2]), variable(order[3])) == (variable(left), variable(right)):
                return (min(a, c), min(b, d)) if order[1] == "l" else (max(a, c), max(b, d))
        return _union((a, b), (c, d))

    def _steps(self, value: str, counter: str) -> bool:
        """Whether a value is that of a loop's counter and something more."""
        match = _BINARY.match(self._made.get(value, ""))
        load = _LOAD.match(self._made.get(match[4], "")) if match and match[1] == "add" else None
        return load is not None and load[2] == counter

    def _binary(self, op: str, left: str, right: str) -> Range:
        (a, b), (c, d) = self._of(left), self._of(right)
        if op == "add":
            return a + c, b + d
        if op == "sub":
            return a - d, b - c
        if op == "mul":
            corners = [a * c, a * d, b * c, b * d]
            return min(corners), max(corners)
        if op == "shl":
            return (a << d if a < 0 else a << max(c, 0), b << min(d, 31)) if 0 <= d < 32 else (-MOST, MOST)
        if op in ("sdiv", "udiv") and c >= 0:
            c, d = max(c, 1), max(d, 1)
            return min(_quotient(a, c), _quotient(a, d)), max(_quotient(b, c), _quotient(b, d))
        if op in ("srem", "urem") and c >= 0:
            return (0 if a >= 0 else -d + 1), min(d - 1, max(b, 0) if a >= 0 else d - 1)
        if op == "and" and (c == d >= 0 or a == b >= 0):
            return 0, d if c == d else b
        if op in ("ashr", "lshr") and c == d >= 0 and (a >= 0 or op == "ashr"):
            return a >> c, b >> c
        if op in ("or", "xor") and a >= 0 and c >= 0:
            return 0, (1 << max(b.bit_length(), d.bit_length())) - 1
        return -MOST, MOST


def _quotient(a: int, b: int) -> int:
    return int(a / b)


def _union(a: Range, b: Range) -> Range:
    return min(a[0], b[0]), max(a[1], b[1])
