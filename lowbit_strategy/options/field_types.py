"""Values checked against the types of a configuration's fields."""

from __future__ import annotations

import functools
import numbers
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

_NAMES = {int: "an integer", float: "a number", bool: "True or False", str: "a string", type(None): "None"}


class Conversion(NamedTuple):
    """What else than instances a class accepts: `make` turns it into one, or raises ValueError.

    Args:
        make: Called with values of type `source`.
        source: Types of the values that are converted.
        description: What is accepted, for errors.
    """

    make: Callable[[Any], Any]
    source: tuple[type, ...]
    description: str


_conversions: dict[type, Conversion] = {}


class Mismatch(ValueError):
    """A value is not of the type of its field."""


def register_conversion(kind: type, conversion: Conversion) -> None:
    """Fields of type `kind` accept more than its instances from now on."""
    _conversions[kind] = conversion


@functools.cache
def field_types(cls: type) -> Mapping[str, Any]:
    """Types of the fields by name."""
    return typing.get_type_hints(cls)


def converted(value: Any, kind: Any) -> Any:
    """`value` as a field of type `kind` holds it: lists become tuples, integers floats where floats are wanted.

    Raises:
        Mismatch: It is of another type.
        ValueError: It is of a type that `kind` accepts, but cannot be converted: the name of an unknown preset.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _first(value, arguments)
    if origin is typing.Literal:
        return _checked(value, any(value == each and type(value) is type(each) for each in arguments))
    if origin in (tuple, Sequence):
        return _elements(value, arguments)
    if origin is Callable:
        return _checked(value, callable(value))
    if kind is int:
        _checked(value, isinstance(value, numbers.Integral) and not isinstance(value, bool))
        return int(value)
    if kind is float:
        _checked(value, isinstance(value, numbers.Real) and not isinstance(value, bool))
        return float(value)
    return _instance(value, origin or kind)


def describe(kind: Any) -> str:
    """What a field of type `kind` accepts, for errors."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _either([describe(each) for each in arguments])
    if origin is typing.Literal:
        return _either([repr(each) for each in arguments])
    if origin in (tuple, Sequence):
        if (len(arguments) == 2 and arguments[1] is Ellipsis) or origin is Sequence:
            return f"a tuple, each element {describe(arguments[0])}"
        return f"a tuple of {len(arguments)}: {'; '.join(map(describe, arguments))}"
    if origin is Callable:
        return "a function"
    if kind in _conversions:
        return _conversions[kind].description
    return _NAMES.get(kind) or f"an instance of {getattr(kind, '__name__', kind)}"


def _checked(value: Any, fits: bool) -> Any:
    if not fits:
        raise Mismatch
    return value


def _first(value: Any, kinds: Sequence[Any]) -> Any:
    for kind in kinds:
        try:
            return converted(value, kind)
        except Mismatch:
            continue
    raise Mismatch


def _elements(value: Any, kinds: Sequence[Any]) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise Mismatch
    if len(kinds) == 1 or kinds[1] is Ellipsis:
        return tuple(converted(each, kinds[0]) for each in value)
    _checked(value, len(value) == len(kinds))
    return tuple(converted(each, kind) for each, kind in zip(value, kinds, strict=True))


def _instance(value: Any, kind: Any) -> Any:
    if not isinstance(kind, type) or isinstance(value, kind):
        return value
    conversion = _conversions.get(kind)
    if conversion is None or not isinstance(value, conversion.source):
        raise Mismatch
    return conversion.make(value)


def _either(choices: Sequence[str]) -> str:
    return choices[0] if len(choices) == 1 else f"{', '.join(choices[:-1])} or {choices[-1]}"
