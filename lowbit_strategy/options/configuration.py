"""Configurations: frozen dataclasses that check the types of their options."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from typing_extensions import dataclass_transform

from lowbit_strategy.options.conversion import convert_all, types_of, unknown_option, written

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,))
def configuration(cls: type[T]) -> type[T]:
    """``@dataclass(frozen=True, kw_only=True)`` whose constructor checks its arguments.

    It has no slots, because a dataclass with slots is created twice, and the first class stays among its base's
    subclasses. Command lines that look up a class by name (jsonargparse, LightningCLI) would find two.

    Every value must have its field's type: neither `bool` nor 4.0 is an integer. Integers are accepted for floats, and
    so is text such as "1e-3" (YAML reads 1e-3 as text); lists for tuples, mappings for dataclasses, and whatever
    `register_conversion` allows. Options are given by name, and those with ``field(kw_only=False)`` also by position.

    Raises:
        TypeError: Raised by the constructor if there is no such option. The message names the nearest one.
        ValueError: Raised by the constructor if values have wrong types. The message has the field, the value and the
            allowed values, for all of them.
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
            for (name, *_), made in zip(changed, convert_all(changed), strict=True):
                (options if name in options else positional)[name] = made
        initialize(self, *positional.values(), *values[len(by_position) :], **options)

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


def takes_options_of(source: type) -> Callable[[F], F]:
    """Show the fields of a configuration as arguments of a function that takes them in ``**kwargs``.

    The fields are defined only in the configuration, but editors, LightningCLI and ``inspect.signature`` also see them
    here. The function makes the configuration.
    """

    def show(function: F) -> F:
        own = inspect.signature(function)
        kinds = types_of(source)
        shown = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=written(kinds[name]))
            for name, default in ((field.name, field.default) for field in dataclasses.fields(source))
        ]
        parameters = sorted([*shown, *own.parameters.values()], key=lambda each: each.kind)
        function.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        return function

    return show


def take_options(source: type[T], kwargs: dict[str, Any]) -> T:
    """Make a configuration from its arguments in `kwargs`, and remove them from `kwargs`."""
    names = [field.name for field in dataclasses.fields(source)]  # type: ignore[arg-type]
    return source(**{name: kwargs.pop(name) for name in names if name in kwargs})
