"""What studies share: options of their commands, the learning rate over a run, runs in a JSON file, tables."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Generic, Protocol, TypeVar

import typer
from rich.console import Console
from rich.table import Table

ResultsFile = Annotated[Path | None, typer.Option("--json", help="results file, continued if it exists")]
ChangedSetting = Annotated[str, typer.Option("--setting", help="fields of Setting as JSON")]
SeedCount = Annotated[int, typer.Option(help="seeds 0 ... n-1")]
SeedList = Annotated[str, typer.Option(help="seeds, separated by commas")]
Variants = Annotated[list[str] | None, typer.Option(help="preset, or 'name {JSON options}'; repeat")]
Layouts = Annotated[list[str] | None, typer.Option(help="ddp (two hops) or fsdp (one); repeat")]


class Schedule(Protocol):
    """What `warmup_then_cosine` needs of a setting."""

    @property
    def steps(self) -> int: ...
    @property
    def warmup_steps(self) -> int: ...


def warmup_then_cosine(step: int, setting: Schedule, *, floor: float) -> float:
    """Share of the learning rate: a linear rise, then half a cosine down to `floor`."""
    if step < setting.warmup_steps:
        return (step + 1) / setting.warmup_steps
    progress = (step - setting.warmup_steps) / max(1, setting.steps - setting.warmup_steps)
    return floor + (1 - floor) / 2 * (1 + math.cos(math.pi * progress))


def mean_and_error(values: Sequence[float], digits: int) -> str:
    """``mean ± standard error``; empty for none."""
    if not values:
        return ""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{statistics.fmean(values):+.{digits}f} ± {error:.{digits}f}"


def table_of(title: str, names: Sequence[str], figures: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table whose first columns are `names`, the others `figures`."""
    table = Table(title=title)
    for heading in names:
        table.add_column(heading)
    for heading in figures:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def show(table: Table, *, width: int) -> None:
    """`width`: where the output goes to no terminal."""
    Console(width=None if sys.stdout.isatty() else width).print(table)


Run = TypeVar("Run")


class Runs(Generic[Run]):
    """Runs of one setting; those that a file has already need not be repeated.

    Args:
        path: Of the file; None keeps them in memory only.
        setting: A dataclass, the same for all runs of a file.
        kind: The dataclass of a run.

    Raises:
        typer.BadParameter: The file has runs of another setting.
    """

    def __init__(self, path: Path | None, setting: Any, kind: type[Run]) -> None:
        self.path = path
        self.setting = setting
        self.runs: list[Run] = []
        if path is not None and path.exists():
            saved = json.loads(path.read_text())
            if saved["setting"] != asdict(setting):
                raise typer.BadParameter(f"{path} holds runs of another setting: {saved['setting']}")
            self.runs = [kind(**run) for run in saved["runs"]]

    def of(self, **fields: Any) -> list[Run]:
        """The runs with these fields."""
        wanted = fields.items()
        return [run for run in self.runs if all(getattr(run, key) == value for key, value in wanted)]

    def get(self, **fields: Any) -> Run | None:
        """The first of them."""
        return next(iter(self.of(**fields)), None)

    def add(self, run: Any) -> None:
        """Written to the file at once."""
        self.runs.append(run)
        if self.path is not None:
            runs = ",\n".join(json.dumps(asdict(each)) for each in self.runs)  # type: ignore[call-overload]
            self.path.write_text(f'{{"setting": {json.dumps(asdict(self.setting))}, "runs": [\n{runs}\n]}}\n')
