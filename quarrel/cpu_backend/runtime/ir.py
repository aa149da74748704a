"""A small language over LLVM IR: values with operators, vectors, mutable variables and structured loops.

A kernel is a Python function that is run once to emit instructions through a `Kernel`; numbers known in Python are baked
in, Python loops unroll, `k.range` makes a real loop. `Val` wraps one SSA value, scalar or vector; integer operators are
two's complement, `>>` is the logical shift, comparisons are signed. Plain Python numbers take the other operand's type.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from llvmlite import ir

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
_FLOAT_BITS = {ir.HalfType: 16, ir.FloatType: 32, ir.DoubleType: 64}
FLOATS = tuple(_FLOAT_BITS)


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not name. Only operands of intrinsics are of this type."""

    def _to_string(self) -> str:
        return "bfloat"


BF16 = _BFloat()


@lru_cache(1024)
def vec(element: ir.Type, lanes: int) -> ir.Type:
    """The vector type, or the element itself for one lane."""
    return element if lanes == 1 else ir.VectorType(element, lanes)


def lanes_of(type: ir.Type) -> int:
    return type.count if isinstance(type, ir.VectorType) else 1


def element_of(type: ir.Type) -> ir.Type:
    return type.element if isinstance(type, ir.VectorType) else type


def is_float(type: ir.Type) -> bool:
    return isinstance(element_of(type), FLOATS)


def bits_of(type: ir.Type) -> int:
    element = element_of(type)
    each = element.width if isinstance(element, ir.IntType) else _FLOAT_BITS[element.__class__]
    return int(each) * lanes_of(type)


def nbytes(type: ir.Type) -> int:
    return bits_of(type) // 8


def suffix(type: ir.Type) -> str:
    """LLVM's name for a type in an overloaded intrinsic, such as `v16f32`."""
    element = element_of(type)
    name = f"i{element.width}" if isinstance(element, ir.IntType) else f"f{bits_of(element)}"
    return name if lanes_of(type) == 1 else f"v{lanes_of(type)}{name}"


class Val:
    """One SSA value and the kernel that it belongs to."""

    __slots__ = ("k", "v")

    def __init__(self, k: Kernel, v: Any) -> None:
        self.k, self.v = k, v

    @property
    def type(self) -> ir.Type:
        return self.v.type

    @property
    def lanes(self) -> int:
        return lanes_of(self.v.type)

    def _binary(self, other: Any, int_op: str, float_op: str | None, swap: bool = False) -> Val:
        a, b = self.v, self.k.lift(other, self.type).v
        if swap:
            a, b = b, a
        name = float_op if is_float(self.type) else int_op
        assert name, f"{int_op} of {self.type}"
        return Val(self.k, getattr(self.k.b, name)(a, b))

    def __add__(self, o: Any) -> Val:
        return self._binary(o, "add", "fadd")

    def __sub__(self, o: Any) -> Val:
        return self._binary(o, "sub", "fsub")

    def __mul__(self, o: Any) -> Val:
        return self._binary(o, "mul", "fmul")

    def __truediv__(self, o: Any) -> Val:
        return self._binary(o, "", "fdiv")

    def __floordiv__(self, o: Any) -> Val:
        return self._binary(o, "sdiv", None)

    def __mod__(self, o: Any) -> Val:
        return self._binary(o, "srem", None)

    def __and__(self, o: Any) -> Val:
        return self._binary(o, "and_", None)

    def __or__(self, o: Any) -> Val:
        return self._binary(o, "or_", None)

    def __xor__(self, o: Any) -> Val:
        return self._binary(o, "xor", None)

    def __lshift__(self, o: Any) -> Val:
        return self._binary(o, "shl", None)

    def __rshift__(self, o: Any) -> Val:
        return self._binary(o, "lshr", None)

    def __radd__(self, o: Any) -> Val:
        return self._binary(o, "add", "fadd", swap=True)

    def __rmul__(self, o: Any) -> Val:
        return self._binary(o, "mul", "fmul", swap=True)

    def __rsub__(self, o: Any) -> Val:
        return self._binary(o, "sub", "fsub", swap=True)

    def __rtruediv__(self, o: Any) -> Val:
        return self._binary(o, "", "fdiv", swap=True)

    def __neg__(self) -> Val:
        return Val(self.k, self.k.b.fneg(self.v) if is_float(self.type) else self.k.b.neg(self.v))

    def ashr(self, bits: int) -> Val:
        return self._binary(bits, "ashr", None)

    def udiv(self, o: Any) -> Val:
        return self._binary(o, "udiv", None)

    def _compare(self, o: Any, op: str) -> Val:
        other = self.k.lift(o, self.type).v
        # Unordered "not equal" so that x != x finds NaN; every other comparison is false for NaN.
        if is_float(self.type):
            compare = self.k.b.fcmp_unordered if op == "!=" else self.k.b.fcmp_ordered
        else:
            compare = self.k.b.icmp_signed
        return Val(self.k, compare(op, self.v, other))

    def __lt__(self, o: Any) -> Val:
        return self._compare(o, "<")

    def __le__(self, o: Any) -> Val:
        return self._compare(o, "<=")

    def __gt__(self, o: Any) -> Val:
        return self._compare(o, ">")

    def __ge__(self, o: Any) -> Val:
        return self._compare(o, ">=")

    def eq(self, o: Any) -> Val:
        return self._compare(o, "==")

    def ne(self, o: Any) -> Val:
        return self._compare(o, "!=")

    def __getitem__(self, lane: Any) -> Val:
        return Val(self.k, self.k.b.extract_element(self.v, self.k.lift(lane, I32).v))

    def with_lane(self, lane: Any, value: Val) -> Val:
        return Val(self.k, self.k.b.insert_element(self.v, value.v, self.k.lift(lane, I32).v))

    def shuffle(self, lanes: Sequence[int], other: Val | None = None) -> Val:
        """Lanes picked from this vector followed by `other`."""
        mask = _constant(I32, tuple(lanes), vector=True)
        second = other.v if other is not None else _undefined(self.type)
        return Val(self.k, self.k.b.shuffle_vector(self.v, second, mask))

    def concat(self, other: Val) -> Val:
        return self.shuffle(range(self.lanes + other.lanes), other)

    def bitcast(self, type: ir.Type) -> Val:
        return self if type == self.type else Val(self.k, self.k.b.bitcast(self.v, type))

    def to(self, element: ir.Type, unsigned: bool = False) -> Val:
        """Value conversion of every lane; integers are signed unless `unsigned`; floats truncate to integers."""
        source, target = element_of(self.type), vec(element, self.lanes)
        if source == element:
            return self
        b = self.k.b
        if is_float(source) and is_float(element):
            convert = b.fpext if bits_of(element) > bits_of(source) else b.fptrunc
        elif is_float(source):
            convert = b.fptosi
        elif is_float(element):
            convert = b.uitofp if unsigned else b.sitofp
        elif element.width < source.width:
            convert = b.trunc
        else:
            convert = b.zext if unsigned else b.sext
        return Val(self.k, convert(self.v, target))


class Var:
    """A variable assigned through `.v`; LLVM turns it into registers."""

    __slots__ = ("_k", "_slot")

    def __init__(self, k: Kernel, slot: Any) -> None:
        self._k, self._slot = k, slot

    @property
    def v(self) -> Val:
        return Val(self._k, self._k.b.load(self._slot))

    @v.setter
    def v(self, value: Val) -> None:
        self._k.b.store(value.v, self._slot)


class Kernel:
    """Emits one function. Addresses are plain i64 values; loads and stores need no alignment."""

    def __init__(self, module: ir.Module, name: str, params: int, result: ir.Type | None = None) -> None:
        self.module = module
        fn_type = ir.FunctionType(result or ir.VoidType(), [I64] * params)
        self.fn = ir.Function(module, fn_type, name)
        self._entry = ir.IRBuilder(self.fn.append_basic_block("entry"))
        body = self.fn.append_basic_block("body")
        self.b = ir.IRBuilder(body)
        self._body = body
        self.params = [Val(self, a) for a in self.fn.args]

    def finish(self, result: Val | None = None) -> None:
        """Closes the function."""
        if result is None:
            self.b.ret_void()
        else:
            self.b.ret(result.v)
        self._entry.branch(self._body)

    # Constants and variables

    def lift(self, x: Any, type: ir.Type) -> Val:
        """A Python number as a constant of `type`; a scalar `Val` is broadcast to a vector type."""
        if isinstance(x, Val):
            if lanes_of(type) > 1 and x.lanes == 1:
                return self.splat(x, lanes_of(type))
            assert x.type == type, f"{x.type} where {type} is needed"
            return x
        element = element_of(type)
        number = _rounded(float(x), element).hex() if is_float(type) else int(x) & ((1 << element.width) - 1)
        return Val(self, _constant(element, (number,) * lanes_of(type)))

    def i64(self, x: int) -> Val:
        return self.lift(x, I64)

    def f32(self, x: float, lanes: int = 1) -> Val:
        return self.lift(x, vec(F32, lanes))

    def zero(self, type: ir.Type) -> Val:
        return self.lift(0, type)

    def lane_constants(self, element: ir.Type, values: Sequence[float]) -> Val:
        """A constant vector."""
        if is_float(element):
            items = [_rounded(float(x), element) for x in values]
        else:
            items = [int(x) & ((1 << element.width) - 1) for x in values]
        return Val(self, ir.Constant(ir.VectorType(element, len(items)), items))

    def splat(self, x: Val, lanes: int) -> Val:
        one = self.b.insert_element(_undefined(ir.VectorType(x.type, lanes)), x.v, _constant(I32, (0,)))
        return Val(self, one).shuffle([0] * lanes)

    def join(self, parts: Sequence[Val]) -> Val:
        """Scalars as one vector."""
        out = Val(self, _undefined(ir.VectorType(parts[0].type, len(parts))))
        for lane, part in enumerate(parts):
            out = out.with_lane(lane, part)
        return out

    def var(self, init: Val) -> Var:
        out = Var(self, self._entry.alloca(init.type))
        out.v = init
        return out

    def stack(self, size: int, align: int = 64) -> Val:
        """Address of `size` bytes that live as long as the call."""
        slot = self._entry.alloca(I8, size)
        slot.align = align
        return Val(self, self.b.ptrtoint(slot, I64))

    def table(self, values: Sequence[int]) -> Val:
        """Address of a constant table of i64."""
        type = ir.ArrayType(I64, len(values))
        data = ir.GlobalVariable(self.module, type, self.module.get_unique_name("table"))
        data.global_constant, data.linkage = True, "internal"
        data.initializer = ir.Constant(type, list(values))
        return Val(self, self.b.ptrtoint(data, I64))

    # Memory

    def _pointer(self, address: Val, type: ir.Type) -> Any:
        return self.b.inttoptr(address.v, type.as_pointer())

    def load(self, address: Val, type: ir.Type, offset: int = 0, align: int = 1) -> Val:
        out = self.b.load(self._pointer(address + offset if offset else address, type))
        out.align = align
        return Val(self, out)

    def store(self, value: Val, address: Val, offset: int = 0, align: int = 1) -> None:
        at = self._pointer(address + offset if offset else address, value.type)
        self.b.store(value.v, at).align = align

    def prefetch(self, address: Val, offset: int = 0, locality: int = 3) -> None:
        """A read prefetch; locality 3 is into the first-level cache, 2 into the second."""
        at = self._pointer(address + offset if offset else address, I8)
        self.call_raw(
            "llvm.prefetch.p0" if at.type.intrinsic_name == "p0" else "llvm.prefetch.p0i8",
            ir.VoidType(),
            [at, *(_constant(I32, (n,)) for n in (0, locality, 1))],
        )

    # Calls

    def call_raw(self, name: str, result: ir.Type, args: Sequence[Any]) -> Any:
        fn = self.module.globals.get(name)
        if fn is None:
            fn = ir.Function(self.module, ir.FunctionType(result, [a.type for a in args]), name)
        return self.b.call(fn, list(args))

    def call(self, name: str, result: ir.Type, *args: Val) -> Val:
        """An LLVM intrinsic or an external function by name."""
        return Val(self, self.call_raw(name, result, [a.v for a in args]))

    def overloaded(self, name: str, *args: Val) -> Val:
        """An intrinsic overloaded on one type: `llvm.<name>.<suffix>`."""
        return self.call(f"llvm.{name}.{suffix(args[0].type)}", args[0].type, *args)

    def fma(self, a: Val, b: Val | float, c: Val | float) -> Val:
        """a * b + c, fused where the hardware fuses (always the same way within one feature level)."""
        return self.overloaded("fmuladd", a, self.lift(b, a.type), self.lift(c, a.type))

    def select(self, condition: Val, yes: Val | float, no: Val | float) -> Val:
        type = yes.type if isinstance(yes, Val) else no.type  # type: ignore[union-attr]
        return Val(self, self.b.select(condition.v, self.lift(yes, type).v, self.lift(no, type).v))

    def both(self, a: Val, b: Val) -> Val:
        """Logical and of conditions."""
        return Val(self, self.b.and_(a.v, b.v))

    def either_of(self, a: Val, b: Val) -> Val:
        """Logical or of conditions."""
        return Val(self, self.b.or_(a.v, b.v))

    def maximum(self, a: Val, b: Val | float | int) -> Val:
        """The larger; a NaN in `a` gives `b`."""
        b = self.lift(b, a.type)
        return self.select(a > b, a, b)

    def minimum(self, a: Val, b: Val | float | int) -> Val:
        """The smaller; a NaN in `a` gives `b`."""
        b = self.lift(b, a.type)
        return self.select(a < b, a, b)

    def fabs(self, a: Val) -> Val:
        return self.overloaded("fabs", a)

    def sqrt(self, a: Val) -> Val:
        return self.overloaded("sqrt", a)

    # Control

    @contextmanager
    def range(self, start: Val | int, stop: Val | int, step: int = 1) -> Iterator[Val]:
        """`for i in range(start, stop, step)`, i an i64."""
        stop = self.lift(stop, I64)
        i = self.var(self.lift(start, I64))
        head, body, end = (self.fn.append_basic_block(n) for n in ("head", "loop", "end"))
        self.b.branch(head)
        self.b.position_at_end(head)
        now = i.v
        self.b.cbranch((now < stop).v, body, end)
        self.b.position_at_end(body)
        yield now
        i.v = now + step
        self.b.branch(head)
        self.b.position_at_end(end)

    @contextmanager
    def loop_while(self, condition: Callable[[], Val]) -> Iterator[None]:
        """`while condition():`."""
        head, body, end = (self.fn.append_basic_block(n) for n in ("head", "while", "end"))
        self.b.branch(head)
        self.b.position_at_end(head)
        self.b.cbranch(condition().v, body, end)
        self.b.position_at_end(body)
        yield
        self.b.branch(head)
        self.b.position_at_end(end)

    @contextmanager
    def when(self, condition: Val) -> Iterator[None]:
        with self.b.if_then(condition.v):
            yield

    @contextmanager
    def either(self, condition: Val) -> Iterator[tuple[Any, Any]]:
        """`with k.either(c) as (yes, no): with yes: ...; with no: ...`."""
        with self.b.if_else(condition.v) as branches:
            yield branches


@lru_cache(4096)
def _constant(element: ir.Type, numbers: tuple[int | str, ...], vector: bool = False) -> ir.Constant:
    """Floats as `float.hex` writes them, which tells -0.0 from 0.0. llvmlite keeps the text of a constant: kernels have few
    different ones, thousands of times, and half of the time of making IR was theirs."""
    items = [float.fromhex(n) if isinstance(n, str) else n for n in numbers]
    if len(items) == 1 and not vector:
        return ir.Constant(element, items[0])
    return ir.Constant(ir.VectorType(element, len(items)), items)


@lru_cache(1024)
def _undefined(type: ir.Type) -> ir.Constant:
    return ir.Constant(type, ir.Undefined)


def _rounded(x: float, element: ir.Type) -> float:
    """llvmlite needs a constant that is exact in its type."""
    if math.isfinite(x) and isinstance(element, ir.FloatType):
        return float(struct.unpack("f", struct.pack("f", x))[0])
    return x
