"""The `lowbit` command. Each subcommand lives in the package that it belongs to, and is imported when it is called."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from lowbit_strategy.leaves import MissingPart, load
from lowbit_strategy.version import __version__

COMMANDS = {
    "doctor": "lowbit_strategy.doctor.doctor:doctor",
    "config": "lowbit_strategy.config_file.config_command:config",
    "report": "lowbit_strategy.report.report_command:report",
    "bench": "lowbit_strategy.advisor.bench:bench",
    "advise": "lowbit_strategy.advisor.advise:advise",
    "estimate": "lowbit_strategy.advisor.advise:estimate",
    "lighthouse": "lowbit_strategy.elastic.lighthouse_command:lighthouse",
}
_LOOKS: dict[str, Any] = {"add_completion": False, "pretty_exceptions_show_locals": False}


class _Commands(TyperGroup):
    """The commands of the table."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        settings: dict[str, Any] = {
            "allow_interspersed_args": cmd_name != "doctor"
        }  # after a script come its own arguments
        try:
            function, text = load(COMMANDS[cmd_name], f"lowbit {cmd_name}"), None
        except MissingPart as error:
            function, text = _missing(error), str(error)
            settings = {"allow_extra_args": True, "ignore_unknown_options": True}
        alone = typer.Typer(**_LOOKS)
        alone.command(cmd_name, context_settings=settings, help=text)(function)
        return typer.main.get_command(alone)

    def invoke(self, ctx: Any) -> Any:
        """Print errors that the user can fix as messages, and exit with status 2."""
        try:
            return super().invoke(ctx)
        except MissingPart as error:
            print(error, file=sys.stderr)
        except ValueError as error:
            print(f"lowbit {ctx.invoked_subcommand}: {error}", file=sys.stderr)
        raise SystemExit(2)


def _missing(error: MissingPart) -> Callable[[], NoReturn]:
    def fail() -> NoReturn:
        raise error

    return fail


app = typer.Typer(name="lowbit", cls=_Commands, no_args_is_help=True, **_LOOKS)


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


def main() -> None:
    """Run without garbage collection: a pass over torch's objects takes a second, and this process ends soon."""
    gc.disable()
    try:
        app()
    finally:
        gc.freeze()
        gc.enable()
