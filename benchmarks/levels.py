"""What two levels of ranks and HSDP cost in loss: three kinds of language model on Python source, against exact runs.

Two nodes of two ranks, each rank in a thread with the real engines. Inside a node sums are exact, so both ranks of one
are given its mean gradient. Every run of a seed sees the same initial weights and the same batches, at the learning
rate that is best without compression (`benchmarks/low_bits.py`).

    python -m benchmarks.levels --json benchmarks/results/levels.json

Results are added to the JSON file as they come, and what is there already is not run again.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.low_bits import LEARNING_RATES
from benchmarks.runs import Runs
from benchmarks.small_models import make_model, text_of
from lowbit_strategy.methods.registry import preset
from lowbit_strategy.model.parameters import describe_parameters
from testing.worlds.two_level import NodesWorld

MODELS = ("transformer", "recurrent", "convolutional")
EXACT = "exact"
VARIANTS = (EXACT, "loco_hsdp", "loco_ddp", "loco_fsdp")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What all runs of one file share."""

    num_nodes: int = 2
    ranks_per_node: int = 2
    context: int = 16
    batch_per_node: int = 16
    steps: int = 400
    warmup_steps: int = 20
    validation_windows: int = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One training run; bits between nodes per element and hop of the part that a rank reduces."""

    model: str
    variant: str
    seed: int
    validation_loss: float
    bits_between_nodes: float
    seconds: float


def windows(text: Tensor, context: int, number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs and targets ``[number, context]``."""
    starts = torch.randint(len(text) - context - 1, (number,), generator=generator)
    window = text[starts[:, None] + torch.arange(context + 1)].long()
    return window[:, :-1], window[:, 1:]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def gradients(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    parts = torch.autograd.grad(loss_of(model, batch), list(named.values()))
    return {name: part.reshape(-1) for name, part in zip(named, parts, strict=True)}


def train(kind: str, variant: str, seed: int, setting: Setting) -> Run:
    """The whole run; deterministic."""
    started = time.perf_counter()
    torch.manual_seed(seed)
    model = make_model(kind, setting.context)
    text, generator = text_of(kind, "train"), torch.Generator().manual_seed(seed)
    world = None
    if variant != EXACT:
        compressor, _, wrapped = variant.partition("_")
        specs = describe_parameters(model)
        world = NodesWorld(
            wrapped,
            preset(compressor),
            specs,
            setting.num_nodes,
            setting.ranks_per_node,
            seed=seed,  # type: ignore[arg-type]
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATES[kind], betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (
            min(1.0, (step + 1) / setting.warmup_steps) * (0.55 + 0.45 * math.cos(math.pi * step / setting.steps))
        ),
    )
    for _ in range(setting.steps):
        nodes = [
            gradients(model, windows(text, setting.context, setting.batch_per_node, generator))
            for _ in range(setting.num_nodes)
        ]
        apply(model, mean_of(nodes, world, setting))
        optimizer.step()
        schedule.step()
    held_out = windows(text_of(kind, "validation"), setting.context, setting.validation_windows, torch.Generator())
    with torch.no_grad():
        loss = statistics.mean(
            loss_of(model, part).item() for part in zip(*(x.split(256) for x in held_out), strict=True)
        )
    return Run(
        model=kind,
        variant=variant,
        seed=seed,
        validation_loss=loss,
        bits_between_nodes=0.0 if world is None else bits(world, setting.steps),
        seconds=time.perf_counter() - started,
    )


def mean_of(nodes: list[dict[str, Tensor]], world: NodesWorld | None, setting: Setting) -> Mapping[str, Tensor]:
    if world is None:
        return {name: torch.stack([node[name] for node in nodes]).mean(0) for name in nodes[0]}
    return world.whole(world.step([node for node in nodes for _ in range(setting.ranks_per_node)]))


def apply(model: nn.Module, means: Mapping[str, Tensor]) -> None:
    for name, param in model.named_parameters():
        param.grad = means[name].view_as(param)


def bits(world: NodesWorld, steps: int) -> float:
    sent = sum(sync.ranks.peers.sent_nbytes for sync in world.syncs)
    numel = sum(spec.numel for sync in world.syncs for spec in sync.specs.values())
    hops = (1 if world.kind == "fsdp" else 2) * (world.num_nodes - 1) / world.num_nodes
    return 8 * sent / steps / numel / hops


def show(runs: list[Run]) -> None:
    table = Table(title="validation loss, mean over seeds, against exact gradients")
    for heading in ("model", "variant", "loss", "gap", "bits between nodes"):
        table.add_column(heading, justify="left" if heading in ("model", "variant") else "right")
    exact = {(run.model, run.seed): run.validation_loss for run in runs if run.variant == EXACT}
    for kind in MODELS:
        for variant in VARIANTS:
            chosen = [run for run in runs if (run.model, run.variant) == (kind, variant)]
            if chosen:
                loss = statistics.mean(run.validation_loss for run in chosen)
                gap = statistics.mean(run.validation_loss / exact[kind, run.seed] - 1 for run in chosen)
                between = statistics.mean(run.bits_between_nodes for run in chosen)
                table.add_row(kind, variant, f"{loss:.4f}", f"{100 * gap:+.2f} %", f"{between:.2f}")
    Console(width=100).print(table)


def main(
    path: Annotated[Path, typer.Option("--json", help="where results are kept")],
    seed: Annotated[list[int] | None, typer.Option(help="several: give it several times")] = None,
    model: Annotated[list[str] | None, typer.Option(help="kinds of model")] = None,
    variant: Annotated[list[str] | None, typer.Option(help="exact, or PRESET_ddp, PRESET_fsdp, PRESET_hsdp")] = None,
    steps: Annotated[int, typer.Option(help="optimizer steps of each run")] = Setting().steps,
) -> None:
    torch.set_num_threads(1)
    setting = Setting(steps=steps)
    results = Runs(path, setting, Run)
    for each in seed or (91, 92, 93):
        for kind in model or MODELS:
            for chosen in dict.fromkeys((EXACT, *(variant or VARIANTS))):
                if results.get(model=kind, variant=chosen, seed=each) is None:
                    results.add(train(kind, chosen, each, setting))
                    print(results.runs[-1], flush=True)
    show(results.runs)


if __name__ == "__main__":
    typer.run(main)
