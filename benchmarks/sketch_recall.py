"""What a count sketch finds: the share of the largest elements of the sum over ranks, by the size of its tables.

A GPT trains on Python source with the true top-k of the sum and error feedback. In its last steps every matrix is also
looked for in sketches, which are thrown away: how many of the k that are chosen are among the k largest, and how much
of the energy of those they have.

    python -m benchmarks.sketch_recall --json benchmarks/results/sketch_recall.json
"""

from __future__ import annotations

import itertools
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.simulated import loss_of
from lowbit_strategy.methods.zoo.sketchedsgd import CountSketch
from recipes.gpt import GPT
from recipes.text import standard_library

WIDTHS = (64, 160)
DENSITIES = (0.01, 0.001)
RANKS = (2, 8)
TABLES = ((5, 4), (5, 16), (3, 7), (1, 20), (5, 64), (1, 320))  # rows, columns per entry to find


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Means over matrices, weighted by the elements looked for. `bits`: of the tables, per element and hop."""

    width: int
    ranks: int
    density: float
    rows: int
    columns_per_entry: int
    bits: float
    recall: float
    energy: float


def study(width: int, ranks: int, density: float, steps: int, looks: int, batch: int) -> list[Found]:
    torch.manual_seed(0)
    model = GPT(width, 2, 4, 32)
    params = [param for param in model.parameters() if param.dim() > 1]
    residuals = [[torch.zeros(param.numel()) for param in params] for _ in range(ranks)]
    optimizer = torch.optim.AdamW(params, lr=2e-3, betas=(0.9, 0.95))
    text, order = standard_library("train"), torch.Generator().manual_seed(1)
    cells: dict[tuple[int, int], list[tuple[float, float, float, float]]] = {table: [] for table in TABLES}
    for step in range(steps):
        for residual in residuals:
            starts = torch.randint(text.numel() - 33, (batch,), generator=order)
            for at, gradient in enumerate(torch.autograd.grad(loss_of(model, text, starts, 32), params)):
                residual[at] += gradient.flatten()
        for at, param in enumerate(params):
            total = torch.stack([residual[at] for residual in residuals]).sum(0)
            k = max(1, round(density * param.numel()))
            largest = total.abs().topk(k).indices
            if step >= steps - looks:
                for table, found in cells.items():
                    found.append((k, *looked_for(total, largest, *table, seed=step)))
            chosen = torch.zeros_like(total).index_copy_(0, largest, total[largest])
            param.grad = (chosen / ranks).view_as(param)
            for residual in residuals:
                residual[at][largest] = 0.0
        optimizer.step()
    results = []
    for (rows, columns), found in cells.items():
        weights = [each[0] for each in found]
        bits, recall, energy = (sum(each[0] * each[at] for each in found) / sum(weights) for at in (1, 2, 3))
        results.append(
            Found(
                width=width,
                ranks=ranks,
                density=density,
                rows=rows,
                columns_per_entry=columns,
                bits=round(bits, 3),
                recall=round(recall, 3),
                energy=round(energy, 3),
            )
        )
    return results


def looked_for(
    total: Tensor, largest: Tensor, rows: int, columns_per_entry: int, seed: int
) -> tuple[float, float, float]:
    """Bits per element, recall, and the share of the energy."""
    k = len(largest)
    columns = min(columns_per_entry * k, total.numel())
    sketch = CountSketch(total.numel(), rows, columns, seed, total.device)
    chosen = sketch.estimate(sketch.of(total)).abs().topk(k).indices
    recall = torch.isin(chosen, largest).float().mean().item()
    energy = (total[chosen].square().sum() / total[largest].square().sum()).item()
    return 32 * rows * columns / total.numel(), recall, energy


def main(
    steps: Annotated[int, typer.Option(help="of training")] = 40,
    looks: Annotated[int, typer.Option(help="last steps in which sketches are tried")] = 3,
    batch: Annotated[int, typer.Option(help="windows per rank")] = 4,
    json_path: Annotated[Path | None, typer.Option("--json", help="results file")] = None,
) -> None:
    torch.set_num_threads(1)
    found = [
        each
        for width, ranks, density in itertools.product(WIDTHS, RANKS, DENSITIES)
        for each in study(width, ranks, density, steps, looks, batch)
    ]
    table = Table("width", "ranks", "density", "rows", "columns per entry", "bits", "recall", "energy")
    for each in found:
        table.add_row(*(str(value) for value in asdict(each).values()))
    Console(width=120).print(table)
    mean = statistics.fmean(each.recall for each in found if (each.rows, each.columns_per_entry) == TABLES[0])
    Console().print(f"{TABLES[0]}: {mean:.2f}")
    if json_path is not None:
        rows = ",\n".join(json.dumps(asdict(each)) for each in found)
        json_path.write_text(f"[\n{rows}\n]\n")


if __name__ == "__main__":
    typer.run(main)
