"""The demo: the same small GPT, on the same real text, with compressed gradients and with Lightning's own DDP.

Runs `demo_train.py` twice on two local processes, then prints a table and draws both loss curves.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import typer
from rich.console import Console
from rich.table import Table

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RUNS = {"loco_ddp": "LoCo, 4 bits", "ddp": "Lightning's own DDP"}
WARMUP_STEPS = 10  # not counted in step times


def train(strategy: str, steps: int, folder: Path) -> dict[str, Any]:
    """One run in processes of its own, its progress bar on this terminal."""
    results = folder / f"{strategy}.json"
    script = Path(__file__).with_name("demo_train.py")
    command = [sys.executable, str(script), "--strategy", strategy, "--steps", str(steps), "--results", str(results)]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | dict(os.environ)
    subprocess.run(command, check=True, env=environment)
    record: dict[str, Any] = json.loads(results.read_text())
    return record


def show(records: dict[str, dict[str, Any]], console: Console) -> None:
    table = Table(title="Two processes, the same seeds and data")
    for column in ("", "validation loss", "gradient bytes sent per rank and step", "step time (median)"):
        table.add_column(column, justify="right" if column else "left")
    for strategy, label in RUNS.items():
        record = records[strategy]
        table.add_row(
            f"{label} ({strategy})",
            f"{record['validation'][-1][1]:.4f}",
            f"{record['sent_nbytes_per_step'] / 1e6:.2f} MB",
            f"{statistics.median(record['step_ms'][WARMUP_STEPS:]):.0f} ms",
        )
    console.print(table)
    compressed, dense = (records[strategy] for strategy in RUNS)
    gap = compressed["validation"][-1][1] / dense["validation"][-1][1] - 1
    ratio = dense["sent_nbytes_per_step"] / compressed["sent_nbytes_per_step"]
    console.print(f"{ratio:.1f} times fewer bytes; validation loss differs by {gap:+.2%}.")
    console.print("On one machine the link is memory, so the step time cannot fall; docs/benchmarks.md has slow links.")


def plot(records: dict[str, dict[str, Any]], path: Path) -> None:
    """Both runs on one pair of axes: training loss faint and smoothed, validation loss with markers."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for (strategy, label), color, style in zip(RUNS.items(), ("tab:blue", "tab:orange"), ("-", "--"), strict=True):
        steps, losses = zip(*records[strategy]["train"], strict=True)
        axes.plot(steps, _smooth(losses), style, color=color, linewidth=1, alpha=0.6, label=f"{label}: training")
        steps, losses = zip(*records[strategy]["validation"], strict=True)
        axes.plot(steps, losses, style, color=color, marker="o", label=f"{label}: validation")
    axes.set(xlabel="optimizer step", ylabel="loss (nats per byte)", title="Small GPT on Python source, two processes")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def _smooth(values: tuple[float, ...], weight: float = 0.9) -> list[float]:
    smoothed, average = [], values[0]
    for value in values:
        average = weight * average + (1 - weight) * value
        smoothed.append(average)
    return smoothed


def main(
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.")] = 600,
    folder: Annotated[Path, typer.Option(help="Where records and the plot go.")] = Path("runs/demo"),
) -> None:
    """Train with compressed gradients and without, then compare."""
    folder.mkdir(parents=True, exist_ok=True)
    console = Console()
    records = {}
    for strategy, label in RUNS.items():
        console.rule(f"{label}: Trainer(strategy={strategy!r})")
        records[strategy] = train(strategy, steps, folder)
    console.rule("Result")
    show(records, console)
    picture = folder / "loss.png"
    plot(records, picture)
    console.print(f"Loss curves: {picture}")


if __name__ == "__main__":
    typer.run(main)
