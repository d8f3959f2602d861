"""Loss over bytes of all compressors with defaults: a GPT of 0.1 M parameters on Python source, two simulated ranks.

The learning rate of each is chosen on seed 0 from a small grid; then it trains with more seeds. All see the same
initial weights and batches. Ranks are simulated in one process with the real engines, as in `benchmarks/quality.py`.

    python -m benchmarks.loss_over_bytes --json benchmarks/results/loss_over_bytes.json

Results are added to the JSON file as they come, and what is there already is not run again.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F

from benchmarks.quality import Exchange
from benchmarks.runs import Runs, warmup_then_cosine
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.composed import WarmUp, Wrapper
from lowbit_strategy.methods.registry import PRESETS, from_options
from recipes.gpt import GPT
from recipes.text import standard_library

Schedule = Literal["cosine", "drops", "constant"]
RATES = (3e-3, 6e-3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What all runs of one file share."""

    width: int = 56
    depth: int = 2
    heads: int = 4
    context: int = 32
    batch: int = 8
    workers: int = 2
    steps: int = 80
    warmup_steps: int = 8
    validation_windows: int = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One training run.

    Attributes:
        bits: Sent per element of the compressed parameters and hop.
        all_bits: Sent per element of the model and hop, headers and exempt parameters included.
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


def parse(variant: str) -> Compressor:
    """``name`` or ``name {JSON options}``. DGC's warm-up is a tenth of the run, as its authors' is."""
    name, _, options = variant.partition(" ")
    compressor = from_options(name, json.loads(options) if options else {})
    return replace(compressor, warmup_steps=8) if name == "dgc" else compressor  # type: ignore[call-arg]


def rate_at(step: int, schedule: Schedule, setting: Setting) -> float:
    """Share of the peak: warm-up, then a cosine to 0.01, or tenfold drops at a half and three quarters, or constant."""
    if schedule == "cosine":
        return warmup_then_cosine(step, setting, floor=0.01)
    rise = min(1.0, (step + 1) / setting.warmup_steps)
    if schedule == "constant":
        return rise
    return rise * 0.1 ** sum(step >= share * setting.steps for share in (0.5, 0.75))


def train(
    variant: str,
    learning_rate: float,
    seed: int,
    setting: Setting,
    *,
    optimizer_name: str = "adamw",
    schedule: Schedule = "cosine",
    follows_rate: bool = False,
) -> Run:
    """The whole run; deterministic.

    Args:
        variant: See `parse`.
        learning_rate: Peak.
        seed: Of weights and batches.
        setting: What all runs share.
        optimizer_name: ``adamw``, or ``sgd`` with a momentum of 0.9.
        schedule: See `rate_at`.
        follows_rate: Residuals are divided by what the rate is multiplied by.
    """
    started = time.perf_counter()
    torch.manual_seed(seed)
    model = GPT(setting.width, setting.depth, setting.heads, setting.context)
    parameters = list(model.parameters())
    exchange = Exchange(model, parse(variant), setting.workers, "ddp", seed)
    optimizer: Any = torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=0.1)
    if optimizer_name == "sgd":
        optimizer = torch.optim.SGD(parameters, momentum=0.9)
    text = standard_library("train")
    order = torch.Generator().manual_seed(10_000 + seed)
    rate = 0.0
    for step in range(setting.steps):
        gradients = []
        for _ in range(setting.workers):
            starts = torch.randint(text.numel() - setting.context - 1, (setting.batch,), generator=order)
            gradients.append(torch.autograd.grad(_loss(model, text, starts, setting.context), parameters))
        before, rate = rate, learning_rate * rate_at(step, schedule, setting)
        if follows_rate and before:
            for sync in exchange.syncs:
                sync.state.rescale_(before / rate)
        for parameter, mean in zip(parameters, exchange.mean(gradients), strict=True):
            parameter.grad = mean.clone()
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    return Run(
        variant=variant,
        optimizer=optimizer_name,
        schedule=schedule,
        follows_rate=follows_rate,
        learning_rate=learning_rate,
        seed=seed,
        validation_loss=_validation_loss(model, setting),
        bits=exchange.codec_bits(),
        all_bits=exchange.bits_per_element(setting.steps),
        seconds=time.perf_counter() - started,
    )


def _loss(model: GPT, text: torch.Tensor, starts: torch.Tensor, context: int) -> torch.Tensor:
    windows = text[starts[:, None] + torch.arange(context + 1)].long()
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def _validation_loss(model: GPT, setting: Setting) -> float:
    text, num = standard_library("validation"), setting.validation_windows
    starts = torch.arange(num) * ((text.numel() - setting.context - 1) // num)
    return _loss(model, text, starts, setting.context).item()


def all_defaults() -> list[str]:
    """Every compressor by name, except wrappers of others and second names."""
    wrappers = {name for name, each in PRESETS.items() if isinstance(each, (Wrapper, WarmUp)) and name != "ef21"}
    return ["dense", *sorted(PRESETS.keys() - wrappers - {"dense", "loco4", "partition"})]


def best_rate(runs: Runs[Run], variant: str) -> float:
    return min(runs.of(variant=variant, seed=0), key=lambda run: run.validation_loss).learning_rate


def table(runs: Runs[Run], seeds: int) -> Table:
    """Means over seeds at each compressor's best rate, the fewest bits first."""
    rows = []
    for variant in dict.fromkeys(run.variant for run in runs.runs):
        rate = best_rate(runs, variant)
        chosen = [run for run in runs.of(variant=variant, learning_rate=rate) if run.seed < seeds]
        losses = [run.validation_loss for run in chosen]
        rows.append((chosen[0].bits, chosen[0].all_bits, variant, rate, sum(losses) / len(losses), losses))
    result = Table("compressor", "bits", "all bits", "rate", "mean loss", "losses")
    for bits, all_bits, variant, rate, mean, losses in sorted(rows):
        every = " ".join(f"{loss:.4f}" for loss in losses)
        result.add_row(variant, f"{bits:.2f}", f"{all_bits:.2f}", f"{rate:g}", f"{mean:.4f}", every)
    return result


def main(
    variant: Annotated[list[str] | None, typer.Option(help="preset, or 'name {JSON options}'; default: all")] = None,
    seeds: Annotated[int, typer.Option(help="seeds 0 ... n-1 at the best rate")] = 3,
    changed: Annotated[str, typer.Option("--setting", help="fields of Setting as JSON")] = "{}",
    json_path: Annotated[Path | None, typer.Option("--json", help="results file, continued if it exists")] = None,
) -> None:
    torch.set_num_threads(1)
    setting = Setting(**json.loads(changed))
    runs = Runs(json_path, setting, Run)
    variants = variant or all_defaults()
    for rate in RATES:
        for name in variants:
            if runs.get(variant=name, learning_rate=rate, seed=0) is None:
                runs.add(train(name, rate, 0, setting))
    for seed in range(1, seeds):
        for name in variants:
            rate = best_rate(runs, name)
            if runs.get(variant=name, learning_rate=rate, seed=seed) is None:
                runs.add(train(name, rate, seed, setting))
    Console(width=140).print(table(runs, seeds))


if __name__ == "__main__":
    typer.run(main)
