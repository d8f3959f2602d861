"""``lowbit config``: Accelerate's questions, then ours; the answers become a file for ``lowbit launch``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
import yaml
from accelerate.commands.config.config import get_user_input

from lowbit_strategy.accelerate.config import OTHER_KEYS, SECTION, Section, plugin_from_section, section_of
from lowbit_strategy.accelerate.support import check_served
from lowbit_strategy.methods.registry import PRESETS, preset

_BLOCK = re.compile(rf"^{SECTION}:.*\n?(?:(?:[ \t#].*)?\n)*", re.MULTILINE)


def configure(path: Path) -> None:
    """Ask, and write `path`. A file that is there keeps its Accelerate part, comments included.

    Raises:
        ValueError: `path` is not a YAML file.
    """
    if path.suffix not in (".yaml", ".yml"):
        raise ValueError(f"the configuration is written as YAML: call the file {path.with_suffix('.yaml')}")
    if path.exists():
        typer.echo(f"{path} is there: its Accelerate part stays as it is")
        text = path.read_text(encoding="utf-8")
        if not isinstance(yaml.safe_load(text), dict):
            raise ValueError(f"{path} is not a configuration file of Accelerate: it must be a mapping")
    else:
        text = yaml.safe_dump(get_user_input().to_dict(), sort_keys=True)
    _warn_of(yaml.safe_load(text))
    section = ask_section()
    path.write_text(with_section(text, section), encoding="utf-8")
    typer.echo(f"written: {path}. Train with: lowbit launch --config_file {path} train.py")


def _warn_of(config: Mapping[str, Any]) -> None:
    """Say what of Accelerate's part would keep gradients from being compressed."""
    fsdp = config.get("fsdp_config") or {}
    try:
        check_served(str(config.get("distributed_type", "NO")), fsdp_version=int(fsdp.get("fsdp_version", 1)))
    except ValueError as error:
        typer.echo(f"  Note: {error}")
    if config.get("num_processes", 1) == 1:
        typer.echo("  Note: one process sends no gradients, so nothing would be compressed (num_processes)")


def with_section(text: str, section: Section) -> str:
    """`text` of a configuration with `section` in the place of the one it may have."""
    rest = _BLOCK.sub("", text).rstrip("\n")
    return f"{rest}\n{yaml.safe_dump({SECTION: section}, sort_keys=False)}".lstrip("\n")


def ask_section() -> Section:
    """The section that the answers give; asked again where an answer is not valid."""
    section: Section = {"compressor": _ask_compressor()}
    defaults = preset(section["compressor"])
    options = {field.name: getattr(defaults, field.name) for field in dataclasses.fields(defaults) if field.init}
    shown = ", ".join(f"{key}={value}" for key, value in options.items() if isinstance(value, (int, float, str)))
    typer.echo(f"Its options: {shown}")
    typer.echo(f"For any compressor: exempt, milder, {', '.join(OTHER_KEYS)}")
    while answer := typer.prompt("Change one (name=value; empty to finish)", default="", show_default=False).strip():
        key, _, value = answer.partition("=")
        changed = {**section, key.strip(): yaml.safe_load(value) if value else None}
        if _valid(changed):
            section = changed
    return section


def _ask_compressor() -> str:
    while True:
        answer: str = typer.prompt(f"Which compressor? ({', '.join(sorted(PRESETS))})", default="loco").strip()
        if _valid({"compressor": answer}):
            return answer


def _valid(section: Section) -> bool:
    """Whether the section is; says why not."""
    try:
        plugin_from_section(section_of({SECTION: section}, SECTION))
    except ValueError as error:
        typer.echo(f"  {error}")
        return False
    return True
