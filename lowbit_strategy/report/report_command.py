"""``lowbit report``. What is slow is imported when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run_dir: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="Folder with lowbit.jsonl (the logger's, or the one given as record), or one above it: the newest run"
            " in it is taken.",
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="Where to write; RUN/report by default.")] = None,
) -> None:
    """Draw what compression did in a run: one self-contained HTML page, and its charts as PNG files."""
    try:
        from jinja2 import TemplateError

        from lowbit_strategy.report.page import write_report
    except ModuleNotFoundError as error:
        typer.echo(f"{error.name} is not installed: pip install 'lowbit-strategy[report]'", err=True)
        raise typer.Exit(2) from error
    from lowbit_strategy.report.record import read_runs
    from lowbit_strategy.report.run import read_run, runs_in

    try:
        found, *others = runs_in(run_dir)
        run = read_run(found)
    except (FileNotFoundError, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    if found != run_dir:
        typer.echo(f"{run_dir} has no record of its own; the newest run in it is {found}")
    if others:
        typer.echo("The others, which can be given in its place: " + ", ".join(map(str, others)))
    if (number := len(read_runs(found))) > 1:
        typer.echo(f"{found} has {number} runs in its record; this is the last")
    try:
        page = write_report(run, out if out is not None else found / "report")
    except (AttributeError, LookupError, TypeError, ValueError, TemplateError) as error:
        typer.echo(f"the record in {found} is damaged, or another version of the package wrote it: {error!r}", err=True)
        raise typer.Exit(2) from error
    typer.echo(f"{page}: {len(run.observations)} observations, {len(run.switches)} decisions")
