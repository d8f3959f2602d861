"""What coded weights cost in loss: three kinds of language model on Python source, against runs with exact ones.

FSDP2 is simulated in one process with the real gathers: the optimizer holds exact weights, the model computes
with what all ranks decode, and the validation loss is that of the exact weights. Gradients are those of two ranks,
reduced uncompressed or by LoCo's 4 bits. Every variant sees the same initial weights and batches as the exact run.

    python -m benchmarks.weights --json benchmarks/results/weights.json

Results are added to the JSON file as they come, and what is there already is not run again.
"""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import dataclass
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.runs import ChangedSetting, ResultsFile, Runs, warmup_then_cosine
from benchmarks.simulated import Exchange
from lowbit_strategy.collectives.layout import dim0_row_numel
from lowbit_strategy.collectives.ordered import Gathering
from lowbit_strategy.engine.weight_sync import WeightSync
from lowbit_strategy.methods.registry import preset
from lowbit_strategy.methods.weight_codings import WeightCoding, as_weights
from lowbit_strategy.model.module_layout import ModuleLayout
from lowbit_strategy.model.parameters import describe_parameters
from recipes.gpt import GPT, VOCABULARY
from recipes.text import standard_library
from testing.worlds.simulated import SimulatedWorld

EXACT = "exact"
VARIANTS = ("exact", "code8", "delta4", "code6", "delta2", "code4")
MODELS = ("transformer", "gru", "convolutional")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What all runs of one file share."""

    width: int = 64
    depth: int = 2
    context: int = 32
    batch: int = 16
    ranks: int = 2
    steps: int = 240
    learning_rate: float = 3e-3
    warmup_steps: int = 20
    validation_windows: int = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One training run, and what a rank sent for weights per step, in bits per element of the model."""

    model: str
    gradients: str
    weights: str
    seed: int
    validation_loss: float
    weight_bits: float
    seconds: float


class Recurrent(nn.Module):
    """Two layers of gated recurrent units."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.recurrent = nn.GRU(width, 2 * width, num_layers=depth, batch_first=True)
        self.head = nn.Linear(2 * width, VOCABULARY)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        logits: Tensor = self.head(self.recurrent(self.embedding(tokens_BT))[0])
        return logits


class Convolutional(nn.Module):
    """Causal convolutions of growing dilation, each added to its input."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 2 * width)
        self.layers = nn.ModuleList(nn.Conv1d(2 * width, 2 * width, 3, dilation=2**at) for at in range(depth + 1))
        self.head = nn.Linear(2 * width, VOCABULARY)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BCT = self.embedding(tokens_BT).transpose(1, 2)
        for layer in self.layers:
            padded = F.pad(x_BCT, (2 * layer.dilation[0], 0))  # type: ignore[arg-type, index]
            x_BCT = x_BCT + F.gelu(layer(padded))
        logits: Tensor = self.head(x_BCT.transpose(1, 2))
        return logits


def make(model: str, setting: Setting) -> nn.Module:
    if model == "transformer":
        return GPT(setting.width, setting.depth, 4, setting.context)
    return (Recurrent if model == "gru" else Convolutional)(setting.width, setting.depth)


class Weights:
    """The weights of a model on simulated ranks: the model's parameters become what all ranks decode."""

    def __init__(self, model: nn.Module, coding: WeightCoding, ranks: int) -> None:
        self.params = list(model.parameters())
        self.specs = describe_parameters(model)
        self.exact = [param.detach().clone() for param in self.params]
        self.world = SimulatedWorld(ranks)
        layout = ModuleLayout(specs=tuple(self.specs), dtype=torch.float32, num_gathers=2)
        device = torch.device("cpu")
        comms = [{"model": Gathering(comm)} for comm in self.world.comms]
        self.syncs = [WeightSync(coding, {"model": layout}, comm, device) for comm in comms]

    def gather_(self) -> None:
        """Send the exact weights once; the model holds what arrives."""
        world_size = self.world.size
        rows_WN = torch.cat([self._rows(x, world_size) for x in self.exact], 1)
        outs = [torch.zeros(rows_WN.numel()) for _ in self.syncs]
        runs = [sync.modules["model"].run(row, out) for sync, row, out in zip(self.syncs, rows_WN, outs, strict=True)]
        for pending in itertools.zip_longest(*runs):
            for handle in pending:
                if handle is not None:
                    handle.wait()
        for sync in self.syncs:
            sync.end_step()
        at = 0
        for param, spec in zip(self.params, self.specs, strict=True):
            row = dim0_row_numel(spec.shape, world_size)
            whole = outs[0].view(world_size, -1)[:, at : at + row].reshape(-1)
            param.data.copy_(whole[: spec.numel].view(spec.shape))
            at += row

    def _rows(self, x: Tensor, world_size: int) -> Tensor:
        row_numel = dim0_row_numel(tuple(x.shape), world_size)
        return F.pad(x.reshape(-1), (0, row_numel * world_size - x.numel())).view(world_size, -1)

    def bits(self, steps: int) -> float:
        """Per element of the model, step and hop of an ideal ring."""
        numel = sum(spec.numel for spec in self.specs)
        hops = (self.world.size - 1) / self.world.size
        return 8 * self.world.comms[0].sent_nbytes / steps / numel / hops


def train(model_name: str, gradients: str, weights: str, seed: int, setting: Setting) -> Run:
    """The whole run; deterministic."""
    torch.manual_seed(seed)
    model = make(model_name, setting)
    shared = Weights(model, as_weights(weights), setting.ranks)
    exchange = Exchange(model, preset(gradients), setting.ranks, "fsdp", seed)
    masters = [nn.Parameter(x) for x in shared.exact]
    shared.exact = [master.data for master in masters]
    optimizer = torch.optim.AdamW(masters, lr=setting.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    text = standard_library("train")
    order = torch.Generator().manual_seed(10_000 + seed)
    started = time.perf_counter()
    for step in range(setting.steps):
        shared.gather_()
        starts = torch.randint(text.numel() - setting.context - 1, (setting.ranks, setting.batch), generator=order)
        found = [
            torch.autograd.grad(_loss(model, text, part, setting.context), list(model.parameters())) for part in starts
        ]
        for master, mean in zip(masters, exchange.mean(found), strict=True):
            master.grad = mean.clone()
        for group in optimizer.param_groups:
            group["lr"] = setting.learning_rate * warmup_then_cosine(step, setting, floor=0.0)
        optimizer.step()
    for param, master in zip(model.parameters(), masters, strict=True):
        param.data.copy_(master.data)
    return Run(
        model=model_name,
        gradients=gradients,
        weights=weights,
        seed=seed,
        validation_loss=_validation_loss(model, setting),
        weight_bits=shared.bits(setting.steps),
        seconds=time.perf_counter() - started,
    )


def _loss(model: nn.Module, text: Tensor, starts: Tensor, context: int) -> Tensor:
    windows = text[starts[:, None] + torch.arange(context + 1)].long()
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def _validation_loss(model: nn.Module, setting: Setting) -> float:
    text, count = standard_library("validation"), setting.validation_windows
    starts = torch.arange(count) * ((text.numel() - setting.context - 1) // count)
    losses = [_loss(model, text, part, setting.context).item() for part in starts.split(128)]
    return sum(losses) / len(losses)


class Results(Runs[Run]):
    """Gaps to the runs with exact weights."""

    def gaps(self, gradients: str, weights: str, model: str) -> list[float]:
        """Of the validation loss in per cent, by seed."""
        pairs = [
            (self.get(model=model, gradients=gradients, weights=EXACT, seed=run.seed), run)
            for run in self.runs
            if (run.model, run.gradients, run.weights) == (model, gradients, weights)
        ]
        return [100 * (run.validation_loss / base.validation_loss - 1) for base, run in pairs if base is not None]

    def table(self) -> Table:
        table = Table("gradients", "weights", "bits", *(f"{model}, %" for model in MODELS), "mean, %")
        for gradients, weights in dict.fromkeys((run.gradients, run.weights) for run in self.runs):
            by_model = [self.gaps(gradients, weights, model) for model in MODELS]
            everything = [gap for gaps in by_model for gap in gaps]
            bits = [run.weight_bits for run in self.runs if run.weights == weights and run.model == "transformer"]
            table.add_row(
                gradients,
                weights,
                f"{bits[0]:.2f}" if bits else "",
                *(" ".join(f"{gap:+.2f}" for gap in gaps) for gaps in by_model),
                f"{sum(everything) / len(everything):+.3f}" if everything else "",
            )
        return table


def main(
    seeds: Annotated[int, typer.Option(help="seeds first ... first + n - 1")] = 3,
    first: Annotated[int, typer.Option(help="the first seed")] = 20,
    gradients: Annotated[str, typer.Option(help="compressors, with commas")] = "loco,dense",
    weights: Annotated[str, typer.Option(help="ways of sending weights, with commas")] = ",".join(VARIANTS),
    models: Annotated[str, typer.Option(help="kinds of model, with commas")] = ",".join(MODELS),
    changed: ChangedSetting = "{}",
    json_path: ResultsFile = None,
) -> None:
    torch.set_num_threads(1)
    setting = Setting(**json.loads(changed))
    results = Results(json_path, setting, Run)
    console = Console(width=150)
    ordered = dict.fromkeys((EXACT, *weights.split(",")))
    for gradient, seed, way, model in itertools.product(
        gradients.split(","), range(first, first + seeds), ordered, models.split(",")
    ):
        if results.get(model=model, gradients=gradient, weights=way, seed=seed) is None:
            results.add(train(model, gradient, way, seed, setting))
            gap = results.gaps(gradient, way, model)[-1]
            console.print(f"{model} {gradient} {way} seed {seed}: {gap:+.3f} %, {results.runs[-1].seconds:.0f} s")
    console.print(results.table())


if __name__ == "__main__":
    typer.run(main)
