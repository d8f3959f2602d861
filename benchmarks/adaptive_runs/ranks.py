"""Simulated ranks with a controller, or with one compressor from start to end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lowbit_strategy.control.base import Controller
from lowbit_strategy.engine.bucket import BucketLayout, Entry
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.dense import Dense
from lowbit_strategy.model.parameters import describe_parameters
from lowbit_strategy.ranks.ranks import Ranks
from lowbit_strategy.telemetry.custom_loop import LoopClock, adapt
from testing.worlds.threaded import ThreadedWorld


class ThreadedRanks:
    """DDP's all-reduce over W ranks in threads; every rank has its engine and its driver.

    Args:
        model: Gives names and shapes.
        method: A compressor, or a controller.
        clock: Time, for controllers.
        world_size: W.
        seed: Of the methods' randomness.
    """

    def __init__(
        self, model: nn.Module, method: Compressor | Controller, clock: LoopClock, world_size: int, seed: int
    ) -> None:
        self.world = ThreadedWorld(world_size)
        self.specs = describe_parameters(model)
        compressor = method if isinstance(method, Compressor) else Dense()
        self.syncs = [
            GradientSync(compressor, self.specs, Ranks.flat(comm), torch.device("cpu"), scatter=False, seed=seed)
            for comm in self.world.comms
        ]
        self.drivers = [] if isinstance(method, Compressor) else [adapt(sync, method, clock) for sync in self.syncs]
        entries, at = [], 0
        for spec in self.specs:
            entries.append(Entry(spec.name, at))
            at += spec.numel
        self.layout = BucketLayout(tuple(entries))
        self.numel = at

    def mean_(self, model: nn.Module, gradients: Sequence[Sequence[Tensor]]) -> None:
        """Give the model the mean gradient of all ranks."""
        buffers = [torch.cat([gradient.reshape(-1) for gradient in rank]) for rank in gradients]
        self.world.reduce(self.syncs, self.layout, buffers, buffers)
        parts = buffers[0].split([spec.numel for spec in self.specs])
        for parameter, part in zip(model.parameters(), parts, strict=True):
            parameter.grad = part.view_as(parameter).clone()

    @property
    def sent_nbytes(self) -> float:
        """By one rank since the start, telemetry of the controller included; mean over ranks."""
        return sum(comm.sent_nbytes for comm in self.world.comms) / self.world.size

    @property
    def num_switches(self) -> int:
        return len(self.drivers[0].events) if self.drivers else 0

    def light_share(self) -> float:
        """Share of all elements that have the lightest level now."""
        if not self.drivers:
            return 0.0
        driver = self.drivers[0]
        lightest = driver.controller.levels[0]
        matrices = [spec for spec in self.specs if spec.ndim > 1]
        light = sum(s.numel for s in matrices if driver.controller.levels[driver.levels.get(s.name, 0)] == lightest)
        return light / sum(spec.numel for spec in matrices)

    def close(self) -> None:
        self.world.close()
