"""``lowbit config``: a section beside Accelerate's part, in a file for both launchers."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
import yaml
from accelerate.commands.config.default import write_basic_config

from lowbit_strategy.accelerate.options import check_served
from lowbit_strategy.launch.section import SECTION, Section, plugin_from_section, read_config


def configure(path: Path, section: Section) -> None:
    """Write `path`. A file that is there keeps its Accelerate part as it is, comments included.

    Args:
        path: Path of the file. Accelerate's part of a new one is what it finds this machine to have.
        section: Ours.

    Raises:
        ValueError: `path` is not a YAML file, or a key or value of `section` is not valid; nothing is written then.
    """
    plugin_from_section(section)
    if path.suffix not in (".yaml", ".yml"):
        raise ValueError(f"the configuration is written as YAML: call the file {path.with_suffix('.yaml')}")
    if path.exists():
        typer.echo(f"{path} is there: its Accelerate part stays as it is")
        read_config(path)
        text = path.read_text(encoding="utf-8")
    else:
        text = _accelerate_defaults()
    _warn_of(yaml.safe_load(text))
    path.write_text(with_section(text, section), encoding="utf-8")
    launcher = "lowbit" if yaml.safe_load(text).get("use_cpu") else "accelerate"  # which starts one process on CPU
    typer.echo(f"Written: {path}. Train with: {launcher} launch --config_file {path} train.py")


def _accelerate_defaults() -> str:
    """Accelerate's part of a new file, as ``accelerate config default`` writes it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "accelerate.json"
        write_basic_config(save_location=str(path))
        return yaml.safe_dump(json.loads(path.read_text(encoding="utf-8")), sort_keys=True)


def _warn_of(config: Mapping[str, Any]) -> None:
    """Report what of Accelerate's part would keep gradients from being compressed."""
    fsdp = config.get("fsdp_config") or {}
    try:
        check_served(str(config.get("distributed_type", "NO")), fsdp_version=int(fsdp.get("fsdp_version", 1)))
    except ValueError as error:
        typer.echo(f"  Note: {error}")
    if config.get("num_processes", 1) == 1:
        typer.echo("  Note: one process sends no gradients, so nothing would be compressed (num_processes)")


def with_section(text: str, section: Section) -> str:
    """`text` of a configuration with `section` instead of the one it may have; all else is unchanged."""
    written = yaml.safe_dump({SECTION: section}, sort_keys=False)
    root = yaml.compose(text)
    if not isinstance(root, yaml.MappingNode) or root.flow_style:  # JSON: there are no lines to put it between
        return yaml.safe_dump({**(yaml.safe_load(text) or {}), SECTION: section}, sort_keys=False)
    lines = text.splitlines(keepends=True)
    names = [key.value for key, _ in root.value]
    starts = [key.start_mark.line for key, _ in root.value] + [len(lines)]
    if SECTION not in names:
        return f"{text.rstrip()}\n{written}"
    start, end = starts[names.index(SECTION)], starts[names.index(SECTION) + 1]
    while end > start + 1 and (lines[end - 1].startswith("#") or not lines[end - 1].strip()):
        end -= 1  # comments before the next key are that key's
    return "".join((*lines[:start], written, *lines[end:]))
