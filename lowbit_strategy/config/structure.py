"""Configurations from the content of a file: mappings become dataclasses, by the types of the classes' fields.

    controller:
      name: accordion
      light: {compressor: loco, bits: 8}     # or a name alone: loco2
      heavy: loco2
      interval: 500
      unit: steps
    monitor: {every_n_steps: 50, bounds: {max_error: 0.6}}

The work is done by cattrs. Here is only what a file may hold in the place of an object: a name for a compressor, a
mapping with a name for a controller, ``true`` for a monitor, and text for a number (YAML 1.1 reads ``1e-3`` as text).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from cattrs import Converter, transform_error
from cattrs.errors import BaseValidationError, ForbiddenExtraKeysError
from cattrs.gen import make_dict_structure_fn

from lowbit_strategy.accelerate.monitor import CompressionMonitor
from lowbit_strategy.codecs.base import Codec
from lowbit_strategy.control import (
    Accordion,
    AccordionBatch,
    AdaQS,
    Controller,
    ErrorBudget,
    GraVAC,
    Guard,
    Schedule,
    Static,
    dgc_warmup,
)
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.registry import from_options, preset
from lowbit_strategy.options.suggestions import did_you_mean

T = TypeVar("T")
_Hook = Callable[[Any, Any], Any]  # value and type; the object

CONTROLLERS: dict[str, Callable[..., Controller]] = {
    "accordion": Accordion,
    "accordion_batch": AccordionBatch,
    "adaqs": AdaQS,
    "dgc_warmup": dgc_warmup,
    "error_budget": ErrorBudget,
    "gravac": GraVAC,
    "guard": Guard,
    "schedule": Schedule,
    "static": Static,
}


def structure(value: object, kind: type[T], where: str) -> T:
    """An object of type `kind` from `value`, which is as a YAML or JSON file holds it.

    Args:
        value: Mappings, lists, texts and numbers; objects of the wanted type are taken as they are.
        kind: `Compressor`, `Controller`, or a dataclass of such.
        where: What the value is called in errors.

    Raises:
        ValueError: A name or a key is unknown (the message has the nearest valid one), a key is missing, or a value is
            of another type or out of range. All faults are named, each with its place.
    """
    try:
        return _converter.structure(value, kind)
    except (BaseValidationError, TypeError, ValueError) as error:
        raise ValueError(_explain(error, where)) from error


def _explain(error: Exception, where: str) -> str:
    """All faults as sentences: ``monitor.bounds.max_error must be a number, got 'ten'``."""
    faults = [fault.rpartition(" @ ") for fault in transform_error(error, where, _describe)]
    return "; ".join(
        f"{place}{' ' if text.startswith(('must be', 'is missing')) else ': '}{text}" for text, _, place in faults
    )


def _describe(error: BaseException, _: object) -> str:
    if isinstance(error, ForbiddenExtraKeysError):
        known = [field.name for field in dataclasses.fields(error.cl) if field.init]
        unknown = [f"unknown key {key!r}{did_you_mean(str(key), known)}" for key in sorted(error.extra_fields)]
        return f"{' '.join(unknown)} Known: {', '.join(known)}"
    return "is missing" if isinstance(error, KeyError) else str(error)


# -- plain values -----------------------------------------------------------------------------------------------------


class _Unfit(ValueError):
    """A value is of another type than its field."""

    def __init__(self, message: str, wanted: str) -> None:
        super().__init__(message)
        self.wanted = wanted


def _refuse(wanted: str, value: object) -> NoReturn:
    raise _Unfit(f"must be {wanted}, got {value!r}", wanted)


def _exactly(kind: type, description: str) -> _Hook:
    def check(value: Any, _: Any) -> Any:
        if type(value) is not kind:
            _refuse(description, value)
        return value

    return check


def _number(value: Any, _: Any) -> float:
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError, ValueError):
            return float(value)
    _refuse("a number", value)


def _path(value: Any, _: Any) -> Path:
    if not isinstance(value, (str, Path)):
        _refuse("a path", value)
    return Path(value)


def _choice(value: Any, kind: Any) -> Any:
    choices = typing.get_args(kind)
    if value not in choices:
        _refuse(" or ".join(map(repr, choices)), value)
    return value


def _first_that_fits(value: Any, kind: Any) -> Any:
    """A value of the first type of a union that takes it."""
    if value is None and type(None) in typing.get_args(kind):
        return None
    wanted = []
    for part in filter(_has_a_form_in_files, typing.get_args(kind)):
        try:
            return _converter.structure(value, part)
        except _Unfit as error:
            wanted.append(error.wanted)
    _refuse(" or ".join(wanted), value)


def _has_a_form_in_files(kind: Any) -> bool:
    """Functions and codecs have none."""
    return typing.get_origin(kind) is not Callable and kind not in (type(None), Codec)


def _entries(value: Any, kind: Any) -> tuple[Any, ...]:
    """A tuple from a list: of any length, or as long as its type says."""
    if not isinstance(value, (list, tuple)):
        _refuse("a list", value)
    first, *rest = typing.get_args(kind)
    if not rest or rest == [Ellipsis]:
        return tuple(_converter.structure(value, list[first]))  # type: ignore[valid-type]
    if len(value) != 1 + len(rest):
        _refuse(f"a list of {1 + len(rest)}", value)
    return tuple(_converter.structure(each, part) for each, part in zip(value, (first, *rest), strict=True))


# -- objects ----------------------------------------------------------------------------------------------------------


@functools.cache
def _fields_of(kind: type) -> _Hook:
    """A dataclass from a mapping of its fields."""
    return make_dict_structure_fn(kind, _converter, _cattrs_forbid_extra_keys=True)


def _dataclass(value: Any, kind: Any) -> Any:
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        _refuse("a mapping", value)
    return _fields_of(kind)(value, kind)


def _compressor(value: Any, _: Any) -> Compressor:
    """A preset's name, or ``{compressor: name, option: value, ..., options: {option: value}}``."""
    if isinstance(value, Compressor):
        return value
    if isinstance(value, str):
        return preset(value)
    if not isinstance(value, Mapping):
        _refuse("a compressor such as loco2 or {compressor: loco, bits: 2}", value)
    options = dict(value)
    name, more = options.pop("compressor", None), options.pop("options", None) or {}
    if not isinstance(name, str):
        raise ValueError(f"compressor must be a name such as loco, got {name!r}")
    if not isinstance(more, Mapping):
        raise ValueError(f"options must be a mapping of the compressor's options, got {more!r}")
    return from_options(name, _options_of(type(preset(name)), {**options, **more}))


def _options_of(kind: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as the fields of a compressor hold them; names that are not its fields' are for `from_options`."""
    types_of = typing.get_type_hints(kind)
    made = {}
    for key, value in options.items():
        try:
            made[key] = _converter.structure(value, types_of[key]) if key in types_of else value
        except (BaseValidationError, ValueError) as error:
            raise ValueError(_explain(error, key)) from error
    return made


def _controller(value: Any, _: Any) -> Controller:
    if isinstance(value, Controller):
        return value
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        _refuse(f"a mapping with a name ({', '.join(CONTROLLERS)}) and the controller's options", value)
    options = dict(value)
    name = options.pop("name")
    by_plain_name = {key.replace("_", ""): key for key in CONTROLLERS}
    key = by_plain_name.get(name.lower().replace("_", "").replace("-", ""))
    if key is None:
        raise ValueError(
            f"unknown controller {name!r}{did_you_mean(name.lower(), CONTROLLERS)} Known: {', '.join(CONTROLLERS)}"
        )
    make = CONTROLLERS[key]
    if inspect.isclass(make):
        return _dataclass(options, make)
    arguments = _dataclass(options, _arguments_of(make))
    return make(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(arguments)})


@functools.cache
def _arguments_of(function: Callable[..., Any]) -> type:
    """A dataclass of a function's arguments."""
    hints = typing.get_type_hints(function)
    return dataclasses.make_dataclass(
        function.__name__,
        [
            (each.name, hints[each.name], *(() if each.default is each.empty else (each.default,)))
            for each in inspect.signature(function).parameters.values()
        ],
    )


def _monitor(value: Any, kind: Any) -> CompressionMonitor:
    if value is True:
        return CompressionMonitor()
    if not isinstance(value, (Mapping, CompressionMonitor)):
        _refuse("true or a mapping such as {every_n_steps: 50}", value)
    return _dataclass(value, kind)


def _make_converter() -> Converter:
    converter = Converter()
    converter.register_structure_hook(bool, _exactly(bool, "true or false"))
    converter.register_structure_hook(int, _exactly(int, "an integer"))
    converter.register_structure_hook(str, _exactly(str, "a text"))
    converter.register_structure_hook(float, _number)
    converter.register_structure_hook(Path, _path)
    values: dict[tuple[Any, ...], _Hook] = {
        (typing.Literal,): _choice,
        (tuple, Sequence): _entries,
        (typing.Union, types.UnionType): _first_that_fits,
    }
    for origins, hook in values.items():
        converter.register_structure_hook_func(_has_origin(origins), hook)
    objects: dict[type, _Hook] = {object: _dataclass, Compressor: _compressor, Controller: _controller}
    for base, hook in objects.items():  # the later goes first
        converter.register_structure_hook_func(_is_dataclass(base), hook)
    converter.register_structure_hook(CompressionMonitor, _monitor)
    return converter


def _has_origin(origins: tuple[Any, ...]) -> Callable[[Any], bool]:
    return lambda kind: typing.get_origin(kind) in origins


def _is_dataclass(base: type) -> Callable[[Any], bool]:
    return lambda kind: (
        inspect.isclass(kind) and issubclass(kind, base) and (base is not object or dataclasses.is_dataclass(kind))
    )


_converter = _make_converter()
