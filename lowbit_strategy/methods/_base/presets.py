"""Compressors by name: what is accepted wherever a compressor is expected."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.options.configuration import renamed_options
from lowbit_strategy.options.field_types import Conversion, register_conversion
from lowbit_strategy.options.suggestions import did_you_mean

_DESCRIPTION = "a compressor's configuration, a preset's name such as 'loco2' or {compressor: loco, bits: 2}"

_presets: dict[str, Compressor] = {}


def register_presets(presets: Mapping[str, Compressor]) -> None:
    """Make configurations known by name."""
    _presets.update(presets)


def preset(name: str) -> Compressor:
    """The preset called `name`.

    Raises:
        ValueError: There is none; the message has the nearest name.
    """
    key = name.lower()
    if key not in _presets:
        known = sorted(_presets)
        raise ValueError(f"unknown compressor {name!r}{did_you_mean(key, known)} Known: {', '.join(known)}")
    return _presets[key]


def as_compressor(value: object, field: str = "compressor") -> Compressor:
    """A compressor as it is, a preset by its name, or what a mapping describes: ``{compressor: loco, bits: 3}``.

    Args:
        value: One of the three.
        field: What the value is for; errors name it.

    Raises:
        ValueError: None of them, or an unknown name or option.
    """
    if isinstance(value, Compressor):
        return value
    if isinstance(value, str):
        return preset(value)
    if not isinstance(value, Mapping):
        raise ValueError(f"{field} must be {_DESCRIPTION}, got {value!r}")
    options = dict(value)
    if not isinstance(name := options.pop("compressor", None), str):
        raise ValueError(f"{field} needs the compressor's name under 'compressor', got {value!r}")
    return from_options(name, options)


def option_names(compressor: Compressor) -> dict[str, str]:
    """Names that an option may be given under, former ones included, and its present name."""
    names = {field.name: field.name for field in dataclasses.fields(compressor) if field.init}
    return names | {old: new for old, new in renamed_options(type(compressor)).items() if new in names}


def from_options(name: str, options: Mapping[str, Any]) -> Compressor:
    """The preset called `name` with `options` changed, as configuration files write it.

    Raises:
        ValueError: Unknown name or option, or an option out of range.
    """
    base = preset(name)
    known = option_names(base)
    for key in options:
        if key not in known:
            shown = [each for each in known if known[each] == each]
            raise ValueError(f"{name} has no option {key!r}{did_you_mean(key, shown)} Known: {', '.join(shown)}")
    return dataclasses.replace(base, **options)


register_conversion(Compressor, Conversion(as_compressor, (str, Mapping), _DESCRIPTION))
