"""`lowbit report`: one page about a finished or running job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run_dir: Annotated[
        Path, typer.Argument(help="Folder with lowbit.jsonl: the logger's, or the one given as record.")
    ],
    out: Annotated[Path | None, typer.Option(help="Where to write; RUN_DIR/report by default.")] = None,
) -> None:
    """Draw what compression did in a run: one self-contained HTML page, and its charts as PNG files."""
    try:
        from lowbit_strategy.report.page import write_report
    except ModuleNotFoundError as error:
        typer.echo(f"{error.name} is not installed: pip install 'lowbit-strategy[report]'", err=True)
        raise typer.Exit(2) from error
    from lowbit_strategy.report.run import read_run

    try:
        run = read_run(run_dir)
    except (FileNotFoundError, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    page = write_report(run, out if out is not None else run_dir / "report")
    typer.echo(f"{page}: {len(run.observations)} observations, {len(run.switches)} decisions")
