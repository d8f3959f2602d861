"""Peak memory per rank of every strategy and choice, beside what the plan says.

    python -m benchmarks.peak_memory.run --json benchmarks/results/peak_memory.json

Each case and what it is compared with (the same without compression) train for some steps on real processes. The most
that a rank has allocated is counted by the allocator (`testing/counting/allocations.c`, on CUDA torch's own), from the
first step on. The figure that has to hold is that peak over stock's peak and the plan's bytes together, the rank where
it is furthest off. Results are added to the JSON file as they come, and what is there already is not run
again.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.peak_memory import training
from benchmarks.peak_memory.cases import CASES
from benchmarks.peak_memory.training import Case
from benchmarks.runs import ResultsFile, Runs
from testing.counting.allocations import build
from testing.processes.ranks import run_ranks

BAR = 0.05
AT_ONCE = 4  # cases of one launch


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What all rows of one file share."""

    device: str
    width: int = training.WIDTH
    depth: int = training.DEPTH
    steps: int = training.STEPS


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One set-up, all in bytes.

    Args:
        peak: Of the rank that is furthest from its plan.
        stock: The same without compression.
        planned: What the plan says compression takes beside.
        purposes: The plan's figures.
        held: What of it is kept from step to step, counted at the end.
        weights_sent, weights_planned: Of FSDP2's weights, per step of one rank; None where there are none.
    """

    name: str
    parameters: int
    peak: int
    stock: int
    planned: int
    purposes: dict[str, int]
    held: dict[str, int]
    weights_sent: int | None
    weights_planned: int | None

    @property
    def ratio(self) -> float:
        return self.peak / (self.stock + self.planned)


def measure(cases: Sequence[Case], device: str, library: Path) -> list[Row]:
    """In one launch, with what they are compared with."""
    env = {} if device == "cuda" else {"LD_PRELOAD": str(library)}
    every = list(dict.fromkeys([*(case.stock for case in cases), *cases]))
    ranks = run_ranks(training.run, cases[0].world_size, every, device, timeout=180 * len(every), env=env)
    found = {case: [of_rank[at] for of_rank in ranks] for at, case in enumerate(every)}
    return [row(case, found[case], found[case.stock]) for case in cases]


def row(case: Case, ranks: list[dict[str, Any]], stock: list[dict[str, Any]]) -> Row:
    rows = [
        Row(
            name=case.name,
            parameters=ours["parameters"],
            peak=ours["peak"],
            stock=theirs["peak"],
            planned=round(ours["beyond"]),
            purposes=ours["memory"],
            held=ours["held"],
            weights_sent=ours["weights_nbytes"],
            weights_planned=ours["planned_weights_nbytes"],
        )
        for ours, theirs in zip(ranks, stock, strict=True)
    ]
    return max(rows, key=lambda each: abs(each.ratio - 1))


def table(rows: list[Row]) -> Table:
    shown = Table("set-up", "peak, MB", "stock, MB", "plan, MB", "measured beyond stock, MB", "peak / (stock + plan)")
    for each in rows:
        figures = (each.peak, each.stock, each.planned, each.peak - each.stock)
        shown.add_row(each.name, *(f"{nbytes / 1e6:.1f}" for nbytes in figures), f"{each.ratio:.3f}")
    return shown


def main(
    only: Annotated[str, typer.Option(help="Cases whose name holds this text.")] = "",
    json_path: ResultsFile = None,
) -> None:
    """Measure, compare, and add to the results file; status 1 if a row is off by more than five per cent."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results: Runs[Row] = Runs(json_path, Setting(device=device), Row)
    wanted = [case for case in CASES if only in case.name and results.get(name=case.name) is None]
    num_ranks = torch.cuda.device_count() if device == "cuda" else max(case.world_size for case in CASES)
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder))
        for _, same in itertools.groupby(wanted, key=lambda case: case.world_size):
            of_kind = list(same)
            for cases in (of_kind[at : at + AT_ONCE] for at in range(0, len(of_kind), AT_ONCE)):
                if cases[0].world_size > num_ranks:
                    continue
                for found in measure(cases, device, library):
                    results.add(found)
                    print(json.dumps(asdict(found) | {"ratio": round(found.ratio, 3)}), flush=True)
    Console(width=150).print(table(results.runs))
    raise typer.Exit(code=int(any(abs(each.ratio - 1) > BAR for each in results.runs)))


if __name__ == "__main__":
    typer.run(main)
