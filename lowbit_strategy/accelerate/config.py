"""The ``lowbit_config`` section: what a file may say about compression, and how it reaches the training processes.

    lowbit_config:
      compressor: loco            # any name that `<name>_ddp` is registered for
      bits: 4                     # the compressor's own options stand beside it
      exempt: ["@vector", "*.gate.*"]
      seed: 0                     # and those of `LowBitPlugin`
      controller: {name: accordion, light: {compressor: loco, bits: 8}, heavy: loco2, interval: 500, unit: steps}
      monitor: {every_n_steps: 50}

Options may also stand under ``options``, which wrappers need: theirs are compressors themselves.

    lowbit_config:
      compressor: warmup
      options: {steps: 500, compressor: {compressor: loco, bits: 2}}
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lowbit_strategy.accelerate.controllers_from_config import controller_from, monitor_from
from lowbit_strategy.accelerate.plugin import LowBitPlugin
from lowbit_strategy.methods._base.base import Compressor
from lowbit_strategy.methods._base.presets import option_names
from lowbit_strategy.methods.registry import from_options, preset
from lowbit_strategy.options.suggestions import did_you_mean

SECTION = "lowbit_config"
VARIABLE = "LOWBIT_CONFIG"  # the section as JSON, or the path of a file that holds it

OTHER_KEYS = tuple(field.name for field in dataclasses.fields(LowBitPlugin) if field.name != "compressor")

Section = dict[str, Any]


def plugin_from_section(section: object) -> LowBitPlugin:
    """The plugin that a section describes.

    Raises:
        ValueError: A key or a name is unknown (the message has the nearest valid one), or a value is out of range.
    """
    section = section_of({SECTION: section}, SECTION)
    ours = {key: value for key, value in section.items() if key in OTHER_KEYS}
    rest = {key: value for key, value in section.items() if key not in ours}
    try:
        if ours.get("controller") is not None:
            ours["controller"] = controller_from(ours["controller"])
            if not rest and ours["controller"].levels:
                return LowBitPlugin(ours["controller"].levels[0], **_with_monitor(ours))
        return LowBitPlugin(_compressor(rest), **_with_monitor(ours))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{SECTION}: {error}") from error


def _with_monitor(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: monitor_from(value) if key == "monitor" and value is not None else value for key, value in options.items()
    }


def _compressor(entries: Mapping[str, Any]) -> Compressor:
    """``{compressor: name, option: value, ..., options: {option: value}}``."""
    entries = dict(entries)
    name, more = entries.pop("compressor", None), entries.pop("options", None) or {}
    if name is None:
        known = ["compressor", *OTHER_KEYS]
        hints = [hint for key in entries if (hint := did_you_mean(str(key), known)) != "."]
        raise ValueError(f"compressor is missing{hints[0] if hints else '.'}")
    if not isinstance(name, str):
        raise ValueError(f"compressor must be a name such as loco, got {name!r}")
    if not isinstance(more, Mapping):
        raise ValueError(f"options must be a mapping of the compressor's options, got {more!r}")
    names = option_names(preset(name))
    options = {**entries, **more}
    for key in options:
        if key not in names:
            known = ["compressor", *dict.fromkeys(names.values()), *OTHER_KEYS]
            raise ValueError(
                f"unknown key {key!r}{did_you_mean(str(key), known)} Known with {name}: {', '.join(known)}"
            )
    return from_options(name, options)


def read_section(source: str | os.PathLike[str]) -> Section:
    """The section in a file (a whole configuration, or the section alone), or in a text that starts with ``{``.

    Raises:
        ValueError: There is no such file, or no section in it.
    """
    text = os.fspath(source)
    if not text.lstrip().startswith("{"):
        path = Path(text).expanduser()
        if not path.is_file():
            raise ValueError(f"there is no file {text!r} with a {SECTION} section")
        text = path.read_text(encoding="utf-8")
    content = yaml.safe_load(text)  # JSON is YAML
    if isinstance(content, Mapping) and SECTION not in content and {"compressor", "controller"} & content.keys():
        return dict(content)
    return section_of(content, repr(os.fspath(source)))


def section_of(config: object, where: str) -> Section:
    """The section of a configuration, which is called `where` in errors.

    Raises:
        ValueError: There is none.
    """
    if not isinstance(config, Mapping) or SECTION not in config:
        raise ValueError(
            f"{where} has no {SECTION} section: add {SECTION}: {{compressor: loco, bits: 4}} (lowbit config does);"
            " for uncompressed training use accelerate launch"
        )
    section = config[SECTION]
    if not isinstance(section, Mapping):
        raise ValueError(f"{SECTION} must be a mapping such as {{compressor: loco, bits: 4}}, got {section!r}")
    return dict(section)


def section_from_environment() -> Section | None:
    """What the launcher, or the user, left in `VARIABLE`; None if nothing did."""
    value = os.environ.get(VARIABLE)
    return None if not value else read_section(value)


def export(section: Section) -> dict[str, str]:
    """Environment variables that bring `section` to child processes."""
    return {VARIABLE: json.dumps(section)}
