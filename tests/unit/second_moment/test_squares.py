"""Squares travel beside gradients, and what a replaced method had not sent yet is for gradients alone."""

from __future__ import annotations

import torch
from torch import nn

from lowbit_strategy import QSGD, preset
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.engine.bucket import BucketLayout
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.ranks.ranks import Ranks
from lowbit_strategy.second_moment.exchange_steps import steps_until_due
from lowbit_strategy.second_moment.squares import SecondMoment
from testing.worlds.one_tensor import gaussian
from testing.worlds.simulated import SimulatedWorld

LAYOUT = BucketLayout((("weight", 0),))


def test_a_leftover_does_not_go_with_squares() -> None:
    world, module = SimulatedWorld(2), nn.Linear(64, 48, bias=False)
    specs = [TensorSpec("weight", (48, 64))]
    syncs = [
        GradientSync(preset("loco1"), specs, Ranks.flat(comm), torch.device("cpu"), sharded=False)
        for comm in world.comms
    ]
    for sync in syncs:
        SecondMoment(sync, module)

    def step(x: torch.Tensor) -> None:
        buffers = [x.reshape(-1).clone() for _ in syncs]
        world.reduce(syncs, LAYOUT, buffers, buffers)

    due = next(age for age in range(1, 100) if steps_until_due(age - 1, 0) == 1)
    for age in range(due):
        step(gaussian((48, 64), age))
    for sync in syncs:
        sync.use(QSGD())
    waiting = [sync.state.export_unsent("weight") for sync in syncs]
    step(torch.zeros(48, 64))  # squares of the step before are exchanged, and there is no gradient to add it to
    for sync, leftover in zip(syncs, waiting, strict=True):
        assert leftover is not None
        assert leftover.any()
        torch.testing.assert_close(sync.state.export_unsent("weight"), leftover)
