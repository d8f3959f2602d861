"""Converts the value of an option, from code or a file, to the type of its field or argument."""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import numbers
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., None])

# What other libraries and publications call an option, or the last word of that, and its name here.
_ELSEWHERE = {
    "every": "every_n_steps",
    "h": "every",
    "interval": "every",
    "k": "density",
    "matrix_approximation_rank": "rank",
    "num_bits": "bits",
    "ratio": "density",
    "sparsity": "density",
    "start_powersgd_iter": "start_step",
    "steps": "every",
    "sync_every": "every",
}


def nearest(name: str, known: Iterable[str], *, likeness: float = 0.6) -> str | None:
    """The known name that is most similar to `name`, or that other libraries call `name`; None if none is similar.

    Args:
        name: Any text.
        known: Valid names.
        likeness: The least similarity; 1 for the name itself.
    """
    choices = list(known)
    last_word = name.lower().rpartition("_")[2]
    if (same := _ELSEWHERE.get(name.lower())) in choices:
        return same
    found = get_close_matches(name, choices, n=1, cutoff=likeness)
    return found[0] if found else next((each for each in choices if each == _ELSEWHERE.get(last_word)), None)


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
        advice: What to do instead, if known. Otherwise the message has the nearest name, or all names.
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


class Source(enum.Enum):
    """The origin of values: code or a file.

    A file has no tuples, functions or objects, and its numbers may be text, since YAML 1.1 reads ``1e-3`` as text.
    """

    CODE = enum.auto()
    FILE = enum.auto()


_NAMES = {
    Source.CODE: {bool: "True or False", str: "a string", Path: "a path", type(None): "None"},
    Source.FILE: {bool: "true or false", str: "a text", Path: "a path", type(None): ""},
}
_NUMBERS = {int: "an integer", float: "a number"}


class Conversion(NamedTuple):
    """What a class accepts in addition to its instances. `make` turns it into an instance.

    Args:
        make: Called with a value and its origin. It raises `Mismatch` for a value that it does not accept, and
            ValueError for a wrong one, such as the name of an unknown preset.
        description: What is accepted, for error messages.
        in_files: The same for values in files.
        forms: The types that code may pass, for constructors that show them.
        known: Returns instances, for hints about where an option belongs.
    """

    make: Callable[[Any, Source], Any]
    description: str
    in_files: str
    forms: tuple[Any, ...] = (str,)
    known: Callable[[], Iterable[Any]] = tuple


_conversions: dict[type, Conversion] = {}


def register_conversion(kind: type, conversion: Conversion) -> None:
    """Let fields of type `kind` accept more than its instances from now on."""
    _conversions[kind] = conversion


class Mismatch(ValueError):
    """A value does not have the expected type."""


class Faults(ValueError):
    """The faults in parts of a value: each part's place, and the rest of a sentence that begins with the place."""

    def __init__(self, *faults: tuple[str, str]) -> None:
        super().__init__(*faults)
        self.faults = faults

    def __str__(self) -> str:
        return "; ".join(place + text for place, text in self.faults)


def convert(value: object, kind: type[T], where: str, source: Source = Source.FILE) -> T:
    """Make an object of type `kind` from `value`: mappings become dataclasses, and names become presets.

    Args:
        value: Mappings, lists, texts and numbers. Objects of the expected type are returned unchanged.
        kind: A type with a `Conversion`, a dataclass, or any type that their fields may have.
        where: The value's name in errors.
        source: The origin of the value.

    Raises:
        ValueError: A name or a key is unknown (the message has the nearest valid one), a key is missing, or a value has
            the wrong type or is out of range. The message names all faults with their places.
    """
    made: T = convert_all([(where, value, kind)], source)[0]
    return made


def convert_all(parts: Iterable[tuple[str, Any, Any]], source: Source) -> list[Any]:
    """Convert several values, each given by name, value and type; see `convert`.

    Raises:
        ValueError: See `convert`; the message names the faults of all values.
    """
    try:
        return _parts(parts, source)
    except Faults as error:
        raise ValueError(str(error)) from error


def _parts(parts: Iterable[tuple[str, Any, Any]], source: Source) -> list[Any]:
    """Convert the parts of one value, each given by place, value and type.

    Raises:
        Faults: Some parts are wrong; all of them are named.
    """
    made: list[Any] = []
    faults: list[tuple[str, str]] = []
    for place, value, kind in parts:
        try:
            made.append(_converted(value, kind, source))
        except Mismatch:
            faults.append((place, f" must be {describe_type(kind, source)}, got {value!r}"))
        except Faults as error:
            faults += [(place + below, text) for below, text in error.faults]
        except (TypeError, ValueError) as error:
            faults.append((place, f": {error}"))
    if faults:
        raise Faults(*faults)
    return made


def call(function: Callable[..., T], arguments: Mapping[str, Any], source: Source) -> T:
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
        made = _parts([(f".{name}", value, kinds[name]) for name, value in given.items()], source)
    except Faults as error:
        faults += error.faults
    if faults:
        raise Faults(*faults)
    return function(**dict(zip(given, made, strict=True)))


def named(value: Any, known: Mapping[str, T], what: str) -> tuple[T, dict[str, Any]]:
    """Look up a name or ``{name: ..., option: value, ...}``. Return what it stands for, and the options.

    Args:
        value: Either form; case, hyphens and underscores do not matter.
        known: The valid values by name.
        what: What the values are, for errors.

    Raises:
        Mismatch: `value` has neither form.
        ValueError: The name is missing or unknown; the message has the nearest one.
    """
    options = {"name": value} if isinstance(value, str) else dict(_checked(value, isinstance(value, Mapping)))
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ValueError(f"needs the {what}'s name under 'name', got {value!r}")
    by_plain_name = {_plain(each): each for each in known}
    if _plain(name) not in by_plain_name:
        raise ValueError(f"unknown {what} {name!r}{did_you_mean(name.lower(), known)} Known: {', '.join(known)}")
    return known[by_plain_name[_plain(name)]], options


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", "").replace("-", "")


@functools.cache
def types_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Types of a class's fields or a function's arguments, by name."""
    return typing.get_type_hints(function)


# -- one value --------------------------------------------------------------------------------------------------------


def or_name(kind: Any) -> Any:
    """The type of what code may pass for `kind`, including what a registered conversion accepts, such as a name."""
    kinds = typing.get_args(kind) or (kind,)
    forms = [form for each in kinds if each in _conversions for form in _conversions[each].forms]
    return typing.Union[(*kinds, *forms)] if forms else kind


def known_of(kind: Any) -> list[Any]:
    """The known instances of `kind`, or of the members of a union."""
    kinds = typing.get_args(kind) or (kind,)
    return [value for each in kinds if each in _conversions for value in _conversions[each].known()]


def _converted(value: Any, kind: Any, source: Source) -> Any:
    """`value` as a field of type `kind` holds it: lists become tuples, and integers floats where needed."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _first(value, arguments, source)
    if origin is typing.Literal:
        return _checked(value, any(value == each and type(value) is type(each) for each in arguments))
    if origin in (tuple, Sequence):
        return _elements(value, arguments, source)
    if origin is Mapping:
        return _values(value, arguments[1], source)
    if origin is Callable:
        return _checked(value, callable(value))
    if kind in _NUMBERS:
        return _number(value, kind, source)
    return _instance(value, origin or kind, source)


def _checked(value: Any, fits: bool) -> Any:
    if not fits:
        raise Mismatch
    return value


def _first(value: Any, kinds: Sequence[Any], source: Source) -> Any:
    """Convert to the first type of a union that accepts the value."""
    for kind in kinds:
        try:
            return _converted(value, kind, source)
        except Mismatch:
            continue
    raise Mismatch


def _elements(value: Any, kinds: Sequence[Any], source: Source) -> tuple[Any, ...]:
    """A tuple of any length, or of the length that its type requires."""
    _checked(value, isinstance(value, Sequence) and not isinstance(value, str))
    if len(kinds) == 1 or kinds[1] is Ellipsis:
        kinds = [kinds[0]] * len(value)
    _checked(value, len(value) == len(kinds))
    if source is Source.CODE:  # an element of another type makes the whole of another type
        return tuple(_converted(each, kind, source) for each, kind in zip(value, kinds, strict=True))
    parts = [(f"[{at}]", each, kind) for at, (each, kind) in enumerate(zip(value, kinds, strict=True))]
    return tuple(_parts(parts, source))


def _values(value: Any, kind: Any, source: Source) -> dict[Any, Any]:
    """A mapping whose values are of one type."""
    _checked(value, isinstance(value, Mapping))
    return dict(zip(value, _parts([(f"[{key!r}]", each, kind) for key, each in value.items()], source), strict=True))


def _number(value: Any, kind: type, source: Source) -> Any:
    if source is Source.FILE and kind is float and isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            raise Mismatch from None
    wanted = numbers.Integral if kind is int else numbers.Real
    return kind(_checked(value, isinstance(value, wanted) and not isinstance(value, bool)))


def _instance(value: Any, kind: Any, source: Source) -> Any:
    if kind is Any or not isinstance(kind, type) or isinstance(value, kind):
        return value
    if kind in _conversions:
        return _conversions[kind].make(value, source)
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return call(kind, value, source)
    raise Mismatch


# -- what is accepted -------------------------------------------------------------------------------------------------


def describe_type(kind: Any, source: Source) -> str:
    """What a field of type `kind` accepts, in a few words; empty if it cannot be written in files."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(filter(None, (describe_type(each, source) for each in arguments)))
    if origin is typing.Literal:
        *others, last = map(repr, arguments)
        return f"{', '.join(others)} or {last}" if others else last
    if origin in (tuple, Sequence):
        return _describe_elements(arguments, source)
    if origin is Callable:
        return "a function" if source is Source.CODE else ""
    if origin is Mapping:
        return "a mapping"
    return _NUMBERS.get(kind) or _describe_class(kind, source)


def _describe_elements(kinds: Sequence[Any], source: Source) -> str:
    any_length = len(kinds) == 1 or kinds[1] is Ellipsis
    if source is Source.FILE:
        return "a list" if any_length else f"a list of {len(kinds)}"
    if any_length:
        return f"a tuple, each element {describe_type(kinds[0], source)}"
    return f"a tuple of {len(kinds)}: {'; '.join(describe_type(each, source) for each in kinds)}"


def _describe_class(kind: Any, source: Source) -> str:
    if kind in _NAMES[source]:
        return _NAMES[source][kind]
    if kind in _conversions:
        return _conversions[kind].description if source is Source.CODE else _conversions[kind].in_files
    if source is Source.FILE:
        return "a mapping" if dataclasses.is_dataclass(kind) else ""
    return f"an instance of {getattr(kind, '__name__', kind)}"
