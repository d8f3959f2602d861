"""Configurations: frozen dataclasses that check the types of their options."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any, TypeVar

from typing_extensions import dataclass_transform

from lowbit_strategy.options.conversion import Source, convert_all, types_of, unknown_option

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,))
def configuration(cls: type[T]) -> type[T]:
    """``@dataclass(frozen=True, kw_only=True)`` whose constructor checks what it is given.

    Without slots: a dataclass with slots is made anew, and the first one stays among its base's subclasses. Command
    lines that find a class by its name (jsonargparse, LightningCLI) would find two.

    Every value must be of its field's type: `bool` is no integer, 4.0 neither; integers are accepted for floats, lists
    for tuples, mappings for dataclasses, and what `register_conversion` allows. Options are given by name, those with
    ``field(kw_only=False)`` by place too.

    Raises:
        TypeError: By the constructor, if there is no such option. The message has the nearest one.
        ValueError: By the constructor, if values are of another type. The message has field, value and what is allowed,
            for all of them.
    """
    initialize = dataclasses.dataclass(frozen=True, kw_only=True)(cls).__init__
    defaults: dict[str, Any] = {}
    by_position: list[str] = []
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.init:
            defaults[field.name] = field.default
            by_position += [] if field.kw_only else [field.name]

    @functools.wraps(initialize)
    def __init__(self: Any, *values: Any, **options: Any) -> None:
        if not options.keys() <= defaults.keys():
            unknown = next(name for name in options if name not in defaults)
            raise unknown_option(type(self).__name__, unknown, defaults)
        positional = dict(zip(by_position, values, strict=False))
        changed = []
        for name, value in (*positional.items(), *options.items()):
            if value is not defaults[name]:
                changed.append((name, value, types_of(cls)[name]))  # type: ignore[arg-type]
        if changed:
            for (name, *_), made in zip(changed, convert_all(changed, Source.CODE), strict=True):
                (options if name in options else positional)[name] = made
        initialize(self, *positional.values(), *values[len(by_position) :], **options)

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


def refusing_unknown_options(initialize: Callable[..., None]) -> Callable[..., None]:
    """A constructor written by hand, with the same error for options that it does not have."""
    known = [name for name in inspect.signature(initialize).parameters if name != "self"]

    @functools.wraps(initialize)
    def __init__(self: Any, *values: Any, **options: Any) -> None:
        if unknown := next((name for name in options if name not in known), None):
            raise unknown_option(type(self).__name__, unknown, known)
        initialize(self, *values, **options)

    return __init__


_ARGS = re.compile(r"^( *)Args:\n(.*?)(?=^ *\w[\w ]*:\n|\Z)", re.MULTILINE | re.DOTALL)
_ARGUMENT = re.compile(r"^    ([\w, ]+): (.*?)(?=^    \S|\Z)", re.MULTILINE | re.DOTALL)
_WIDTH = 120


def arguments(cls: type) -> dict[str, str]:
    """Names in the ``Args`` of a class's docstring, and the text of each, in one line.

    Empty under ``python -OO``, which has no docstrings.
    """
    found = _ARGS.search(f"{inspect.getdoc(cls) or ''}\n")
    if found is None:
        return {}
    pairs = _ARGUMENT.findall(found[2])
    return {name.strip(): " ".join(text.split()) for names, text in pairs for name in names.split(",")}


def documented_options(source: type) -> Callable[[type[T]], type[T]]:
    """Replace the line of a docstring that begins with ``@`` and the name of `source` by the arguments of `source`.

    Those that the class's constructor does not have are left out, and those that its docstring has already.
    """
    texts = arguments(source)
    marker = re.compile(rf"^( *)@{source.__name__}\b.*\n(?:\1 +\S.*\n)*", re.MULTILINE)

    def fill(cls: type[T]) -> type[T]:
        if cls.__doc__ is None or (found := marker.search(cls.__doc__)) is None:
            return cls
        own, accepted = arguments(cls), inspect.signature(cls).parameters
        margin = (found[1], f"{found[1]}    ")
        entries = [
            textwrap.fill(f"{name}: {text}", _WIDTH, initial_indent=margin[0], subsequent_indent=margin[1]) + "\n"
            for name, text in texts.items()
            if name in accepted and name not in own
        ]
        cls.__doc__ = "".join([cls.__doc__[: found.start()], *entries, cls.__doc__[found.end() :]])
        return cls

    return fill
