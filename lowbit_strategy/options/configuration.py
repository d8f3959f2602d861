"""Configurations: frozen dataclasses that check the types of their options and know the options' former names."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Mapping
from typing import Any, TypeVar

from typing_extensions import dataclass_transform

from lowbit_strategy.options.conversion import Source, convert_all, types_of

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,))
def configuration(cls: type[T]) -> type[T]:
    """``@dataclass(frozen=True, kw_only=True)`` whose constructor checks what it is given.

    Without slots: a dataclass with slots is made anew, and the first one stays among its base's subclasses. Command
    lines that find a class by its name (jsonargparse, LightningCLI) would find two.

    1. An option's former name is replaced by the present one, with a ``DeprecationWarning``. Former names are in the
       class attribute ``renamed_options``: former name -> present one.
    2. Every value must be of its field's type: `bool` is no integer, 4.0 neither; integers are accepted for floats,
       lists for tuples, mappings for dataclasses, and what `register_conversion` allows.

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
        options = _present(cls, options)
        kinds = types_of(cls)  # type: ignore[arg-type]
        given = [*zip(names, values, strict=False), *options.items()]
        made = convert_all([(name, value, kinds.get(name, Any)) for name, value in given], Source.CODE)
        by_position = len(given) - len(options)
        by_name = dict(zip(options, made[by_position:], strict=True))
        initialize(self, *made[:by_position], *values[by_position:], **by_name)

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


def renamed_options(cls: type) -> Mapping[str, str]:
    """Former names of options and the present ones."""
    return getattr(cls, "renamed_options", {})


def _present(cls: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options under their present names. A former name goes first: `dataclasses.replace` gives the present one too."""
    present = dict(options)
    for former, name in renamed_options(cls).items():
        if former in options:
            warn_of_former_name(cls, former, name, stacklevel=4)
            present[name] = present.pop(former)
    return present


def former_option(configuration: object, name: str) -> Any:
    """The value of an option that is asked for under its former name; the body of a ``__getattr__``."""
    cls = type(configuration)
    present = renamed_options(cls).get(name)
    if present is None or present not in cls.__dataclass_fields__:  # type: ignore[attr-defined]
        raise AttributeError(f"{cls.__name__!r} object has no attribute {name!r}")
    warn_of_former_name(cls, name, present, stacklevel=4)
    return getattr(configuration, present)


def warn_of_former_name(cls: type, former: str, name: str, *, stacklevel: int) -> None:
    warnings.warn(
        f"{cls.__name__}: the option {former!r} is now called {name!r}; the old name will be removed in the next"
        " release",
        DeprecationWarning,
        stacklevel=stacklevel,
    )
