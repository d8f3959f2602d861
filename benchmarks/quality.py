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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.runs import Runs, warmup_then_cosine
from lowbit_strategy.collectives.layout import dim0_row_numel
from lowbit_strategy.engine.bucket import BucketLayout
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.registry import from_options
from lowbit_strategy.model.parameters import describe_parameters
from lowbit_strategy.ranks.ranks import Ranks
from recipes.gpt import GPT
from recipes.text import standard_library
from testing.worlds.simulated import SimulatedWorld

Layout = Literal["ddp", "fsdp"]
DENSE = "dense"
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


class Exchange:
    """The gradients of W simulated ranks, reduced in one bucket."""

    def __init__(self, model: nn.Module, compressor: Compressor, workers: int, layout: Layout, seed: int) -> None:
        self.world = SimulatedWorld(workers)
        self.specs = describe_parameters(model)
        self.layout = layout
        self.syncs = [
            GradientSync(
                compressor, self.specs, Ranks.flat(comm), torch.device("cpu"), scatter=layout == "fsdp", seed=seed
            )
            for comm in self.world.comms
        ]
        at, entries = 0, []
        for spec in self.specs:
            entries.append((spec.name, at))
            at += spec.numel if layout == "ddp" else dim0_row_numel(spec.shape, workers)
        self.bucket = BucketLayout(tuple(entries), row_numel=None if layout == "ddp" else at)
        self.row_numel = at

    def mean(self, gradients: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Every parameter's mean gradient as rank 0 (FSDP2: its owners) has it."""
        if self.layout == "ddp":
            buffers = [torch.cat([g.reshape(-1) for g in rank]) for rank in gradients]
            self.world.reduce(self.syncs, self.bucket, buffers, buffers)
            parts = buffers[0].split([spec.numel for spec in self.specs])
            return [part.view(spec.shape) for part, spec in zip(parts, self.specs, strict=True)]
        buffers = [self._rows(rank).view(-1) for rank in gradients]
        outs = [torch.empty(self.row_numel) for _ in gradients]
        self.world.reduce(self.syncs, self.bucket, buffers, outs)
        rows_WN = torch.stack(outs) / len(outs)
        means = []
        for spec, (_, at) in zip(self.specs, self.bucket.entries, strict=True):
            row = dim0_row_numel(spec.shape, len(outs))
            whole = rows_WN[:, at : at + row].reshape(-1)
            means.append(whole[: spec.numel].view(spec.shape))
        return means

    def _rows(self, gradients: Sequence[Tensor]) -> Tensor:
        parts = []
        for gradient, spec in zip(gradients, self.specs, strict=True):
            row_numel = dim0_row_numel(spec.shape, self.world.size)
            padding = row_numel * self.world.size - spec.numel
            parts.append(F.pad(gradient.reshape(-1), (0, padding)).view(self.world.size, -1))
        return torch.cat(parts, 1)

    def bits_per_element(self, steps: int) -> float:
        """On the wire, per hop and element of the model, exempt and high-precision ones and headers included."""
        sent = sum(comm.sent_nbytes for comm in self.world.comms) / self.world.size
        numel = sum(spec.numel for spec in self.specs)
        hops = (2 if self.layout == "ddp" else 1) * (self.world.size - 1) / self.world.size
        return 8 * sent / steps / numel / hops

    def codec_bits(self) -> float:
        """The same for compressed parameters alone, by the methods' accounting."""
        sync = self.syncs[0]
        names = [name for name, assignment in sync.state.assignments.items() if assignment.kind == "compressed"]
        numel = sum(sync.specs[name].numel for name in names)
        hops = (2 if self.layout == "ddp" else 1) * (self.world.size - 1) / self.world.size
        return 8 * sum(sync.state.sent_nbytes(name) for name in names) / max(numel, 1) / hops


def train(variant: str, compressor: Compressor, layout: Layout, seed: int, setting: Setting) -> Run:
    """The whole run; deterministic."""
    torch.manual_seed(seed)
    model = GPT(setting.width, setting.depth, setting.heads, setting.context)
    exchange = Exchange(model, compressor, setting.workers, layout, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    text = standard_library("train")
    order = torch.Generator().manual_seed(10_000 + seed)
    losses: list[float] = []
    started = time.perf_counter()
    for step in range(setting.steps):
        gradients, loss_sum = [], 0.0
        for _ in range(setting.workers):
            starts = torch.randint(text.numel() - setting.context - 1, (setting.batch,), generator=order)
            loss = _loss(model, text, starts, setting.context)
            gradients.append(torch.autograd.grad(loss, list(model.parameters())))
            loss_sum += loss.item()
        losses.append(loss_sum / setting.workers)
        for parameter, mean in zip(model.parameters(), exchange.mean(gradients), strict=True):
            parameter.grad = mean.clone()
        for group in optimizer.param_groups:
            group["lr"] = setting.learning_rate * warmup_then_cosine(step, setting, floor=0.1)
        optimizer.step()
    last = losses[-setting.averaged_steps :]
    return Run(
        variant=variant,
        layout=layout,
        seed=seed,
        train_loss=sum(last) / len(last),
        validation_loss=_validation_loss(model, setting.context),
        bits_per_element=exchange.bits_per_element(setting.steps),
        codec_bits=exchange.codec_bits(),
        seconds=time.perf_counter() - started,
    )


def _loss(model: GPT, text: Tensor, starts: Tensor, context: int) -> Tensor:
    windows = text[starts[:, None] + torch.arange(context + 1)].long()
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def _validation_loss(model: GPT, context: int) -> float:
    text = standard_library("validation")
    starts = torch.arange(VALIDATION_WINDOWS) * ((text.numel() - context - 1) // VALIDATION_WINDOWS)
    losses = [_loss(model, text, part, context).item() for part in starts.split(32)]
    return sum(losses) / len(losses)


def parse(variant: str) -> Compressor:
    """``name`` or ``name {JSON options}``."""
    name, _, options = variant.partition(" ")
    return from_options(name, json.loads(options) if options else {})


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
    variant: Annotated[list[str] | None, typer.Option(help="preset, or 'name {json options}'; repeat")] = None,
    layout: Annotated[list[str] | None, typer.Option(help="ddp (two hops) or fsdp (one); repeat")] = None,
    seeds: Annotated[int, typer.Option(help="seeds 0 ... n-1")] = 3,
    changed: Annotated[str, typer.Option("--setting", help="fields of Setting as JSON")] = "{}",
    json_path: Annotated[Path | None, typer.Option("--json", help="results file, continued if it exists")] = None,
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
