"""The `lowbit` command. Each sub-command lives with what it is about; this module only gathers them."""

from __future__ import annotations

import gc
from typing import Annotated

import typer

from lowbit_strategy.advisor.advise import advise, estimate
from lowbit_strategy.advisor.bench import bench
from lowbit_strategy.launch.commands import PASS_ON, config, launch, lighthouse, report
from lowbit_strategy.launch.doctor import doctor
from lowbit_strategy.version import __version__

app = typer.Typer(
    name="lowbit",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lowbit-strategy {__version__}")
        raise typer.Exit


@app.callback()
def lowbit(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Compressed gradient synchronization for PyTorch training: Lightning, Fabric, Accelerate and the HF Trainer."""


app.command()(doctor)
app.command(context_settings=PASS_ON, add_help_option=False)(launch)
app.command()(config)
app.command()(report)
app.command()(bench)
app.command()(advise)
app.command()(estimate)
app.command()(lighthouse)


def main() -> None:
    """Looking for garbage among all that torch makes takes a second, and this process ends soon."""
    gc.disable()
    try:
        app()
    finally:
        gc.freeze()
        gc.enable()
