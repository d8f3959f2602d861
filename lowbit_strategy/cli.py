"""The `lowbit` command. Each sub-command lives with what it is about; this module only gathers them."""

from __future__ import annotations

import typer

from lowbit_strategy.doctor import doctor
from lowbit_strategy.launch import PASS_ON, config, launch
from lowbit_strategy.report.command import report

app = typer.Typer(
    name="lowbit",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


@app.callback()
def lowbit() -> None:
    """Compressed gradient synchronisation for PyTorch training."""


app.command()(doctor)
app.command(context_settings=PASS_ON, add_help_option=False)(launch)
app.command()(config)
app.command()(report)


def main() -> None:
    app()
