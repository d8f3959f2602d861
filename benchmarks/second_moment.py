"""What compression's noise does to Adam's second moment, and what correcting it gains.

Adam divides by the root of ``v``, the average of squared gradients. Noise adds its own square, so steps become smaller;
below the best learning rate that is simply slower. Here training with few bits runs with and without the package's
correction (``second_moment=True``: squares that ranks exchange rarely). The measure is the number of steps to the loss
that uncompressed training had reached.

    python -m benchmarks.second_moment --model recurrent --rates 0.25,1,2 --seeds 101 --json second_moment.json

Results are added to the JSON file as they come, and what is in it already is not run again.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.low_bits import LEARNING_RATES
from benchmarks.runs import ResultsFile, Runs, SeedList, mean_and_error, warmup_then_cosine
from benchmarks.simulated import DENSE, Exchange, parse, training, validation_loss
from benchmarks.small_models import make_model, text_of
from recipes.gpt import GPT

HALF = 'dense {"dtype":"bfloat16"}'
Correction = Literal["none", "squares"]
BETA2 = 0.95
RATES = {**LEARNING_RATES, "lstm": 4e-3, "gpt": 1e-3}  # the best without compression
CASES: tuple[tuple[str, Correction], ...] = (
    (DENSE, "none"),
    (HALF, "none"),  # how far apart runs are anyway
    ("loco1", "none"),
    ("loco1", "squares"),
    ("loco2", "none"),
    ("loco2", "squares"),
    ("loco", "none"),
    ("loco", "squares"),
    ("loco4", "none"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What all runs of one file share. After its warm-up the learning rate is constant, or `decays` to zero."""

    context: int = 16
    batch: int = 8
    workers: int = 4
    steps: int = 400
    warmup_steps: int = 20
    evaluate_every: int = 20
    windows: int = 512
    decays: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One training run. `energy_ratio`: mean square of the exact mean gradient over that of the decoded one."""

    model: str
    rate: float
    variant: str
    correction: Correction
    seed: int
    losses: list[float]
    energy_ratio: float


class LongShortTerm(nn.Module):
    """Two layers of LSTM between embedding and output head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        logits_BTV: Tensor = self.head(self.layers(self.embedding(tokens_BT))[0])
        return logits_BTV


def model_of(kind: str, context: int) -> nn.Module:
    """A small model of the study of few bits, or one of these: of 1.2 (``lstm``) and 2.5 million parameters."""
    match kind:
        case "lstm":
            return LongShortTerm(256)
        case "gpt":
            return GPT(256, 3, 4, context)
    return make_model(kind, context)


def train(kind: str, rate: float, variant: str, correction: Correction, seed: int, setting: Setting) -> Run:
    """The whole run; deterministic."""
    torch.manual_seed(seed)
    model = model_of(kind, setting.context)
    exchange = Exchange(model, parse(variant), setting.workers, "ddp", seed, corrects=correction == "squares")
    highest = RATES[kind] * rate
    optimizer = torch.optim.AdamW(model.parameters(), lr=highest, betas=(0.9, BETA2), weight_decay=0.1)

    def rate_of(step: int) -> float:
        return highest * warmup_then_cosine(step, setting, floor=0.0 if setting.decays else 1.0)

    losses, ratios = [], []
    for number, step in enumerate(training(model, exchange, optimizer, text_of(kind, "train"), setting, rate_of, seed)):
        exact = [torch.stack(each).mean(0) for each in zip(*step.gradients, strict=True)]
        ratios.append(energy(exact) / energy(step.means))
        if (number + 1) % setting.evaluate_every == 0:
            loss = validation_loss(model, text_of(kind, "validation"), setting.windows, setting.context)
            losses.append(round(loss, 5))
    return Run(
        model=kind,
        rate=rate,
        variant=variant,
        correction=correction,
        seed=seed,
        losses=losses,
        energy_ratio=round(statistics.fmean(ratios[setting.warmup_steps :]), 4),
    )


def energy(tensors: list[Tensor]) -> float:
    return sum(x.square().sum().item() for x in tensors)


def extra_steps(run: Run, dense: Run, share: float) -> float | None:
    """Per cent more steps than uncompressed training took to its loss after `share` of the run; None: not reached.

    Both curves are means of three evaluations in a row.
    """
    ours, theirs = smooth(run.losses), smooth(dense.losses)
    target = theirs[at := round(share * len(theirs)) - 1]
    for index, loss in enumerate(ours):
        if loss <= target:
            early = (target - loss) / (ours[index - 1] - loss) if index else 0.0
            return 100 * ((index - early + 1) / (at + 1) - 1)
    return None


def smooth(losses: list[float]) -> list[float]:
    return [statistics.fmean(losses[max(0, at - 1) : at + 2]) for at in range(len(losses))]


def read_runs(path: Path) -> Runs[Run]:
    """The runs of a file, in its own setting."""
    return Runs(path, Setting(**json.loads(path.read_text())["setting"]), Run)


def learning_curve(others: Sequence[Runs[Run]], model: str, rate: float) -> float | None:
    """How fast the last loss of whole uncompressed runs falls with their length: d log loss / d log steps.

    Least squares over all lengths, each seed with its own level; None: only one length.
    """
    points: dict[int, list[tuple[float, float]]] = {}
    for runs in others:
        for run in runs.of(model=model, rate=rate, variant=DENSE):
            points.setdefault(run.seed, []).append((math.log(runs.setting.steps), math.log(run.losses[-1])))
    covariance = variance = 0.0
    for seed in points.values():
        at, level = (statistics.fmean(each) for each in zip(*seed, strict=True))
        covariance += sum((x - at) * (y - level) for x, y in seed)
        variance += sum((x - at) ** 2 for x, _ in seed)
    return covariance / variance if variance else None


def longer_run(run: Run, dense: Run, slope: float) -> float:
    """Per cent more steps of a whole run, its schedule as much longer, to the last loss of uncompressed training."""
    return 100 * math.expm1(math.log(run.losses[-1] / dense.losses[-1]) / -slope)


def table(results: Runs[Run], others: Sequence[Runs[Run]] = ()) -> Table:
    """Final loss and steps over those of the uncompressed run of the same model, rate and seed: means of the seeds."""
    shares = (0.25, 0.5, 0.75)
    heads = [f"extra steps at {share:.0%}, %" for share in shares]
    heads = [*heads, "longer run, %", "exact over decoded"]
    found = Table("model", "rate", "variant", "correction", "seeds", "loss, %", *heads)
    groups: dict[tuple[str, float, str, str], list[tuple[Run, Run]]] = {}
    for run in results.runs:
        dense = results.get(model=run.model, rate=run.rate, variant=DENSE, seed=run.seed)
        if dense is not None and run.variant != DENSE:
            groups.setdefault((run.model, run.rate, run.variant, run.correction), []).append((run, dense))
    for (model, rate, variant, correction), pairs in sorted(groups.items()):
        steps = [[extra_steps(run, dense, share) for run, dense in pairs] for share in shares]
        reached = [[each for each in group if each is not None] for group in steps]
        cells = [
            f"{statistics.fmean(part):+.1f}" if len(part) == len(pairs) else f"{len(part)} of {len(pairs)} reach it"
            for part in reached
        ]
        gap = statistics.fmean(100 * (run.losses[-1] / dense.losses[-1] - 1) for run, dense in pairs)
        ratio = statistics.fmean(run.energy_ratio for run, _ in pairs)
        slope = learning_curve([results, *others], model, rate)
        longer = "" if slope is None else mean_and_error([longer_run(run, dense, slope) for run, dense in pairs], 1)
        names = (model, f"{rate:g}", variant, correction, str(len(pairs)))
        found.add_row(*names, f"{gap:+.2f}", *cells, longer, f"{ratio:.2f}")
    return found


def main(
    model: Annotated[list[str] | None, typer.Option(help="mixer, recurrent, lstm, ...; repeat")] = None,
    rates: Annotated[str, typer.Option(help="times each model's learning rate, separated by commas")] = "0.25,1,2",
    seeds: SeedList = "101",
    cases: Annotated[str | None, typer.Option(help="loco1:squares,...; None: all")] = None,
    workers: Annotated[int, typer.Option(help="simulated ranks")] = 4,
    decays: Annotated[bool, typer.Option(help="a cosine to zero instead of a constant learning rate")] = False,
    steps: Annotated[int, typer.Option(help="of a run")] = Setting().steps,
    batch: Annotated[int, typer.Option(help="sequences per rank and step")] = Setting().batch,
    context: Annotated[int, typer.Option(help="bytes of a sequence")] = Setting().context,
    other_lengths: Annotated[list[Path] | None, typer.Option(help="results of whole runs of other lengths")] = None,
    json_path: ResultsFile = None,
) -> None:
    """Train, compare, and add to the results file."""
    torch.set_num_threads(1)
    setting = Setting(workers=workers, decays=decays, steps=steps, batch=batch, context=context)
    chosen = CASES if cases is None else [tuple(case.rsplit(":", 1)) for case in cases.split(",")]
    results = Runs(json_path, setting, Run)
    for seed in map(int, seeds.split(",")):
        for kind in model or ["mixer", "recurrent", "lstm"]:
            for rate in map(float, filter(None, rates.split(","))):
                for variant, correction in chosen:
                    case = {"model": kind, "rate": rate, "variant": variant, "correction": correction, "seed": seed}
                    if results.get(**case) is None:
                        results.add(train(kind, rate, variant, correction, seed, setting))
    Console(width=200).print(table(results, [read_runs(path) for path in other_lengths or []]))


if __name__ == "__main__":
    typer.run(main)
