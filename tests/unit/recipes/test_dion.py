"""Dion: only the ranks' mean gradient counts, whatever each rank's momentum is."""

from __future__ import annotations

import pytest
import torch

from recipes.dion import Dion
from testing.worlds.one_tensor import OneTensor, gaussian

DION = Dion(rank=4, momentum=0.9)
SHAPE = (48, 32)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_take_the_steps_of_one_rank_with_the_mean_gradient(world_size: int) -> None:
    together, alone = OneTensor(DION, SHAPE, world_size), OneTensor(DION, SHAPE, 1)
    for step in range(5):
        gradients = [gaussian(SHAPE, seed=10 * step + rank) for rank in range(world_size)]
        found = together.step(gradients)
        expected = alone.step([torch.stack(gradients).mean(0)])
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    momenta = torch.stack([together.state(rank)["momentum"] for rank in range(world_size)])
    assert not torch.allclose(momenta[0], momenta[1], atol=0.1)
    torch.testing.assert_close(momenta.mean(0), alone.state(0)["momentum"], rtol=1e-3, atol=1e-4)


def test_momentum_keeps_what_the_step_has_not_taken() -> None:
    """With no momentum, a gradient of the step's rank leaves nothing; of a larger one the rest stays."""
    one = OneTensor(Dion(rank=4, momentum=0.0), SHAPE, 2)
    low_rank = gaussian((48, 4), 0) @ gaussian((4, 32), 1)
    one.step([low_rank, low_rank])
    assert one.state(0)["momentum"].abs().max() < 1e-4 * low_rank.abs().max()
    one.step([gaussian(SHAPE, 2)] * 2)
    assert one.state(0)["momentum"].abs().max() > 0.1


def test_directions_are_equally_long() -> None:
    step = OneTensor(DION, SHAPE, 2).step([gaussian(SHAPE, 3)] * 2).view(SHAPE)
    singular = torch.linalg.svdvals(step)
    assert singular[:4].min() > 0.5 * (48 / 32) ** 0.5
    assert singular[4:].max() < 1e-5


def test_an_overflow_reaches_the_result_and_no_state() -> None:
    one = OneTensor(DION, SHAPE, 2)
    one.step([gaussian(SHAPE, 4)] * 2)
    before = {name: value.clone() for name, value in one.state(0).items()}
    bad = gaussian(SHAPE, 5)
    bad[0, 0] = torch.inf
    assert not one.step([gaussian(SHAPE, 6), bad]).isfinite().all()
    assert all(torch.equal(value, before[name]) for name, value in one.state(0).items())
