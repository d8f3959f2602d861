"""Copies of one small model that take local steps, ranks in threads."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

import torch
from torch import Tensor, nn

from lowbit_strategy import (
    Dense,
    OuterRule,
)
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.local_steps.outer_sync import OuterSync
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.model.parameters import describe_parameters
from lowbit_strategy.ranks.ranks import Ranks
from testing.worlds.threaded import ThreadedWorld


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 8))


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_buffers())


class Replicas:
    """Copies of one model, each with an optimizer and local steps of its own."""

    def __init__(self, rule: OuterRule, compressor: Compressor | None = None, world_size: int = 2) -> None:
        torch.manual_seed(0)
        first = net()
        self.models = [copy.deepcopy(first) for _ in range(world_size)]
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in self.models]
        self.world = ThreadedWorld(world_size)
        self.outers, cpu = [], torch.device("cpu")
        for model, comm in zip(self.models, self.world.comms, strict=True):
            sync = GradientSync(compressor or Dense(), describe_parameters(model), Ranks.flat(comm), cpu, sharded=False)
            buffers = functools.partial(_buffers, model)
            self.outers.append(OuterSync(sync, dict(model.named_parameters()), rule, buffers=buffers))

    def together(self, call: Callable[[int], Any]) -> list[Any]:
        futures = [self.world._threads.submit(call, rank) for rank in range(len(self.models))]
        wait(futures)
        return [future.result() for future in futures]

    def local_step(self, rank: int, seed: int) -> None:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * rank + seed))
        self.optimizers[rank].zero_grad()
        (self.models[rank](x) - torch.tanh(x[:, :8])).square().mean().backward()
        self.optimizers[rank].step()

    def step(self, seed: int) -> None:
        for rank in range(len(self.models)):
            self.local_step(rank, seed)
        self.together(lambda rank: self.outers[rank].after_step(0.1))

    def finish(self) -> None:
        self.together(lambda rank: self.outers[rank].finish())
        self.world.close()

    def weights(self, rank: int) -> Tensor:
        model = self.models[rank]
        tensors = (*model.parameters(), *model.buffers())
        return torch.cat([each.detach().reshape(-1) for each in tensors if each.is_floating_point()])
