"""What each way of sending less costs in loss at ten million parameters: a GPT on 30 MB of Python source, 4 ranks.

Ranks are simulated in one process with the real engines, gathers and rounds; all cases see the same initial weights and
the same batches, at the same learning rate. Computing is in bfloat16 (autocast), weights and optimizer in float32.

    python -m benchmarks.large_model --json benchmarks/results/large_model.json
    python docs/pictures/large_model.py

Results are added to the JSON file as they come, and what is in it already is not run again.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from benchmarks.outer_steps import Local, Variant
from benchmarks.runs import Runs, SeedList, mean_and_error, warmup_then_cosine
from benchmarks.second_moment import HALF
from benchmarks.simulated import DENSE, Exchange, parse
from benchmarks.weights import Weights
from lowbit_strategy.methods.weight_codings import as_weights
from lowbit_strategy.second_moment.squares import SecondMoment
from recipes.gpt import GPT
from recipes.text import standard_library

BETAS = (0.9, 0.95)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What all runs of one file share."""

    width: int = 448
    depth: int = 4
    heads: int = 7
    context: int = 128
    batch: int = 2
    workers: int = 4
    steps: int = 1000
    learning_rate: float = 1e-3
    warmup_steps: int = 100
    record_every: int = 50
    windows: int = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A compressor of gradients, with coded `weights` under FSDP2 or the `second_moment`; or an `outer` rule."""

    compressor: str = DENSE
    weights: str | None = None
    second_moment: bool = False
    outer: Any = None


LATER = {"name": "diloco", "every": 30, "momentum": 0.8, "synchronous": 100}  # and less momentum than published
CASES = {
    "uncompressed": Case(),
    "bf16": Case(compressor=HALF),
    "loco": Case(compressor="loco_uniform"),
    "loco4": Case(compressor="loco4"),
    "loco1": Case(compressor="loco1"),
    "loco1, second moment": Case(compressor="loco1", second_moment=True),
    "diloco, as published": Case(outer={"name": "diloco", "every": 30}),
    "diloco, 0.8": Case(outer=LATER),
    "diloco, 0.8, second moment": Case(outer=LATER, second_moment=True),
    "loco2": Case(compressor="loco2"),
    "powersgd": Case(compressor="powersgd"),
    "dgc": Case(compressor="dgc"),
    "loco, fsdp, code8": Case(compressor="loco_uniform", weights="code8"),
    "loco, fsdp, delta4": Case(compressor="loco_uniform", weights="delta4"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One training run. Losses: of training, means of `record_every` steps; of validation, at their end.

    `bits`: per parameter and step that a rank sent, both ways.
    """

    case: str
    seed: int
    training: list[float]
    validation: list[float]
    bits: float


class Trained(Protocol):
    """A model that takes one step of all ranks at a time; batches are the windows of each rank, [B, T + 1]."""

    @property
    def model(self) -> nn.Module: ...
    def step(self, batches: Sequence[Tensor], rate: float) -> float:
        """The mean loss."""
        ...

    def settle(self) -> None:
        """`model` holds the exact weights, to be validated."""
        ...

    def bits(self, steps: int) -> float: ...


class Synchronized:
    """Gradients of every step are reduced: one model stands for that of all ranks."""

    def __init__(self, case: Case, model: GPT, setting: Setting, seed: int) -> None:
        self.model, self.dense = model, case.compressor == DENSE
        self.parameters = list(model.parameters())
        layout = "ddp" if case.weights is None else "fsdp"
        self.exchange = Exchange(model, parse(case.compressor), setting.workers, layout, seed)  # type: ignore[arg-type]
        self.weights = Weights(model, as_weights(case.weights), setting.workers) if case.weights else None
        self.masters = [nn.Parameter(x) for x in self.weights.exact] if self.weights else self.parameters
        if self.weights:
            self.weights.exact = [master.data for master in self.masters]
        self.optimizer = torch.optim.AdamW(self.masters, lr=0.0, betas=BETAS, weight_decay=0.1, fused=True)
        self.moments = [SecondMoment(sync, model) for sync in self.exchange.syncs] if case.second_moment else []

    def step(self, batches: Sequence[Tensor], rate: float) -> float:
        if self.weights:
            self.weights.gather_()
        losses = [loss_of(self.model, batch) for batch in batches]
        gradients = [torch.autograd.grad(loss, self.parameters) for loss in losses]
        if self.dense:
            means = [torch.stack(each).mean(0) for each in zip(*gradients, strict=True)]
        else:
            means = self.exchange.mean(gradients)
        for master, mean in zip(self.masters, means, strict=True):
            master.grad = mean.clone()
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        if self.moments:
            self.moments[0].correct_(self.optimizer)
        return sum(loss.item() for loss in losses) / len(losses)

    def settle(self) -> None:
        for param, master in zip(self.parameters, self.masters, strict=True):
            param.data.copy_(master.data)

    def bits(self, steps: int) -> float:
        hops = (self.exchange.world.size - 1) / self.exchange.world.size
        if self.dense:
            return 2 * 32 * hops
        gathered = self.weights.bits(steps) * hops if self.weights else 0.0
        return self.exchange.bits_per_element(steps) * (1 if self.weights else 2) * hops + gathered


class Rounds:
    """Ranks step by themselves and talk rarely: their weights are rows of stacked tensors."""

    def __init__(self, case: Case, model: GPT, setting: Setting, seed: int) -> None:
        self.model = model
        self.params = {
            name: nn.Parameter(param.data.expand(setting.workers, *param.shape).clone())
            for name, param in model.named_parameters()
        }
        stacked = self.params.values()
        self.optimizer = torch.optim.AdamW(stacked, lr=0.0, betas=BETAS, weight_decay=0.1, fused=True)
        self.highest = setting.learning_rate
        self.ranks = Local(
            Variant(outer=case.outer, second_moment=case.second_moment), self.params, self.optimizer, seed
        )

    def step(self, batches: Sequence[Tensor], rate: float) -> float:
        rows = {name: param.unbind(0) for name, param in self.params.items()}
        losses = [loss_of(self._model_of(rows, rank), batch) for rank, batch in enumerate(batches)]
        self.optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        self.ranks.before_step()
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        self.ranks.after_step(self.highest)
        return sum(loss.item() for loss in losses) / len(losses)

    def _model_of(self, rows: dict[str, tuple[Tensor, ...]], rank: int) -> Callable[[Tensor], Tensor]:
        weights = {name: each[rank] for name, each in rows.items()}
        return lambda tokens: functional_call(self.model, weights, (tokens,))

    def settle(self) -> None:
        """Those of the first rank."""
        for name, param in self.model.named_parameters():
            param.data.copy_(self.params[name].data[0])

    def bits(self, steps: int) -> float:
        sent = self.ranks.bits
        self.ranks.finish()
        return sent


def loss_of(model: Callable[[Tensor], Tensor], windows: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(windows[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


def train(name: str, seed: int, setting: Setting) -> Run:
    """The whole run; deterministic."""
    torch.manual_seed(seed)
    case = CASES[name]
    model = GPT(setting.width, setting.depth, setting.heads, setting.context)
    trained: Trained = (Synchronized if case.outer is None else Rounds)(case, model, setting, seed)
    text, order = standard_library("train", tests=True), torch.Generator().manual_seed(10_000 + seed)
    window, recent = torch.arange(setting.context + 1), []
    training, validation = [], []
    for step in range(setting.steps):
        drawn = (setting.workers, setting.batch, 1)
        starts = torch.randint(text.numel() - setting.context - 1, drawn, generator=order)
        rate = setting.learning_rate * warmup_then_cosine(step, setting, floor=0.1)
        recent.append(trained.step(list(text[starts + window].long()), rate))
        if (step + 1) % setting.record_every == 0:
            trained.settle()
            training.append(round(statistics.fmean(recent[-setting.record_every :]), 5))
            validation.append(round(validation_loss(model, setting), 5))
    return Run(
        case=name,
        seed=seed,
        training=training,
        validation=validation,
        bits=round(trained.bits(setting.steps), 4),
    )


@torch.no_grad()
def validation_loss(model: nn.Module, setting: Setting) -> float:
    text = standard_library("validation", tests=True)
    starts = torch.arange(setting.windows) * ((text.numel() - setting.context - 1) // setting.windows)
    windows = text[starts[:, None] + torch.arange(setting.context + 1)].long()
    return statistics.fmean(loss_of(model, part).item() for part in windows.split(16))


def gaps(results: Runs[Run], case: str) -> list[float]:
    """Of the last validation loss to the uncompressed run's of the same seed, in per cent."""
    pairs = [(run, results.get(case="uncompressed", seed=run.seed)) for run in results.of(case=case)]
    return [100 * (run.validation[-1] / exact.validation[-1] - 1) for run, exact in pairs if exact is not None]


def table(results: Runs[Run]) -> Table:
    """Means over seeds with their standard errors."""
    found = Table("case", "seeds", "bits per parameter and step", "validation loss", "gap, %")
    for case in CASES:
        runs, each = results.of(case=case), gaps(results, case)
        if runs:
            loss = statistics.fmean(run.validation[-1] for run in runs)
            found.add_row(case, str(len(runs)), f"{runs[0].bits:.2f}", f"{loss:.4f}", mean_and_error(each, 2))
    return found


def main(
    json_path: Annotated[Path, typer.Option("--json", help="results file, continued if it exists")],
    seeds: SeedList = "0,1,2",
    cases: Annotated[list[str] | None, typer.Option("--case", help="of the study; repeat; none: all")] = None,
    steps: Annotated[int, typer.Option(min=50, help="of each run; one file has runs of one length")] = Setting().steps,
) -> None:
    """Train, compare, and add to the results file."""
    torch.set_num_threads(1)
    results = Runs(json_path, Setting(steps=steps), Run)
    for case in cases or CASES:
        for seed in map(int, filter(None, seeds.split(","))):
            if results.get(case=case, seed=seed) is None:
                results.add(train(case, seed, results.setting))
    Console(width=120).print(table(results))


if __name__ == "__main__":
    typer.run(main)
