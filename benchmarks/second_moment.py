"""What compression's noise does to Adam's second moment, and what it would give to take it out.

Adam divides by the root of ``v``, the average of squared gradients. Noise adds its own square, so steps become smaller;
below the best learning rate that is simply slower. Here training with few bits is repeated with ``v`` corrected after
every step by what an observer of all gradients knows: for the whole tensor, element by element, from sketches that
ranks could send, or from squares of their own gradients that ranks exchange rarely. The measure is the number of
steps to the loss that uncompressed training had reached.

    python -m benchmarks.second_moment --model recurrent --rates 0.25,1,2 --seeds 101 --json second_moment.json

Results are added to the JSON file as they come, and what is in it already is not run again.
"""

from __future__ import annotations

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
from torch.nn import functional as F

from benchmarks.low_bits import LEARNING_RATES
from benchmarks.quality import DENSE, Exchange, parse
from benchmarks.runs import Runs
from benchmarks.small_models import make_model, text_of

Correction = Literal["none", "tensor", "element", "sketch", "squares"]
BETA2 = 0.95
SKETCH_NUMEL, SKETCH_EVERY, SKETCH_KEPT = 64, 8, 0.9
SQUARES_EVERY, SQUARES_BLOCK, SQUARES_KEPT, SQUARES_FLOOR = 16, 128, 0.75, 0.01
CASES: tuple[tuple[str, Correction], ...] = (
    (DENSE, "none"),
    ("loco1", "none"),
    ("loco1", "tensor"),
    ("loco1", "element"),
    ("loco1", "sketch"),
    ("loco1", "squares"),
    ("loco2", "none"),
    ("loco2", "tensor"),
    ("loco2", "sketch"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What all runs of one file share. The learning rate is constant after its warm-up."""

    context: int = 16
    batch: int = 8
    workers: int = 4
    steps: int = 400
    warmup_steps: int = 20
    evaluate_every: int = 20
    windows: int = 512


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
    """Two layers of LSTM between embedding and output head, 1.2 million parameters."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        logits_BTV: Tensor = self.head(self.layers(self.embedding(tokens_BT))[0])
        return logits_BTV


class SecondMoment:
    """Corrects ``exp_avg_sq``: ``v += (1 - beta2) * (exact**2 - decoded**2)``, or the same with a ratio per tensor."""

    def __init__(self, correction: Correction, seed: int) -> None:
        self.correction, self.seed = correction, seed
        self._kept: dict[int, tuple[float, float]] = {}

    def correct_(self, step: int, optimizer: torch.optim.Optimizer, exact: list[Tensor]) -> None:
        if self.correction == "none":
            return
        parameters = [param for group in optimizer.param_groups for param in group["params"]]
        for at, (param, true) in enumerate(zip(parameters, exact, strict=True)):
            decoded, v = param.grad, optimizer.state[param]["exp_avg_sq"]
            if self.correction == "element":
                v.addcmul_(decoded, decoded, value=BETA2 - 1).addcmul_(true, true, value=1 - BETA2).clamp_min_(0)
            else:
                ratio = self._ratio(at, step, true, decoded)
                v.addcmul_(decoded, decoded, value=(1 - BETA2) * (ratio - 1))

    def _ratio(self, at: int, step: int, true: Tensor, decoded: Tensor) -> float:
        """Of mean squares, both averaged over steps; at most 1."""
        sketched = self.correction == "sketch"
        if not sketched or step < 4 * SKETCH_EVERY or step % SKETCH_EVERY == 0:
            seen = sketch(true, step * 7919 + at + self.seed) if sketched else true
            old = self._kept.get(at, (0.0, 0.0))
            new = (seen.square().sum().item(), decoded.square().sum().item())
            kept = SKETCH_KEPT if sketched else 0.95
            self._kept[at] = (kept * old[0] + (1 - kept) * new[0], kept * old[1] + (1 - kept) * new[1])
        numerator, denominator = self._kept[at]
        return min(1.0, max(0.05, numerator / max(denominator, 1e-30)))


class LocalSquares:
    """Writes ``exp_avg_sq`` from two parts: what every rank knows of blocks, and what ranks exchange rarely.

    1. in every step: ``E = beta2 * E + (1 - beta2) * (mean square of the decoded gradient)`` per block of 128
    2. in every step: ranks add up the squares of their own exact gradients
    3. every 16 steps, oftener at first: the ranks' mean of those sums (8 bits per element in a real exchange; float32
       here), times the ratio of the exact mean's energy to theirs per tensor (sketches), over the blocks' decoded mean
       square since the last time: the shape ``q``, averaged with the one before
    4. ``exp_avg_sq = q * E``
    """

    def __init__(self, parameters: Sequence[Tensor], seed: int) -> None:
        self.seed = seed
        self._parts = [_Shape(torch.zeros_like(param)) for param in parameters]
        self._since = 0

    def correct_(self, step: int, optimizer: torch.optim.Optimizer, gradients: list[tuple[Tensor, ...]]) -> None:
        """`gradients`: of every rank, before compression."""
        parameters = [param for group in optimizer.param_groups for param in group["params"]]
        self._since += 1
        exchanges = is_due(step)
        for at, (param, part) in enumerate(zip(parameters, self._parts, strict=True)):
            assert param.grad is not None
            own = torch.stack([each[at] for each in gradients])
            energies = block_means(param.grad.square())
            part.squares.add_(own.square().mean(0))
            part.decoded = part.decoded + energies
            part.average = BETA2 * part.average + (1 - BETA2) * energies
            if exchanges:
                part.learn(own, sketch(own.mean(0), step * 7919 + at + self.seed), self._since, step)
            optimizer.state[param]["exp_avg_sq"].copy_(part.ratio * spread(part.average, param))
        if exchanges:
            self._since = 0


@dataclass(slots=True)
class _Shape:
    """One parameter's part of `LocalSquares`."""

    squares: Tensor
    decoded: Tensor | float = 0.0
    average: Tensor | float = 0.0
    ratio: Tensor | float = 0.0
    exact_energy: float = 0.0
    own_energy: float = 0.0

    def learn(self, own: Tensor, seen: Tensor, num_steps: int, step: int) -> None:
        """Ranks have exchanged their squares of the last `num_steps`."""
        kept = SQUARES_KEPT if step > 32 else min(SQUARES_KEPT, BETA2**num_steps) if step else 0.0
        self.exact_energy = kept * self.exact_energy + (1 - kept) * seen.square().sum().item()
        self.own_energy = kept * self.own_energy + (1 - kept) * own.square().mean(0).sum().item()
        shared = min(1.0, max(0.5 / len(own), self.exact_energy / max(self.own_energy, 1e-30)))
        squares = self.squares / num_steps
        squares = torch.maximum(squares, SQUARES_FLOOR * spread(block_means(squares), squares))
        ratio = shared * squares / spread(self.decoded / num_steps, squares).clamp_min(1e-30)
        self.ratio = (kept * self.ratio + (1 - kept) * ratio).clamp(0, 100)
        self.squares.zero_()
        self.decoded = 0.0


def is_due(step: int) -> bool:
    """Whether ranks exchange squares: at first in every step, then ever more rarely, at last every 16 steps."""
    due = 0
    while due < step:
        due += min(SQUARES_EVERY, max(1, due // 4))
    return due == step


def block_means(x: Tensor) -> Tensor:
    return F.pad(x.flatten(), (0, -x.numel() % SQUARES_BLOCK)).view(-1, SQUARES_BLOCK).mean(1)


def spread(blocks: Tensor | float, x: Tensor) -> Tensor:
    """Every element of `x` has its block's value."""
    return torch.as_tensor(blocks).repeat_interleave(SQUARES_BLOCK)[: x.numel()].view_as(x)


def sketch(x: Tensor, seed: int) -> Tensor:
    """Sums of elements with random signs: linear, so that ranks can sum theirs, and of the same square on average."""
    signs = torch.randint(0, 2, (x.numel(),), generator=torch.Generator().manual_seed(seed)) * 2.0 - 1
    return F.pad(x.flatten() * signs, (0, -x.numel() % SKETCH_NUMEL)).view(-1, SKETCH_NUMEL).sum(0)


def train(kind: str, rate: float, variant: str, correction: Correction, seed: int, setting: Setting) -> Run:
    """The whole run; deterministic."""
    torch.manual_seed(seed)
    model = LongShortTerm() if kind == "lstm" else make_model(kind, setting.context)
    parameters = list(model.parameters())
    exchange = Exchange(model, parse(variant), setting.workers, "ddp", seed)  # type: ignore[arg-type]
    highest = LEARNING_RATES.get(kind, 4e-3) * rate
    optimizer = torch.optim.AdamW(parameters, lr=highest, betas=(0.9, BETA2), weight_decay=0.1)
    second_moment, squares = SecondMoment(correction, seed), LocalSquares(parameters, seed)
    text, order = text_of(kind, "train"), torch.Generator().manual_seed(10_000 + seed)
    losses, ratios = [], []
    for step in range(setting.steps):
        gradients = []
        for _ in range(setting.workers):
            starts = torch.randint(text.numel() - setting.context - 1, (setting.batch,), generator=order)
            gradients.append(torch.autograd.grad(loss_of(model, text, starts, setting.context), parameters))
        exact = [torch.stack(each).mean(0) for each in zip(*gradients, strict=True)]
        means = exact if variant == DENSE else exchange.mean(gradients)
        for param, mean in zip(parameters, means, strict=True):
            param.grad = mean.clone()
        ratios.append(energy(exact) / energy(means))
        for group in optimizer.param_groups:
            group["lr"] = highest * min(1.0, (step + 1) / setting.warmup_steps)
        optimizer.step()
        if correction == "squares":
            squares.correct_(step, optimizer, gradients)
        else:
            second_moment.correct_(step, optimizer, exact)
        if (step + 1) % setting.evaluate_every == 0:
            losses.append(round(validation_loss(model, kind, setting), 5))
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


def loss_of(model: nn.Module, text: Tensor, starts: Tensor, context: int) -> Tensor:
    windows = text[starts[:, None] + torch.arange(context + 1)].long()
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def validation_loss(model: nn.Module, kind: str, setting: Setting) -> float:
    text = text_of(kind, "validation")
    starts = torch.arange(setting.windows) * ((text.numel() - setting.context - 1) // setting.windows)
    return loss_of(model, text, starts, setting.context).item()


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


def table(results: Runs[Run]) -> Table:
    """Final loss and steps over those of the uncompressed run of the same model, rate and seed."""
    shares = (0.25, 0.5, 0.75)
    heads = [f"extra steps at {share:.0%}, %" for share in shares]
    found = Table("model", "rate", "seed", "variant", "correction", "loss, %", *heads, "exact over decoded")
    for run in results.runs:
        dense = results.get(model=run.model, rate=run.rate, variant=DENSE, seed=run.seed)
        if dense is None or run.variant == DENSE:
            continue
        steps = [extra_steps(run, dense, share) for share in shares]
        cells = ["not reached" if each is None else f"{each:+.1f}" for each in steps]
        gap = f"{100 * (run.losses[-1] / dense.losses[-1] - 1):+.2f}"
        names = (run.model, f"{run.rate:g}", str(run.seed), run.variant, run.correction)
        found.add_row(*names, gap, *cells, f"{run.energy_ratio:.2f}")
    return found


def main(
    model: Annotated[list[str] | None, typer.Option(help="mixer, recurrent, lstm, ...; repeat")] = None,
    rates: Annotated[str, typer.Option(help="times each model's learning rate, separated by commas")] = "0.25,1,2",
    seeds: Annotated[str, typer.Option(help="seeds, separated by commas")] = "101",
    json_path: Annotated[Path | None, typer.Option("--json", help="results file, continued if it exists")] = None,
) -> None:
    """Train, compare, and add to the results file."""
    torch.set_num_threads(1)
    setting = Setting()
    results = Runs(json_path, setting, Run)
    for seed in map(int, seeds.split(",")):
        for kind in model or ["mixer", "recurrent", "lstm"]:
            for rate in map(float, rates.split(",")):
                for variant, correction in CASES:
                    case = {"model": kind, "rate": rate, "variant": variant, "correction": correction, "seed": seed}
                    if results.get(**case) is None:
                        results.add(train(kind, rate, variant, correction, seed, setting))
    Console(width=200).print(table(results))


if __name__ == "__main__":
    typer.run(main)
