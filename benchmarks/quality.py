"""What compression costs in loss: the demo GPT on Python source, W simulated ranks, against the uncompressed run.

Every variant and the uncompressed run see the same initial weights and the same batches. The gap is that of the mean
training loss over the last steps and of the final validation loss. Ranks are simulated in one process with the real
engines, so any registered compressor can be measured; bytes are counted by its communicators. That is for trying
settings; `benchmarks/methods.py` trains with real processes and strategies, and its figures are the ones to quote.

    python -m benchmarks.quality --variant loco2 --variant 'loco {"bits": 3, "codebook": "fitted"}' --json quality.json

Results are added to the JSON file as they come, and what is there already is not run again.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.runs import ChangedSetting, Layouts, ResultsFile, Runs, SeedCount, Variants, warmup_then_cosine
from benchmarks.simulated import DENSE, Exchange, Layout, parse, training, validation_loss
from lowbit_strategy.methods._base.compressor import Compressor
from recipes.gpt import GPT
from recipes.text import standard_library

VALIDATION_WINDOWS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What all runs of one file share."""

    width: int = 112
    depth: int = 4
    heads: int = 4
    context: int = 64
    batch: int = 8
    workers: int = 4
    steps: int = 400
    learning_rate: float = 2e-3
    warmup_steps: int = 20
    averaged_steps: int = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One training run: losses, and what a rank sent."""

    variant: str
    layout: Layout
    seed: int
    train_loss: float
    validation_loss: float
    bits_per_element: float
    codec_bits: float
    seconds: float


def train(variant: str, compressor: Compressor, layout: Layout, seed: int, setting: Setting) -> Run:
    """The whole run; deterministic."""
    torch.manual_seed(seed)
    model = GPT(setting.width, setting.depth, setting.heads, setting.context)
    exchange = Exchange(model, compressor, setting.workers, layout, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    text = standard_library("train")
    started = time.perf_counter()

    def rate(step: int) -> float:
        return setting.learning_rate * warmup_then_cosine(step, setting, floor=0.1)

    losses = [step.loss for step in training(model, exchange, optimizer, text, setting, rate, seed)]
    last = losses[-setting.averaged_steps :]
    return Run(
        variant=variant,
        layout=layout,
        seed=seed,
        train_loss=sum(last) / len(last),
        validation_loss=validation_loss(model, standard_library("validation"), VALIDATION_WINDOWS, setting.context),
        bits_per_element=exchange.bits_per_element(setting.steps),
        codec_bits=exchange.codec_bits(),
        seconds=time.perf_counter() - started,
    )


class Results(Runs[Run]):
    """Gaps to the uncompressed runs."""

    def gaps(self, variant: str, layout: Layout) -> list[tuple[int, float, float]]:
        """Seed, gap of training and of validation loss in per cent."""
        gaps = []
        for run in self.runs:
            dense = self.get(variant=DENSE, layout="ddp", seed=run.seed)
            if run.variant == variant and run.layout == layout and dense is not None:
                train_gap = 100 * (run.train_loss / dense.train_loss - 1)
                gaps.append((run.seed, train_gap, 100 * (run.validation_loss / dense.validation_loss - 1)))
        return sorted(gaps)

    def table(self) -> Table:
        table = Table("variant", "layout", "bits", "all bits", "training gap, %", "mean", "validation gap, %", "mean")
        for variant, layout in dict.fromkeys((run.variant, run.layout) for run in self.runs):
            gaps = self.gaps(variant, layout)
            run = next(run for run in self.runs if (run.variant, run.layout) == (variant, layout))
            columns = [f"{run.codec_bits:.2f}", f"{run.bits_per_element:.2f}"]
            for which in (1, 2):
                values = [gap[which] for gap in gaps]
                columns.append(" ".join(f"{value:+.2f}" for value in values))
                columns.append(f"{sum(values) / len(values):+.3f}" if values else "")
            table.add_row(variant, layout, *columns)
        return table


def main(
    variant: Variants = None,
    layout: Layouts = None,
    seeds: SeedCount = 3,
    changed: ChangedSetting = "{}",
    json_path: ResultsFile = None,
) -> None:
    torch.set_num_threads(1)
    setting = Setting(**json.loads(changed))
    results = Results(json_path, setting, Run)
    console = Console(width=170)
    for seed in range(seeds):
        for name in [DENSE, *(variant or [])]:
            for where in ["ddp"] if name == DENSE else (layout or ["ddp"]):
                if where not in ("ddp", "fsdp"):
                    raise typer.BadParameter(f"layout must be ddp or fsdp, got {where!r}")
                if results.get(variant=name, layout=where, seed=seed) is None:
                    results.add(train(name, parse(name), where, seed, setting))  # type: ignore[arg-type]
                    gaps = [gap for gap in results.gaps(name, where) if gap[0] == seed]  # type: ignore[arg-type]
                    console.print(
                        f"{name} {where} seed {seed}: training {gaps[0][1]:+.3f} %, validation {gaps[0][2]:+.3f} %"
                    )
    console.print(results.table())


if __name__ == "__main__":
    typer.run(main)
