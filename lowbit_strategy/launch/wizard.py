"""``lowbit config``: Accelerate's questions, then ours; the answers become a file for both launchers."""

from __future__ import annotations

import json
import tempfile
import termios
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
import yaml
from accelerate.commands.config.config import get_user_input
from accelerate.commands.config.default import write_basic_config

from lowbit_strategy.accelerate.options import check_served
from lowbit_strategy.launch.section import OTHER_KEYS, SECTION, Section, plugin_from_section, read_config, read_section
from lowbit_strategy.methods.registry import PRESETS


def configure(path: Path, given: Section | None = None) -> None:
    """Ask, and write `path`. A file that is there keeps its Accelerate part as it is, comments included.

    Args:
        path: Of the file.
        given: The section. Nothing is asked then, and Accelerate's part of a new file is what it finds this machine to
            have.

    Raises:
        ValueError: `path` is not a YAML file, a key or value of `given` is not valid, or standard input is no terminal
            and there are questions; nothing is written then.
    """
    if given is not None:
        plugin_from_section(given)
    if path.suffix not in (".yaml", ".yml"):
        raise ValueError(f"the configuration is written as YAML: call the file {path.with_suffix('.yaml')}")
    if path.exists():
        typer.echo(f"{path} is there: its Accelerate part stays as it is")
        read_config(path)
        text = path.read_text(encoding="utf-8")
    else:
        text = _ask_accelerate(path) if given is None else _accelerate_defaults()
    _warn_of(yaml.safe_load(text))
    section = _ask_section() if given is None else given
    path.write_text(with_section(text, section), encoding="utf-8")
    launcher = "lowbit" if yaml.safe_load(text).get("use_cpu") else "accelerate"  # which starts one process on CPU
    typer.echo(f"Written: {path}. Train with: {launcher} launch --config_file {path} train.py")


def _ask_accelerate(path: Path) -> str:
    """Accelerate's part of a new file."""
    try:
        return yaml.safe_dump(get_user_input().to_dict(), sort_keys=True)
    except (termios.error, EOFError, OSError):  # its menus read single keys
        raise ValueError(
            f"Accelerate's questions need a terminal: run this in one, or make {path} without questions: lowbit config"
            f" --defaults --config-file {path}"
        ) from None


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


def _ask_section() -> Section:
    """A preset's name, or the whole section; asked again where an answer is not valid.

    Raises:
        ValueError: There are no more answers.
    """
    typer.echo(f"Compressors: {', '.join(sorted(PRESETS))}")
    typer.echo(f"Beside a compressor and its options: exempt, high_precision, {', '.join(OTHER_KEYS)}")
    while True:
        try:
            answer = typer.prompt(
                "Which compressor, or which section, such as {compressor: loco, bits: 3}?", default="loco"
            ).strip()
        except typer.Abort:
            raise ValueError("the answers end here, so nothing is written") from None
        try:
            section = read_section(answer) if answer.startswith("{") else {"compressor": answer}
            plugin_from_section(section)
            return section
        except (ValueError, yaml.YAMLError) as error:
            typer.echo(f"  {error}")
