"""``lowbit config``. Slow modules are imported when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def config(
    config_file: Annotated[
        Path, typer.Option("--config-file", "--config_file", help="As accelerate config writes it.")
    ] = Path("lowbit.yaml"),
    section: Annotated[
        str,
        typer.Option("--lowbit_config", "--lowbit-config", help="The section: '{compressor: loco2, seed: 3}'."),
    ] = "{compressor: loco, bits: 4}",
) -> None:
    """Check a section, and add it to a configuration file of accelerate launch."""
    from lowbit_strategy.config_file.section import add_section, read_section

    add_section(config_file, read_section(section))
    typer.echo(f"Written: {config_file}. Train with: accelerate launch --config_file {config_file} train.py")
