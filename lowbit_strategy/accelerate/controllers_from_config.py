"""Controllers and the monitor as configuration files write them.

    controller:
      name: accordion
      light: {compressor: loco, bits: 8}     # or a name alone: loco2
      heavy: loco2
      interval: 500
      unit: steps
    monitor: {every_n_steps: 50, bounds: {max_error: 0.6}}

A mapping's keys are the fields of the class; what a field holds follows from its type.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lowbit_strategy.accelerate.monitor import CompressionMonitor
from lowbit_strategy.control import (
    Accordion,
    AccordionBatch,
    AdaQS,
    Bounds,
    Controller,
    ErrorBudget,
    GraVAC,
    Guard,
    Phase,
    Schedule,
    Static,
    dgc_warmup,
)
from lowbit_strategy.methods._base.base import Compressor
from lowbit_strategy.methods.registry import as_compressor
from lowbit_strategy.options.suggestions import did_you_mean

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
_PARTS = (Bounds, Phase)  # plain mappings in files


def controller_from(value: object) -> Controller:
    """The controller that a mapping with a ``name`` describes.

    Raises:
        ValueError: The name or a key is unknown (the message has the nearest valid one), a key is missing, or a value
            is out of range.
    """
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise ValueError(
            f"controller must be a mapping with a name ({', '.join(CONTROLLERS)}) and the controller's options,"
            f" got {value!r}"
        )
    options = dict(value)
    name = options.pop("name")
    by_plain_name = {key.replace("_", ""): key for key in CONTROLLERS}
    key = by_plain_name.get(name.lower().replace("_", "").replace("-", ""))
    if key is None:
        raise ValueError(
            f"unknown controller {name!r}{did_you_mean(name.lower(), CONTROLLERS)} Known: {', '.join(CONTROLLERS)}"
        )
    made = _build(CONTROLLERS[key], options, f"controller {key}")
    assert isinstance(made, Controller)
    return made


def monitor_from(value: object) -> CompressionMonitor | None:
    """The monitor that a mapping describes; ``true`` is one with its defaults, ``false`` none.

    Raises:
        ValueError: A key is unknown or a value out of range.
    """
    if isinstance(value, bool):
        return CompressionMonitor() if value else None
    if not isinstance(value, Mapping):
        raise ValueError(f"monitor must be true or a mapping such as {{every_n_steps: 50}}, got {value!r}")
    made = _build(CompressionMonitor, value, "monitor")
    assert isinstance(made, CompressionMonitor)
    return made


def _build(make: Callable[..., Any], options: Mapping[str, Any], what: str) -> Any:
    known = {
        parameter.name: parameter
        for parameter in inspect.signature(make).parameters.values()  # of a dataclass: what its constructor takes
    }
    for key in options:
        if key not in known:
            raise ValueError(f"{what} has no key {key!r}{did_you_mean(str(key), known)} Known: {', '.join(known)}")
    missing = [name for name, each in known.items() if each.default is each.empty and name not in options]
    if missing:
        raise ValueError(f"{what} needs {' and '.join(missing)}")
    hints = typing.get_type_hints(make.__init__ if inspect.isclass(make) else make)
    values = {key: _value(value, hints[key], f"{what}, {key}") for key, value in options.items()}
    try:
        return make(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}: {error}") from error


def _value(value: Any, hint: Any, where: str) -> Any:
    """`value` as a field of type `hint` holds it."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        if value is None:
            return None
        plain = [part for part in typing.get_args(hint) if part is not type(None)]
        return _value(value, plain[0], where)
    if typing.get_origin(hint) in (tuple, Sequence):
        if not isinstance(value, list):
            raise ValueError(f"{where} must be a list, got {value!r}")
        inner = typing.get_args(hint)[0]
        return tuple(_value(entry, inner, f"{where}[{at}]") for at, entry in enumerate(value))
    if hint is Compressor:
        return as_compressor(value, where)
    if hint is Controller:
        return controller_from(value)
    if hint in _PARTS:
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} must be a mapping, got {value!r}")
        return _build(hint, value, where)
    return _number(value, hint, where)


def _number(value: Any, hint: Any, where: str) -> Any:
    """YAML 1.1 reads 1e-3 as text: where a number is expected it is one."""
    if hint is float and isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            raise ValueError(f"{where} must be a number, got {value!r}") from None
    if hint in (float, int) and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise ValueError(f"{where} must be a number, got {value!r}")
    return value
