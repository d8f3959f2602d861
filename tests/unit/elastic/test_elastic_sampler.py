"""Which samples replicas get while their number changes."""

from __future__ import annotations

import random
from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lowbit_strategy import ElasticSampler

DATA = TensorDataset(torch.arange(50))


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_repeated_and_at_most_a_round_is_left_out(seed: int) -> None:
    """Replicas of different speeds, whose number changes in every round."""
    chance, start, seen, left_out = random.Random(seed), 0, set(), 0
    for _ in range(30):
        world_size = chance.randint(1, 4)
        samplers = [ElasticSampler(DATA, shuffle=False) for _ in range(world_size)]
        counts = [chance.randint(1, 6) for _ in range(world_size)]
        for rank, sampler in enumerate(samplers):
            sampler.go_on(start, rank, world_size)
            for k, index in enumerate(islice(iter(sampler), counts[rank])):
                at = start + k * world_size + rank
                assert index == at % 50
                assert at not in seen
                seen.add(at)
        end = max(sampler.position for sampler in samplers)
        left_out += end - start - sum(counts)
        assert end - start - sum(counts) < max(counts) * world_size
        start = end
    assert len(seen) + left_out == start


def test_equal_speeds_leave_nothing_out_and_permutations_follow_each_other() -> None:
    samplers = [ElasticSampler(DATA, seed=3) for _ in range(3)]
    for rank, sampler in enumerate(samplers):
        sampler.go_on(0, rank, 3)
    drawn = [list(islice(iter(sampler), 16)) for sampler in samplers]
    stream = [drawn[at % 3][at // 3] for at in range(48)]
    assert len(set(stream)) == 48
    for rank, sampler in enumerate(samplers):
        sampler.go_on(48, rank, 3)
        list(iter(sampler))
    assert samplers[0].position == 48 + 3 * 50


def test_an_epoch_is_as_long_whoever_is_there() -> None:
    sampler = ElasticSampler(DATA)
    assert len(sampler) == 50
    sampler.go_on(0, 1, 2)
    assert len(sampler) == 50
    assert sum(len(batch[0]) for batch in DataLoader(DATA, batch_size=4, sampler=sampler)) == 50


def test_ranks_of_one_replica_share_its_epoch() -> None:
    samplers = [ElasticSampler(DATA, shuffle=False, rank=rank, num_ranks=3) for rank in range(3)]
    drawn = [list(sampler) for sampler in samplers]
    assert [len(each) for each in drawn] == [17, 17, 17]
    assert sorted(index for each in drawn for index in each) == sorted([*range(50), 0])
    for sampler in samplers:
        sampler.go_on(51, 1, 2)  # the second of two replicas
    assert [next(iter(sampler)) for sampler in samplers] == [4, 5, 6]
