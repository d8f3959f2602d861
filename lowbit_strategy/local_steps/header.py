"""The header of a fragment's synchronization: a few numbers that are summed over ranks without compression."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SAMPLE_NUMEL = 256  # maximum number of elements from which ranks' drift is measured
NUM_FACTS = 4  # numbers in addition to the sample and one per rank


@dataclass(frozen=True, slots=True)
class Header:
    """``[done?, asks?, loss, ||s||^2, finite? of each rank, s, changes of buffers]``, with s a sample of the
    pseudo-gradient. Reading it waits for the device.

    Args:
        flat: float32: this rank's numbers; once they have arrived, the sums.
        world_size: Number of ranks that synchronize.
        sample_numel: Elements of s.
    """

    flat: Tensor
    world_size: int
    sample_numel: int

    @classmethod
    def of_rank(
        cls, rank: int, world_size: int, *, facts: Tensor, finite: Tensor, sample: Tensor, changes: Sequence[Tensor]
    ) -> Header:
        """One rank's header.

        Args:
            rank: The rank.
            world_size: Number of ranks.
            facts: Whether the rank is done, whether it asks, and its loss.
            finite: Whether its weights are finite.
            sample: A sample of its pseudo-gradient.
            changes: Changes of its buffers.
        """
        finite_W = torch.zeros(world_size, device=sample.device)
        finite_W[rank] = finite
        flat = torch.cat([facts, torch.dot(sample, sample).view(1), finite_W, sample, *changes])
        return cls(flat, world_size, len(sample))

    @property
    def all_done(self) -> bool:
        """Whether all ranks have stopped training."""
        return int(self.flat[0]) == self.world_size

    @property
    def asked(self) -> bool:
        """Whether any rank wants all ranks to do something together afterwards."""
        return bool(self.flat[1])

    @property
    def loss(self) -> float | None:
        """The mean of all ranks' losses; None if a rank does not know its loss, or it is not finite."""
        loss = float(self.flat[2]) / self.world_size
        return loss if math.isfinite(loss) else None

    @property
    def left_out(self) -> list[int]:
        """Ranks whose weights were not finite, which sent zeros."""
        finite_W = self.flat[NUM_FACTS : NUM_FACTS + self.world_size]
        return [rank for rank, finite in enumerate(finite_W.tolist()) if not finite]

    def means(self, share: float) -> tuple[Tensor, Tensor, Tensor]:
        """Means of ``||s||^2``, ``s`` and the changes of buffers, over ranks whose weights sum to `share`."""
        means, at = self.flat / (share or 1.0), NUM_FACTS + self.world_size
        return means[3], means[at : at + self.sample_numel], means[at + self.sample_numel :]
