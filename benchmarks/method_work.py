"""What each method adds to a training step, in processor time: the demo's model, two simulated ranks, one core.

    OMP_NUM_THREADS=1 python -m benchmarks.method_work --json benchmarks/results/method_work.json

A step is the forward and backward pass of the demo's batch, then the whole gradient as one bucket, reduced by the real
engine. Processor time, so that what else the machine does counts little; what a network would take is left out, and
bytes that change hands are copied in memory. Methods take turns, and each is measured after its warm-up.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from benchmarks.quality import Exchange, Layout
from lowbit_strategy.reducers.registry import PRESETS
from recipes.gpt import GPT

RANKS = 2
BATCH, CONTEXT = 8, 128
SETTLING_STEPS = 5  # not measured
LATE = 1 << 20  # steps after which every warm-up is over
LAYOUTS: tuple[Layout, ...] = ("ddp", "fsdp")


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Medians of a rank's processor time in milliseconds.

    Args:
        compute_ms: Forward and backward pass.
        reduce_ms: Reducing the gradient.
    """

    name: str
    layout: str
    compute_ms: float
    reduce_ms: float


def measure(steps: int) -> list[Work]:
    torch.manual_seed(0)
    model = GPT(128, 4, 4, CONTEXT)
    exchanges = {(name, layout): _late(model, name, layout) for layout in LAYOUTS for name in PRESETS}
    compute: list[float] = []
    times: dict[tuple[str, str], list[float]] = {key: [] for key in exchanges}
    for _ in range(SETTLING_STEPS + steps):
        started = time.process_time()
        gradients = [_gradients(model) for _ in range(RANKS)]
        compute.append(time.process_time() - started)
        for key, exchange in exchanges.items():
            started = time.process_time()
            exchange.mean(gradients)
            times[key].append(time.process_time() - started)
    compute_ms = _rank_ms(compute)
    return [
        Work(name=name, layout=layout, compute_ms=compute_ms, reduce_ms=_rank_ms(seconds))
        for (name, layout), seconds in times.items()
    ]


def _late(model: GPT, name: str, layout: Layout) -> Exchange:
    exchange = Exchange(model, PRESETS[name], RANKS, layout, seed=0)
    for sync in exchange.syncs:
        sync.step_index = LATE
        sync.follow_phase()
    return exchange


def _gradients(model: GPT) -> list[Tensor]:
    tokens = torch.randint(256, (BATCH, CONTEXT + 1))
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    return list(torch.autograd.grad(loss, list(model.parameters())))


def _rank_ms(seconds: list[float]) -> float:
    return 1e3 * statistics.median(seconds[SETTLING_STEPS:]) / RANKS


def show(works: list[Work]) -> None:
    table = Table(title="processor time of a step and rank")
    table.add_column("method")
    for layout in LAYOUTS:
        table.add_column(f"{layout}: reducing, ms", justify="right")
        table.add_column("step, dense = 1", justify="right")
    by_key = {(work.name, work.layout): work for work in works}
    for name in PRESETS:
        row = [name]
        for layout in LAYOUTS:
            work, dense = by_key[name, layout], by_key["dense", layout]
            step, dense_step = work.compute_ms + work.reduce_ms, dense.compute_ms + dense.reduce_ms
            row += [f"{work.reduce_ms:.2f}", f"{step / dense_step:.3f}"]
        table.add_row(*row)
    Console(width=100).print(table)


def main(
    steps: Annotated[int, typer.Option(help="measured steps", min=3)] = 15,
    json_path: Annotated[Path | None, typer.Option("--json", help="write the figures here")] = None,
) -> None:
    """What each method adds to a step of training."""
    torch.set_num_threads(1)
    works = measure(steps)
    show(works)
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(work) for work in works], indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
