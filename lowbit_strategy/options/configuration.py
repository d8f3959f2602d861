"""Configurations: frozen dataclasses that check the types of their options."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TypeVar

from typing_extensions import dataclass_transform

from lowbit_strategy.options.conversion import Source, convert_all, types_of

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,))
def configuration(cls: type[T]) -> type[T]:
    """``@dataclass(frozen=True, kw_only=True)`` whose constructor checks what it is given.

    Without slots: a dataclass with slots is made anew, and the first one stays among its base's subclasses. Command
    lines that find a class by its name (jsonargparse, LightningCLI) would find two.

    Every value must be of its field's type: `bool` is no integer, 4.0 neither; integers are accepted for floats, lists
    for tuples, mappings for dataclasses, and what `register_conversion` allows.

    Raises:
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
    names = [field.name for field in dataclasses.fields(cls) if field.init and not field.kw_only]  # type: ignore[arg-type]

    @functools.wraps(initialize)
    def __init__(self: Any, *values: Any, **options: Any) -> None:
        kinds = types_of(cls)  # type: ignore[arg-type]
        given = [*zip(names, values, strict=False), *options.items()]
        made = convert_all([(name, value, kinds.get(name, Any)) for name, value in given], Source.CODE)
        by_position = len(given) - len(options)
        by_name = dict(zip(options, made[by_position:], strict=True))
        initialize(self, *made[:by_position], *values[by_position:], **by_name)

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls
