"""Looks up compressors and presets by name, for strategy names, configuration files and the command line."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from lowbit_strategy import leaves
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.entries import ENTRIES
from lowbit_strategy.options.conversion import (
    Mismatch,
    convert,
    convert_all,
    did_you_mean,
    register_conversion,
    types_of,
)


def _present() -> dict[str, Compressor]:
    """The presets whose files are present."""
    found = {}
    for name, entry in ENTRIES.items():
        with contextlib.suppress(leaves.MissingPart):
            found[name] = leaves.load(entry.target, name)(**entry.options)
    return found


PRESETS: dict[str, Compressor] = _present()
CHOOSER = "auto"  # listed with the presets, but not one of them


_others: dict[str, str] = {}  # names that are not compressors, and where they belong


def register_other_names(names: Iterable[str], advice: str) -> None:
    """Register names that may be mistaken for compressors. `advice` says where the name, ``{}``, belongs."""
    _others.update({name: advice.format(name) for name in names})


def preset(name: str) -> Compressor:
    """The preset called `name`.

    Raises:
        ValueError: There is no such preset; the message gives the nearest name.
        MissingPart: Its file is missing.
    """
    key = name.lower()
    if key == CHOOSER:
        return leaves.load("lowbit_strategy.auto:Auto", key)()
    if key not in PRESETS:
        if key in ENTRIES:
            leaves.load(ENTRIES[key].target, key)  # raises an error: its file is missing
        if key in _others:
            raise ValueError(f"{name!r} is not a compressor: {_others[key]}")
        known = sorted((*PRESETS, CHOOSER))
        raise ValueError(f"unknown compressor {name!r}{did_you_mean(key, known)} Known: {', '.join(known)}")
    return PRESETS[key]


def as_compressor(value: object, field: str = "compressor") -> Compressor:
    """Return a compressor, given one, a preset's name, or a mapping such as ``{compressor: loco, bits: 3}``.

    Args:
        value: A compressor, a name or a mapping.
        field: The option that the value is for, named in errors.

    Raises:
        ValueError: `value` is none of these, or has an unknown name or option.
    """
    if isinstance(value, Compressor):
        return value
    return convert(value, Compressor, field)  # type: ignore[type-abstract]


def _make(value: Any) -> Compressor:
    """Make a compressor from a name, or from ``{compressor: name, option: value, ..., options: {option: value}}``."""
    if isinstance(value, str):
        return preset(value)
    if not isinstance(value, Mapping):
        raise Mismatch
    options = dict(value)
    name, more = options.pop("compressor", None), options.pop("options", None) or {}
    if not isinstance(name, str):
        raise ValueError(f"needs the compressor's name under 'compressor', got {value!r}")
    if not isinstance(more, Mapping):
        raise ValueError(f"options must be a mapping of the compressor's options, got {more!r}")
    return from_options(name, {**options, **more})


def option_names(compressor: Compressor) -> list[str]:
    return [field.name for field in dataclasses.fields(compressor) if field.init]


def from_options(name: str, options: Mapping[str, Any]) -> Compressor:
    """The preset called `name` with `options` changed, as configuration files write it.

    Args:
        name: The preset's name.
        options: Values of options, by name.

    Raises:
        ValueError: The name or an option is unknown, or an option is out of range.
    """
    base = preset(name)
    known = option_names(base)
    for key in options:
        if key not in known:
            raise ValueError(f"{name} has no option {key!r}{did_you_mean(key, known)} Known: {', '.join(known)}")
    kinds = types_of(type(base))
    values = convert_all([(key, value, kinds[key]) for key, value in options.items()])
    return replace(base, **dict(zip(options, values, strict=True)))


register_conversion(Compressor, _make, "a compressor such as LoCo(bits=2), 'loco2' or {compressor: loco, bits: 2}")
