"""Adaptive compression against fixed compression: accuracy or loss, and bytes.

    python -m benchmarks.adaptive settings --json benchmarks/results/adaptive_settings.json
    python -m benchmarks.adaptive digits --json benchmarks/results/adaptive_digits.json
    python -m benchmarks.adaptive language --json benchmarks/results/adaptive_language.json
    python -m benchmarks.adaptive demo --fixed methods.json --json benchmarks/results/adaptive_demo.json
    python -m benchmarks.adaptive gravac --json benchmarks/results/adaptive_gravac.json      (as root)
    python -m benchmarks.adaptive monitor --json benchmarks/results/monitor.json

Ranks of the first three are threads of one process with the real engines, so what is compared is quality and bytes, not
time; `demo` is the demo's own training on two processes. Results of these are added to the JSON file as they come, and
what is there already is not run again. `gravac` measures time: four hosts behind rate-limited links, as
`benchmarks/network.py` has them. `monitor` measures time too.
"""

from __future__ import annotations

import json
import logging
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.adaptive_runs import demo as demo_run
from benchmarks.adaptive_runs import digits as digits_run
from benchmarks.adaptive_runs import language as language_run
from testing.hosts.namespaces import SlowNetwork, why_not
from testing.hosts.torchrun import run_on_hosts

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
JsonPath = Annotated[Path | None, typer.Option("--json", help="Results file, continued if it exists.")]
Record = dict[str, Any]


def run_all(
    train: Callable[[str, Any, int], Any], methods: Mapping[str, Any], seeds: range, json_path: Path | None
) -> list[Record]:
    """Every method with every seed; those that the file has already are not run again."""
    torch.set_num_threads(1)
    logging.getLogger("lowbit_strategy").setLevel(logging.ERROR)  # every switch of every run would be logged
    runs: list[Record] = json.loads(json_path.read_text())["runs"] if json_path and json_path.exists() else []
    done = {(run["method"], run["seed"]) for run in runs}
    for seed in seeds:
        for name, method in methods.items():
            if (name, seed) in done:
                continue
            runs.append(asdict(train(name, method, seed)))
            typer.echo(f"seed {seed}, {name}: {runs[-1]}")
            if json_path is not None:
                json_path.parent.mkdir(parents=True, exist_ok=True)
                json_path.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
    return [run for run in runs if run["seed"] in seeds]


def of(runs: Sequence[Record], method: str, key: str) -> list[float]:
    return [run[key] for run in sorted(runs, key=lambda run: run["seed"]) if run["method"] == method]


def with_error(values: Sequence[float], scale: float = 1.0, digits: int = 2) -> str:
    """Mean, and standard error where there are several."""
    if len(values) == 1:
        return f"{scale * values[0]:.{digits}f}"
    error = statistics.stdev(values) / math.sqrt(len(values))
    return f"{scale * statistics.mean(values):.{digits}f} ± {scale * error:.{digits}f}"


@app.command()
def settings(
    seeds: Annotated[int, typer.Option(help="Seeds 100 ... 100 + n - 1: others than those of `digits`.")] = 3,
    json_path: JsonPath = None,
) -> None:
    """Which digits task distinguishes heavy compression from none: the heavy level of both pairs against it."""
    methods = {
        f"{setting}, {name}": (setting, method)
        for setting in digits_run.SETTINGS
        for name, method in digits_run.fixed_methods().items()
    }

    def train(name: str, job: tuple[str, Any], seed: int) -> digits_run.DigitsRun:
        return digits_run.train(name, job[1], seed, digits_run.SETTINGS[job[0]])

    runs = run_all(train, methods, range(100, 100 + seeds), json_path)
    pairs = digits_run.PAIRS
    table = Table("setting", "uncompressed, test accuracy, %", *(f"{pair}: heavy, points less" for pair in pairs))
    for setting in digits_run.SETTINGS:
        dense = of(runs, f"{setting}, {digits_run.UNCOMPRESSED}", "accuracy")
        lost = [
            with_error(
                [a - b for a, b in zip(dense, of(runs, f"{setting}, {pair}: heavy", "accuracy"), strict=True)], 100
            )
            for pair in pairs
        ]
        table.add_row(setting, with_error(dense, 100), *lost)
    Console(width=140).print(table)


@app.command()
def digits(
    seeds: Annotated[int, typer.Option(help="How many.")] = 5,
    setting: Annotated[str, typer.Option(help="One of those that `settings` compares.")] = digits_run.CHOSEN,
    eta: Annotated[list[float] | None, typer.Option(help="Accordion's, once or more; 0.5 if not given.")] = None,
    interval: Annotated[
        list[int] | None, typer.Option(help="Accordion's, in thirtieths of the run, once or more; 1 if not given.")
    ] = None,
    first_seed: Annotated[int, typer.Option(help="Instead of 0, to choose options on other seeds.")] = 0,
    json_path: JsonPath = None,
) -> None:
    """Accordion between PowerSGD of rank 4 and 1, and between top-k of 10 % and 0.5 %."""
    task = digits_run.SETTINGS[setting]
    methods = digits_run.methods(task, eta or [digits_run.PUBLISHED_ETA], interval or [1])
    chosen_seeds = range(first_seed, first_seed + seeds)
    runs = run_all(partial(digits_run.train, setting=task), methods, chosen_seeds, json_path)
    columns = ("test accuracy, %", "less than light", "test loss", "MB sent by a rank", "fewer than light", "light")
    table = Table("method", *columns)
    for name in methods:
        sent = statistics.mean(of(runs, name, "sent_nbytes"))
        pair = name.partition(":")[0]
        light = of(runs, f"{pair}: light", "sent_nbytes")
        accuracies = of(runs, name, "accuracy")
        lost = [a - b for a, b in zip(of(runs, f"{pair}: light", "accuracy"), accuracies, strict=False)]
        table.add_row(
            name,
            with_error(accuracies, 100),
            with_error(lost, 100) if lost else "",
            with_error(of(runs, name, "test_loss"), digits=4),
            f"{sent / 1e6:.1f}",
            f"{statistics.mean(light) / sent:.2f}x" if light else "",
            f"{statistics.mean(of(runs, name, 'light_share')):.0%}" if "Accordion" in name else "",
        )
    Console(width=140).print(table)


@app.command()
def language(
    seeds: Annotated[int, typer.Option(help="Seeds 0 ... n-1.")] = 3,
    json_path: JsonPath = None,
) -> None:
    """Accordion and schedules between 8 and 2 bits on the demo's GPT."""
    methods = language_run.methods()
    runs = run_all(language_run.train, methods, range(seeds), json_path)
    dense = next(iter(methods))
    table = Table(
        "method", "bits per element", "light", "training loss, % over uncompressed", "mean", "validation", "mean"
    )
    for name in methods:
        gaps = []
        for key in ("train_loss", "validation_loss"):
            pairs = zip(of(runs, name, key), of(runs, dense, key), strict=True)
            values = [100 * (value / reference - 1) for value, reference in pairs]
            gaps += [" ".join(f"{value:+.2f}" for value in values), f"{statistics.mean(values):+.3f}"]
        adaptive = "/" in name or "," in name
        share = f"{statistics.mean(of(runs, name, 'light_share')):.0%}" if adaptive else ""
        table.add_row(name, f"{statistics.mean(of(runs, name, 'bits_per_element')):.2f}", share, *gaps)
    Console(width=150).print(table)


@app.command()
def demo(
    fixed_path: Annotated[
        Path, typer.Option("--fixed", help="Runs of dense_fsdp and others, by `benchmarks/methods.py --json`.")
    ],
    seeds: Annotated[int, typer.Option(help="Seeds 0 ... n-1.")] = 3,
    steps: Annotated[int, typer.Option(help="Optimizer steps, as in those runs.")] = 600,
    eta: Annotated[list[float] | None, typer.Option(help="Accordion's, once or more; 0.5 if not given.")] = None,
    json_path: JsonPath = None,
) -> None:
    """Accordion between 8 and 2 bits in the demo's own training on two processes, against fixed bits."""
    names = {f"Accordion 8 / 2, eta {each:g}": each for each in eta or [0.5]}
    runs = run_all(partial(demo_run.train, steps=steps), names, range(seeds), json_path)
    fixed = [run for run in json.loads(fixed_path.read_text()) if run["steps"] == steps and run["seed"] < seeds]
    runs += [{"method": run["strategy"], **run} for run in fixed]
    dense = {run["seed"]: run["validation_loss"] for run in fixed if run["strategy"] == "dense_fsdp"}
    table = Table("method", "bytes per step", "validation loss, % over uncompressed", "mean")
    beside = [run["strategy"] for run in fixed if run["strategy"].startswith(("dense_fsdp", "loco_fsdp", "loco2_fsdp"))]
    for name in dict.fromkeys([*beside, *names]):
        chosen = sorted((run for run in runs if run["method"] == name), key=lambda run: run["seed"])
        gaps = [100 * (run["validation_loss"] / dense[run["seed"]] - 1) for run in chosen]
        if gaps:
            sent = f"{statistics.mean(run['sent_nbytes'] for run in chosen):,.0f}"
            table.add_row(name, sent, " ".join(f"{gap:+.2f}" for gap in gaps), with_error(gaps))
    Console(width=120).print(table)


@app.command()
def gravac(
    rate: Annotated[str, typer.Option(help="Of every host's link, as tc writes it.")] = "100mbit",
    world_size: Annotated[int, typer.Option(help="Hosts.")] = 4,
    window: Annotated[int, typer.Option(help="Steps of one candidate's turn.")] = 25,
    timeout: Annotated[float, typer.Option(help="Seconds for one family of candidates.")] = 1500,
    json_path: JsonPath = None,
) -> None:
    """GraVAC on the demo's GPT behind slow links: where it ends, and what each candidate is worth by itself."""
    if (reason := why_not()) is not None:
        typer.echo(f"this benchmark cannot run here: {reason}", err=True)
        raise typer.Exit(2)
    arguments = ["--window", str(window), "--width", "128", "--depth", "4", "--context", "64", "--batch-size", "2"]
    families: dict[str, Any] = {}
    with SlowNetwork(world_size) as network:
        network.set_rate(rate)
        for family in ("loco", "topk"):
            script = Path(__file__).parent / "slow_links" / "gravac.py"
            reports = run_on_hosts(network, script, ["--family", family, *arguments], timeout=timeout)
            agree = all(report["search"] == reports[0]["search"] for report in reports)
            families[family] = {**reports[0], "ranks_agree": agree}
            if json_path is not None:
                json_path.parent.mkdir(parents=True, exist_ok=True)
                json_path.write_text(json.dumps({"rate": rate, "hosts": world_size, "families": families}, indent=1))
    for family, report in families.items():
        table = Table(
            *("candidate", "compression gain", "step, s", "compression gain / step", "GraVAC's own"),
            title=f"{family}: GraVAC ended at {report['search']['candidate']}",
        )
        for label, figures in report["alone"].items():
            own = report["search"]["scores"].get(label)
            row = (f"{figures['compression_gain']:.3f}", f"{figures['seconds']:.3f}", f"{figures['score']:.2f}")
            table.add_row(label, *row, "not sent long enough" if own is None else f"{own:.2f}")
        Console(width=120).print(table)


@app.command()
def monitor(
    steps: Annotated[int, typer.Option(help="Half of them are observed.")] = 120,
    json_path: JsonPath = None,
) -> None:
    """What the monitor adds to a step of the demo's GPT on two processes, at its default interval."""
    table = Table("strategy", "step, s", "observed step, s", "of the step's time, one in 50 observed")
    figures = []
    for strategy in ("loco_ddp", "loco_fsdp"):
        with tempfile.TemporaryDirectory() as name:
            report, script = Path(name) / "report.json", Path(__file__).parent / "adaptive_runs" / "monitor.py"
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            command += [str(script), "--strategy", strategy, "--steps", str(steps), "--folder", name]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
            subprocess.run([*command, "--report", str(report)], check=True, env=environment)
            figures.append(json.loads(report.read_text()))
        last = figures[-1]
        table.add_row(strategy, f"{last['step_s']:.3f}", f"{last['observed_step_s']:.3f}", f"{last['share']:.2%}")
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps({"steps": steps, "figures": figures}, indent=1) + "\n")
    Console(width=120).print(table)


if __name__ == "__main__":
    app()
