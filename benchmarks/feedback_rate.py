"""Whether residuals should follow the learning rate: pairs of runs of the model of `benchmarks/loss_over_bytes.py`.

Error feedback as first published adds the learning rate times the gradient to its residual; here residuals are in units
of the gradient, unless ``follows_rate=True`` rescales them. Peak rates are the best without compression.

    python -m benchmarks.feedback_rate --json benchmarks/results/feedback_rate.json

Results are added to the JSON file as they come, and what is there already is not run again.
"""

from __future__ import annotations

import itertools
import json
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.loss_over_bytes import Run, Setting, best_rate, run_once
from benchmarks.runs import ChangedSetting, ResultsFile, Runs, SeedCount, mean_and_error
from benchmarks.simulated import DENSE

METHODS = ("topk", "powersgd", "onebitsgd", "efsignsgd", "loco")


def table(runs: Runs[Run]) -> Table:
    """The loss with residuals that follow less the loss without, mean and standard error over seeds."""
    result = Table("compressor", "optimizer", "schedule", "difference", "lower in")
    cells = dict.fromkeys((run.variant, run.optimizer, run.schedule) for run in runs.runs if run.follows_rate)
    for method, optimizer, schedule in cells:
        chosen = runs.of(variant=method, optimizer=optimizer, schedule=schedule)
        rate = next(run.learning_rate for run in chosen if run.follows_rate)
        loss = {(run.seed, run.follows_rate): run.validation_loss for run in chosen if run.learning_rate == rate}
        seeds = [seed for seed, follows in loss if follows and (seed, False) in loss]
        differences = [loss[seed, True] - loss[seed, False] for seed in seeds]
        wins = f"{sum(each < 0 for each in differences)} of {len(differences)}"
        result.add_row(method, optimizer, schedule, mean_and_error(differences, 4), wins)
    return result


def main(
    method: Annotated[list[str] | None, typer.Option(help="a compressor's name; repeat")] = None,
    seeds: SeedCount = 3,
    changed: ChangedSetting = "{}",
    json_path: ResultsFile = None,
) -> None:
    torch.set_num_threads(1)
    setting = Setting(**json.loads(changed))
    runs = Runs(json_path, setting, Run)
    for optimizer in ("sgd", "adamw"):
        rate = best_rate(runs, setting, variant=DENSE, optimizer=optimizer, schedule="cosine")
        cells = itertools.product(range(seeds), method or METHODS, ("cosine", "drops"), (False, True))
        for seed, name, schedule, follows in cells:
            key = {"variant": name, "optimizer": optimizer, "schedule": schedule}
            run_once(runs, setting, learning_rate=rate, seed=seed, follows_rate=follows, **key)
    Console(width=140).print(table(runs))


if __name__ == "__main__":
    typer.run(main)
