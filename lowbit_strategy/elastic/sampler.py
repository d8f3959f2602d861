"""Chooses the samples of a replica while the number of replicas changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized

import torch
from torch.utils.data import Dataset, DistributedSampler


class ElasticSampler(DistributedSampler[int]):
    """Gives the replicas of an elastic run different samples of one stream: permutation after permutation of a dataset.

    When replicas meet, they agree on how far the stream has been used. From there, rank r of all W takes every W-th
    sample, starting with number r, until they meet again; then the stream continues after the farthest sample used.
    Nothing is repeated. Samples that a slower replica skipped, or that a lost one had, are never used.

    It is a `DistributedSampler`, so frameworks do not replace it. Each replica's epoch has the length of the dataset,
    regardless of the number of replicas, so a framework's plans in epochs are valid. The stream continues across
    epochs. Ranks that share one model share its samples and its epoch.

    Args:
        dataset: Dataset of a known length, the same on all replicas.
        shuffle: Whether to permute the dataset.
        seed: Seed of the permutations; the same on all replicas.
        rank: Rank in its replica.
        num_ranks: Ranks of the replica; 1 on all of them if the framework divides its samples among them, as Accelerate
            does.

    Attributes:
        on_begin: Called before the first sample of an epoch is drawn.
    """

    def __init__(
        self, dataset: Dataset[int], *, shuffle: bool = True, seed: int = 0, rank: int = 0, num_ranks: int = 1
    ) -> None:
        super().__init__(dataset, num_replicas=num_ranks, rank=rank, shuffle=shuffle, seed=seed)
        assert isinstance(dataset, Sized)
        self._size = len(dataset)
        self.on_begin: Callable[[], object] = lambda: None
        self._rank, self._world_size = rank, num_ranks
        self._start = 0  # position in the stream when members last met
        self._drawn = 0  # samples drawn by this replica since then
        self._permutation: tuple[int, list[int]] = (-1, [])

    def __len__(self) -> int:
        return -(-self._size // self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        self.on_begin()
        for _ in range(len(self)):
            at = self._start + self._drawn * self._world_size + self._rank
            self._drawn += 1
            yield self._sample(at)

    @property
    def position(self) -> int:
        """How far the stream has been used, as far as this replica knows."""
        return self._start + self._drawn * self._world_size

    def go_on(self, start: int, place: int, num_members: int) -> None:
        """Continue the stream after members have met.

        Args:
            start: How far the stream has been used.
            place: This replica's place among all replicas.
            num_members: Number of replicas.
        """
        self._start, self._drawn = start, 0
        self._rank, self._world_size = place * self.num_replicas + self.rank, num_members * self.num_replicas

    def _sample(self, at: int) -> int:
        number, place = divmod(at, self._size)
        if self._permutation[0] != number:
            generator = torch.Generator().manual_seed(self.seed + number)
            order = torch.randperm(self._size, generator=generator) if self.shuffle else torch.arange(self._size)
            self._permutation = (number, order.tolist())
        return self._permutation[1][place]
