"""Loss over bytes of all compressors with defaults: a small language model on Python source, two simulated ranks.

The learning rate of each is chosen on seed 0: from `FIRST` on rates are doubled or halved until the best one lies
between two others. Then it trains with more seeds at that rate. All see the same initial weights and batches.

    python -m benchmarks.loss_over_bytes --json benchmarks/results/loss_over_bytes.json
    python docs/pictures/loss_over_bytes.py
    python -m benchmarks.loss_over_bytes --setting '{"model": "transformer"}' --json loss_over_bytes_transformer.json

Results are added to the JSON file as they come, and what is there already is not run again.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.runs import ChangedSetting, ResultsFile, Runs, warmup_then_cosine
from benchmarks.simulated import DENSE, Exchange, parse, training, validation_loss
from benchmarks.small_models import Convolutional, make_model
from lowbit_strategy.methods.registry import PRESETS
from lowbit_strategy.methods.zoo.composed import WarmUp
from lowbit_strategy.methods.zoo.wrapper import Wrapper
from lowbit_strategy.model.parameters import describe_parameters
from lowbit_strategy.second_moment.few_bits import needs_squares
from recipes.text import standard_library

Optimizer = Literal["adamw", "sgd"]
Schedule = Literal["cosine", "drops"]
FIRST = {"adamw": 64e-3, "sgd": 0.4}
LIMITS = 1e-4, 10.0
# Momentum is AdamW's own; the warm-up of authors is a tenth of the run.
DGC = 'dgc {"momentum": 0, "warmup_steps": 20}'


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What all runs of one file share. `width` and `depth` are of the convolutional model; others: see `make_model`."""

    model: str = "convolutional"
    width: int = 48
    depth: int = 2
    context: int = 16
    batch: int = 8
    workers: int = 2
    steps: int = 200
    warmup_steps: int = 20
    validation_windows: int = 768


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One training run.

    Attributes:
        bits: Sent per element of the compressed parameters and hop.
        all_bits: Sent per element of the model and hop, all that travels included.
    """

    variant: str
    optimizer: str
    schedule: str
    follows_rate: bool
    learning_rate: float
    seed: int
    validation_loss: float
    bits: float
    all_bits: float
    seconds: float


def rate_at(step: int, schedule: Schedule, setting: Setting) -> float:
    """Share of the peak: warm-up, then a cosine to 0.01, or tenfold drops at a half and three quarters."""
    if schedule == "cosine":
        return warmup_then_cosine(step, setting, floor=0.01)
    rise = min(1.0, (step + 1) / setting.warmup_steps)
    return rise * 0.1 ** sum(step >= share * setting.steps for share in (0.5, 0.75))


def train(
    variant: str,
    learning_rate: float,
    seed: int,
    setting: Setting,
    *,
    optimizer_name: Optimizer = "adamw",
    schedule: Schedule = "cosine",
    follows_rate: bool = False,
) -> Run:
    """The whole run; deterministic. Adam's second moment is corrected where it is by default.

    Args:
        variant: See `parse`.
        learning_rate: Peak.
        seed: Of weights and batches.
        setting: What all runs share.
        optimizer_name: ``adamw``, or ``sgd`` with a momentum of 0.9 unless the compressor has its own.
        schedule: See `rate_at`.
        follows_rate: Residuals follow the learning rate.
    """
    started = time.perf_counter()
    torch.manual_seed(seed)
    if setting.model == "convolutional":
        model: nn.Module = Convolutional(setting.width, setting.depth)
    else:
        model = make_model(setting.model, setting.context)
    compressor, is_adam = parse(variant), optimizer_name == "adamw"
    corrects = is_adam and needs_squares(compressor, describe_parameters(model))
    exchange = Exchange(model, compressor, setting.workers, "ddp", seed, follows_rate=follows_rate, corrects=corrects)
    momentum = 0.0 if getattr(compressor, "momentum", 0.0) else 0.9
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=momentum)
    if is_adam:
        optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)

    def rate(step: int) -> float:
        return learning_rate * rate_at(step, schedule, setting)

    for _ in training(model, exchange, optimizer, standard_library("train"), setting, rate, seed):
        pass
    loss = validation_loss(model, standard_library("validation"), setting.validation_windows, setting.context)
    return Run(
        variant=variant,
        optimizer=optimizer_name,
        schedule=schedule,
        follows_rate=follows_rate,
        learning_rate=learning_rate,
        seed=seed,
        validation_loss=round(loss, 5) if loss == loss else 99.0,  # it has diverged
        bits=round(exchange.codec_bits(), 4),
        all_bits=round(exchange.bits_per_element(setting.steps), 4),
        seconds=round(time.perf_counter() - started, 1),
    )


def all_defaults() -> list[str]:
    """Every compressor by name, except wrappers of others and second names."""
    wrappers = {name for name, each in PRESETS.items() if isinstance(each, (Wrapper, WarmUp)) and name != "ef21"}
    names = sorted(PRESETS.keys() - wrappers - {DENSE, "loco4", "partition"})
    return [DENSE, *(DGC if name == "dgc" else name for name in names)]


def search(first: float, loss_at: Callable[[float], float]) -> float:
    """The rate of least loss among powers of two times `first`: both its neighbors are worse, unless it is at
    `LIMITS`.
    """
    losses = {rate: loss_at(rate) for rate in (first, 2 * first, first / 2)}
    while LIMITS[0] < (best := min(losses, key=losses.__getitem__)) < LIMITS[1]:
        missing = [rate for rate in (2 * best, best / 2) if rate not in losses]
        if not missing:
            break
        losses |= {rate: loss_at(rate) for rate in missing}
    return best


def best_rate(runs: Runs[Run], setting: Setting, **key: Any) -> float:
    """By runs of seed 0, which are made where they are missing."""

    def loss_at(rate: float) -> float:
        return run_once(runs, setting, learning_rate=rate, seed=0, follows_rate=False, **key).validation_loss

    first = FIRST[key["optimizer"]]
    return search(first if setting.model == "convolutional" else first / 4, loss_at)


def run_once(runs: Runs[Run], setting: Setting, **key: Any) -> Run:
    """The run with these fields, made if it is missing."""
    if (found := runs.get(**key)) is None:
        options = {name: key[name] for name in ("schedule", "follows_rate")}
        found = train(
            key["variant"], key["learning_rate"], key["seed"], setting, optimizer_name=key["optimizer"], **options
        )
        runs.add(found)
    return found


@dataclass(frozen=True, slots=True)
class Point:
    """A compressor at its best rate: the losses of all seeds."""

    variant: str
    rate: float
    bits: float
    all_bits: float
    losses: list[float]

    @property
    def name(self) -> str:
        return self.variant.partition(" ")[0]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.losses)

    @property
    def error(self) -> float:
        """Of the mean."""
        return statistics.stdev(self.losses) / math.sqrt(len(self.losses)) if len(self.losses) > 1 else 0.0


def is_beaten(point: Point, others: list[Point]) -> bool:
    """Whether another one sends no more, and its loss is lower on every seed, by more than twice the error."""
    for each in others:
        less = [b - a for a, b in zip(each.losses, point.losses, strict=True)]
        error = statistics.stdev(less) / math.sqrt(len(less)) if len(less) > 1 else 0.0
        if each.bits <= point.bits and min(less) > 0 and statistics.fmean(less) > 2 * error:
            return True
    return False


def points(runs: Runs[Run], variants: Container[str] | None = None) -> list[Point]:
    """The fewest bits first. None: of all variants; those without runs are left out."""
    found = []
    for variant in dict.fromkeys(run.variant for run in runs.runs):
        if variants is not None and variant not in variants:
            continue
        first = runs.of(variant=variant, seed=0)
        rate = min(first, key=lambda run: run.validation_loss).learning_rate
        chosen = sorted(runs.of(variant=variant, learning_rate=rate), key=lambda run: run.seed)
        losses = [run.validation_loss for run in chosen]
        found.append(Point(variant, rate, chosen[0].bits, chosen[0].all_bits, losses))
    return sorted(found, key=lambda point: point.bits)


def read(path: Path) -> Runs[Run]:
    """The runs of a file, in its own setting."""
    return Runs(path, Setting(**json.loads(path.read_text())["setting"]), Run)


def table(found: list[Point]) -> Table:
    result = Table("compressor", "bits", "all bits", "rate", "mean loss", "losses")
    for each in found:
        losses = " ".join(f"{loss:.4f}" for loss in each.losses)
        result.add_row(
            each.variant, f"{each.bits:.2f}", f"{each.all_bits:.2f}", f"{each.rate:g}", f"{each.mean:.4f}", losses
        )
    return result


def main(
    variant: Annotated[list[str] | None, typer.Option(help="preset, or 'name {JSON options}'; default: all")] = None,
    seeds: Annotated[int, typer.Option(help="seeds 0 ... n-1 at the best rate")] = 3,
    optimizer: Annotated[str, typer.Option(help="adamw or sgd")] = "adamw",
    changed: ChangedSetting = "{}",
    json_path: ResultsFile = None,
) -> None:
    torch.set_num_threads(1)
    setting = Setting(**json.loads(changed))
    runs = Runs(json_path, setting, Run)
    for name in variant or all_defaults():
        key = {"variant": name, "optimizer": optimizer, "schedule": "cosine"}
        rate = best_rate(runs, setting, **key)
        for seed in range(1, seeds):
            run_once(runs, setting, learning_rate=rate, seed=seed, follows_rate=False, **key)
    Console(width=140).print(table(points(runs)))


if __name__ == "__main__":
    typer.run(main)
