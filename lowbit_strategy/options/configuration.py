"""Configurations: frozen dataclasses that check the types of their options."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from typing_extensions import dataclass_transform

from lowbit_strategy.options.conversion import Source, convert_all, types_of
from lowbit_strategy.options.suggestions import unknown_option

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,))
def configuration(cls: type[T]) -> type[T]:
    """``@dataclass(frozen=True, kw_only=True)`` whose constructor checks what it is given.

    Without slots: a dataclass with slots is made anew, and the first one stays among its base's subclasses. Command
    lines that find a class by its name (jsonargparse, LightningCLI) would find two.

    Every value must be of its field's type: `bool` is no integer, 4.0 neither; integers are accepted for floats, lists
    for tuples, mappings for dataclasses, and what `register_conversion` allows.

    Raises:
        TypeError: By the constructor, if there is no such option. The message has the nearest one.
        ValueError: By the constructor, if values are of another type. The message has field, value and what is allowed,
            for all of them.
    """
    return _checking(dataclasses.dataclass(frozen=True, kw_only=True)(cls))


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def positional_configuration(cls: type[T]) -> type[T]:
    """As `configuration`, for classes of one or two fields whose names need not be written."""
    return _checking(dataclasses.dataclass(frozen=True)(cls))


def _checking(cls: type[T]) -> type[T]:
    initialize = cls.__init__
    fields = [field for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]
    known = [field.name for field in fields]
    names = [field.name for field in fields if not field.kw_only]

    @functools.wraps(initialize)
    def __init__(self: Any, *values: Any, **options: Any) -> None:
        if unknown := next((name for name in options if name not in known), None):
            raise unknown_option(type(self).__name__, unknown, known)
        kinds = types_of(cls)  # type: ignore[arg-type]
        given = [*zip(names, values, strict=False), *options.items()]
        made = convert_all([(name, value, kinds.get(name, Any)) for name, value in given], Source.CODE)
        by_position = len(given) - len(options)
        by_name = dict(zip(options, made[by_position:], strict=True))
        initialize(self, *made[:by_position], *values[by_position:], **by_name)

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
