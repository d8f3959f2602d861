"""Whether residuals should follow the learning rate: pairs of runs of the small GPT of `benchmarks/loss_over_bytes.py`.

Error feedback as first published adds the learning rate times the gradient to its residual; here residuals are in units
of the gradient. One run of each pair rescales the residual by old over new whenever the rate changes.

    python -m benchmarks.feedback_rate --json benchmarks/results/feedback_rate.json

Results are added to the JSON file as they come, and what is there already is not run again.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.loss_over_bytes import Run, Setting, train
from benchmarks.runs import Runs, mean_and_error

METHODS = ("topk", "powersgd", "onebitsgd", "efsignsgd", "loco", "dgc")
RATES = {"adamw": 4e-3, "sgd": 0.3}


def table(runs: Runs[Run]) -> Table:
    """The loss with residuals that follow less the loss without, mean and standard error over seeds."""
    result = Table("compressor", "optimizer", "schedule", "difference", "lower in")
    for method, optimizer, schedule in dict.fromkeys((run.variant, run.optimizer, run.schedule) for run in runs.runs):
        chosen = runs.of(variant=method, optimizer=optimizer, schedule=schedule)
        loss = {(run.seed, run.follows_rate): run.validation_loss for run in chosen}
        seeds = [seed for seed, follows in loss if follows and (seed, False) in loss]
        differences = [loss[seed, True] - loss[seed, False] for seed in seeds]
        wins = f"{sum(each < 0 for each in differences)} of {len(differences)}"
        result.add_row(method, optimizer, schedule, mean_and_error(differences, 4), wins)
    return result


def main(
    method: Annotated[list[str] | None, typer.Option(help="a compressor's name; repeat")] = None,
    seeds: Annotated[int, typer.Option(help="seeds 0 ... n-1")] = 3,
    changed: Annotated[str, typer.Option("--setting", help="fields of Setting as JSON")] = "{}",
    json_path: Annotated[Path | None, typer.Option("--json", help="results file, continued if it exists")] = None,
) -> None:
    torch.set_num_threads(1)
    setting = Setting(**json.loads(changed))
    runs = Runs(json_path, setting, Run)
    for schedule, seed, name in itertools.product(("cosine", "drops"), range(seeds), method or METHODS):
        for (optimizer, rate), follows in itertools.product(RATES.items(), (False, True)):
            key = {"variant": name, "optimizer": optimizer, "schedule": schedule, "follows_rate": follows}
            if runs.get(**key, seed=seed) is None:
                options = {"optimizer_name": optimizer, "schedule": schedule, "follows_rate": follows}
                runs.add(train(name, rate, seed, setting, **options))  # type: ignore[arg-type]
    Console(width=140).print(table(runs))


if __name__ == "__main__":
    typer.run(main)
