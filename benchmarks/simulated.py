"""What studies of loss share: W ranks simulated in one process with the real engines, and their training on text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from lowbit_strategy.collectives.layout import dim0_row_numel
from lowbit_strategy.engine.bucket import BucketLayout
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.engine.learning_rates import LearningRates
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.registry import from_options
from lowbit_strategy.model.parameters import describe_parameters
from lowbit_strategy.ranks.ranks import Ranks
from lowbit_strategy.residual_rules.followed_rates import FollowedRates
from lowbit_strategy.second_moment.squares import SecondMoment
from testing.worlds.simulated import SimulatedWorld

Layout = Literal["ddp", "fsdp"]
DENSE = "dense"


def parse(variant: str) -> Compressor:
    """``name`` or ``name {JSON options}``."""
    name, _, options = variant.partition(" ")
    return from_options(name, json.loads(options) if options else {})


class Exchange(LearningRates):
    """The gradients of W simulated ranks, reduced in one bucket.

    Args:
        model: What is trained.
        compressor: Gives every parameter its method.
        workers: W.
        layout: Two hops, or one.
        seed: Of all randomness in codes.
        follows_rate: As in `SyncOptions`.
        corrects: Adam's second moment is corrected (``second_moment=True``).
    """

    def __init__(
        self,
        model: nn.Module,
        compressor: Compressor,
        workers: int,
        layout: Layout,
        seed: int,
        *,
        follows_rate: bool = False,
        corrects: bool = False,
    ) -> None:
        self.world = SimulatedWorld(workers)
        self.specs = describe_parameters(model)
        self.layout = layout
        self.syncs = [
            GradientSync(
                compressor, self.specs, Ranks.flat(comm), torch.device("cpu"), sharded=layout == "fsdp", seed=seed
            )
            for comm in self.world.comms
        ]
        self._rate = 1.0  # of the step
        for sync in self.syncs if follows_rate else ():
            sync.ask_rates_of(self)
            FollowedRates(sync)
        self.corrections = [SecondMoment(sync, model) for sync in self.syncs] if corrects else []
        at, entries = 0, []
        for spec in self.specs:
            entries.append((spec.name, at))
            at += spec.numel if layout == "ddp" else dim0_row_numel(spec.shape, workers)
        self.bucket = BucketLayout(tuple(entries), row_numel=None if layout == "ddp" else at)
        self.row_numel = at

    def mean(self, gradients: Sequence[Sequence[Tensor]], rate: float = 1.0) -> list[Tensor]:
        """Every parameter's mean gradient as rank 0 (FSDP2: its owners) has it, for a step at this learning rate."""
        self._rate = rate
        for sync in self.syncs:
            sync.begin_step()
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

    def rates(self) -> dict[str, float]:
        return {spec.name: self._rate for spec in self.specs}

    def correct_(self, optimizer: Optimizer) -> None:
        """It has stepped on the means."""
        for correction in self.corrections[:1]:  # one model stands for that of all ranks
            correction.correct_(optimizer)

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


class Batches(Protocol):
    """What `training` needs of a setting."""

    @property
    def batch(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def workers(self) -> int: ...
    @property
    def steps(self) -> int: ...


class Step(NamedTuple):
    """One that the optimizer has taken: mean loss, gradients by rank and parameter, and what came of them."""

    loss: float
    gradients: list[tuple[Tensor, ...]]
    means: list[Tensor]


def training(
    model: nn.Module,
    exchange: Exchange,
    optimizer: Optimizer,
    text: Tensor,
    setting: Batches,
    rate: Callable[[int], float],
    seed: int,
) -> Iterator[Step]:
    """The steps of a run; deterministic. `rate` gives the learning rate of a step."""
    params = list(model.parameters())
    order = torch.Generator().manual_seed(10_000 + seed)
    for step in range(setting.steps):
        gradients, losses = [], []
        for _ in range(setting.workers):
            starts = torch.randint(text.numel() - setting.context - 1, (setting.batch,), generator=order)
            loss = loss_of(model, text, starts, setting.context)
            gradients.append(torch.autograd.grad(loss, params))
            losses.append(loss.item())
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        means = exchange.mean(gradients, rate(step))
        for param, mean in zip(params, means, strict=True):
            param.grad = mean.clone()
        optimizer.step()
        exchange.correct_(optimizer)
        yield Step(sum(losses) / len(losses), gradients, means)


def loss_of(model: nn.Module, text: Tensor, starts: Tensor, context: int) -> Tensor:
    windows = text[starts[:, None] + torch.arange(context + 1)].long()
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def validation_loss(model: nn.Module, text: Tensor, num_windows: int, context: int) -> float:
    """Of windows that are spread evenly over the text."""
    starts = torch.arange(num_windows) * ((text.numel() - context - 1) // num_windows)
    parts = starts.split(512)
    return sum(loss_of(model, text, part, context).item() * len(part) for part in parts) / num_windows
