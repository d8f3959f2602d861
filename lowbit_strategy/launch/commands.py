"""``lowbit launch``, ``config``, ``report`` and ``lighthouse``. What is slow is imported when they are called."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from lowbit_strategy.inform import errors_of
from lowbit_strategy.ranks.elastic import start_lighthouse

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
    section: Annotated[
        str,
        typer.Option("--lowbit_config", "--lowbit-config", help="The section: '{compressor: loco2, seed: 3}'."),
    ] = "{compressor: loco, bits: 4}",
) -> None:
    """Write a configuration file for accelerate launch, or a section into one; a new one has Accelerate's defaults."""
    from lowbit_strategy.launch import wizard
    from lowbit_strategy.launch.section import read_section

    with errors_of("config"):
        wizard.configure(config_file, read_section(section))


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
        from lowbit_strategy.report.page import write_report
    except ModuleNotFoundError as error:
        typer.echo(f"{error.name} is not installed: pip install 'lowbit-strategy[report]'", err=True)
        raise typer.Exit(2) from error
    from lowbit_strategy.report.run import read_run, runs_in
    from lowbit_strategy.telemetry.run_record import read_runs

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
    page = write_report(run, out if out is not None else found / "report")
    typer.echo(f"{page}: {len(run.observations)} observations, {len(run.switches)} decisions")


def lighthouse(
    bind: Annotated[str, typer.Option(help="Address and port to listen on.")] = "[::]:29510",
    min_replicas: Annotated[int, typer.Option(min=1, help="With fewer nobody goes on.")] = 1,
    heartbeat_timeout: Annotated[
        float, typer.Option(min=0.3, help="Seconds without a heartbeat after which a replica is lost.")
    ] = 2.0,
    join_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds that replicas wait in a round for one that lives and is slower.")
    ] = 600.0,
) -> None:
    """Run torchft's lighthouse, until it is interrupted. Its page shows who is there.

    It keeps nothing that matters: if it is lost, replicas wait, and go on once it has been started again. Give each run
    one of its own. Nobody who reaches the port is asked who they are: keep it in a private network.
    """
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    os.environ.setdefault("RUST_LOG", "error")
    try:
        server = start_lighthouse(
            bind, min_replicas=min_replicas, join_timeout=join_timeout, heartbeat_timeout=heartbeat_timeout
        )
    except (ImportError, RuntimeError) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from None
    port = server.address().rpartition(":")[2]
    typer.echo(f"lighthouse at http://{socket.gethostname()}:{port}, which has a page for browsers")
    while not ended.wait(0.5):
        pass
    server.shutdown()
