"""Several simulated ranks in one process, for tests of methods."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.engine.bucket import BucketLayout
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.ranks.ranks import Ranks
from testing.worlds.simulated import SimulatedWorld


class OneTensor:
    """One parameter ``p`` on W simulated ranks under DDP's layout.

    Args:
        compressor: With its exemptions.
        shape: Of the parameter.
        world_size: W.
    """

    def __init__(self, compressor: Compressor, shape: tuple[int, ...], world_size: int, seed: int = 0) -> None:
        self.world = SimulatedWorld(world_size)
        specs = [TensorSpec("p", shape)]
        self.syncs = [
            GradientSync(compressor, specs, Ranks.flat(comm), torch.device("cpu"), sharded=False, seed=seed)
            for comm in self.world.comms
        ]

    def step(self, gradients: Sequence[Tensor]) -> Tensor:
        """One optimizer step: the mean, which all ranks agree on."""
        buffers = [gradient.reshape(-1).clone() for gradient in gradients]
        self.world.reduce(self.syncs, BucketLayout((("p", 0),)), buffers, buffers)
        assert all(torch.equal(buffer.view(torch.uint8), buffers[0].view(torch.uint8)) for buffer in buffers)
        return buffers[0]

    def state(self, rank: int) -> dict[str, Tensor]:
        return self.syncs[rank].state.tensors("p")


def gaussian(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
