"""`lowbit report`: one page about a finished or running job."""

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
    baseline: Annotated[
        Path | None,
        typer.Argument(
            metavar="[BASELINE]",
            help="A run to compare with: another such folder, or one with a CSVLogger's metrics.csv, of a run without"
            " compression for example.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write; RUN/report by default.")] = None,
    run_number: Annotated[
        int | None,
        typer.Option("--run", help="Which of several runs that one record holds, from 1; the last by default."),
    ] = None,
    log: Annotated[
        bool | None,
        typer.Option(
            "--log/--linear", help="Axis of the loss; by default logarithmic if losses span more than a factor of ten."
        ),
    ] = None,
) -> None:
    """Draw what compression did in a run: one self-contained HTML page, and its charts as PNG files."""
    try:
        from lowbit_strategy.report.page import write_report
    except ModuleNotFoundError as error:
        typer.echo(f"{error.name} is not installed: pip install 'lowbit-strategy[report]'", err=True)
        raise typer.Exit(2) from error
    from lowbit_strategy.report.run import describe_runs, read_baseline, read_run, runs_in

    try:
        found, *others = runs_in(run_dir)
        run = read_run(found, run_number)
        described = describe_runs(found)
        other = read_baseline(baseline) if baseline is not None else None
    except (FileNotFoundError, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    if found != run_dir:
        typer.echo(f"{run_dir} has no record of its own; the newest run in it is {found}")
    if others:
        typer.echo("The others, which can be given in its place: " + ", ".join(map(str, others)))
    if len(described) > 1:
        typer.echo(f"{found} has {len(described)} runs in its record, begun at: {'; '.join(described)}")
        typer.echo(f"This is number {run_number or len(described)}; --run draws another")
    page = write_report(run, out if out is not None else found / "report", other, log_loss=log)
    typer.echo(f"{page}: {len(run.observations)} observations, {len(run.switches)} decisions")
