"""Reads, checks and writes the ``lowbit_config`` section, and passes it to the training processes.

    lowbit_config:
      compressor: loco            # any name that `<name>_ddp` is registered for
      bits: 4                     # the compressor's own options follow
      exempt: ["@vector", "*.gate.*"]
      seed: 0                     # and those of `LowBitPlugin`
      controller: {name: accordion, light: {compressor: loco, bits: 8}, heavy: loco2, interval: 500, unit: steps}
      monitor: {every_n_steps: 50}
      outer: {name: diloco, every: 30}     # local steps

Options may also be given under ``options``. Wrappers need this, because their options are compressors.

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

from lowbit_strategy.accelerate import LowBitPlugin
from lowbit_strategy.attach.round_rule import RoundRule
from lowbit_strategy.autoload import SECTION, VARIABLE
from lowbit_strategy.control.base import Controller
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.registry import option_names, preset
from lowbit_strategy.options.conversion import convert, did_you_mean, nearest

OTHER_KEYS = tuple(
    field.name for field in dataclasses.fields(LowBitPlugin) if field.init and field.name != "compressor"
)

Section = dict[str, Any]


def plugin_from_section(given: object) -> LowBitPlugin:
    """Make the plugin that a section describes.

    Raises:
        ValueError: A key or a name is unknown (the message names the nearest valid one), or a value has the wrong type
            or is out of range.
    """
    section = section_of({SECTION: given}, SECTION)
    ours: Section = {key: section.pop(key) for key in OTHER_KEYS if key in section}
    if ours.get("monitor") is False:
        del ours["monitor"]
    if ours.get("controller") is not None:
        ours["controller"] = convert(ours["controller"], Controller, f"{SECTION}.controller")  # type: ignore[type-abstract]
        if not section and ours["controller"].levels:
            section = {"compressor": ours["controller"].levels[0]}
    if ours.get("outer") is not None:
        ours["outer"] = convert(ours["outer"], RoundRule, f"{SECTION}.outer")  # type: ignore[type-abstract]
        if not section:
            section = {"compressor": ours["outer"].compressor()}
    return convert({"compressor": _compressor(section), **ours}, LowBitPlugin, SECTION)


def _compressor(entries: Section) -> Compressor:
    """Make the compressor from the section's other keys."""
    name = entries.get("compressor")
    if isinstance(name, Compressor):
        return name
    choices = ["compressor", *OTHER_KEYS]
    if name is None:
        for target in (["compressor"], OTHER_KEYS):
            misspelled = [key for key in entries if nearest(str(key), target)]
            if misspelled:
                hint = did_you_mean(str(misspelled[0]), target)
                raise ValueError(
                    f"{SECTION}: unknown key {misspelled[0]!r}{hint} Without a compressor: {', '.join(choices)}"
                )
        raise ValueError(f"{SECTION}: compressor is missing: name one, such as loco, or a controller or outer rule")
    if not isinstance(name, str):
        raise ValueError(f"{SECTION}: compressor must be a name such as loco, got {name!r}")
    choices += ["options", *option_names(preset(name))]
    for key in entries.keys() - set(choices):
        raise ValueError(
            f"{SECTION}: unknown key {key!r}{did_you_mean(str(key), choices)} Known with {name}: {', '.join(choices)}"
        )
    return convert(entries, Compressor, SECTION)  # type: ignore[type-abstract]


def read_section(source: str | os.PathLike[str]) -> Section:
    """Read a section from a file (a whole configuration or the section alone), or from a text that starts with ``{``.

    Raises:
        ValueError: The file does not exist or has no section.
    """
    text = os.fspath(source)
    if not text.lstrip().startswith("{"):
        path = Path(text).expanduser()
        if not path.is_file():
            raise ValueError(f"there is no file {text!r} with a {SECTION} section")
        content = _parsed(path)
    else:
        content = yaml.safe_load(text)  # JSON is YAML
    if (
        isinstance(content, Mapping)
        and SECTION not in content
        and {"compressor", "controller", "outer"} & content.keys()
    ):
        return dict(content)
    return section_of(content, repr(os.fspath(source)))


def add_section(path: Path, section: Section) -> None:
    """Write `section` at the end of the configuration file at `path`.

    Raises:
        ValueError: The section is wrong, the file does not exist, or it already has a section. Nothing is written then.
    """
    plugin_from_section(section)
    if not path.is_file():
        raise ValueError(
            f"there is no configuration file {str(path)!r}: accelerate config --config_file {path} writes it"
        )
    content = read_config(path)
    if SECTION in content:
        raise ValueError(f"{path} has a {SECTION} section: change it there")
    text = path.read_text(encoding="utf-8")
    if text.lstrip().startswith("{"):
        path.write_text(json.dumps({**content, SECTION: section}, indent=2) + "\n", encoding="utf-8")
    else:
        path.write_text(f"{text.rstrip()}\n{yaml.safe_dump({SECTION: section}, sort_keys=False)}", encoding="utf-8")


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Accelerate's configuration file.

    Raises:
        ValueError: The file cannot be read, or is not a mapping.
    """
    content = _parsed(Path(path))
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a configuration file of Accelerate: it must be a mapping")
    return content


def _parsed(path: Path) -> object:
    """Parse the YAML; errors name the file."""
    try:
        with path.open(encoding="utf-8") as file:
            return yaml.safe_load(file)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def section_of(config: object, where: str) -> Section:
    """The section of a configuration; errors call the configuration `where`.

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


def export(section: Section) -> None:
    """Put `section` into the environment of this process and of those that it starts.

    Raises:
        ValueError: It is wrong.
    """
    plugin_from_section(section)
    os.environ[VARIABLE] = json.dumps(section)
