"""Converts the value of an option, from code or a file, to the type of its field or argument."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import numbers
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., None])


def nearest(name: str, known: Iterable[str], *, likeness: float = 0.6) -> str | None:
    """The known name that is most similar to `name`; None if none is similar.

    Args:
        name: Any text.
        known: Valid names.
        likeness: The least similarity; 1 for the name itself.
    """
    found = get_close_matches(name, list(known), n=1, cutoff=likeness)
    return found[0] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: ``"; did you mean 'loco'?"``, or a period."""
    near = nearest(name, known)
    return "." if near is None else f"; did you mean {near!r}?"


def unknown_option(of: str, name: str, known: Iterable[str], *, advice: str = "") -> TypeError:
    """The error for a name that a constructor does not know.

    Args:
        of: The class that is constructed.
        name: The unknown option.
        known: All options.
        advice: What to do instead, if known. Otherwise the message gives the nearest name, or all names.
    """
    names = [each for each in known if each not in ("self", "args", "kwargs", "unknown")]
    hint = did_you_mean(name, names)
    if advice:
        return TypeError(f"{of} has no option {name!r}: {advice}")
    return TypeError(f"{of} has no option {name!r}{hint} Known: {', '.join(names)}")


def refusing_unknown_options(initialize: F) -> F:
    """Make a hand-written constructor raise the same error for unknown options."""
    known = [name for name in inspect.signature(initialize).parameters if name != "self"]

    @functools.wraps(initialize)
    def __init__(self: Any, *values: Any, **options: Any) -> None:
        if unknown := next((name for name in options if name not in known), None):
            raise unknown_option(type(self).__name__, unknown, known)
        initialize(self, *values, **options)

    return __init__  # type: ignore[return-value]


_NUMBERS = {int: "an integer", float: "a number"}
_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")  # text in YAML 1.1, which wants 1.0e-3
_NAMES = {bool: "true or false", str: "a string", Path: "a path", **_NUMBERS}


class _Conversion(NamedTuple):
    make: Callable[[Any], Any]
    description: str
    known: Callable[[], Iterable[Any]]


_conversions: dict[type, _Conversion] = {}


def register_conversion(
    kind: type, make: Callable[[Any], Any], description: str, known: Callable[[], Iterable[Any]] = tuple
) -> None:
    """Let fields of type `kind` accept more than its instances from now on.

    Args:
        kind: A class.
        make: Makes an instance from a value. It raises `Mismatch` for a value that it does not accept, and ValueError
            for a wrong one, such as the name of an unknown preset.
        description: Describes accepted values, for error messages and tables.
        known: Returns instances, for hints about where an option belongs.
    """
    _conversions[kind] = _Conversion(make, description, known)


class Mismatch(ValueError):
    """A value does not have the expected type."""


class Faults(ValueError):
    """The faults in parts of a value: each part's place, and a message that continues it."""

    def __init__(self, *faults: tuple[str, str]) -> None:
        super().__init__(*faults)
        self.faults = faults

    def __str__(self) -> str:
        return "; ".join(place + text for place, text in self.faults)


def convert(value: object, kind: type[T], where: str) -> T:
    """Make an object of type `kind` from `value`: mappings become dataclasses, and names become presets.

    Args:
        value: Mappings, lists, texts and numbers. Objects of the expected type are returned unchanged.
        kind: A type with a registered conversion, a dataclass, or any type that their fields may have.
        where: The value's name in errors.

    Raises:
        ValueError: A name or a key is unknown (the message names the nearest valid one), a key is missing, or a value
            has the wrong type or is out of range. The message lists all faults with their places.
    """
    made: T = convert_all([(where, value, kind)])[0]
    return made


def convert_all(parts: Iterable[tuple[str, Any, Any]]) -> list[Any]:
    """Convert several values, each given by name, value and type; see `convert`.

    Raises:
        ValueError: See `convert`; the message lists the faults of all values.
    """
    try:
        return _parts(parts)
    except Faults as error:
        raise ValueError(str(error)) from error


def _parts(parts: Iterable[tuple[str, Any, Any]]) -> list[Any]:
    """Convert the parts of one value, each given by place, value and type.

    Raises:
        Faults: Some parts are wrong; all of them are listed.
    """
    made: list[Any] = []
    faults: list[tuple[str, str]] = []
    for place, value, kind in parts:
        try:
            made.append(_converted(value, kind))
        except Mismatch:
            faults.append((place, f" must be {describe_type(kind)}, got {value!r}"))
        except Faults as error:
            faults += [(place + below, text) for below, text in error.faults]
        except (TypeError, ValueError) as error:
            faults.append((place, f": {error}"))
    if faults:
        raise Faults(*faults)
    return made


def call(function: Callable[..., T], arguments: Mapping[str, Any]) -> T:
    """Call a function, or construct a dataclass, with arguments from a mapping.

    Raises:
        ValueError: An argument is unknown, missing or wrong.
    """
    kinds = types_of(function)
    known = inspect.signature(function).parameters
    unknown = [f"unknown key {key!r}{did_you_mean(str(key), known)}" for key in arguments if key not in known]
    faults = [("", f": {' '.join(unknown)} Known: {', '.join(known)}")] if unknown else []
    for name, parameter in known.items():
        if parameter.default is parameter.empty and name not in arguments:
            faults.append((f".{name}", " is missing"))
    given = {name: arguments[name] for name in known if name in arguments}
    try:
        made = _parts([(f".{name}", value, kinds[name]) for name, value in given.items()])
    except Faults as error:
        faults += error.faults
    if faults:
        raise Faults(*faults)
    return function(**dict(zip(given, made, strict=True)))


def named(value: Any, known: Mapping[str, T], what: str) -> tuple[T, dict[str, Any]]:
    """Look up a name or ``{name: ..., option: value, ...}``. Return the named value and the options.

    Args:
        value: Either form; case, hyphens and underscores do not matter.
        known: The valid values by name.
        what: The kind of value, for errors.

    Raises:
        Mismatch: `value` has neither form.
        ValueError: The name is missing or unknown; the message names the nearest one.
    """
    options = {"name": value} if isinstance(value, str) else dict(_checked(value, isinstance(value, Mapping)))
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ValueError(f"needs the {what}'s name under 'name', got {value!r}")
    by_plain_name = {plain(each): each for each in known}
    if plain(name) not in by_plain_name:
        raise ValueError(f"unknown {what} {name!r}{did_you_mean(name.lower(), known)} Known: {', '.join(known)}")
    return known[by_plain_name[plain(name)]], options


def plain(name: str) -> str:
    """A name without what does not matter: case, hyphens and underscores."""
    return name.strip().lower().replace("_", "").replace("-", "")


@functools.cache
def types_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Types of a class's fields or a function's arguments, by name."""
    return typing.get_type_hints(function)


# -- one value --------------------------------------------------------------------------------------------------------


def written(kind: Any) -> Any:
    """The type that a constructor accepts for `kind`, including a name or a mapping if a conversion is registered."""
    kinds = typing.get_args(kind) or (kind,)
    return typing.Union[(*kinds, str, dict[str, Any])] if any(each in _conversions for each in kinds) else kind


def known_of(kind: Any) -> list[Any]:
    """The known instances of `kind`, or of the members of a union."""
    kinds = typing.get_args(kind) or (kind,)
    return [value for each in kinds if each in _conversions for value in _conversions[each].known()]


def _converted(value: Any, kind: Any) -> Any:
    """`value` in the form of a field of type `kind`: lists become tuples, and integers floats where needed."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _first(value, arguments)
    if origin is typing.Literal:
        return _checked(value, any(value == each and type(value) is type(each) for each in arguments))
    if origin in (tuple, Sequence):
        return _elements(value, arguments)
    if origin is Mapping:
        return _values(value, arguments[1])
    if origin is Callable:
        return _checked(value, callable(value))
    if kind in _NUMBERS:
        return _number(value, kind)
    return _instance(value, origin or kind)


def _checked(value: Any, fits: bool) -> Any:
    if not fits:
        raise Mismatch
    return value


def _first(value: Any, kinds: Sequence[Any]) -> Any:
    """Convert to the first type of a union that accepts the value."""
    for kind in kinds:
        try:
            return _converted(value, kind)
        except Mismatch:
            continue
    raise Mismatch


def _elements(value: Any, kinds: Sequence[Any]) -> tuple[Any, ...]:
    """A tuple of any length, or of the length that its type requires."""
    _checked(value, isinstance(value, Sequence) and not isinstance(value, str))
    if _is_of_any_length(kinds):
        kinds = [kinds[0]] * len(value)
    _checked(value, len(value) == len(kinds))
    return tuple(_parts((f"[{at}]", each, kind) for at, (each, kind) in enumerate(zip(value, kinds, strict=True))))


def _is_of_any_length(kinds: Sequence[Any]) -> bool:
    """Whether these are the arguments of ``Sequence[T]`` or ``tuple[T, ...]``."""
    return len(kinds) == 1 or kinds[1] is Ellipsis


def _values(value: Any, kind: Any) -> dict[Any, Any]:
    """A mapping whose values are of one type."""
    _checked(value, isinstance(value, Mapping))
    return dict(zip(value, _parts((f"[{key!r}]", each, kind) for key, each in value.items()), strict=True))


def _number(value: Any, kind: type) -> Any:
    if kind is float and isinstance(value, str) and _EXPONENT.fullmatch(value):
        return float(value)
    wanted = numbers.Integral if kind is int else numbers.Real
    return kind(_checked(value, isinstance(value, wanted) and not isinstance(value, bool)))


def _instance(value: Any, kind: Any) -> Any:
    if kind is Any or not isinstance(kind, type) or isinstance(value, kind):
        return value
    if kind in _conversions:
        return _conversions[kind].make(value)
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return call(kind, value)
    raise Mismatch


def describe_type(kind: Any) -> str:
    """A short description of the values, except None, that a field of type `kind` accepts."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe_type(each) for each in arguments if each is not type(None))
    if origin is typing.Literal:
        *others, last = map(repr, arguments)
        return f"{', '.join(others)} or {last}" if others else last
    if origin in (tuple, Sequence):
        if _is_of_any_length(arguments):
            return f"a list, each element {describe_type(arguments[0])}"
        return f"a list of {len(arguments)}: {'; '.join(map(describe_type, arguments))}"
    if origin is Callable:
        return "a function"
    if origin is Mapping:
        return "a mapping"
    if kind in _conversions:
        return _conversions[kind].description
    or_mapping = " or a mapping" if dataclasses.is_dataclass(kind) else ""
    return _NAMES.get(kind) or f"an instance of {getattr(kind, '__name__', kind)}{or_mapping}"
