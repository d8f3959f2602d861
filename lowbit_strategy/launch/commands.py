"""``lowbit launch`` and ``lowbit config``. What they need is imported when they are called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lowbit_strategy.inform import errors_of

# Everything after the command's name belongs to Accelerate's own parser, -h and --help included.
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


def launch(context: typer.Context) -> None:
    """Run an Accelerate script with compressed gradients: takes every flag of accelerate launch."""
    from lowbit_strategy.launch import launcher

    with errors_of("launch"):
        launcher.launch(context.args)


def config(
    config_file: Annotated[
        Path,
        typer.Option(
            "--config-file", "--config_file", help="Written; one that is there keeps all but its lowbit_config section."
        ),
    ] = Path("lowbit.yaml"),
    defaults: Annotated[
        bool,
        typer.Option("--defaults", help="Ask nothing: Accelerate's defaults for this machine, and LoCo at 4 bits."),
    ] = False,
    section: Annotated[
        str | None,
        typer.Option(
            "--lowbit_config",
            "--lowbit-config",
            help="Ask nothing: this section, '{compressor: loco2, seed: 3}', with Accelerate's defaults.",
        ),
    ] = None,
) -> None:
    """Ask what to compress and how, and write a configuration file for accelerate launch."""
    from lowbit_strategy.config import wizard
    from lowbit_strategy.config.section import read_section

    with errors_of("config"):
        given = (
            read_section(section) if section is not None else {"compressor": "loco", "bits": 4} if defaults else None
        )
        wizard.configure(config_file, given)
