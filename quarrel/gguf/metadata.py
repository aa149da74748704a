"""The keys of a GGUF file behind typed reads, so that a missing or nonsensical key is an error that names it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias, TypeVar

from quarrel.errors import ModelError
from quarrel.gguf.values import Packed, Value, ValueType

# The methods below are called str, int, float and bool, which hides the types of those names inside the class.
_str: TypeAlias = str
_int: TypeAlias = int
_float: TypeAlias = float
_bool: TypeAlias = bool
D = TypeVar("D")

REQUIRED: Final[Any] = object()


class Metadata(Mapping[str, Value]):
    """Keys and Python values, plus typed reads. Arrays are decoded when first read, and need no open file.

    Strings: text values replace bytes that are not UTF-8 by U+FFFD; elements of string arrays keep them as lone
    surrogates, so `piece.encode("utf-8", "surrogateescape")` is exactly what the file holds.

    Typed reads raise ModelError, naming the key, when it is missing (and no default is given), has another type or lies
    outside its range. Any GGUF integer type reads as int; float accepts integers too; bool accepts only bool.
    """

    def __init__(self, values: Mapping[_str, Value | Packed], kinds: Mapping[_str, ValueType] | None = None) -> None:
        self._values = dict(values)
        self._kinds = dict(kinds or {})

    def __getitem__(self, key: _str) -> Value:
        value = self._values[key]
        if isinstance(value, Packed):
            value = self._values[key] = value.decode()
        return value.copy() if isinstance(value, list) else value

    def __contains__(self, key: object) -> _bool:
        return key in self._values

    def __iter__(self) -> Iterator[_str]:
        return iter(self._values)

    def __len__(self) -> _int:
        return len(self._values)

    def __repr__(self) -> _str:
        return f"Metadata({len(self)} keys)"

    def replaced(self, values: Mapping[_str, Value]) -> Metadata:
        """The same with other values for some keys, or with further keys."""
        kinds = {key: kind for key, kind in self._kinds.items() if key not in values}
        return Metadata({**self._values, **values}, kinds)

    def kind(self, key: _str) -> ValueType | None:
        """The type that the file gave to this value, or to an array's elements; None where it came from no file."""
        return self._kinds.get(key)

    def length(self, key: _str) -> _int | None:
        """Elements of an array, without decoding it; None for a single value or a missing key."""
        value = self._values.get(key)
        if isinstance(value, Packed):
            return value.count
        return len(value) if isinstance(value, list) else None

    def str(self, key: _str, default: D = REQUIRED) -> _str | D:
        value = self._get(key, default)
        return value if value is default else _text(key, value)

    def int(self, key: _str, default: D = REQUIRED, *, lo: _int | None = None, hi: _int | None = None) -> _int | D:
        value = self._get(key, default)
        return value if value is default else _integer(key, value, lo, hi)

    def float(
        self,
        key: _str,
        default: D = REQUIRED,
        *,
        lo: _float | None = None,
        hi: _float | None = None,
        finite: _bool = True,
    ) -> _float | D:
        value = self._get(key, default)
        return value if value is default else _number(key, value, lo, hi, finite)

    def bool(self, key: _str, default: D = REQUIRED) -> _bool | D:
        value = self._get(key, default)
        return value if value is default else _truth(key, value)

    def ints(
        self,
        key: _str,
        default: D = REQUIRED,
        *,
        lo: _int | None = None,
        hi: _int | None = None,
        count: _int | None = None,
    ) -> list[_int] | D:
        """An array of integers. With `count`, its length must be that, and a single integer stands for all of them."""
        value = self._get(key, default)
        if value is default:
            return value
        items = _items(key, value, count)
        if lo is hi is None and _all_of(int, items):
            return list(items)
        return [_integer(key, item, lo, hi) for item in items]

    def floats(
        self,
        key: _str,
        default: D = REQUIRED,
        *,
        lo: _float | None = None,
        hi: _float | None = None,
        finite: _bool = True,
        count: _int | None = None,
    ) -> list[_float] | D:
        """An array of floats; `count` as for `ints`."""
        value = self._get(key, default)
        if value is default:
            return value
        items = _items(key, value, count)
        if lo is hi is None and _all_of(float, items) and not (finite and not all(map(math.isfinite, items))):
            return list(items)
        return [_number(key, item, lo, hi, finite) for item in items]

    def bools(self, key: _str, default: D = REQUIRED, *, count: _int | None = None) -> list[_bool] | D:
        """An array of booleans; `count` as for `ints`."""
        value = self._get(key, default)
        return value if value is default else [_truth(key, item) for item in _items(key, value, count)]

    def strs(self, key: _str, default: D = REQUIRED) -> list[_str] | D:
        value = self._get(key, default)
        if value is default:
            return value
        items = _items(key, value, None)
        return list(items) if _all_of(str, items) else [_text(key, item) for item in items]

    def _get(self, key: _str, default: Any) -> Any:
        if key in self._values:
            return self[key]
        if default is REQUIRED:
            raise ModelError(f"the metadata key {key!r} is missing, and this model cannot be used without it")
        return default


def _refuse(key: str, value: object, wanted: str) -> ModelError:
    shown = f"an array of {len(value)}" if isinstance(value, list) else repr(value)[:80]
    return ModelError(f"the metadata key {key!r} is {shown}, wanted {wanted}")


def _items(key: str, value: Any, count: int | None) -> list[Any]:
    if isinstance(value, list):
        if count is not None and len(value) != count:
            raise _refuse(key, value, f"{count} elements")
        return value
    if count is None:
        raise _refuse(key, value, "an array")
    return [value] * count


def _all_of(kind: type, items: list[Any]) -> bool:
    """Whether nothing else is among them; vocabularies are long, and to look at each would take longer."""
    return set(map(type, items)) <= {kind}


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _refuse(key, value, "a string")
    return value


def _integer(key: str, value: Any, lo: int | None, hi: int | None) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _refuse(key, value, "an integer")
    _in_range(key, value, lo, hi)
    return value


def _number(key: str, value: Any, lo: float | None, hi: float | None, finite: bool) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _refuse(key, value, "a number")
    if finite and not math.isfinite(value):
        raise _refuse(key, value, "a finite number")
    _in_range(key, value, lo, hi)
    return float(value)


def _truth(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _refuse(key, value, "true or false")
    return value


def _in_range(key: str, value: float, lo: float | None, hi: float | None) -> None:
    # Written so that NaN, which compares false to everything, is refused wherever there is a bound.
    low = lo is None or value >= lo
    high = hi is None or value <= hi
    if not (low and high):
        wanted = f"at least {lo}" if hi is None else f"at most {hi}" if lo is None else f"{lo} to {hi}"
        raise _refuse(key, value, wanted)
