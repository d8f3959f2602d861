"""What few bits cost in loss: three kinds of small language model, four simulated ranks with the real engine.

Every run is paired with the uncompressed one of the same model and seed: same initial weights, same batches. Reported
are the validation loss over the uncompressed one, and the largest transient: the mean training loss of 20 steps over
the uncompressed run's, wherever after step 100 it is largest. Settings are chosen on a fourth model, another text and
seeds from 100 on (``--model mixer``), so that nothing is chosen on what is reported.

    python -m benchmarks.low_bits --layout ddp --seeds 0,1,2,3,4 --variant loco1 --json low_bits.json

Results are added to the JSON file as they come, and what is there already is not run again.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.runs import (
    ChangedSetting,
    Layouts,
    ResultsFile,
    Runs,
    SeedList,
    Variants,
    mean_and_error,
    warmup_then_cosine,
)
from benchmarks.simulated import DENSE, Exchange, Layout, parse
from benchmarks.small_models import make_model, text_of

VALIDATION_WINDOWS = 2048
EVERY = 10  # training losses are kept as means of so many steps
LEARNING_RATES = {"transformer": 4e-3, "recurrent": 1.6e-2, "convolutional": 1.6e-2, "mixer": 1.2e-2}
KINDS = ("transformer", "recurrent", "convolutional")

Gradients = Callable[[dict[str, Tensor], Tensor], tuple[dict[str, Tensor], Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What all runs of one file share. `rates`: times each model's learning rate."""

    context: int = 16
    batch: int = 8
    workers: int = 4
    steps: int = 1500
    warmup_steps: int = 50
    rate: float = 1.0
    clip: float | None = None
    compiled: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One training run."""

    model: str
    variant: str
    layout: str
    seed: int
    validation_loss: float
    training_losses: list[float]
    bits_per_element: float
    codec_bits: float
    seconds: float


class Trainer:
    """One kind of model; the gradients of all ranks in one compiled call."""

    def __init__(self, kind: str, setting: Setting) -> None:
        self.kind, self.setting = kind, setting
        self.model = make_model(kind, setting.context)
        call = vmap(grad_and_value(self._loss), in_dims=(None, 0))
        self.gradients: Gradients = torch.compile(call) if setting.compiled else call

    def _loss(self, parameters: dict[str, Tensor], windows: Tensor) -> Tensor:
        logits = functional_call(self.model, parameters, (windows[:, :-1],))
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    def train(self, variant: str, layout: Layout, seed: int) -> Run:
        """The whole run; deterministic."""
        setting = self.setting
        torch.manual_seed(seed)
        self.model = make_model(self.kind, setting.context)
        names, parameters = zip(*self.model.named_parameters(), strict=True)
        exchange = Exchange(self.model, parse(variant), setting.workers, layout, seed)
        rate = LEARNING_RATES[self.kind] * setting.rate
        optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        text, order = text_of(self.kind, "train"), torch.Generator().manual_seed(10_000 + seed)
        losses, started = [], time.process_time()
        for step in range(setting.steps):
            shape = (setting.workers, setting.batch)
            starts = torch.randint(text.numel() - setting.context - 1, shape, generator=order)
            windows = text[starts[..., None] + torch.arange(setting.context + 1)].long()
            with sdpa_kernel(SDPBackend.MATH):
                found, loss_W = self.gradients({n: p.detach() for n, p in zip(names, parameters, strict=True)}, windows)
            losses.append(loss_W.mean().item())
            ranks = [[found[name][rank] for name in names] for rank in range(setting.workers)]
            for parameter, mean in zip(parameters, exchange.mean(ranks), strict=True):
                parameter.grad = mean.clone()
            if setting.clip is not None:
                nn.utils.clip_grad_norm_(parameters, setting.clip)
            for group in optimizer.param_groups:
                group["lr"] = rate * warmup_then_cosine(step, setting, floor=0.1)
            optimizer.step()
        return Run(
            model=self.kind,
            variant=variant,
            layout=layout,
            seed=seed,
            validation_loss=self._validation_loss(),
            training_losses=[
                round(statistics.fmean(losses[at : at + EVERY]), 5) for at in range(0, len(losses), EVERY)
            ],
            bits_per_element=round(exchange.bits_per_element(setting.steps), 4),
            codec_bits=round(exchange.codec_bits(), 4),
            seconds=round(time.process_time() - started, 1),
        )

    @torch.no_grad()
    def _validation_loss(self) -> float:
        text, context = text_of(self.kind, "validation"), self.setting.context
        starts = torch.arange(VALIDATION_WINDOWS) * ((text.numel() - context - 1) // VALIDATION_WINDOWS)
        windows = text[starts[:, None] + torch.arange(context + 1)].long()
        return statistics.fmean(self._loss({}, part).item() for part in windows.split(256))


def excess(run: Run, dense: Run, after: int = 100) -> list[float]:
    """Mean training loss of 20 steps over the uncompressed run's, in per cent; every 10 steps from `after` on."""
    pairs = [*zip(run.training_losses, dense.training_losses, strict=True)][after // EVERY :]
    return [100 * ((a + c) / (b + d) - 1) for (a, b), (c, d) in itertools.pairwise(pairs)]


class Results(Runs[Run]):
    """Gaps to the uncompressed runs."""

    def pairs(self, variant: str, layout: str, model: str | None = None) -> list[tuple[Run, Run]]:
        """Each run and the uncompressed one of the same model and seed."""
        pairs = []
        for run in self.of(variant=variant, layout=layout, **({} if model is None else {"model": model})):
            dense = self.get(model=run.model, variant=DENSE, layout="ddp", seed=run.seed)
            if dense is not None:
                pairs.append((run, dense))
        return pairs

    def gaps(self, variant: str, layout: str, model: str | None = None) -> list[float]:
        """Of the validation losses, per cent."""
        pairs = self.pairs(variant, layout, model)
        return [100 * (run.validation_loss / dense.validation_loss - 1) for run, dense in pairs]

    def transients(self, variant: str, layout: str) -> tuple[float, float]:
        """The largest excess of the training loss in any run, and in any model's mean over its seeds."""
        curves = {
            model: [excess(*pair) for pair in self.pairs(variant, layout, model)]
            for model in dict.fromkeys(run.model for run in self.of(variant=variant, layout=layout))
        }
        of_runs = max((max(curve) for found in curves.values() for curve in found), default=math.nan)
        means = [map(statistics.fmean, zip(*found, strict=True)) for found in curves.values() if found]
        return of_runs, max((max(mean) for mean in means), default=math.nan)

    def table(self) -> Table:
        models = list(dict.fromkeys(run.model for run in self.runs))
        table = Table("variant", "layout", "bits", *models, "mean", "largest transient", "of a mean over seeds")
        for variant, layout in dict.fromkeys((run.variant, run.layout) for run in self.runs if run.variant != DENSE):
            run = next(run for run in self.runs if (run.variant, run.layout) == (variant, layout))
            cells = [mean_and_error(self.gaps(variant, layout, model), 3) for model in models]
            whole = mean_and_error(self.gaps(variant, layout), 3)
            peaks = [f"{peak:+.2f}" for peak in self.transients(variant, layout)]
            table.add_row(variant, layout, f"{run.codec_bits:.2f}", *cells, whole, *peaks)
        return table


def main(
    variant: Variants = None,
    layout: Layouts = None,
    model: Annotated[list[str] | None, typer.Option(help="kind of model; repeat")] = None,
    seeds: SeedList = "0",
    changed: ChangedSetting = "{}",
    json_path: ResultsFile = None,
) -> None:
    """Train, compare, and add to the results file."""
    torch.set_num_threads(1)
    options: dict[str, Any] = json.loads(changed)
    setting = Setting(**options)
    results = Results(json_path, setting, Run)
    console = Console(width=200)
    trainers: dict[str, Trainer] = {}
    for seed in map(int, seeds.split(",")):
        for kind in model or KINDS:
            for name in [DENSE, *(variant or [])]:
                for where in ["ddp"] if name == DENSE else (layout or ["ddp", "fsdp"]):
                    if results.get(model=kind, variant=name, layout=where, seed=seed) is not None:
                        continue
                    if kind not in trainers:
                        trainers[kind] = Trainer(kind, setting)
                    results.add(run := trainers[kind].train(name, where, seed))  # type: ignore[arg-type]
                    dense = results.get(model=kind, variant=DENSE, layout="ddp", seed=seed)
                    assert dense is not None
                    gap = 100 * (run.validation_loss / dense.validation_loss - 1)
                    peak = max(excess(run, dense), default=math.nan)
                    console.print(
                        f"{kind} {name} {where} seed {seed}: {run.validation_loss:.4f}, {gap:+.3f} %, "
                        f"transient {peak:+.2f} %, {run.codec_bits:.3f} bits, {run.seconds} s"
                    )
    console.print(results.table())


if __name__ == "__main__":
    typer.run(main)
